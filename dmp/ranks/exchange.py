"""Small things that all ranks tell each other: words, objects, facts that must agree.

Every exchange begins with a header of one form, so that different calls meet in it and say so; it runs on the control
group, see [Note: control] in groups.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dmp.errors import RanksError
from dmp.ranks import call_log
from dmp.ranks.answers import parted_text
from dmp.ranks.entry import entry
from dmp.ranks.groups import control_group, device_of

_NAME_BYTES = 512


def gather_words(what: str, words: Sequence[int], group: dist.ProcessGroup | None) -> list[list[int]]:
    """Every rank's two words, in rank order; one exchange of one form whatever the call is.

    Raises:
        RanksError: on every rank: the ranks are in different calls.
    """
    if group is None:
        return [list(words)]
    settle(group)
    with entry(what, group) as here:
        asked = _ask(what, [here.number, *words], group)
        asked.work.wait()
        said: list[list[int]] = torch.stack(asked.rows).tolist()
        here.align(max(row[1] for row in said))
        if any(row[0] != said[0][0] for row in said):
            _raise_parted(_outermost(what), control_group(group))
        return [row[2:] for row in said]


class _Asked(NamedTuple):
    what: str
    mine: torch.Tensor
    rows: list[torch.Tensor]
    work: dist.Work


def _ask(what: str, words: Sequence[int], group: dist.ProcessGroup) -> _Asked:
    control = control_group(group)
    mine = torch.tensor([_digest(what), *words], dtype=torch.int64, device=device_of(control))
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    return _Asked(what, mine, rows, dist.all_gather(rows, mine, group=control, async_op=True))


def post_words(what: str, group: dist.ProcessGroup) -> None:
    """Begin to compare what this call is, and go on; `settle` waits for it, as does the next exchange of the group."""
    settle(group)
    with entry(what, group) as here:
        call_log.sequence_of(group).posted = _ask(what, [here.number, 0, 0], group)


def settle(group: dist.ProcessGroup) -> None:
    """Wait for what was posted, if anything was.

    Raises:
        RanksError: on every rank that has posted: others were in another call.
    """
    sequence = call_log.sequence_of(group)
    posted: _Asked | None = sequence.posted
    if posted is None:
        return
    sequence.posted = None
    with entry(posted.what, group):
        posted.work.wait()
        said = [int(row[0]) for row in posted.rows]
        if any(each != said[0] for each in said):
            _raise_parted(_outermost(posted.what), control_group(group))


def _outermost(what: str) -> str:
    """The call that this one is a step of, as a program knows it."""
    own = [e.name for e in call_log.running.values() if e.thread == threading.get_ident()]
    return what if not own or own[0] == what else f"{own[0]}, {what}"


def _raise_parted(what: str, control: dist.ProcessGroup) -> None:
    names = _gather_bytes(_encoded(what)[:_NAME_BYTES], _NAME_BYTES, control)
    texts = (name.rstrip(b"\0").decode(errors="replace") for name in names)
    raise RanksError(parted_text({rank: f"in {text}" for rank, text in enumerate(texts)}))


def gather_objects(what: str, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's value, in rank order; any object that pickle takes. Two exchanges.

    Raises:
        RanksError: on every rank: the ranks are in different calls.
    """
    if group is None:
        return [value]
    data = pickle.dumps(value)
    with entry(what, group):
        sizes = [row[0] for row in gather_words(what, [len(data), 0], group)]
        parts = _gather_bytes(data, max(sizes), control_group(group))
        return [pickle.loads(part[:size]) for part, size in zip(parts, sizes, strict=True)]


def _gather_bytes(data: bytes, size: int, control: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, filled up to `size`."""
    device = device_of(control)
    mine = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(control))]
    dist.all_gather(parts, mine, group=control)
    return [_bytes(part) for part in parts]


def broadcast_bytes(what: str, data: bytes, group: dist.ProcessGroup) -> bytes:
    """Rank 0's bytes, on every rank; what the others pass is not looked at. Two exchanges."""
    size = gather_words(what, [len(data), 0], group)[0][0]
    control = control_group(group)
    sent = torch.frombuffer(bytearray(data or bytes(size)), dtype=torch.uint8).to(device_of(control))
    dist.broadcast(sent, group=control, group_src=0)
    return _bytes(sent)


def compare_facts(facts: Mapping[str, str], group: dist.ProcessGroup | None, what: str) -> list[dict[str, str]] | None:
    """Compare texts over all ranks, in one small exchange where they are the same.

    Returns:
        None where they are the same, else those of each rank.

    Raises:
        RanksError: on every rank: the ranks are in different calls.
    """
    if group is None:
        return None
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).digest()
    words = [int.from_bytes(digest[i : i + 8], "big", signed=True) for i in (0, 8)]
    with entry(what, group):
        said = gather_words(what, words, group)
        if all(row == said[0] for row in said):
            return None
        return gather_objects(what, dict(facts), group)


def _bytes(data: torch.Tensor) -> bytes:
    """Without NumPy, which torch's own way needs."""
    here = data.cpu()
    return ctypes.string_at(here.data_ptr(), here.numel())


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(_encoded(text)).digest()[:8], "big", signed=True)


def _encoded(text: str) -> bytes:
    """Of any text: a path whose bytes are no UTF-8 has surrogates."""
    return text.encode(errors="backslashreplace")
