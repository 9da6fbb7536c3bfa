"""A folder as `save_checkpoint` writes it: written beside its place, and put there in one step."""

from __future__ import annotations

import io
import json
import os
import threading
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dmp.checkpoint.sources.dcp_metadata import read_metadata
from dmp.checkpoint.sources.source import ABOUT, CHECKSUMS, FORMAT_VERSION, TENSORS, Source
from dmp.checkpoint.sources.tensors_json import Entries, to_json
from dmp.checkpoint.targets.claim import Claim, take_claim
from dmp.checkpoint.targets.mapped import read_mapped
from dmp.checkpoint.targets.new_file import refuse_existing, write_new
from dmp.checkpoint.targets.replaceable import refuse_strangers, remove_own, stranger_at
from dmp.checkpoint.targets.writer import writer_to
from dmp.chunked import ChunkedTensor, as_chunks
from dmp.errors import CheckpointError
from dmp.plans.plan import ShardingPlan
from dmp.ranks import RanksError, fail_together


class FolderTarget:
    """Everything that a source has, with an empty plan."""

    weights_only = False
    check = staticmethod(refuse_existing)

    def write(self, source: Source, path: Path) -> None:
        objects: dict[str, Any] = {"extra": None, "model": {}, "state": {}, "param_groups": [], **source.objects}
        buffer = io.BytesIO()
        torch.save(objects, buffer)
        kept = ("mesh", "holds_more", "has_steps", "names_stateless", "column_widths")
        about = {"column_widths": {}, **{key: value for key, value in source.about.items() if key in kept}}
        tensors = {key: as_chunks(value) for key, value in read_mapped(source, source.shapes, path.parent).items()}
        write_folder(path, Content(tensors, small_files(about, ShardingPlan(), buffer.getvalue())), 0, None)


class Content(NamedTuple):
    """What this rank writes: tensors by key, and files by name, of which `dmp.json` is the first."""

    tensors: dict[str, ChunkedTensor]
    files: dict[str, bytes]


def small_files(about: Mapping[str, Any], plan: ShardingPlan, objects: bytes) -> dict[str, bytes]:
    """The files of what is no tensor; `objects` as `torch.save` gives them."""
    about = {"format": "dmp", "version": FORMAT_VERSION, **about}
    return {ABOUT: json.dumps(about, indent=1).encode(), "plan.json": plan.to_json().encode(), "objects.pt": objects}


def write_folder(
    target: Path, content: Content, rank: int, group: dist.ProcessGroup | None, hurry: threading.Event | None = None
) -> None:
    """Write it, on every rank; what lay there is replaced when the new one is whole.

    Rank 0 has the only claim on the target meanwhile (claim.py); what it replaces or removes is ours (replaceable.py).

    Args:
        target: the folder.
        content: what this rank writes.
        rank: its place in `group`; 0 writes what is no tensor.
        group: of all ranks; None for one process.
        hurry: of a save in the background, see writer.py.

    Raises:
        CheckpointError: on every rank, with what failed where; the target is as it was.
    """
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
            for name, data in content.files.items():
                write_new(partial / name, data)

    def finish() -> None:
        if rank == 0:
            entries = read_metadata(partial / ".metadata")
            _check_seen(partial, entries)
            write_new(partial / TENSORS, to_json(entries).encode())
            small = (".metadata", TENSORS, *content.files)
            crcs = {name: zlib.crc32((partial / name).read_bytes()) for name in small}
            write_new(partial / CHECKSUMS, json.dumps(crcs, indent=1).encode())
            claims[0].check()
            _replace(partial, target)
            _sync_folder(target.parent)

    try:
        for step in (begin, lambda: _write_tensors(partial, content.tensors, group, hurry), finish):
            fail_together(step, group, what)
    except CheckpointError as error:
        if claims and not isinstance(error, RanksError):  # then others may still be writing
            with suppress(CheckpointError, OSError):
                claims[0].check()
                remove_own(partial)
        raise
    finally:
        for claim in claims:
            claim.release()


def _write_tensors(
    folder: Path, tensors: Mapping[str, ChunkedTensor], group: dist.ProcessGroup | None, hurry: threading.Event | None
) -> None:
    """As torch's `save`, by what that calls: `save` itself warns where there is no group, and to keep a warning back
    changes the filters of all threads."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    planner = DefaultSavePlanner(flatten_state_dict=False)
    # with checksums, whatever the program has set; where they are on nothing is touched: another thread may be saving
    was_off = not torch.serialization.get_crc32_options()
    if was_off:
        torch.serialization.set_crc32_options(True)
    try:
        _save_state_dict(dict(tensors), writer_to(folder, hurry), group, no_dist=group is None, planner=planner)
    finally:
        if was_off:
            torch.serialization.set_crc32_options(False)


def _check_seen(folder: Path, entries: Entries) -> None:
    """Each host writes to a disk of its own where that is what the path means there, and nobody would know till a load.

    Raises:
        CheckpointError: files of some ranks are not there for this one.
    """
    files = {piece.file for entry in entries.values() for piece in entry.pieces}
    if missing := sorted(name for name in files if not (folder / name).exists()):
        raise CheckpointError(
            f"{len(missing)} of {len(files)} files that the ranks wrote to {folder} are not there for rank 0, such as "
            f"{missing[0]}: expected a folder on a file system that every rank sees, not on each host's own disk"
        )


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
    nearest = next(path for path in target.parents if path.exists())
    if not nearest.is_dir():
        raise CheckpointError(f"{target} cannot be made: {nearest} is no folder")
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
