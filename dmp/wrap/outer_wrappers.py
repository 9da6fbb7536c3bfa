"""torch's data parallelism around wrapped models: it leaves them alone, or is refused.

DistributedDataParallel would broadcast rank 0's chunks over the other ranks', and average gradients of different rows;
`fully_shard` would cut chunks of different sizes, for which gloo ends the process. Trainers (Accelerate, Lightning,
Fabric) put them around whatever they are given.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dmp.errors import ShardError
from dmp.put_around import put_around
from dmp.wrap import live_models as live
from dmp.wrap.skeleton import all_tensors

_ADVICE = (
    "A wrapped model averages its own gradients and is ready to train: leave it out. With accelerate, prepare the "
    "optimizer and the loader only (where a trainer prepares the model, first set accelerator.prepare_model = "
    "lambda model, **_: model); with Lightning, give the strategy a module with trainable parameters of its own beside "
    "it, or a strategy that wraps nothing"
)


def _check(module: Any) -> None:
    """Have DistributedDataParallel pass over the wrapped models in a module, or say why it cannot."""
    if not isinstance(module, nn.Module) or not live.models:
        return
    inside = [(path, m) for path, m in module.named_modules() if m in live.models]
    if not inside:
        return
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for path, m in inside:
        if not path:
            raise ShardError(f"DistributedDataParallel around a DistributedModelParallel is refused. {_ADVICE}")
        names.update(f"{path}.{name}" for name, _ in all_tensors(m))
    if not any(p.requires_grad for name, p in module.named_parameters() if name not in names):
        raise ShardError(
            f"DistributedDataParallel around {type(module).__name__} has nothing to do: all its trainable parameters "
            f"are those of the wrapped model {inside[0][0]!r}. {_ADVICE}"
        )
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def keep_from_fully_shard(model: nn.Module) -> None:
    """Have `fully_shard` of a parent pass over a wrapped model, as over what `replicate` has taken."""
    # Private: what torch's composable functions know each other by.
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    setattr(model, REGISTRY_KEY, OrderedDict(replicate=RegistryItem()))


@functools.cache
def guard_ddp() -> None:
    """From now on DistributedDataParallel looks for wrapped models in what it is given; once per process."""
    put_around(DistributedDataParallel, "__init__", _init)


def _init(own: Any, self: Any, module: Any, *args: Any, **options: Any) -> None:
    _check(module)
    own(self, module, *args, **options)
