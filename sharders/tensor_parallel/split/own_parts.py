"""What code between split Linears computes of this rank's part, followed by a class of tensors while a branch runs.

[Note: drawn apart] Ranks of a tensor group draw the same numbers, so that what all of them hold is dropped alike. What
is dropped of a part was so, too: head h and head h + H / n had one mask. Which of a branch's tensors are parts no
place in its code tells: DeBERTa drops positions that all ranks have between its scores, PEFT a Linear's input beside
its output. So what split Linears give becomes an `OwnPart`, and what is computed of one is one. What is drawn in or
like one takes a single number of the program's generator, on every rank, and goes on from that and the rank;
generators stay alike, whatever a branch drew. One value for each sample, as of stochastic depth, is the same for all
ranks. So is all that is drawn in what a branch has computed again by itself (`checkpoint` of its core): nobody follows
what is computed there the second time.

Numbers that are read of a part, and what a module keeps of one, are a rank's own: they look right, and are told.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
import zlib
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_T: Any = torch.Tensor
_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_ALWAYS = ((0, "", 1.0), (0, "", True))
_Chance = tuple[tuple[int, str, float], tuple[int, str, bool]]
_DRAWING: dict[Any, _Chance] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), ((1, "p", 0.5), (2, "training", True))),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), ((1, "p", 0.5), (2, "training", False))),
    **{
        getattr(torch, name): ((1, "p", 0.5), (2, "train", True))
        for name in ("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_")
        + ("feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout")
    },
    F.scaled_dot_product_attention: ((4, "dropout_p", 0.0), _ALWAYS[1]),
    F.rrelu: (_ALWAYS[0], (3, "training", False)),
    F.gumbel_softmax: _ALWAYS,
    **{
        getattr(torch, name): _ALWAYS
        for name in ("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "poisson")
    },
    **{
        getattr(_T, name): _ALWAYS
        for name in ("bernoulli", "bernoulli_", "multinomial", "uniform_", "normal_", "exponential_", "cauchy_")
        + ("geometric_", "log_normal_", "random_")
    },
}
"""What draws -> where its chance and whether it trains are given, and by what name; else what they are."""
_LIKE = {_T.to, _T.type_as, _T.expand_as, _T.view_as, _T.reshape_as}
"""What takes only a dtype or shape of its second argument, and may give its first itself."""
_READ = {
    getattr(_T, name)
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__complex__", "__index__")
    + ("__array__", "__format__", "is_nonzero", "equal", "allclose")
} | {torch.equal, torch.allclose, torch.is_nonzero}
"""What gives numbers, or decides by them."""


class _Here(threading.local):
    following: Following | None = None  # the innermost branch that runs


_here = _Here()


class Following:
    """One call of a branch whose parts are followed.

    Args:
        place: a number of this rank's, another on each of the tensor axis.
        read: called with what reads a number of a part.
    """

    def __init__(self, place: int, read: Callable[[str], object]) -> None:
        self.place, self.read = place, read
        self.has_drawn = False
        self._parts: list[ref[torch.Tensor]] = []
        self._around = _here.following
        # Of what calls the module: frames inside are looked at.
        self._frame: FrameType | None = sys._getframe(2)
        self._hooks = _saving()
        _here.following = self

    def follow(self, part: torch.Tensor) -> None:
        """It is of a part, and so is what is computed of it."""
        part.__class__ = OwnPart
        self._parts.append(ref(part))

    def end(self) -> None:
        """Nothing outside has to do with the class: what is left is as it was."""
        for each in self._parts:
            part = each()
            if part is not None and type(part) is OwnPart:
                part.__class__ = torch.Tensor  # type: ignore[assignment]
        _here.following, self._frame = self._around, None

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Drawn for this rank alone, where ranks are to have something of their own."""
        like = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)), None)
        if like is None or like.is_meta or (like.dim() > 1 and set(like.shape[1:]) == {1}) or self._is_kept_inside():
            return func(*args, **kwargs)
        self.has_drawn = True
        return drawn_apart(self.place, like.device, func, args, kwargs)

    def _is_kept_inside(self) -> bool:
        """Whether a part of the branch is computed again by itself, where nobody follows."""
        if any(now is not was for now, was in zip(_saving(), self._hooks, strict=True)):
            return True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            if frame.f_code is _CHECKPOINT:  # without gradients, as in another that is around, it saves nothing
                return True
            frame = frame.f_back
        return False


