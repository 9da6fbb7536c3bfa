"""What the benchmarks of checkpoints save and load: tables, and the same tables on disk as everyone writes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

import dmp
from tests.bench.torchrec_side import torchrec_plan, torchrec_wrap
from tests.bench.workload import Model, Workload, make_plan
from tests.ranks import mesh, run_ranks

RANKS = 4
ROWS, DIM, TINY_ROWS = 1_000_000, 64, 256
SAVED = "row_wise"
"""The layout that the folders were saved from."""

LAYOUTS = (SAVED, "column_wise", "table_wise")


@dataclass(frozen=True)
class Format:
    """One kind of checkpoint.

    Args:
        name: as a reader of the results knows it.
        file: its name in the folder of all.
        tables: into how many tables the rows go.
    """

    name: str
    file: str
    tables: int = 1

    def work(self, tiny: bool = False) -> Workload:
        """The tables; tiny ones show what a call costs before any byte."""
        return Workload(((TINY_ROWS if tiny else ROWS) // self.tables,) * self.tables, DIM, 1)

    def path(self, folder: Path, tiny: bool = False) -> Path:
        """Where it lies."""
        return folder / ("tiny" if tiny else "large") / self.file


OURS, TORCH_FILE = Format("ours", "ours"), Format("torch.save file", "whole.pt")
SAFETENSORS, HUGGING_FACE = Format("safetensors file", "w.safetensors"), Format("4 safetensors files", "hf", tables=4)
TORCH_FOLDER, TORCHREC = Format("torch's folder", "dcp"), Format("TorchRec's folder", "torchrec")
FORMATS = (OURS, TORCH_FILE, SAFETENSORS, HUGGING_FACE, TORCH_FOLDER, TORCHREC)


@contextmanager
def written() -> Iterator[Path]:
    """A folder of every format, large and tiny, below the folder for temporary files (TMPDIR says on which disk)."""
    with TemporaryDirectory(prefix="bench-state-") as name:
        folder = Path(name)
        for tiny in (False, True):
            OURS.path(folder, tiny).parent.mkdir()
            write_files(folder, tiny)
            run_ranks(RANKS, write_folders, name, tiny, timeout=300)
        yield folder


def write_files(folder: Path, tiny: bool) -> None:
    """What one process writes: the same values, as one table and as four."""
    from safetensors.torch import save_file

    values = torch.randn(TINY_ROWS if tiny else ROWS, DIM, generator=torch.Generator().manual_seed(0))
    whole = {names_of(OURS.work(tiny))[0]: values}
    torch.save(whole, TORCH_FILE.path(folder, tiny))
    save_file(whole, SAFETENSORS.path(folder, tiny))
    parts = dict(zip(names_of(HUGGING_FACE.work(tiny)), values.chunk(HUGGING_FACE.tables), strict=True))
    path = HUGGING_FACE.path(folder, tiny)
    path.mkdir()
    files = {name: f"model-{i + 1:05}-of-{len(parts):05}.safetensors" for i, name in enumerate(parts)}
    for name, part in parts.items():
        save_file({name: part}, path / files[name])
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def write_folders(name: str, tiny: bool) -> None:
    """On each rank: what ranks write together, from rows over the ranks."""
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import Shard, distribute_tensor

    folder = Path(name)
    whole = torch.load(TORCH_FILE.path(folder, tiny), mmap=True, weights_only=True)
    ours = wrapped(OURS.work(tiny), SAVED)
    ours.load_state_dict(whole)
    dmp.save_checkpoint(OURS.path(folder, tiny), ours)
    rows = {k: distribute_tensor(t, mesh((RANKS,), ("dp",)), [Shard(0)], src_data_rank=None) for k, t in whole.items()}
    save({"model": rows}, checkpoint_id=TORCH_FOLDER.path(folder, tiny))
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    module = make_model(TORCHREC.work(tiny), "meta")
    theirs = torchrec_wrap(module, torchrec_plan(module, SAVED, RANKS))
    theirs.load_state_dict(dict(whole))
    save({"model": theirs.state_dict()}, checkpoint_id=TORCHREC.path(folder, tiny))


def make_model(work: Workload, device: str) -> Model:
    """Tables without an optimizer: files of weights alone hold none."""
    import torchrec

    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=work.dim, feature_names=[f"f{i}"])
        for i, n in enumerate(work.rows)
    ]
    return Model(torchrec.EmbeddingBagCollection(tables=tables, device=torch.device(device)))


def names_of(work: Workload) -> list[str]:
    """Of the parameters."""
    return [name for name, _ in make_model(replace(work, rows=(1,) * len(work.rows)), "meta").named_parameters()]


def wrapped(work: Workload, layout: str, ranks: int = RANKS) -> dmp.DistributedModelParallel:
    """Our wrapper on tables that hold nothing yet; call it on every rank."""
    env = dmp.ShardingEnv.from_mesh(mesh((ranks,), ("dp",)))
    plan = make_plan(layout, names_of(work), ranks)
    return dmp.DistributedModelParallel(make_model(work, "meta"), env=env, plan=plan, init_parameters=False)


def chunks_of(model: dmp.DistributedModelParallel) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """(name, offset) -> chunk, of this rank."""
    return {
        (name, offset): chunk
        for name, tensor in model.state_dict().items()
        for chunk, offset in zip(tensor.chunks, tensor.offsets, strict=True)
    }


def check(model: dmp.DistributedModelParallel, folder: Path) -> None:
    """A wrong load is not timed.

    Raises:
        AssertionError: a chunk that is not what was saved.
    """
    whole = next(iter(torch.load(TORCH_FILE.path(folder), mmap=True, weights_only=True).values()))
    names = list(model.state_dict())
    for (name, (row, column)), chunk in chunks_of(model).items():
        row += names.index(name) * (ROWS // len(names))
        expected = whole[row : row + chunk.shape[0], column : column + chunk.shape[1]]
        if not torch.equal(chunk, expected):
            raise AssertionError(f"rank {dist.get_rank()}: {name!r} at {(row, column)} is not what was saved")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(p.stat().st_size for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file())
