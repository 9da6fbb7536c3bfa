"""What all ranks do, and fail, together.

Read `collective` (the calls that everybody uses, as `dmp.ranks`), then how ranks that part ways are told: `call_log`,
`watchdog`, `connections`, `stacks`. `launch` makes the process group of a launch that made none.
"""

from dmp.ranks.collective import (
    PeerLost,
    RanksError,
    agree,
    control_group,
    entry,
    everyone,
    explain,
    from_first,
    meet,
    numbers,
    own_group,
    tell,
    together,
)

__all__ = [
    "PeerLost",
    "RanksError",
    "agree",
    "control_group",
    "entry",
    "everyone",
    "explain",
    "from_first",
    "meet",
    "numbers",
    "own_group",
    "tell",
    "together",
]
