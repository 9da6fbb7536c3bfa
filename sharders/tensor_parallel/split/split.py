"""Splits a model in place: styles -> DTensors and hooks, numbers of heads, ties and whole weights."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from dmp import PlanError, join_name, tied_places
from sharders.tensor_parallel.split import hooks
from sharders.tensor_parallel.split.attention import split_attention
from sharders.tensor_parallel.split.attention_weights import gather_attention_weights
from sharders.tensor_parallel.split.local import split_local, split_weights
from sharders.tensor_parallel.split.mixtures import split_experts
from sharders.tensor_parallel.split.plain import writable
from sharders.tensor_parallel.split.program_hooks import forward_hooks, run_last, tell_of_chunks, tell_of_parts
from sharders.tensor_parallel.split.replicated_weights import align_gradient, keep_tie, keep_whole_weights, read_local
from sharders.tensor_parallel.split.shared_keys import sum_shared_keys
from sharders.tensor_parallel.split.styles import COLWISE, ON_PARTS, Style, family, is_local, torch_style
from sharders.tensor_parallel.split.twice import keep_graphs
from sharders.tensor_parallel.split.wide_norms import split_norm
from sharders.tensor_parallel.structure.linears import features_of, is_joint_attention
from sharders.tensor_parallel.structure.numbers import set_number

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def split(
    model: nn.Module,
    mesh: DeviceMesh,
    styles: Mapping[str, Style],
    divided: Mapping[tuple[str, str], int],
    kept: Collection[int] = (),
) -> None:
    """Split the model in place, in this order: attention weights given out -> shared inputs -> torch's styles -> hooks
    on activations -> numbers of heads -> ties put back -> whole weights -> the program's own hooks. No communication;
    parameters may be on meta.

    Args:
        mesh: the tensor axis.
        styles: module path -> style, in the order of the model.
        divided: (module path, attribute) -> its value on each rank.
        kept: ids of whole weights that the model reads beside their places.
    """
    keep_graphs()
    ties, earlier = tied_places(model), forward_hooks(model)
    attentions = {path for path in styles if is_joint_attention(model.get_submodule(path))}
    modules = {path: model.get_submodule(path) for path in styles}
    hooks.pad_nested(_encoder_layers(model, styles))
    gather_attention_weights(model, mesh, styles)
    _share_inputs(modules, styles, model, mesh)
    adding: set[int] = set()
    for path, module in modules.items():
        if path.rpartition(".")[0] in attentions:
            continue
        if path in attentions:
            split_attention(module, mesh)  # type: ignore[arg-type]
            continue
        style = torch_style(styles[path], module)
        if style is not None:
            _parallelize(module, mesh, style)
            if isinstance(module, nn.Embedding) and family(styles[path]) == "rowwise":
                align_gradient(module, "weight")
        elif family(styles[path]) == "norm":
            split_norm(module, mesh)
        elif family(styles[path]) == "heads":
            read_local(module, split_weights(module, mesh, styles[path]), is_followed=True)
        elif is_local(styles[path], module):
            (split_experts if family(styles[path]) == "experts" else split_local)(module, mesh, styles[path])
            adding.add(id(module))
        if styles[path] == "latent":
            sum_shared_keys(module, model.get_submodule(path.rpartition(".")[0]), mesh)
        _move_activations(path, module, styles, mesh)
    for (path, attribute), value in divided.items():
        set_number(model.get_submodule(path), attribute, value)
    for places in ties:
        keep_tie(places)
    on_parts = {id(modules[path]) for path, style in styles.items() if style in ON_PARTS}
    keep_whole_weights(model, mesh, on_parts, adding, kept)
    run_last(earlier)
    tell_of_parts(model, mesh, styles)
    tell_of_chunks(model, mesh, styles)


def _encoder_layers(model: nn.Module, styles: Mapping[str, Style]) -> list[nn.Module]:
    """Those of torch's own that have a split weight."""
    holders = {path.rpartition(".")[0] for path in styles}
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.TransformerEncoderLayer)]
    return [m for path, m in found if any(h == path or h.startswith(path + ".") for h in holders)]


def _share_inputs(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], model: nn.Module, mesh: DeviceMesh
) -> None:
    linears = {p: m for p, m in modules.items() if styles[p] in COLWISE and features_of(m)}
    holders = dict.fromkeys(["", *(path.rpartition(".")[0] for path in linears)])
    called = [(m, styles[path] == "colwise_from_sequence") for path, m in linears.items()]
    hooks.share_inputs(called, map(model.get_submodule, holders), mesh)


def _move_activations(path: str, module: nn.Module, styles: Mapping[str, Style], mesh: DeviceMesh) -> None:
    style = styles[path]
    if style == "gather_input":
        hooks.gather_input(module, mesh, path, hidden_size(path, module, styles))
    elif style == "split_sequence":
        hooks.split_sequence(module, mesh, path, hidden_size(path, module, styles))
    elif style == "gather_sequence":
        hooks.gather_sequence(module, mesh)


def hidden_size(path: str, module: nn.Module, styles: Mapping[str, Style]) -> int:
    """What the first colwise Linear inside takes.

    Raises:
        PlanError: there is none.
    """
    for below, inner in module.named_modules():
        name = join_name(path, below)
        features = features_of(inner)
        if features is not None and family(styles.get(name, "")) == "colwise":
            return features.in_features
    raise PlanError(
        f"module {path!r}: {styles[path]!r} needs a colwise nn.Linear inside, to take the hidden state; there is none"
    )


def _parallelize(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if isinstance(style, ColwiseParallel | RowwiseParallel):
        style = copy.copy(style)
        is_out = isinstance(style, ColwiseParallel)
        style._prepare_output_fn = _split_as_asked if is_out else _placed  # type: ignore[method-assign]
    # Values are equal on all ranks already: nothing is sent.
    parallelize_module(module, mesh, style, src_data_rank=None)


def _split_as_asked(placements: Any, use_local_output: bool, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    """As `_placed`, but an output that is split as asked is left: torch takes Shard(-1) and Shard(2) for different."""
    from torch.distributed.tensor import Shard

    asked = tuple(Shard(p.dim % output.ndim) if isinstance(p, Shard) else p for p in placements)
    return _placed(asked, use_local_output, module, output, mesh)


def _placed(placements: Any, use_local_output: bool, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
    """torch's, but the model's code may write what it gives, and that has arrived: a compiled graph that takes what has
    not gives it a gradient that nobody takes, and all behind it has none."""
    output = output.redistribute(placements=placements)
    return writable(output.to_local()) if use_local_output else output
