"""The battery that every sharder must pass. For tests; nothing here imports it. In reading order:

- `battery`: `check_sharder` runs the checks, and has all ranks raise what one found
- `subject`: what is checked, and on which plans
- `checks`: the checks of the battery
- `compare`: what differs from the plain module, in words
"""

from sharders.testing.battery import SharderCheckError, check_sharder

__all__ = ["SharderCheckError", "check_sharder"]
