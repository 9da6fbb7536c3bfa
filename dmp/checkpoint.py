"""Checkpoints: saved on any mesh and plan, loaded on any other, or into a plain module.

[Note: on disk]
A folder of torch's distributed checkpoint, readable by `torch.distributed.checkpoint` as it stands:
    .metadata, *.distcp   tensors `model.<name>`, `optimizer.state.<name>.<state>`, `rng.<rank>.<device>`, unsharded
    dmp.json              format version, the mesh, widths of column blocks (see optimizer_state.py)
    plan.json             the plan
    objects.pt            what is no tensor: extra, param groups by name, counters; read with `weights_only`
It is written beside the path as `.<name>.saving`, `.metadata` last, and renamed when every rank is done. Each tensor is
stored in pieces of a few MB, each by one of the ranks that hold it.

[Note: nothing half done]
Loading checks every name, shape and dtype before it changes the model, and every rank raises when one does.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.chunked import ChunkedTensor, as_chunks
from dmp.env import ShardingEnv, default_env
from dmp.errors import CheckpointError
from dmp.gather import env_of
from dmp.optimizer_state import OwnedState, column_widths, is_blocked, merge_blocks, owned_states, param_groups
from dmp.plan import ShardingPlan
from dmp.wrapper import DistributedModelParallel

FORMAT_VERSION = 1
_PREFIX, _STATE_PREFIX = "model.", "optimizer.state."
_NOT_RESTORED = {"params", "foreach", "fused", "capturable", "differentiable"}  # how an optimizer runs, not what it is
_SHOWN = 5
T = TypeVar("T")


class PendingSave:
    """A save that runs in the background, on staged copies: the model may be trained on at once."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when every rank has written and the path is in place.

        Raises:
            CheckpointError: what stopped the save.
            TimeoutError: not done in time.
        """
        self._future.result(timeout_s)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._future.done()


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Any = None,
    *,
    asynchronous: bool = False,
) -> PendingSave | None:
    """Save weights, optimizer state, random state and `extra`, to be loaded on any mesh and plan.

    Collective over `model.env` (for a plain module: the default group, where there is one). An existing checkpoint at
    `path` is replaced in one step when the new one is whole; a failed save leaves it as it was.

    Args:
        path: a folder that every rank sees.
        model: a `DistributedModelParallel`, or any module.
        optimizer: an ordinary optimizer over its parameters; state of in-backward optimizers is saved without it.
        extra: rank 0's, any nest of dicts, lists, tuples, numbers, strings and tensors.
        asynchronous: return after copying the state; the copy is written in the background.

    Returns:
        A handle with `.wait()` when asynchronous.

    Raises:
        CheckpointError: on every rank, with what failed where.
    """
    target = Path(path).absolute()
    env = model.env if isinstance(model, DistributedModelParallel) else default_env()
    _wait_for_pending()
    group = env.group() if env.size > 1 else None
    content = _together(lambda: _collect(model, optimizer, extra, env), group, f"saving {target}")
    if not asynchronous:
        _write(target, content, env.rank, group)
        return None
    if group is not None:
        group = _background_group(group)
    tensors = {name: t.mapped(lambda c: c.to("cpu", copy=True)) for name, t in content.tensors.items()}
    staged = content._replace(tensors=tensors)
    _pending[:] = [_background().submit(_write, target, staged, env.rank, group)]
    return PendingSave(_pending[0])


def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """Fill a model, and its optimizer, from a checkpoint of any mesh and plan; returns `extra` as it was saved.

    Collective over `model.env`; a plain module is filled by this process alone. Each rank reads what it holds.
    In-backward optimizers are filled too, `optimizer` where it is given; a checkpoint without any optimizer state
    leaves in-backward optimizers as they are. Random state comes back rank by rank on an equal mesh; on another it is
    derived from the saved state and the data rank (tensor-parallel ranks draw the same).

    Args:
        path: a folder that `save_checkpoint` wrote, or a `torch.save` file of a full state dict, or of
            `{"model": full_state_dict(m), "optimizer": full_optimizer_state_dict(m, o), "extra": ...}`.
        model: a `DistributedModelParallel`, or any module.
        optimizer: an ordinary optimizer over its parameters, stepped or not.

    Raises:
        CheckpointError: on every rank, naming file and parameter: a missing, truncated or newer file, a missing or
            unknown name, another shape or dtype. The model is unchanged then.
    """
    source_path = Path(path).absolute()
    env = env_of(model)
    group = env.group() if env.size > 1 else None
    what = f"loading {source_path}"
    _wait_for_pending()
    job = _together(lambda: _prepare(_open(source_path), model, optimizer, env), group, what)
    _together(job.run, group, what)
    return job.source.objects.get("extra")


# ---- saving ----


class _Content(NamedTuple):
    """What this rank writes."""

    tensors: dict[str, ChunkedTensor]
    files: dict[str, bytes]


def _collect(model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any, env: ShardingEnv) -> _Content:
    own = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    owned = owned_states(model, optimizer)
    tensors: dict[str, ChunkedTensor] = {}
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and (name in parameters or env.rank == 0):  # buffers may differ: rank 0's
            if value.is_meta or is_lazy(value):
                raise CheckpointError(f"{name!r} has no values yet (it is {'on meta' if value.is_meta else 'lazy'})")
            tensors[_PREFIX + name] = as_chunks(value)
    for o in owned:
        for key, value in o.values.items():
            if isinstance(value, ChunkedTensor):
                tensors[f"{_STATE_PREFIX}{o.name}.{key}"] = value
    for device, state in _random_state(env).items():
        tensors[f"rng.{env.rank}.{device}"] = as_chunks(state)
    objects = {
        "extra": extra,
        "model": {name: value for name, value in own.items() if not isinstance(value, torch.Tensor)},
        "state": {o.name: {k: v for k, v in o.values.items() if not isinstance(v, torch.Tensor)} for o in owned},
        "param_groups": param_groups(owned),
    }
    about = {
        "format": "dmp",
        "version": FORMAT_VERSION,
        "mesh": {"names": env.names, "shape": env.shape, "roles": env.roles},
        "column_widths": column_widths(model, owned),
    }
    plan = model.plan if isinstance(model, DistributedModelParallel) else ShardingPlan()
    files = {"plan.json": plan.to_json().encode(), "dmp.json": json.dumps(about, indent=1).encode()}
    return _Content(tensors, {**files, "objects.pt": _pack(objects)} if env.rank == 0 else {})


def _pack(objects: dict[str, Any]) -> bytes:
    """As a file that can be read without running anything from it."""
    whole = _packed(objects)
    if isinstance(whole, bytes):
        return whole
    bad = next((key for key, value in objects.items() if not isinstance(_packed(value), bytes)), "it")
    reason = next((line for line in str(whole).splitlines() if "nsupported" in line), str(whole)).strip()
    raise CheckpointError(
        f"{bad} holds something that cannot be read back safely (numbers, strings, tensors, dicts, lists and tuples "
        f"can): {reason}"
    ) from whole


def _packed(value: Any) -> bytes | Exception:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        return error
    return buffer.getvalue()


def _write(target: Path, content: _Content, rank: int, group: dist.ProcessGroup | None) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    what = f"saving {target}"
    partial = target.with_name(f".{target.name}.saving")

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for name, data in content.files.items():
                (partial / name).write_bytes(data)

    def write() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                dict(content.tensors),
                storage_writer=FileSystemWriter(partial, sync_files=True),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )

    def finish() -> None:
        if rank == 0:
            _replace(partial, target)

    try:
        for step in (begin, write, finish):
            _together(step, group, what)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(new: Path, target: Path) -> None:
    """Put folder `new` at `target`; where something lies there the two change places in one step, if the system can."""
    if not target.exists():
        os.rename(new, target)
        return
    old = target.with_name(f".{target.name}.replaced")
    _remove(old)
    if _exchange(new, target):
        os.rename(new, old)
    else:
        os.rename(target, old)  # for a moment there is nothing at the path: `_open` then reads the replaced one
        os.rename(new, target)
    _remove(old)


def _exchange(a: Path, b: Path) -> bool:
    """Linux's renameat2 with RENAME_EXCHANGE; False where it is missing."""
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    at_fdcwd, rename_exchange = -100, 2
    return bool(renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_pending: list[Future[None]] = []


@lru_cache(maxsize=1)
def _background() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="dmp-save")


