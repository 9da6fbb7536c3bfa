"""What code written for TorchRec's sharded modules finds in ours: their classes, by `isinstance`, and what it reads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partialmethod
from typing import Any

from torch import nn

from dmp import FusedParameter, ParameterSharding, ShardError, ShardingPlan, data_parallel, join_name, rectangles
from sharders.embedding.data_path.engine import Engine

_log = logging.getLogger("dmp")


def check_gradients_are_means(name: str, num_ranks: int) -> None:
    """Whether the process has not asked TorchRec for sums: a switch of its own modules, which would mean nothing here.

    Args:
        num_ranks: that have samples of their own.

    Raises:
        ShardError: it has.
    """
    ops = sys.modules.get("torchrec.distributed.comm_ops")
    if num_ranks > 1 and ops is not None and not ops.get_gradient_division():
        raise ShardError(
            f"TorchRec's set_gradient_division(False) asks for sums of all ranks' gradients; those of the tables of "
            f"{name or 'this module'} are the mean over {num_ranks} ranks, as dense weights' are. Call "
            "set_gradient_division(True) before wrapping, and give the tables' optimizer another learning rate"
        )


class TorchRecForm(nn.Module):
    """The members that such code reads. Subclasses are modules whose tables an `Engine` runs."""

    likeness: str | None = None
    """`module:class` of TorchRec's sharded module that runs the same kind of module."""

    tells_rows = True
    """See `dmp.hook`: an `Engine` does."""

    unsharded: Callable[[], nn.Module]
    """A plain module of the same structure, on meta."""

    fused_parameters: Callable[[], Iterable[FusedParameter]]
    """As of `dmp.FusedModule`."""

    _engine: Engine
    _unsharded_type: type[nn.Module]

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the tables' parameters."""
        for table in self._engine.tables:
            yield join_name(prefix, table.parameter)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Class of the module in whose place this one stands."""
        return self._unsharded_type

    @property
    def module_sharding_plan(self) -> Any:
        """TorchRec's `EmbeddingModuleShardingPlan` of the tables: table name -> its `ParameterSharding`.

        Raises:
            PlanError: rectangles that TorchRec has no sharding type for; `model.plan` has them.
        """
        placement, plan = self._engine.placement, {}
        for index, table in enumerate(placement.tables):
            layout = data_parallel() if placement.is_local[index] else rectangles(placement.shards[index])
            plan[table.parameter] = ParameterSharding(layout, kernel="fused" if table.optimizer else None)
        return ShardingPlan(plan).to_torchrec(self.unsharded(), self._engine.env).plan[""]

    @property
    def fused_optimizer(self) -> Any:
        """What of `model.fused_optimizer` is of this module's tables, under its own names.

        Raises:
            AttributeError: the module is in no wrapped model.
        """
        part = self._engine.calls.part
        if part is None:
            raise AttributeError("fused_optimizer")
        return part(self.fused_parameters())

    def create_context(self, *_: Any, **__: Any) -> Any:
        """Refused, as `preprocess_input` and `input_dist`: it is what TorchRec's train pipelines begin with.

        Raises:
            ShardError: always.
        """
        raise ShardError(
            f"TorchRec's train pipelines do not run {type(self).__name__}, {self._engine.name}: import the pipeline of "
            "the same name from dmp (TrainPipelineSparseDist, ...), and give it the wrapped model"
        )

    preprocess_input = input_dist = create_context

    @property
    def qconfig(self) -> None:
        """Set by torch's quantization, TorchRec's `quantize_inference_model` too, of whatever it looks at."""

    @qconfig.setter
    def qconfig(self, _: Any) -> None:
        _log.warning(
            "quantization leaves %s as it is, whose tables are sharded: dmp.to_unsharded(model) is a plain module, "
            "of which it finds the tables",
            self._engine.name,
        )

    @qconfig.deleter
    def qconfig(self) -> None:
        """There is none."""


def make_known(kind: type[Any]) -> None:
    """Have TorchRec's `isinstance(module, ShardedModule)` find modules of a class of ours, where it is imported.

    Args:
        kind: a `TorchRecForm`, or another module with its members.
    """
    for path in ("torchrec.distributed.types:ShardedModule", kind.likeness):
        module, _, name = (path or "").partition(":")
        theirs = getattr(sys.modules.get(module), name, None)
        if theirs is not None and not issubclass(kind, theirs):
            theirs.register(kind)


def make_waited() -> None:
    """Have TorchRec's `KeyedTensor` take `wait()`: its sharded collections give what has yet to be waited for, and
    scripts do so; ours give one that is there. No function of the class, which `torch.jit.script` would compile."""
    from torchrec.sparse.jagged_tensor import KeyedTensor

    if not hasattr(KeyedTensor, "wait"):
        KeyedTensor.wait = partialmethod(_itself)


def _itself(result: Any) -> Any:
    return result
