"""Which modules multiply by weights, look rows up, attend, or recompute: read from their classes, nothing is run."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parameter import is_lazy

_NAMED = 3
_TRANSPOSED = "Conv1D"  # Hugging Face's, of (in, out)


def features_of(owner: nn.Module, shape: tuple[int, ...]) -> tuple[int, int]:
    """(in, out) features of a weight that `owner` multiplies by."""
    if len(shape) == 2 and is_transposed(owner):
        return shape[0], shape[1]
    if len(shape) == 3:  # of experts: (experts, out, in), or the other way round
        return shape[2], shape[1]
    inner = 1
    for size in shape[1:]:
        inner *= size
    return inner, shape[0]


def is_transposed(owner: nn.Module) -> bool:
    """Whether its weight is (in, out): by its name, or by a bias as long as that."""
    own = dict(owner._parameters.items())  # a scripted module's are no dict
    weight, bias = own.get("weight"), own.get("bias")
    if type(owner).__name__ == _TRANSPOSED or weight is None or bias is None or is_lazy(weight) or weight.dim() != 2:
        return type(owner).__name__ == _TRANSPOSED
    return len(bias) == weight.shape[1] != weight.shape[0]


def is_lookup(owner: nn.Module) -> bool:
    """Whether its weight's rows are looked up, not multiplied by."""
    return isinstance(owner, (nn.Embedding, nn.EmbeddingBag))


def said_of_lazy(module: nn.Module) -> list[str]:
    """A note where weights have no shape yet, which cost and take nothing in a plan."""
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if not lazy:
        return []
    named = ", ".join(lazy[:_NAMED]) + (f" and {len(lazy) - _NAMED:,} more" if len(lazy) > _NAMED else "")
    return [f"{named}: of lazy modules, without a shape, so they count for nothing here; run a forward before planning"]


def attention_widths(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Path of each attention, and the width of all its heads: where there is a product that grows with T squared.

    Known are `nn.MultiheadAttention`, and classes with "Attention" in their names that hold the projections themselves:
    one for each of query, key and value, or a joint one with the output's after it.
    """
    for path, m in module.named_modules():
        if isinstance(m, nn.MultiheadAttention):
            yield path, m.embed_dim
            continue
        if "attention" not in type(m).__name__.lower():
            continue
        shapes = [
            features_of(child, tuple(weight.shape))
            for child in m._modules.values()
            if child is not None
            and not is_lookup(child)
            and (weight := child._parameters.get("weight")) is not None
            and weight.dim() == 2
        ]
        if len(shapes) >= 3:
            yield path, shapes[0][1]
        elif len(shapes) == 2:
            yield path, shapes[1][0]


def recomputed(module: nn.Module) -> list[str]:
    """Paths of modules whose activations are recomputed in the backward pass, as far as they have been told so.

    torch's checkpoint wrapper and composable `checkpoint`, and Hugging Face's `gradient_checkpointing`. What
    `FSDPWrapper(activation_checkpointing=True)` will do is not to be seen in the module.
    """
    return [path for path, m in module.named_modules() if _is_recomputed(m)]


def _is_recomputed(module: nn.Module) -> bool:
    if type(module).__name__ == "CheckpointWrapper" or getattr(module, "gradient_checkpointing", False) is True:
        return True
    hooks = module._forward_pre_hooks.values()
    return any(getattr(hook, "__module__", "").endswith("checkpoint_activation") for hook in hooks)
