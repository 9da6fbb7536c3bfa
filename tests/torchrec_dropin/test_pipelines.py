"""Training loops in TorchRec's style, of which the imports of the pipeline and the wrapper differ, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dmp
from tests.ranks import run_ranks
from tests.torchrec_dropin.scripts import IGNORED, LR, Model, batch, model_of, start, wrapper

pytestmark = [
    IGNORED,
    pytest.mark.filterwarnings("ignore:is_fx_tracing will return true"),  # by theirs
]
STEPS = 5


class Task(Model):
    """Takes TorchRec's `Batch`; returns what pipelines want: losses and an output."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.ebc(batch.sparse_features).values()
        logits = self.out(self.over(pooled).relu()).squeeze(1) + batch.dense_features.sum(1)
        return (logits - batch.labels).pow(2).mean(), logits.detach()


def made(which: str) -> Any:
    """The wrapped model, its dense optimizer."""
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    module = Task()
    module.load_state_dict(model_of().state_dict())
    given = model_of(torch.optim.SGD, lr=LR)
    for name, parameter in given.ebc.named_parameters():
        mine = module.ebc.get_parameter(name)
        for kept in ("_optimizer_classes", "_optimizer_kwargs", "_in_backward_optimizers"):
            if hasattr(parameter, kept):
                setattr(mine, kept, getattr(parameter, kept))
    model = start(wrapper(which)(module, device=torch.device("cpu")))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=LR))


def pipelines(which: str) -> Any:
    """What `from torchrec.distributed.train_pipeline import ...` gives, or `from dmp import ...`."""
    if which == "dmp":
        return dmp
    import torchrec.distributed.train_pipeline

    return torchrec.distributed.train_pipeline


def batches(epoch: int = 0) -> Iterator[Any]:
    from torchrec.datasets.utils import Batch

    for step in range(STEPS):
        sparse = batch(dist.get_rank(), 10 * epoch + step)
        dense = torch.full((sparse.stride(), 2), 0.1 * step)
        yield Batch(dense_features=dense, sparse_features=sparse, labels=torch.ones(sparse.stride()))


def to_the_end(pipeline: Any, iterator: Iterator[Any]) -> list[torch.Tensor]:
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs


