"""Completes a tensor-parallel plan with its sequence-parallel parts.

[Note: sequence region]
From the first block's input to the final norm's output each rank holds a slice of the sequence (dim 1 of (B, T, D));
attentions and MLPs gather it and scatter their output. Outside, embeddings, positions, rotary tables and masks are
whole. Styles, beside those that split:
- split_sequence: the first block; the hidden state that enters it, whole, is split.
- sequence: a norm on a slice. Its parameters are whole, their gradients summed over the axis.
- gather_input: the module that holds an attention's or MLP's column-wise Linears; the hidden state that enters it
  (its first floating (B, T, D) argument, positional or keyword) is gathered.
- rowwise_scatter: a row-wise Linear whose output is summed and scattered over the sequence.
- gather_sequence: the final norm (it is also what `sequence` is), or else the last block: its output is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from dmp import PlanError, is_inside, join_name
from sharders.tensor_parallel.head_counts import Divided, ModelRuns, Unsplit
from sharders.tensor_parallel.split.hooks import change_hidden_state, is_hidden_state
from sharders.tensor_parallel.structure.dry_run import DryRunError, Trace, dry_run, make_local, resize, sequence_length
from sharders.tensor_parallel.structure.find_transformer import is_norm
from sharders.tensor_parallel.structure.of_heads import OF_HEADS
from sharders.tensor_parallel.structure.transformer import Block, Transformer, outward


def sequence_styles(
    runs: ModelRuns, styles: Mapping[str, str], divided: Divided, *, loss_parallel: bool = False
) -> tuple[dict[str, str], str]:
    """The styles with those of sequence parallelism, and a note on how they were verified.

    Args:
        styles: module path -> style, exact paths.
        divided: (module path, attribute) -> local value, as the styles need it.
        loss_parallel: a head that gathers its logits leaves them split.

    Raises:
        PlanError: no blocks, several stacks of them, or a module in them that cannot run on a slice of the sequence.
    """
    model, transformer, axis = runs.model, runs.transformer, runs.axis
    _check_stack(transformer, axis)
    done = dict(styles)
    if loss_parallel:
        done |= {p: "colwise_loss_parallel" for p, s in styles.items() if s == "colwise_gather"}
    scopes = {scope for block in transformer.blocks for scope in _add_branches(block, done, axis)}
    unsplit: Unsplit | None = None
    try:
        unsplit = runs.unsplit()
        note = f"sequence parallel: verified by a dry run with {unsplit.feed.name}"
    except DryRunError as error:
        note = f"sequence parallel: not verified by a dry run: {error}"
    final = _final_norm(model, transformer, None if unsplit is None else unsplit.whole)
    if final is None and len(transformer.blocks) == 1:
        raise PlanError(
            f"sequence parallel over axis {axis!r} needs a second block or a final norm after "
            f"{transformer.blocks[0].path!r}, to gather the sequence there; use "
            "TensorParallelSharder(sequence_parallel=False)"
        )
    _set(done, transformer.blocks[0].path, "split_sequence", axis)
    _set(done, final or transformer.blocks[-1].path, "gather_sequence", axis)
    owned = [join_name(b.path, n) for b in transformer.blocks for n in _owners(model.get_submodule(b.path))]
    sliced = [path for path in owned if scopes.isdisjoint(outward(path))]
    _check_norms(model, [p for p in sliced if p not in done], transformer.width, axis)
    if unsplit is not None:
        sliced = _see_slices(runs, done, divided, unsplit)
    norms = [p for p in sliced if p not in done]
    _check_norms(model, norms, transformer.width, axis)
    return {**done, **dict.fromkeys(norms, "sequence")}, note


def _check_norms(model: nn.Module, paths: Iterable[str], width: int, axis: str) -> None:
    for path in paths:
        module = model.get_submodule(path)
        if not is_norm(module, width):
            raise PlanError(
                f"module {path!r} ({type(module).__name__}) has parameters and would see a slice of the sequence on "
                f"each rank of axis {axis!r}; sequence parallel runs norms, and attentions and MLPs that are split; "
                "use TensorParallelSharder(sequence_parallel=False)"
            )


def _check_stack(transformer: Transformer, axis: str) -> None:
    stacks = {b.path.rpartition(".")[0] for b in transformer.blocks}
    if len(stacks) != 1:
        found = ", ".join(repr(s) for s in sorted(stacks)) or "none"
        raise PlanError(
            f"sequence parallel over axis {axis!r} runs a model with one stack of transformer blocks, found {found}; "
            "use TensorParallelSharder(sequence_parallel=False)"
        )


def _add_branches(block: Block, styles: dict[str, str], axis: str) -> Iterator[str]:
    """Styles of a block's attentions and MLPs; yields the modules that gather their input."""
    for branch in (way for each in block.branches for way in each.ways):
        down = join_name(block.path, branch.down)
        if branch.second and down in styles:
            raise PlanError(
                f"modules {[join_name(block.path, n) for n, _ in branch.second]} are beside an attention's query, key "
                f"and value, of a second sequence or of an MLP that has its output with it: sequence parallel over "
                f"axis {axis!r} does not run them; use TensorParallelSharder(sequence_parallel=False)"
            )
        if styles.get(down) not in ("rowwise", "rowwise_scatter"):
            continue
        beside = [n for n, style in branch.adapters if style not in OF_HEADS or n == branch.path]
        beside += branch.further
        if beside:
            raise PlanError(
                f"modules {[join_name(block.path, n) for n in beside]} are adapters beside split Linears, or gates and "
                f"values for each head: sequence parallel over axis {axis!r} does not run them; use "
                "TensorParallelSharder(sequence_parallel=False)"
            )
        # The smallest module within the block that holds every Linear that reads the hidden size.
        around = outward(branch.up[0].rpartition(".")[0])
        scope = next(path for path in around if all(is_inside(n, path) for n in branch.up))
        if not scope:
            raise PlanError(
                f"modules {[join_name(block.path, n) for n in branch.up]} lie directly in block {block.path!r}: "
                f"sequence parallel over axis {axis!r} gathers the hidden state where a module within the block takes "
                "it; put them into one, or use TensorParallelSharder(sequence_parallel=False)"
            )
        styles[down] = "rowwise_scatter"
        _set(styles, join_name(block.path, scope), "gather_input", axis)
        yield join_name(block.path, scope)


