"""What all ranks do, and fail, together; and how ranks that part ways are told. In reading order:

- `collective`: what all ranks do, and fail, together; a header before it
- `call_log`: notes of the calls that ranks make together
- `watchdog`: a thread that sees when ranks part ways, or one is dead
- `connections`: gloo's connections of this process, and an end to them
- `stacks`: where a thread of this process is
- `launch`: the process group of a launch that made none
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
