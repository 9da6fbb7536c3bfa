"""TorchRec's own tests, from its wheel, with our `DistributedModelParallel` in the place of theirs.

A test method of theirs draws its arguments by hypothesis, skips itself without GPUs, and starts processes. Here the
method under all that is called with arguments that the caller names, and what it would start runs on the ranks that
are there: its models, planner, plans, sharders, optimizers and comparisons are TorchRec's.
"""

from __future__ import annotations

import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

OURS, THEIRS = "dmp", "torchrec"


def run_test(base: str, method: str, arguments: dict[str, Any], whose: str = OURS) -> str:
    """Run one test method of TorchRec's on the ranks that call this.

    Args:
        base: `module:class` under `torchrec.distributed.test_utils`.
        method: the test's name.
        arguments: those that hypothesis would draw.
        whose: whose `DistributedModelParallel` it gets.

    Returns:
        "passed", or "skipped: <why>".
    """
    module, _, name = base.partition(":")
    test = _case(getattr(theirs(module), name))("__call__")
    try:
        with _on_these_ranks(whose):
            test.setUp()
            random.seed(0)  # which theirs sets to the time
            torch.manual_seed(0)
            _under_decorators(getattr(type(test), method))(test, **arguments)
            test.tearDown()
    except unittest.SkipTest as skipped:
        return f"skipped: {skipped}"
    return "passed"


def theirs(name: str) -> Any:
    """A module of theirs under `torchrec.distributed.test_utils`."""
    import importlib

    if "torchrec.distributed.tests.test_sequence_model" not in sys.modules:
        # The wheel lacks a module that its own utilities import for one test on GPUs.
        package, lacking = (
            types.ModuleType(f"torchrec.distributed.tests{end}") for end in ("", ".test_sequence_model")
        )
        lacking.TestEmbeddingCollectionSharder = None  # type: ignore[attr-defined]
        sys.modules[package.__name__] = package
        sys.modules[lacking.__name__] = lacking
    return importlib.import_module(f"torchrec.distributed.test_utils.{name}")


def _case(base: type[unittest.TestCase]) -> type[unittest.TestCase]:
    """The class of tests with what runs on ranks called on these ranks."""

    class Case(base):  # type: ignore[misc, valid-type]
        backend = "of these ranks"  # with gloo some skip what the numbers of TorchRec itself do not allow

        def __call__(self) -> None:
            """A method for the test's name, never called."""

        def _run_multi_process_test(self, *, callable: Any, world_size: int = 2, **arguments: Any) -> None:
            assert world_size == dist.get_world_size(), (world_size, dist.get_world_size())
            callable(rank=dist.get_rank(), world_size=world_size, **arguments)

    return Case


def _under_decorators(method: Any) -> Any:
    while True:
        if hasattr(method, "hypothesis"):
            method = method.hypothesis.inner_test
        elif hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        else:
            return method


class _Context:
    """In the place of the context that would start a process group for each rank."""

    def __init__(self, rank: int, world_size: int, backend: str, local_size: int | None = None) -> None:
        self.rank, self.local_size = rank, local_size
        self.device, self.pg = torch.device("cpu"), dist.group.WORLD

    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@contextmanager
def _on_these_ranks(whose: str) -> Iterator[None]:
    import dmp

    sharding, base = theirs("test_sharding"), theirs("test_model_parallel_base")
    with ExitStack() as stack:
        stack.enter_context(_no_new_groups())
        stack.enter_context(mock.patch.object(sharding, "MultiProcessContext", _Context))
        for module in (base, theirs("test_model_parallel")):
            stack.enter_context(mock.patch.object(module, "assume", _assume))
        if whose == THEIRS:  # its warnings are its own
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        else:
            for module in (sharding, base):
                stack.enter_context(mock.patch.object(module, "DistributedModelParallel", dmp.DistributedModelParallel))
        yield


def _assume(condition: object) -> None:
    """Hypothesis' own may only be called where it draws."""
    if not condition:
        raise unittest.SkipTest("the arguments do not go together")


@contextmanager
def _no_new_groups() -> Iterator[None]:
    """The group that is there stays, deterministic algorithms are on, as in theirs."""
    nothing = mock.MagicMock()
    torch.use_deterministic_algorithms(True)
    try:
        with (
            mock.patch.object(dist, "init_process_group", nothing),
            mock.patch.object(dist, "destroy_process_group", nothing),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
