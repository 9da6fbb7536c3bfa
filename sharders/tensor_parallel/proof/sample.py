"""A small real copy of a module, with inputs: what a plan is proved on.

[Note: sample] It is made of the dry run's copy on meta: one block for those that are the same, no hooks. Weights are
random whatever the model holds, so that zeros and ones hide nothing, and in float64 where the module takes that. It
trains (its gradients are what is compared), with every dropout off. A model of more than `SMALL` weights is narrowed,
see `sharders.tensor_parallel.proof.narrow`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dmp import is_dtensor, local_of, map_nested, places_of, replace_tensors, tensors_of
from sharders.tensor_parallel.proof.narrow import AS_IT_IS, Numbers, attributes_of, narrow, narrowings
from sharders.tensor_parallel.proof.simulated import simulate
from sharders.tensor_parallel.structure.dry_run import DryRunError, Feed, Trace, dry_run, undisturbed
from sharders.tensor_parallel.structure.meta_copies import MetaCopies

SMALL = 2_000_000
LARGEST_BYTES = 256_000_000
_LONGEST_BYTES = 2 * LARGEST_BYTES
"""Of one result."""


class UnprovedError(Exception):
    """No real copy runs, so that nothing can be compared."""


class _EndlessError(UnprovedError):
    """A run is too long."""


@dataclass
class Run:
    """What one run of a sample gave."""

    outputs: list[torch.Tensor]
    """Floating ones."""

    gradients: dict[str, tuple[torch.Tensor | None, Any]] = field(default_factory=dict)
    """Of parameters by name, and of inputs (`"input 0"`): what is here, and its placement (None for plain tensors)."""

    between: dict[str, torch.Tensor] = field(default_factory=dict)
    """First floating output of each module that was asked for, in the order in which they returned."""


class _Bounded(TorchFunctionMode):
    """Ends a run whose random weights make it endless, as those of a voice do that says how long each sound is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_plain = type(result) is torch.Tensor and not result.is_sparse and not result.is_nested
        if is_plain and result.untyped_storage().nbytes() > _LONGEST_BYTES:
            raise _EndlessError(f"{tuple(result.shape)} is more than a sample's run is worth, for random weights")
        return result


