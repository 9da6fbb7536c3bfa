"""Random programs of TorchRec's scripts: collections, keyed batches and optimizers in the backward pass of every kind.

The oracle is the unsharded model on the global batch, its tables updated row by row by the formulas of
`tests.row_oracles`, in float32; of tables in 16 bits each update is rounded once.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import dmp
from dmp import DistributedModelParallel, Layout
from tests.fuzz import programs
from tests.fuzz.keyed_model import DENSE, DTYPES, LR, Batch, Model, Optimizers, Spec, drawn_batch
from tests.fuzz.outcome import Outcome, Wrong
from tests.fuzz.program_model import Probe, drawn_env, drawn_layout, drawn_probes
from tests.oracle import Oracle, attach
from tests.row_oracles import CASES

LIMIT_S = programs.LIMIT_S
_BY_ROW = {"rowwise_adagrad"} | {name for name, case in CASES.items() if any(case.state.values())}
"""State of a row, which another cut of the columns would merge."""
_IN_BACKWARD = ("sgd", "adagrad", "rowwise_adagrad", "adam", *(name for name in CASES if "clipped" not in name))
_OF_16_BITS = (None, "sgd", "rowwise_adagrad")


def probes(seed: int, count: int) -> list[Probe]:
    return drawn_probes("keyed programs", seed, count)


def run(case: Probe) -> Outcome:
    """On every rank."""
    return programs.run_of(str(case), lambda folder: Program(random.Random(case.seed), folder))


class _Tables(nn.Module):
    """Those of a model, by their names: what the oracle's optimizer updates."""

    def __init__(self, of: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.of = of

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self.of.items())


