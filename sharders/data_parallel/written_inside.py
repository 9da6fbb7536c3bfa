"""Weights that the model's own code writes while they are gathered: a momentum encoder's, one that is clamped.

FSDP2 frees what it has gathered, and gathers the chunks anew: what was written into the whole weight was lost, in
silence, where the same model on copies keeps it. So before it is freed, each rank puts its chunk of it in place.

[Note: looks] Writes are told by the version of the tensor, and by its memory, where `p.data = ...` put other memory
there. What goes through `p.data`, `p.data.clamp_(...)`, counts no version: values are added up when they are gathered
and again before they are freed. So the first few times, and now and then later. A parameter of the model's own making
in its place, `codebook.weight = nn.Parameter(...)`, is written into it, and freed with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dmp import ShardError, checksum, is_dtensor, ranks
from sharders.data_parallel.fsdp_units import OfWeights, be_too, weights_below
from sharders.data_parallel.replaced import is_lent

_FIRST, _LATER, _LATER_BESIDE = 8, 32, 512
"""Looks at the values: the first so many times that a weight is gathered, and every so many times after these; on
accelerators, which a program waits for then, more rarely."""

_HOW = "write into it under torch.no_grad(), by p.copy_(...), p.mul_(...) and their like"


def keep_writes(module: Any, group: dist.ProcessGroup | None) -> None:
    """Have what is written into gathered weights last.

    Args:
        module: the root, after `fully_shard`.
        group: of the ranks that have chunks or copies of the same weights.
    """
    for held in be_too(_Keeping, weights_below(module)):
        held.written_by = group


class _Keeping(OfWeights):  # type: ignore[misc]
    gathered_at: tuple[int, int] | None = None  # versions of the whole and of the chunk, while there is a whole
    written_by: dist.ProcessGroup | None
    told: int | None = None  # of the whole's values when it was gathered, where they are looked at
    is_through_data = False
    gathers = writes = 0

    def to_unsharded(self) -> None:
        super().to_unsharded()
        if self.gathered_at is None and len(self.all_gather_outputs) == 1 and not self._unsharded_inner_tensors:
            whole = self._whole()
            self.gathered_at = whole._version, self.sharded_param._version
            self.gathers += 1
            every = _LATER if whole.device.type == "cpu" else _LATER_BESIDE
            is_looked_at = not self.is_through_data and (self.gathers <= _FIRST or self.gathers % every == 0)
            self.told = checksum(whole) if is_looked_at else None

    def to_sharded(self) -> None:
        self._look()  # before the chunk is in the module again, in the place of what the model has put there
        super().to_sharded()

    def to_sharded_post_forward(self) -> None:
        self._look()
        super().to_sharded_post_forward()

    def free_unsharded_param(self) -> None:
        self._look()
        super().free_unsharded_param()

    def _whole(self) -> torch.Tensor:
        """Of one that is split over another axis too, what this rank has of it: the tensor itself, not a view as
        `local_of` gives, for its memory is put back. Asked for at each gathering, where a `getattr` that finds nothing
        costs more than all the rest."""
        found: torch.Tensor = self._unsharded_param._local_tensor if self.is_dtensor else self._unsharded_param
        return found

    def _look(self) -> None:
        at, self.gathered_at = self.gathered_at, None
        if at is not None:
            self._take_replaced()
            if self._is_written(at[0]):
                self._keep(at[1])

    def _take_replaced(self) -> None:
        place = self._module_info
        now = place.module._parameters.get(place.param_name)
        kept = self._unsharded_param
        if now is None or now is kept or now is self.sharded_param or is_lent():
            return
        if is_dtensor(now) and not (is_dtensor(kept) and now.device_mesh == kept.device_mesh):
            return  # chunks, as of load_state_dict(assign=True): `replaced` takes them
        whole, now = self._whole(), getattr(now, "_local_tensor", now)
        if (now.shape, now.dtype) != (whole.shape, whole.dtype):
            raise ShardError(
                f"{self._param_fqn!r}, of which ranks have chunks, has another parameter in its place since it was "
                f"gathered, {tuple(now.shape)} of {now.dtype} where it is {tuple(whole.shape)} of {whole.dtype}: {_HOW}"
            )
        with torch.no_grad():
            whole.copy_(now)

    def _is_written(self, version: int) -> bool:
        """The same on all ranks, which have the same whole and run the same code."""
        whole, gathered = self._whole(), self.all_gather_outputs[0]
        if whole.dtype is not gathered.dtype:  # cast by the model's code, which `cast_inside` looks at
            self._put_back(whole)
            return False
        if whole.data_ptr() != gathered.data_ptr() or whole._version != version or self.is_through_data:
            return True
        if self.told is None or self.told == checksum(whole):
            return False
        if self.gathers > _FIRST:
            raise ShardError(
                f"{self._param_fqn!r}, of which ranks have chunks, was written through p.data while it was "
                f"gathered, and not the first {_FIRST} times; what was written since may be lost: {_HOW}"
            )
        self.is_through_data = True
        return True

    def _keep(self, of_chunk: int) -> None:
        whole, chunk = self._whole(), self._sharded_local_tensor
        if whole.dtype is not chunk.dtype or self.sharded_param._version != of_chunk:
            why = (
                f"in {whole.dtype}, in which it is gathered, where it is kept in {chunk.dtype}"
                if whole.dtype is not chunk.dtype
                else "and its chunks were written too, as by an optimizer, before it was freed"
            )
            raise ShardError(
                f"{self._param_fqn!r} was written by the model while it was gathered, {why}: write it outside of "
                "the forward, where model.parameters() has the chunks"
            )
        self.writes += 1
        if self.writes <= _FIRST or not self.writes & (self.writes - 1):
            self._compare(whole)
        with torch.no_grad():
            chunk.copy_(self._own(whole))
        if chunk.device.type != "cpu":
            torch.accelerator.synchronize()  # else what is gathered on another stream may be older
        if whole.data_ptr() != self.all_gather_outputs[0].data_ptr():
            self._put_back(whole)

    def _put_back(self, whole: torch.Tensor) -> None:
        """The memory that is gathered into, with what the program has put in its place."""
        gathered = self.all_gather_outputs[0].as_strided(self._orig_size, self._contiguous_orig_stride, 0)
        with torch.no_grad():
            gathered.copy_(whole)
        whole.data = gathered

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of it."""
        dim, length = self.fsdp_placement.dim, self._sharded_local_tensor.shape
        each = -(-whole.shape[dim] // getattr(self.mesh_info, "shard_mesh_size", 1))
        start = min(each * getattr(self.mesh_info, "shard_mesh_rank", 0), whole.shape[dim])
        return whole.detach().narrow(dim, start, length[dim])

    def _compare(self, whole: torch.Tensor) -> None:
        """With what others have written, of which each keeps a part; the first times, then ever more rarely."""
        of_ranks = ranks.gather_words("what the model has written into its weights", [checksum(whole)], self.written_by)
        if any(each != of_ranks[0] for each in of_ranks):
            raise ShardError(
                f"{self._param_fqn!r} was written by the model while it was gathered, to other values on other "
                "ranks, as by what their own batches give: write the same on all (an all_reduce of what it comes "
                "of), or hold it as a buffer"
            )
