"""Tensors whose memory ends at, or begins after, a page that nobody may touch: one byte too far ends the process.

Memory that was given back is such a page too, and is never given out again. Memory that nobody has written holds no
zeros.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PAGE, _SIZE = mmap.PAGESIZE, 1 << 40  # of addresses
_NOTHING, _READ_WRITE, _PRIVATE_NO_RESERVE, _FIXED = 0, 3, 0x4022, 0x10
_JUNK = 0x7B


class GuardedMemory(TorchFunctionMode):
    """While it is entered, and in threads where it is, every new tensor of the CPU gets memory of its own here.

    Args:
        at_begin: the page that nobody may touch is right before a tensor, not right behind it.
    """

    def __init__(self, at_begin: bool) -> None:
        super().__init__()
        self._at_begin = at_begin
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._first = self._next = int(self._libc.mmap(None, _SIZE, _NOTHING, _PRIVATE_NO_RESERVE, -1, 0))
        assert self._first > 0, "no addresses are to be had"

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = type(result) is Tensor and func is not Tensor.set_
        return self._guarded(result, func.__name__ in ("empty", "new_empty", "empty_like")) if is_new else result

    def _guarded(self, tensor: Tensor, is_empty: bool) -> Tensor:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            nbytes, at = storage.nbytes(), storage.data_ptr()
            if tensor.device.type != "cpu" or not nbytes or self._first <= at < self._first + _SIZE:
                return tensor
            memory = self._take(nbytes)
            if not is_empty:
                ctypes.memmove(memory, at, nbytes)
            flat = torch.frombuffer(memory, dtype=torch.uint8)
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return torch.empty(0, dtype=tensor.dtype).set_(flat.untyped_storage(), *place)

    def _take(self, nbytes: int) -> Any:
        num_pages = -(-nbytes // _PAGE)
        first, self._next = self._next + _PAGE, self._next + (num_pages + 1) * _PAGE
        assert not self._libc.mprotect(first, num_pages * _PAGE, _READ_WRITE), "no more pieces of memory"
        ctypes.memset(first, _JUNK, num_pages * _PAGE)
        at = first if self._at_begin else first + num_pages * _PAGE - nbytes
        memory = type("Memory", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": nbytes}).from_address(at)
        weakref.finalize(memory, self._give_back, first, num_pages * _PAGE).atexit = False
        return memory

    def _give_back(self, first: int, nbytes: int) -> None:
        self._libc.mmap(first, nbytes, _NOTHING, _PRIVATE_NO_RESERVE | _FIXED, -1, 0)
