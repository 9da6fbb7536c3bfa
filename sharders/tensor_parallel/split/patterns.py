"""A tensor-parallel plan for one model: from patterns, a Hugging Face `tp_plan` or layouts to a style per module.

A module is known by its first path in the model. Nothing here changes the model.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from dmp import Layout, NameIndex, Place, PlanError, is_inside, join_name, places_of, tied_places
from sharders.tensor_parallel.split.styles import (
    ALIASES,
    COLWISE,
    PACKED,
    PACKED_ROWS,
    Style,
    canonical,
    family,
    layouts_of,
    split_dim,
    styled,
)
from sharders.tensor_parallel.structure.adapters import split_in
from sharders.tensor_parallel.structure.experts import EXPERTS
from sharders.tensor_parallel.structure.of_heads import may_have_values
from sharders.tensor_parallel.structure.transformer import Transformer, outward

Styles = dict[str, Style]


def expand(model: nn.Module, plan: Mapping[str, Style]) -> Styles:
    """The style of every module that the plan's patterns match (see `NameIndex`), in the model's order.

    Where several patterns match one module, one without a wildcard wins. A style of an adapted Linear is its Linear's,
    and that of its pairs, see [Note: adapters].

    Raises:
        PlanError: a pattern that matches nothing, patterns that disagree, or a style that its module cannot take.
    """
    first = {id(m): path for path, m in model.named_modules()}
    every = dict(model.named_modules(remove_duplicate=False))
    paths = NameIndex(every)
    chosen: dict[str, tuple[bool, str, Style]] = {}
    for pattern, style in plan.items():
        hits = {first[id(every[path])]: every[path] for path in paths.matching(pattern)}
        if not hits:
            raise PlanError(f"tensor-parallel plan: pattern {pattern!r} matches no module; {paths.hint(pattern)}")
        is_exact = pattern in paths
        for path, module in _with_pairs(hits, style).items():
            new = canonical(style, path, module)
            was_exact, other, old = chosen.get(path, (False, "", new))
            if was_exact == is_exact and old != new:
                raise PlanError(
                    f"module {path!r}: pattern {other!r} gives it {old!r}, and {pattern!r} gives it {new!r}; "
                    "name the module itself, or change one of the patterns"
                )
            if is_exact or not was_exact:
                chosen[path] = (is_exact, pattern, new)
    return {path: chosen[path][2] for path in first.values() if path in chosen}


def _with_pairs(hits: Mapping[str, nn.Module], style: Style) -> dict[str, nn.Module]:
    """What these modules' style is for: of an adapted Linear, where it is split, the Linears that are split."""
    name = ALIASES.get(style, style) if isinstance(style, str) else None
    kind = family(name) if name in ("colwise", "rowwise", *PACKED, *PACKED_ROWS) else ""
    found: dict[str, nn.Module] = {}
    for path, module in hits.items():
        names = split_in(module, kind) if kind else [""]
        found |= {join_name(path, name): module.get_submodule(name) for name in names}
    return found


def own_plan(model: nn.Module) -> dict[str, Style]:
    """The plans that Hugging Face models bring along (`tp_plan`), with full paths; empty where none does.

    Entries for modules that this model lacks are left out: the plan is that of its class.
    """
    outermost: dict[str, Mapping[str, Style]] = {}
    for path, module in model.named_modules():
        if not any(is_inside(path, outer) for outer in outermost):
            plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
            if plan and isinstance(plan, Mapping):
                outermost[path] = plan
    if not outermost:
        return {}
    everything = [*model.named_modules(remove_duplicate=False), *model.named_parameters()]
    names = NameIndex(name for name, _ in everything)
    full = {join_name(path, pattern): style for path, plan in outermost.items() for pattern, style in plan.items()}
    found = {pattern: names.matching(pattern) for pattern in full}
    experts = {name for pattern, style in full.items() if ALIASES.get(str(style)) in EXPERTS for name in found[pattern]}
    # what is split of experts, which their own entry says
    inside = {p for p, every in found.items() if every and all(name.rpartition(".")[0] in experts for name in every)}
    taken = {pattern: style for pattern, style in full.items() if found[pattern] and pattern not in inside}
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    # A parameter of an attention's own (sinks) has an entry of its own there, and one that says that it is local.
    own = {p for p, style in taken.items() if style == "colwise" and modules.isdisjoint(found[p])}
    of_heads: dict[str, Style] = {name.rpartition(".")[0]: "heads_0" for pattern in own for name in found[pattern]}
    taken = {p: style for p, style in taken.items() if p not in own and style != "local_params"}
    return {**taken, **of_heads}


