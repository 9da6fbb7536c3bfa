"""Odd batches on some rank or on all: ids, lengths, weights, keys, types."""

from __future__ import annotations

import copy
import functools
import logging
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import dmp
from dmp import DistributedModelParallel, column_wise, data_parallel, row_wise, table_wise
from tests.equality import KINDS, ROWS, attach, env_of, loss_of, make_module, same_result
from tests.fuzz.outcome import ERROR, RIGHT, Outcome, Wrong, outcome_of

LR = 0.1
MESHES = ("dp2", "replicate2", "tp2")


class Parts(NamedTuple):
    """A batch before it is put together: of a KJT, an `nn.EmbeddingBag` (`lengths` are offsets), an `nn.Embedding`."""

    keys: list[str]
    values: Any
    lengths: Any
    weights: Any


class Probe(NamedTuple):
    """One odd batch."""

    kind: str
    mesh: str
    change: str
    where: str  # "all", or the one rank that has it
    seed: int

    def __str__(self) -> str:
        return f"inputs: {self.kind} on {self.mesh}, {self.change} on {self.where}, seed {self.seed}"


def probes(seed: int, count: int) -> list[Probe]:
    """As many, no two alike while there are enough; those of one module and mesh beside each other."""
    rng = random.Random(seed)
    every = [
        Probe(kind, mesh, change, where, seed)
        for kind in KINDS
        for mesh in MESHES
        for change in changes_of(kind)
        for where in ("all", "0", "1")
    ]
    return sorted(rng.sample(every, min(count, len(every))))


def run(case: Probe) -> Outcome:
    """On every rank. The model stays for the next probe: it must not notice."""
    logging.getLogger("torch.fx").setLevel(logging.ERROR)  # TorchRec's use of it is warned of at every batch
    outcome = _run(case, _pair(case.kind, case.mesh))
    if not outcome.is_good:
        _pair.cache_clear()
    return outcome


@functools.lru_cache(maxsize=1)
def _pair(kind: str, mesh: str) -> _Pair:
    return _Pair(kind, mesh)


class _Pair:
    """The sharded module and the unsharded one, which take the same good steps."""

    def __init__(self, kind: str, mesh: str) -> None:
        self.kind, self.env = kind, env_of(mesh)
        self.module = make_module(kind)
        whole = make_module(kind)
        attach(whole, "sgd")
        cut = (row_wise(), table_wise(self.env.table_size - 1), column_wise([0, 0]), data_parallel(), table_wise(0))
        layouts = (data_parallel(),) * 5 if self.env.table_size == 1 else cut
        if kind == "ec":
            layouts = (row_wise(), table_wise(0), column_wise([0, self.env.table_size - 1]), *layouts)
        plan = {n: layouts[i % len(layouts)] for i, (n, _) in enumerate(whole.named_parameters())}
        self.model = DistributedModelParallel(whole, env=self.env, plan=plan)

    def step(self, batches: list[tuple[Any, ...]]) -> None:
        """One step on both; wrong where they differ."""
        out = self.model(*batches[self.env.data_rank])
        loss_of(out).backward()
        expected = None
        for data_rank, batch in enumerate(batches):
            theirs = self.module(*batch)
            if data_rank == self.env.data_rank:
                expected = copy.copy(theirs) if not isinstance(theirs, torch.Tensor) else theirs.detach()
            (loss_of(theirs) / len(batches)).backward()
        with torch.no_grad():
            for p in self.module.parameters():
                if p.grad is not None:
                    p -= LR * p.grad
                p.grad = None
        weights = self.weights()  # collective, so before anything is raised
        try:
            same_result(out, expected)
        except AssertionError as error:
            raise Wrong(f"results differ: {error}") from error
        self.check(weights)

    def weights(self) -> dict[str, torch.Tensor]:
        """The sharded module's, whole."""
        state: dict[str, torch.Tensor] = dmp.full_state_dict(self.model)
        return state

    def check(self, weights: dict[str, torch.Tensor]) -> None:
        """Wrong where they are not the unsharded module's."""
        for name, p in self.module.named_parameters():
            if not torch.allclose(weights[name].to(p), p.detach(), atol=1e-5, rtol=1e-5, equal_nan=True):
                raise Wrong(f"{name} differs by {(weights[name].to(p) - p.detach()).abs().max():.3g}")


def _run(case: Probe, pair: _Pair) -> Outcome:
    data_size = pair.env.data_size
    ranks = range(data_size) if case.where == "all" or data_size == 1 else [int(case.where)]
    change = changes_of(case.kind)[case.change]
    good = [_batch(case.kind, _good(case.kind, r, case.seed)) for r in range(data_size)]
    odd = [
        _batch(case.kind, change.make(_good(case.kind, r, case.seed), random.Random(case.seed))) if r in ranks else g
        for r, g in enumerate(good)
    ]

    def attempt() -> None:
        if change.must == ERROR:  # the unsharded module must not see it: it may read beyond its tables
            loss_of(pair.model(*odd[pair.env.data_rank])).backward()
            raise Wrong("no error")
        pair.step(odd)

    def after_error() -> None:
        pair.check(pair.weights())
        pair.step(good)

    return outcome_of(str(case), attempt, after_error, change.must)


