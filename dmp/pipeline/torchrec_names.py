"""`TrainPipeline` under the names and signatures of TorchRec's pipelines, so that a script changes an import.

Arguments that ask for a way to do it rather than for a result (streams, copies, TorchScript, contexts) have no meaning
here; those that are set are named once, in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from dmp.errors import ShardError
from dmp.pipeline.pipeline import TrainPipeline

_log = logging.getLogger("dmp")

In = TypeVar("In")
Out = TypeVar("Out")

_STEPS = frozenset(
    ("fill_pipeline", "enqueue_batch", "dequeue_batch", "copy_batch_to_gpu", "inplace_copy_batch_to_gpu")
    + ("start_sparse_data_dist", "wait_sparse_data_dist", "clear_sparse_data_dist_inputs", "sync_embeddings")
    + ("start_embedding_lookup", "wait_embedding_lookup", "register_backward_hook", "contexts")
    + ("_set_module_context", "_pipeline_model", "_init_pipelined_modules", "_create_context")
    + ("_wait_for_batch", "_copy_batch_to_gpu", "_prefetch", "_connect")
)
"""What TorchRec's pipelines are made of and these are not, and subclasses of them override."""


class _Named(TrainPipeline, Generic[In, Out]):
    """What the pipelines below share; of a batch and an output, as TorchRec's are, which scripts write out."""

    # Kept by a `_next_batch` of a subclass, as TorchRec's is.
    _dataloader_iter: Iterator[Any] | None = None
    _dataloader_exhausted = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = sorted(_STEPS.intersection(vars(cls)))
        if own:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(own)} of TorchRec's pipeline, which this one would never call: "
                "its steps are others. Override progress, _next_batch, _backward or _optimizer_step, or give a forward "
                "(custom_model_fwd)"
            )

    def __getattr__(self, name: str) -> Any:
        if name in _STEPS:
            raise AttributeError(
                f"{name!r} is a part of TorchRec's pipelines; {type(self).__name__} of dmp is not made of it: call "
                "progress(iterator), detach(), attach(model) or reset()"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def _device(self) -> torch.device:
        """Where batches go: published scripts read it."""
        return self._feed.device

    @property
    def batches(self) -> list[Any]:
        """Those in flight, on the device, the oldest first."""
        return [waiting.batch.value for waiting in self._waiting]

    def _say_meaningless(self, **given: Any) -> None:
        named = [name for name, value in given.items() if value]
        if named:
            _log.warning("%s: %s has no meaning here, and changes nothing", type(self).__name__, ", ".join(named))


class TrainPipelineBase(_Named[In, Out]):
    """Reads and copies the next batch while this one computes; the ids of each are sent in its turn."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enable_inplace_copy_batch: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, forward=custom_model_fwd, sends_ahead=False)
        self._say_meaningless(enable_inplace_copy_batch=enable_inplace_copy_batch)


class TrainPipelineSparseDist(_Named[In, Out]):
    """`TrainPipeline` with TorchRec's arguments.

    Args:
        execute_all_batches: False ends where the iterator does; batches in flight are not trained.
        custom_model_fwd: called with a batch in the model's place.
        dmp_collection_sync_interval_batches: how often copies of tables along a replicate axis are averaged; here that
            is the sharder's `sync_interval`, and another number than the one there is refused.
        enqueue_batch_after_forward: read a batch after the forward of the one before the last, not before it.

    Raises:
        ShardError: an interval that the tables do not have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: Any = None,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, forward=custom_model_fwd)
        self._runs_last, self._reads_late = execute_all_batches, enqueue_batch_after_forward
        self._check_interval(dmp_collection_sync_interval_batches)
        self._say_meaningless(
            apply_jit=apply_jit,
            context_type=context_type,
            pipeline_postproc=pipeline_postproc,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )

    def _check_interval(self, interval: int | None) -> None:
        if interval == 1 or not self._env.axes("replicate"):
            return
        raise ShardError(
            f"dmp_collection_sync_interval_batches={interval!r}: how often the copies of tables along mesh axis "
            f"{self._env.axes('replicate')[0]!r} are averaged is told to their sharder, as in "
            "EmbeddingBagCollectionSharder(sync_interval=...); leave the argument out"
        )


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist`: tables lie in the memory of their device, so there is no cache to fetch rows into."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            custom_model_fwd=custom_model_fwd,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Forwards alone, whatever the model's mode; as for any forward, `torch.no_grad()` is the caller's."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
        enable_inplace_copy_batch: bool = False,
        free_features_storage_early: bool = False,
        clear_data_dist_inputs: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            apply_jit=apply_jit,
            pipeline_postproc=pipeline_postproc,
            enable_inplace_copy_batch=enable_inplace_copy_batch,
            free_features_storage_early=free_features_storage_early,
            clear_data_dist_inputs=clear_data_dist_inputs,
        )
        self._trains = False
