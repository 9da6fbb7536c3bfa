"""Programs' hooks on Linears that are split, and on what runs between: they see what all ranks have.

A hook on what is split (a student's features beside a teacher's, a penalty on activations) was given this rank's part:
a mean of it is another on each rank, and trained each otherwise in silence. Before a forward of the model its hooks,
whenever they were put on, are put behind what makes parts, or in front, each in its own place, from which its handle
removes it; what they change, or ask the gradient of, is cut again. Ranks agree on where there are any: they bring
parts together there.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from dmp import is_dtensor, is_inside, ranks
from sharders.tensor_parallel.split.followed import Looks
from sharders.tensor_parallel.split.own_parts import OwnPart, kind_of, plain_part
from sharders.tensor_parallel.split.plain import plain, replicated
from sharders.tensor_parallel.split.program_hooks import is_of_program, module_of
from sharders.tensor_parallel.split.styles import COLWISE, PACKED_ROWS, Style, parts_of
from sharders.tensor_parallel.structure.linears import features_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_GIVES_PARTS = frozenset(COLWISE) - {"colwise_gather", "colwise_loss_parallel"}
_TAKES_PARTS = frozenset(("rowwise", "rowwise_scatter", *PACKED_ROWS))


def show_whole(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style], everyone: dist.ProcessGroup | None, looks: Looks
) -> None:
    """Have programs' hooks on split Linears of the model, and on functions between, see whole tensors, see above.

    Forward: nothing; where there is a hook an all-gather of what it sees, and, the first time, one small exchange.
    Backward: nothing, or an all-gather for a hook that gives another output.

    Args:
        model: after it is split.
        mesh: the tensor axis.
        styles: by which it is.
        everyone: who forwards together.
        looks: at which forwards what a hook is shown of other shapes is known for a part, and told.
    """
    kinds = {path: style for path, style in styles.items() if isinstance(style, str)}
    kinds = {path: s for path, s in kinds.items() if s in _GIVES_PARTS | _TAKES_PARTS}
    kinds = {path: s for path, s in kinds.items() if features_of(model.get_submodule(path)) is not None}
    holders = {path.rpartition(".")[0] for path in kinds}
    between = [p for p, m in model.named_modules() if _is_function(m) or styles.get(p) == "sum_gradients"]
    inside = [path for path in between if any(is_inside(path, h) for h in holders)]
    known: WeakKeyDictionary[nn.Module, _Looks] = WeakKeyDictionary()  # of the model and its copies

    def prepare(module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if module not in known:
            known[module] = _Looks(module, kinds, inside, mesh)
        if known[module].take() and mesh.size() > 1:
            looks.is_one = True
            _agree(known[module].paths(), mesh, everyone)

    model.register_forward_pre_hook(prepare)


def _is_function(module: nn.Module) -> bool:
    """Whether it is an activation, dropout, or the like."""
    return not any(True for _ in module.children()) and not any(True for _ in module.parameters())


class _Looks:
    """Hooks of programs on modules of one model."""

    def __init__(self, model: nn.Module, kinds: Mapping[str, str], inside: list[str], mesh: DeviceMesh) -> None:
        self.mesh, self.between, self.is_followed = mesh, _Between(), False
        self.styles: dict[str, str | None] = {**kinds, **dict.fromkeys(inside)}
        there = dict(model.named_modules(remove_duplicate=False))  # what was taken out since is not
        self.modules = {path: there[path] for path in self.styles if path in there}
        self.hooks: dict[str, tuple[int, ...]] = {}

    def take(self) -> bool:
        """Put programs' hooks in their place; whether some were not there before."""
        is_new = False
        for path, module in self.modules.items():
            there = (*module._forward_hooks, *module._forward_pre_hooks)
            if there != self.hooks.get(path, ()):
                is_new |= self._take(path, module)
                self.hooks[path] = (*module._forward_hooks, *module._forward_pre_hooks)
        return is_new

    def paths(self) -> list[str]:
        """Where there are any."""
        every = {p: (*m._forward_hooks.values(), *m._forward_pre_hooks.values()) for p, m in self.modules.items()}
        return [path for path, hooks in every.items() if any(isinstance(hook, _Looking) for hook in hooks)]

    def _take(self, path: str, module: nn.Module) -> bool:
        style, is_new = self.styles[path], False
        both: Any = (module._forward_hooks, module._forward_pre_hooks)
        for is_before, hooks in enumerate(both):
            theirs = [key for key, hook in hooks.items() if isinstance(hook, _Looking) or is_of_program(hook)]
            for key in reversed(theirs) if is_before else theirs:
                if not isinstance(hooks[key], _Looking):
                    takes, gives = (self.between.parts_of,) * 2 if style is None else _parts(style)
                    hooks[key], is_new = _Looking(path, hooks[key], self.mesh, bool(is_before), takes, gives), True
                hooks.move_to_end(key, last=not is_before)
        if is_new and style is None and not self.is_followed:
            self.is_followed = True
            for other, inner in self.modules.items():
                kind = self.styles[other]
                if kind in _GIVES_PARTS:
                    inner.register_forward_hook(functools.partial(self.between.begin, parts_of(kind)))
                elif kind is not None:
                    inner.register_forward_pre_hook(self.between.end)
        return is_new


_Parts = Callable[[torch.Tensor], int]
"""How many weights' parts a tensor is of, one behind the other; 0 for one that is whole."""


