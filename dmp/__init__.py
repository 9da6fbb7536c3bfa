"""One wrapper that puts any PyTorch model on any device mesh.

Rooms, lower ones first; each says in its `__init__` what lives there: `ranks`, `moving`, `layouts`, `plans`, `wrap`,
`state`, `pipeline`, `checkpoint`, `commands`. Single files:

- `errors`: the errors a user can meet
- `env`: `ShardingEnv`, a mesh whose axes have roles
- `dtensor_pieces`: which rectangles of a DTensor a rank holds
- `chunked`: `ChunkedTensor`, a tensor of which a rank holds rectangles
- `sharded_form`: the same read as torch's `ShardedTensor`
- `live_models`: the wrapped models of this process
- `contracts`: protocols between wrapper, sharders and planner
- `registry`: sharders and planners by name and entry point
- `collection`: work without looking for garbage meanwhile
- `inference_mode`: calls that an evaluation may make, and that training goes on from
- `calls`: one call of a model at a time, in one thread
- `effects`: what this code changes beyond itself, and why
- `private_names`: names of other packages that are private there, and why they are used
- `foreign`: objects of whatever class: how errors name it, whether it is TorchRec's, what an attribute holds
- `put_around`: how a function of another package is stood in for
- `names`: dotted names: put together, and found by pattern: what `*` means everywhere
- `bits`: a number of a tensor's bits, to compare what ranks have
- `deep_copy`: deep copies of modules that hold what Python does not copy
- `nested`: what dicts, lists, tuples and objects hold inside each other
- `places`: where a module's tensors are held, ties among them
- `random_numbers`: the generators that code draws from without being given one
- `read_values`: values that came out of a file: strict JSON, sizes, and how an error shows them
- `step_phases`: what the last step's phases took, beside what was planned
- `__main__`: the command line: `python -m dmp plan | explain | diff | ...`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dmp import ranks
from dmp.bits import checksum
from dmp.calls import Calls
from dmp.checkpoint.api import load_checkpoint, save_checkpoint
from dmp.checkpoint.export import export_safetensors
from dmp.checkpoint.retention import keep_last, latest
from dmp.chunked import ChunkedTensor
from dmp.collection import without_collection
from dmp.contracts import (
    DataParallelWrapper,
    FusedModule,
    FusedParameter,
    ModelPlacement,
    ModelSharder,
    ModuleSharder,
    ParameterInfo,
    Planner,
    Resharded,
    ShardedModule,
    hook,
)
from dmp.deep_copy import deep_copy
from dmp.dtensor_pieces import rectangles_of, strided
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError, DmpError, InputError, PlanError, RanksError, ShardError
from dmp.foreign import attribute_of, is_torchrecs, type_name
from dmp.layouts.dense import colwise, fully_sharded, fully_sharded_dim, replicate, rowwise, sequence
from dmp.layouts.layout import Layout, ParameterSharding
from dmp.layouts.shard import Shard, check_cover, is_replicated
from dmp.layouts.sharding_types import sharding_types
from dmp.layouts.tables import column_wise, data_parallel, grid, rectangles, row_wise, table_row_wise, table_wise
from dmp.names import NameIndex, is_inside, join_name
from dmp.nested import map_nested, tensors_of
from dmp.places import Place, is_dtensor, local_of, places_of, replace_tensors, room_for, tied_places
from dmp.plans.find import Found, dense_parameters, place_dense, plan_parameters
from dmp.plans.plan import PlanChange, ShardingPlan
from dmp.plans.remarks import shown_bytes
from dmp.random_numbers import RandomNumbers, random_numbers_kept
from dmp.ranks import watchdog
from dmp.read_values import shown
from dmp.registry import default_sharders, register_sharder
from dmp.state.clip import clip_grad_norm_
from dmp.state.gather import full_state_dict
from dmp.state.optimizer_state import full_optimizer_state_dict
from dmp.state.scaler import GradScaler
from dmp.state.unsharded import to_unsharded
from dmp.state.verify import verify
from dmp.step_phases import step_phases
from dmp.wrap.wrapper import DistributedModelParallel

if TYPE_CHECKING:
    from dmp.pipeline.pipeline import TrainPipeline
    from dmp.pipeline.torchrec_names import (
        EvalPipelineSparseDist,
        PrefetchTrainPipelineSparseDist,
        TrainPipelineBase,
        TrainPipelineSparseDist,
    )

watchdog.await_group()


def __getattr__(name: str) -> Any:
    """Pipelines are imported when one is asked for: most programs that import dmp have none."""
    if name == "DMPCollection":  # an ImportError, whose words reach who imports it
        raise ImportError(
            "TorchRec's DMPCollection is DistributedModelParallel on a mesh with a replicate axis here: "
            "DistributedModelParallel(module, ShardingEnv.from_mesh(init_device_mesh(device, (replicas, ranks), "
            "mesh_dim_names=('replicate', 'dp')))). Copies of tables stay equal at every step; to average them every "
            "k updates, in place of sync(): sharders=[EmbeddingBagCollectionSharder(sync_interval=k)] of `sharders`"
        )
    if "Pipeline" not in name:
        raise AttributeError(f"module 'dmp' has no attribute {name!r}")
    from dmp.pipeline import torchrec_names

    return getattr(torchrec_names, name)


__all__ = ["DistributedModelParallel", "GradScaler", "ShardingEnv", "clip_grad_norm_", "to_unsharded", "verify"]
__all__ += ["step_phases"]
__all__ += ["CheckpointError", "DmpError", "InputError", "PlanError", "RanksError", "ShardError"]
# Training loops.
__all__ += ["EvalPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "TrainPipeline", "TrainPipelineBase"]
__all__ += ["TrainPipelineSparseDist"]
# Plans and layouts.
__all__ += ["Layout", "ParameterSharding", "PlanChange", "Shard", "ShardingPlan", "check_cover", "is_replicated"]
__all__ += ["column_wise", "data_parallel", "grid", "rectangles", "row_wise", "table_row_wise", "table_wise"]
__all__ += ["colwise", "fully_sharded", "replicate", "rowwise", "sequence"]
__all__ += ["Found", "dense_parameters", "place_dense", "plan_parameters"]
# State and checkpoints.
__all__ += ["full_optimizer_state_dict", "full_state_dict"]
__all__ += ["export_safetensors", "keep_last", "latest", "load_checkpoint", "save_checkpoint"]
# For authors of sharders and planners.
__all__ += ["DataParallelWrapper", "ModelPlacement", "ModelSharder", "ModuleSharder", "ParameterInfo", "Planner"]
__all__ += [
    "FusedModule",
    "FusedParameter",
    "Resharded",
    "ShardedModule",
    "default_sharders",
    "hook",
    "register_sharder",
]
__all__ += ["Calls", "ChunkedTensor", "NameIndex", "Place", "is_dtensor", "is_inside", "join_name"]
__all__ += ["fully_sharded_dim", "local_of", "rectangles_of", "strided"]
__all__ += ["map_nested", "places_of", "ranks", "replace_tensors", "room_for", "shown", "shown_bytes"]
__all__ += [
    "RandomNumbers",
    "attribute_of",
    "checksum",
    "deep_copy",
    "is_torchrecs",
    "random_numbers_kept",
    "sharding_types",
    "tensors_of",
    "tied_places",
    "type_name",
    "without_collection",
]
