"""torch's `nn.MultiheadAttention` with a rank's heads alone: its forward is one function of all weights, and none of
them is in a Linear that is called.

Shapes: B samples, T queries, S keys, D width, H heads of this rank, E head size.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from dmp import is_dtensor
from sharders.tensor_parallel.split.local import split_weights
from sharders.tensor_parallel.split.own_parts import drawn_apart, place_of
from sharders.tensor_parallel.split.plain import entering, plain, summed
from sharders.unheard import made_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_attention(module: nn.MultiheadAttention, mesh: DeviceMesh) -> None:
    """Split its weights by heads: query, key and value by output features, the output by input features. In place, no
    communication; parameters may be on meta.

    Forward: one all-reduce, and one more of the attention's weights where these are asked for. Backward: one all-reduce
    of the gradient of each different one of query, key and value.

    Args:
        mesh: the tensor axis, whose size divides the number of heads.
    """
    split_weights(module, mesh, "colwise_packed_3")
    split_weights(module.out_proj, mesh, "rowwise")
    kind: Any = type(module)
    module.__class__ = _by_heads(kind)


@cache
def _by_heads(kind: Any) -> Any:
    return made_of(kind, {"forward": _forward})


def _forward(
    self: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As torch's; what comes in and goes out is whole."""
    own: Any = self._parameters["in_proj_weight"]
    mesh, is_batched = own.device_mesh, query.dim() == 3
    if is_causal and attn_mask is None:
        raise RuntimeError("is_causal=True says that attn_mask is causal; pass the mask, too")
    given = _entering([query, key, value], mesh)
    if not is_batched:
        given = [x[None] for x in given]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not self.batch_first:
        given = [x.transpose(0, 1) for x in given]
    weights = own.to_local().chunk(3)
    biases: Any = [None] * 3
    if self._parameters["in_proj_bias"] is not None:
        biases = _here(self._parameters["in_proj_bias"], own).chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H, T or S, E)
        for x, w, b in zip(given, weights, biases, strict=True)
    )
    mask = _mask(q, k, attn_mask, key_padding_mask, mesh)
    dropout = self.dropout if self.training else 0.0
    if need_weights:
        attended = q @ k.transpose(-2, -1) * self.head_dim**-0.5  # (B, H, T, S)
        attended = (attended if mask is None else attended + mask).softmax(-1)
        attended = _apart(mesh, dropout, F.dropout, attended, dropout)
        heads = attended @ v
    else:
        heads = _apart(mesh, dropout, F.scaled_dot_product_attention, q, k, v, mask, dropout)
    out = F.linear(heads.transpose(1, 2).flatten(2), self.out_proj._parameters["weight"].to_local())  # type: ignore[union-attr]
    out = summed(out, mesh)
    bias = self.out_proj._parameters["bias"]
    if bias is not None:
        out = out + (_here(bias, own) if is_dtensor(bias) else bias)
    if not is_batched:
        out = out[0]
    elif not self.batch_first:
        out = out.transpose(0, 1)
    return out, _weights(attended, mesh, average_attn_weights, is_batched) if need_weights else None


def _apart(mesh: DeviceMesh, chance: float, func: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
    """What a function gives that drops by chance, see [Note: drawn apart]."""
    if not chance or torch.compiler.is_compiling():
        dropped: torch.Tensor = func(x, *others)
    else:
        dropped = drawn_apart(place_of(mesh), x.device, func, (x, *others), {})
    return dropped


def _entering(given: list[torch.Tensor], mesh: DeviceMesh) -> list[torch.Tensor]:
    """What is given twice is summed once in the backward pass."""
    found = {id(x): x for x in given}
    found = {key: entering(x, mesh) for key, x in found.items()}
    return [found[id(x)] for x in given]


def _here(bias: Any, like: torch.Tensor) -> torch.Tensor:
    """In the dtype of weights, which under mixed precision is that of gathered ones."""
    local: torch.Tensor = bias.to_local()
    return local.to(like.dtype)


def _mask(
    q: torch.Tensor,
    k: torch.Tensor,
    of_pairs: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    mesh: DeviceMesh,
) -> torch.Tensor | None:
    """Both masks as what is added to a rank's attention: of shape (T, S) or (B x all heads, T, S), and (B, S)."""
    added: torch.Tensor | None = None
    if of_pairs is not None:
        added = _additive(of_pairs, q)
        if added.dim() == 3:
            every = added.unflatten(0, (q.shape[0], -1))
            added = every.chunk(mesh.size(), 1)[mesh.get_local_rank()]
    if of_keys is not None:
        keys = _additive(of_keys, q).view(k.shape[0], 1, 1, k.shape[2])
        added = keys if added is None else added + keys
    return added


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:  # True is what is not attended to
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise RuntimeError(f"masks of nn.MultiheadAttention are of bool or floating dtypes; got {mask.dtype}")
    return mask.to(like.dtype)


def _weights(attended: torch.Tensor, mesh: DeviceMesh, averages: bool, is_batched: bool) -> torch.Tensor:
    """(B, T, S), the mean over all heads, or (B, all heads, T, S); without B where the input had none."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if averages:
        whole = summed(attended.mean(1) / mesh.size(), mesh)
    else:
        placed = DTensor.from_local(attended, mesh, [Shard(1)], run_check=False)
        whole = plain(placed.redistribute(placements=[Replicate()]))
    return whole if is_batched else whole[0]
