"""Weights of others into sharded models: a Hugging Face folder, and what TorchRec saved on a plan of its own.

Run it with `torchrun --nproc_per_node=4 examples/load_checkpoint.py`, or alone with python.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torchrec
from torchrec.distributed import DistributedModelParallel as TorchRecsWrapper

from dmp import DistributedModelParallel, ShardingEnv, export_safetensors, full_state_dict, load_checkpoint, row_wise

alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
dist.init_process_group("gloo", **alone)
mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(folders)

# A Hugging Face folder: config.json beside safetensors files. Its names have a prefix that is found.
base = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
if dist.get_rank() == 0:
    export_safetensors(f"{folders[0]}/hf", torch.nn.ModuleDict({"model": base}), max_shard_bytes=70_000)
dist.barrier()
model = DistributedModelParallel(base, ShardingEnv.from_mesh(mesh))
load_checkpoint(f"{folders[0]}/hf", model)  # each rank reads the rows it holds

# A checkpoint of TorchRec, as its users write it.
table = torchrec.EmbeddingBagConfig(name="t", embedding_dim=16, num_embeddings=1000, feature_names=["f"])
theirs = TorchRecsWrapper(torchrec.EmbeddingBagCollection(tables=[table], device="meta"))
dcp.save({"model": theirs.state_dict()}, checkpoint_id=f"{folders[0]}/torchrec")
plan = {"embedding_bags.t.weight": row_wise()}
ours = DistributedModelParallel(torchrec.EmbeddingBagCollection(tables=[table]), ShardingEnv.from_mesh(mesh), plan=plan)
load_checkpoint(f"{folders[0]}/torchrec", ours)
plain = torchrec.EmbeddingBagCollection(tables=[table])
load_checkpoint(f"{folders[0]}/torchrec", plain)
same = torch.equal(plain.embedding_bags["t"].weight, full_state_dict(ours)["embedding_bags.t.weight"])
print(f"rank {dist.get_rank()} of {list(mesh.shape)}: {'the same weights' if same else 'other weights'} as one process")