def epochs(which: str, name: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Two epochs with one pipeline."""
    model, optimizer = made(which)
    pipeline = getattr(pipelines(which), name)(model, optimizer, torch.device("cpu"), **options)
    outputs = []
    for epoch in range(2):
        outputs += to_the_end(pipeline, batches(epoch))
        if name == "TrainPipelineBase":
            pipeline.reset()  # theirs begins anew with it alone
    return outputs


def evaluated(which: str) -> list[torch.Tensor]:
    """Training and evaluation in turns, the second by a pipeline of its own."""
    names = pipelines(which)
    model, optimizer = made(which)
    train = names.TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), execute_all_batches=True)
    outputs = []
    for epoch in range(2):
        model.train()
        outputs += to_the_end(train, batches(epoch))
        train.detach()
        model.eval()
        evaluate = names.EvalPipelineSparseDist(model, optimizer, torch.device("cpu"))
        with torch.no_grad():
            outputs += to_the_end(evaluate, batches(5))
        evaluate.detach()
        train.attach(model)
    return outputs


def accumulated(which: str) -> list[torch.Tensor]:
    """One batch at a time, gradients of two averaged together."""
    from torchrec.distributed.train_pipeline import GradientAccumulationConfig, GradientAccumulationWrapper

    model, optimizer = made(which)
    pipeline = pipelines(which).TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    config = GradientAccumulationConfig(is_enabled=True, num_steps=2)
    wrapped = GradientAccumulationWrapper(pipeline, optimizer, model, config)
    return [wrapped.progress(iter([one])) for one in [*batches(), *batches(1)]]


def threaded(which: str) -> list[torch.Tensor]:
    """Batches from TorchRec's loading thread."""
    from torchrec.distributed.train_pipeline import DataLoadingThread

    model, optimizer = made(which)
    thread = DataLoadingThread(torch.device("cpu"), batches(), to_device_non_blocking=True)
    thread.start()
    iterator = iter(thread.get_next_batch, None)
    pipeline = pipelines(which).TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    return [pipeline.progress(iterator) for _ in range(STEPS)]


SCRIPTS: dict[str, tuple[Any, ...]] = {
    "sparse": (epochs, "TrainPipelineSparseDist", {}),
    "late": (epochs, "TrainPipelineSparseDist", {"enqueue_batch_after_forward": True}),
    "not all": (epochs, "TrainPipelineSparseDist", {"execute_all_batches": False}),
    "base": (epochs, "TrainPipelineBase", {}),
    "evaluated": (evaluated,),
    "accumulated": (accumulated,),
    "threaded": (threaded,),
}


def _same(name: str) -> int:
    script, *args = SCRIPTS[name]
    theirs, ours = (script(which, *args) for which in ("torchrec", "dmp"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return len(ours)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.sampled(4)
def test_as_torchrecs(name: str) -> None:
    expected = {"evaluated": 4 * STEPS, "threaded": STEPS, "not all": 2 * (STEPS - 2) + 2}.get(name, 2 * STEPS)
    assert run_ranks(2, _same, name) == [expected] * 2


def _prefetch() -> None:
    """Theirs prefetches on a device alone; here it is the same loop."""
    torch.testing.assert_close(*(epochs("dmp", f"{n}TrainPipelineSparseDist", {}) for n in ("Prefetch", "")))


def test_prefetch() -> None:
    run_ranks(2, _prefetch)


def _theirs_around_ours(name: str) -> None:
    import torchrec.distributed.train_pipeline as theirs

    model, optimizer = made("dmp")
    pipeline = getattr(theirs, name)(model, optimizer, torch.device("cpu"))
    if name == "TrainPipelineBase":
        for _ in range(STEPS):
            iterator = batches()
            pipeline.progress(iterator)
        return
    with pytest.raises(dmp.ShardError, match="import the pipeline of the same name from dmp"):
        pipeline.progress(batches())


@pytest.mark.parametrize(
    "name",
    ["TrainPipelineBase", "TrainPipelineSparseDist", "EvalPipelineSparseDist", "PrefetchTrainPipelineSparseDist"],
)
def test_their_pipeline_around_our_model(name: str) -> None:
    """Works, or says what to import."""
    run_ranks(2, _theirs_around_ours, name)


def test_what_published_scripts_read_of_a_pipeline() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipeline = dmp.TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    assert (pipeline._model, pipeline._optimizer, pipeline._device) == (model, optimizer, torch.device("cpu"))


def _their_sharder() -> None:
    """TorchRec's own sharded module has not the two phases: it runs whole, and a parent of the model may be given."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    from sharders import TorchRecSharder

    outputs = []
    for is_pipelined in (False, True):
        plan = {f"ebc.embedding_bags.{t}.weight": dmp.table_wise(i) for i, t in enumerate(("t0", "t1"))}
        sharders = [TorchRecSharder(EmbeddingBagCollectionSharder())]
        torch.manual_seed(0)
        inner = dmp.DistributedModelParallel(Task(), sharders=sharders, plan=plan)
        model = torch.nn.Sequential(inner)
        optimizer = torch.optim.SGD(inner.over.parameters(), LR)
        if is_pipelined:
            outputs.append(list(dmp.TrainPipeline(model, optimizer)(batches())))
            continue
        outputs.append([])
        for one in batches():
            optimizer.zero_grad()
            loss, output = model(one)
            loss.backward()
            optimizer.step()
            outputs[0].append(output)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.filterwarnings("ignore:fbgemm.*an autograd kernel was not registered:UserWarning")  # theirs, on a CPU
def test_modules_without_two_phases() -> None:
    run_ranks(2, _their_sharder)
