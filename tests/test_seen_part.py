"""The gradient of a table's part: a number made of it says what it is, optimizers take it as any other."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.flop_counter import FlopCounterMode

import dmp
from dmp import DistributedModelParallel, column_wise, data_parallel, full_state_dict, row_wise, table_wise
from sharders.embedding.weights import seen_part
from tests.ranks import run_ranks
from tests.test_asked import Said
from tests.wrapped_net import Net, batch, loss_of


def first(weight: Any) -> None:
    weight[0] = 0.0


NUMBERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "norm": lambda grads: torch.stack([g.norm() for g in grads]).norm(),
    "of data": lambda grads: sum(float(g.data.norm(2)) ** 2 for g in grads) ** 0.5,
    "linalg": lambda grads: [torch.linalg.vector_norm(g, 3) for g in grads],
    "torch.norm": lambda grads: [torch.norm(g.detach(), p=2) for g in grads],
    "squares": lambda grads: sum((g**2).sum() for g in grads),
    "maximum": lambda grads: max(g.abs().max().item() for g in grads if g.numel()),
    "in one": lambda grads: torch.cat([g.view(-1) for g in grads]).norm(),
    "lists": lambda grads: torch._foreach_norm(grads),
    "lists of squares": lambda grads: [g.sum() for g in torch._foreach_mul(grads, grads)],
    "finite": lambda grads: all(bool(torch.isfinite(g).all()) for g in grads),
    "rows set": lambda grads: [first(g) for g in grads if g.numel()],
    "rows that are frozen": lambda grads: [g[:2].zero_() for g in grads],
    "with weights": lambda grads: [(2 - g * torch.ones_like(g)).mean() for g in grads],
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, weight_decay=0.1, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, lists": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


def model_of(layouts: str) -> DistributedModelParallel:
    cut = {"users.weight": row_wise(), "items.weight": column_wise([0, 1]), "more.weight": table_wise(0)}
    plan = cut if layouts == "cut" else dict.fromkeys(cut, data_parallel())
    model = DistributedModelParallel(Net(), plan=plan)
    loss_of(model, batch(model.env.rank)).backward()
    return model


def said_of_numbers(layouts: str) -> list[str]:
    """Of which numbers nothing, or too much, was said."""
    model = model_of(layouts)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    wrong = []
    for name, number in NUMBERS.items():
        seen_part._said.clear()
        with Said() as said:
            number(grads)
            number(grads)
        texts = [
            text for text in said.texts if "of the gradient of table 'users.weight' is of this rank's part" in text
        ]
        if len(texts) != (layouts == "cut"):
            wrong.append(name)
    return wrong


def maximum_of_nothing() -> str:
    model = model_of("cut")
    grad = model.get_parameter("more.weight").grad
    try:
        return str(float(grad.max() if grad is not None else 0))
    except dmp.ShardError as error:
        return str(error)


def test_a_rank_without_rows_is_told_why_there_is_no_maximum() -> None:
    found, told = run_ranks(2, maximum_of_nothing)
    assert float(found) > 0 and told.startswith("max: this rank has no row of the gradient of table 'more.weight'")


def test_a_number_of_a_parts_gradient_says_so_once() -> None:
    assert run_ranks(2, said_of_numbers, "cut") == [[], []]


def test_copies_have_the_same_gradient_everywhere_and_say_nothing() -> None:
    assert run_ranks(2, said_of_numbers, "copied") == [[], []]


def steps(name: str, plainly: bool) -> list[torch.Tensor]:
    model = model_of("cut")
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(2):
        for p in model.parameters() if plainly else ():
            p.grad = None if p.grad is None else p.grad.as_subclass(torch.Tensor)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
        loss_of(model, batch(model.env.rank + step)).backward()
    state = [v for of in optimizer.state.values() for v in of.values() if isinstance(v, torch.Tensor)]
    assert all(type(v) is torch.Tensor for v in state)
    return [t.detach().clone() for t in (*model.parameters(), *state)]


def optimizers_that_differ() -> list[str]:
    seen_part._said.clear()
    wrong = []
    with Said() as said:
        for name in OPTIMIZERS:
            pairs = zip(steps(name, False), steps(name, True), strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                wrong.append(name)
    return wrong + [text for text in said.texts if "this rank's part" in text]


def test_optimizers_take_it_as_any_gradient() -> None:
    assert run_ranks(2, optimizers_that_differ) == [[], []]


def beside_numbers() -> list[str]:
    seen_part._said.clear()
    model = model_of("cut")
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    with Said() as said:
        norm = get_total_norm(grads)
        clip_grad_norm_(model.parameters(), 1.0)
        assert torch.allclose(dmp.clip_grad_norm_(model, 1e9), norm.clamp(max=1.0))
        assert all(p.grad is None or type(p.grad) is torch.Tensor for p in copy.deepcopy(model).parameters())
        file = io.BytesIO()
        torch.save(grads, file)
        file.seek(0)
        assert {type(g) for g in torch.load(file)} == {torch.Tensor}
        scaler = dmp.GradScaler(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(loss_of(model, batch(0))).backward()
        scaler.step(optimizer)
    return [text for text in said.texts if "this rank's part" in text]


def test_clipping_scaling_copying_and_saving_say_nothing() -> None:
    assert run_ranks(2, beside_numbers) == [[], []]


def one_column() -> list[str]:
    seen_part._said.clear()
    model = DistributedModelParallel(nn.Sequential(nn.EmbeddingBag(40, 1)), plan={"0.weight": row_wise()})
    weight: Any = model.module[0].weight
    model(torch.arange(12).view(3, 4)).sum().backward()
    with Said() as said, torch.no_grad():
        weight.copy_(weight - 0.1 * torch.zeros_like(weight).mul_(0.9).add_(weight.grad))
    return [text for text in said.texts if "this rank's part" in text]


def test_a_step_by_hand_of_a_table_of_one_column_says_nothing() -> None:
    """Its weights were taken for something that goes by the numbers of rows."""
    assert run_ranks(2, one_column) == [[], []]


WRITES: dict[str, Callable[[Any, str], Any]] = {
    "data": lambda m, n: first(getattr(m, n).weight.data),
    "filled": lambda m, n: getattr(m, n).weight.data[0].fill_(0),
    "some": lambda m, n: getattr(m, n).weight.data[1:3].mul_(0.5),
    "by ids": lambda m, n: getattr(m, n).weight.detach().index_fill_(0, torch.tensor([1]), 0.0),
    "copied": lambda m, n: getattr(m, n).weight.data[0, :].copy_(torch.ones(8)),
}


def written_by_number() -> None:
    model = model_of("cut")
    before = full_state_dict(model)
    for name in ("users", "items"):
        with torch.no_grad():
            for write in WRITES.values():
                with pytest.raises(dmp.ShardError, match=f"table '{name}.weight' by its number"):
                    write(model.module, name)
            with pytest.raises(dmp.ShardError, match=f"table '{name}.weight' by its number"):
                getattr(model.module, name).weight[0] = 0.0
    assert all(torch.equal(before[n], t) for n, t in full_state_dict(model).items())


def test_a_row_is_not_written_by_its_number() -> None:
    """The first row of each part was written, in silence."""
    run_ranks(2, written_by_number)


def written_as_a_whole() -> list[str]:
    model, net = model_of("cut"), Net()
    seen_part._said.clear()
    with Said() as said, torch.no_grad():
        for module in (model.module, net):
            weight = module.users.weight
            weight.data.mul_(2)
            module.users.weight.data.clamp_(-1, 1)
            module.users.weight.data[module.users.weight > 0.5] = 0.25
            module.users.weight.data[:] += 1
            module.users.weight.data = module.users.weight.data / 2
            module.users.weight -= 0.5
        assert type(model.module.users.weight) is nn.Parameter
        assert torch.equal(full_state_dict(model)["users.weight"], net.users.weight)
        torch.manual_seed(1)
        nn.init.xavier_uniform_(model.module.users.weight.data)
        drawn, number = full_state_dict(model)["users.weight"], float(torch.rand(()))
        assert len(drawn.unique()) == drawn.numel() and drawn.abs().max() <= (6 / sum(drawn.shape)) ** 0.5
    return [*(text for text in said.texts if "this rank's part" in text), str(number)]


def test_what_is_done_to_each_element_outside_the_model_is_right() -> None:
    (one, other) = run_ranks(2, written_as_a_whole)
    assert one == other and len(one) == 1


def read_by_number() -> list[str]:
    model, told = model_of("cut"), []
    for read in (
        lambda: model.module.users.weight[1],
        lambda: model.module.users.weight.data[:2],
        lambda: model.module.users.weight.data.norm(),
        lambda: model.module.users.weight.detach()[torch.tensor([0, 1])].mean(),
    ):
        seen_part._said.clear()
        with Said() as said:
            read()
        told += said.texts
    return told


def test_a_row_that_is_read_by_its_number_is_said_to_be_of_the_part() -> None:
    for told in run_ranks(2, read_by_number):
        assert len(told) == 4 and all("of table 'users.weight' is of this rank's part of it" in text for text in told)


SEEN: dict[str, Callable[[Any], Any]] = {
    "scores": lambda m: torch.ones(3, 8) @ m.users.weight.data.T,
    "by linear": lambda m: nn.functional.linear(torch.ones(3, 8), m.users.weight),
    "mean row": lambda m: m.users.weight.data.mean(0),
    "mean row of the gradient": lambda m: m.users.weight.grad.mean(0, keepdim=True),
    "norms of cut rows": lambda m: m.items.weight.grad.norm(dim=1),
    "normalized cut rows": lambda m: nn.functional.normalize(m.items.weight.detach()),
    "array": lambda m: m.users.weight.detach().cpu().numpy(),
    "list": lambda m: m.users.weight.tolist(),
    "saved": lambda m: torch.save({"users": m.users.weight.data.cpu()}, io.BytesIO()),
    "touched": lambda m: m.users.weight.grad.abs().sum(1).nonzero(),
    "count": lambda m: (m.users.weight.grad.norm(dim=1) > 0).sum(),
    "smallest": lambda m: m.users.weight.data.abs().flatten().kthvalue(3),
    "singular values": lambda m: torch.linalg.svdvals(m.users.weight.data),
    "rows": lambda m: [*m.users.weight.data],
    "norm": lambda m: m.users.weight.norm().item(),
    "of a clone": lambda m: m.users.weight.detach().clone().mean(),
    "mask of rows": lambda m: m.users.weight.grad.mul_(torch.ones(len(m.users.weight.grad), 1)),
    "own rows": lambda m: m.users.weight.data[torch.arange(len(m.users.weight.data)) < 1],
    "plain module": lambda m: nn.Embedding.from_pretrained(m.users.weight)(torch.zeros(2, dtype=torch.long)),
    "of its data": lambda m: nn.Embedding.from_pretrained(m.users.weight.data)(torch.zeros(2, dtype=torch.long)),
    "plain bags": lambda m: nn.EmbeddingBag.from_pretrained(m.items.weight)(torch.zeros(1, 2, dtype=torch.long)),
    "plain parameter": lambda m: nn.functional.linear(torch.ones(3, 8), nn.Parameter(m.users.weight)),
}
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "normalized": lambda m: m.users.weight.data.copy_(nn.functional.normalize(m.users.weight.data)),
    "norms": lambda m: m.users.weight.data.div_(m.users.weight.data.norm(dim=1, keepdim=True)),
    "centred": lambda m: m.users.weight.grad.sub_(m.users.weight.grad.mean(1, keepdim=True)),
    "clipped": lambda m: m.users.weight.grad.div_(m.users.weight.grad.norm(dim=-1, keepdim=True).clamp(min=1)),
    "elements": lambda m: m.users.weight.data.masked_fill_(m.users.weight.data > 0.1, 0.1).neg_(),
    "copies": lambda m: (torch.zeros_like(m.users.weight.grad).mean(), m.users.weight.data.to(torch.float64).half()),
    "where": lambda m: m.users.weight.data[m.users.weight.data.norm(dim=1) > 2].shape,
}


def said_of(looks: str, grad: bool) -> list[str]:
    """What nothing was said of."""
    model, quiet = model_of("cut"), []
    for name, look in (SEEN if looks == "seen" else OF_ROWS).items():
        seen_part._said.clear()
        with Said() as said, torch.set_grad_enabled(grad):
            look(model.module)
        if not any("is of this rank's part of it" in text for text in said.texts):
            quiet.append(name)
    return quiet


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_made_of_several_rows_or_of_cut_ones_says_so(grad: bool) -> None:
    """Items were scored, and columns centred, by each rank's own rows, in silence."""
    assert run_ranks(2, said_of, "seen", grad) == [[], []]