class OwnPart(torch.Tensor):
    """Computed of this rank's part, while its branch runs."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The same, followed."""
        if len(types) > 1 and not all(each is cls or each is torch.Tensor for each in types):
            return NotImplemented  # another class has its own to do with it
        following = _here.following
        with torch._C.DisableTorchFunctionSubclass():
            if following is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            if func in _DRAWING and all(_given(args, kwargs or {}, *each) for each in _DRAWING[func]):
                result = following.draw(func, args, kwargs or {})
            else:
                result = func(*args, **kwargs) if kwargs else func(*args)
        kind = type(result)
        if kind is torch.Tensor:
            if func not in _LIKE or type(args[0]) is cls:
                following.follow(result)
        elif kind is cls:
            pass  # written in place
        elif isinstance(result, tuple | list):
            for each in result:
                if type(each) is torch.Tensor:
                    following.follow(each)
        elif func in _READ:
            following.read(func.__name__)
        elif func is _T.__setitem__ and type(args[0]) is torch.Tensor:
            following.follow(args[0])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Plain."""
        return plain_part(self).detach().clone()


def _given(args: Any, kwargs: Any, at: int, name: str, otherwise: Any) -> Any:
    return kwargs.get(name, args[at] if name and len(args) > at else otherwise)


def follow(part: Any) -> Any:
    """The same tensor: it is of a part, where some branch is followed."""
    if _here.following is not None and type(part) is torch.Tensor:
        _here.following.follow(part)
    return part


def plain_part(x: Any) -> Any:
    """As it is for code that is no branch's own, such as exchanges."""
    if type(x) is not OwnPart:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def kind_of(path: str) -> str:
    """For all modules like it: of a hundred blocks one message is enough."""
    return re.sub(r"\b\d+\b", "*", path)


def place_of(mesh: DeviceMesh) -> int:
    """A number of this rank's, another on each of the tensor axis."""
    return zlib.crc32(f"part {mesh.get_local_rank()} of {mesh.size()} along {mesh.mesh_dim_names}".encode())


def drawn_apart(place: int, device: torch.device, func: Any, args: Any, kwargs: Any) -> Any:
    """What a function that draws gives, with other numbers on each rank; generators go on alike.

    Args:
        place: a number of this rank's.
        device: on which it draws.
    """
    given = kwargs.get("generator")
    if given is not None:
        number = int(torch.randint(2**62, (), generator=given, device=given.device))
        own = torch.Generator(given.device).manual_seed(number ^ place)
        return func(*args, **{**kwargs, "generator": own})
    if device.type != "cpu":
        return _drawn_on_device(place, device, func, args, kwargs)
    number = int(torch.randint(2**62, (), device="cpu"))
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(number ^ place)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_rng_state(before)


def _drawn_on_device(place: int, device: torch.device, func: Any, args: Any, kwargs: Any) -> Any:
    """By another seed at the same offset: to take a number of a device would be to wait for it."""
    of_device = torch.get_device_module(device.type)
    is_recorded = getattr(of_device, "is_current_stream_capturing", lambda: False)()
    before = None if is_recorded else of_device.get_rng_state(device)
    if before is None or before.numel() != 16:  # a recorded graph, or a generator of another kind: a seed is no number
        return func(*args, **kwargs)
    own = before.clone()
    own.view(torch.int64)[0] ^= place
    of_device.set_rng_state(own, device)
    try:
        return func(*args, **kwargs)
    finally:
        before[8:] = of_device.get_rng_state(device)[8:]
        of_device.set_rng_state(before, device)


def is_compiled() -> bool:
    """Whether this is in what torch.compile runs, of which a part may run as written."""
    return torch.compiler.is_compiling() or get_eval_frame_callback() is not None


def _saving() -> tuple[Any, Any]:
    """What is called on tensors that a backward pass needs; private in torch."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks or (None, None)
