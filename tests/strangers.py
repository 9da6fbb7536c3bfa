"""Little transformers as strangers write them, each in a manner of its own; shapes (B, T, D), hidden size 32."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, LENGTH, WIDTH, HEADS = 64, 8, 32, 4


class FusedAttention(nn.Module):
    """One Linear for query, key and value, cut in three, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class FusedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), FusedAttention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 64), "c_proj": nn.Linear(64, WIDTH), "act": nn.GELU()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        m = self.mlp
        return x + m["c_proj"](m["act"](m["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """A dict of modules, the head tied to the embedding by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.ModuleList([FusedBlock() for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class SeparateAttention(nn.Module):
    """Three Linears and a position parameter, as in minGPT's first version."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj, self.n_head = nn.Linear(WIDTH, WIDTH), HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        k, q, v = (
            m(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for m in (self.key, self.query, self.value)
        )
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        y = F.softmax(att.masked_fill(mask, float("-inf")), dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class MinBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), SeparateAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class MinGPT(nn.Module):
    """Blocks in a Sequential, positions a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, WIDTH)
        self.pos_emb = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.drop, self.ln_f = nn.Dropout(0.0), nn.LayerNorm(WIDTH)
        self.blocks = nn.Sequential(*[MinBlock() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, : idx.shape[1], :])
        return self.head(self.ln_f(self.blocks(x)))


class PreNorm(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(WIDTH), fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(self.norm(x))


class ChunkAttention(nn.Module):
    """A fused Linear without bias, `chunk`, heads by `unflatten`, the output a Sequential; as lucidrains writes it."""

    def __init__(self, dim_head: int = 8) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, dim_head**-0.5
        inner = dim_head * HEADS
        self.to_qkv = nn.Linear(WIDTH, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, WIDTH), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=-1))
        attn = (torch.matmul(q, k.transpose(-1, -2)) * self.scale).softmax(dim=-1)
        return self.to_out(torch.matmul(attn, v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """Layers as lists of pairs, a class token, the mean of the patches to a head."""

    def __init__(self) -> None:
        super().__init__()
        self.to_patch = nn.Linear(12, WIDTH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embedding = nn.Parameter(torch.randn(1, LENGTH + 1, WIDTH))
        self.layers = nn.ModuleList([])
        for _ in range(2):
            mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, WIDTH))
            self.layers.append(nn.ModuleList([PreNorm(ChunkAttention()), PreNorm(mlp)]))
        self.mlp_head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10))

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        x = self.to_patch(img)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = x + self.pos_embedding[:, : x.shape[1]]
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(x[:, 0])


class TorchEncoder(nn.Module):
    """torch's own encoder."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.emb(ids) * math.sqrt(WIDTH)))


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tgt = ids.flip(1)
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=self.out.weight.dtype)
        return self.out(self.transformer(self.src(ids), self.tgt(tgt), tgt_mask=mask))


class MixedBlock(nn.Module):
    """torch's attention between modules of the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.gamma * self.attention(h, h, h, need_weights=False)[0]
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))))


class Stacks(nn.Module):
    """Blocks in a dict by name, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({f"layer_{i}": MixedBlock() for i in range(2)})
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 5), "b": nn.Linear(WIDTH, 1)})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers.values():
            x = layer(x)
        x = x.mean(1)
        return torch.cat([head(x) for head in self.heads.values()], 1)


class CosineAttention(nn.Module):
    """Normed queries and keys, one learned temperature for all heads (a 0-dimensional weight), one for each."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).unflatten(2, (-1, 8)).transpose(1, 2) for m in (self.wq, self.wk, self.wv))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CosineBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.norm_b, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), CosineAttention()
        self.up, self.down, self.act = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm_a(x))
        return x + self.down(self.act(self.up(self.norm_b(x))))


