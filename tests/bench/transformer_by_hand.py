"""The zoo's Llama on a mesh as one writes it by hand: torch's tensor-parallel styles, then FSDP2 block by block.

What `DistributedModelParallel` is held against. It is written with care: an attention's or MLP's input becomes a
DTensor once, so that its gradient is summed once.
"""

from __future__ import annotations

import copy
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.transformers_zoo import Llama


def by_hand(
    model: Llama,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    src_data_rank: int | None = None,
) -> nn.Module:
    """The model, in place; on `dp` in torch's wrapper.

    Args:
        model: unsharded, on the CPU or on meta.
        mesh: axes among `replicate`, `shard` and `tp`, in this order; or `dp`, for `DistributedDataParallel`.
        sequence_parallel: torch's canonical plan: the embedding's output is split already, the head gathers.
        loss_parallel: the logits stay split over the vocabulary.
        src_data_rank: of `parallelize_module`: 0, torch's default, sends that rank's values; None trusts the ranks.
    """
    names = mesh.mesh_dim_names or ()
    if names == ("dp",):
        return DistributedDataParallel(model, process_group=mesh.get_group())
    if "tp" in names:
        _split(model, mesh["tp"], sequence_parallel, loss_parallel, src_data_rank)
    data = tuple(name for name in names if name != "tp")
    if data:
        data_mesh = mesh if len(data) == mesh.ndim else mesh[data]
        for layer in model.layers:
            fully_shard(layer, mesh=data_mesh)
        fully_shard(model, mesh=data_mesh)
    return model


def by_hand_from_first_rank(model: Llama, mesh: DeviceMesh) -> Llama:
    """The same with rank 0's values on every rank: `parallelize_module` sends what it splits, and nothing the rest."""
    for parameter in model.parameters():
        for name in mesh.mesh_dim_names or ():
            if name != "tp" or parameter.dim() == 1:
                dist.broadcast(parameter.detach(), group=mesh[name].get_group(), group_src=0)
    return by_hand(model, mesh, src_data_rank=0)


def by_hand_from_meta(model: Llama, mesh: DeviceMesh) -> Llama:
    """The same from a model on meta: allocated after it is split, and filled with what one process would have.

    A DTensor's own `reset_parameters` will not do: on the CPU torch draws the same numbers on every rank. So each
    module is reset whole, from a seed of its own, and every rank takes its parts.
    """
    whole = copy.deepcopy(model)
    by_hand(model, mesh)
    model.to_empty(device="cpu")
    targets = dict(model.named_parameters())
    for path, module in whole.named_modules():
        if not hasattr(module, "reset_parameters"):
            continue
        module.to_empty(device="cpu", recurse=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(path.encode()))
            module.reset_parameters()
        for name, value in module.named_parameters(recurse=False):
            _take_part(targets[f"{path}.{name}"], value.detach())
    return model


def _take_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    if not isinstance(target, DTensor):
        target.detach().copy_(whole)
        return
    local = target.detach().to_local()
    for box in target.__create_chunk_list__() if local.numel() else ():
        local.copy_(whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))])


def _split(model: Llama, tp: DeviceMesh, sequence: bool, loss: bool, src_data_rank: int | None) -> None:
    hidden = Shard(1) if sequence else Replicate()  # between blocks
    logits = Shard(-1) if loss else Replicate()
    root: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden),
        "output": ColwiseParallel(input_layouts=hidden, output_layouts=logits, use_local_output=not loss),
    }
    whole = {"input_layouts": (hidden, None), "desired_input_layouts": (Replicate(), None)}
    block: dict[str, Any] = {
        "attention": PrepareModuleInput(**whole),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=hidden),
        "feed_forward": PrepareModuleInput(input_layouts=(hidden,), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=hidden),
    }
    if sequence:
        root["norm"] = SequenceParallel()
        block |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    parallelize_module(model, tp, root, src_data_rank=src_data_rank)
    for layer in model.layers:
        parallelize_module(layer, tp, block, src_data_rank=src_data_rank)
        layer.attention.heads //= tp.size()
        layer.attention.kv_heads //= tp.size()


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """AdamW; plain weights and DTensors in groups of their own, for its multi-tensor form takes no mixture."""
    kinds: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    return torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=1e-3)


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, on every rank, by its name in the model itself."""
    return {
        n.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in model.named_parameters()
    }
