"""`TensorParallelSharder`: splits a model's Linears and Embeddings over the tensor axis, by torch's styles.

`place` decides and checks everything on the whole model; `apply` then changes it in place, see `split`.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dmp import Layout, PlanError, RandomNumbers, ShardError, ShardingEnv, is_inside, join_name, ranks, type_name
from sharders.tensor_parallel.auto_plan import BECAUSE, Choice, check_heads, derive
from sharders.tensor_parallel.candidates import sums_of_heads
from sharders.tensor_parallel.head_counts import Divided, ModelRuns
from sharders.tensor_parallel.prove import UNPROVED, prove, warn_on_first_rank
from sharders.tensor_parallel.sequence import sequence_styles
from sharders.tensor_parallel.split.followed import follow_branches
from sharders.tensor_parallel.split.looked_at import show_whole
from sharders.tensor_parallel.split.patterns import Styles, expand, from_layouts, own_plan, with_heads, with_ties
from sharders.tensor_parallel.split.replicated_weights import outside_tables
from sharders.tensor_parallel.split.same_gradients import compare_gradients
from sharders.tensor_parallel.split.same_samples import compare_calls
from sharders.tensor_parallel.split.split import hidden_size, split
from sharders.tensor_parallel.split.styles import Style, canonical, check_divides, family, layouts_of
from sharders.tensor_parallel.structure.dry_run import Feed
from sharders.tensor_parallel.structure.feeds import of_example
from sharders.tensor_parallel.structure.latent import latent_rank
from sharders.tensor_parallel.structure.linears import features_of, is_joint_attention
from sharders.tensor_parallel.structure.wide_norms import COLWISE_NORM

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_HOW_TO_PROVE = "; TensorParallelSharder(example_inputs=...) proves a plan with what the model is called with"


class TensorParallelSharder:
    """Splits dense layers over the tensor axis of the mesh; a mesh without one is left alone.

    Names, shapes and values of parameters are kept: split ones become DTensors, and so do the others (see
    `sharders.tensor_parallel.split.replicated_weights`), except where nothing at all is split.

    Random numbers: ranks of a tensor group go on from the random state (CPU and device) of its first rank, so that
    dropout of what they all hold is one process's dropout. Of what is split (attention probabilities, an MLP's hidden
    units) each rank draws masks of its own, see [Note: drawn apart]; those of chunks of the sequence repeat.

    Args:
        plan: module path or pattern (`*` stands for one component: `layers.*.mlp.up`) -> style: a name (see
            `styles`) or a torch `ParallelStyle`. By default the model's own `tp_plan` (Hugging Face), else
            what its structure says (`sharders.tensor_parallel.auto_plan`). `{}` splits nothing.
        sequence_parallel: between blocks each rank keeps its chunk of the sequence (dim 1) of the hidden state alone.
        loss_parallel: the logits stay split over the vocabulary, as a DTensor for `loss_parallel()` of
            `torch.distributed.tensor.parallel`.
        example_inputs: what the model is called with: a tensor, a tuple of arguments, or a dict of keywords. A plan is
            proved with these (shapes and whole numbers as given) where nobody can guess what a model takes. A proof
            computes them a few times on the CPU: few samples are enough.
    """

    def __init__(
        self,
        plan: Mapping[str, Style] | None = None,
        *,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        example_inputs: torch.Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
    ) -> None:
        if plan is not None and not isinstance(plan, Mapping):
            raise PlanError(f"expected plan to be a dict of module path -> style; got {type_name(plan)}: {plan!r}")
        self.plan = None if plan is None else dict(plan)
        self.sequence_parallel = sequence_parallel
        self.loss_parallel = loss_parallel
        self._example = _example(example_inputs)

    @property
    def options(self) -> str:
        """What it was made with."""
        flags = f"sequence_parallel={self.sequence_parallel}, loss_parallel={self.loss_parallel}"
        return f"plan={self.plan!r}, {flags}"

    def place(self, model: nn.Module, given: Mapping[str, Layout], env: ShardingEnv) -> TensorParallelPlacement:
        """What to split; the model is not changed.

        Args:
            model: unsharded, parameters possibly on meta.
            given: a plan's layouts by parameter name. With tensor-parallel ones among them they are all that is split;
                where they are those of this sharder's own choice, that is taken as it is.
            env: the mesh, possibly abstract.

        Raises:
            PlanError: several tensor axes, sizes or heads that do not divide, unknown styles and modules.
        """
        wanted = {name: layout for name, layout in given.items() if layout.is_tensor_parallel}
        axes = env.axes("tensor")
        if len(axes) > 1:
            raise PlanError(
                f"a tensor-parallel style needs a 1-D mesh, but this mesh has the tensor axes {axes}; give one axis "
                "that role: ShardingEnv.from_mesh(mesh, tensor=..., shard=...)"
            )
        if env.tensor_size == 1:
            return TensorParallelPlacement(wanted, {}, {}, (), env)
        if not all(feed.suits(model) for feed in self._example):
            args, kwargs = self._example[0].given or ((), {})
            raise PlanError(
                f"example_inputs: {type_name(model)}.forward takes no {len(args)} arguments and keywords "
                f"{list(kwargs)}; expected what the model is called with: a tensor, a tuple of arguments, or a dict"
            )
        runs = ModelRuns(model, env.tensor_size, axes[0], given=self._example)
        return _Placing(model, runs, self, env).place(wanted)


@dataclass
class TensorParallelPlacement:
    """What `TensorParallelSharder` splits.

    Args:
        layouts: parameter name -> layout, of every parameter that a style places.
        styles: module path -> style, in the order of the model.
        divided: (module path, attribute) -> its value on each rank, such as a number of heads.
        notes: what was left whole, and why, for showing.
        env: the mesh.
        warnings: what is not seen from the numbers of a step.
        kept: ids of weights that the model reads beside their places, and that are left alone.
    """

    layouts: Mapping[str, Layout]
    styles: Mapping[str, Style]
    divided: Mapping[tuple[str, str], int]
    notes: tuple[str, ...]
    env: ShardingEnv = field(repr=False)
    warnings: tuple[str, ...] = ()
    kept: Collection[int] = ()

    def apply(self, model: nn.Module) -> None:
        """Split the model in place. No communication, but for the random state, and what was decided; parameters may be
        on meta.

        Raises:
            ShardError: the mesh is abstract.
            PlanError: other ranks decided otherwise.
        """
        if self.env.tensor_size == 1:
            return
        mesh = self.env.submesh("tensor")
        if mesh is None:
            raise ShardError(f"tensor parallelism needs processes, and {self.env} is a mesh that is not here")
        is_unproved = self._agreed(mesh)
        numbers = RandomNumbers.now(), _device_state(mesh.device_type)
        if self.styles:
            split(model, mesh, self.styles, self.divided, self.kept)
            show_whole(model, mesh, self.styles, self.env.everyone, follow_branches(model, mesh, self.styles))
        if any(p is not None for m in outside_tables(model) for p in m._parameters.values()):
            compare_calls(model, mesh)
            compare_gradients(model, mesh, is_unproved=is_unproved)
        _share_random_numbers(*numbers, mesh)  # also where all is whole: ranks must drop the same

    def _agreed(self, mesh: DeviceMesh) -> bool:
        """Whether the plan is unproved on some rank along the axis. What is in no plan, such as numbers of heads, each
        rank finds for itself: by example inputs, where it was given some."""
        (axis,) = mesh.mesh_dim_names or ("tensor",)
        named = sorted(_names(dict(self.styles)).items())
        found = zlib.crc32(repr((named, sorted(self.divided.items()))).encode())
        is_unproved = any(UNPROVED in text for text in self.warnings)
        told = ranks.gather_words("splitting a model by tensor parallelism", [found, is_unproved], mesh.get_group())
        other = next((rank for rank, words in enumerate(told) if words[0] != told[0][0]), None)
        if other is not None:
            raise PlanError(
                f"ranks 0 and {other} along mesh axis {axis!r} would split the model in different ways; the model, the "
                "sharder and its example_inputs must be the same on all of them"
            )
        return any(words[1] for words in told)


def _example(inputs: Any) -> tuple[Feed, ...]:
    """Inputs that a model is tried with; none where none are given."""
    if inputs is None:
        return ()
    if isinstance(inputs, Mapping):
        return of_example((), inputs)
    return of_example(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {})


def _of_dtensors(styles: Styles) -> str:
    """What to do about styles of torch's that hand DTensors on, whose forward is written for whole ones."""
    split = {path: style for path, style in styles.items() if family(style) in ("colwise", "rowwise")}
    named = [path for path, style in split.items() if not getattr(style, "use_local_output", True)]
    if not named:
        return ""
    return (
        f". {named[0]!r} has use_local_output=False: what follows gets a DTensor with all heads, but here attentions "
        "run on plain tensors with their own heads: give names ('colwise', 'rowwise'), and sequence_parallel=True for "
        "parts of the sequence between them"
    )