class Program:
    """A wrapped model and the plain one that all is done to as well.

    Attributes:
        done: what was done, in words.
    """

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self.rng, self.folder, self.batch, self.done = rng, folder, 0, list[str]()
        self.spec = Spec.drawn(rng)
        self.kind = rng.choice(_OF_16_BITS if self.spec.dtype != "FP32" else (None, *_IN_BACKWARD))
        # Others keep state in 16 bits, or make much of a little.
        self.dense = rng.choice(list(DENSE)) if self.spec.dtype == "FP32" else "SGD"
        self.form = rng.choice(("combined", "warmup", "alone"))
        self.note(f"{self.spec}, {self.kind} in backward, {self.form} with {self.dense}")
        self.env, self.whole = drawn_env(rng), Model(self.spec)
        self.tables = {n: p for n, p in self.whole.named_parameters() if n.split(".")[0] in self.spec.features}
        self.round()
        self.model = self.wrapped()
        self.oracle = Oracle(self.kind, self.shards(), {})
        self.of_whole, self.ours = self.optimizers(self.whole), self.optimizers(self.model)

    def note(self, text: str) -> None:
        self.done.append(text)

    # ---- what is made ----

    def wrapped(self) -> DistributedModelParallel:
        module = Model(self.spec, self.spec.dtype)
        module.load_state_dict(self.whole.state_dict())
        attach(_Tables({n: module.get_parameter(n) for n in self.tables}), self.kind)
        plan = self.plan() if self.rng.random() < 0.8 else None
        self.note(f"on {self.env} with {plan}")
        return DistributedModelParallel(module, env=self.env, plan=plan)

    def plan(self) -> dict[str, Layout]:
        return {name: self.layout((p.shape[0], p.shape[1])) for name, p in self.tables.items()}

    def layout(self, shape: tuple[int, int]) -> Layout:
        for _ in range(100):
            drawn = drawn_layout(self.rng, self.env, shape)
            is_cut = any(s.sizes[1] < shape[1] for s in drawn.shards(shape, self.env))
            if not (is_cut and self.kind in _BY_ROW):
                return drawn
        raise AssertionError("every layout drawn cuts columns")

    def shards(self) -> dict[str, Any]:
        return {
            name: tuple(self.model.plan[name].layout.shards(tuple(p.shape), self.env))
            for name, p in self.tables.items()
        }

    def optimizers(self, module: nn.Module) -> Optimizers:
        """Of the plain side, one that stands in for the tables': its rate is the oracle's."""
        from torchrec.optim.keyed import KeyedOptimizerWrapper

        dense = {n: p for n, p in module.named_parameters() if self.kind is None or n not in self.tables}
        if isinstance(module, DistributedModelParallel):
            fused: Any = module.fused_optimizer
        else:
            fused = KeyedOptimizerWrapper({"p": nn.Parameter(torch.zeros(1))}, lambda p: torch.optim.SGD(p, lr=LR))
        return Optimizers(fused, dense, self.dense, self.form)

    def round(self) -> None:
        """Weights of the oracle's tables to what the wrapped model's dtype has."""
        with torch.no_grad():
            for p in self.tables.values():
                p.copy_(p.to(DTYPES[self.spec.dtype]))

    # ---- samples ----

    def of_rank(self, rank: int) -> Batch:
        return drawn_batch(self.whole.rows, self.batch, rank)

    def backward_of_whole(self) -> torch.Tensor:
        losses = [self.whole(self.of_rank(rank))[0] for rank in range(self.env.data_size)]
        torch.stack(losses).mean().backward()
        return losses[self.env.data_rank].detach()

    def step_of_whole(self) -> None:
        if self.kind is not None:
            self.oracle.lr = self.of_whole.rate
            self.oracle.step(_Tables(self.tables))
        self.of_whole.step()
        self.of_whole.zero_grad()
        self.round()

    # ---- a step ----

    def step(self) -> None:
        habit = self.rng.choice(HABITS)
        self.note(habit)
        self.batch += 1
        getattr(self, habit)()
        self.compare()

    def alike(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        near = {"FP32": 2e-4, "FP16": 5e-3, "BF16": 4e-2}[self.spec.dtype]
        if ours.shape != theirs.shape:
            raise Wrong(f"{what} has shape {tuple(ours.shape)}, not {tuple(theirs.shape)}")
        apart = (ours.double() - theirs.double()).detach().abs() / theirs.detach().abs().clamp(min=1.0)
        if apart.numel() and not (far := float(apart.max())) < near:
            raise Wrong(f"{what} differs by {far:.3g}")

    def compare(self) -> None:
        state, whole = dmp.full_state_dict(self.model), self.whole.state_dict()
        if set(state) != set(whole):
            raise Wrong(f"names {set(state) ^ set(whole)}")
        for name, value in whole.items():
            self.alike(name, state[name], value)
        if self.kind is not None and abs(self.ours.rate - self.of_whole.rate) > 1e-9:
            raise Wrong(f"rates {self.ours.rate} and {self.of_whole.rate}")
        of_all = dmp.full_optimizer_state_dict(self.model, self.ours.all)["state"]
        for name, of_table in self.oracle.state.items():
            for key, value in of_table.items():
                by_row = self.kind in _BY_ROW and (self.kind not in CASES or CASES[self.kind].state[key])
                if name in of_all or value.any():
                    self.alike(f"{key} of {name}", of_all[name][key], value[:, 0] if by_row else value)

    # ---- habits ----

    def train(self) -> None:
        loss, _ = self.model(self.of_rank(self.env.data_rank))
        self.alike("the loss", loss, self.backward_of_whole())
        loss.backward()
        self.ours.step()
        self.ours.zero_grad()
        self.step_of_whole()

    def evaluate(self) -> None:
        with torch.no_grad():
            batch = self.of_rank(self.env.data_rank)
            self.alike("the scores", self.model(batch)[1], self.whole(batch)[1])

    def schedule(self) -> None:
        if self.form != "warmup":
            kind = self.rng.choice(("step", "lambda"))
            self.ours.schedule(kind)
            self.of_whole.schedule(kind)

    def rate(self) -> None:
        for of in (self.ours, self.of_whole):
            for group in (g for o in of.each for g in o.param_groups):
                group["lr"] *= 0.7

    def pipeline(self) -> None:
        """Which steps the optimizer that it is given, and no schedule."""
        if self.form == "alone" or self.ours.schedulers:
            return
        count, first = self.rng.randint(1, 3), self.batch
        made = dmp.TrainPipelineSparseDist(self.model, self.ours.all, self.env.device)
        batches = iter([drawn_batch(self.whole.rows, first + i, self.env.data_rank) for i in range(count)])
        for i in range(count):
            self.batch = first + i
            made.progress(batches)
            self.backward_of_whole()
            self.step_of_whole()
        self.ours.zero_grad()

    def reshard(self) -> None:
        self.model.reshard(self.plan(), self.ours.all)
        self.oracle.shards = self.shards()

    def load_what_is_there(self) -> None:
        self.model.load_state_dict(self.model.state_dict())
        for of in (*self.ours.each, *self.of_whole.each):
            of.load_state_dict(of.state_dict())

    def checkpoint(self) -> None:
        """Ours or torch's, loaded on another mesh and plan."""
        self.train()  # so that there is state
        path, is_ours = str(self.folder / f"at {self.batch}"), self.rng.random() < 0.5
        self.note("ours" if is_ours else "torch's")

        def state() -> dict[str, Any]:
            of = {f"optimizer{i}": o.state_dict() for i, o in enumerate(self.ours.each)}
            return {"model": self.model.state_dict(), **of}

        if is_ours:
            dmp.save_checkpoint(path, self.model, self.ours.all)
        else:
            dcp.save(state(), checkpoint_id=path)
        rates = [group["lr"] for o in self.ours.each for group in o.param_groups]
        self.env = drawn_env(self.rng)
        self.model = self.wrapped()
        self.ours = self.optimizers(self.model)
        self.of_whole.schedulers = []
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(3)
        if is_ours:
            dmp.load_checkpoint(path, self.model, self.ours.all)
        else:
            self.model(self.of_rank(self.env.data_rank))[0].backward()  # so that there is state to load into
            for o in self.ours.each:
                o.step()
                o.zero_grad()
            own = state()
            dcp.load(own, checkpoint_id=path)
            self.model.load_state_dict(own["model"])
            for i, o in enumerate(self.ours.each):
                o.load_state_dict(own[f"optimizer{i}"])
        self.oracle.shards = self.shards()
        if (came := [group["lr"] for o in self.ours.each for group in o.param_groups]) != rates:
            raise Wrong(f"rates {came}, saved {rates}")


HABITS = (
    *("train",) * 6,
    *("evaluate", "checkpoint", "reshard", "pipeline") * 2,
    "schedule",
    "rate",
    "load_what_is_there",
)
