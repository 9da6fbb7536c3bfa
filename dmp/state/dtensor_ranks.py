"""The ranks that hold a module which is split by other means than ours, as by `fully_shard`: its DTensors' meshes tell.

The world is not one model's: on a mesh with an axis of stages each stage may have parameters of the same names.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from dmp.env import ShardingEnv, default_env, has_role
from dmp.places import is_dtensor


def env_of_dtensors(model: nn.Module) -> ShardingEnv | None:
    """Of the ranks that its DTensors lie on, and of those that have copies: along what else that mesh was cut from has
    of axes whose names are those of samples or weights.

    Returns:
        None where it has no DTensors; the default one where they lie on all ranks, or on such as no mesh has together.
    """
    meshes = {t.device_mesh: None for t in [*model.parameters(), *model.buffers()] if is_dtensor(t)}
    if not meshes:
        return None
    ranks = torch.cat([mesh.mesh.flatten() for mesh in meshes]).unique()
    root = max(meshes, key=lambda mesh: mesh.size())._get_root_mesh()
    names = root.mesh_dim_names or ("dp",)
    held = torch.isin(root.mesh, ranks)
    if len(ranks) == dist.get_world_size() or len(names) != root.ndim or held.sum() < len(ranks):
        return default_env()
    cut = [len(of_axis.unique()) > 1 for of_axis in held.nonzero().T]
    own = [name for name, is_cut in zip(names, cut, strict=True) if is_cut]
    copies = [name for name in names if name not in own and has_role(name)]
    axes = tuple(name for name in names if name in (*own, *copies))
    mesh = root[axes] if len(axes) < len(names) else root
    return ShardingEnv.from_mesh(mesh, replicate=copies, shard=own)