@dataclass(frozen=True)
class _Placing:
    """One call of `place`: the choice of styles, completed and checked."""

    model: nn.Module
    runs: ModelRuns
    sharder: TensorParallelSharder
    env: ShardingEnv

    def place(self, wanted: Mapping[str, Layout]) -> TensorParallelPlacement:
        """What is split; nothing wanted is the sharder's own choice. Warns of what is chosen, not of what was tried."""
        chosen = self._chosen(wanted)
        for text in chosen.warnings:
            warn_on_first_rank(text)
        return chosen

    def _chosen(self, wanted: Mapping[str, Layout]) -> TensorParallelPlacement:
        if not wanted:
            return self._own()
        try:
            own = self._own()
        except PlanError:  # it is not what was asked for
            return self._checked(self._given(wanted))
        if own.layouts == wanted:
            return own
        asked = self._given(wanted)
        return own if own.layouts == self._layouts(asked.styles) else self._checked(asked)

    def _own(self) -> TensorParallelPlacement:
        """The sharder's plan, the model's, or one from its structure."""
        sharder = self.sharder
        if sharder.plan is not None:
            return self._checked(self._planned(sharder.plan))
        plan = own_plan(self.model)
        if not plan:
            return self._derived(())
        try:
            own = self._checked(self._planned(plan))
        except PlanError as error:  # a style that is none of ours
            note = f"the model's own tp_plan is not used: {error}"
            derived = self._derived((note,))
            return replace(derived, warnings=(*derived.warnings, note))
        return own if not self._leaves_some(own) else self._more_of(own)

    def _leaves_some(self, placement: TensorParallelPlacement) -> bool:
        """Whether an attention, an MLP or experts are whole, or compute what every rank has."""
        for block in self.runs.transformer.representatives():
            parts = [*(branch.down for branch in block.branches), *(path for path, _ in block.experts)]
            styles = [placement.styles.get(join_name(block.path, part)) for part in parts]
            if any(style in (None, "rowwise_gather") for style in styles):
                return True
        return False

    def _more_of(self, own: TensorParallelPlacement) -> TensorParallelPlacement:
        """Of the model's own plan and that from its structure the one which splits more; the latter, if as many."""
        try:
            derived = self._derived(())
        except PlanError:
            return own
        split, more = (self._split_weights(placement) for placement in (own, derived))
        if more < split or any(text.startswith(UNPROVED) for text in derived.warnings):
            return own
        note = f"the model's own tp_plan is not used: it splits {split:,} weights, what its structure says {more:,}"
        return replace(derived, notes=(note, *derived.notes))

    def _split_weights(self, placement: TensorParallelPlacement) -> int:
        named = dict(self.model.named_parameters())
        return sum(named[name].numel() for name, layout in placement.layouts.items() if layout.is_tensor_parallel)

    def _planned(self, plan: Mapping[str, Style]) -> Choice:
        styles = with_ties(self.model, expand(self.model, plan))
        return self._completed(styles, self.sharder.sequence_parallel and bool(plan))

    def _derived(self, notes: tuple[str, ...]) -> TensorParallelPlacement:
        sharder = self.sharder
        found = derive(self.runs, sequence_parallel=sharder.sequence_parallel, loss_parallel=sharder.loss_parallel)
        styles = self._with_heads(with_ties(self.model, expand(self.model, found.styles)))
        return self._checked(Choice(styles, found.divided, (*notes, *found.notes)), is_derived=True)

    def _given(self, wanted: Mapping[str, Layout]) -> Choice:
        styles = with_ties(self.model, from_layouts(self.model, wanted))
        splits = {path: style for path, style in styles.items() if family(style) != "sequence"}
        found = self._completed(splits, len(splits) < len(styles))
        return replace(found, styles={**styles, **found.styles})

    def _completed(self, styles: Styles, is_sequence: bool) -> Choice:
        """A plan of splits, with the rest that it needs."""
        styles = self._with_heads(styles)
        self._check(styles)
        if not is_sequence:
            return Choice(styles, {}, ())
        for path, style in styles.items():
            if not isinstance(style, str):
                raise PlanError(
                    f"module {path!r}: sequence_parallel=True changes what goes in and out of split modules, and "
                    f"cannot change a {type(style).__name__} object; give the style's name, or sequence_parallel=False"
                )
        names = _names(styles)
        divided = next(self.runs.divisions(names))
        done, note = sequence_styles(self.runs, names, divided, loss_parallel=self.sharder.loss_parallel)
        return Choice({**styles, **expand(self.model, done)}, {}, (note,))

    def _with_heads(self, styles: Styles) -> Styles:
        is_loss_parallel = self.sharder.loss_parallel and self.sharder.plan != {}
        return with_heads(self.model, self.runs.transformer, styles, is_loss_parallel)

    def _checked(self, choice: Choice, *, is_derived: bool = False) -> TensorParallelPlacement:
        styles = {path: choice.styles[path] for path, _ in self.model.named_modules() if path in choice.styles}
        self._check(styles)
        warnings = tuple(note for note in choice.notes if BECAUSE in note)
        if not styles:
            return TensorParallelPlacement({}, {}, {}, choice.notes, self.env, warnings)
        proof = prove(self.runs, styles, self._choices(choice, styles, is_derived))
        sums = {} if is_derived else sums_of_heads(self.runs, styles)
        if sums and (proof.divided is None or proof.unproved):
            more = expand(self.model, {**styles, **sums})
            with_sums = prove(self.runs, more, self._choices(choice, more, is_derived))
            styles, proof = (more, with_sums) if with_sums.divided is not None else (styles, proof)
        if proof.divided is None:
            raise _WrongPlanError(
                f"a tensor-parallel plan that is wrong for this model: run on {self.runs.size} simulated ranks of "
                f"axis {self.runs.axis!r} with small random inputs, {proof.wrong}; leave out of the plan the module "
                f"whose weights are not used as its styles say, or pass no plan{_of_dtensors(styles)}"
            )
        notes = choice.notes
        if not any("proved" in note for note in notes) or (proof.unproved and not is_derived):
            notes = (*notes, proof.note)
        warnings += (proof.note + _HOW_TO_PROVE * (not self.sharder._example),) if proof.unproved else ()
        return TensorParallelPlacement(self._layouts(styles), styles, proof.divided, notes, self.env, warnings)

    def _choices(self, choice: Choice, styles: Styles, is_derived: bool) -> Iterator[Divided]:
        return iter([dict(choice.divided)]) if is_derived else self.runs.divisions(_names(styles))

    def _check(self, styles: Styles) -> None:
        for path, style in styles.items():
            module = self.model.get_submodule(path)
            canonical(style, path, module)
            if style == "latent":
                around, features = self.model.get_submodule(path.rpartition(".")[0]), features_of(module)
                if features is None or latent_rank(around, features) is None:
                    raise PlanError(
                        f"module {path!r}: 'latent' is for the Linear of a latent attention, which gives a vector that "
                        "a norm and a Linear beside it take, and a part of the key behind it; this is none"
                    )
            lazy = [name for name, p in module._parameters.items() if p is not None and is_lazy(p)]
            if lazy and family(style):
                raise PlanError(f"module {path!r}: {lazy} of a lazy module cannot be split before the first forward")
            check_divides(style, path, module, self.runs.size, self.runs.axis)
            if style == COLWISE_NORM and not self._is_of_split(path, styles):
                raise PlanError(
                    f"module {path!r} is a {type(module).__name__} outside of what the plan splits: {style!r}, colwise "
                    "for its weights, is for a norm over all that 'colwise' Linears of an attention or MLP give"
                )
            if is_joint_attention(module) and family(style) and styles.get(join_name(path, "out_proj")) != "rowwise":
                raise PlanError(
                    f"module {path!r} is an nn.MultiheadAttention, all of which is split or nothing: a plan names it "
                    f"'colwise_packed_3' and {join_name(path, 'out_proj')!r} 'rowwise'; sequence parallelism, which "
                    "would scatter its output, does not run it"
                )
            if style in ("gather_input", "split_sequence"):
                hidden_size(path, module, styles)
        check_heads(self.runs, _names(styles))

    def _is_of_split(self, path: str, styles: Styles) -> bool:
        """Whether it lies in an attention or MLP whose first Linears are split, as far as these are known."""
        branches = [(block, branch) for block in self.runs.transformer.blocks for branch in block.branches]
        split = ((b, x) for b, x in branches if family(styles.get(join_name(b.path, x.up[0]), "")) == "colwise")
        return not branches or any(is_inside(path, join_name(b.path, x.path)) for b, x in split)

    def _layouts(self, styles: Mapping[str, Style]) -> dict[str, Layout]:
        """By the first name of each parameter."""
        first = {id(p): name for name, p in self.model.named_parameters()}
        found: dict[str, Layout] = {}
        for path, style in styles.items():
            module = self.model.get_submodule(path)
            for name, layout in layouts_of(style, module).items():
                found.setdefault(first[id(module._parameters[name])], layout)
        return {name: found[name] for name in first.values() if name in found}


class _WrongPlanError(PlanError):
    """The plan gives other numbers than the whole model."""


def _names(styles: Styles) -> dict[str, str]:
    names = {path: style if isinstance(style, str) else family(style) for path, style in styles.items()}
    return {path: name for path, name in names.items() if name}


def _device_state(device_type: str) -> torch.Tensor | None:
    """Of the generator of a device other than the CPU."""
    return None if device_type == "cpu" else torch.get_device_module(device_type).get_rng_state()


def _share_random_numbers(numbers: RandomNumbers, of_device: torch.Tensor | None, mesh: DeviceMesh) -> None:
    """Go on from the first rank's, taken before the first DTensor: on a GPU that aligns the whole world."""
    mine = numbers, of_device
    first, of_device = ranks.gather_objects("sharing random numbers along a tensor axis", mine, mesh.get_group())[0]
    first.restore()
    if of_device is not None:
        torch.get_device_module(mesh.device_type).set_rng_state(of_device)
