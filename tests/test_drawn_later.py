"""`torch.nn.init` on tables of a wrapped model: as of the whole table, other values on each part, ranks stay alike."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn.init import xavier_uniform_ as imported_before

from dmp import DistributedModelParallel, ShardError, data_parallel, full_state_dict, row_wise, table_wise
from tests.ranks import run_ranks
from tests.wrapped_net import Net

PLAN = {"users.weight": row_wise(), "items.weight": table_wise(0), "more.weight": row_wise()}


class Drawing(Net):
    """Whose method draws its tables past the forward."""

    def draw(self, name: str) -> None:
        nn.init.normal_(self.users.weight)
        getattr(nn.init, name)(self.users.weight.data)
        with torch.no_grad():
            getattr(nn.init, name)(self.items.weight)
        weight = self.more.weight
        getattr(nn.init, name)(weight.detach())
        for layer in (self.over, self.out):
            getattr(nn.init, name)(layer.weight)


def drawn(name: str, by: str) -> tuple[dict[str, torch.Tensor], float]:
    """The model's weights when all were drawn anew, and the next random number."""
    copied = {"users.weight": data_parallel()} if by == "copied" else {}
    model = DistributedModelParallel(Drawing(), plan={**PLAN, **copied})
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(6) if by == "generator" else None
    if by == "method":
        model.module.draw(name)  # type: ignore[operator]
    for parameter in model.parameters() if by != "method" else ():
        if parameter.dim() > 1:
            getattr(nn.init, name)(parameter, generator=generator)
    own = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith(("over", "out"))}
    if copied:
        own["users.weight"] = model.get_parameter("users.weight").detach().clone()
    whole = {f"whole {n}": p for n, p in full_state_dict(model).items() if p.dim() > 1}
    return {**own, **whole}, torch.rand(()).item()


@pytest.mark.parametrize("name", ["xavier_uniform_", "kaiming_normal_", "normal_"])
@pytest.mark.parametrize("by", ["rows", "copied", "generator", "method"])
@pytest.mark.sampled(4)
def test_tables_are_drawn_as_wholes_and_ranks_stay_alike(name: str, by: str) -> None:
    """Equal parts had equal values, fans were the parts', and dense copies drawn behind uneven parts differed."""
    (first, number), (second, other) = run_ranks(2, drawn, name, by)
    assert number == other and all(torch.equal(first[n], second[n]) for n in first)
    for key, weight in first.items():
        if key.startswith("whole"):
            assert len(weight.flatten().unique()) == weight.numel()
    if name == "xavier_uniform_":
        assert all(w.abs().max() <= (6 / sum(w.shape)) ** 0.5 for k, w in first.items() if k.startswith("whole"))


def refused() -> list[str]:
    model, texts = DistributedModelParallel(Net(), plan=PLAN), []
    for name in ("orthogonal_", "eye_"):
        with pytest.raises(ShardError) as error:
            getattr(nn.init, name)(model.get_parameter("users.weight"))
        texts.append(str(error.value))
    return texts


def test_values_that_depend_on_the_whole_are_refused_on_a_part() -> None:
    for texts in run_ranks(2, refused):
        assert all("of shape (11, 8)" in text and "before the model is wrapped" in text for text in texts)


def drawn_by_what_was_imported() -> tuple[torch.Tensor, float]:
    model = DistributedModelParallel(Net(), plan=PLAN)
    torch.manual_seed(5)
    for name in PLAN:
        imported_before(model.get_parameter(name), gain=2.0)
    assert imported_before is nn.init.xavier_uniform_ is pickle.loads(pickle.dumps(imported_before))
    assert list(inspect.signature(imported_before).parameters) == ["tensor", "gain", "generator"]
    return full_state_dict(model)["users.weight"], torch.rand(()).item()


def test_a_function_imported_by_name_before_wrapping_is_the_same() -> None:
    """It drew by the part's fans, and left the ranks' generators apart; what held it could no longer be pickled."""
    (whole, number), (_, other) = run_ranks(2, drawn_by_what_was_imported)
    assert number == other
    assert len(whole.flatten().unique()) == whole.numel()
    assert (6 / sum(whole.shape)) ** 0.5 < whole.abs().max() <= 2 * (6 / sum(whole.shape)) ** 0.5
