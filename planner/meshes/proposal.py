"""`MeshProposal`: a mesh with what a step takes on it; `MeshProposals`: several, best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dmp import ShardingEnv, shown_bytes
from planner.meshes.shapes import Shape

_REJECTED_SHOWN = 4


@dataclass(frozen=True)
class MeshProposal:
    """A mesh, and what a step takes on it as modelled.

    Args:
        shape: sizes of the axes, outer first.
        axes: their names.
        step_seconds: of a step on all devices; None where it does not fit.
        table_seconds: of that, the tables' phases.
        dense_seconds: of that, the dense part, by what it goes to.
        rank_bytes: memory of the fullest rank, tables, dense weights and activations; None where that was not found.
        recomputes: fits, and is costed, with activation checkpointing of the repeated blocks alone.
        why: it is as good as it is, or why it does not fit.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    step_seconds: float | None
    table_seconds: float
    dense_seconds: Mapping[str, float]
    rank_bytes: int | None
    recomputes: bool
    why: str

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.step_seconds is not None

    def env(self, device_type: str = "cuda") -> ShardingEnv:
        """Env of the mesh, for planning; to train, `init_device_mesh(device_type, shape, mesh_dim_names=axes)`."""
        return ShardingEnv.abstract(self.shape, self.axes, device_type)

    def __str__(self) -> str:
        return str(Shape(self.shape, self.axes))


@dataclass(frozen=True)
class MeshProposals:
    """Meshes for a module, best first; `str()` is a table.

    Args:
        fitting: those with a plan.
        rejected: those without, with the reason.
        said: what was taken for granted.
    """

    fitting: tuple[MeshProposal, ...]
    rejected: tuple[MeshProposal, ...]
    said: tuple[str, ...]

    def __iter__(self) -> Iterator[MeshProposal]:
        return iter(self.fitting)

    def __len__(self) -> int:
        return len(self.fitting)

    def __getitem__(self, index: int) -> MeshProposal:
        return self.fitting[index]

    def __str__(self) -> str:
        names = [str(each) for each in (*self.fitting, *self.rejected[:_REJECTED_SHOWN])]
        width = max(map(len, ["mesh", *names]))
        lines = [f"{'mesh':<{width}}{'step':>13}{'tables':>13}{'dense':>13}{'on a rank':>12}  why"]
        for each in self.fitting:
            assert each.step_seconds is not None and each.rank_bytes is not None
            times = (each.step_seconds, each.table_seconds, sum(each.dense_seconds.values()))
            lines.append(
                f"{each!s:<{width}}"
                + "".join(f"{seconds * 1e3:>10.2f} ms" for seconds in times)
                + f"{shown_bytes(each.rank_bytes):>12}  {each.why}"
            )
        lines += [f"{each!s:<{width}}  does not fit: {each.why}" for each in self.rejected[:_REJECTED_SHOWN]]
        if len(self.rejected) > _REJECTED_SHOWN:
            lines.append(f"and {len(self.rejected) - _REJECTED_SHOWN} more that do not fit")
        return "\n".join([*lines, *(f"note: {text}" for text in self.said)])
