"""What users give for an optimizer in the backward pass: a class with its options, or TorchRec's `fused_params`.

[Note: whose options] torch.optim's classes mean torch.optim's numbers: an option that FBGEMM would leave out, or read
otherwise, is refused. TorchRec's classes and `fused_params` are words of FBGEMM's: an option means what FBGEMM makes of
it, and one that FBGEMM passes over is passed over, which is said once. So weight decay is of the batch's rows alone:
decoupled, and for row-wise Adagrad as `weight_decay_mode` says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import NoneType
from typing import Any

from torch import Tensor

from dmp import ShardError, ranks, shown
from sharders.embedding.lookup.optimizers import OPTIMIZERS, OptimizerSpec
from sharders.embedding.lookup.row_optimizer import NOT_OF_ROWS, RowOptimizer
from sharders.embedding.lookup.row_updates import decay_mode

# Options that say how a step of torch.optim is computed, not what it gives.
_IGNORED = {"params", "dampening", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}
_ADVICE = "or leave it off this table and pass the parameter to an ordinary optimizer"
_WORDS_OF_FBGEMM = "torchrec.optim."  # whose classes take them

_DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-8,
    "betas": (0.9, 0.999),
    "momentum": 0.9,
    "eta": 1e-3,
    "weight_decay": 0.0,
    "weight_decay_mode": "none",
    "gradient_clipping": False,
    "max_gradient": 1.0,
    "max_norm": 0.0,
}
"""FBGEMM's, of every option that it has for optimizers."""

_OTHER_UPDATES = {
    "counter_based_regularization",
    "cowclip_regularization",
    "emainplace_mode",
    "ensemble_mode",
    "extra_optimizer_config",
    "global_weight_decay",
    "optimizer_state_dtypes",
}
"""Arguments of FBGEMM's that change what an update does, and that no optimizer here has."""

_STORAGE = {
    "bounds_check_mode",
    "embedding_table_index_type",
    "embedding_table_offset_type",
    "enable_raw_embedding_streaming",
    "enforce_hbm",
    "gather_uvm_cache_stats",
    "device",
    "multipass_prefetch_config",
    "preallocated_host_buffers",
    "prefetch_pipeline",
    "record_cache_metrics",
    "res_params",
    "stats_reporter_config",
    "stochastic_rounding",
    "table_names",
    "tbe_input_multiplexer_config",
    "use_experimental_tbe",
}
_STORAGE_PREFIXES = ("cache_", "uvm_")
"""Arguments that say where FBGEMM keeps tables and how it looks them up: here the sharder and the kernel know."""

_PRIVATE_PREFIX = "__"  # of TorchRec's own notes between its parts
_DTYPES = ("output_dtype", "weights_precision")


_NUMBERS = (int, float, bool, str, NoneType)


class OptimizerReader:
    """Reads the optimizers of tables one after another: most have the options of the one before, which are read once.

    Nothing may change them meanwhile. What is said of a table by its name is said of each.
    """

    def __init__(self) -> None:
        self._last: tuple[type, Mapping[str, Any], Mapping[str, Any], OptimizerSpec] | None = None

    def read(self, parameter: Tensor, name: str) -> OptimizerSpec | None:
        """As `optimizer_of`."""
        optimizers: Sequence[Any] = getattr(parameter, "_in_backward_optimizers", ())
        if len(optimizers) != 1:
            return optimizer_of(parameter, name)
        kind, given, live = type(optimizers[0]), _given(parameter), _live(optimizers[0])
        if self._last is not None:
            last_kind, last_given, last_live, spec = self._last
            if kind is last_kind and _are_alike(given, last_given) and _are_alike(live, last_live):
                return spec
        found = optimizer_of(parameter, name)
        says_no_name = found is not None and len(found.given) == len(given)  # nothing of it was passed over
        self._last = (kind, given, live, found) if found is not None and says_no_name else None
        return found


def _are_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether options are the same, as far as can be told at a glance."""
    return one is other or (
        one.keys() == other.keys()
        and all(
            (of_other := other[key]) is value
            or key == "params"
            or (type(value) in _NUMBERS and type(value) is type(of_other) and value == of_other)
            for key, value in one.items()
        )
    )


def _given(parameter: Tensor) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(parameter, "_optimizer_kwargs", [{}])[0]
    return found


def _live(optimizer: Any) -> Mapping[str, Any]:
    """Its param group; TorchRec's placeholders, which only FBGEMM could run, have none."""
    found: Mapping[str, Any] = getattr(optimizer, "param_groups", [{}])[0]
    return found