HOOKS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "first rows": lambda p, m: p.register_hook(lambda g: g.index_fill(0, torch.arange(2), 0.0)),
    "norm": lambda p, m: p.register_hook(lambda g: g / (1 + g.norm())),
    "first rows of the sum": lambda p, m: p.register_post_accumulate_grad_hook(lambda p: p.grad.__setitem__(0, 0.0)),
    "each element": lambda p, m: p.register_hook(lambda g: g.clamp(-1, 1) * 0.5),
    "rows of the whole": lambda p, m: p.register_hook(lambda g: g * m),
}


def said_in_hooks() -> list[bool | str]:
    """Whether anything was; or the error."""
    found: list[bool | str] = []
    for hang in HOOKS.values():
        model = model_of("cut")
        hang(model.module.users.weight, torch.ones(11, 1))
        seen_part._said.clear()
        with Said() as said:
            try:
                loss_of(model, batch(model.env.rank)).backward()
            except dmp.ShardError as error:
                found.append(str(error))
                break
        found.append(any("gradient of table 'users.weight' is of this rank's part" in text for text in said.texts))
    return found


def test_what_hooks_make_of_a_part_of_a_gradient_says_so() -> None:
    """They froze rows, by numbers that are other rows' on each rank, in silence."""
    for *told, error in run_ranks(2, said_in_hooks):
        assert told == [True, True, True, False] and "mul: this rank has a part of shape" in error