class Contrastive(nn.Module):
    """Two towers and a logit scale, as CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Embedding(VOCAB, WIDTH), nn.Linear(12, WIDTH)
        self.text_blocks = nn.ModuleList(CosineBlock() for _ in range(2))
        self.image_blocks = nn.ModuleList(MinBlock() for _ in range(2))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, ids: torch.Tensor, img: torch.Tensor) -> torch.Tensor:
        a, b = self.text(ids), self.image(img)
        for block in self.text_blocks:
            a = block(a)
        for block in self.image_blocks:
            b = block(b)
        a, b = (F.normalize(x.mean(1), dim=-1) for x in (a, b))
        return (a * b).sum(1, keepdim=True) * self.logit_scale.exp()


class RelativeAttention(nn.Module):
    """A learned bias for each head and distance, an Embedding as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.num_heads, self.head_dim = HEADS, WIDTH // HEADS
        self.relative = nn.Embedding(2 * LENGTH, HEADS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (
            m(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
            for m in (self.q_proj, self.k_proj, self.v_proj)
        )
        place = torch.arange(t, device=x.device)
        bias = self.relative(place[None, :] - place[:, None] + LENGTH).permute(2, 0, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])
        return self.o_proj(y.transpose(1, 2).reshape(b, t, self.num_heads * self.head_dim))


class RelativeBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ffn = RelativeAttention(), nn.ModuleList([nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](x + self.attn(x))
        return self.norms[1](x + self.ffn[1](F.silu(self.ffn[0](x))))


class MaskedHead(nn.Module):
    """As BERT's: the decoder's bias is the head's too."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        self.decoder = nn.Linear(WIDTH, VOCAB)
        self.decoder.weight, self.decoder.bias = embedding.weight, self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(F.gelu(self.dense(x))))


class Relative(nn.Module):
    """A masked language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.block = nn.ModuleList(RelativeBlock() for _ in range(2))
        self.predictions = MaskedHead(self.embed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.block:
            x = block(x)
        return self.predictions(x) + self.predictions.bias * 0.5  # read beside its decoder


class Functional(nn.Module):
    """The embedding's weight is the head, by function; scales of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(MinBlock() for _ in range(2))
        self.scale, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


class Gated(nn.Module):
    """An MLP of gate and value in one Linear, attention of one key and value for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 16, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w_in, self.w_out = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        b, t, _ = h.shape
        q = self.to_q(h).view(b, t, HEADS, 8).transpose(1, 2)
        k, v = (y[:, None] for y in self.to_kv(h).chunk(2, -1))
        y = (torch.einsum("bhid,bojd->bhij", q, k) * 8**-0.5).softmax(-1)
        y = torch.einsum("bhij,bojd->bhid", y, v).transpose(1, 2).reshape(b, t, -1)
        x = x + self.to_out(y)
        value, gate = self.w_in(x).chunk(2, -1)
        return x + self.w_out(value * F.silu(gate))


class Palm(nn.Module):
    """As PaLM: one Linear for two things."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers = nn.Embedding(VOCAB, WIDTH), nn.Sequential(Gated(), Gated())
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.logits.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits(self.norm(self.layers(self.emb(ids))))


def ids(step: int, count: int = 4) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(step)),)


def images(step: int, count: int = 4) -> tuple[torch.Tensor, ...]:
    return (torch.randn(count, LENGTH, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(step)),)


def pairs(step: int, count: int = 4) -> tuple[torch.Tensor, ...]:
    return (*ids(step, count), *images(step + 1, count))


STRANGERS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[torch.Tensor, ...]]]] = {
    "nano": (NanoGPT, ids),
    "min": (MinGPT, ids),
    "vit": (ViT, images),
    "torch encoder": (TorchEncoder, ids),
    "torch encoder, norms first": (lambda: TorchEncoder(True), ids),
    "torch transformer": (TorchTransformer, ids),
    "stacks": (Stacks, ids),
    "contrastive": (Contrastive, pairs),
    "relative": (Relative, ids),
    "functional": (Functional, ids),
    "palm": (Palm, ids),
}
"""Name -> (a model, its batch for a step)."""