def from_layouts(model: nn.Module, given: Mapping[str, Layout]) -> Styles:
    """The styles that give these weights these layouts.

    Raises:
        PlanError: a layout that the parameter's module cannot take, or a bias without its weight.
    """
    places = _places(model)
    first = {id(m): path for path, m in model.named_modules()}
    styles: Styles = {}
    asked: dict[int, dict[str, Layout]] = {}
    for name, layout in given.items():
        asked.setdefault(id(places[name].owner), {})[places[name].name] = layout
    for name, layout in given.items():
        module, own = places[name].owner, places[name].name
        path = first[id(module)]
        of_one = asked[id(module)] if may_have_values(module) else {own: layout}
        style = canonical(styled(module, of_one), path, module)
        fitting = layouts_of(style, module).get(own)
        if fitting != layout:
            raise PlanError(
                f"plan entry {name!r} = {layout}: module {path!r} is a {type(module).__name__}, expected {fitting}",
                table=name,
            )
        if styles.setdefault(path, style) != style:
            raise PlanError(f"plan gives the weights of module {path!r} different layouts: {styles[path]}, {layout}")
    named = {(id(places[name].owner), places[name].name) for name in given}
    for path in styles:
        module = model.get_submodule(path)
        if family(styles[path]) in ("norm", "experts", "heads"):
            missing = layouts_of(styles[path], module).keys() - asked[id(module)].keys()
            if missing:
                raise PlanError(f"plan splits module {path!r}, but has no entry for its {sorted(missing)}", table=path)
            continue
        weight = join_name(path, "weight")
        # Where the weight has another name too, the plan may have used that.
        is_tied = any(p.owner is not module and p.tensor is module._parameters["weight"] for p in places.values())
        if family(styles[path]) != "sequence" and (id(module), "weight") not in named and not is_tied:
            raise PlanError(f"plan splits the bias of module {path!r}, but has no entry for {weight!r}", table=weight)
    return {path: styles[path] for path in first.values() if path in styles}


def with_ties(model: nn.Module, styles: Mapping[str, Style]) -> Styles:
    """The styles, and those of modules that share a weight with a split one; an embedding and a head most often.

    Raises:
        PlanError: modules that would split a weight that they share in different ways.
    """
    done: Styles = dict(styles)
    for places in tied_places(model):
        dims = {p.path: split_dim(done[p.path], p.owner) for p in places if p.path in done and p.name == "weight"}
        split = {path: dim for path, dim in dims.items() if dim is not None}
        _check_tied_bias([p for p in places if p.name != "weight"], done)
        if not split:
            continue
        (named, dim), *_ = split.items()
        for path, module, _, name, _ in places:
            if path not in done and name == "weight" and isinstance(module, (nn.Linear, nn.Embedding)):
                done[path] = _style_of_dim(module, dim)
            elif path not in done or name != "weight" or dims[path] != dim:
                raise PlanError(
                    f"modules {named!r} and {path!r} share a weight; {done[named]!r} splits it along dim {dim}, but "
                    f"{path!r} ({done.get(path, 'not in the plan')!r}) does not; give both styles that split one dim, "
                    "such as 'embedding_rowwise' and 'colwise_gather'",
                    table=join_name(path, name),
                )
    return done


def _check_tied_bias(places: list[Place], styles: Mapping[str, Style]) -> None:
    kinds = {p.path: family(styles[p.path]) for p in places if p.path in styles}
    kinds = {path: kind for path, kind in kinds.items() if kind in ("colwise", "rowwise")}
    if len(set(kinds.values())) > 1:
        (one, kind), (other, second), *_ = sorted(kinds.items(), key=lambda item: item[1])
        raise PlanError(
            f"modules {one!r} ({kind}) and {other!r} ({second}) share a bias, which the one splits and the other keeps "
            "whole; give both the same style, or leave one of them out of the plan",
            table=join_name(other, places[0].name),
        )


def with_heads(model: nn.Module, transformer: Transformer, styles: Mapping[str, Style], loss_parallel: bool) -> Styles:
    """The styles, with a whole output where `colwise` is the model's last word, or one for `loss_parallel`.

    Args:
        transformer: what `recognise` says of the model.

    Raises:
        PlanError: `loss_parallel` without a head that is split over the vocabulary.
    """
    done: Styles = dict(styles)
    heads = [path for path in _outputs(model, transformer, styles) if family(styles[path]) == "colwise"]
    done |= {path: "colwise_gather" for path in heads if styles[path] == "colwise"}
    if loss_parallel:
        if not heads:
            raise PlanError(
                "loss_parallel=True needs a head that is split over the vocabulary, and the plan has none: add it, "
                "{'lm_head': 'colwise'}, or pass loss_parallel=False"
            )
        if styles[heads[-1]] in COLWISE:
            done[heads[-1]] = "colwise_loss_parallel"
    return done


def _outputs(model: nn.Module, transformer: Transformer, styles: Mapping[str, Style]) -> list[str]:
    """Linears outside the repeated blocks whose output no split Linear takes: it leaves the model."""
    blocks = {block.path for block in transformer.blocks}
    outside = {
        path: m
        for path, m in model.named_modules()
        if path in styles and isinstance(m, nn.Linear) and blocks.isdisjoint(outward(path))
    }
    order = list(outside)
    takers = [path for path in order if family(styles[path]) == "rowwise"]

    def is_taken(path: str) -> bool:
        """By one of its width; or of one module with it and after it (keys are narrower than queries)."""
        return any(
            outside[taker].in_features == outside[path].out_features
            or (_parent(taker) == _parent(path) and order.index(taker) > order.index(path))
            for taker in takers
        )

    return [path for path in order if not is_taken(path)]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _style_of_dim(module: nn.Module, dim: int) -> str:
    """Of a module whose output is to be whole and whose input is."""
    if isinstance(module, nn.Embedding):
        return "colwise" if dim else "rowwise"
    return "rowwise_gather" if dim else "colwise_gather"


def _places(model: nn.Module) -> dict[str, Place]:
    """Where each parameter is, under every name; a tied one in a module that can be split, if there is one."""
    found = [p for p in places_of(model.named_modules(remove_duplicate=False)) if p.store is p.owner._parameters]
    kinds = (nn.Linear, nn.Embedding)
    splittable = {id(p.tensor): p for p in reversed(found) if isinstance(p.owner, kinds)}
    return {p.full_name: p if isinstance(p.owner, kinds) else splittable.get(id(p.tensor), p) for p in found}
