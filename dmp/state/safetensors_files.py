"""safetensors' own functions, over weights that are split.

They look for memory that tensors share, which a tensor of parts has none of: what came was "Attempted to access the
data pointer on an invalid python storage". Transformers' Trainer calls them, on rank 0 alone, where nothing can be
gathered, and so does PEFT; Accelerate looks for itself. They are told what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dmp.chunked import ChunkedTensor
from dmp.errors import ShardError
from dmp.places import is_dtensor
from dmp.put_around import put_around


def refuse_parts(safetensors: Any) -> None:
    """Have a safetensors file take whole tensors alone, in words.

    Args:
        safetensors: `safetensors.torch`, or what has taken its function, or one like it, by name.
    """
    for name in ("storage_ptr", "id_tensor_storage"):
        if hasattr(safetensors, name):  # another version says what it says
            put_around(safetensors, name, _storage_ptr)


def _storage_ptr(own: Callable[..., Any], tensor: Any) -> Any:
    if isinstance(tensor, ChunkedTensor) or is_dtensor(tensor):
        raise ShardError(
            f"a safetensors file takes whole tensors, and this one, of {tuple(tensor.shape)}, is split: what is to "
            "be written holds this rank's chunks alone. On all ranks, load_checkpoint(path, model) reads such files "
            "and export_safetensors(path, model) writes them, full_state_dict(model) gives whole tensors, and "
            "save_checkpoint(path, model, optimizer) keeps everything. Transformers' Trainer gathers by itself, in its "
            "save_model() on all ranks; what else writes on rank 0 alone takes full_state_dict(model) of all ranks. "
            "PEFT's save_pretrained(path, state_dict=whole) on rank 0 writes adapters alone, where whole is that. "
            "Accelerate's save_model and save_state write what each rank has: not of such a model"
        )
    return own(tensor)
