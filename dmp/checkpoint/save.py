"""From a model to a checkpoint's folder: what each rank holds is collected, then written; older ones go."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.checkpoint.random_state import random_state
from dmp.checkpoint.retention import remove_older
from dmp.checkpoint.sources.source import MODEL, STATE
from dmp.checkpoint.targets.native import Content, small_files, write_folder
from dmp.chunked import ChunkedTensor, as_chunks, is_dense
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError
from dmp.nested import map_nested
from dmp.places import is_dtensor
from dmp.ranks import fail_together
from dmp.state.find_wrapped import joint_plan
from dmp.state.local_chunks import sharded_parameters
from dmp.state.optimizer_state import column_widths, owned_states, param_groups


def collect(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any, env: ShardingEnv, saved_ns: int
) -> Content:
    """What this rank writes; `saved_ns` is rank 0's word on when, see [Note: order] of retention.py.

    Raises:
        CheckpointError: a weight without values, or something that could not be read back.
    """
    own = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    owned = owned_states(model, optimizer)
    tensors: dict[str, ChunkedTensor] = {}
    for name, value in own.items():
        is_cut = name in parameters or isinstance(value, ChunkedTensor)
        if is_dense(value) and (is_cut or env.rank == 0):  # whole buffers may differ: rank 0's
            if value.is_meta or is_lazy(value):
                raise CheckpointError(f"{name!r} has no values yet (it is {'on meta' if value.is_meta else 'lazy'})")
            tensors[MODEL + name] = as_chunks(value)
    for o in owned:
        for key, value in o.values.items():
            if isinstance(value, ChunkedTensor):
                tensors[f"{STATE}{o.name}.{key}"] = value
    for device, state in random_state(env).items():
        tensors[f"rng.{env.rank}.{device}"] = as_chunks(state)
    objects = {
        "extra": extra,
        "model": {name: value for name, value in own.items() if not is_dense(value)},
        "state": {o.name: {k: v for k, v in o.values.items() if not isinstance(v, torch.Tensor)} for o in owned},
        "param_groups": param_groups(owned),
    }
    if env.rank != 0:
        return Content(tensors, {})
    if env.size > 1:
        _refuse_parts(extra, model)
    about = {
        "saved_ns": saved_ns,
        "mesh": {"names": env.names, "shape": env.shape, "roles": env.roles},
        "column_widths": column_widths(model, owned),
    }
    return Content(tensors, small_files(about, joint_plan(model), _pack(objects)))


def _refuse_parts(extra: Any, model: nn.Module) -> None:
    """`extra` is rank 0's: of what is split it would keep that rank's part, and nobody would miss the rest until then.

    Raises:
        CheckpointError: a tensor that is split; or, under the name of a table, one of the shape of rank 0's part of it.
    """
    held = sharded_parameters(model)
    parts = {name: p.shape for name, (p, chunked) in held.items() if p.shape != chunked.shape}

    def check(value: Any, where: str) -> None:
        if not isinstance(value, torch.Tensor):
            return
        is_part = any(shape == value.shape and where.endswith((f"['{n}']", f".{n}']")) for n, shape in parts.items())
        if is_part or isinstance(value, ChunkedTensor) or is_dtensor(value):
            raise CheckpointError(
                f"{where} is rank 0's part of a tensor that is split over the ranks, and so is all that would be saved "
                "of it. Optimizers are saved by save_checkpoint(path, model, optimizer), averages of weights as a "
                "model, AveragedModel(model) or a copy; full_state_dict(model) and "
                "full_optimizer_state_dict(model, optimizer) give whole tensors"
            )

    map_nested(extra, check, "extra")


def _pack(objects: dict[str, Any]) -> bytes:
    """As a file that can be read without running anything from it."""
    whole = _try_to_pack(objects)
    if isinstance(whole, bytes):
        return whole
    bad = next((key for key, value in objects.items() if not isinstance(_try_to_pack(value), bytes)), "it")
    reason = next((line for line in str(whole).splitlines() if "nsupported" in line), str(whole)).strip()
    raise CheckpointError(
        f"{bad} holds something that cannot be read back safely (numbers, strings, tensors, dicts, lists and tuples "
        f"can): {reason}"
    ) from whole


def _try_to_pack(value: Any) -> bytes | Exception:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        return error
    return buffer.getvalue()


class Save(NamedTuple):
    """One save, on each rank.

    Args:
        target: the folder.
        content: what this rank writes.
        rank: its place in `group`; 0 writes what is no tensor.
        group: of all ranks; None for one process.
        keep: so many checkpoints stay in the folder that `target` lies in; None removes nothing.
    """

    target: Path
    content: Content
    rank: int
    group: dist.ProcessGroup | None
    keep: int | None

    def run(self, hurry: threading.Event | None = None) -> None:
        """Write it; then older ones go. `hurry`: of a save in the background, see writer.py.

        Raises:
            CheckpointError: on every rank, with what failed where.
        """
        write_folder(self.target, self.content, self.rank, self.group, hurry)
        keep, folder, name = self.keep, self.target.parent, self.target.name
        if keep is not None:
            what = f"{self.target} is saved, but removing what is older failed"
            fail_together(lambda: remove_older(folder, keep, name) if self.rank == 0 else [], self.group, what)