def test_what_is_done_to_whole_rows_says_nothing() -> None:
    assert run_ranks(2, said_of, "rows", False) == [[*OF_ROWS]] * 2


def asked_for_a_shape() -> list[bool]:
    model = model_of("cut")
    dmp.ranks.say_once.cache_clear()
    with Said() as said:
        shapes = [model.module.users.weight.shape[0], model.module.users.weight.size(0)]
        next(model.parameters()).numel()
    assert shapes[0] == shapes[1] and model.module.users.num_embeddings == 11
    return [text.startswith("a script asks a table's weight for its shape") for text in said.texts]


def test_a_shape_that_a_script_reads_is_said_to_be_of_the_part() -> None:
    assert run_ranks(2, asked_for_a_shape) == [[True], [True]]


def compared() -> list[str]:
    model, net = model_of("cut"), Net()
    net.load_state_dict(full_state_dict(model))
    with Said() as said:
        seen_part._said.clear()
        dmp.verify(model, net, (batch(model.env.rank),))
    return [text for text in said.texts if "rank's part" in text]


def test_what_compares_gradients_asks_as_itself() -> None:
    """It hid what was to be said of a script's own looks afterwards."""
    assert run_ranks(2, compared) == [[], []]


def accumulated() -> list[str]:
    model = model_of("cut")
    with Said() as said, FlopCounterMode(display=False):
        seen_part._said.clear()
        loss_of(model, batch(model.env.rank)).backward()
    return [text for text in said.texts if "rank's part" in text]


