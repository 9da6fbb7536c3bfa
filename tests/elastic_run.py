"""A training run for torchrun: from the newest checkpoint on, with however many ranks there are now.

    elastic_run.py FOLDER [WORLD_SIZE:STEP:AGENT ...]

Each rank appends to FOLDER/log what it does, a line of JSON each, with its life: how many ranks, and their first step.
Where there are WORLD_SIZE ranks, step STEP is never made: those of AGENT (the variable AGENT of their environment)
sleep, while the others wait for them in the step's collectives. At the end rank 0 leaves FOLDER/weights.pt.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dmp import DistributedModelParallel, ShardingEnv, full_state_dict, latest, load_checkpoint, save_checkpoint
from planner import Constraint, ShardingPlanner
from tests.survival_jobs import GLOBAL_BATCH, dense_optimizer, make, my_samples, train_step

STEPS, SAVE_EVERY, KEPT = 12, 3, 2


def main(folder: Path, holds: list[str]) -> None:
    dist.init_process_group("gloo")
    env = ShardingEnv.from_mesh(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))

    # Copies of such small tables would cost least, however many ranks there are.
    planner = ShardingPlanner(constraints={"**": Constraint(forbid=("data_parallel",))})
    model = DistributedModelParallel(make(), env, planner=planner)
    optimizer = dense_optimizer(model)
    extra = {"step": 0, "position": 0}
    path = latest(folder / "checkpoints")
    if path is not None:
        extra = load_checkpoint(path, model, optimizer)
    who = {"pid": os.getpid(), "rank": env.rank, "life": [env.size, extra["step"]]}

    def say(event: str, **what: Any) -> None:
        with (folder / "log").open("a") as log:
            log.write(json.dumps({"event": event, **who, **what}) + "\n")

    layouts = {name: str(entry.layout) for name, entry in model.plan.items()}
    say("start", loaded=path and path.name, plan=layouts, planned=model.plan.report is not None)
    while extra["step"] < STEPS:
        if f"{env.size}:{extra['step']}:{os.environ['AGENT']}" in holds:
            say("hold")
            time.sleep(600)
        samples = my_samples(extra["position"], env)
        loss = train_step(model, optimizer, samples)
        say("step", step=extra["step"], samples=[samples.start, samples.stop], loss=loss)
        extra = {"step": extra["step"] + 1, "position": extra["position"] + GLOBAL_BATCH}
        if extra["step"] % SAVE_EVERY == 0:
            path = folder / "checkpoints" / f"step-{extra['step']}"
            save_checkpoint(path, model, optimizer, extra, keep_last=KEPT)
    weights = full_state_dict(model)
    if env.rank == 0:
        torch.save(weights, folder / "weights.pt")
    say("end")
    dist.destroy_process_group()
    time.sleep(0.2)  # a thread of gloo that still drops its last tensor needs the interpreter


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