# ---- batches ----


def _good(kind: str, rank: int, seed: int) -> Parts:
    rng = torch.Generator().manual_seed(1000 * seed + rank)
    if kind == "embedding":
        return Parts([], torch.randint(0, 23, (3, 2), generator=rng), None, None)
    size = 3
    keys = [] if kind.startswith("bag") else ["a", "b", "c"] + (["d", "e"] if kind.startswith("ebc") else [])
    lengths = torch.randint(1, 4, (max(1, len(keys)) * size,), generator=rng)
    per_key = lengths.view(-1, size).sum(1).tolist()
    values = [
        torch.randint(0, ROWS.get(k, 23), (n,), generator=rng) for k, n in zip(keys or [""], per_key, strict=True)
    ]
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=rng) if kind.endswith("_weighted") else None
    if kind.startswith("bag"):
        bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        lengths = bounds if kind == "bag" else bounds[:-1]
    return Parts(keys, ids, lengths, weights)


def _batch(kind: str, parts: Parts) -> tuple[Any, ...]:
    if kind == "embedding":
        return (parts.values,)
    if kind.startswith("bag"):
        return parts.values, parts.lengths, parts.weights
    if not isinstance(parts.values, torch.Tensor):
        return (parts.values,)
    from torchrec import KeyedJaggedTensor

    return (KeyedJaggedTensor(keys=parts.keys, values=parts.values, lengths=parts.lengths, weights=parts.weights),)


class Change(NamedTuple):
    """What is odd.

    Args:
        make: from good parts to odd ones.
        must: how a probe with it must end; either way when empty.
    """

    make: Callable[[Parts, random.Random], Parts]
    must: str = ""


def changes_of(kind: str) -> dict[str, Change]:
    """Name -> change, of those that the kind of module can meet."""
    every = dict(_IDS)
    if kind != "embedding":
        every.update(_OFFSETS if kind.startswith("bag") else _LENGTHS)
    if kind.endswith("_weighted"):
        every.update(_WEIGHTS)
    elif kind in ("ebc", "ec", "bag_mean"):
        every.update(_UNWANTED)
    if kind.startswith(("ebc", "ec")):
        every.update(_KEYS)
        del every["an empty batch"]  # TorchRec's own modules cannot run it
    return every


def _ids(edit: Callable[[torch.Tensor, random.Random], Any], must: str = ERROR) -> Change:
    return Change(lambda p, rng: p._replace(values=edit(p.values.clone(), rng)), must)


def _lengths(edit: Callable[[torch.Tensor, random.Random], Any], must: str = ERROR) -> Change:
    return Change(lambda p, rng: p._replace(lengths=edit(p.lengths.clone(), rng)), must)


def _weights(edit: Callable[[torch.Tensor, random.Random], Any], must: str = ERROR) -> Change:
    return Change(lambda p, rng: p._replace(weights=edit(p.weights.clone(), rng)), must)


def _put(value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.Tensor, random.Random], torch.Tensor]:
    """One id somewhere replaced."""

    def edit(ids: torch.Tensor, rng: random.Random) -> torch.Tensor:
        flat = ids.to(dtype).view(-1)
        flat[rng.randrange(flat.numel())] = value
        return flat.view(ids.shape)

    return edit