def optimizer_of(parameter: Tensor, name: str) -> OptimizerSpec | None:
    """The optimizer that `torch.distributed.optim._apply_optimizer_in_backward`, or TorchRec's twin, left on a table.

    Args:
        parameter: the table.
        name: its fully-qualified name, for messages.

    Returns:
        None where there is none.

    Raises:
        ShardError: an optimizer, or an option of one, for which updating the batch's rows alone is not the same as
            stepping the whole table, or that FBGEMM has not.
    """
    optimizers = getattr(parameter, "_in_backward_optimizers", [])
    if not optimizers:
        return None
    classes = [f"{type(o).__module__}.{type(o).__qualname__}" for o in optimizers]
    if len(classes) > 1:
        raise ShardError(f"{name}: expected one in-backward optimizer; got {len(classes)}: {classes}. Apply one only")
    optimizer = next((o for o in OPTIMIZERS.values() if classes[0] in o.classes), None)
    if optimizer is None:
        allowed = ", ".join(known for o in OPTIMIZERS.values() for known in o.classes)
        raise ShardError(
            f"{name}: {classes[0]} cannot run in the backward pass of a sharded table. Use one of {allowed}, {_ADVICE}"
        )
    given, live = _given(parameter), _live(optimizers[0])
    where = f"{name}: {classes[0]}"
    if classes[0].startswith(_WORDS_OF_FBGEMM):
        return _of_torchrec_class(optimizer, given, live, where)
    group = {**optimizer.classes[classes[0]], **given, **live}
    _refuse(optimizer.refused, group, where)
    options = {k: v for k, v in group.items() if k not in _IGNORED and k not in optimizer.refused}
    if unknown := options.keys() - optimizer.defaults.keys():
        raise ShardError(
            f"{where} came with the options {sorted(unknown)}; a sharded table knows "
            f"{sorted(optimizer.defaults)}. Leave the others out, {_ADVICE}"
        )
    return replace(OptimizerSpec.make(optimizer.name, **options), given=tuple(given.items()))


def spec_of_fused_params(fused_params: Mapping[str, Any], where: str = "fused_params") -> OptimizerSpec | None:
    """The optimizer that FBGEMM would run for the `fused_params` of a TorchRec sharder.

    Of what they do not name it has FBGEMM's defaults: `EXACT_SGD` with a learning rate of 0.01. What they say of
    caches, placement and such has no meaning here, which is said once.

    Args:
        fused_params: keys as FBGEMM's table-batched embeddings take them; `optimizer` is an `EmbOptimType` or its name.
        where: they come from, for messages.

    Returns:
        None where they name nothing of an optimizer, and for `EmbOptimType.NONE`, which updates nothing.

    Raises:
        ShardError: an optimizer that is not here, a key that FBGEMM has not, or one that nothing here can honour.

    Example:
        >>> spec_of_fused_params({"optimizer": "EXACT_ADAGRAD", "learning_rate": 0.1}).kind
        'adagrad'
    """
    optimizer = _of_type(fused_params.get("optimizer", "EXACT_SGD"), where)
    if optimizer is None or not (_options_in(optimizer, fused_params, where) or "optimizer" in fused_params):
        return None
    return _in_words_of_fbgemm(optimizer, fused_params, {}, where)


def _of_torchrec_class(
    optimizer: RowOptimizer, given: Mapping[str, Any], live: Mapping[str, Any], where: str
) -> OptimizerSpec:
    """The spec of a class of TorchRec's with the options given; `live` is its param group, if it has one."""
    if "optimizer" in given:  # FBGEMM's type, which wins in TorchRec, and which its sharders write into the options
        optimizer = _of_type(given["optimizer"], where) or optimizer
    own = {k: v for k, v in live.items() if k not in _IGNORED and k not in ("lr_decay", "maximize")}
    if "learning_rate" in given and "lr" not in given:
        own.pop("lr", None)
    wrong = {k: NOT_OF_ROWS[k] for k in ("lr_decay", "maximize")}
    _refuse(wrong, {**given, **live}, where)
    given = {k: v for k, v in given.items() if k not in wrong}
    return _in_words_of_fbgemm(optimizer, given, own, where)


def _in_words_of_fbgemm(
    optimizer: RowOptimizer, given: Mapping[str, Any], own: Mapping[str, Any], where: str
) -> OptimizerSpec:
    """A spec with FBGEMM's defaults below what is given, and `own` above it."""
    named = _options_in(optimizer, given, where)
    options = {**named, **own}
    for each in (named, options):
        if "weight_decay_mode" in each:
            try:
                each["weight_decay_mode"] = decay_mode(each["weight_decay_mode"])
            except ShardError as error:
                raise ShardError(f"{where}: {error}") from None
    base = {k: v for k, v in _DEFAULTS.items() if k in optimizer.defaults}
    known = {k: v for k, v in options.items() if k in optimizer.defaults}
    for key, value in known.items():
        _check_value(key, value, where)
    _say_what_differs(spec := OptimizerSpec.make(optimizer.name, **{**base, **known}), options)
    return replace(spec, given=tuple(named.items()))


