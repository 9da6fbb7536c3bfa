"""`TorchRecSharder`: runs a module that ours has no sharder for by TorchRec's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dmp import Layout, ParameterInfo, ParameterSharding, ShardError, ShardingEnv, type_name


class TorchRecSharder:
    """One of TorchRec's sharders as one of ours.

    Args:
        sharder: a `ModuleSharder` of TorchRec's.
    """

    def __init__(self, sharder: Any) -> None:
        self.theirs = sharder

    @property
    def module_type(self) -> type[nn.Module]:
        """That of theirs."""
        kind: type[nn.Module] = self.theirs.module_type
        return kind

    def parameters(self, module: nn.Module) -> Mapping[str, ParameterInfo]:
        """Refused."""
        raise ShardError(f"{type_name(self.theirs)}: no sharder here takes {type_name(module)}")

    def layouts(self, info: ParameterInfo, env: ShardingEnv) -> list[Layout]:
        """None."""
        return []

    def shard(
        self, module: nn.Module, plan: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device
    ) -> nn.Module:
        """Refused, by `parameters` before."""
        raise AssertionError("parameters() raises")
