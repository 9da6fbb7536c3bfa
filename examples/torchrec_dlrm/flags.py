"""The script's options, under the names that TorchRec's DLRM script gave them."""

from __future__ import annotations

import argparse


def sizes(text: str) -> list[int]:
    """`"64,32,1"` as numbers."""
    return [int(part) for part in text.split(",")]


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of a run; what does not fit together ends the program with one line."""
    parser = argparse.ArgumentParser(
        description="DLRM on click logs, in TorchRec's way, on DistributedModelParallel of dmp.",
        epilog="example: torchrun --nproc_per_node 2 dlrm_main.py --adagrad --interaction_type dcn",
    )
    _data(parser.add_argument_group("data"))
    _model(parser.add_argument_group("model"))
    _training(parser.add_argument_group("training"))
    flags = parser.parse_args(arguments)
    tables = len(flags.num_embeddings_per_feature or [0] * 26)
    if tables != 26:
        parser.error(f"--num_embeddings_per_feature takes 26 numbers, one for each category; got {tables}")
    if flags.multi_hot_sizes is not None and len(flags.multi_hot_sizes) != 26:
        parser.error(f"--multi_hot_sizes takes 26 numbers, one for each category; got {len(flags.multi_hot_sizes)}")
    if flags.multi_hot_sizes is not None and flags.in_memory_binary_criteo_path:
        parser.error("--multi_hot_sizes is of generated clicks; the binary Criteo files have one id for each category")
    if flags.lr_decay_steps and flags.lr_decay_start < flags.lr_warmup_steps:
        parser.error("the warm-up must end before the decay starts: --lr_decay_start >= --lr_warmup_steps")
    return flags


def _data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--in_memory_binary_criteo_path", help="folder of day_<n>_{dense,sparse,labels}.npy; else clicks are made up"
    )
    group.add_argument("--mmap_mode", action="store_true", help="read those files as they are needed, not into memory")
    group.add_argument("--shuffle_batches", action="store_true", help="shuffle each batch of those files")
    group.add_argument("--batch_size", type=int, default=32, help="samples of a rank in a step")
    group.add_argument("--test_batch_size", type=int, help="the same for validation and test; --batch_size by default")
    group.add_argument("--limit_train_batches", type=int, help="steps of an epoch (10 of made-up clicks)")
    group.add_argument("--limit_val_batches", type=int, help="batches of a validation (10 of made-up clicks)")
    group.add_argument("--limit_test_batches", type=int, help="batches of the test (10 of made-up clicks)")
    group.add_argument("--multi_hot_sizes", type=sizes, help="ids of a sample in each of the 26 categories")


def _model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num_embeddings", type=int, default=100_000, help="rows of each table")
    group.add_argument("--num_embeddings_per_feature", type=sizes, help="26 numbers, in place of --num_embeddings")
    group.add_argument("--embedding_dim", type=int, default=64)
    group.add_argument("--dense_arch_layer_sizes", type=sizes, default="512,256,64")
    group.add_argument("--over_arch_layer_sizes", type=sizes, default="512,512,256,1")
    group.add_argument("--interaction_type", choices=("original", "dcn", "projection"), default="original")
    group.add_argument("--interaction_branch1_layer_sizes", type=sizes, default="2048,2048", help="of projection")
    group.add_argument("--interaction_branch2_layer_sizes", type=sizes, default="2048,2048", help="of projection")
    group.add_argument("--dcn_num_layers", type=int, default=3, help="of dcn")
    group.add_argument("--dcn_low_rank_dim", type=int, default=512, help="of dcn")


def _training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--epochs", type=int, default=1)
    group.add_argument("--seed", type=int, default=0, help="of initial values and made-up clicks")
    group.add_argument("--adagrad", action="store_true", help="Adagrad, instead of SGD, for tables and dense layers")
    group.add_argument("--learning_rate", type=float, default=0.05)
    group.add_argument("--eps", type=float, default=1e-8, help="of Adagrad")
    group.add_argument("--lr_warmup_steps", type=int, default=0, help="the rate rises linearly to --learning_rate")
    group.add_argument("--lr_decay_start", type=int, default=0, help="step from which it falls")
    group.add_argument("--lr_decay_steps", type=int, default=0, help="for so many steps, by the square of what is left")
    group.add_argument("--print_lr", action="store_true", help="print the learning rate at every step")
    group.add_argument("--print_sharding_plan", action="store_true", help="print where each table lies")
    group.add_argument("--validation_freq_within_epoch", type=int, help="steps between validations")
    group.add_argument("--allow_tf32", action="store_true", help="TensorFloat-32 for matrix products on a GPU")
