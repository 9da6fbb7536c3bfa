"""Errors that leave a backward pass: noted, for other ranks may wait in it, and some of torch's put into words.

One is of a term of the loss over all weights, such as an L2 penalty, where some are DTensors: it fails when the term's
parts part again, and the plain gradient of their sum meets DTensors. Another is of torch's search for NaN,
one of a weight of another shape than it was wrapped with, one of a block whose results nobody finds, one of blocks
that share a weight and are computed again.
"""

from __future__ import annotations

from typing import Any

import torch

from dmp import live_models as live
from dmp.errors import ShardError
from dmp.ranks import note_left

_SPARSE = (
    "a weight that is no table has a sparse gradient, as of F.embedding_bag(ids, self.weight, sparse=True) in a module "
    "of one's own: such are averaged as dense ones. Pass sparse=False there, or keep the weight in an nn.EmbeddingBag "
    "or nn.Embedding and call that"
)
_FREED = (
    "the backward pass came to a block whose weights were not gathered: nobody saw it begin there. Either it began at "
    "a tensor from within the block, which a hook or an attribute has kept: have the block return it, hook the block "
    "itself, or gather all weights at once, data_parallel_wrapper=FSDPWrapper(units=[]). Or the block returned nothing "
    "that has its tensors: it may return them in lists, dicts, sets, objects and functions; one that returns a "
    "generator, or writes its result into an argument, is to return the tensor too"
)
_WORDS = {
    "got mixed torch.Tensor and DTensor": "the backward pass met plain tensors beside DTensors, as of a loss with a "
    "term over all weights, sum(p.square().sum() for p in model.parameters()): there read p.full_tensor() where p is a "
    "DTensor. An optimizer's weight_decay= is such a term without that",
    "aten._is_any_true": "torch looks for NaN in every gradient, and does not in DTensors: somebody has called "
    "torch.autograd.set_detect_anomaly(True), as libraries do when they are imported. Call it with False before the "
    "backward pass",
    "has been marked as ready twice": "blocks that share a weight, or that two forwards have run, are computed again "
    "by torch.utils.checkpoint with use_reentrant=True, in a pass of its own for each: DDP takes the weight's gradient "
    "for complete after the first. Pass use_reentrant=False (transformers: gradient_checkpointing_kwargs={"
    "'use_reentrant': False})",
    **dict.fromkeys(("are out of bounds for storage of size 0", "but its data is not allocated yet"), _FREED),
    **dict.fromkeys(("storage of SparseTensorImpl", "'fsdp::chunk_cat' with arguments from the 'Sparse"), _SPARSE),
}
"""What torch's error has in it -> what ours says."""

_WITH_A_GRAPH = (
    "loss.backward(create_graph=True): a gradient in .grad is averaged over the ranks, and no graph goes through that. "
    "torch.autograd.grad(loss, tensors, create_graph=True) gives each rank the gradients of its own samples with theirs"
)


def say_what_left(own: Any, *args: Any, **options: Any) -> Any:
    """A backward pass, see `around_backward`, of which the error says what to do."""
    try:
        return own(*args, **options)
    except Exception as error:
        if torch._C._current_graph_task_id() < 0:  # not of a pass within a pass
            note_left("the backward pass", error)
        text = next((text for theirs, text in _WORDS.items() if theirs in str(error)), None)
        if "a leaf Variable that requires grad" in str(error) and any(args[3:4]):  # of DDP's reducer
            text = _WITH_A_GRAPH
        if "returned an invalid gradient" in str(error) and (found := _reshaped()):
            text = (
                f"{found[0]}: a weight was given data of another shape after wrapping, as by resize_token_embeddings, "
                "and its gradient is averaged in the old one. Resize the model before it is wrapped, or "
                "to_unsharded(model), and wrap that"
            )
        if not isinstance(error, RuntimeError) or text is None:
            raise
        raise ShardError(text) from error


def _reshaped() -> list[str]:
    watches = (model._made.watch for model in live.models)
    return [text for watch in watches if watch is not None for text in watch.reshaped()]
