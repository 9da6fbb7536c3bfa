"""`model.forward` of the wrapper: runs the model, and has the signature of the module's own forward."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch.fx import Proxy
from torch.utils.checkpoint import _StopRecomputationError

from dmp import live_models as live
from dmp.env import ShardingEnv
from dmp.errors import ShardError
from dmp.ranks import begin_pass, note_left, raise_cause, raise_verdict
from dmp.wrap.earlier.written_earlier import check_earlier
from dmp.wrap.making.data_parallel import check_cast
from dmp.wrap.optimizers.repeated_samples import note_samples
from dmp.wrap.optimizers.step_turns import agree_on_forward
from dmp.wrap.values.skeleton import put_back

_TORCH = str(Path(torch.__file__).parent)


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's forward."""
    _refuse_tracing(args, kwargs)
    _refuse_graphs(model.env)
    _refuse_clones(model)
    if torch.is_grad_enabled() and (everyone := model.env.everyone) is not None:
        raise_verdict(everyone)  # DDP would wait for ranks that are gone, or in a process that cannot hear them
    vars(model.module).pop(live.HELD, None)
    begin_pass()
    model.hold_parameters()
    agree_on_forward(model)
    note_samples(model, args, kwargs)
    try:
        check_earlier(model)
        with model._calls.forward:
            result = model.running(*args, **kwargs)
        if torch.is_grad_enabled():
            check_cast(model._made)
        return result
    except BaseException as error:
        if model.skeleton is not None and not isinstance(error, _StopRecomputationError):  # else it goes on backward
            put_back(model.module)
        if torch.is_grad_enabled() and not isinstance(error, _StopRecomputationError):
            note_left("the forward pass", error)
        if isinstance(error, RuntimeError):  # of a collective of torch's, which no entry of ours is around
            raise_cause(error)
            if model.env.tensor_size > 1:
                _explain_mixture(error)
        raise


def _explain_mixture(error: RuntimeError) -> None:
    """Of torch's words for a split weight beside plain tensors; of what FSDP2 has split its wrapper knows more.

    Raises:
        ShardError: where it is that.
    """
    if "got mixed torch.Tensor and DTensor" not in str(error):
        return
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_TORCH)]
    raise ShardError(
        "the model's forward computes with a weight that is split over the tensor axis, beside plain tensors "
        f"({Path(frames[-1].filename).name}:{frames[-1].lineno}): have it call the module that holds the weight, as "
        "lm_head(hidden); or TensorParallelSharder(example_inputs=...), with what the model is called with, finds what "
        "must stay whole"
    ) from error


def _refuse_tracing(args: Any, kwargs: Any) -> None:
    """Whether torch.fx runs the forward, with a proxy in place of each argument, or of all of them.

    Raises:
        ShardError: it does.
    """
    are_whole = isinstance(args, tuple) and isinstance(kwargs, dict)
    if not are_whole or any(isinstance(each, Proxy) for each in (*args, *kwargs.values())):
        raise ShardError(
            f"a wrapped model is not traced by torch.fx: {_OF_GRAPHS}. TorchRec's train pipelines begin so: import the "
            "pipeline of the same name from dmp (TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist, "
            "EvalPipelineSparseDist, TrainPipelineBase)"
        )


def _refuse_graphs(env: ShardingEnv) -> None:
    """Before anything is exchanged: symbols in the place of numbers would stay in what ranks keep of each other.

    Raises:
        ShardError: `torch.export` or `torch.jit.trace` runs the forward of a model on several ranks.
    """
    if env.size > 1 and (torch.compiler.is_exporting() or torch.jit.is_tracing()):  # type: ignore[attr-defined, no-untyped-call]
        raise ShardError(f"a model that is wrapped on {env.size} ranks is neither exported nor traced: {_OF_GRAPHS}")


def refuse_scripting(model: Any) -> Any:
    """What `torch.jit.script` asks a module for, or one inside another: what it is to compile in its stead.

    Raises:
        ShardError: it would compile code that exchanges, and end in the name of a class of ours.
    """
    raise ShardError(f"a wrapped model is not compiled by torch.jit.script: {_OF_GRAPHS}")


_OF_GRAPHS = (
    "what ranks exchange is real, and no part of a graph. dmp.to_unsharded(model), on all ranks, is a plain module "
    "with the same weights, which can be"
)


def _refuse_clones(model: Any) -> None:
    """Whether others have put modules together like those of a wrapped model, with weights of their own, and given them
    all of its attributes: that of what a forward runs is the model itself.

    Raises:
        ShardError: they have.
    """
    if model not in live.models:
        raise ShardError(
            f"{type(model).__name__}: modules of a wrapped model have been put together anew, with other weights, as "
            "higher's innerloop_ctx and learn2learn's clone do: a forward would run with those of the model itself. "
            "copy.deepcopy(model) is another model; where all weights are copies, on a mesh with a 'dp' axis alone, "
            "give such a function model.module"
        )


class _BoundForward:
    """As a bound method; trainers read its signature, to tell which columns of a batch the model takes."""

    __slots__ = ("__self__",)
    __func__, __name__, __doc__ = _forward, "forward", _forward.__doc__

    def __init__(self, model: Any) -> None:
        self.__self__ = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self.__self__, *args, **kwargs)

    @property
    def __code__(self) -> CodeType:
        """Of the module's forward, which `torch.export` and others read the names of arguments from."""
        forward: Any = self.__self__.module.forward
        code: CodeType = forward.__code__
        return code

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__.module.forward)


class Forward:
    """The attribute `forward` of a class: a function there, of an instance as above."""

    def __get__(self, model: Any, owner: Any = None) -> Any:
        return _forward if model is None else _BoundForward(model)
