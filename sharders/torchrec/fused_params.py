"""The in-backward optimizer that a TorchRec sharder's `fused_params` name, in FBGEMM's words and with its defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from dmp import ShardError
from sharders.embedding.lookup.optimizers import OptimizerSpec, optimizer_of

_log = logging.getLogger("dmp")

# FBGEMM's name of an optimizer -> TorchRec's class of it, and what FBGEMM's update reads, with FBGEMM's defaults.
_RATE = {"learning_rate": 0.01}
_DECAY = {"weight_decay": 0.0}
_ADAM = {**_RATE, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, **_DECAY}
_ROWWISE = "torchrec.optim.rowwise_adagrad.RowWiseAdagrad"
_OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "exact_sgd": ("torchrec.optim.optimizers.SGD", _RATE),
    "lars_sgd": ("torchrec.optim.optimizers.LarsSGD", {**_RATE, "eta": 0.001, "momentum": 0.9, **_DECAY}),
    "exact_adagrad": ("torchrec.optim.optimizers.Adagrad", {**_RATE, "eps": 1e-8, **_DECAY}),
    "exact_row_wise_adagrad": (_ROWWISE, {**_RATE, "eps": 1e-8, **_DECAY}),
    "adam": ("torchrec.optim.optimizers.Adam", _ADAM),
    "partial_row_wise_adam": ("torchrec.optim.optimizers.PartialRowWiseAdam", _ADAM),
    "lamb": ("torchrec.optim.optimizers.LAMB", _ADAM),
    "partial_row_wise_lamb": ("torchrec.optim.optimizers.PartialRowWiseLAMB", _ADAM),
}
# What an optimizer that does not read it leaves alone, as FBGEMM does.
_OF_OTHERS = {"eps", "momentum", "eta", "beta1", "beta2"}
# What any optimizer does with its gradients; passed on where it is on.
_OF_ANY = {
    "gradient_clipping": False,
    "max_gradient": 1.0,
    "max_norm": 0.0,
    "weight_decay": 0.0,
    "weight_decay_mode": None,
    "stochastic_rounding": None,
}
# Where tables lie and how FBGEMM's kernels run: the same numbers here.
_NO_MEANING = {
    *("cache_algorithm", "cache_load_factor", "cache_sets", "cache_reserved_memory", "cache_precision"),
    *("enforce_hbm", "record_cache_metrics", "gather_uvm_cache_stats", "uvm_non_rowwise_momentum", "uvm_host_mapped"),
    *("prefetch_pipeline", "multipass_prefetch_config", "stats_reporter_config", "use_experimental_tbe"),
    *("bounds_check_mode", "table_names", "embedding_table_index_type", "embedding_table_offset_type"),
    *("tbe_input_multiplexer_config", "preallocated_host_buffers", "device"),
}


def optimizer_of_fused_params(fused_params: Mapping[str, Any] | None, who: str) -> OptimizerSpec | None:
    """The optimizer of the tables that have none of their own.

    Args:
        fused_params: as given to TorchRec's sharder; one that names nothing of an optimizer has none.
        who: the sharder's class, for messages.

    Raises:
        ShardError: an optimizer, or an option, that ours does not have.
    """
    given = {key: value for key, value in (fused_params or {}).items() if not key.startswith("__register_")}
    unread = sorted(given.keys() & _NO_MEANING)
    if unread:
        _say_once(f"{who}: fused_params {unread} say how FBGEMM holds tables in memory; they change nothing here")
    given = {key: value for key, value in given.items() if key not in _NO_MEANING}
    if not given:
        return None
    name = str(given.pop("optimizer", "exact_sgd"))
    if name not in _OPTIMIZERS:
        raise ShardError(f"{who}: fused_params name the optimizer {name!r}; known here are {sorted(_OPTIMIZERS)}")
    kind, defaults = _OPTIMIZERS[name]
    known = defaults.keys() | _OF_OTHERS | _OF_ANY.keys()
    if unknown := sorted(given.keys() - known):
        raise ShardError(f"{who}: fused_params have {unknown}, which mean nothing here; known: {sorted(known)}")
    passed = {**defaults, **{key: value for key, value in given.items() if key in defaults or _is_on(key, value)}}
    passed["lr"] = passed.pop("learning_rate")
    # What `apply_optimizer_in_backward` with TorchRec's class of that optimizer leaves on a parameter.
    module, _, qualname = kind.rpartition(".")
    placeholder = type(qualname, (), {"__module__": module, "__qualname__": qualname})()
    holder: Any = SimpleNamespace(_in_backward_optimizers=[placeholder], _optimizer_kwargs=[passed])
    return optimizer_of(holder, f"{who}: fused_params")


def _is_on(key: str, value: Any) -> bool:
    """Whether an option of any optimizer is given and changes something."""
    return key in _OF_ANY and value != _OF_ANY[key] and key != "max_gradient"


@cache
def _say_once(text: str) -> None:
    _log.warning(text)
