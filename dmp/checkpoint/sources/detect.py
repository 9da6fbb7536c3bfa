"""Which kind of source lies at a path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zipfile import is_zipfile

from dmp.checkpoint.sources.dcp import TorchFolder
from dmp.checkpoint.sources.native import Folder
from dmp.checkpoint.sources.safetensors import INDEX, ONE_FILE, SafetensorsSource
from dmp.checkpoint.sources.source import ABOUT, Source
from dmp.checkpoint.sources.torch_save import TorchFile
from dmp.errors import CheckpointError
from dmp.read_values import some
from dmp.registry import plugins

_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_SIGNS = (ABOUT, ".metadata", ONE_FILE, INDEX)


def open_source(path: Path) -> Source:
    """The source at a path, by what lies there.

    A folder without a sign of ours, or a file that is neither named `.safetensors` nor a zip archive as `torch.save`
    writes it, is shown to installed packages: an entry point of `dmp.sources` is called with the path, and gives a
    `Source`, or None where it knows no such thing; the first that does is taken. So no package can come before our
    own readers, and none is loaded for what they know. What lies at the path says nothing of which code is run.

    Raises:
        CheckpointError: there is nothing, or nothing whole.
    """
    if not path.exists() and path.with_name(f".{path.name}.replaced").exists():
        path = path.with_name(f".{path.name}.replaced")
    ours = _ours(path)
    if ours is not None:
        return ours(path)
    if path.is_dir() or path.is_file():
        opened = (point.load()(path) for point in plugins("dmp.sources").values())
        theirs: Source | None = next((source for source in opened if source is not None), None)
        if theirs is not None:
            return theirs
        if path.is_dir():
            raise CheckpointError(f"{path} is no checkpoint: {_what_is_in(path)}")
        return TorchFile(path)  # it says what is wrong
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{path} is neither a folder nor a file; expected a checkpoint")
    half = path.with_name(f".{path.name}.saving")
    raise CheckpointError(f"there is nothing at {path}" + (f"; {half} is a save that was cut short" * half.exists()))


def _ours(path: Path) -> Callable[[Path], Source] | None:
    """Which of our readers knows what lies at a path, whole or not."""
    if path.is_file():
        return SafetensorsSource if path.suffix == ".safetensors" else TorchFile if is_zipfile(path) else None
    kinds: dict[str, Callable[[Path], Source]] = {ABOUT: Folder, "objects.pt": Folder, ".metadata": TorchFolder}
    kinds |= dict.fromkeys((ONE_FILE, INDEX), SafetensorsSource)
    return next((kind for sign, kind in kinds.items() if (path / sign).exists()), None)


def _what_is_in(folder: Path) -> str:
    """For who gave the folder of a run, where one of its checkpoints is wanted."""
    lacks = f"it has no {', '.join(_SIGNS[:-1])} or {_SIGNS[-1]}"
    signs = [sign for name in _SIGNS for sign in folder.glob(f"[!.]*/{name}")]
    nearby = list(dict.fromkeys(sign.parent for sign in sorted(signs, key=lambda s: s.stat().st_mtime, reverse=True)))
    if not nearby:
        return lacks + _files_in(folder)
    names = some([path.name for path in nearby])
    return f"{lacks}; there are checkpoints in it, the newest first: {names}; give one of these: {nearby[0]}"


def _files_in(folder: Path) -> str:
    """For who gave a folder where the file in it is wanted, or has one in another way of several files."""
    files = sorted(file.name for file in folder.iterdir() if file.suffix in _FILES and file.is_file())
    if any(folder.glob("*.bin.index.json")):
        return (
            f"; {some(files)} are parts, which are read as safetensors alone: Transformers' save_pretrained writes them"
        )
    return f"; it holds {some(files)}: give the file, {folder / files[0]}" if files else ""
