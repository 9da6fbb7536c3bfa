"""`observe`: what sample batches tell of a model's features, for a plan that is measured rather than guessed."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dmp import ParameterInfo, default_sharders, is_torchrecs, plan_parameters, random_numbers_kept, shown, type_name
from planner.arguments import check_module
from planner.observed.distinct_rows import growth_of, num_distinct
from planner.observed.named_ids import NamedIds, named_ids
from planner.observed.observation import Observation, ObservedFeature
from planner.observed.row_curve import RowCurve

_Tables = Mapping[str, tuple[Any, ParameterInfo]]
_Ids = NDArray[np.int64]
_KEPT_IDS = 1 << 17
"""Of each feature, over all batches: enough for its curve and its growth, whatever the batches' size."""
_LEAST_WHOLE = 2
"""Batches that the growth is seen of, however large."""
_log = logging.getLogger("dmp")


class _Seen:
    """Of one feature so far."""

    def __init__(self) -> None:
        self.ids = self.samples = self.samples_beside = 0
        self.distinct = 0.0
        self.kept: list[_Ids] = []
        """Some of every batch."""
        self.whole: list[_Ids] = []
        """The first batches: of some of their ids more would be distinct."""
        self.low = self.high = 0
        self._chosen = np.random.default_rng(0)

    def add(self, ids: Tensor, samples: int, keep: int) -> None:
        """One batch's; of a large one `keep` are kept, any: those at even distances may all be of one column."""
        self.ids += len(ids)
        self.samples += samples
        if len(ids):
            known = ids.detach().to("cpu", torch.int64, copy=True).numpy()
            self.distinct += num_distinct(known)
            self.low, self.high = min(self.low, int(known.min())), max(self.high, int(known.max()))
            if len(self.whole) < _LEAST_WHOLE or sum(map(len, self.whole)) + len(known) <= _KEPT_IDS:
                self.whole.append(known)
            self.kept.append(known if len(known) <= keep else self._chosen.choice(known, keep, replace=False))

    def summed_up(self, without: int) -> ObservedFeature:
        """As plain data; of so many samples besides, of the batches that lack it."""
        kept = np.concatenate([np.zeros(0, dtype=np.int64), *self.kept])
        factor, distinct = self.ids / max(1, self.samples + without), self.distinct / max(1, self.ids)
        growth = growth_of(self.whole)
        return ObservedFeature(round(factor, 6), round(distinct, 9), RowCurve.of(kept), round(growth, 6))


def observe(loader: Iterable[Any], *, batches: int = 100, module: nn.Module | None = None) -> Observation:
    """Pooling factors, batch size, and which rows ids name, from the first `batches` batches of a loader.

    Batches may have any form that has a `KeyedJaggedTensor` somewhere in it, or ids under names, see `named_ids`; what
    else they hold is passed over. Ids are those of one data rank: its loader is what to give, and the batch size found
    is its own. A feature that some batches lack has no ids there. What may be a mistake is said through `logging`:
    batches without any ids, ids of one dim that are more or fewer than the samples of others, ids that are no rows; and
    that an iterator, unlike a `DataLoader`, cannot be read again: the batches that this takes are gone from it. Random
    numbers (torch's, Python's, NumPy's), and those of the loader's `generator`, are afterwards as before, unless it is
    an iterator.

    Args:
        batches: to read at most.
        module: the model, on meta or real: names the elements of plain tuples by its `forward`'s parameters, and no
            feature that its tables name may be missing from all batches.

    Returns:
        What `ShardingPlanner(observed=...)` takes.

    Raises:
        ValueError: no loader, an empty one, batches without ids that have a name, or without samples, or without a
            feature of the module.
    """
    if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
        raise ValueError(f"batches must be a whole number >= 1; got {shown(batches)}")
    if module is not None:
        check_module(module)
    with _as_before(loader):
        return _observed(loader, batches, module)


