"""torch's writer of checkpoint folders, with two corrections.

[Note: aligned] torch puts one zip archive after another, each with its values at a multiple of 64 bytes from where the
archive begins, which is anywhere. Here each begins at such a multiple too, so that values can be copied out of a
mapped file as fast as out of memory: pieces of rows take a third of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

_ALIGN_BYTES = 64
_FILES = 2  # of each rank, written at the same time
T = TypeVar("T")


def writer_to(folder: Path) -> Any:
    """A `FileSystemWriter` whose files are on the disk when it is done."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(folder, sync_files=True, thread_count=_FILES)
    writer.write_data = _saying_why(writer.write_data)  # type: ignore[method-assign]
    create = writer.fs.create_stream

    @contextmanager
    def aligned(path: Any, mode: str) -> Iterator[Any]:
        opened: AbstractContextManager[Any] = create(path, mode)
        with opened as stream:
            yield _Aligned(stream)

    writer.fs.create_stream = aligned  # type: ignore[method-assign]
    return writer


class _Aligned:
    """A stream in which what is written between two calls of `tell` begins at a multiple, see [Note: aligned]."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._is_written = False

    def write(self, data: Any) -> int:
        self._is_written = True
        return int(self._stream.write(data))

    def tell(self) -> int:
        at = int(self._stream.tell())
        if not self._is_written:
            at += self._stream.write(bytes(-at % _ALIGN_BYTES))
        self._is_written = False
        return at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _saying_why(write: Callable[..., T]) -> Callable[..., T]:
    """Raise the system's error, such as that of a full disk, not the one that torch's zip writer has after it."""

    def wrapped(*args: Any) -> T:
        try:
            return write(*args)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None

    return wrapped