def _parts(style: str) -> tuple[_Parts, _Parts]:
    """Of what a Linear takes, and gives."""
    parts = parts_of(style)
    return lambda _: parts * (style in _TAKES_PARTS), lambda _: parts * (style in _GIVES_PARTS)


class _Between:
    """What runs from a Linear that gives parts to the next that takes them: it has parts where the shape is theirs."""

    def __init__(self) -> None:
        self.shape: torch.Size | None = None
        self.parts = 0

    def begin(self, parts: int, _: nn.Module, __: Any, output: torch.Tensor) -> None:
        self.shape, self.parts = output.shape, parts

    def end(self, *_: Any) -> None:
        self.shape = None

    def parts_of(self, x: torch.Tensor) -> int:
        return self.parts if x.shape == self.shape else 0


def _agree(paths: list[str], mesh: DeviceMesh, everyone: dist.ProcessGroup | None) -> None:
    """Raises `RanksError` on all ranks where they have hooks on different modules."""
    others = f" and {len(paths) - 3} others ({zlib.crc32(repr(paths).encode())})" if len(paths) > 3 else ""
    what = (
        f"the first forward with hooks on {', '.join(map(repr, paths[:3]))}{others}, which mesh axis "
        f"{mesh.mesh_dim_names} splits: what they see is brought together, so that each rank is to have them"
    )
    ranks.gather_words(what, [0, 0], everyone or mesh.get_group())


class _Looking:
    """A program's hook, which a copy of the model has as the program gave it.

    Args:
        path: of the module that it is on.
    """

    def __init__(
        self,
        path: str,
        hook: Callable[..., Any],
        mesh: DeviceMesh,
        is_before: bool,
        parts_in: _Parts,
        parts_out: _Parts,
    ) -> None:
        self.path, self.hook, self.mesh, self.is_before, self.is_told = path, hook, mesh, is_before, False
        self.parts_in, self.parts_out = parts_in, parts_out
        self.__module__ = module_of(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.hook, memo)

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.hook(module, *given)
        args, *rest = given
        shown = tuple(self._whole(each, self.parts_in) for each in args)
        if self.is_before:
            were = [*map(_left_on, shown)]
            new = self.hook(module, shown, *rest)
            left = [now != was for now, was in zip(map(_left_on, shown), were, strict=True)]
            kept = {id(x): own for x, own, is_new in zip(shown, args, left, strict=True) if not is_new}
            new = shown if new is None and any(left) else new
            return None if new is None else self._changed(new, kept, args)
        *kwargs, output = rest
        seen = self._whole(output, self.parts_out)
        was = _left_on(seen)
        new = self.hook(module, shown, *kwargs, seen)
        is_left = _left_on(seen) != was
        new = seen if new is None and is_left else new
        return None if new is None or (new is seen and not is_left) else self._cut(new, output, self.parts_out)

    def _changed(self, new: Any, kept: Mapping[int, Any], args: tuple[Any, ...]) -> Any:
        """What a hook on inputs gives; of what it left as it was, what there was."""
        new, *kwargs = new if isinstance(new, tuple) and len(new) == 2 and isinstance(new[1], dict) else (new,)
        new = new if isinstance(new, tuple) else (new,)
        were = (*args, *new[len(args) :])
        both = zip(new, were, strict=False)
        cut = tuple(kept[id(x)] if id(x) in kept else self._cut(x, was, self.parts_in) for x, was in both)
        return (cut, *kwargs) if kwargs else cut

    def _whole(self, x: Any, parts_of: _Parts) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if is_dtensor(x):
            return plain(x.redistribute(placements=[Replicate()]))
        parts = parts_of(x) if isinstance(x, torch.Tensor) and x.dim() else 0
        if not parts:
            self._tell(x)
            return plain_part(x)
        local = DTensor.from_local(
            plain_part(x).unflatten(-1, (parts, -1)), self.mesh, [Shard(x.dim())], run_check=False
        )
        return plain(local.redistribute(placements=[Replicate()])).flatten(-2)

    def _tell(self, x: Any) -> None:
        if type(x) is OwnPart and not self.is_told:
            self.is_told = True
            (axis,) = self.mesh.mesh_dim_names or ("tensor",)
            ranks.say_once(
                f"a hook on {kind_of(self.path)!r} is shown a tensor {tuple(x.shape)} of this rank's part along axis "
                f"{axis!r} ({self.mesh.size()} ranks): its shape does not tell how it is split. Hooks on split "
                "Linears, attentions and MLPs are shown what one process has"
            )

    def _cut(self, x: Any, was: Any, parts_of: _Parts) -> Any:
        """This rank's part of what a hook gives, where it was given the whole of one."""
        from torch.distributed.tensor import Shard

        is_one = isinstance(x, torch.Tensor) and isinstance(was, torch.Tensor) and x.dim() and not is_dtensor(x)
        parts = parts_of(was) if is_one and not is_dtensor(was) else 0
        if not parts:
            return x
        whole = replicated(x.unflatten(-1, (parts, -1)), self.mesh)
        return plain(whole.redistribute(placements=[Shard(x.dim())])).flatten(-2)


def _left_on(x: Any) -> tuple[int, int, bool]:
    """What a hook leaves on a tensor: what it writes, and asks of its gradient, which is to go through it then."""
    if not isinstance(x, torch.Tensor):
        return 0, 0, False
    return 0 if x.is_inference() else x._version, len(x._backward_hooks or ()), x.retains_grad