def _wait_for_pending() -> None:
    """One save at a time: their collectives must not mix. Its error is for its own handle."""
    if _pending:
        _pending.pop().exception()


@lru_cache(maxsize=16)
def _background_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks with their own connections, so that a save does not meet the training step's collectives."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="gloo", timeout=timedelta(hours=1), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


# ---- loading ----


class _Source(Protocol):
    """Something that holds tensors by the keys of [Note: on disk]."""

    path: Path
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    objects: dict[str, Any]
    about: dict[str, Any]

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        """Fill the pieces that this rank holds."""
        ...


def _open(path: Path) -> _Source:
    if not path.exists() and path.with_name(f".{path.name}.replaced").exists():
        path = path.with_name(f".{path.name}.replaced")
    if path.is_dir():
        return _Folder(path)
    if path.is_file():
        return _File(path)
    half = path.with_name(f".{path.name}.saving")
    raise CheckpointError(f"there is nothing at {path}" + (f"; {half} is a save that was cut short" * half.exists()))


class _Folder:
    """A folder that `save_checkpoint` wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about = self._json("dmp.json")
        version = self.about.get("version")
        if not isinstance(version, int) or version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path / 'dmp.json'}: format version {version!r}; this version of dmp reads up to {FORMAT_VERSION}"
            )
        if not (path / ".metadata").exists():
            raise CheckpointError(f"{path} has no .metadata: it is a save that was cut short")
        try:
            self.objects: dict[str, Any] = torch.load(path / "objects.pt", map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many kinds
            raise CheckpointError(f"{path / 'objects.pt'} cannot be read: {error}") from error
        self._metadata = _read_metadata(path / ".metadata")
        self.shapes = {
            key: (tuple(entry.size), entry.properties.dtype)
            for key, entry in self._metadata.state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        self._check_files()

    def _json(self, name: str) -> dict[str, Any]:
        try:
            data = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{self.path} is not a checkpoint of this library: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from error
        return data if isinstance(data, dict) else {}

    def _check_files(self) -> None:
        """Every piece lies within its file."""
        ends: dict[str, tuple[int, str]] = {}
        for index, info in (self._metadata.storage_data or {}).items():
            ends[info.relative_path] = max(
                ends.get(info.relative_path, (0, "")), (info.offset + info.length, index.fqn)
            )
        for name, (end, key) in ends.items():
            file = self.path / name
            size = file.stat().st_size if file.exists() else -1
            if size < end:
                problem = "is missing" if size < 0 else f"has {size} bytes, {end} are needed: it is cut short"
                raise CheckpointError(f"{file} {problem}; it holds {key.removeprefix(_PREFIX)!r} among others")

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader = FileSystemReader(self.path)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata, True)
        reader.set_up_storage_reader(self._metadata, True)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner).wait()


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's `.metadata`, which is a pickle, and builds nothing else than it needs."""

    def find_class(self, module: str, name: str) -> Any:
        ours = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        path = module in ("pathlib", "pathlib._local") and name.endswith("Path")
        plain = f"{module}.{name}" in ("torch.Size", "torch.serialization._get_layout", "collections.OrderedDict")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." not in name and (ours or path or plain or dtype):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")