class Sample:
    """Makes equal real copies of a module that runs on meta.

    Args:
        copies: of the module, on meta.
        feed: inputs that it runs with.
        unsplit: what it showed with them on meta; None where it does not run there, and cannot be narrowed.
        size: ranks on the tensor axis.

    Raises:
        UnprovedError: it is too large, or does not run.
    """

    def __init__(self, copies: MetaCopies, feed: Feed, unsplit: Trace | None, size: int) -> None:
        self.copies = copies
        self.feed = feed
        self.numbers, self.count = self._fitting(unsplit, size)
        self.size = size
        self.values: dict[tuple[str, str], torch.Tensor] = {}
        self.dtype = torch.float64
        self.whole = self._run_whole()

    def __str__(self) -> str:
        narrower = ", of a narrower copy" if self.numbers.sizes else ""
        return f"outputs and gradients on {self.ranks} simulated ranks are the whole module's{narrower}"

    def _fitting(self, unsplit: Trace | None, size: int) -> tuple[Numbers, int]:
        """What to narrow, and how many weights there are then."""
        count = self._count(AS_IT_IS)
        if count <= SMALL:
            return AS_IT_IS, count
        worth_a_try = narrowings(self.copies.model, self.copies.transformer, size)
        found = [(self._count(n), i, n) for i, n in enumerate(worth_a_try)]
        for smaller, _, numbers in sorted(found, key=lambda f: (f[0] > SMALL, f[1] if f[0] <= SMALL else f[0])):
            if unsplit is None:
                break
            if smaller < count and 4 * smaller <= LARGEST_BYTES and self._is_alike(unsplit, numbers):
                return numbers, smaller
        if 4 * count > LARGEST_BYTES:
            raise UnprovedError(
                f"{count} weights are more than a copy of {LARGEST_BYTES / 1e6:.0f} MB holds, and no narrower one runs"
            )
        return AS_IT_IS, count

    def _count(self, numbers: Numbers) -> int:
        model, _ = self.copies.make()
        narrow(dict(model.named_modules()), numbers)
        return sum(p.numel() for p in model.parameters())

    def _is_alike(self, unsplit: Trace, numbers: Numbers) -> bool:
        """Whether the narrower module does the same operations."""
        feed = numbers.fed(self.feed)
        try:
            seen = dry_run(self.copies, feed, lambda modules: narrow(modules, numbers))
        except DryRunError:
            return False
        return seen.calls == unsplit.calls and seen.order == unsplit.order

    def _run_whole(self) -> Run:
        failure = ""
        for dtype in (torch.float64, torch.float32):
            if self.count * dtype.itemsize > LARGEST_BYTES:
                continue
            self.dtype = dtype
            self.values = {}
            try:
                with undisturbed():  # in a thread of its own, as the ranks are: without the caller's modes
                    (run,) = simulate(1, "whole", lambda _: self._run_bounded())
                if not run.outputs:
                    raise UnprovedError("it returns no floating tensor")
                if not all(x.isfinite().all() for x in run.outputs):
                    raise UnprovedError("it gives infinite numbers for random weights")
                if not all(g.isfinite().all() for g, _ in run.gradients.values() if g is not None):
                    raise UnprovedError("it has infinite gradients for random weights")
                return run
            except _EndlessError:
                raise
            except Exception as error:  # a user's forward may raise anything
                failure = failure or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise UnprovedError(failure)

    def _run_bounded(self) -> Run:
        with _Bounded():
            return self.run(self.make())

    def unreached(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Those of these modules whose weights no output depends on, such as an encoder of images where ids are fed."""
        held = {n.rpartition(".")[0]: False for n in self.whole.gradients}
        held |= {n.rpartition(".")[0]: True for n, (g, _) in self.whole.gradients.items() if g is not None}
        return tuple(path for path in paths if not held.get(path, True))

    def make(self) -> nn.Module:
        """A new copy; each has the same values, and nothing of another."""
        model, last = self.copies.make()
        modules = dict(model.named_modules())
        narrow(modules, self.numbers)
        self._fill(modules)
        for path in set(self.copies.repeats.values()):
            modules[path].register_forward_hook(lambda m, _, output: last.__setitem__(id(m), output))
        _without_dropout(model.train())
        return model

    def inputs(self, model: nn.Module) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """The feed's, with values. Hidden states take gradients; images and sounds take none, as in training."""
        generator = torch.Generator().manual_seed(1)
        feed, rows = self.numbers.fed(self.feed), self._rows(model)

        def real(x: torch.Tensor, name: str) -> torch.Tensor:
            if x.is_floating_point():
                return torch.randn(x.shape, generator=generator, dtype=self.dtype).requires_grad_(not feed.of_data)
            if x.dtype == torch.bool or "mask" in name:
                return torch.ones(x.shape, dtype=x.dtype)
            return torch.randint(0, rows, x.shape, generator=generator, dtype=x.dtype)

        def fixed(x: Any, _: str) -> Any:
            return x.to(self.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        if feed.given is not None:
            args, kwargs = map_nested(feed.given, partial(self._given, rows=rows, generator=generator))
            return list(args), kwargs
        kwargs = {name: real(x, name) for name, x in feed.kwargs.items()}
        return [real(x, "") for x in feed.args], kwargs | map_nested(feed.fixed, fixed)

    def _given(self, x: Any, _: str, rows: int, generator: torch.Generator) -> Any:
        """An example's input: its values, or random ones where it has none."""
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_floating_point():
            values = torch.randn(x.shape, generator=generator) if x.is_meta else x
            return values.to(self.dtype, copy=True)
        if x.is_meta:
            is_mask = x.dtype == torch.bool
            drawn = torch.ones(x.shape) if is_mask else torch.randint(0, rows, x.shape, generator=generator)
            return drawn.to(x.dtype)
        is_beyond = bool(self.numbers.sizes) and x.numel() and x.dtype == torch.int64 and int(x.max()) >= rows
        return x.remainder(rows) if is_beyond else x.clone()

    def _rows(self, model: nn.Module) -> int:
        """Ids are below this."""
        embedding = self.copies.transformer.embedding
        if embedding is not None:
            return int(model.get_submodule(embedding)._parameters["weight"].shape[0])  # type: ignore[union-attr]
        return min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2)

    def run(self, model: nn.Module, rank: int | None = None, watch: Mapping[str, nn.Module] | None = None) -> Run:
        """Forward and backward of a random weighing of all outputs.

        Args:
            rank: which one of the ranks it is that runs the copy, split; None for the whole one.
            watch: modules whose outputs are kept, so that a failure can name the first; not the root's.
        """
        args, kwargs = self.inputs(model)
        run = Run([])
        handles = [_keep(path, module, run.between) for path, module in (watch or {}).items() if path]
        with torch.enable_grad():
            outputs = [x for _, x in tensors_of(model(*args, **kwargs)) if x.is_floating_point()]
            weighed = [self._weighed(i, x, rank) for i, x in enumerate(outputs)]
            if any(x.requires_grad for x in weighed):
                torch.stack([x.double() for x in weighed if x.requires_grad]).sum().backward()
        for handle in handles:
            handle.remove()
        run.outputs = [x.detach() for x in outputs]
        run.gradients = {name: _gradient(p) for name, p in model.named_parameters() if p.is_floating_point()}
        leaves = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
        run.gradients |= {f"input {i}": _gradient(x) for i, x in enumerate(leaves)}
        return run

    def _weighed(self, index: int, output: torch.Tensor, rank: int | None) -> torch.Tensor:
        here = local_of(output)
        shape = here.shape if rank is None else self.whole.outputs[index].shape
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(2 + index), dtype=here.dtype)
        if rank is not None:
            weights = part_of(weights, here.shape, rank, self.ranks)
        return (here * weights).sum()

    @property
    def ranks(self) -> int:
        """How many are simulated."""
        return self.numbers.ranks or self.size

    def _fill(self, modules: Mapping[str, nn.Module]) -> None:
        generator = torch.Generator().manual_seed(0)
        on_meta = (p for p in places_of(modules.items(), attributes=True) if p.tensor.is_meta)
        replace_tensors(on_meta, lambda place: self._value(place.path, place.name, place.tensor, generator))

    def _value(self, path: str, name: str, old: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        key, is_weight = (path, name), isinstance(old, nn.Parameter)
        if key not in self.values:
            original = self.copies.original(path, name)
            self.values[key] = _weight(name, old, generator) if is_weight else _buffer(old, original, generator)
        value = self.values[key]
        value = value.to(self.dtype if value.is_floating_point() else value.dtype, copy=True)
        return nn.Parameter(value, requires_grad=value.is_floating_point()) if is_weight else value


def _gradient(x: torch.Tensor) -> tuple[torch.Tensor | None, Any]:
    placed: Any = x if x.grad is None else x.grad
    return None if x.grad is None else local_of(x.grad), placed.placements[0] if is_dtensor(placed) else None


def part_of(whole: torch.Tensor, shape: torch.Size, rank: int, ranks: int) -> torch.Tensor:
    """The rank's part of a tensor, if `shape` is that of one: split in a single dim, or whole.

    Raises:
        ValueError: it is neither.
    """
    if whole.shape == shape:
        return whole
    dims = [d for d, (w, s) in enumerate(zip(whole.shape, shape, strict=False)) if w != s]
    if whole.dim() == len(shape) and len(dims) == 1:
        parts = whole.chunk(ranks, dims[0])
        if rank < len(parts) and parts[rank].shape == shape:
            return parts[rank]
    raise ValueError(f"shape {tuple(shape)} instead of {tuple(whole.shape)}")


def _keep(path: str, module: nn.Module, into: dict[str, torch.Tensor]) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = next((x for _, x in tensors_of(output) if x.is_floating_point()), None)
        if first is not None and path not in into:
            into[path] = local_of(first).detach()

    return module.register_forward_hook(hook)


def _weight(name: str, old: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not old.is_floating_point():
        return torch.zeros(old.shape, dtype=old.dtype)
    value: torch.Tensor = torch.rand(old.shape, generator=generator) * 2 - 1
    if old.dim() > 1:
        return value * math.sqrt(3 * old.shape[0] / max(old.numel(), 1))
    return value * 0.3 if "bias" in name else 1 + value * 0.3


def _buffer(old: torch.Tensor, original: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    """The model's own values, cut where the copy is narrower; guesses where it has none."""
    if original is not None and not original.is_meta and original.dim() == old.dim():
        cut: torch.Tensor = original.detach().cpu()[tuple(slice(0, n) for n in old.shape)].clone()
        return cut
    if old.is_floating_point():
        return torch.rand(old.shape, generator=generator)
    if old.is_complex():  # rotations, of length 1
        angle = torch.rand(old.shape, generator=generator)
        return torch.polar(torch.ones_like(angle), angle).to(old.dtype)
    if old.dtype == torch.bool:
        ones = torch.ones(old.shape, dtype=torch.bool)
        return ones.tril() if old.dim() > 1 else ones
    return torch.arange(old.shape[-1] if old.dim() else 1, dtype=old.dtype).expand(old.shape).clone()


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    for values in attributes_of(model.modules()):
        values.update({name: 0.0 for name, v in values.items() if isinstance(v, float) and "drop" in name})
