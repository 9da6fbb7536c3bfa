"""`take_turn`: before a collective of torch's, or a step of an optimizer, that all ranks begin the same one.

[Note: turns] torch's collectives have no names: where one rank gathers a layer and another the next one, each takes the
other's numbers for its own, or gloo ends the process, as the sizes are. A header in front of each would cost as much as
small ones themselves. But programs repeat themselves: what followed a turn the last time, follows it again, and the
ranks have agreed on that once. So a rank that begins what follows goes on, and one that begins anything else meets the
others first. Where they do the same, that is what follows from now on; where they do not, it is told at once, or, of
those that have gone on, by the watchdog: they wait for this one, and nothing of another turn meets theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dmp.errors import RanksError
from dmp.ranks import call_log
from dmp.ranks.entry import entry
from dmp.ranks.exchange import gather_words, post_words, settle
from dmp.ranks.watchdog import PeerLost

_MOST = 64  # passes before a step that are told apart
_KEPT = 1 << 14  # turns whose followers are known: a program that wraps one model after the other makes ever new ones


@contextmanager
def take_turn(
    what: str, group: dist.ProcessGroup | None, *, detail: str = "", ends_pass: bool = False, advice: str = ""
) -> Iterator[None]:
    """Around what all ranks of a group begin next, once that is known.

    Args:
        what: the same text on all ranks, and for messages: `gathering the weights of 'layers.0'`.
        group: None for this process alone.
        detail: of a step of an optimizer: the same and how it is made, which may change from one to the next. Where it
            has, ranks compare that while they go on, and hear of it in the next pass, or before the next step.
        ends_pass: a backward pass, of which programs run several before a step.
        advice: what the error says besides, where no rank is gone.

    Raises:
        RanksError: on every rank: they do not; or, the last step was made in other ways.
    """
    if group is None:
        yield
        return
    sequence = call_log.sequence_of(group)
    before = sequence.turn
    expected, was = sequence.follows.get(before), sequence.details.get(before, "")
    text, last_text = detail or what, was or expected
    name = text if last_text in (None, text) else f"{text}, where {last_text} came the last time"
    try:
        if detail or ends_pass:
            settle(group)
        with entry(name, group):
            if expected != what:
                gather_words(name, [0, 0], group)
                _keep(sequence.follows, before, what)
            elif was != detail:
                post_words(name, group)
            if detail:
                _keep(sequence.details, before, detail)
            sequence.num_passes = 0 if detail else min(sequence.num_passes + ends_pass, _MOST)
            sequence.num_steps = min(sequence.num_steps + 1, _MOST) if detail else 0
            # only what follows a pass, another or a step, depends on how many there were: at first as after one fewer
            last = what, sequence.num_passes - 1
            sequence.turn = what, sequence.num_passes if ends_pass else sequence.num_steps
            if ends_pass and last in sequence.follows:
                _keep(sequence.follows, sequence.turn, sequence.follows.get(sequence.turn, sequence.follows[last]))
            yield
    except RanksError as error:
        if not advice or isinstance(error, PeerLost):
            raise
        raise RanksError(f"{error}. {advice}") from error


def _keep(known: dict[tuple[str, int], str], turn: tuple[str, int], what: str) -> None:
    """The oldest is forgotten, the same one on all ranks, and agreed on once more where it comes again."""
    known[turn] = what
    if len(known) > _KEPT:
        del known[next(iter(known))]