def test_a_second_backward_adds_in_silence_where_a_mode_counts_operations() -> None:
    assert run_ranks(2, accumulated) == [[], []]


def wrong_shapes() -> str:
    model = model_of("cut")
    with pytest.raises(dmp.ShardError, match="copy_: this rank has a part of shape") as error:
        model.module.users.weight.data.copy_(torch.ones(11, 8))
    with pytest.raises(dmp.ShardError, match="a part of shape"), torch.no_grad():
        model.module.users.weight.copy_(torch.ones(11, 8))
    with pytest.raises(dmp.ShardError, match="embedding: this rank has a part of shape"):
        nn.functional.embedding(torch.tensor([9, 10]), model.module.users.weight.data)
    own = model.module.users.weight.detach().clone()
    own[0] = 0.0  # of a copy of its own
    with pytest.raises(dmp.ShardError, match="of the gradient of table 'users"):
        model.module.users.weight.grad.mul_(torch.ones(11, 1))
    return str(error.value)


def test_values_of_the_whole_are_told_to_come_by_load_state_dict() -> None:
    for told in run_ranks(2, wrong_shapes):
        assert "load_state_dict takes whole tables" in told


DRAWS: dict[str, Callable[[Any], Any]] = {
    "noise": lambda p: p.grad.add_(torch.randn_like(p.grad)),
    "uniform": lambda p: p.grad.mul_(torch.rand_like(p.grad * 2)),
    "mask": lambda p: p.grad.mul_(torch.bernoulli(torch.sigmoid(p.grad))),
    "given": lambda p: p.grad.normal_(0, 0.1, generator=torch.Generator().manual_seed(2)),
    "uniform in place": lambda p: p.grad.uniform_(-1, 1),
}


