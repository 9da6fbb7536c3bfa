"""Tables behind maps of raw ids that get more rows as ids come: alike on every plan, and as a module of that size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dmp
from sharders import ManagedCollisionEmbeddingBagCollectionSharder, ManagedCollisionEmbeddingCollectionSharder
from tests.equality import env_of, layouts_for
from tests.ranks import run_ranks
from tests.torchrec_dropin import raw_ids

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

SMALL, MOST = {"t1": 4, "t2": 6}, {"t1": 40, "t2": 21}


def _model(at: str, layout: str, max_rows: dict[str, int] = MOST, **options: Any) -> Any:
    env, module = env_of(at), raw_ids.make(**options)
    layouts = layouts_for(env)[layout]
    shapes = enumerate((n, tuple(p.shape)) for n, p in module.named_parameters())
    plan = {n: layouts(i, shape, env) for i, (n, shape) in shapes}  # type: ignore[arg-type]
    kinds = (ManagedCollisionEmbeddingBagCollectionSharder, ManagedCollisionEmbeddingCollectionSharder)
    sharders = [kind(max_rows=max_rows) for kind in kinds]
    return dmp.DistributedModelParallel(module, env=env, plan=plan, sharders=sharders)


def _step(model: Any, step: int) -> None:
    """Two parts of one batch: each rank has its own, or one process both."""
    parts = [raw_ids.batch(step, r) for r in range(2)]
    if model.env.data_size == 1:
        raw_ids.loss_of(model(raw_ids.joined(parts)), 10).backward()
    else:
        raw_ids.loss_of(model(parts[model.env.rank]), 5).backward()


def _state(model: Any) -> dict[str, torch.Tensor]:
    of = dmp.full_optimizer_state_dict(model)["state"]
    return {**dmp.full_state_dict(model), **{f"{name}.sum": state["sum"] for name, state in of.items()}}


def _grown(at: str, layout: str, path: str = "", **options: Any) -> list[dict[str, torch.Tensor]]:
    """States after some steps; at the end it is as a module with as many rows, which goes on with them."""
    options = {"rows": SMALL, "optimizer": "adagrad", **options}
    model, states = _model(at, layout, **options), []
    parameters = dict(model.named_parameters())
    for step in range(8):
        _step(model, step)
        if step in (1, 4, 7):
            states.append(_state(model))
    assert all(parameters[name] is p for name, p in model.named_parameters())
    sizes = {
        n: len(states[-1][f"_managed_collision_collection._managed_collision_modules.{n}._mch_sorted_raw_ids"])
        for n in SMALL
    }
    plain = raw_ids.make(**{**options, "rows": sizes})
    plain.load_state_dict({name: value for name, value in states[-1].items() if not name.endswith("weight.sum")})
    for batch in (raw_ids.batch(step, 0) for step in (6, 7, 8)):
        model.eval(), plain.eval()
        ours, theirs = raw_ids.results(model(batch), 5, 0), raw_ids.results(plain(batch), 5, 0)
        torch.testing.assert_close(ours, theirs)
    unsharded = dmp.to_unsharded(model).state_dict()
    assert all(torch.equal(unsharded[name], states[-1][name]) for name in unsharded)
    if path:
        dmp.save_checkpoint(path, model)
        resumed = _model(at, "mixed" if layout == "row_wise" else "row_wise", **{**options, "rows": sizes})
        dmp.load_checkpoint(path, resumed)
        for each in (model, resumed):
            each.train()
            for step in (8, 9):
                _step(each, step)
        for name, value in _state(model).items():
            torch.testing.assert_close(_state(resumed)[name], value, msg=name)
    return states


def _alike(expected: list[dict[str, torch.Tensor]], got: list[dict[str, torch.Tensor]]) -> None:
    for of_one, of_mesh in zip(expected, got, strict=True):
        for name, value in of_one.items():
            torch.testing.assert_close(of_mesh[name], value, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


def test_tables_grow_alike_on_every_plan(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, _grown, "single", "table_wise")
    rows = [[len(v) for n, v in state.items() if n.endswith("weight")] for state in expected]
    assert rows[0] < rows[1] <= rows[2] == [40, 21], rows
    for got in run_ranks(2, _grown, "dp2", "row_wise", str(tmp_path)):
        _alike(expected, got)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["mixed", "data_parallel", "column_wise", "all_on_last", "row_reversed"])
@pytest.mark.parametrize("options", [{}, {"kind": "ec"}, {"policy": "LRU"}])
def test_growing_in_other_layouts(layout: str, options: dict[str, Any], tmp_path: Path) -> None:
    (expected,) = run_ranks(1, _grown, "single", "table_wise", **options)
    for got in run_ranks(2, _grown, "dp2", layout, str(tmp_path), **options):
        _alike(expected, got)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_rows": {"t1": 2}}, "max_rows of 'embedding_bags.t1.weight' is 2; it has 4 rows already"),
        ({"optimizer": None}, "apply_optimizer_in_backward, or fused_params, give it one that grows with it"),
        ({"layout": "uneven"}, "take one for any number of rows"),
    ],
)
def test_what_cannot_grow_is_refused(options: dict[str, Any], text: str) -> None:
    given = {"layout": "row_wise", "rows": SMALL, "optimizer": "adagrad", **options}
    for error in run_ranks(2, _model, "dp2", given.pop("layout"), expect=dmp.ShardError, **given):
        assert text in str(error), error
