"""`take_turn`: before a collective of torch's, that all ranks begin the same one.

[Note: turns] torch's collectives have no names: where one rank gathers a layer and another the next one, each takes the
other's numbers for its own, or gloo ends the process, as the sizes are. A header in front of each would cost as much as
small ones themselves. But programs repeat themselves: what followed a turn the last time, follows it again, and the
ranks have agreed on that once. So a rank that begins what follows goes on, and one that begins anything else
meets the others first. Where they do the same, that is what follows from now on; where they do not, it is told at once,
or, of those that have gone on, by the watchdog: they wait for this one, and nothing of another turn meets theirs.
"""

from __future__ import annotations

import torch.distributed as dist

from dmp.ranks import call_log
from dmp.ranks.exchange import gather_words


def take_turn(what: str, group: dist.ProcessGroup) -> None:
    """Return when it is known that all ranks of a group begin this next.

    Args:
        what: the same text on all ranks, and for messages: `gathering the weights of 'layers.0'`.

    Raises:
        RanksError: on every rank: they do not.
    """
    sequence = call_log.sequence_of(group)
    if sequence.follows.get(sequence.turn) != what:
        gather_words(what, [0, 0], group)
        sequence.follows[sequence.turn] = what
    sequence.turn = what
