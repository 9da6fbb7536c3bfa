"""Kernels x optimizers x ways of looking up x dtypes, and channels x wire formats, equal the unsharded module."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import pytest
import torch

import dmp
from dmp import ShardError, ShardingEnv
from sharders import EmbeddingBagCollectionSharder, EmbeddingBagSharder, EmbeddingCollectionSharder
from sharders.channel import Transport, over_connections, over_group
from sharders.embedding.exchange.codec import AS_COMPUTED, Cast, Codecs
from sharders.embedding.lookup.kernels import KERNELS
from tests.equality import MESHES, OPTIMIZERS, attach, check_case, env_of, layouts_for, loss_of, make_batch, make_module
from tests.ranks import run_ranks

# Sums and means with tables of several dims, per-id weights and their gradients, rows without pooling.
SHARDERS = {
    "ebc": EmbeddingBagCollectionSharder,
    "ebc_weighted": EmbeddingBagCollectionSharder,
    "ec": EmbeddingCollectionSharder,
    "bag_weighted": EmbeddingBagSharder,
}
# Collections give float32 whatever their tables have.
NEAR = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
NEAR_PLAIN = {**NEAR, torch.float64: 1e-12}
RANKS = {"dp1": 1, "dp2": 2, "dp4": 4, "host2xlocal2": 4, "replicate2xshard2": 4}

TRANSPORTS: dict[str, Transport] = {"connections": over_connections, "memory": over_group}
WIRES = {
    "as computed": (AS_COMPUTED, 1e-5),
    "bfloat16": (Codecs(Cast(torch.bfloat16), Cast(torch.bfloat16)), 2**-5),
    "float16": (Codecs(Cast(torch.float16), Cast(torch.float16)), 2**-8),
    "results bfloat16": (Codecs(Cast(torch.bfloat16), None), 2**-5),
    "gradients float16": (Codecs(None, Cast(torch.float16)), 2**-8),
}
ROUNDED = (None, "sgd", "rowwise_adagrad")  # others divide what a wire has rounded by little more than itself
LAYOUTS = ("mixed", "row_wise", "random", "table_row_wise")


def kernels_here() -> list[str]:
    """Those that can be used in this installation."""
    cpu = torch.device("cpu")
    return [name for name, kernel in KERNELS.items() if kernel.supports(cpu, torch.float32, None, []) is None]


def _every(kind: str, env: ShardingEnv, nth: int) -> Iterator[tuple[torch.dtype, str | None, str]]:
    cases = product(NEAR, OPTIMIZERS, kernels_here())
    return (case for i, case in enumerate(cases) if i % nth == len(kind) % nth)


def _has_few_digits(dtype: torch.dtype, optimizer: str | None) -> bool:
    """Of squares of small gradients; a kernel may keep more."""
    return dtype == torch.float16 and optimizer in ("adagrad", "rowwise_adagrad")


def _kernels(mesh: str, kind: str, nth: int) -> tuple[list[str], set[tuple[str, torch.dtype]]]:
    """What differs, and what a kernel refuses."""
    env, refused, wrong = env_of(mesh), set(), []
    near = NEAR_PLAIN if kind.startswith("bag") else NEAR
    for dtype, optimizer, kernel in _every(kind, env, nth):
        made = SHARDERS[kind](kernel=kernel)
        allowed = 2**-5 if _has_few_digits(dtype, optimizer) else near[dtype]
        try:
            check_case(kind, layouts_for(env)["mixed"], optimizer, env, dtype=dtype, near=allowed, sharders=[made])
        except AssertionError as error:
            wrong.append(f"{kernel} {dtype} {optimizer}: {error}")
        except ShardError as error:
            if "cannot be used" not in str(error):
                raise
            refused.add((kernel, dtype))
    return wrong, refused


@pytest.mark.parametrize(
    ("mesh", "kind", "nth"),
    [
        *(("dp2", kind, 13) for kind in SHARDERS),  # of every third, or twelfth, case all would be of one kernel
        *(pytest.param(mesh, kind, 1, marks=pytest.mark.slow) for mesh in RANKS for kind in SHARDERS),
    ],
)
@pytest.mark.sampled(8)
def test_every_kernel(mesh: str, kind: str, nth: int) -> None:
    for wrong, refused in run_ranks(RANKS[mesh], _kernels, mesh, kind, nth, timeout=500):
        assert not wrong, "\n".join(wrong)
        assert refused <= {("triton", torch.bfloat16), *(("fbgemm", dtype) for dtype in NEAR if dtype != torch.float32)}


def _channels(mesh: str, kind: str, layout: str, optimizer: str) -> list[str]:
    """What differs from the unsharded module, and between channels at all."""
    env, wrong = env_of(mesh), []
    layouts = layouts_for(env)[layout]
    for wire, (codecs, near) in WIRES.items():
        found = {}
        for name, transport in TRANSPORTS.items():
            made = _sharder(kind, codecs, transport)
            try:
                check_case(kind, layouts, optimizer, env, near=near, sharders=[made])
            except AssertionError as error:
                wrong.append(f"{name} {wire}: {error}")
            found[name] = _trained(kind, layouts, optimizer, env, made)
        first, *others = found.values()
        # Between replicas gloo adds in an order of its own.
        same = torch.equal if env.table_size == env.data_size else partial(torch.allclose, rtol=1e-6, atol=1e-6)
        if any(not all(map(same, first, other)) for other in others):
            wrong.append(f"{wire}: not the same bits on {list(found)}")
    return wrong


def _sharder(kind: str, codecs: Codecs, transport: Transport, kernel: str | None = None) -> dmp.ModuleSharder:
    base = SHARDERS[kind]
    sharded = {"sharded_type": staticmethod(partial(base.sharded_type, transport=transport))}
    return type("Sharder", (base,), sharded)(codecs=codecs, kernel=kernel)  # type: ignore[no-any-return]


def _trained(
    kind: str, layouts: object, optimizer: str, env: ShardingEnv, sharder: dmp.ModuleSharder
) -> Sequence[torch.Tensor]:
    """Results and weights of two steps."""
    module = make_module(kind)
    attach(module, optimizer)
    plan = {name: layouts(i, p.shape, env) for i, (name, p) in enumerate(module.named_parameters())}  # type: ignore[operator]
    model = dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=[sharder])
    seen = []
    for step in range(2):
        out = model(*make_batch(kind, env.data_rank, step))
        seen += [t.values() for t in out.values()] if isinstance(out, dict) else [out.values()]
        loss_of(out).backward()
    return [t.detach() for t in (*seen, *dmp.full_state_dict(model).values())]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["ebc", "ebc_weighted", "ec"])
@pytest.mark.parametrize("mesh", ["dp1", "dp2", "dp4", "host2xlocal2", "replicate2xshard2"])
def test_every_channel(mesh: str, kind: str, layout: str) -> None:
    if layout == "table_row_wise" and mesh != "host2xlocal2":
        pytest.skip("needs hosts")
    for wrong in run_ranks(math.prod(MESHES[mesh][0]), _channels, mesh, kind, layout, "rowwise_adagrad", timeout=500):
        assert not wrong, "\n".join(wrong)


def _drawn(seed: int, env: ShardingEnv) -> str | None:
    """One of each: kernel, optimizer, way of looking up, dtype, layout, channel and wire. What differs."""
    draw = random.Random(seed)
    kernel, kind, channel = draw.choice(kernels_here()), draw.choice([*SHARDERS]), draw.choice([*TRANSPORTS])
    wire, layout = draw.choice([*WIRES]), draw.choice(LAYOUTS if len(env.table_shape) > 1 else LAYOUTS[:-1])
    dtype = draw.choice([*NEAR]) if kernel != "fbgemm" else torch.float32
    optimizer = draw.choice(OPTIMIZERS if wire == "as computed" else ROUNDED)
    codecs, of_wire = WIRES[wire]
    near = of_wire + (2**-5 if _has_few_digits(dtype, optimizer) else NEAR[dtype])
    made = _sharder(kind, codecs, TRANSPORTS[channel], kernel)
    try:
        check_case(kind, layouts_for(env)[layout], optimizer, env, dtype=dtype, near=near, sharders=[made])
    except AssertionError as error:
        return f"{seed=} {kernel} {optimizer} {kind} {dtype} {layout} {channel} {wire}: {str(error)[:400]}"
    return None


def _drawn_cases(mesh: str, seeds: range) -> list[str]:
    return [wrong for seed in seeds if (wrong := _drawn(seed, env_of(mesh)))]


@pytest.mark.parametrize(
    ("mesh", "seeds"),
    [
        ("dp2", range(3, 5)),
        ("host2xlocal2", range(200, 202)),
        *(
            pytest.param(mesh, range(1000 + 100 * i, 1000 + 100 * i + 30), marks=pytest.mark.slow)
            for i, mesh in enumerate(RANKS)
        ),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_everything_with_everything(mesh: str, seeds: range) -> None:
    """What the tests above hold one by one, and one with all, drawn together."""
    for wrong in run_ranks(RANKS[mesh], _drawn_cases, mesh, seeds, timeout=500):
        assert not wrong, "\n".join(wrong)
