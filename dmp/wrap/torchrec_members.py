"""What scripts ask of TorchRec's wrapper, of DDP's or of FSDP2's, beside our contract; the module's own come first.

A member that would mean nothing here is refused as a missing attribute, by a message that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from dmp.names import join_name
from dmp.wrap.delta_tracker import DeltaTracker, init_delta_tracker
from dmp.wrap.making.assembly import Assembly

_UNEVEN = (
    "ranks that have run out of samples answer no collectives of the others. Give every rank as many batches: a "
    "DistributedSampler and drop_last=True, or stop all when the first has none left (all_reduce a flag before a step)"
)
_SPLIT = "FSDP2's, which models have where a mesh splits their dense weights (shard, or tp beside data axes)"
REFUSED: Mapping[str, str] = {
    "join": f"DistributedDataParallel's; {_UNEVEN}",
    "join_hook": f"torch's, for torch.distributed.algorithms.Join; {_UNEVEN}",
    "write": "TorchRec's; tables are not written by a forward: copy rows into model.state_dict()[name].local_shards(), "
    "or give whole tables to model.load_state_dict(state, strict=False)",
    **dict.fromkeys(
        ("set_requires_gradient_sync", "set_is_last_backward", "set_requires_all_reduce"),
        f"{_SPLIT}; on every mesh `with model.no_sync():` around the forward and backward passes of all batches but "
        "the last before a step accumulates gradients, which the last one averages",
    ),
    **dict.fromkeys(
        ("unshard", "set_reshard_after_forward", "set_reshard_after_backward", "set_gradient_divide_factor"),
        f"{_SPLIT}; here each rank has its weights whole or as it computes with them: leave it out, or ask hasattr",
    ),
    "copy_to_device": "TorchRec's; model.copy(device) makes a copy there",
}
"""Member -> whose it is, and what to do here."""


def torchrec_member(model: nn.Module, made: Assembly, name: str) -> Any:
    """The member of that name; None where TorchRec's wrapper has none that counts.

    Raises:
        AttributeError: it means nothing here.
    """
    if name in REFUSED:
        raise AttributeError(f"a wrapped model has no {name!r}, which is {REFUSED[name]}")
    member = _MEMBERS.get(name)
    return None if member is None else member(model, made)


def _sparse_names(made: Assembly) -> Callable[..., list[str]]:
    def sparse_grad_parameter_names(destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Weights of embeddings with `sparse=True` that no sharder has taken."""
        destination = [] if destination is None else destination
        for path, module in made.module.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                destination.append(join_name(prefix, join_name(path, "weight")))
        return destination

    return sparse_grad_parameter_names


def _bare(model: nn.Module) -> Callable[..., Iterator[tuple[str, nn.Parameter]]]:
    def bare_named_parameters(prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """`named_parameters`."""
        return model.named_parameters(prefix, recurse)

    return bare_named_parameters


def _tracker(model: Any) -> DeltaTracker | None:
    found: DeltaTracker | None = model._calls.watch
    return found


def _init_tracker(model: nn.Module, made: Assembly) -> Callable[[Any], DeltaTracker]:
    def init_torchrec_delta_tracker(delta_tracker_config: Any) -> DeltaTracker:
        """Track which rows are trained; collective. The tracker there is already, where there is one."""
        return init_delta_tracker(model, made, delta_tracker_config)

    return init_torchrec_delta_tracker


_MEMBERS: Mapping[str, Callable[[nn.Module, Assembly], Any]] = {
    "_dmp_wrapped_module": lambda model, made: made.running,
    "_env": lambda model, made: made.env,
    "sharders": lambda model, made: list(made.sharders),
    "model_trackers": lambda model, made: {} if _tracker(model) is None else {"DELTA_TRACKER": _tracker(model)},
    "get_delta_tracker": lambda model, made: lambda: _tracker(model),
    "init_torchrec_delta_tracker": lambda model, made: _init_tracker(model, made),
    "sparse_grad_parameter_names": lambda model, made: _sparse_names(made),
    "bare_named_parameters": lambda model, made: _bare(model),
}
