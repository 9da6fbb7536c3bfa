"""`Layout`: how one parameter is cut into rectangles, each on one rank.

[Note: layouts and shards]
A *layout* is what a user writes (`row_wise()`); it is data: a name and arguments. For a shape and an env it resolves to
*shards*: `Shard(offsets, sizes, rank)` rectangles that cover the parameter exactly once (or whole on every rank, for
`data_parallel`). Everything after the plan (sharders, state, checkpoints) reads shards only; a layout's name is for
printing and for plans' JSON, and what else a reader needs is a property. `rank` counts in the mesh's flattened shard
and tensor axes (`ShardingEnv.table_rank`).

There are two types: a `TableLayout` names ranks, a `DenseLayout` follows the mesh's axes. `Layout` is both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dmp.errors import ShardError
from dmp.layouts.integers import integers
from dmp.layouts.runs import as_python, lengthened, shortened
from dmp.layouts.shard import Shard
from dmp.read_values import shown

if TYPE_CHECKING:
    from typing_extensions import Self

    from dmp.env import ShardingEnv

_NO_NAME = object()
_constructors: dict[str, Callable[..., Layout]] = {}


def known_in_json(*constructors: Callable[..., Layout]) -> None:
    """Have `Layout.from_json` know functions that make layouts of their own names."""
    _constructors.update({make.__name__: make for make in constructors})


@dataclass(frozen=True, init=False)
class Layout:
    """How a parameter is cut: a name and arguments, resolved by `shards`. Use the constructors, such as `row_wise`.

    One that is written by hand, `Layout("table_wise", (("rank", 1),))`, is what its constructor makes of that.

    Raises:
        ShardError: an unknown layout name or argument.
    """

    name: str
    args: tuple[tuple[str, Any], ...] = ()
    is_dense: ClassVar[bool] = False
    """Whether it is one of a dense weight."""

    def __new__(cls, name: Any = _NO_NAME, args: Any = ()) -> Layout:
        if name is _NO_NAME:  # `pickle` and `copy` begin with an empty one
            return object.__new__(cls)
        try:
            given = dict(args)
        except (TypeError, ValueError) as error:
            raise ShardError(f"Layout.args must be (name, value) pairs; got {shown(args)}") from error
        return Layout.from_json({**given, "layout": name})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Pickles from before there were two types name `Layout`: what they hold tells which it is."""
        if type(self) is Layout:
            object.__setattr__(self, "__class__", type(Layout(**state)))
        self.__dict__.update(state)

    @classmethod
    def of(cls, name: str, **args: Any) -> Self:
        """For a constructor, which has looked at its arguments."""
        layout = object.__new__(cls)
        layout.__dict__.update(name=name, args=tuple(args.items()))
        return layout

    def shards(self, shape: Sequence[int], env: ShardingEnv) -> tuple[Shard, ...]:
        """Rectangles that cover `shape` exactly, in order of their offsets as the constructor gives them.

        Raises:
            ShardError: a rank that does not exist, rectangles that overlap or leave a hole, a mesh without the axes
                that the layout needs.
        """
        if not hasattr(env, "table_shape"):
            raise ShardError(f"a layout resolves for a ShardingEnv; got {shown(env)}")
        shape = integers("a parameter's shape", shape)
        if any(n < 0 for n in shape):
            raise ShardError(f"a parameter's shape must be integers >= 0; got {shape}")
        return self.resolve(shape, env)

    def resolve(self, shape: tuple[int, ...], env: ShardingEnv) -> tuple[Shard, ...]:
        """`shards` of a shape and env that are known to be such; each type has its own."""
        raise NotImplementedError

    def check(self, shape: Sequence[int], env: ShardingEnv) -> None:
        """Raise what `shards` would, where a layout can tell without them; there may be thousands."""
        self.shards(shape, env)

    def relocated(self, moved: Mapping[int, int], env: ShardingEnv) -> Layout:
        """The same on other ranks; itself where it names none.

        Args:
            moved: table rank -> table rank, for every one of `named_ranks`.
        """
        return self

    def over(self, ranks: Sequence[int]) -> Layout:
        """Of one that takes all ranks because it names none: the same on these alone; any other is itself."""
        return self

    def named_ranks(self, env: ShardingEnv) -> tuple[int, ...]:
        """Table ranks that its arguments name, whether anything lies there or not (of a host its first)."""
        asked = _Asked()
        self.relocated(asked, env)
        return tuple(asked)

    @property
    def is_copied(self) -> bool:
        """Whether every rank keeps the whole parameter: `data_parallel`, `replicate`."""
        return self.name in ("data_parallel", "replicate")

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether it is one of a tensor-parallel module: `colwise`, `rowwise`, `sequence`."""
        return False

    def tensor_dim(self, num_dims: int) -> int | None:
        """The dim, of a parameter with so many, that is split over the tensor axis; None where none is."""
        return None

    @property
    def splits_inputs(self) -> bool:
        """Whether input features are what is split over the tensor axis, so that outputs are sums over its ranks."""
        return False

    @property
    def num_parts(self) -> int:
        """Equal parts along that dim, of each of which a rank has its share."""
        return 1

    def __str__(self) -> str:
        shown = ", ".join(_show(key, value) for key, value in self.args if value is not None)
        return f"{self.name}({shown})"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form, read back by `Layout.from_json`."""
        return {"layout": self.name, **{key: shortened(value) for key, value in self.args if value is not None}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """Inverse of `to_json`.

        Raises:
            ShardError: an unknown layout name or argument.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise ShardError(f'expected {{"layout": name, and its arguments}}; got {shown(data)}')
        args = dict(data)
        name = args.pop("layout", None)
        if not isinstance(name, str) or name not in _constructors:
            raise ShardError(f"unknown layout {shown(name)}; known layouts: {', '.join(sorted(_constructors))}")
        try:
            return _constructors[name](**{key: lengthened(value) for key, value in args.items()})
        except TypeError as error:
            raise ShardError(f"layout {name!r} does not take these arguments {shown(args)}: {error}") from error


@dataclass(frozen=True)
class ParameterSharding:
    """One entry of a plan.

    Args:
        layout: how the parameter is cut.
        kernel: as TorchRec's plans say it. `"fused"`: updated in the backward pass; where nobody gave an optimizer, by
            FBGEMM's default, SGD with lr 0.01. `"dense"`: an ordinary parameter, whatever optimizer
            `apply_optimizer_in_backward` gave it. None: whichever the table's optimizer makes it.
        sharding_type: what TorchRec calls the layout, where its plan said so and another name would fit as well.

    Raises:
        ShardError: what is no layout, or no such kernel.
    """

    layout: Layout
    kernel: str | None = None
    sharding_type: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise ShardError(f"a ParameterSharding holds a layout such as row_wise(); got {shown(self.layout)}")
        if self.kernel not in (None, "fused", "dense"):
            raise ShardError(f"ParameterSharding.kernel is 'fused', 'dense' or None; got {shown(self.kernel)}")
        if self.sharding_type is not None and not isinstance(self.sharding_type, str):
            raise ShardError(f"ParameterSharding.sharding_type is a name or None; got {shown(self.sharding_type)}")

    def __str__(self) -> str:
        return str(self.layout) + (f", {self.kernel}" if self.kernel else "")

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form, read back by `ParameterSharding.from_json`."""
        said = {"kernel": self.kernel, "sharding_type": self.sharding_type}
        return {**self.layout.to_json(), **{key: value for key, value in said.items() if value is not None}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ParameterSharding:
        """Inverse of `to_json`.

        Raises:
            ShardError: an unknown layout, argument or kernel.
        """
        said = dict(data) if isinstance(data, Mapping) else {}
        options = {key: said.pop(key, None) for key in ("kernel", "sharding_type")}
        return ParameterSharding(Layout.from_json(said if said else data), **options)


class _Asked(dict[int, int]):
    """Each rank to itself, and which ranks were asked for."""

    def __missing__(self, rank: int) -> int:
        return self.setdefault(rank, rank)


def _show(key: str, value: Any) -> str:
    text = f"{len(value)} shards" if key == "shards" else as_python(value)
    return f"{key}={text}" if key in ("widths", "parts") else text
