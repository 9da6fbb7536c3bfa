"""Finds the parts of a transformer by their structure: blocks, attentions, MLPs, token embedding, head.

Structure means shapes of Linears and numbers of heads; a class decides nothing, and a name only where shapes cannot
(which of four square matrices is the output). Pure: the model may be on meta, and is not changed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from dmp import is_inside, join_name
from sharders.tensor_parallel.structure.adapters import children_in_place, in_place, split_in
from sharders.tensor_parallel.structure.experts import experts_of
from sharders.tensor_parallel.structure.latent import latent_attention
from sharders.tensor_parallel.structure.linears import Features, features_of, is_joint_attention
from sharders.tensor_parallel.structure.transformer import (
    CONFIGS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Block,
    Branch,
    Heads,
    Transformer,
    Whole,
    below,
    outward,
)

_AFTER = r"(_?(proj|projection|lin|linear|layer|w))?"
_QKV = re.compile(r"(to_?|w_?|linear_?|lin_?|proj_?|c_)?(q|k|v|query|key|value)s?" + _AFTER)
_OUT = re.compile(r"(to_?|w_?|linear_?|lin_?|c_)?(o|out|output|proj|dense)" + _AFTER)
_DOWN = re.compile(r"w_?2|fc_?2|lin(ear)?_?2|\w*(down|out|proj_out|wo|c_proj|contract)\w*|wo")
_POSITION = re.compile(r"pos|wpe|type|segment", re.IGNORECASE)


def recognise(model: nn.Module) -> Transformer:
    """Find the blocks of a transformer, and what is split in them; none where lazy modules have no shapes yet."""
    if any(is_lazy(p) for p in model.parameters()):
        return Transformer((), 0, None, None)
    modules = dict(in_place(model))
    attentions = _attentions(modules)
    claimed = {p for a in attentions.values() if isinstance(a, Branch) for p in (*a.up, a.down)}
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


def _attentions(modules: Mapping[str, nn.Module]) -> dict[str, Branch | Whole]:
    """Attentions by path (absolute paths inside), innermost modules first."""
    found: dict[str, Branch | Whole] = {}
    around: set[str] = set()
    # In two passes: query, key and value alone, as in Bert, look like a fused attention until their output is found.
    for find in (_attention, _latent, _fused):
        for path, module in list(modules.items())[::-1]:
            is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            if is_list or path in around or any(p in found for p in outward(path)):
                continue
            attention = find(path, module)
            if attention is not None:
                found[path] = attention
                around.update(outward(path))
    return {path: found[path] for path in modules if path in found}


def _linears(module: nn.Module, depth: int) -> dict[str, Features]:
    """Linears by relative path, at most `depth` modules down, in order of registration."""
    found = {}
    for name, child in children_in_place(module):
        features = features_of(child)
        if features is not None:
            found[name] = features
        elif depth > 1:
            found |= {f"{name}.{n}": c for n, c in _linears(child, depth - 1).items()}
    return found


def _attention(path: str, module: nn.Module) -> Branch | Whole | None:
    for depth in (1, 2):
        linears = _linears(module, depth)
        named = {n: m for n, m in linears.items() if _QKV.fullmatch(_last(n)) or _is_out(n)}
        for candidates in (linears, named):
            match = _match_attention(candidates) if len(candidates) == 4 else None
            if match is not None:
                up, down = match
                return _with_heads(path, module, up, down, linears)
    return None


def _latent(path: str, module: nn.Module) -> Branch | None:
    of = latent_attention(module, _linears(module, 1), _number([module], HEADS))
    query, shared, up, down = (join_name(path, name) for name in of.names) if of else ("",) * 4
    adapters = ((shared, "latent"),)
    return of and Branch(path, (query, up), down, of.widths[2], of.heads, adapters=adapters, widths=of.widths)


def _fused(path: str, module: nn.Module) -> Branch | Whole | None:
    if isinstance(module, nn.MultiheadAttention):
        if not is_joint_attention(module):
            return Whole(path, "query, key and value are not one weight of equal parts, without more keys")
        heads = Heads(module.num_heads, module.num_heads, module.head_dim)
        return Branch(path, (path,), join_name(path, "out_proj"), module.embed_dim, heads, parts=(3,))
    if _number([module], (*HEADS, *KV_HEADS, *HEAD_DIM), configs=False) is None:
        return None
    branch = _of_one_linear(path, module)
    if branch is not None:
        return branch
    matrices = [p for c in module.children() for p in c.parameters(recurse=False) if p.dim() == 2]
    if len(matrices) > 1 and not any(isinstance(m, nn.ModuleList) for m in module.modules()):
        return Whole(path, "not four Linears for query, key, value and output (fused, or another kind of attention)")
    return None


def _of_one_linear(path: str, module: nn.Module) -> Branch | None:
    """An attention whose query, key and value are one Linear, by the only two that fit its number of heads."""
    linears = _linears(module, 1)
    heads, size = _number([module], HEADS), _number([module], HEAD_DIM)
    found = []
    for up, down in itertools.permutations(linears, 2):
        inner, width = linears[down].in_features, linears[down].out_features
        of_head = inner // heads if heads is not None else size
        if not of_head or inner % of_head or linears[up].in_features != width:
            continue
        query = inner // of_head
        keys, rest = divmod(linears[up].out_features - inner, 2 * of_head)
        if (heads is None or heads == query) and keys > 0 == rest and not query % keys:
            found.append((up, down, Heads(query, keys, of_head)))
    # A gate and what it gates, in one, has the shape of grouped queries: half as many keys and values.
    alike = [each for each in found if each[2].query == each[2].key_value]
    if len(alike or found) != 1:
        return None
    ((up, down, of),) = alike or found
    parts = (3, 1) if of.query == of.key_value else (1,)
    return Branch(path, (join_name(path, up),), join_name(path, down), of.query * of.size, of, parts)


def _match_attention(linears: Mapping[str, Features]) -> tuple[tuple[str, str, str], str] | None:
    """(query, key, value) and output among four Linears, by shape; names decide between equal shapes."""
    names = list(linears)[::-1]
    last_first = sorted(names, key=lambda n: (_QKV.fullmatch(_last(n)) is not None, not _is_out(n)))
    for out in last_first:
        # Where all are alike it does not matter which is the query: they are split in the same way.
        q, k, v = sorted((n for n in linears if n != out), key=lambda n: -linears[n].out_features)
        o, width, inner = linears[out], linears[q].in_features, linears[q].out_features
        reads_alike = all(linears[n].in_features == width for n in (k, v))
        grouped = linears[k].out_features == linears[v].out_features and inner % linears[k].out_features == 0
        same_module = len({n.rpartition(".")[0] for n in (q, k, v)}) == 1
        if reads_alike and grouped and same_module and (o.in_features, o.out_features) == (inner, width):
            return (q, k, v), out
    return None


def _with_heads(
    path: str, module: nn.Module, up: tuple[str, str, str], down: str, linears: Mapping[str, Features]
) -> Branch | Whole | None:
    inner, kv = linears[up[0]].out_features, linears[up[1]].out_features
    owners = [module, *(m for m in module.modules() if m is not module and features_of(m) is None)]
    heads, size = _number(owners, HEADS), _number(owners, HEAD_DIM)
    if heads is None and size is not None and inner % size == 0:
        heads = inner // size
    if heads is None:
        if all(_QKV.fullmatch(_last(n)) for n in up):
            return Whole(path, f"no number of heads among its attributes ({', '.join(HEADS[:4])}, ...)")
        return None  # four Linears of such shapes need not be an attention
    if inner % heads or kv % (inner // heads):
        return Whole(path, f"query and key widths {inner} and {kv} do not fit {heads} heads")
    size = inner // heads
    for name, parameter in module.named_parameters():
        owner = name.rpartition(".")[0]
        is_of_linear = any(is_inside(owner, n) for n in linears)
        if not is_of_linear and heads > 1 and heads in parameter.shape[1:]:
            return Whole(path, f"parameter {name!r} {tuple(parameter.shape)} has values for each head")
    return Branch(
        path, tuple(join_name(path, n) for n in up), join_name(path, down), inner, Heads(heads, kv // size, size)
    )


def _number(owners: Iterable[nn.Module], names: Iterable[str], *, configs: bool = True) -> int | None:
    """The first positive integer attribute of one of these names, of the modules, then of their configurations."""
    owners = list(owners)
    places: list[Any] = [*owners]
    if configs:
        places += [vars(m)[c] for m in owners for c in CONFIGS if c in vars(m)]
    for place in places:
        for name in names:
            value = vars(place).get(name) if isinstance(place, nn.Module) else getattr(place, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _last(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _is_out(name: str) -> bool:
    atoms = name.lower().split(".")
    return any(_OUT.fullmatch(a) for a in atoms) and not _QKV.fullmatch(atoms[-1])


def _block_paths(
    modules: Mapping[str, nn.Module], attentions: Mapping[str, Branch | Whole], claimed: set[str]
) -> list[str]:
    """The block of each attention, and the other modules of the same list that hold an MLP (hybrids)."""
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
        place = _last(path)
        if place.isdigit():
            inside = modules[path].named_modules()
            here = {(n, a) for n, m in inside for a, v in vars(m).items() if type(v) is int and v == int(place)}
            found = here if found is None else found & here
    return found or set()


def _block(path: str, structure: int, module: nn.Module, attentions: Mapping[str, Branch | Whole]) -> Block:
    inside = [a for p, a in attentions.items() if is_inside(p, path)]
    branches = [_relative(a, path) for a in inside if isinstance(a, Branch)]
    whole = [Whole(below(a.path, path), a.why) for a in inside if isinstance(a, Whole)]
    joint = {u: others for u in branches if (others := _others(module, u))}
    branches = [u for u in branches if u not in joint]
    whole += [Whole(u.path, f"it has Linears beside query, key, value and output: {n}") for u, n in joint.items()]
    claimed = {p for u in branches for p in (*u.up, u.down)}
    closed = [w.path for w in whole]
    mlps, left = _mlps("", module, claimed, closed)
    whole += [Whole(p, "a Linear that is neither part of an attention nor of an MLP") for p in left]
    closed += [w.path for w in whole]
    experts = []
    for name, owner in in_place(module):
        is_matrix = any(p.dim() > 1 for p in owner.parameters(recurse=False))
        if not is_matrix or features_of(owner) is not None or is_joint_attention(owner):
            continue
        if any(is_inside(name, c) for c in closed):
            continue
        if ways := experts_of(owner):
            experts.append((name, ways))
        else:
            whole.append(Whole(name, f"a {type(owner).__name__}, which is not a Linear"))
    found = tuple(_with_adapters(module, branch) for branch in (*branches, *mlps))
    return Block(path, structure, found, tuple(whole), tuple(experts))


def _others(block: nn.Module, attention: Branch) -> str:
    """Linears that an attention has besides, as one has that attends to two sequences at once: its heads are theirs,
    and a proof that calls it with one sequence sees nothing of them. Where a block is its own attention they may be its
    MLP.
    """
    if not attention.path or attention.widths:
        return ""
    own = {*attention.up, attention.down}
    inside = in_place(block.get_submodule(attention.path))
    every = (join_name(attention.path, name) for name, m in inside if features_of(m) is not None)
    return ", ".join(name for name in every if name not in own)


def _with_adapters(block: nn.Module, branch: Branch) -> Branch:
    """With the Linears that are split, and what is beside them."""
    wanted = {**dict.fromkeys(branch.up, "colwise"), branch.down: "rowwise"}
    own, adapters = {}, []
    for path, style in wanted.items():
        own[path], *others = (join_name(path, name) for name in split_in(block.get_submodule(path), style))
        adapters += [(name, style) for name in others]
    up, adapters = tuple(own[path] for path in branch.up), [*branch.adapters, *adapters]
    return replace(branch, up=up, down=own[branch.down], adapters=tuple(adapters))


def _relative(branch: Branch, block: str) -> Branch:
    up, adapters = tuple(below(p, block) for p in branch.up), tuple((below(p, block), s) for p, s in branch.adapters)
    return replace(branch, path=below(branch.path, block), up=up, down=below(branch.down, block), adapters=adapters)


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
        for depth in (1, 2):
            linears = {join_name(path, n): m for n, m in _linears(candidate, depth).items()}
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
    """Two Linears d -> h -> d, or three: two d -> h (one gates the other) and one h -> d; or these two as one."""
    if len(linears) not in (2, 3) or (is_chain and len(linears) == 3):
        return None
    # The last registered is the likely one, unless a name says otherwise; a chain runs in order.
    order = list(linears)[::-1]
    if not is_chain:
        order.sort(key=lambda n: not any(_DOWN.fullmatch(a) for a in n.lower().split(".")))
    for down in order[:1] if is_chain else order:
        up = tuple(n for n in linears if n != down)
        shapes = {(linears[n].in_features, linears[n].out_features) for n in up}
        inner = linears[down].in_features
        if shapes == {(linears[down].out_features, inner)}:
            return Branch(path, up, down, inner)
        if shapes == {(linears[down].out_features, 2 * inner)} and len(up) == 1:
            return Branch(path, up, down, inner, parts=(2, 1))
    return None


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
    tokens = [n for n in embeddings if not _POSITION.search(_last(n))]
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
