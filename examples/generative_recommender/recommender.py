"""A generative recommender: embedding tables and a causal transformer in one model, written as for one process.

Nothing here knows of meshes. The wrapper finds the tables in TorchRec's collections, and the transformer's blocks by
their structure: four Linears and a number of heads make an attention, Linears up and down an MLP.

Shapes: B samples, T positions of the longest history, N positions of all histories together, D hidden size, H heads,
C candidates, V items.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from sharders.tensor_axis.jagged import dense_to_jagged, jagged_to_dense

SOFTMAXES = ("sampled", "full")
TABLES = ("items.", "users.")
"""What the names of the tables' parameters begin with."""


class Recommender(nn.Module):
    """Predicts the item that comes next, after every item of every history.

    Args:
        num_items: rows of the item table.
        num_users: rows of the user table.
        dim: hidden size, and embedding dimension of both tables.
        num_layers: blocks of the transformer.
        num_heads: of each attention.
        max_length: items of the longest history.
        softmax: "full" scores all items by a Linear; "sampled" scores a batch's candidates by their rows in the item
            table, the same rows that stand for an item in a history.
        seed: of the initial values.
    """

    def __init__(
        self,
        num_items: int,
        num_users: int,
        dim: int,
        num_layers: int,
        num_heads: int,
        max_length: int,
        softmax: str,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.max_length = max_length
        roles = ["history", "target", "candidates"] if softmax == "sampled" else ["history"]
        items = EmbeddingConfig(
            name="item", num_embeddings=num_items, embedding_dim=dim, feature_names=roles, init_fn=_init_rows
        )
        users = EmbeddingBagConfig(
            name="user", num_embeddings=num_users, embedding_dim=dim, feature_names=["user"], init_fn=_init_rows
        )
        self.items = EmbeddingCollection(tables=[items])
        self.users = EmbeddingBagCollection(tables=[users])
        self.positions = Positions(max_length, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_items, bias=False) if softmax == "full" else None

    def forward(self, users: KeyedJaggedTensor, items: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Scores of the items that may come next, at each position that has one.

        Args:
            users: key "user", one id a sample.
            items: keys "history" and "target", as long as each other: the target of a position is the item after it;
                with the sampled softmax "candidates" too: items to score beside the target, the same ones at all
                positions of the batch, so the first sample brings all C of them.

        Returns:
            Scores, and the number of the target among the scored items (N,). Full softmax: scores (N, V), in the order
            of the table. Sampled: (N, 1 + C), the target, then the candidates; -inf where a candidate is the target.
        """
        rows = self.items(items)
        lengths, target_ids = rows["history"].lengths(), items["target"].values()
        x_BTD = jagged_to_dense(rows["history"].values(), lengths, self.max_length)
        x_BTD = self.positions(x_BTD) + self.users(users).values().unsqueeze(1)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        hidden_ND = dense_to_jagged(self.norm(x_BTD), lengths)
        if self.head is not None:
            return self.head(hidden_ND), target_ids
        # Candidates are drawn evenly from all items: each would be corrected by the same log Q, which cancels.
        target_score = (hidden_ND * rows["target"].values()).sum(1, keepdim=True)
        scores_NC = hidden_ND @ rows["candidates"].values().T
        is_target = items["candidates"].values() == target_ids.unsqueeze(1)
        scores_NC = scores_NC.masked_fill(is_target, -torch.inf)
        return torch.cat([target_score, scores_NC], dim=1), torch.zeros_like(target_ids)


class Positions(nn.Module):
    """Adds a learned vector for each position: (B, T, D) to (B, T, D)."""

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _init_rows(self.weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.weight


class Attention(nn.Module):
    """Causal. Histories are padded at their ends, so that no item sees padding: what padding sees is thrown away."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"the hidden size must be a multiple of the number of heads; got {dim} and {num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        split = (*x_BTD.shape[:2], self.num_heads, self.head_dim)
        q_BHTE, k_BHTE, v_BHTE = (f(x_BTD).view(split).transpose(1, 2) for f in (self.query, self.key, self.value))
        out_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        return self.out(out_BHTE.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Of each position alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class Block(nn.Module):
    """Attention and MLP, each on the normed hidden state and added to it."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = Attention(dim, num_heads), MLP(dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


def _init_rows(weight: Tensor) -> None:
    nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
