"""A Llama for bytes: RMSNorm, rotary positions, grouped-query attention, SwiGLU. It knows nothing of meshes.

Every module that owns parameters has `reset_parameters()`, so it may be built on meta and be filled where it lies.

Shapes: B samples, T positions, D hidden size, H heads (K of keys and values), E size of a head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

ROTARY_BASE = 1e4


@dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 256

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"expected dim to be a multiple of twice the heads, got {self.dim} and {self.heads} heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"expected heads to be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Of the MLP: 8/3 of the hidden size, in multiples of 32."""
        return -(-8 * self.dim // 3 // 32) * 32


class Attention(nn.Module):
    """Causal; each key and value serves H / K queries."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.wq = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.heads * config.head_dim, config.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor, rotary_2TE: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q_BHTE = self.wq(x_BTD).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k_BKTE = self.wk(x_BTD).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        v_BKTE = self.wv(x_BTD).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q_BHTE, k_BKTE = rotate(q_BHTE, rotary_2TE), rotate(k_BKTE, rotary_2TE)
        mixed_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True)
        return self.wo(mixed_BHTE.transpose(1, 2).reshape(B, T, self.heads * self.head_dim))


class SwiGLU(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)
        self.attention, self.mlp = Attention(config), SwiGLU(config)

    def forward(self, x_BTD: torch.Tensor, rotary_2TE: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary_2TE)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Llama(nn.Module):
    """Ids (B, T) of any integer type -> logits (B, T, V)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        rotary_2TE = rotary(ids_BT.shape[1], self.config.head_dim, ids_BT.device)
        x_BTD = self.embedding(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary_2TE)
        return self.output(self.norm(x_BTD))


def rotary(length: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Cosine and sine (2, T, E) of the angle by which each pair of a head's values is turned at each position."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles_TE = torch.arange(length, device=device)[:, None] * frequencies.repeat(2)
    return torch.stack([angles_TE.cos(), angles_TE.sin()])


def rotate(x_BHTE: torch.Tensor, rotary_2TE: torch.Tensor) -> torch.Tensor:
    """Turn pairs (i, i + E / 2), so that products of queries and keys depend on how far apart they are."""
    cos_TE, sin_TE = rotary_2TE
    first, second = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_TE + torch.cat([-second, first], dim=-1) * sin_TE
