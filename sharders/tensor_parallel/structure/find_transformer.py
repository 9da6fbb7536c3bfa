"""Finds the parts of a transformer by their structure: blocks with their attentions, MLPs, token embedding, head.

Structure means shapes of Linears and numbers of heads; a class decides nothing, and a name only where shapes cannot
(which of four square matrices is the output). Pure: the model may be on meta, and is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import replace

from torch import nn
from torch.nn.parameter import is_lazy

from dmp import is_inside, join_name
from sharders.tensor_parallel.structure.adapters import in_place, split_in
from sharders.tensor_parallel.structure.attentions import attentions_in, last_of, linears_in
from sharders.tensor_parallel.structure.beside import ways_beside
from sharders.tensor_parallel.structure.experts import experts_of
from sharders.tensor_parallel.structure.linears import DOWN, Features, features_of, is_joint_attention
from sharders.tensor_parallel.structure.transformer import Block, Branch, Transformer, Whole, below, outward

_POSITION = re.compile(r"pos|wpe|type|segment", re.IGNORECASE)


def recognise(model: nn.Module) -> Transformer:
    """Find the blocks of a transformer, and what is split in them; none where lazy modules have no shapes yet."""
    if any(is_lazy(p) for p in model.parameters()):
        return Transformer((), 0, None, None)
    modules = dict(in_place(model))
    attentions = attentions_in(modules)
    claimed = {p for a in attentions.values() if isinstance(a, Branch) for p in (*a.up, a.down, *dict(a.second))}
    paths = _block_paths(modules, attentions, claimed)
    stacks: dict[str, list[str]] = {}
    for path in paths:
        stacks.setdefault(path.rpartition(".")[0], []).append(path)
    counted = {stack: _counted(inside, modules) for stack, inside in stacks.items()}
    found: dict[Hashable, Block] = {}
    blocks = []
    for path in paths:
        structure = _structure(modules[path], counted[path.rpartition(".")[0]])
        if structure not in found:
            found[structure] = _block(path, len(found), modules[path], attentions)
        blocks.append(replace(found[structure], path=path))
    if not blocks:
        return Transformer((), 0, None, None)
    inside = set(paths)
    outside = {n: m for n, m in model.named_modules() if inside.isdisjoint(outward(n))}
    width = _width(blocks, model)
    embedding, head = _vocabulary(outside, width)
    return Transformer(tuple(blocks), width, embedding, head)


def is_norm(module: nn.Module, width: int) -> bool:
    """Whether it works on each position's hidden state alone: parameters of the hidden size, no state, no children."""
    if (
        isinstance(module, nn.GroupNorm | nn.Embedding | nn.modules.batchnorm._NormBase)
        or features_of(module) is not None
        or any(module.children())
        or module._buffers
    ):
        return False
    return {tuple(p.shape) for p in module.parameters()} == {(width,)}


def _block_paths(
    modules: Mapping[str, nn.Module], attentions: Mapping[str, Branch | Whole], claimed: set[str]
) -> list[str]:
    """The block of each attention, and the other modules of the same list that hold an MLP (hybrids); or of lists like
    it in one, as x-transformers has for each layer's norm and attention, or norm and MLP."""
    chosen: set[str] = set()
    for path in attentions:
        repeated = [p for p in outward(path) if _is_repeated(p, modules)]
        single = [p for p in repeated if not _has_stack(modules[p], p, attentions)]
        if single:
            chosen.add(single[-1])
        else:
            # Not the model itself: MLPs beside an attention there may be towers of a recommender.
            holds = (p for p in outward(path) if p and _mlps(p, modules[p], claimed)[0])
            chosen.add(next(holds, path))
    lists = {p.rpartition(".")[0] for p in chosen if _is_repeated(p, modules)}
    outer = {p.rpartition(".")[0] for p in lists if p and isinstance(modules[p], nn.ModuleList)}
    for path in outer:
        if isinstance(stack := modules[path], nn.ModuleList):
            lists |= {join_name(path, name) for name, each in stack.named_children() if isinstance(each, nn.ModuleList)}
    for path in modules:
        if _is_repeated(path, modules) and path.rpartition(".")[0] in lists and path not in chosen:
            holds_other = any(is_inside(c, path) for c in chosen)
            if not holds_other and _mlps(path, modules[path], claimed)[0]:
                chosen.add(path)
    return [p for p in modules if p in chosen]


