"""Linears with low-rank pairs beside them, in the form that PEFT's LoRA gives them, on frozen models."""

from __future__ import annotations

import torch
from torch import nn


class Adapted(nn.Module):
    """A frozen Linear, and for each adapter a pair that leads down to a rank and up again.

    Args:
        base: the Linear.
        ranks: by the adapter's name; their results are all added.
    """

    def __init__(self, base: nn.Linear, ranks: dict[str, int]) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.base_layer = base.requires_grad_(False)
        down = {name: nn.Linear(base.in_features, rank, bias=False) for name, rank in ranks.items()}
        up = {name: nn.Linear(rank, base.out_features, bias=False) for name, rank in ranks.items()}
        self.lora_A, self.lora_B = nn.ModuleDict(down), nn.ModuleDict(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        for name, down in self.lora_A.items():
            result = result + self.lora_B[name](down(x)) * 2.0
        return result

    def merge(self, name: str) -> None:
        """As PEFT does, by a method that is told the adapter."""
        self.base_layer.weight.data += self.product(name)

    def product(self, name: str) -> torch.Tensor:
        product: torch.Tensor = self.lora_B[name].weight @ self.lora_A[name].weight
        return product.detach() * 2.0


def adapted(
    model: nn.Module,
    which: tuple[str, ...] = ("wq", "wv", "wo", "w1", "w2"),
    ranks: dict[str, int] | None = None,
) -> nn.Module:
    """The model, frozen, its Linears of these names adapted."""
    model.requires_grad_(False)
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if name in which and isinstance(child, nn.Linear):
                setattr(owner, name, Adapted(child, ranks or {"default": 3}))
    return model
