"""Runs a model on meta, whole or with the local shapes of a tensor-parallel plan: shapes come out, nothing is computed.

[Note: dry run]
It runs on a copy (`meta_copies`) in evaluation mode without hooks of the model's own; random state, warnings and
logging are as before afterwards.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dmp import is_inside, map_nested, random_numbers_kept, tensors_of
from sharders.quiet import quiet
from sharders.tensor_parallel.structure.caches import forgetful
from sharders.tensor_parallel.structure.experts import experts_of
from sharders.tensor_parallel.structure.linears import features_of, is_joint_attention, resize_output
from sharders.tensor_parallel.structure.meta_copies import MetaCopies, Shape
from sharders.tensor_parallel.structure.numbers import number_of, set_number
from sharders.tensor_parallel.structure.of_heads import OF_HEADS
from sharders.tensor_parallel.structure.wide_norms import COLWISE_NORM
from sharders.unheard import made_of

# Where the dimension stands among the arguments.
_REDUCTIONS = {
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "mean", "sum", "var", "std"), 1),
    **dict.fromkeys(("norm", "normalize", "linalg_vector_norm"), 2),
}
_QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Feed:
    """Guessed inputs of a model."""

    name: str
    args: tuple[torch.Tensor, ...] = ()
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Inputs whose values matter, on the CPU: where sequences end, rotations."""

    of_data: bool = False
    """Whether its sizes are those of images or sounds, which a narrower model takes as they are."""

    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
    """Arguments and keywords that somebody knows the model takes, values and all, in the place of those above."""

    def suits(self, model: nn.Module) -> bool:
        """Whether the model's `forward` takes so many inputs, of these names."""
        try:
            args, kwargs = self.given or (self.args, {**self.kwargs, **self.fixed})
            inspect.signature(model.forward).bind(*args, **kwargs)
        except TypeError:
            return False
        except ValueError:  # of what has no signature nobody knows
            pass
        return True