def _options_in(optimizer: RowOptimizer, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options of optimizers by our names; what says how tables are kept is left out, which is said once."""
    options: dict[str, Any] = {}
    stored = []
    for key, value in given.items():
        if key in _STORAGE or key.startswith(_STORAGE_PREFIXES):
            stored.append(key)
        elif key in _OTHER_UPDATES or key in _DTYPES:
            if value is not None and not str(value).lower().endswith(("fp32", "float32")):
                raise ShardError(
                    f"{where} with {key!r}, {shown(value)}: nothing here does that. Leave it out, {_ADVICE}"
                )
        elif key in _DEFAULTS or key in optimizer.defaults:
            options.setdefault(key, value)
        elif key == "learning_rate":
            options["lr"] = given.get("lr", value)
        elif key in ("beta1", "beta2"):
            first, second = _DEFAULTS["betas"]
            options["betas"] = (given.get("beta1", first), given.get("beta2", second))
        elif key != "optimizer" and not key.startswith(_PRIVATE_PREFIX):
            known = sorted({*_DEFAULTS, *optimizer.defaults, "learning_rate", "beta1", "beta2"} - {"lr", "betas"})
            raise ShardError(f"{where} came with {key!r}, which FBGEMM does not take; it takes {known} for optimizers")
    if stored:
        said = f"{where} {sorted(stored)} say how FBGEMM holds tables in memory; they change nothing here"
        ranks.say_once(said, by_first=True)
    return options


def _of_type(value: Any, where: str) -> RowOptimizer | None:
    """The optimizer of an `EmbOptimType`, or of its name; None for its NONE."""
    name = str(value.name if isinstance(value, Enum) else value).upper().replace("ROW_WISE", "ROWWISE")
    if name == "NONE":
        return None
    by_type = {o.fbgemm_type: o for o in OPTIMIZERS.values() if o.fbgemm_type}
    if name not in by_type:
        hint = f" (FBGEMM runs no {name} any more: EXACT_{name})" if f"EXACT_{name}" in by_type else ""
        raise ShardError(f"{where}: expected an optimizer out of {sorted(by_type)}, or NONE; got {shown(value)}{hint}")
    return by_type[name]


def _check_value(key: str, value: Any, where: str) -> None:
    numbers = value if key == "betas" else () if key == "weight_decay_mode" else (value,)
    if not isinstance(numbers, (tuple, list)) or not all(isinstance(n, (int, float, Tensor)) for n in numbers):
        raise ShardError(f"{where}: expected a number for {key}; got {shown(value)}")


def _refuse(refused: Mapping[str, str], group: Mapping[str, Any], where: str) -> None:
    for option, reason in refused.items():
        if group.get(option, 0):
            raise ShardError(
                f"{where} with {option}={group[option]!r} cannot run in the backward pass of a sharded "
                f"table: {reason}. Set {option} to {False if group[option] is True else 0}, {_ADVICE}"
            )


def _say_what_differs(spec: OptimizerSpec, given: Mapping[str, Any]) -> None:
    """Options that do nothing, and that rows which are not in the batch rest."""
    kind, options = spec.kind, spec.param_group()
    for key, value in given.items():
        if key not in options and key != "weight_decay_mode" and value != _DEFAULTS[key]:
            ranks.say_once(f"FBGEMM's {kind} has no {key}: {key}={value!r} is not used, here neither", by_first=True)
    decays = bool(options.get("weight_decay"))
    if decays and options.get("weight_decay_mode") == "none":
        decays = False
        ranks.say_once(
            f"weight_decay={options['weight_decay']!r} without a weight_decay_mode (L2 or DECOUPLE) is not used by "
            f"FBGEMM's {kind}, here neither",
            by_first=True,
        )
    if decays and "weight_decay_mode" not in options and given.get("weight_decay_mode") == "l2":
        ranks.say_once(f"weight decay of FBGEMM's {kind} is decoupled, also where the mode is L2", by_first=True)
    if decays or options.get("momentum"):
        ranks.say_once(
            f"weight decay and momentum of {kind} in the backward pass move the batch's rows alone, as FBGEMM's do",
            logging.INFO,
            by_first=True,
        )
