"""DLRM as TorchRec's users train it: its modules, planner, optimizers and data, and two imports of ours.

The two lines from `dmp` are all that tells this script from one for TorchRec's own wrapper. Start it with torchrun:

    torchrun --nproc_per_node 2 dlrm_main.py --adagrad --interaction_type dcn --lr_warmup_steps 20 --print_sharding_plan
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torchmetrics
from clicks import loader, rows_of_tables
from flags import parse_flags
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from dmp import DistributedModelParallel, TrainPipelineSparseDist


def make_model(flags: argparse.Namespace, device: torch.device) -> nn.Module:
    """DLRM with its loss; its tables are on meta, so that no process holds them whole."""
    configs = [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=flags.embedding_dim, num_embeddings=rows, feature_names=[name]
        )
        for name, rows in zip(DEFAULT_CAT_NAMES, rows_of_tables(flags), strict=True)
    ]
    parts = {
        "embedding_bag_collection": EmbeddingBagCollection(tables=configs, device=torch.device("meta")),
        "dense_in_features": len(DEFAULT_INT_NAMES),
        "dense_arch_layer_sizes": flags.dense_arch_layer_sizes,
        "over_arch_layer_sizes": flags.over_arch_layer_sizes,
        "dense_device": device,
    }
    if flags.interaction_type == "dcn":
        model = DLRM_DCN(**parts, dcn_num_layers=flags.dcn_num_layers, dcn_low_rank_dim=flags.dcn_low_rank_dim)
    elif flags.interaction_type == "projection":
        model = DLRM_Projection(
            **parts,
            interaction_branch1_layer_sizes=flags.interaction_branch1_layer_sizes,
            interaction_branch2_layer_sizes=flags.interaction_branch2_layer_sizes,
        )
    else:
        model = DLRM(**parts)
    return DLRMTrain(model)


def stages(flags: argparse.Namespace) -> list[WarmupStage]:
    """How the learning rate goes: up in a line, level, and down by the square of what is left."""
    plan = []
    if flags.lr_warmup_steps:
        plan.append(WarmupStage(WarmupPolicy.LINEAR, max_iters=flags.lr_warmup_steps, value=1 / flags.lr_warmup_steps))
    if flags.lr_decay_steps:
        if flags.lr_decay_start > flags.lr_warmup_steps:
            plan.append(WarmupStage(WarmupPolicy.CONSTANT, max_iters=flags.lr_decay_start, value=1.0))
        end = flags.lr_decay_start + flags.lr_decay_steps
        plan.append(WarmupStage(WarmupPolicy.POLY, max_iters=end, value=2.0, decay_iters=end + 1))
    return plan


def make_optimizer(flags: argparse.Namespace, model: nn.Module) -> WarmupOptimizer:
    """One over all: tables, which the backward pass updates, and dense layers."""

    def of_dense(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if flags.adagrad:
            return torch.optim.Adagrad(parameters, lr=flags.learning_rate, eps=flags.eps)
        return torch.optim.SGD(parameters, lr=flags.learning_rate)

    dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), of_dense)
    both = CombinedOptimizer([model.fused_optimizer, dense])
    return WarmupOptimizer(both, stages(flags), lr=flags.learning_rate)


def train(
    flags: argparse.Namespace,
    pipeline: TrainPipelineSparseDist,
    optimizer: WarmupOptimizer,
    model: nn.Module,
    epoch: int,
) -> float:
    """One epoch; the last step's loss on this rank."""
    model.train()
    batches, last = iter(loader(flags, "train")), float("nan")
    for step in count_until_stop():
        if flags.print_lr:
            say(f"lr: {step} {optimizer.param_groups[0]['lr']:.6f}")
        try:
            loss, _, _ = pipeline.progress(batches)
        except StopIteration:
            break
        last = float(loss)
        if flags.validation_freq_within_epoch and (step + 1) % flags.validation_freq_within_epoch == 0:
            evaluate(flags, pipeline, model, "val")
            model.train()
    say(f"epoch {epoch}: {step} steps, last loss {last:.6f}")
    return last


def evaluate(flags: argparse.Namespace, pipeline: TrainPipelineSparseDist, model: nn.Module, split: str) -> float:
    """AUROC over all ranks' samples of a split."""
    model.eval()
    batches, auroc = iter(loader(flags, split)), torchmetrics.AUROC(task="binary").to(model.device)
    with torch.no_grad():
        for _ in count_until_stop():
            try:
                _, logits, labels = pipeline.progress(batches)
            except StopIteration:
                break
            auroc(torch.sigmoid(logits), labels.int())
    result = float(auroc.compute())
    say(f"AUROC over {split} set: {result:.6f}")
    return result


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """A run, by its options; the figures it ends with."""
    flags = parse_flags(arguments)
    torch.backends.cuda.matmul.allow_tf32 = flags.allow_tf32
    has_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpu else "gloo")
    torch.manual_seed(flags.seed)

    model = make_model(flags, device)
    in_backward = {"lr": flags.learning_rate, **({"eps": flags.eps} if flags.adagrad else {})}
    of_tables = torch.optim.Adagrad if flags.adagrad else torch.optim.SGD
    apply_optimizer_in_backward(of_tables, model.model.sparse_arch.parameters(), in_backward)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            local_world_size=get_local_size(), world_size=dist.get_world_size(), compute_device=device.type
        ),
        batch_size=flags.batch_size,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=model, device=device, plan=plan)
    if flags.print_sharding_plan:
        for path, tables in model.plan.plan.items():
            say(path)
            for table, sharding in tables.items():
                say(f"    {table}: {sharding.sharding_type} on ranks {sharding.ranks}")
    optimizer = make_optimizer(flags, model)
    pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    figures = {}
    for epoch in range(flags.epochs):
        figures["loss"] = train(flags, pipeline, optimizer, model, epoch)
        figures["val"] = evaluate(flags, pipeline, model, "val")
    figures["test"] = evaluate(flags, pipeline, model, "test")
    return figures


def count_until_stop() -> Iterator[int]:
    """0, 1, 2, ..."""
    step = 0
    while True:
        yield step
        step += 1


def say(text: object) -> None:
    """Prints on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
