"""Random programs: what training loops do, in any order, on random meshes, plans, models and optimizers.

Each habit is right alone, as other tests show; here is what one leaves for the next. Everything is done to the plain
model on the global batch too, in float64, and the weights are compared again and again.
"""

from __future__ import annotations

import copy
import io
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dmp
from dmp import DistributedModelParallel, PlanError
from tests.fuzz.more_habits import BY_OPTIMIZER, OF_GRADIENTS
from tests.fuzz.outcome import RIGHT, Outcome, Wrong, outcome_of
from tests.fuzz.program_model import OPTIMIZERS, SHAPES, Model, Probe, Spec, drawn_env, drawn_layout, drawn_probes
from tests.oracle import in_backward

STEPS = 10
LIMIT_S = 40.0
_NEAR = 1e-8
_IN_BACKWARD = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def probes(seed: int, count: int) -> list[Probe]:
    return drawn_probes("programs", seed, count)


def run(case: Probe) -> Outcome:
    """On every rank."""
    return run_of(str(case), lambda folder: Program(random.Random(case.seed), folder))


def run_of(name: str, made: Callable[[Path], Any]) -> Outcome:
    """On every rank. A step that fails on one ends the program on all, with what was done before.

    Args:
        made: of a folder that all share, what has `step` and `done`.
    """
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(folders, own)

        def attempt() -> None:
            program = made(Path(folders[0]))
            for _ in range(STEPS):
                _together(program)

        outcome = outcome_of(name, attempt, lambda: None, RIGHT, LIMIT_S)
        dist.barrier()
    return outcome


def _together(program: Any) -> None:
    error: Exception | None = None
    try:
        program.step()
    except Exception as raised:
        error = raised
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, error and f"{type(error).__name__}: {error}")
    if any(said):
        raise Wrong(f"{next(filter(None, said))} after {program.done}") from error


