"""From a model to a checkpoint's folder: collected on every rank, written beside the path, put in place in one step."""

from __future__ import annotations

import io
import json
import os
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from dmp.checkpoint.claim import Claim, take_claim
from dmp.checkpoint.own_files import ABOUT, refuse_strangers, remove_own, stranger_at
from dmp.checkpoint.random_state import random_state
from dmp.checkpoint.retention import remove_older
from dmp.checkpoint.sources.dcp_metadata import read_metadata
from dmp.checkpoint.sources.source import CHECKSUMS, FORMAT_VERSION, MODEL, STATE, TENSORS
from dmp.checkpoint.sources.tensors_json import to_json
from dmp.checkpoint.writer import writer_to
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError
from dmp.ranks.collective import RanksError, together
from dmp.state.find_wrapped import plan_inside
from dmp.state.optimizer_state import column_widths, owned_states, param_groups


class Content(NamedTuple):
    """What this rank writes."""

    tensors: dict[str, ChunkedTensor]
    files: dict[str, bytes]


def collect(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any, env: ShardingEnv, saved_ns: int
) -> Content:
    """What this rank writes; `saved_ns` is rank 0's word on when, see history.py."""
    own = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    owned = owned_states(model, optimizer)
    tensors: dict[str, ChunkedTensor] = {}
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and (name in parameters or env.rank == 0):  # buffers may differ: rank 0's
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
        "model": {name: value for name, value in own.items() if not isinstance(value, torch.Tensor)},
        "state": {o.name: {k: v for k, v in o.values.items() if not isinstance(v, torch.Tensor)} for o in owned},
        "param_groups": param_groups(owned),
    }
    about = {
        "format": "dmp",
        "version": FORMAT_VERSION,
        "saved_ns": saved_ns,
        "mesh": {"names": env.names, "shape": env.shape, "roles": env.roles},
        "column_widths": column_widths(model, owned),
    }
    plan = plan_inside(model)
    files = {ABOUT: json.dumps(about, indent=1).encode(), "plan.json": plan.to_json().encode()}
    return Content(tensors, {**files, "objects.pt": _pack(objects)} if env.rank == 0 else {})


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


def write(
    target: Path,
    content: Content,
    rank: int,
    group: dist.ProcessGroup | None,
    keep: int | None = None,
    hurry: threading.Event | None = None,
) -> None:
    """On every rank; then all but the newest `keep` checkpoints beside the target go. `hurry`: see writer.py.

    Rank 0 has the only claim on the target meanwhile (claim.py); what it replaces or removes is ours (own.py).
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import save

    what = f"saving {target}"
    partial = target.with_name(f".{target.name}.saving")

    claims: list[Claim] = []

    def begin() -> None:
        if rank == 0:
            check_target(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            claims.append(take_claim(target))
            remove_own(partial)
            partial.mkdir()
            for name, data in sorted(content.files.items(), key=lambda file: file[0] != ABOUT):
                _write_file(partial / name, data)

    def write() -> None:
        with warnings.catch_warnings(), _checksums():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                dict(content.tensors),
                storage_writer=writer_to(partial, hurry),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )

    def finish() -> None:
        if rank == 0:
            tensors = to_json(read_metadata(partial / ".metadata")).encode()
            _write_file(partial / TENSORS, tensors)
            small = (".metadata", TENSORS, *content.files)
            crcs = {name: zlib.crc32((partial / name).read_bytes()) for name in small}
            _write_file(partial / CHECKSUMS, json.dumps(crcs, indent=1).encode())
            claims[0].check()
            _replace(partial, target)
            _sync_folder(target.parent)

    def tidy() -> None:
        if rank == 0 and keep is not None:
            remove_older(target, keep)

    try:
        for step in (begin, write, finish):
            together(step, group, what)
    except CheckpointError as error:
        if claims and not isinstance(error, RanksError):  # then others may still be writing
            with suppress(CheckpointError, OSError):
                claims[0].check()
                remove_own(partial)
        raise
    finally:
        for claim in claims:
            claim.release()
    if keep is not None:
        together(tidy, group, f"{target} is saved, but removing what is older failed")


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch write them, whatever the program has set."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _write_file(path: Path, data: bytes) -> None:
    """So that it is on the disk, not in its cache."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """What was renamed in it stays so after a loss of power; some file systems have no such call."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_target(target: Path) -> None:
    """What a save to the target would replace is nothing, empty or ours, and so is what it needs beside it.

    Raises:
        CheckpointError: it names what lies there.
    """
    if not target.name:
        raise CheckpointError(f"{target} is no place for a checkpoint: give a path below it")
    for path in (target, *(target.with_name(f".{target.name}.{state}") for state in ("saving", "replaced"))):
        refuse_strangers(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samefile(target, os.curdir):
            raise CheckpointError(
                f"{target} is the working directory of this process, which a save would take away from under it: give "
                f"a path in it, such as {target / 'step-1'}"
            )


def _replace(new: Path, target: Path) -> None:
    """Put folder `new` at `target`; where something lies there the two change places in one step, if the system can."""
    refuse_strangers(target)
    if not target.exists():
        os.rename(new, target)
        return
    old = target.with_name(f".{target.name}.replaced")
    remove_own(old)
    if _exchange(new, target):
        if stranger_at(new) is not None:  # it came in this moment
            _exchange(new, target)
            refuse_strangers(target)
        os.rename(new, old)
    else:
        os.rename(target, old)  # for a moment there is nothing at the path: `open_source` then reads the replaced one
        os.rename(new, target)
    remove_own(old)


def _exchange(a: Path, b: Path) -> bool:
    """Linux's renameat2 with RENAME_EXCHANGE; False where it is missing."""
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    at_fdcwd, rename_exchange = -100, 2
    return bool(renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0)