@dataclass
class Trace:
    """What a dry run showed; of a module called several times, the first call."""

    result: list[Shape] = field(default_factory=list)
    outputs: dict[str, list[Shape]] = field(default_factory=dict)
    inputs: dict[str, list[Shape]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """Modules in the order in which they returned."""

    contractions: list[Shape] = field(default_factory=list)
    """Sizes that products of activations sum over: an attention's must not change when its heads are divided."""

    reductions: list[Shape] = field(default_factory=list)
    """Sizes of the dimensions that softmax, means and the like are taken over: no rank sees a part of them."""

    calls: list[str] = field(default_factory=list)
    """Names of torch's functions, in order."""

    reads: set[tuple[str, str]] = field(default_factory=set)
    """(module path, attribute) that `forward` read, of those that were asked for."""


class DryRunError(Exception):
    """The model does not run on meta with guessed inputs, or not with these local shapes."""


def sequence_length(size: int) -> int:
    """At least 8 positions, and the same number on each of `size` ranks."""
    return size * -(-8 // size)


def dry_run(
    copies: MetaCopies,
    feed: Feed,
    edit: Callable[[dict[str, nn.Module]], None] | None = None,
    watch: Collection[tuple[str, str]] = (),
    expected: Trace | None = None,
) -> Trace:
    """Run a copy on meta.

    Args:
        edit: changes the copy, given by module path, before it runs.
        watch: (module path, attribute) to see reads of.
        expected: a trace whose sums this one is to repeat; the first other one ends the run.

    Raises:
        DryRunError: whatever it was that the copy raised.
    """
    trace = Trace()
    with undisturbed():
        try:
            copied, last = copies.make()
            modules = dict(copied.named_modules())
            if edit is not None:
                edit(modules)
            for path in modules.keys() & {path for path, _ in watch}:
                modules[path].__class__ = _watched(type(modules[path]), path, watch, trace.reads)
            for path, module in modules.items():
                _record(path, module, trace, last)
            with torch.device("meta"), _Sums(trace, expected):
                args, kwargs = map_nested(feed.given or (feed.args, {**feed.kwargs, **feed.fixed}), _on_meta)
                trace.result = shapes(copied(*args, **kwargs))
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise DryRunError(f"{type(error).__name__}: {text[:200]}") from error
    return trace


def make_local(
    modules: Mapping[str, nn.Module], styles: Mapping[str, str], divided: Mapping[tuple[str, str], int], size: int
) -> None:
    """Give a copy on meta the shapes that one of `size` ranks has; outputs that a style gathers stay whole."""
    for path, style in styles.items():
        module = modules.get(path)
        if is_joint_attention(modules.get(path.rpartition(".")[0])):
            continue  # a function of its weights, whose output is whole: nothing else would be seen
        if module is not None and style.startswith("experts"):
            experts = experts_of(module)[style]
            _shrink_own(module, {**experts.up, **experts.down}, size)
            continue
        if module is not None and style in OF_HEADS:
            own = (name for name, p in module._parameters.items() if p is not None)
            _shrink_own(module, dict.fromkeys(own, OF_HEADS[style]), size)
            continue
        if module is not None and style == COLWISE_NORM:
            _run_whole(module, size)
            continue
        features = None if module is None else features_of(module)
        if module is not None and (features is not None or isinstance(module, nn.Embedding)):
            out_dim = 1 if features is None else features.out_dim
            if style.startswith(("colwise", "rowwise")):
                _shrink(module, out_dim if style.startswith("colwise") else 1 - out_dim, size)
            is_gathered = isinstance(module, nn.Embedding) or style in ("colwise_gather", "colwise_loss_parallel")
            if style.startswith("colwise") and is_gathered:
                module.register_forward_hook(lambda _m, _i, out: resize(out, -1, out.shape[-1] * size))
    for (path, name), value in divided.items():
        if path in modules and number_of(modules[path], name) is not None:
            set_number(modules[path], name, value)


def _on_meta(x: Any, _: str) -> Any:
    """What is computed with; whole numbers stay, for their values decide on shapes."""
    return x.to("meta") if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def resize(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Stands for a gather or a split: the same, `length` long in `dim`."""
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def shapes(value: Any) -> list[Shape]:
    """Shapes of all tensors in a module's input or output."""
    return [tuple(tensor.shape) for _, tensor in tensors_of(value)]


def _shrink_own(module: nn.Module, dims: Mapping[str, int], size: int) -> None:
    for name, dim in dims.items():
        old: Any = module._parameters[name]
        here = resize(old, dim, old.shape[dim] // size)
        module._parameters[name] = nn.Parameter(here, requires_grad=False)


def _run_whole(module: nn.Module, size: int) -> None:
    """A norm over all ranks' features, of which one rank's come in and go out."""

    def whole(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_nested((args, kwargs), lambda x, _: resize(x, -1, x.shape[-1] * size) if torch.is_tensor(x) else x)

    module.register_forward_pre_hook(whole, with_kwargs=True)
    module.register_forward_hook(lambda _m, _i, out: resize(out, -1, out.shape[-1] // size))


def _shrink(module: Any, dim: int, size: int) -> None:
    shape, features = list(module.weight.shape), features_of(module)
    if shape[dim] % size:
        raise ValueError(f"{shape} does not divide by {size} in dimension {dim}")
    shape[dim] //= size
    module.weight = nn.Parameter(torch.empty(shape, dtype=module.weight.dtype, device="meta"), requires_grad=False)
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = shape
        module.padding_idx = None  # may lie beyond the local rows
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = shape
    assert features is not None
    if dim != features.out_dim:
        return
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.new_empty(shape[dim]), requires_grad=False)
    if features.out_dim == 1:
        resize_output(module, features.out_features, shape[dim])


def _record(path: str, module: nn.Module, trace: Trace, last: dict[int, Any]) -> None:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        last[id(module)] = output
        if path not in trace.outputs:
            trace.inputs[path] = shapes((args, kwargs))
            trace.outputs[path] = shapes(output)
            trace.order.append(path)

    module.register_forward_hook(hook, with_kwargs=True)


def _watched(
    cls: type[nn.Module], path: str, watch: Collection[tuple[str, str]], reads: set[tuple[str, str]]
) -> type[nn.Module]:
    def __getattribute__(self: nn.Module, name: str) -> Any:
        if (path, name) in watch:
            reads.add((path, name))
        return cls.__getattribute__(self, name)

    made: type[nn.Module] = made_of(cls, {"__getattribute__": __getattribute__})
    return made


class _Sums(TorchFunctionMode):
    """Notes the sizes that products of two activations, and reductions, sum over.

    Args:
        expected: a trace with the only sizes that may be noted.
    """

    def __init__(self, into: Trace, expected: Trace | None) -> None:
        super().__init__()
        self.trace, self.expected = into, expected

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        self.trace.calls.append(name)
        if name in _REDUCTIONS and args and isinstance(args[0], torch.Tensor):
            given = args[_REDUCTIONS[name] :]
            self._note("reductions", _reduced(args[0].shape, kwargs.get("dim", given[0] if given else None)))
        if name in ("matmul", "__matmul__", "bmm"):
            self._note("contractions", (args[0].shape[-1],))
        elif name == "baddbmm":
            self._note("contractions", (args[1].shape[-1],))
        elif name == "scaled_dot_product_attention":
            query, key, value = (args[i] if i < len(args) else kwargs[n] for i, n in enumerate(_QKV))
            self._note("contractions", (query.shape[-1], key.shape[-1], value.shape[-1]))
            return attended(query, key, value, *args[3:], **{n: v for n, v in kwargs.items() if n not in _QKV})
        elif name == "einsum" and isinstance(args[0], str) and "." not in args[0]:
            terms, _, out = args[0].replace(" ", "").partition("->")
            operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
            sizes: dict[str, int] = {}  # of each letter
            for term, x in zip(terms.split(","), operands, strict=True):
                sizes.update(zip(term, x.shape, strict=True))
            self._note("contractions", tuple(n for c, n in sizes.items() if c not in out))  # what is summed over
        return func(*args, **kwargs)

    def _note(self, kind: str, sizes: Shape) -> None:
        noted: list[Shape] = getattr(self.trace, kind)
        noted.append(sizes)
        if self.expected is not None:
            known: list[Shape] = getattr(self.expected, kind)
            if known[len(noted) - 1 : len(noted)] != [sizes]:
                raise ValueError(f"{kind} over {sizes} are not those of the unsplit model")


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, *_: Any, **options: Any
) -> torch.Tensor:
    """The two products of `scaled_dot_product_attention`, which torch makes of many slow operations on meta.

    Of the other arguments `enable_gqa` alone says anything about shapes.

    Raises:
        ValueError: a mask that would broadcast the weights to another shape.
    """
    if options.get("enable_gqa"):
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    weights = torch.matmul(query, key.transpose(-2, -1))
    if attn_mask is not None and torch.broadcast_shapes(attn_mask.shape, weights.shape) != weights.shape:
        raise ValueError(f"a mask {tuple(attn_mask.shape)} for attention weights {tuple(weights.shape)}")
    return torch.matmul(weights, value)


def _reduced(shape: Shape, dim: Any) -> Shape:
    dims = (dim,) if isinstance(dim, int) else dim if isinstance(dim, list | tuple) else range(len(shape))
    return tuple(shape[d] for d in dims)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers, warnings, logging and caches of functions are as before afterwards; no gradients."""
    with torch.no_grad(), random_numbers_kept(), quiet(logging.CRITICAL), forgetful():
        yield


def same_outside(whole: Trace, local: Trace, insides: Iterable[str]) -> bool:
    """Whether a run with local shapes shows what the unsplit one did, everywhere but inside the branches."""
    insides = list(insides)
    sums = (whole.contractions, whole.reductions), (local.contractions, local.reductions)
    if whole.result != local.result or sums[0] != sums[1]:
        return False
    watched = (p for p in whole.outputs if not any(is_inside(p, i) for i in insides))
    return all(whole.outputs[p] == local.outputs.get(p) for p in watched)
