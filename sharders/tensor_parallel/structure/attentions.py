"""Finds attentions by their structure: shapes of Linears and numbers of heads; names only where shapes cannot tell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from dmp import attribute_of, is_inside, join_name
from sharders.tensor_parallel.structure.adapters import children_in_place
from sharders.tensor_parallel.structure.latent import latent_attention
from sharders.tensor_parallel.structure.linears import Features, features_of, is_joint_attention
from sharders.tensor_parallel.structure.of_heads import OF_HEADS, values_of_heads
from sharders.tensor_parallel.structure.transformer import (
    CONFIGS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    Branch,
    Heads,
    Whole,
    below,
    outward,
)

_NUMBERS = (*HEADS, *KV_HEADS, *HEAD_DIM)
_AFTER = r"(_?(proj|projection|lin|linear|layer|w))?"
_QKV = re.compile(r"(to_?|w_?|linear_?|lin_?|proj_?|c_)?(q|k|v|query|key|value)s?" + _AFTER)
_JOINT = re.compile(r"(w_?|c_|to_?|in_)?(qkv|attn|query_key_value)" + _AFTER)
_KEYS = re.compile(r"(to_?|w_?|linear_?|lin_?|proj_?|c_)?(kv|k_v|key_value|keys_values)" + _AFTER)
_BACK = re.compile(r"(\w*_)?(o|out|output)(_\w*)?")
_OUT = re.compile(r"(to_?|w_?|linear_?|lin_?|c_)?(o|out|output|proj|dense)" + _AFTER)


def attentions_in(modules: Mapping[str, nn.Module]) -> dict[str, Branch | Whole]:
    """Attentions by path (absolute paths inside), innermost modules first."""
    found: dict[str, Branch | Whole] = {}
    around: set[str] = set()
    # In two passes: query, key and value alone, as in Bert, look like a fused attention until their output is found.
    for find in (_attention, _latent, _joint_keys, _with_mlp, _fused):
        for path, module in list(modules.items())[::-1]:
            is_list = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
            if is_list or path in around or any(p in found for p in outward(path)):
                continue
            attention = find(path, module)
            if attention is not None:
                found[path] = _with_values(attention, module)
                around.update(outward(path))
    return {path: found[path] for path in modules if path in found}


def linears_in(module: nn.Module, depth: int) -> dict[str, Features]:
    """Linears by relative path, at most `depth` modules down, in order of registration."""
    found = {}
    for name, child in children_in_place(module):
        features = features_of(child)
        if features is not None:
            found[name] = features
        elif depth > 1:
            found |= {f"{name}.{n}": c for n, c in linears_in(child, depth - 1).items()}
    return found


def _attention(path: str, module: nn.Module) -> Branch | Whole | None:
    for depth in (1, 2):
        linears = linears_in(module, depth)
        named = {n: m for n, m in linears.items() if _QKV.fullmatch(last_of(n)) or _is_out(n)}
        for candidates in (linears, named):
            match = _match_attention(candidates) if len(candidates) == 4 else None
            if match is not None:
                up, down = match
                return _with_heads(path, module, up, down, linears)
    return None


def _joint_keys(path: str, module: nn.Module) -> Branch | None:
    """An attention whose key and value are one Linear beside the query's, by their names; the output may be in a
    Sequential, before its dropout."""
    own, downs = linears_in(module, 1), linears_in(module, 2)
    pairs = [(q, kv) for q in own for kv in own if _QKV.fullmatch(last_of(q)) and _KEYS.fullmatch(last_of(kv))]
    heads, size = _number([module], HEADS), _number([module], HEAD_DIM)
    if len(pairs) != 1 or heads is None is size:
        return None
    ((query, keys),) = pairs
    width, inner = own[query].in_features, own[query].out_features
    outs = [
        n for n, of in downs.items() if n not in (query, keys) and (of.in_features, of.out_features) == (inner, width)
    ]
    of_head = inner // heads if heads is not None else size
    if len(outs) != 1 or not of_head or inner % of_head or own[keys].out_features % (2 * of_head):
        return None
    of = Heads(inner // of_head, own[keys].out_features // (2 * of_head), of_head)
    query, keys, down = (join_name(path, name) for name in (query, keys, outs[0]))
    return Branch(path, (query,), down, inner, of, second=((keys, "colwise_packed_2"),))


def _with_mlp(path: str, module: nn.Module) -> Branch | None:
    """An attention and an MLP that have one Linear for what both give, one behind the other, as single-stream blocks of
    Flux have. The MLP's hidden size is so many times the attention's, that all are equal parts.
    """
    own = linears_in(module, 1)
    for name, child in module.named_children():
        linears = linears_in(child, 1)
        heads = _number([child], HEADS)
        if len(linears) != 3 or not all(_QKV.fullmatch(last_of(n)) for n in linears) or heads is None:
            continue
        query, key, value = sorted(linears.values(), key=lambda of: -of.out_features)
        width, inner, size = query.in_features, query.out_features, query.out_features // heads
        if inner % heads or key.out_features != value.out_features or key.out_features % size:
            continue
        for (mlp, up), (out, down) in itertools.permutations(own.items(), 2):
            fits = (up.in_features, down.in_features, down.out_features) == (width, inner + up.out_features, width)
            parts, rest = divmod(up.out_features, inner)
            if not fits or rest:
                continue
            of = Heads(heads, key.out_features // size, size)
            mlp, out = join_name(path, mlp), join_name(path, out)
            second = (mlp, "colwise" if parts == 1 else f"colwise_packed_{parts}"), (out, f"rowwise_packed_{parts + 1}")
            return Branch(path, tuple(join_name(path, name, n) for n in linears), out, inner, of, second=second)
    return None


def _latent(path: str, module: nn.Module) -> Branch | None:
    of = latent_attention(module, linears_in(module, 1), _number([module], HEADS))
    if of is None:
        return None
    query, shared, up, down = (join_name(path, name) for name in of.names)
    return Branch(path, (query, up), down, of.widths[2], of.heads, adapters=((shared, "latent"),), widths=of.widths)


def _fused(path: str, module: nn.Module) -> Branch | Whole | None:
    if isinstance(module, nn.MultiheadAttention):
        if not is_joint_attention(module):
            return Whole(path, "query, key and value are not one weight of equal parts, without more keys")
        heads = Heads(module.num_heads, module.num_heads, module.head_dim)
        return Branch(path, (path,), join_name(path, "out_proj"), module.embed_dim, heads, parts=(3,))
    branch = _of_one_linear(path, module)
    if branch is not None:
        return branch
    if _number([module], _NUMBERS, configs=False) is None:
        return None
    matrices = [p for c in module.children() for p in c.parameters(recurse=False) if p.dim() == 2]
    if len(matrices) > 1 and not any(isinstance(m, nn.ModuleList) for m in module.modules()):
        return Whole(path, "not four Linears for query, key, value and output (fused, or another kind of attention)")
    return None


def _of_one_linear(path: str, module: nn.Module) -> Branch | None:
    """An attention whose query, key and value are one Linear, by the only two that fit its number of heads; the output
    may be in a Sequential, before its dropout."""
    own = linears_in(module, 1)
    for linears in (own, linears_in(module, 2)):
        branch = _of_two(path, module, own, linears)
        if branch is not None:
            return branch
    return None


def _of_two(path: str, module: nn.Module, ups: Mapping[str, Features], downs: Mapping[str, Features]) -> Branch | None:
    """By one of `ups` and one of `downs`."""
    heads, size = _number([module], HEADS), _number([module], HEAD_DIM)
    found = []
    for (up, of_up), (down, of_down) in itertools.product(ups.items(), downs.items()):
        inner, width = of_down.in_features, of_down.out_features
        of_head = inner // heads if heads is not None else size
        if up == down or not of_head or inner % of_head or of_up.in_features != width:
            continue
        query = inner // of_head
        keys, rest = divmod(of_up.out_features - inner, 2 * of_head)
        if (heads is None or heads == query) and keys > 0 == rest and not query % keys:
            found.append((up, down, Heads(query, keys, of_head)))
    # A configuration that has the number of heads may be an MLP's too: then a name tells. A gate and what it gates, in
    # one, has the shape of grouped queries: half as many keys and values.
    if _number([module], _NUMBERS, configs=False) is None:
        found = [each for each in found if _JOINT.fullmatch(last_of(each[0]))]
    alike = [each for each in found if each[2].query == each[2].key_value]
    if len(alike or found) != 1:
        return None
    ((up, down, of),) = alike or found
    parts = (3, 1) if of.query == of.key_value else (1,)
    return Branch(path, (join_name(path, up),), join_name(path, down), of.query * of.size, of, parts)


def _match_attention(linears: Mapping[str, Features]) -> tuple[tuple[str, str, str], str] | None:
    """(query, key, value) and output among four Linears, by shape; names decide between equal shapes."""
    names = list(linears)[::-1]
    last_first = sorted(names, key=lambda n: (_QKV.fullmatch(last_of(n)) is not None, not _is_out(n)))
    for out in last_first:
        # Where all are alike it does not matter which is the query: they are split in the same way.
        o, width = linears[out], linears[out].out_features
        others = (n for n in linears if n != out)
        q, k, v = sorted(others, key=lambda n: (-linears[n].out_features, linears[n].in_features != width))
        inner = linears[q].out_features
        reads_alike = linears[k].in_features == linears[v].in_features  # not as the query, of another sequence
        grouped = 0 < linears[k].out_features == linears[v].out_features and inner % linears[k].out_features == 0
        same_module = len({n.rpartition(".")[0] for n in (q, k, v)}) == 1
        if reads_alike and grouped and same_module and (o.in_features, linears[q].in_features) == (inner, width):
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
        if all(_QKV.fullmatch(last_of(n)) for n in up):
            return Whole(path, f"no number of heads among its attributes ({', '.join(HEADS[:4])}, ...)")
        return None  # four Linears of such shapes need not be an attention
    if inner % heads or kv % (inner // heads):
        return Whole(path, f"query and key widths {inner} and {kv} do not fit {heads} heads")
    of = Heads(heads, kv // (inner // heads), inner // heads)
    second = tuple((join_name(path, n), style) for n, style in _second(up, down, linears_in(module, 2)))
    return Branch(path, tuple(join_name(path, n) for n in up), join_name(path, down), inner, of, second=second)


def _second(up: tuple[str, str, str], down: str, linears: Mapping[str, Features]) -> list[tuple[str, str]]:
    """What an attention has for a second sequence, if that is all that it has besides: Linears to as many features as
    its query, key and value have, and one, or none, that leads back; names decide between equal shapes. Nothing
    where other Linears are there.
    """
    to, inner = {linears[n].out_features for n in up}, linears[down].in_features
    found: dict[str, str] = {}
    for name, of in linears.items():
        if name in (*up, down):
            continue
        leads_back = of.in_features == inner and (
            of.out_features not in to or any(map(_BACK.fullmatch, name.lower().split(".")))
        )
        if not leads_back and of.out_features not in to:
            return []
        found[name] = "rowwise" if leads_back else "colwise"
    into, back = (list(found.values()).count(style) for style in ("colwise", "rowwise"))
    return list(found.items()) if into in (2, 3) and back <= 1 else []


def _with_values(attention: Branch | Whole, module: nn.Module) -> Branch | Whole:
    """With its values for each head, see [Note: values of heads]; left whole where these cannot be split with them."""
    if isinstance(attention, Whole) or attention.heads is None or attention.widths:
        return attention
    path, heads = attention.path, attention.heads
    beside = {below(name, path) for name in (*attention.up, attention.down, *dict(attention.second))}
    values = values_of_heads(module, heads, beside)
    if attention.is_joint:
        values = {name: style for name, style in values.items() if style in OF_HEADS}
    linears = linears_in(module, 2)
    for name, parameter in module.named_parameters() if heads.query > 1 and not is_joint_attention(module) else ():
        owner = name.rpartition(".")[0]
        is_known = owner in values or any(is_inside(owner, n) for n in linears)
        inner = module.get_submodule(owner)
        is_filter = isinstance(inner, nn.Conv1d | nn.Conv2d | nn.Conv3d) or features_of(inner) is not None
        if not is_known and not is_filter and heads.query in parameter.shape[1:]:
            return Whole(path, f"parameter {name!r} {tuple(parameter.shape)} has values for each head")
    added = tuple((join_name(path, name), style) for name, style in values.items())
    return replace(attention, adapters=(*attention.adapters, *added))


def _number(owners: Iterable[nn.Module], names: Iterable[str], *, configs: bool = True) -> int | None:
    """The first positive integer attribute of one of these names, of the modules, then of their configurations."""
    owners = list(owners)
    places: list[Any] = [*owners]
    if configs:
        places += [vars(m)[c] for m in owners for c in CONFIGS if c in vars(m)]
    for place in places:
        for name in names:
            value = vars(place).get(name) if isinstance(place, nn.Module) else attribute_of(place, name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def last_of(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _is_out(name: str) -> bool:
    atoms = name.lower().split(".")
    return any(_OUT.fullmatch(a) for a in atoms) and not _QKV.fullmatch(atoms[-1])