def drawn() -> list[torch.Tensor]:
    made = []
    model = model_of("cut")
    for draw in DRAWS.values():
        torch.manual_seed(1)
        for parameter in model.parameters():
            draw(parameter)
        made += [p.grad.clone() for n, p in model.named_parameters() if n.startswith("o") and p.grad is not None]
        made.append(torch.rand(()))
    model.module.users.weight.data.normal_()
    made.append(torch.rand(()))
    whole = full_state_dict(model)["users.weight"]
    noise = torch.randn_like(model.module.users.weight)
    made.append(torch.rand(()))
    model.module.users.weight.data.copy_(noise)
    drawn_anew = full_state_dict(model)["users.weight"]
    assert len(torch.cat([whole, drawn_anew]).unique()) == 2 * whole.numel()
    return made


def test_noise_on_gradients_is_the_same_on_copies_and_another_on_each_part() -> None:
    """Parts of other sizes left the generators apart: copies of dense weights drifted, in silence."""
    one, other = run_ranks(2, drawn)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def compiled_by_hand() -> tuple[float, list[str]]:
    model, net = model_of("cut"), model_of("cut")
    seen_part._said.clear()

    def update(weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return weight - (0.1 * grad).clamp(-1, 1)

    quick = torch.compile(update, backend="aot_eager")
    with Said() as said, torch.no_grad():
        for one, other in zip(model.parameters(), net.parameters(), strict=True):
            one.copy_(quick(one, one.grad))
            other.copy_(update(other, other.grad))  # type: ignore[arg-type]
    found, wanted = full_state_dict(model), full_state_dict(net)
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted), said.texts


@pytest.mark.slow  # torch imports its compiler, on each rank
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_takes_it() -> None:
    """torch.compile ended in "Multiple dispatch failed" at a tensor of another class."""
    for difference, told in run_ranks(2, compiled_by_hand):
        assert difference < 1e-7 and not told