class Program:
    """A wrapped model and the plain one that all is done to as well.

    Attributes:
        done: what was done, in words.
    """

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.folder, self.batch, self.done = rng, folder, 0, list[str]()
        self.spec = Spec.drawn(rng)
        self.in_backward = rng.choice((None, None, None, *_IN_BACKWARD))
        self.has_words = rng.random() < 0.5
        """Whether the words are a table of the plan's, and not one of the model's dense weights."""
        self.env, self.whole = drawn_env(rng), self.made()
        self.model = self.wrapped(self.made())
        self.renew(rng.choice(list(OPTIMIZERS)))
        self.kept: tuple[nn.Module, nn.Module] | None = None
        self.averages: list[AveragedModel] = []
        self.frozen: set[str] = set()

    # ---- what is made ----

    def made(self) -> Model:
        model = Model(self.spec).double()
        if self.in_backward:
            tables = [model.users.weight, model.items.weight, model.words.weight]
            in_backward(_IN_BACKWARD[self.in_backward], tables, lr=0.05)
        return model

    def plan(self) -> dict[str, dmp.Layout]:
        names = [name for name in SHAPES if self.has_words or name != "words.weight"]
        return {name: drawn_layout(self.rng, self.env, SHAPES[name]) for name in names}

    def wrapped(self, module: nn.Module) -> DistributedModelParallel:
        if self.rng.random() < 0.25:
            return DistributedModelParallel(module, env=self.env)
        plan = self.plan()
        self.note(f"on {self.env} with {plan}, {self.spec}, {self.in_backward} in backward")
        try:
            return DistributedModelParallel(module, env=self.env, plan=plan)
        except PlanError as error:
            if "words.weight" not in str(error):
                raise
            self.has_words = not self.has_words
            return DistributedModelParallel(module, env=self.env, plan=self.plan())

    def own(self, module: nn.Module) -> list[nn.Parameter]:
        """What the optimizer trains."""
        return [p for name, p in module.named_parameters() if not (self.in_backward and name in SHAPES)]

    def renew(self, name: str) -> None:
        self.optimizer_name = name
        self.optimizer, self.of_whole = (OPTIMIZERS[name](self.own(m)) for m in (self.model, self.whole))
        self.schedulers: list[torch.optim.lr_scheduler.StepLR] = []
        self.note(name)

    def note(self, text: str) -> None:
        self.done.append(text)

    # ---- samples ----

    def samples(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (samples, some) and targets: ranks have one to four samples, of one to four ids."""
        long = 1 + random.Random(self.batch).randrange(4)
        generator = torch.Generator().manual_seed(1000 * self.batch + rank)
        count = 1 + int(torch.randint(0, 4, (), generator=generator))
        ids = torch.randint(0, 10**6, (count, long), generator=generator)
        return ids, (ids.sum(1) % 7).double() / 7

    def loss(self, module: nn.Module, rank: int | None = None) -> torch.Tensor:
        ids, target = self.samples(self.env.data_rank if rank is None else rank)
        loss: torch.Tensor = (module(ids) - target).square().mean()
        return loss

    def mean(self, of_rank: Callable[[int], torch.Tensor]) -> torch.Tensor:
        return torch.stack([of_rank(rank) for rank in range(self.env.data_size)]).mean()

    def backward(self, scale: float = 1.0) -> None:
        (scale * self.loss(self.model)).backward()
        (scale * self.mean(lambda rank: self.loss(self.whole, rank))).backward()

    def alike(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        size = max(1.0, *(float(p.detach().abs().max()) ** 2 for p in self.whole.parameters()))
        if not (apart := float((ours - theirs).detach().abs().max())) < _NEAR * size:
            raise Wrong(f"{what} differs by {apart:.3g}")

    # ---- a step ----

    def step(self) -> None:
        habit = self.rng.choice((*HABITS, *BY_OPTIMIZER * 2, *(() if self.in_backward else OF_GRADIENTS * 2)))
        self.note(habit if isinstance(habit, str) else habit.__name__)
        self.batch += 1
        getattr(self, habit)() if isinstance(habit, str) else habit(self)
        if self.rng.random() < 0.6:
            self.compare()

    def compare(self) -> None:
        state, whole = dmp.full_state_dict(self.model), self.whole.state_dict()
        if set(state) != set(whole):
            raise Wrong(f"names {set(state) ^ set(whole)}")
        for name, value in whole.items():
            self.alike(name, state[name], value)

    def finish(self) -> None:
        """Clip or scale, step, clear."""
        both, how = (self.model, self.whole), self.rng.random()
        if how < 0.2 and not self.in_backward:
            ours, theirs = dmp.clip_grad_norm_(self.model, 0.3), nn.utils.clip_grad_norm_(self.whole.parameters(), 0.3)
            self.alike("the norm", torch.as_tensor(ours), theirs)
        elif how < 0.35 and not self.in_backward:
            for module in both:
                nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        elif how < 0.45:
            for module in both:
                nn.utils.clip_grad_value_(self.own(module), 0.05)
        elif how < 0.55:
            for p in (p for module in both for p in self.own(module) if p.grad is not None):
                p.grad.mul_(0.5)
        for of in (self.optimizer, self.of_whole, *self.schedulers):
            of.step()
        to_none = self.rng.random() < 0.7
        clear: Iterable[Any] = both if self.rng.random() < 0.3 else (self.optimizer, self.of_whole)
        for of in clear:
            of.zero_grad(set_to_none=to_none)

    # ---- habits ----

    def train(self) -> None:
        self.backward()
        self.finish()

    def accumulate(self) -> None:
        times, is_local = self.rng.choice((2, 3)), self.rng.random() < 0.5
        for i in range(times):
            self.batch += 1
            if is_local and i < times - 1:
                with self.model.no_sync():
                    (self.loss(self.model) / times).backward()
                (self.mean(lambda rank: self.loss(self.whole, rank)) / times).backward()
            else:
                self.backward(1 / times)
        self.finish()

    def two_forwards(self) -> None:
        if self.in_backward == "adagrad" or self.spec.again:
            return  # an update for each lookup, which is said; passes within the pass, which DDP refuses

        def both(mean: Callable[[], torch.Tensor]) -> torch.Tensor:
            first = mean()
            self.batch += 1
            second = mean()
            self.batch -= 1
            return first + 0.5 * second

        both(lambda: self.loss(self.model)).backward()
        both(lambda: self.mean(lambda rank: self.loss(self.whole, rank))).backward()
        self.finish()

    def a_forward_for_nothing(self) -> None:
        self.loss(self.model)

    def gradients_for_nothing(self) -> None:
        if not self.in_backward:
            self.backward()
            self.optimizer.zero_grad()
            self.of_whole.zero_grad()

    def backward_twice(self) -> None:
        if self.in_backward or self.spec.again:
            return
        loss = self.loss(self.model)
        loss.backward(retain_graph=True)
        loss.backward()
        (2 * self.mean(lambda rank: self.loss(self.whole, rank))).backward()
        self.finish()

    def evaluate(self) -> None:
        ids, _ = self.samples(self.env.data_rank)
        for module in (self.model, self.whole):
            module.eval()
        with self.rng.choice((torch.no_grad, torch.inference_mode))():
            self.alike("the evaluation", self.model(ids), self.whole(ids))
        for module in (self.model, self.whole):
            module.train()

    def evaluate_frozen(self) -> None:
        for module in (self.model, self.whole):
            module.requires_grad_(False)
        self.evaluate()
        for module in (self.model, self.whole):
            for name, p in module.named_parameters():
                p.requires_grad_(name not in self.frozen)

    def freeze(self) -> None:
        names = [name for name, _ in self.whole.named_parameters() if not (self.in_backward and name in SHAPES)]
        name = self.rng.choice(names)
        self.note(name)
        self.frozen ^= {name}
        for module in (self.model, self.whole):
            p = dict(module.named_parameters())[name]
            p.requires_grad_(name not in self.frozen)
            p.grad = None

    def call_the_module(self) -> None:
        self.loss(self.model.module).backward()
        self.mean(lambda rank: self.loss(self.whole, rank)).backward()
        self.finish()

    def call_a_part(self) -> None:
        """Beside the model's forward or alone."""
        if self.in_backward:
            return

        def of_part(module: Any, rank: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(100 * self.batch + rank)
            x = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
            part: torch.Tensor = module.blocks[0](x).square().mean()
            return part

        with_loss = self.rng.random() < 0.5 and not self.spec.again
        ours, theirs = of_part(self.model.module, self.env.data_rank), self.mean(lambda r: of_part(self.whole, r))
        if with_loss:
            ours, theirs = ours + self.loss(self.model), theirs + self.mean(lambda rank: self.loss(self.whole, rank))
        if ours.requires_grad:
            ours.backward()
            theirs.backward()
        self.finish()

    def penalty(self) -> None:
        if self.in_backward:
            return
        gain = dict(self.model.named_parameters())["gain"]
        whole = gain.full_tensor() if hasattr(gain, "full_tensor") else gain
        (self.loss(self.model) + 0.1 * whole.square().sum()).backward()
        (self.mean(lambda rank: self.loss(self.whole, rank)) + 0.1 * self.whole.gain.square().sum()).backward()
        self.finish()

    def scaler(self) -> None:
        if self.in_backward:
            return
        for module, optimizer, loss in (
            (self.model, self.optimizer, lambda: self.loss(self.model)),
            (self.whole, self.of_whole, lambda: self.mean(lambda rank: self.loss(self.whole, rank))),
        ):
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
            scaler.scale(loss()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(optimizer)
            optimizer.zero_grad()

    def learning_rate(self) -> None:
        factor = self.rng.choice((0.1, 0.5, 2.0))
        for group in (*self.optimizer.param_groups, *self.of_whole.param_groups):
            group["lr"] *= factor

    def schedule(self) -> None:
        self.schedulers = [torch.optim.lr_scheduler.StepLR(of, 1, gamma=0.9) for of in (self.optimizer, self.of_whole)]

    def another_optimizer(self) -> None:
        self.renew(self.rng.choice(list(OPTIMIZERS)))

    def scale_a_weight(self) -> None:
        name = self.rng.choice([name for name, _ in self.whole.named_parameters()])
        with torch.no_grad():
            for module in (self.model, self.whole):
                dict(module.named_parameters())[name].mul_(0.9)

    def reshard(self) -> None:
        plan = self.plan()
        try:
            self.model.reshard(plan, self.optimizer)
        except PlanError as error:
            if "words.weight" not in str(error):
                raise
            plan.pop("words.weight", None)
            self.model.reshard(plan, self.optimizer)

    def load_what_is_there(self) -> None:
        self.model.load_state_dict({name: copy.deepcopy(value) for name, value in self.model.state_dict().items()})
        for of in (self.optimizer, self.of_whole):
            of.load_state_dict(copy.deepcopy(of.state_dict()))

    def load_a_file(self) -> None:
        file = io.BytesIO()
        torch.save({name: 0.95 * value for name, value in dmp.full_state_dict(self.model).items()}, file)
        file.seek(0)
        self.model.load_state_dict(torch.load(file))
        self.whole.load_state_dict({name: 0.95 * value for name, value in self.whole.state_dict().items()})

    def checkpoint(self) -> None:
        """Saved, in the background perhaps while training goes on; loaded where it was or on another mesh and plan."""
        path = self.folder / f"at {self.batch}"
        pending = dmp.save_checkpoint(path, self.model, self.optimizer, asynchronous=self.rng.random() < 0.4)
        if pending is not None:
            self.loss(self.model).backward()
            self.optimizer.step()
            pending.wait()
        if self.rng.random() < 0.4:
            self.env, self.kept, self.averages = drawn_env(self.rng), None, []
            self.model = self.wrapped(self.made())
            for name, p in self.model.named_parameters():
                p.requires_grad_(name not in self.frozen)
            self.optimizer = OPTIMIZERS[self.optimizer_name](self.own(self.model))
        dmp.load_checkpoint(path, self.model, self.optimizer)
        self.schedulers = []
        self.optimizer.zero_grad()
        self.of_whole.zero_grad()

    def wrap_anew(self) -> None:
        if self.in_backward:
            return
        plain, self.env = dmp.to_unsharded(self.model), drawn_env(self.rng)
        self.kept, self.averages, self.model = None, [], self.wrapped(plain)
        self.renew(self.optimizer_name)

    def go_on_with_a_copy(self) -> None:
        if not self.in_backward:  # of which the plain model's copy has no optimizer
            self.model, self.whole = copy.deepcopy(self.model), copy.deepcopy(self.whole)
            self.renew(self.optimizer_name)

    def keep_a_copy(self) -> None:
        if not self.in_backward:
            self.kept = copy.deepcopy(self.model), copy.deepcopy(self.whole)

    def look_at_the_copy(self) -> None:
        if self.kept is not None:
            ids, _ = self.samples(self.env.data_rank)
            with torch.no_grad():
                self.alike("the copy", *(module(ids) for module in self.kept))

    def average(self) -> None:
        if self.in_backward:
            return
        both, how = (self.model, self.whole), get_ema_multi_avg_fn(0.7)
        self.averages = self.averages or [AveragedModel(module, multi_avg_fn=how) for module in both]
        for average, module in zip(self.averages, both, strict=True):
            average.update_parameters(module)
        ids, _ = self.samples(self.env.data_rank)
        with torch.no_grad():
            self.alike("the average", *(average(ids) for average in self.averages))

    def bad_ids(self) -> None:
        try:
            self.model(torch.full((2, 2), 0.5))
        except Exception:
            return
        raise Wrong("ids that are fractions were taken")

    def an_error_after_the_forward(self) -> None:
        loss = self.loss(self.model)
        try:
            raise KeyError("the loop's own")
        except KeyError:
            del loss


HABITS = (
    *("train",) * 8,
    *("accumulate", "two_forwards", "evaluate", "freeze", "checkpoint", "reshard", "scaler", "go_on_with_a_copy") * 3,
    *("a_forward_for_nothing", "gradients_for_nothing", "backward_twice", "evaluate_frozen", "call_the_module"),
    *("call_a_part", "penalty", "learning_rate", "schedule", "another_optimizer", "scale_a_weight", "load_a_file"),
    *("load_what_is_there", "wrap_anew", "keep_a_copy", "look_at_the_copy", "average", "bad_ids"),
    "an_error_after_the_forward",
)
