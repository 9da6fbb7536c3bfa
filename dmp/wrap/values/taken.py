"""When the parts of a state dict were taken: all ranks must give back parts of one time.

A loop that keeps the best state by a loss of its own samples (`if loss < best: kept = deepcopy(model.state_dict())`)
keeps another time's on each rank, and of what is split no rank has anything to compare with the others. So the times at
which state dicts are asked for are noted, beside a few of their values, by which what is given back later is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmp.calls import Calls
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.errors import CheckpointError
from dmp.places import is_dtensor

_TENSORS, _NUMBERS = 8, 16  # at most, and of each
_KEPT = 256
_SHOWN = 3

Times = frozenset[int]
"""How many steps and updates there had been; several where they changed none of the values looked at."""


def note_taken(calls: Calls, state: Mapping[str, Any], prefix: str = "") -> None:
    """A state dict of the model's is given out.

    Args:
        prefix: of the model's names in it.
    """
    own = {name: value for name, value in state.items() if name.startswith(prefix)}
    if (mark := _mark(own, own)) is not None:
        calls.taken[mark] = calls.taken.pop(mark, Times()) | {calls.num_updates}
        while len(calls.taken) > _KEPT:
            del calls.taken[next(iter(calls.taken))]


def times_of(calls: Calls, own: Mapping[str, Any], given: Mapping[str, Any]) -> Times:
    """When that was taken which is given; none where it is another's, or was changed."""
    mark = _mark(own, given)
    return Times() if mark is None else calls.taken.get(mark, Times())


def compare_times(of_ranks: Sequence[Times]) -> None:
    """Raise what is of several times.

    Raises:
        CheckpointError: it is.
    """
    first_with: dict[Times, int] = {}
    for rank, times in enumerate(of_ranks):
        first_with.setdefault(times, rank)
    first_with.pop(Times(), None)
    if first_with and not Times.intersection(*first_with):
        found = (f"rank {rank} after {max(times)}" for times, rank in [*first_with.items()][:_SHOWN])
        raise CheckpointError(
            f"load_state_dict: expected the parts of one state dict; each rank gives what it had at another time, in "
            f"steps and updates: {', '.join(found)}. Which state is kept must be decided on all ranks alike, as by a "
            "loss that is averaged over them (torch.distributed.all_reduce)"
        )


def _mark(own: Mapping[str, Any], given: Mapping[str, Any]) -> int | None:
    """Of some values of this rank's parts; None of what has none."""
    split = [name for name, value in own.items() if isinstance(value, ChunkedTensor) or is_dtensor(value)]
    looked_at: list[Any] = [given.get(name) for name in split[:: -(-len(split) // _TENSORS) or 1]]
    if not looked_at or not all(isinstance(t, ChunkedTensor) or (is_dtensor(t) and not t.is_meta) for t in looked_at):
        return None
    chunks = [chunk for t in looked_at for chunk in as_chunks(t).chunks[:1]]
    return hash(tuple(tuple(_first(chunk)) for chunk in chunks))


def _first(chunk: Any) -> list[Any]:
    row = chunk[:1] if chunk.dim() else chunk
    values: list[Any] = row.reshape(-1)[:_NUMBERS].tolist()
    return values
