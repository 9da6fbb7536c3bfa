"""How a transformer's token embedding and head are split: both over the vocabulary, so that they may be tied."""

from __future__ import annotations

from torch import nn

from dmp import PlanError
from sharders.tensor_parallel.head_counts import ModelRuns


def vocabulary_styles(runs: ModelRuns, loss_parallel: bool, notes: list[str]) -> dict[str, str]:
    """Styles of what can be split, by module path; what is left whole is added to `notes`.

    Raises:
        PlanError: with `loss_parallel` a vocabulary that the axis does not divide.
    """
    transformer, size = runs.transformer, runs.size
    styles: dict[str, str] = {}
    wanted = {
        transformer.embedding: "rowwise",
        transformer.head: "colwise_loss_parallel" if loss_parallel else "colwise_gather",
    }
    modules = {path: runs.model.get_submodule(path) for path in wanted if path is not None}
    is_tied = len({id(m.weight) for m in modules.values()}) < len(modules)
    for path, module in modules.items():
        assert isinstance(module, nn.Embedding | nn.Linear)
        rows = module.weight.shape[0]
        if rows % size:
            if loss_parallel:
                raise PlanError(
                    f"module {path!r}: vocabulary {rows} is not divisible by {size}, the size of mesh axis "
                    f"{runs.axis!r}, which loss_parallel needs; pad the vocabulary to a multiple of {size}, use "
                    "another mesh, or TensorParallelSharder(loss_parallel=False)"
                )
            notes.append(f"{path}: left whole, its vocabulary {rows} is not divisible by {size}")
        elif isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
            notes.append(f"{path}: left whole, sparse gradients and max_norm are for whole rows on one rank")
            if is_tied:
                return {}
        elif hasattr(module.weight, "_optimizer_classes"):
            notes.append(f"{path}: left whole, its optimizer runs in the backward pass")
            if is_tied:
                return {}
        else:
            styles[path] = wanted[path]
    return styles
