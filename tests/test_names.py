"""Names found by pattern: one meaning of `*` wherever a user writes one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dmp import NameIndex, PlanError, ShardError
from planner.candidates.constraints import Constraint, constraints_of
from sharders.data_parallel.blocks import find_units
from sharders.tensor_parallel.split.patterns import expand


def model() -> nn.Module:
    """Linears at `a.0.up`, `a.1.up`, `a.1.down`, `a.up` and `b.0.in.up`."""

    def of(**children: nn.Module) -> nn.Module:
        return nn.ModuleDict(children)

    def linear() -> nn.Module:
        return nn.Linear(2, 2)

    stack = of(up=linear())
    stack.update({"0": of(up=linear()), "1": of(up=linear(), down=linear())})
    deep = of()
    deep["0"] = of(**{"in": of(up=linear())})
    return of(a=stack, b=deep)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.*.up", {"a.0.up", "a.1.up"}),
        ("a.[01].up", {"a.0.up", "a.1.up"}),
        ("a.?.d*n", {"a.1.down"}),
        ("*.up", {"a.up"}),  # one component, not several
        ("*.*.*.up", {"b.0.in.up"}),
        ("a.1.up", {"a.1.up"}),
        ("a*up", None),  # within one component
        ("*.0.on", None),
    ],
)
def test_a_wildcard_means_the_same_everywhere(pattern: str, expected: set[str] | None) -> None:
    """Tensor-parallel patterns, names of FSDP units and keys of constraints, for the same modules."""
    with torch.device("meta"):
        whole = model()
    linears = {path for path, m in whole.named_modules() if isinstance(m, nn.Linear)}
    assert set(NameIndex(linears).matching(pattern)) == (expected or set())
    if expected is not None:
        asked = Constraint(ranks=[0])
        found = constraints_of({pattern: asked}, [f"{path}.weight" for path in linears])
        assert set(expand(whole, {pattern: "colwise"})) == set(find_units(whole, [pattern])) == expected
        assert {name.removesuffix(".weight") for name, constraint in found.items() if constraint == asked} == expected
        return
    said = r"'\*' stands for one component of a dotted name"
    with pytest.raises(PlanError, match=said):
        constraints_of({f"{pattern}*": Constraint()}, [f"{path}.weight" for path in linears])
    with pytest.raises(PlanError, match=said):
        expand(whole, {f"{pattern}*x": "colwise"})
    with pytest.raises(ShardError, match=said):
        find_units(whole, [f"{pattern}*x"])


def test_names_that_look_like_patterns_and_what_was_meant() -> None:
    names = NameIndex(["", "a[0]", "a0", "layers.0.wq", "layers.1.wq"])
    assert names.matching("a[0]") == ["a[0]"] and names.matching("a[01]") == ["a0"]
    assert names.matching("") == [""] and names.matching("*") == ["a[0]", "a0"]
    assert "did you mean 'layers.0.wq', 'layers.1.wq'?" in names.hint("blocks.*.wq")
    assert "there are 'a[0]', 'a0'" in names.hint("zzz") and "none" in NameIndex([]).hint("a")


def test_a_module_s_name_stands_for_all_that_it_holds() -> None:
    names = ["tower.a.t1.weight", "tower.b.t2.weight", "t3.weight"]
    for key, expected in (
        ("tower", {0, 1}),
        ("tower.*", {0, 1}),
        ("tower.a", {0}),
        ("t[13]", {0, 2}),
        ("*", {0, 1, 2}),
    ):
        found = constraints_of({key: Constraint(ranks=[0])}, names)
        assert {i for i, name in enumerate(names) if found[name].ranks} == expected, key