def _set(styles: dict[str, str], path: str, style: str, axis: str) -> None:
    if styles.get(path, style) != style:
        raise PlanError(
            f"module {path!r} would be both {styles[path]!r} and {style!r} on axis {axis!r}: sequence parallel needs "
            "blocks that hold their attention or MLP, and the sum around it, inside; use "
            "TensorParallelSharder(sequence_parallel=False)"
        )
    styles[path] = style


def _final_norm(model: nn.Module, transformer: Transformer, whole: Trace | None) -> str | None:
    """The norm that takes the last block's output directly: called next, or else registered next."""
    last = transformer.blocks[-1].path
    if whole is None:
        stack = last.rpartition(".")[0]
        siblings = [n for n, _ in model.get_submodule(stack.rpartition(".")[0]).named_children()]
        names = siblings[siblings.index(stack.rpartition(".")[2]) + 1 :] if stack else []
        after = [join_name(stack.rpartition(".")[0], n) for n in names]
    else:
        after = whole.order[whole.order.index(last) + 1 :] if last in whole.order else []
    first = next((p for p in after if _has_parameters(model.get_submodule(p))), None)
    return first if first is not None and is_norm(model.get_submodule(first), transformer.width) else None


def _owners(module: nn.Module) -> Iterator[str]:
    """Modules inside that have parameters of their own."""
    return (name for name, m in module.named_modules() if _has_parameters(m))


def _has_parameters(module: nn.Module) -> bool:
    return any(p is not None for p in module._parameters.values())


def _see_slices(runs: ModelRuns, styles: Mapping[str, str], divided: Divided, unsplit: Unsplit) -> list[str]:
    """Modules with parameters that see a slice of the sequence, in every block, by a dry run."""
    transformer, size, whole = runs.transformer, runs.size, unsplit.whole
    length = sequence_length(size)

    def edit(modules: dict[str, nn.Module]) -> None:
        for path, style in styles.items():
            if path in modules:
                _simulate(modules[path], path, style, transformer.width, length, length // size)
        make_local(modules, styles, divided, size)  # widths are claimed of what has been gathered

    try:
        seen = dry_run(runs.copies, unsplit.feed, edit)
        if seen.result != whole.result:
            raise DryRunError(f"the model's output is {seen.result} instead of {whole.result}")
    except DryRunError as error:
        raise PlanError(
            f"a dry run of this model with the sequence split over axis {runs.axis!r} of size {size} failed: {error}; "
            "use TensorParallelSharder(sequence_parallel=False)"
        ) from error

    def is_sliced(path: str) -> bool:
        pairs = zip(seen.inputs.get(path, []), whole.inputs.get(path, []), strict=False)
        return any(len(s) > 2 and s[1] != w[1] for s, w in pairs)

    sliced: dict[int, list[str]] = {}
    for first in transformer.representatives():
        owners = _owners(runs.model.get_submodule(first.path))
        sliced[first.structure] = [name for name in owners if is_sliced(join_name(first.path, name))]
    return [join_name(block.path, name) for block in transformer.blocks for name in sliced[block.structure]]


def _simulate(module: nn.Module, path: str, style: str, width: int, whole: int, local: int) -> None:
    """Hooks that change the sequence dimension of shapes as a style does."""

    def leave(length: int) -> None:
        def resized(output: Any) -> Any:
            return resize(output, 1, length) if is_hidden_state(output, width) else output

        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            return (resized(output[0]), *output[1:]) if isinstance(output, tuple) else resized(output)

        module.register_forward_hook(hook)

    if style in ("split_sequence", "gather_input"):
        length = local if style == "split_sequence" else whole
        change_hidden_state(module, path, width, lambda x: resize(x, 1, length))
    elif style == "rowwise_scatter":
        leave(local)
    elif style == "gather_sequence":
        leave(whole)