def _strided(ids: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return torch.stack([ids, ids + 1], -1)[..., 0]


_MAX = 2**63 - 1
_IDS: dict[str, Change] = {
    **{f"an id {v}": _ids(_put(v)) for v in (-1, -(2**31), -(2**63), 50, 2**31, 2**32, 2**32 + 1, _MAX)},
    "an int32 id -1": _ids(_put(-1, torch.int32)),
    "an int32 id 2**31-1": _ids(_put(2**31 - 1, torch.int32)),
    "int32 ids": _ids(lambda v, _: v.int(), RIGHT),
    "ids that are a strided view": _ids(_strided, RIGHT),
    "int16 ids": _ids(lambda v, _: v.short()),
    "uint8 ids": _ids(lambda v, _: v.byte()),
    "bool ids": _ids(lambda v, _: v > 2),
    "float ids": _ids(lambda v, _: v.float()),
    "ids nan": _ids(lambda v, _: v.float() * torch.nan),
    "complex ids": _ids(lambda v, _: v.to(torch.complex64)),
    "ids in a list": _ids(lambda v, _: v.tolist()),
    "no ids": _ids(lambda v, _: None),
    "a string": _ids(lambda v, _: "ids"),
    "a dict": _ids(lambda v, _: {"a": v}),
    "sparse ids": _ids(lambda v, _: v.to_sparse()),
    "ids on meta": _ids(lambda v, _: v.to("meta")),
}


def _at(index: int, value: int) -> Callable[[torch.Tensor, random.Random], torch.Tensor]:
    def edit(t: torch.Tensor, _: random.Random) -> torch.Tensor:
        t[index] = value
        return t

    return edit


def _wrapped_around(lengths: torch.Tensor, _: random.Random) -> torch.Tensor:
    """Lengths whose sum is right only because it wraps around 2**64."""
    lengths[0] += 2**62
    lengths[1] += 2**62
    lengths[2] += 2**62
    lengths[-1] += 2**62
    return lengths


_LENGTHS: dict[str, Change] = {
    "a length too many": _lengths(lambda n, _: torch.cat([n, n[:1]])),
    "a length too few": _lengths(lambda n, _: n[:-1]),
    "one length too large": _lengths(lambda n, _: n + torch.eye(len(n), dtype=n.dtype)[0]),
    "a length -1": _lengths(_at(0, -1)),
    "a length 2**62": _lengths(_at(0, 2**62)),
    "a length 2**63-1": _lengths(_at(-1, _MAX)),
    "lengths that wrap around": _lengths(_wrapped_around),
    "all lengths 0": _lengths(lambda n, _: torch.zeros_like(n)),
    "int32 lengths": _lengths(lambda n, _: n.int(), RIGHT),
    "empty bags": Change(lambda p, _: p._replace(values=p.values[:0], lengths=p.lengths * 0, weights=_none(p)), RIGHT),
    "an empty batch": Change(
        lambda p, _: p._replace(values=p.values[:0], lengths=p.lengths[:0], weights=_none(p)), RIGHT
    ),
}


def _none(p: Parts) -> Any:
    return None if p.weights is None else p.weights[:0]


_OFFSETS: dict[str, Change] = {
    "offsets from 1": _lengths(_at(0, 1)),
    "an offset -1": _lengths(_at(1, -1)),
    "an offset beyond the end": _lengths(_at(-1, 1000)),
    "an offset 2**62": _lengths(_at(-1, 2**62)),
    "offsets that decrease": _lengths(lambda n, _: n.flip(0)),
    "float offsets": _lengths(lambda n, _: n.float()),
    "int32 offsets with int32 ids": Change(
        lambda p, _: p._replace(values=p.values.int(), lengths=p.lengths.int()), RIGHT
    ),
    "no offsets": _lengths(lambda n, _: None),
    "offsets in a list": _lengths(lambda n, _: n.tolist()),
    "offsets of two dims": _lengths(lambda n, _: n.view(1, -1)),
    "no offset at all": Change(lambda p, _: p._replace(lengths=p.lengths[:0])),
}

_WEIGHTS: dict[str, Change] = {
    "no weights": Change(lambda p, _: p._replace(weights=None)),
    "a weight too many": _weights(lambda w, _: torch.cat([w, w[:1]])),
    "a weight too few": _weights(lambda w, _: w[1:]),
    "integer weights": _weights(lambda w, _: w.long()),
    "weights in a list": _weights(lambda w, _: w.tolist()),
    "negative weights": _weights(lambda w, _: -w, RIGHT),
    "weights 0": _weights(lambda w, _: w * 0, RIGHT),
}

_UNWANTED: dict[str, Change] = {
    "weights that nobody wants": Change(lambda p, _: p._replace(weights=torch.ones(p.values.numel())), ""),
}

_KEYS: dict[str, Change] = {
    "keys in another order": Change(lambda p, rng: _reordered(p, rng), RIGHT),
    "a missing key": Change(lambda p, _: _without_last(p)),
    "a key twice": Change(lambda p, _: p._replace(keys=[p.keys[0], p.keys[0], *p.keys[2:]])),
    "an unknown key in place of one": Change(lambda p, _: p._replace(keys=["zzz", *p.keys[1:]])),
    "a key too many": Change(lambda p, _: p._replace(keys=[*p.keys, "zzz"]), ""),
}


def _reordered(p: Parts, rng: random.Random) -> Parts:
    order = list(range(len(p.keys)))
    rng.shuffle(order)
    lengths = p.lengths.view(len(p.keys), -1)
    counts = lengths.sum(1).tolist()
    values = p.values.split(counts)
    weights = None if p.weights is None else torch.cat([p.weights.split(counts)[i] for i in order])
    return Parts([p.keys[i] for i in order], torch.cat([values[i] for i in order]), lengths[order].view(-1), weights)


def _without_last(p: Parts) -> Parts:
    lengths = p.lengths.view(len(p.keys), -1)[:-1].reshape(-1)
    n = int(lengths.sum())
    return Parts(p.keys[:-1], p.values[:n], lengths, None if p.weights is None else p.weights[:n])
