"""torch's operations by their names: which there are, which of them work on each element, which mix rows or columns."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

MIXES_ROWS = frozenset(
    ("mm", "matmul", "__matmul__", "__rmatmul__", "@", "linear", "bmm", "addmm", "einsum", "tensordot", "baddbmm")
    + ("mv", "inner", "embedding", "embedding_bag", "index_select", "gather", "take", "cdist", "cosine_similarity")
    + ("index_fill", "index_copy", "index_add", "index_put", "scatter", "scatter_add", "select", "narrow")
    + ("pairwise_distance", "unbind", "chunk", "split", "tensor_split", "roll", "flip", "pad", "histc", "unique")
    + ("numpy", "tolist", "item", "__array__", "__iter__", "__float__", "__int__", "__bool__", "__reversed__")
)

MIXES_COLUMNS: Mapping[str, int] = {
    **dict.fromkeys(("sum", "mean", "prod", "std", "var", "std_mean", "var_mean", "median", "logsumexp"), 1),
    **dict.fromkeys(("amax", "amin", "max", "min", "argmax", "argmin", "sort", "argsort", "cumsum", "cumprod"), 1),
    **dict.fromkeys(("softmax", "log_softmax", "any", "all"), 1),
    **dict.fromkeys(("topk", "kthvalue", "quantile"), 2),
    "norm": 2,
    "normalize": 2,
    "vector_norm": 2,
    "linalg_vector_norm": 2,
    "layer_norm": -1,
    "renorm": -1,
}
"""Name -> which argument says the dims that are mixed; -1: none does."""

MOVES = frozenset(
    ("T", "mT", "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "squeeze", "unsqueeze", "expand")
    + ("expand_as", "view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "clone", "contiguous", "to")
    + ("cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as", "as_subclass", "pin_memory")
    + ("data", "detach", "grad", "requires_grad", "dropout", "masked_fill", "masked_select", "where", "copy", "fill")
    + ("zero", "normal", "uniform", "bernoulli", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like")
    + ("randn_like", "real")
)
"""What has each element, or something in its place, and is no function of it."""


def dims_of(name: str, args: Any, kwargs: Any) -> set[Any]:
    """Those that an operation of `MIXES_COLUMNS` is told to go over."""
    at = MIXES_COLUMNS[name]
    dims = kwargs.get("dim", args[at] if 0 <= at < len(args) else None)
    return set(dims if isinstance(dims, list | tuple) else [dims])


@cache
def operations() -> Mapping[str, list[str]]:
    """Names without underscores -> names of torch's operations; `add_` is of `add`."""
    found: dict[str, list[str]] = {}
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::"):
            name = full.removeprefix("aten::").partition(".")[0]
            found.setdefault(name.replace("_", ""), []).append(name)
    return found


@cache
def is_pointwise(name: str) -> bool:
    """Whether an operation, by its name without underscores, gives for each element a function of it."""
    packets = [getattr(torch.ops.aten, full, None) for full in dict.fromkeys(operations().get(name, ()))]
    return any(torch.Tag.pointwise in getattr(p, o).tags for p in packets if p is not None for o in p.overloads())
