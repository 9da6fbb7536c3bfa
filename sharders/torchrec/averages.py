"""Dense parts behind tables in TorchRec's modules (towers): averaged by our data-parallel part, in the plain order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sharders.torchrec.batches import Collection, in_unsharded_order


class Bare(nn.Module):
    """Where theirs expects its `DistributedDataParallel` of a module: that module alone.

    Args:
        module: whose gradients somebody else averages.
        collections: whose results it is given.
    """

    def __init__(self, module: nn.Module, collections: Sequence[Collection]) -> None:
        super().__init__()
        self.module, self._collections = module, collections

    def forward(self, result: Any) -> Any:
        """The module's, of keyed results in their order of the unsharded module."""
        result = result.wait() if hasattr(result, "wait") else result
        return self.module(in_unsharded_order(result, self._collections))


def averaged_once(theirs: nn.Module, collections: Sequence[Collection]) -> None:
    """Take the data-parallel wrappers off the submodules of theirs, in place; two averages at once would race.

    Those of its data-parallel tables, which torch does not see as submodules, stay.

    Args:
        collections: in the unsharded module.
    """
    for module in list(_modules_of(theirs)):
        for name, child in module._modules.items():
            if isinstance(child, DistributedDataParallel):
                module._modules[name] = Bare(child.module, collections)
                del child.reducer, child.logger  # and with them its hooks on the parameters


def _modules_of(module: nn.Module) -> list[nn.Module]:
    """The module and all in it, some of which do not tell torch of theirs."""
    inside = [m for child in module._modules.values() if child is not None for m in _modules_of(child)]
    return [module, *inside]
