"""Checkpoints: saved on any mesh and plan, loaded on any other, or into a plain module.

[Note: on disk]
A folder of torch's distributed checkpoint, readable by `torch.distributed.checkpoint` as it stands:
    .metadata, *.distcp   tensors `model.<name>`, `optimizer.state.<name>.<state>`, `rng.<rank>.<device>`, unsharded
    dmp.json              format version, the mesh, widths of column blocks (see optimizer_state.py)
    plan.json             the plan
    objects.pt            what is no tensor: extra, param groups by name, counters; read with `weights_only`
    tensors.json          what .metadata says, in JSON; see [Note: tensors.json] of tensors_json.py
    checksums.json        CRC-32 of the other small files; those of tensors lie beside them
Names of files with tensors are of this save alone, see [Note: names] of writer.py.
It is written beside the path as `.<name>.saving`, under a claim on the path (claim.py), `checksums.json` last, and
renamed when every rank is done. Each tensor is stored in pieces of 16 MB at most, each by one of the ranks that hold
it.

[Note: nothing half done]
Before it changes the model, loading checks every name, shape and dtype, and reads all that will be read once to compare
checksums, each rank a share of it; when one rank raises, every rank does. The bytes are then read again, straight to
where they belong: to hold them in between would double the memory.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from dmp.calls import alone, calls_of
from dmp.checkpoint.background import PendingSave, wait_for_pending, write_in_background
from dmp.checkpoint.place import place_on_all
from dmp.checkpoint.random_state import prepare_random_state
from dmp.checkpoint.renaming import Rename, fitted, renamed
from dmp.checkpoint.restore import CheckedLoad, prepare
from dmp.checkpoint.retention import next_saved_ns
from dmp.checkpoint.save import Save, collect
from dmp.checkpoint.sources.checksums import compare
from dmp.checkpoint.sources.detect import open_source
from dmp.checkpoint.targets.native import Content, check_target
from dmp.env import ShardingEnv, default_env
from dmp.errors import CheckpointError
from dmp.ranks import entry, fail_together, results_of_all
from dmp.state.find_wrapped import env_of, known_env, unsharded_parameters
from dmp.state.optimizer_state import told_of
from dmp.wrap.optimizers.drifted import look_for_drift
from dmp.wrap.values.half_steps import say_of_half_a_step


@alone("save_checkpoint", at_rest=True)
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    asynchronous: bool = False,
    keep_last: int | None = None,
) -> PendingSave | None:
    """Save weights, optimizer state, random state and `extra`, to be loaded on any mesh and plan.

    Between two steps: after a backward pass, tables that are updated in it are a step ahead of all else until
    `optimizer.step()`, which is said once.

    Collective over `model.env` (for a plain module: the ranks of its DTensors, else the default group). An existing
    checkpoint at `path` is replaced in one step when the new one is whole; a failed save leaves it as it was. Anything
    else that lies there, a folder with other files in it or a file, is an error before a byte is written. So is a
    second save to the path while one runs, of any process that sees it.

    Args:
        path: a folder that every rank sees.
        model: a `DistributedModelParallel`, or any module.
        optimizer: an ordinary optimizer over its parameters; state of in-backward optimizers is saved without it.
        extra: rank 0's, any nest of dicts, lists, tuples, numbers, strings and whole tensors.
        asynchronous: return after copying the state; the copy is written in the background.
        keep_last: when the new checkpoint is in place, remove all but the newest so many in the folder that `path` lies
            in, and what saves that were cut short left there (see `keep_last`); None removes nothing.

    Returns:
        A handle with `.wait()` when asynchronous.

    Raises:
        CheckpointError: on every rank, with what failed where.
        ShardError: it is called inside a forward or backward of the model, as by the handler of a signal.
    """
    target = place_on_all(path, "save_checkpoint(path, model, ...)", model, _env_of_save)
    target = target.resolve() if target.name == ".." else target
    env = _env_of_save(model)

    def collected() -> Content:
        """Nothing is written yet: what is wrong is raised on all ranks."""
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(f"keep_last: expected a count of at least 1, got {keep_last}")
        if env.rank == 0:
            check_target(target)
        return collect(model, optimizer, extra, env, next_saved_ns(target.parent) if env.rank == 0 else 0)

    wait_for_pending()
    with entry("save_checkpoint", env.everyone):
        steps = [calls.so_far() for calls in calls_of(model)]
        same = ", ".join(filter(None, (f"{keep_last=}, {asynchronous=}, {told_of(optimizer)}", *steps)))
        content = fail_together(collected, env.everyone, f"saving {target}", same=same)
        look_for_drift(unsharded_parameters(model), env, "save_checkpoint")
        say_of_half_a_step(model)
        save = Save(target, content, env.rank, env.everyone, keep_last)
        return write_in_background(save) if asynchronous else save.run()


def _env_of_save(model: nn.Module) -> ShardingEnv:
    return known_env(model) or default_env()


@alone("load_checkpoint", at_rest=True)
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rename: Rename | None = None,
    strict: bool = True,
    cast: bool = False,
) -> Any:
    """Fill a model, and its optimizer, from a checkpoint of any mesh and plan; returns `extra` as it was saved.

    Collective over `model.env`; a plain module without DTensors is filled by this process alone. Each rank reads what
    it holds. In-backward optimizers are filled too, `optimizer` where it is given; a checkpoint without any optimizer
    state leaves in-backward optimizers as they are. Random state comes back rank by rank on an equal mesh; on another
    it is derived from the saved state and the data rank (tensor-parallel ranks draw the same).

    Args:
        path: one of
            - a folder that `save_checkpoint` wrote;
            - any folder of torch's distributed checkpoint, TorchRec's too: weights, and optimizer state by parameter
              name (see [Note: names] of sources/dcp.py); learning rates stay the model's;
            - a safetensors file, or a Hugging Face folder of one or several: weights;
            - a `torch.save` file of a full state dict, or of
              `{"model": full_state_dict(m), "optimizer": full_optimizer_state_dict(m, o), "extra": ...}`; the keys may
              also be `state_dict`, `model_state_dict`, `optimizer_state_dict`. torch.optim's own state dict will do
              for the optimizer where it was made from `model.named_parameters()`: else it says no names;
            - what none of these readers knows and an installed package does (entry point `dmp.sources`, see
              sources/detect.py).
        model: a `DistributedModelParallel`, or any module.
        optimizer: an ordinary optimizer over its parameters, stepped or not.
        rename: the checkpoint's names -> the model's: a function, or a dict that names parameters or modules. A prefix
            that all names have (`module.`, `model.`), or all lack, is found without it; the logger "dmp" says so.
        strict: False passes over names that only the checkpoint or only the model has, as of tables that were added;
            the logger "dmp" says which. What the model has alone stays as it is, its optimizer state too.
        cast: weights and optimizer state of another floating dtype become the model's, rounded as `Tensor.to` does; by
            default they are an error, as what is lost in bfloat16 does not come back.

    Raises:
        CheckpointError: on every rank, naming file and parameter: a missing, damaged or newer file, a missing or
            unknown name, another shape or dtype. The model is unchanged then.
    """
    source_path = place_on_all(path, "load_checkpoint(path, model, ...)", model, env_of)
    env = env_of(model)
    what, group = f"loading {source_path}", env.everyone

    def checked() -> CheckedLoad:
        """Nothing is changed yet: what does not fit is raised on all ranks."""
        source = fitted(renamed(open_source(source_path), rename), model.state_dict())
        load = prepare(source, model, optimizer, strict=strict, cast=cast)
        prepare_random_state(load, env)
        return load

    wait_for_pending()
    with entry("load_checkpoint", group):
        load = fail_together(checked, group, what, same=f"{strict=}, {cast=}, {told_of(optimizer)}")
        when = load.source.about.get("saved_ns")  # what one host sees may be older than what another does
        ranges = results_of_all(lambda: load.check((env.rank, env.size)), group, what, same=when)
        fail_together(lambda: compare(one for of_rank in ranges for one in of_rank), None, what)
        fail_together(load.run, group, what)
        return load.source.objects.get("extra")
