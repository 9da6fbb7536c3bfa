"""Branches in which parts are followed: where something is drawn in them at every call, else at a few, to look.

To follow costs some microseconds for each operation. So a branch is followed in the first forwards, ever more rarely
after that, and when a chance has changed; one in which ranks have drawn apart is followed at every call from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dmp import join_name, ranks, tensors_of
from sharders.tensor_parallel.split.own_heads import OwnHeads
from sharders.tensor_parallel.split.own_parts import (
    Following,
    OwnPart,
    follow,
    is_compiled,
    kind_of,
    place_of,
    plain_part,
)
from sharders.tensor_parallel.split.styles import Style, family
from sharders.tensor_parallel.structure.linears import features_of, is_joint_attention
from sharders.tensor_parallel.structure.transformer import outward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_WHOLE = ("colwise_gather", "colwise_loss_parallel")
_ADVICE = "each rank has another. Hooks on split Linears, and on modules between, are shown what one process has"


def follow_branches(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Style]) -> Looks:
    """Have the model's branches draw apart what is a rank's own, and say what they read or keep of it.

    Args:
        model: after it is split.
        mesh: the tensor axis.
        styles: by which it is.

    Returns:
        at which forwards all are followed.
    """
    import torch._dynamo.config as compiling

    compiling.nontraceable_tensor_subclasses.add(OwnPart)
    modules = dict(model.named_modules())
    looks = Looks()
    for path in _around(modules, styles):
        _Branch(path, mesh, looks).watch(modules[path])
    for path, style in styles.items():
        if is_joint_attention(modules[path]) or isinstance(modules[path], nn.Embedding):
            continue
        if family(style) in ("rowwise", "norm"):
            modules[path].register_forward_pre_hook(_enter, prepend=True)
        if _gives_part(style):
            modules[path].register_forward_hook(_give)
    model.register_forward_pre_hook(looks.begin)
    model.register_forward_hook(looks.end, always_call=True)
    return looks


def _gives_part(style: Style) -> bool:
    if isinstance(style, str):
        return family(style) in ("colwise", "norm") and style not in _WHOLE
    return family(style) == "colwise" and all(placed.is_shard() for placed in style.output_layouts)  # type: ignore[attr-defined]


def _enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return (plain_part(args[0]), *args[1:]) if args and type(args[0]) is OwnPart else None


def _give(_: nn.Module, __: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        follow(output)


def _around(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> list[str]:
    """Modules in whose forward a part is made and used up: the innermost around split Linears and that which takes what
    they give, that are called."""
    linears = {p: style for p, style in styles.items() if features_of(modules[p]) is not None}
    order = {path: number for number, path in enumerate(linears)}
    downs = [path for path, style in linears.items() if family(style) == "rowwise"]
    found = {path: None for path, style in styles.items() if family(style) == "experts"}
    for up, style in linears.items():
        if not _gives_part(style):
            continue
        rank = {down: (-len(_common(up, down)), order[down] < order[up], order[down]) for down in downs}
        around = ".".join(_common(up, min(downs, key=rank.__getitem__))) if downs else up.rpartition(".")[0]
        called = (path for path in outward(around) if not isinstance(modules[path], nn.ModuleList | nn.ModuleDict))
        found[next(called)] = None
    return [*found]


def _common(up: str, down: str) -> list[str]:
    """Names of the modules around both."""
    shared = []
    for one, other in zip(up.split(".")[:-1], down.split(".")[:-1], strict=False):
        if one != other:
            break
        shared.append(one)
    return shared


class Looks:
    """At which forwards of a model all branches are followed."""

    def __init__(self) -> None:
        self.is_one = False
        self._calls = {True: 0, False: 0}
        self._chances: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str]]] = WeakKeyDictionary()
        self._were: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Looks:
        return self

    def begin(self, model: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._calls[model.training] += 1
        num = self._calls[model.training]
        if model not in self._chances:
            self._chances[model] = [*_chances(model)]
        now = [owner.get(name) for owner, name in self._chances[model]]
        self.is_one = not num & (num - 1) or now != self._were
        self._were = now

    def end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.is_one = False


def _chances(model: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Attributes with which a model is told how much to drop."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_one = "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            if is_one and type(value) in (int, float):
                yield vars(module), name


class _Branch:
    """Hooks of one module and of its copies.

    Args:
        path: of it.
        looks: of the model.
    """

    def __init__(self, path: str, mesh: DeviceMesh, looks: Looks) -> None:
        (axis,) = mesh.mesh_dim_names or ("tensor",)
        self.path, self.looks, self.axis, self.size = path, looks, axis, mesh.size()
        self.place = place_of(mesh)
        self._draws: WeakKeyDictionary[nn.Module, dict[bool, bool]] = WeakKeyDictionary()
        """While it trains, or not; nothing where nobody has looked."""
        self._calls: list[Following | None] = []
        self._kept: list[tuple[str, torch.Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Branch:
        return self

    def watch(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.begin, prepend=True)
        module.register_forward_hook(self.after, always_call=True)
        module.register_forward_hook(self.end, prepend=True, always_call=True)

    def begin(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        is_followed = self.looks.is_one or self._draws.get(module, {}).get(module.training, True)
        self._calls.append(Following(self.place, self._read) if is_followed and not is_compiled() else None)

    def end(self, module: nn.Module, *_: Any) -> None:
        """Before all other hooks."""
        if torch.compiler.is_compiling() or not self._calls:
            return
        following = self._calls.pop()
        if following is None:
            return
        draws = self._draws.setdefault(module, {})
        if self.looks.is_one or module.training not in draws:
            self._kept = [*_kept_in(module)]
        draws[module.training] = following.has_drawn or draws.get(module.training, False)
        following.end()

    def after(self, module: nn.Module, *_: Any) -> None:
        """Attention weights have been marked, and are whole to whoever reads them."""
        if torch.compiler.is_compiling() or not self._kept:
            return
        kept, self._kept = self._kept, []
        names = [
            name for name, tensor in kept if type(tensor) is not OwnHeads and (tensor.dim() < 4 or module.training)
        ]
        if names:
            self._tell(f"keeps {', '.join(map(repr, dict.fromkeys(names)))}")

    def _read(self, how: str) -> None:
        self._tell(f"reads a number ({how})")

    def _tell(self, said: str) -> None:
        ranks.say_once(
            f"module {kind_of(self.path)!r}, whose Linears are split over axis {self.axis!r} ({self.size} ranks), "
            f"{said} of this rank's part of what it computes: {_ADVICE}"
        )


def _kept_in(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parts that modules hold when they have run, by name."""
    for path, inner in module.named_modules():
        held = {k: v for k, v in vars(inner).items() if not k.startswith("_") or isinstance(v, torch.Tensor)}
        held |= inner._buffers
        for name, value in held.items():
            for _, tensor in tensors_of(value) if isinstance(value, torch.Tensor | list | tuple | dict) else ():
                if type(tensor) is OwnPart:
                    yield join_name(path, name), tensor
