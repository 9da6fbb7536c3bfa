"""Random state in a checkpoint: rank by rank on an equal mesh, else derived from what was saved."""

from __future__ import annotations

import hashlib

import torch

from dmp.checkpoint.restore import CheckedLoad
from dmp.checkpoint.sources.source import Source
from dmp.chunked import as_chunks
from dmp.env import ShardingEnv
from dmp.errors import CheckpointError

_MOST_BYTES = 1 << 20  # of a generator's state, which has some thousand


def random_state(env: ShardingEnv) -> dict[str, torch.Tensor]:
    """Generator states of this process: device type -> bytes."""
    states = {"cpu": torch.get_rng_state()}
    if env.device_type not in ("cpu", "meta"):
        states[env.device_type] = torch.get_device_module(env.device_type).get_rng_state()
    return states


def prepare_random_state(load: CheckedLoad, env: ShardingEnv) -> None:
    """Have a load set this process's generators, where the source has their state.

    Raises:
        CheckpointError: what it has is no generator's state.
    """
    mesh = load.source.about.get("mesh")
    if mesh is None or "rng.0.cpu" not in load.source.shapes:
        return
    keys = {device: f"rng.{env.rank}.{device}" for device in random_state(env)}
    same = (mesh["names"], mesh["shape"]) == (list(env.names), list(env.shape))
    exact = same and all(key in load.source.shapes for key in keys.values())
    wanted = keys if exact else {"cpu": "rng.0.cpu"}
    states = {device: _read(load.source, key) for device, key in wanted.items()}
    if exact:
        try:
            torch.Generator(device="cpu").set_state(states["cpu"])
        except RuntimeError as error:
            raise CheckpointError(f"{load.source.path}: the random state is none of torch's: {error}") from error

    def restore() -> None:
        if not exact:
            digest = hashlib.sha256(bytes(states["cpu"].tolist()) + env.data_rank.to_bytes(8, "little")).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            return
        torch.set_rng_state(states["cpu"])
        for device in keys.keys() - {"cpu"}:
            torch.get_device_module(device).set_rng_state(states[device])

    load.then.append(restore)


def _read(source: Source, key: str) -> torch.Tensor:
    """Before anything is changed; the bytes are checked with all others."""
    size, dtype = source.shapes[key]
    if len(size) != 1 or not 0 < size[0] <= _MOST_BYTES or dtype != torch.uint8:
        raise CheckpointError(f"{source.path}: {key!r} is {dtype} of {size}; expected a generator's state, some bytes")
    state = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default device is
    source.read({key: as_chunks(state)})
    return state
