"""What the server of the ranks imports first: garbage is not collected until `tests/imported.py`, its last, is there.

Each of some thousand collections looks at all that is imported by then.
"""

from __future__ import annotations

import gc

gc.disable()
