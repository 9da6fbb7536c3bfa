"""A number of a tensor's bits, by which ranks, or two moments, compare what they have."""

from __future__ import annotations

import torch

# Of 64-bit words. Words above each other in one block of rows are not told apart, hence few rows (more are no faster)
# and a prime number of columns, which no usual row length is a multiple of.
_BLOCK_ROWS, _COLUMNS = 16, 1021


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit sum of the tensor's bits that depends on their places, on any device, which is waited for once.

    Of highest bits of words (each second float32's sign) alone it has but whether their number is odd: what sees more
    takes two to three times as long.
    """
    if tensor.layout != torch.strided:
        return _wrapped(sum((2 * i + 1) * checksum(part) for i, part in enumerate(_parts(tensor))))
    tensor = tensor.int_repr() if tensor.is_quantized else tensor.resolve_conj()  # torch ends the process, or raises
    bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:  # 64-bit words begin at multiples of 8
        bits = bits.clone()
    words = bits[: bits.numel() // 8 * 8].view(torch.int64)  # these need no widening to be summed
    whole = words.numel() // (_BLOCK_ROWS * _COLUMNS) * (_BLOCK_ROWS * _COLUMNS)
    sums = words[:whole].view(-1, _BLOCK_ROWS, _COLUMNS).sum(1).view(-1)  # the one pass over the data
    totals = []
    for i, some in enumerate((sums, words[whole:], bits[8 * words.numel() :])):
        if some.numel():
            # Sums wrap around, so the weight of each word is odd: an even one would lose its highest bits.
            first = (1 << 40) * i + 1
            odd = torch.arange(first, first + 2 * some.numel(), 2, device=bits.device)
            totals.append((some * odd).sum())
    return _wrapped(bits.numel() + (int(torch.stack(totals).sum()) if totals else 0))


def _wrapped(total: int) -> int:
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Of a sparse one, which may be far too large to be held whole (a graph's adjacency): where, and what."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    names = ("crow_indices", "col_indices") if by_rows else ("ccol_indices", "row_indices")
    return [*(getattr(tensor, name)() for name in names), tensor.values()]
