"""Anonymous memory that several processes map: no file, so nothing is left of it whatever ends them.

A process makes it with `memfd_create`; the others open it through `/proc/PID/fd`, which needs the same user and the
same view of processes. No file system's size bounds it, not that of /dev/shm either. It is far larger than what is
used: pages are taken from the system when they are first touched.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref

_READ_WRITE, _SHARED_NO_RESERVE = 3, 0x4001
_NO_DUMP = 16  # an image of a process that dies would have all of it, untouched parts too
_REMOVE = 9
if sys.platform == "linux":
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    _libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Mapping:
    """Memory of a file descriptor, from `address` on; given back when nothing refers to it any more.

    Raises:
        OSError: the system does not map it.
    """

    def __init__(self, fd: int, size: int) -> None:
        found = _libc.mmap(None, size, _READ_WRITE, _SHARED_NO_RESERVE, fd, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, f"{os.strerror(code)}, for {size} bytes of shared memory")
        self.address, self.size = int(found), size
        _libc.madvise(self.address, size, _NO_DUMP)
        # At the end of the process tensors may still lie in it, and the system takes it anyway.
        weakref.finalize(self, _libc.munmap, self.address, size).atexit = False

    def empty(self, start: int, nbytes: int) -> None:
        """Give the memory of whole pages back to the system; they are zeros when they are next touched."""
        _libc.madvise(self.address + start, nbytes, _REMOVE)


def make(size: int) -> tuple[Mapping, int]:
    """New memory, of zeros, and its file descriptor, which the caller closes when the others have mapped it.

    Raises:
        OSError: the system gives none.
    """
    fd = os.memfd_create("dmp", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        return Mapping(fd, size), fd
    except OSError:
        os.close(fd)
        raise


def attach(pid: int, fd: int, size: int) -> Mapping:
    """What another process has made.

    Raises:
        OSError: it cannot be seen from here.
    """
    here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(here).st_size != size:
            raise OSError(f"process {pid} has something else open as {fd}")
        return Mapping(here, size)
    finally:
        os.close(here)