def _is_repeated(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether it is called, and one of a list."""
    if not path or isinstance(modules[path], nn.ModuleList | nn.ModuleDict):
        return False
    return isinstance(modules[path.rpartition(".")[0]], nn.ModuleList | nn.Sequential)


def _has_stack(module: nn.Module, path: str, attentions: Iterable[str]) -> bool:
    """Whether there is, inside, a list of two or more modules of one class with attentions."""
    inside = [a for a in attentions if is_inside(a, path)]
    for name, candidate in module.named_modules():
        if isinstance(candidate, nn.ModuleList | nn.Sequential):
            classes = [
                type(c)
                for n, c in candidate.named_children()
                if any(is_inside(a, join_name(path, name, n)) for a in inside)
            ]
            if len(classes) > len(set(classes)):
                return True
    return False


def _structure(block: nn.Module, counted: Set[tuple[str, str]]) -> Hashable:
    """Equal for blocks that are the same but for their weights, and for the number that they count themselves by."""
    found = []
    for name, module in block.named_modules():
        shapes = tuple((n, p.shape) for n, p in module._parameters.items() if p is not None)
        numbers = tuple((n, v) for n, v in vars(module).items() if _decides(n, v) and (name, n) not in counted)
        found.append((name, type(module), shapes, numbers))
    return tuple(found)


def _decides(name: str, value: object) -> bool:
    """Whether an attribute may say what a block does: a number, a flag or a kind (a sliding window, no rotation)."""
    is_rate = isinstance(value, float) and "drop" in name  # often grows from block to block
    return isinstance(value, bool | int | float | str) and name != "training" and not is_rate


def _counted(paths: Iterable[str], modules: Mapping[str, nn.Module]) -> set[tuple[str, str]]:
    """(module in a block, attribute) that is the block's place in its list, in all of them."""
    found: set[tuple[str, str]] | None = None
    for path in paths:
        place = last_of(path)
        if place.isdigit():
            inside = modules[path].named_modules()
            here = {(n, a) for n, m in inside for a, v in vars(m).items() if type(v) is int and v == int(place)}
            found = here if found is None else found & here
    return found or set()


def _block(path: str, structure: int, module: nn.Module, attentions: Mapping[str, Branch | Whole]) -> Block:
    inside = [a for p, a in attentions.items() if is_inside(p, path)]
    branches = [_relative(a, path) for a in inside if isinstance(a, Branch)]
    whole = [Whole(below(a.path, path), a.why) for a in inside if isinstance(a, Whole)]
    claimed = {p for u in branches for p in (*u.up, u.down, *dict(u.second))}
    values = {p for u in branches for p, _ in u.adapters}
    claimed |= values
    for attention in branches:
        claimed |= _beside(module, attention).keys()
    branches = [_with_beside(module, attention) for attention in branches]
    closed = [w.path for w in whole]
    mlps, left = _mlps("", module, claimed, closed)
    whole += [Whole(p, "a Linear that is neither part of an attention nor of an MLP") for p in left]
    closed += [w.path for w in whole]
    experts = []
    for name, owner in in_place(module):
        is_matrix = any(p.dim() > 1 for p in owner.parameters(recurse=False))
        if not is_matrix or features_of(owner) is not None or is_joint_attention(owner):
            continue
        if name in values or any(is_inside(name, c) for c in closed):
            continue
        if ways := experts_of(owner):
            experts.append((name, ways))
        else:
            whole.append(Whole(name, f"a {type(owner).__name__}, which is not a Linear"))
    found = tuple(_with_adapters(module, branch) for branch in (*branches, *mlps))
    return Block(path, structure, found, tuple(whole), tuple(experts))


def _with_beside(block: nn.Module, attention: Branch) -> Branch:
    """With the ways in which its further Linears may be used, see [Note: beside]."""
    linears = _beside(block, attention)
    if not linears or attention.heads is None:
        return attention
    reads = features_of(dict(in_place(block))[attention.up[0]])
    ways = ways_beside(linears, attention.heads, 0 if reads is None else reads.in_features)
    return replace(attention, beside=tuple(tuple(way.items()) for way in ways))


def _beside(block: nn.Module, attention: Branch) -> dict[str, Features]:
    """Linears that an attention has besides, but for an MLP. Where a block is its own attention all may be its MLP."""
    if not attention.path or attention.widths:
        return {}
    inside = block.get_submodule(attention.path)
    every = {join_name(attention.path, n): of for n, m in in_place(inside) if (of := features_of(m)) is not None}
    own = {*attention.up, attention.down, *dict(attention.adapters), *dict(attention.second)}
    for mlp in _mlps(attention.path, inside, own)[0]:
        if every[mlp.down].out_features == every[attention.down].out_features:
            own |= {*mlp.up, mlp.down}
    return {name: of for name, of in every.items() if name not in own}


def _with_adapters(block: nn.Module, branch: Branch) -> Branch:
    """With the Linears that are split, and what is beside them."""
    wanted = {**dict.fromkeys(branch.up, "colwise"), branch.down: "rowwise", **dict(branch.second)}
    own, adapters = {}, []
    for path, style in wanted.items():
        own[path], *pairs = (
            join_name(path, name) for name in split_in(block.get_submodule(path), style.partition("_")[0])
        )
        adapters += [(name, style) for name in pairs]
    up, beside = tuple(own[path] for path in branch.up), (*branch.adapters, *adapters)
    second = tuple((own[path], style) for path, style in branch.second)
    others = tuple(_with_adapters(block, other) for other in branch.others)
    found = replace(branch, up=up, down=own[branch.down], adapters=beside, second=second, others=others)
    named = {path: split_in(block.get_submodule(path), "colwise") for path in branch.further}
    ways = [[(join_name(path, name), style) for path, style in way for name in named[path]] for way in branch.beside]
    return replace(found, beside=tuple(map(tuple, ways)))


def _relative(branch: Branch, block: str) -> Branch:
    up = tuple(below(p, block) for p in branch.up)
    adapters, second = (tuple((below(p, block), s) for p, s in own) for own in (branch.adapters, branch.second))
    path, down = below(branch.path, block), below(branch.down, block)
    return replace(branch, path=path, up=up, down=down, adapters=adapters, second=second)


def _mlps(
    prefix: str, module: nn.Module, claimed: Iterable[str], closed: Iterable[str] = ()
) -> tuple[list[Branch], list[str]]:
    """MLPs among the Linears that no attention claims, innermost modules first; and the Linears left."""
    taken, closed = set(claimed), tuple(closed)
    branches = []
    for name, candidate in reversed(list(in_place(module))):
        path = join_name(prefix, name)
        if isinstance(candidate, nn.ModuleList | nn.ModuleDict) or any(is_inside(path, c) for c in closed):
            continue
        for depth in (1, 2, 3):
            linears = {join_name(path, n): m for n, m in linears_in(candidate, depth).items()}
            free = {n: m for n, m in linears.items() if n not in taken and not any(is_inside(n, c) for c in closed)}
            branch = _match_mlp(path, free, is_chain=isinstance(candidate, nn.Sequential))
            if branch is not None:
                branches.append(branch)
                taken |= {*branch.up, branch.down}
                break
    every = {join_name(prefix, n) for n, m in in_place(module) if features_of(m) is not None}
    left = sorted(n for n in every - taken if not any(is_inside(n, c) for c in closed))
    return branches[::-1], left


def _match_mlp(path: str, linears: Mapping[str, Features], *, is_chain: bool) -> Branch | None:
    """Two Linears d -> h -> d, or three: two d -> h (one gates the other) and one h -> d; or these two as one.

    Where h = d each of them may be the one that leads back.
    """
    if len(linears) not in (2, 3) or (is_chain and len(linears) == 3):
        return None
    # The last registered is the likely one, unless a name says otherwise; a chain runs in order.
    order = list(linears)[::-1]
    if not is_chain:
        order.sort(key=lambda n: not any(DOWN.fullmatch(a) for a in n.lower().split(".")))
    found = []
    for down in order[:1] if is_chain else order:
        up = tuple(n for n in linears if n != down)
        shapes = {(linears[n].in_features, linears[n].out_features) for n in up}
        inner = linears[down].in_features
        if shapes == {(linears[down].out_features, inner)}:
            found.append(Branch(path, up, down, inner))
        elif shapes == {(linears[down].out_features, 2 * inner)} and len(up) == 1:
            found.append(Branch(path, up, down, inner, parts=(2, 1)))
    alike = [each for each in found if linears[each.down].out_features == linears[found[0].down].out_features]
    return replace(alike[0], others=tuple(alike[1:])) if alike else None


def _width(blocks: Iterable[Block], model: nn.Module) -> int:
    """The hidden size; by the first branch, else by the first fused attention or norm."""
    for block in blocks:
        for branch in block.branches:
            down = features_of(model.get_submodule(join_name(block.path, branch.down)))
            assert down is not None
            return down.out_features
    for block in blocks:
        for module in model.get_submodule(block.path).modules():
            if isinstance(module, nn.MultiheadAttention):
                return int(module.embed_dim)
            shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
            if shapes and all(len(s) == 1 and s == shapes[0] for s in shapes):
                return int(shapes[0][0])
    return 0


def is_of_torchrec(module: nn.Module) -> bool:
    """Whether the module's class is TorchRec's; asked without importing it."""
    return type(module).__module__.partition(".")[0] == "torchrec"


def _vocabulary(outside: Mapping[str, nn.Module], width: int) -> tuple[str | None, str | None]:
    """Token embedding and head: tied, else the most rows that a head has too, else the only embedding."""
    every = {n: m for n, m in outside.items() if isinstance(m, nn.Embedding) and m.embedding_dim == width}
    collections = [n for n, m in outside.items() if is_of_torchrec(m)]  # which call their tables by themselves
    embeddings = {n: m for n, m in every.items() if not any(is_inside(n, c) for c in collections)}
    linears = {n: m for n, m in outside.items() if isinstance(m, nn.Linear) and m.in_features == width}
    for name, embedding in embeddings.items():
        for head, linear in list(linears.items())[::-1]:
            if linear.weight is embedding.weight:
                return name, head
    tokens = [n for n in embeddings if not _POSITION.search(last_of(n))]
    tokens.sort(key=lambda n: -embeddings[n].num_embeddings)
    for name in tokens:
        rows = embeddings[name].num_embeddings
        heads = [n for n, m in linears.items() if m.out_features == rows]
        if heads:
            return name, heads[-1]
    if len(tokens) == 1:
        return tokens[0], None
    # Several without a head may be tables of a recommender, of which none is the vocabulary.
    tables = {m.num_embeddings for n, m in every.items() if n not in embeddings}
    return None, next((n for n, m in list(linears.items())[::-1] if m.out_features in tables), None)
