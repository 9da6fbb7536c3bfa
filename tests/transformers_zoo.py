"""Small transformers for tests: each can be built on meta, and everything that owns parameters has `reset_parameters`.

They differ where tensor parallelism must take care: Llama's attention reads its numbers of heads, GPT's derives the
head's size from its number of heads, Bert's merges heads by their joint width, and is nested in two modules.

Shapes: B samples, T positions, D hidden size, H heads, E = head size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# cos and sin (T, E) of every position, made once per forward pass for all blocks
Rotary = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """As in Llama; not torch's, so that nobody may rely on the class."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotary(length: int, size: int, device: torch.device) -> Rotary:
    frequency = 1e4 ** -(torch.arange(0, size, 2, device=device) / size)  # (E / 2,)
    angle = torch.arange(length, device=device)[:, None] * frequency.repeat(2)  # (T, E)
    return angle.cos(), angle.sin()


def rotate(x_BHTE: torch.Tensor, positions: Rotary) -> torch.Tensor:
    cos, sin = positions
    left, right = x_BHTE.chunk(2, -1)
    return x_BHTE * cos + torch.cat([-right, left], -1) * sin


class LlamaAttention(nn.Module):
    """Grouped-query, causal."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, positions: Rotary) -> torch.Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, positions), rotate(k, positions), v, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).reshape(B, T, self.heads * self.head_dim))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim)
        self.attention = LlamaAttention(dim, heads, kv_heads)
        self.ffn_norm = RMSNorm(dim)
        self.feed_forward = SwiGLU(dim, hidden)

    def forward(self, x: torch.Tensor, positions: Rotary) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Ids (B, T) -> logits (B, T, V)."""

    def __init__(
        self,
        vocab: int = 64,
        dim: int = 32,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        hidden: int = 64,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        positions = rotary(ids.shape[1], self.head_dim, x.device)
        for layer in self.layers:
            x = layer(x, positions)
        return self.output(self.norm(x))


class PositionsFirst(LlamaBlock):
    """The hidden state comes second."""

    def forward(self, positions: Rotary, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, positions)


class LlamaPositionsFirst(Llama):
    """Its blocks take the hidden state after what they share."""

    def __init__(self) -> None:
        super().__init__(kv_heads=4)
        self.layers = nn.ModuleList(PositionsFirst(32, 4, 4, 64) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(ids)
        positions = rotary(ids.shape[1], self.head_dim, x.device)
        for layer in self.layers:
            x = layer(positions, x)
        return self.output(self.norm(x))


class GPTAttention(nn.Module):
    """With biases, causal."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        # The size of a head follows from the number of heads: a number left undivided gives wrong heads, and no error.
        q, k, v = (m(x).view(B, T, self.n_head, -1).transpose(1, 2) for m in (self.query, self.key, self.value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = GPTAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """Ids (B, T) -> logits (B, T, V); T is at most `max_len`."""

    def __init__(
        self,
        vocab: int = 64,
        dim: int = 32,
        layers: int = 2,
        heads: int = 4,
        hidden: int = 64,
        max_len: int = 32,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GPTBlock(dim, heads, hidden, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class BertSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, dim // heads
        self.all_head_size = dim
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.num_attention_heads, self.attention_head_size).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        weights = (q @ k.transpose(-1, -2) / self.attention_head_size**0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(*x.shape[:2], self.all_head_size)


class BertOutput(nn.Module):
    """Projects back to the hidden size, and adds what came in before the norm."""

    def __init__(self, width: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(width, dim)
        self.norm = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(self.dense(x)) + residual)


class BertAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self = BertSelfAttention(dim, heads)
        self.output = BertOutput(dim, dim, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.self(x), x)


class BertBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = BertAttention(dim, heads, dropout)
        self.intermediate = nn.Sequential(nn.Linear(dim, hidden), nn.GELU())
        self.output = BertOutput(hidden, dim, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        return self.output(self.intermediate(x), x)


class Bert(nn.Module):
    """Ids (B, T), types (B, T) or None -> logits (B, T, V); both directions, T is at most `max_len`."""

    def __init__(
        self,
        vocab: int = 64,
        dim: int = 32,
        layers: int = 2,
        heads: int = 4,
        hidden: int = 64,
        max_len: int = 32,
        types: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.position_embeddings = nn.Embedding(max_len, dim)
        self.type_embeddings = nn.Embedding(types, dim)
        self.norm = nn.LayerNorm(dim)
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(BertBlock(dim, heads, hidden, dropout) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.decoder = nn.Linear(dim, vocab)
        self.decoder.weight = self.word_embeddings.weight

    def forward(self, ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        types = torch.zeros_like(ids) if types is None else types
        x = self.word_embeddings(ids) + self.position_embeddings(positions) + self.type_embeddings(types)
        x = self.drop(self.norm(x))
        for block in self.encoder:
            x = block(x)
        return self.decoder(self.transform(x))