def _observed(loader: Iterable[Any], batches: int, module: nn.Module | None) -> Observation:
    seen: defaultdict[str, _Seen] = defaultdict(_Seen)
    sizes: list[int] = []
    unlike: dict[str, int] = {}
    num_read, batch, loaded = 0, None, _iterated(loader)
    for batch in islice(loaded, batches):
        num_read += 1
        of_batch = list(named_ids(batch, _arguments(module)))
        for each in of_batch:
            seen[each.name].add(each.ids, each.samples, -(-_KEPT_IDS // batches))
        if of_batch:
            sizes.append(_samples(of_batch))
            for name in {each.name for each in of_batch}:
                seen[name].samples_beside += sizes[-1]
            unlike = unlike or _unlike(of_batch)
    if not num_read:
        raise ValueError(f"the loader, {type_name(loader)}, gives no batch")
    if not seen:
        raise ValueError(
            f"there are no ids with a name in the loader's batches, of {type_name(batch)}: {_form(batch)}; expected a "
            "KeyedJaggedTensor somewhere, or tensors in a dict, an object, or with module= in a tuple, of int64 or "
            "int32"
        )
    if not any(sizes):
        raise ValueError(f"the {len(sizes)} batches of {type_name(loader)} have no samples")
    if loaded is loader:
        _log.warning("observe has taken %d batches of %s, an iterator: they are gone", num_read, type_name(loader))
    if len(sizes) < num_read:
        _log.warning("%d of %d batches have no ids with a name, and are not counted", num_read - len(sizes), num_read)
    if unlike:
        _log.warning(
            "features of a batch have %s samples, where ids (n,) count as one of each of n samples: where a sample has "
            "several, give the ids with their offsets, see planner.observed.named_ids",
            shown(unlike),
        )
    features = {name: seen[name].summed_up(sum(sizes) - seen[name].samples_beside) for name in sorted(seen)}
    found = Observation(len(sizes), round(sum(sizes) / len(sizes), 3), features)
    if module is not None:
        tables = plan_parameters(module, default_sharders())
        _check_names(found, module, tables)
        _remark_rows(found, tables, seen)
    return found


@contextmanager
def _as_before(loader: Any) -> Iterator[None]:
    """Leave the numbers that a loader draws its order from as they were, so that training sees what it would have.

    Not those of an iterator, which goes on from where it is left: it would give the same again.
    """
    own, is_iterator = getattr(loader, "generator", None), hasattr(loader, "__next__")
    drawn_from = [own] if isinstance(own, torch.Generator) and not is_iterator else []
    states = [generator.get_state() for generator in drawn_from]
    try:
        with nullcontext() if is_iterator else random_numbers_kept():
            yield
    finally:
        for generator, state in zip(drawn_from, states, strict=True):
            generator.set_state(state)


def _iterated(loader: Any) -> Iterator[Any]:
    if isinstance(loader, (str, bytes, Mapping, Tensor, nn.Module, type)) or is_torchrecs(loader, "KeyedJaggedTensor"):
        what = "call it" if isinstance(loader, type) else "a single batch goes in a list"
        raise ValueError(f"expected a loader, which gives batches; got {type_name(loader)}: {what}")
    try:
        return iter(loader)
    except TypeError:
        hint = ": call it" if callable(loader) else ""
        raise ValueError(f"expected a loader, which gives batches; got {type_name(loader)}{hint}") from None


def _samples(of_batch: list[NamedIds]) -> int:
    """Of a batch: its largest feature's, as one that is looked up once for many samples has fewer."""
    return max((each.samples for each in of_batch), default=0)


def _unlike(of_batch: list[NamedIds]) -> dict[str, int]:
    """Samples of each feature, where ids of one dim are more or fewer than others have samples; else empty."""
    samples = {each.name: each.samples for each in of_batch}
    is_told = not any(each.is_flat for each in of_batch) or len(set(samples.values())) == 1
    return {} if is_told else samples


def _arguments(module: nn.Module | None) -> tuple[str, ...]:
    """Names of the parameters of a module's `forward`."""
    if module is None:
        return ()
    return tuple(p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in (0, 1))


def _check_names(found: Observation, module: nn.Module, tables: _Tables) -> None:
    """Raise `ValueError` where nothing that was seen reads a table of the module, or a feature of one was not seen."""
    if not tables:
        return
    has, wanted = shown(list(found.features)), {f: name for name, (_, info) in tables.items() for f in info.features}
    missing = [feature for feature in wanted if feature not in found.features]
    if not any(found.of_table(name, info) for name, (_, info) in tables.items()):
        names = [feature for name, (_, info) in tables.items() for feature in info.features or (name,)]
        raise ValueError(
            f"the batches have the features {has}; none of them reads a table of {type_name(module)}, whose tables are "
            f"read by {shown(names)}"
        )
    if missing:
        raise ValueError(
            f"the batches have the features {has}; {shown(missing)} are not among them, of which {missing[0]!r} reads "
            f"{wanted[missing[0]]!r}. Without module= what was not seen is guessed"
        )


def _remark_rows(found: Observation, tables: _Tables, seen: Mapping[str, _Seen]) -> None:
    """Say which ids are no rows: padding, a table that is too small, or ids that the model maps to rows itself."""
    for name, (_, info) in tables.items():
        for feature in found.names_of_table(name, info):
            low, high, rows = seen[feature].low, seen[feature].high, info.shape[0]
            if low < 0 or high >= rows:
                _log.warning(
                    "feature %r has ids from %d to %d, and %r %d rows: unless the model maps them to rows itself, they "
                    "are counted as looked up, and its lookup will refuse them",
                    *(feature, low, high, name, rows),
                )


def _form(batch: Any) -> str:
    """What a batch is made of, shortly."""
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{shown(key)}: {_kind(value)}" for key, value in list(batch.items())[:6]) + "}"
    if isinstance(batch, (list, tuple)):
        return "(" + ", ".join(map(_kind, batch)) + ")"
    return _kind(batch)


def _kind(value: Any) -> str:
    if is_torchrecs(value, "KeyedJaggedTensor") or is_torchrecs(value, "JaggedTensor"):
        return f"{type_name(value)} of {_kind(value.values())}"
    if not isinstance(value, Tensor):
        return type_name(value)
    return f"{value.dtype} {tuple(value.shape)}" + " on meta" * value.is_meta