def _read_metadata(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _MetadataUnpickler(file).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _File:
    """A `torch.save` file of whole tensors, mapped: only what is copied is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read as a torch.save file of tensors: {error}") from error
        if not isinstance(data, Mapping):
            raise CheckpointError(f"{path} holds a {type(data).__name__}; expected a dict of parameter name -> tensor")
        nested = isinstance(data.get("model"), Mapping)
        weights = data["model"] if nested else data
        optimizer = data.get("optimizer") if nested else None
        state: Mapping[str, Mapping[str, Any]] = (optimizer or {}).get("state", {})
        self._tensors: dict[str, torch.Tensor] = {
            _PREFIX + name: value for name, value in weights.items() if isinstance(value, torch.Tensor)
        }
        self.about: dict[str, Any] = {}
        self.objects: dict[str, Any] = {
            "extra": data.get("extra") if nested else None,
            "model": {name: value for name, value in weights.items() if not isinstance(value, torch.Tensor)},
            "state": {n: {k: v for k, v in s.items() if not isinstance(v, torch.Tensor)} for n, s in state.items()},
            "param_groups": (optimizer or {}).get("param_groups", []),
        }
        for name, values in state.items():
            if not isinstance(name, str):
                raise CheckpointError(
                    f"{path}: optimizer state goes by number ({name!r}), as torch.optim saves it; expected parameter "
                    "names, as full_optimizer_state_dict(model, optimizer) gives them"
                )
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    self._tensors[f"{_STATE_PREFIX}{name}.{key}"] = value
        self.shapes = {key: (tuple(t.shape), t.dtype) for key, t in self._tensors.items()}

    def read(self, targets: dict[str, ChunkedTensor]) -> None:
        for key, target in targets.items():
            target.fill_from(self._tensors[key])


class _Job(NamedTuple):
    """A load that has been checked: what to read, then what to do."""

    source: _Source
    targets: dict[str, ChunkedTensor]
    then: list[Callable[[], Any]]

    def run(self) -> None:
        with torch.no_grad():
            self.source.read({key: t for key, t in self.targets.items() if t.chunks and t.numel()})
            for step in self.then:
                step()


def _prepare(source: _Source, model: nn.Module, optimizer: torch.optim.Optimizer | None, env: ShardingEnv) -> _Job:
    job = _Job(source, {}, [])
    wrong: list[str] = []
    _prepare_weights(job, model, wrong)
    owned = owned_states(model, optimizer)
    if source.objects.get("param_groups") or any(key.startswith(_STATE_PREFIX) for key in source.shapes):
        for o in owned:
            _prepare_state(job, o, column_widths(model, [o]).get(o.name), wrong)
        _prepare_options(job, owned, wrong)
        if optimizer is not None:
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            saved = {name for group in source.objects["param_groups"] for name in group["params"]} & names
            lost = sorted(saved - {o.name for o in owned})
            wrong += [
                f"optimizer state of {name!r} was saved, but no optimizer here has that parameter" for name in lost
            ]
    elif optimizer is not None:
        wrong.append("it holds no optimizer state; pass no optimizer to load the weights alone")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(f"the checkpoint does not fit {_kind(model)}: " + "; ".join(wrong[:_SHOWN]) + more)
    _prepare_random_state(job, env)
    return job


def _prepare_weights(job: _Job, model: nn.Module, wrong: list[str]) -> None:
    own = model.state_dict()
    objects: dict[str, Any] = job.source.objects.get("model", {})
    saved = {key.removeprefix(_PREFIX) for key in job.source.shapes if key.startswith(_PREFIX)}
    for name, value in own.items():
        if not isinstance(value, torch.Tensor):
            wrong += [] if name in objects else [f"missing key {name!r}"]
        elif value.is_meta or is_lazy(value):
            wrong.append(f"{name!r} of the model has no storage to fill; materialise it first")
        else:
            target = as_chunks(value)
            problem = _misfit(job.source, _PREFIX + name, target, f"{name!r}") if value.numel() else None
            wrong += [problem] if problem else []
            job.targets[_PREFIX + name] = target
    wrong += [f"unexpected key {name!r}" for name in sorted({*saved, *objects} - set(own))]
    if objects:
        job.then.append(lambda: model.load_state_dict({**own, **objects}))


def _misfit(source: _Source, key: str, target: ChunkedTensor, shown: str) -> str | None:
    if key not in source.shapes:
        return f"missing key {shown}"
    size, dtype = source.shapes[key]
    if size != tuple(target.size()):
        return f"{shown} has shape {size}, expected {tuple(target.size())}"
    if dtype != target.dtype:
        return f"{shown} has dtype {dtype}, expected {target.dtype}"
    return None


def _prepare_state(job: _Job, owned: OwnedState, widths: tuple[int, ...] | None, wrong: list[str]) -> None:
    """Have one parameter's optimizer state filled."""
    prefix = f"{_STATE_PREFIX}{owned.name}."
    numbers: dict[str, Any] = job.source.objects.get("state", {}).get(owned.name, {})
    keys = {key.removeprefix(prefix): key for key in job.source.shapes if key.rpartition(".")[0] + "." == prefix}
    known = {name for group in job.source.objects.get("param_groups", ()) for name in group["params"]}
    if not keys and owned.name not in known:
        wrong.append(f"no optimizer state for {owned.name!r}")
        return
    fresh: dict[str, Any] = {}
    if owned.optimizer is None or (owned.values and (keys or numbers)):
        lost = {*owned.values} - {*keys, *numbers}
        wrong += [f"optimizer state {key!r} of {owned.name!r} is missing" for key in sorted(lost)]
    for short, key in keys.items():
        shown = f"optimizer state {short!r} of {owned.name!r}"
        target = owned.values.get(short)
        size, dtype = job.source.shapes[key]
        saved_widths = job.source.about.get("column_widths", {}).get(owned.name)
        if target is None and owned.optimizer is None:
            wrong.append(f"unknown {shown}")
            continue
        if saved_widths and len(size) == 2 and size[1] == len(saved_widths) < sum(saved_widths):
            if not (widths and is_blocked(target, widths) and tuple(widths) == tuple(saved_widths)):
                _read_blocks(job, key, target, size, dtype, saved_widths, widths, wrong, shown)
                continue
        elif widths and target is not None and is_blocked(target, widths) and size == (target.size()[0],):
            _read_blocks(job, key, target, size, dtype, None, widths, wrong, shown)
            continue
        if target is None:
            try:
                fresh[short], target = owned.new(short, size, dtype)
            except CheckpointError as error:
                wrong.append(str(error))
                continue
        if not isinstance(target, ChunkedTensor):
            if size:
                wrong.append(f"{shown} has shape {size}, expected a number")
                continue
            number = torch.zeros((), dtype=dtype)
            job.targets[key] = as_chunks(number)
            job.then.append(_setter(owned, short, number, type(target)))
            continue
        problem = _misfit(job.source, key, target, shown)
        wrong += [problem] if problem else []
        job.targets[key] = target
    for short, number in numbers.items():
        target = owned.values.get(short)
        if isinstance(target, ChunkedTensor):
            job.then.extend(_filler(chunk, number) for chunk in target.chunks)
        elif owned.optimizer is not None:
            fresh[short] = number
    if owned.optimizer is not None:
        optimizer, parameter = owned.optimizer, owned.parameter
        if keys or numbers:
            if fresh:
                job.then.append(lambda: optimizer.state[parameter].update(fresh))
        else:  # it had not been stepped when it was saved
            job.then.append(lambda: optimizer.state.pop(parameter, None))


def _setter(owned: OwnedState, key: str, value: torch.Tensor, kind: type) -> Callable[[], Any]:
    assert owned.optimizer is not None
    state = owned.optimizer.state[owned.parameter]
    return lambda: state.__setitem__(key, kind(value.item()))


def _filler(chunk: torch.Tensor, value: Any) -> Callable[[], Any]:
    return lambda: chunk.fill_(value)


def _read_blocks(
    job: _Job,
    key: str,
    target: Any,
    size: tuple[int, ...],
    dtype: torch.dtype,
    saved_widths: list[int] | None,
    widths: tuple[int, ...] | None,
    wrong: list[str],
    shown: str,
) -> None:
    """Row-wise state between other column blocks: read this rank's rows, take the mean, give it to every own block."""
    to_blocks = widths is not None and is_blocked(target, widths)
    if not isinstance(target, ChunkedTensor) or not (to_blocks or target.dim() == 1) or target.size()[0] != size[0]:
        shape = tuple(target.size()) if isinstance(target, torch.Tensor) else "no such state"
        wrong.append(f"{shown} has one value per row and column block, {size}; expected {shape}")
        return
    if dtype != target.dtype:
        wrong.append(f"{shown} has dtype {dtype}, expected {target.dtype}")
        return
    rows = sorted({(o[0], c.shape[0]) for c, o in zip(target.chunks, target.offsets, strict=True) if c.numel()})
    offsets = [(start, *(0 for _ in size[1:])) for start, _ in rows]
    read = {start: torch.empty((count, *size[1:]), dtype=dtype) for start, count in rows}
    job.targets[key] = ChunkedTensor(size, list(read.values()), offsets, dtype)

    def spread() -> None:
        for chunk, offset in zip(target.chunks, target.offsets, strict=True):
            if chunk.numel():
                values = read[offset[0]][: chunk.shape[0]]
                merged = merge_blocks(values, saved_widths) if saved_widths else values
                chunk.copy_(merged.unsqueeze(1).expand_as(chunk) if chunk.dim() == 2 else merged)

    job.then.append(spread)


def _prepare_options(job: _Job, owned: Iterable[OwnedState], wrong: list[str]) -> None:
    """Learning rates and the like: each param group takes the options that its parameters were saved with."""
    saved = {name: group for group in job.source.objects.get("param_groups", ()) for name in group["params"]}
    groups: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for o in owned:
        groups.setdefault(id(o.options), (o.options, []))[1].append(o.name)
    for options, names in groups.values():
        found = {name: saved[name] for name in names if name in saved}
        taken: dict[str, Any] = {}
        for name, group in found.items():
            for key, value in group.items():
                if key in _NOT_RESTORED or (key not in options and key != "initial_lr"):
                    continue
                if key in taken and not _equal(taken[key], value):
                    wrong.append(
                        f"{key} of {next(iter(found))!r} was {taken[key]} and of {name!r} {value}, but here they share "
                        "a param group"
                    )
                taken.setdefault(key, value)
        job.then.append(_updater(options, taken))


def _equal(a: Any, b: Any) -> bool:
    return bool(torch.equal(torch.as_tensor(a), torch.as_tensor(b))) if isinstance(a, torch.Tensor) else bool(a == b)


def _updater(options: dict[str, Any], taken: dict[str, Any]) -> Callable[[], Any]:
    def update() -> None:
        for key, value in taken.items():
            own = options.get(key)
            if isinstance(own, torch.Tensor):
                own.fill_(float(value))
            else:
                options[key] = value

    return update


# ---- random state ----


def _random_state(env: ShardingEnv) -> dict[str, torch.Tensor]:
    """Generator states of this process: device type -> bytes."""
    states = {"cpu": torch.get_rng_state()}
    if env.device_type not in ("cpu", "meta"):
        states[env.device_type] = torch.get_device_module(env.device_type).get_rng_state()
    return states


def _prepare_random_state(job: _Job, env: ShardingEnv) -> None:
    mesh = job.source.about.get("mesh")
    if mesh is None or "rng.0.cpu" not in job.source.shapes:
        return
    devices = list(_random_state(env))
    keys = {device: f"rng.{env.rank}.{device}" for device in devices}
    same = (mesh["names"], mesh["shape"]) == (list(env.names), list(env.shape))
    exact = same and all(key in job.source.shapes for key in keys.values())
    wanted = keys if exact else {"cpu": "rng.0.cpu"}
    states = {d: torch.empty(job.source.shapes[key][0], dtype=torch.uint8) for d, key in wanted.items()}
    job.targets.update({key: as_chunks(states[device]) for device, key in wanted.items()})

    def restore() -> None:
        if not exact:
            digest = hashlib.sha256(states["cpu"].numpy().tobytes() + env.data_rank.to_bytes(8, "little")).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            return
        torch.set_rng_state(states["cpu"])
        for device in devices[1:]:
            torch.get_device_module(device).set_rng_state(states[device])

    job.then.append(restore)


# ---- all ranks alike ----


def _together(step: Callable[[], T], group: dist.ProcessGroup | None, what: str) -> T:
    """Run a local step on every rank; when it fails on one, every rank raises the same.

    Raises:
        CheckpointError: naming the ranks and what failed there.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    result: list[T] = []
    cause: BaseException | None = None
    try:
        result.append(step())
    except (Exception, CheckpointException) as error:  # whatever it is, the other ranks must hear of it
        cause = error
    message = None if cause is None else _text(cause)
    messages: list[str | None] = [message]
    if group is not None:
        messages = [None] * dist.get_world_size(group)
        dist.all_gather_object(messages, message, group=group)
    failed: dict[str, list[int]] = {}
    for rank, text in enumerate(messages):
        if text is not None:
            failed.setdefault(text, []).append(rank)
    if failed:
        parts = [text if len(ranks) == len(messages) else f"rank {ranks[0]}: {text}" for text, ranks in failed.items()]
        raise CheckpointError(f"{what}: " + "; ".join(parts[:_SHOWN])) from cause
    return result[0]


def _text(error: BaseException) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    failures = getattr(error, "failures", None)  # of torch's CheckpointException: rank -> (error, traceback)
    if failures:
        rank, (inner, _) = next(iter(failures.items()))
        return f"{type(inner).__name__} on rank {rank}: {inner}"
    return f"{type(error).__name__}: {error}"


def _kind(model: nn.Module) -> str:
    return type(model.module if isinstance(model, DistributedModelParallel) else model).__name__
