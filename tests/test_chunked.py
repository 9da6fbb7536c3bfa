"""`ChunkedTensor`: what it is made of, what torch may do with it, and torch's distributed checkpoint of it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dmp import ChunkedTensor, ShardError
from dmp import chunked as module
from dmp.chunked import copy_overlap, overlap_numel

WHOLE = torch.arange(48.0).view(6, 8)


def cut(*boxes: tuple[int, int, int, int], whole: torch.Tensor = WHOLE) -> ChunkedTensor:
    """Pieces of `whole`: (row, column, rows, columns) each, copied."""
    chunks = [whole[r : r + n, c : c + w].clone() for r, c, n, w in boxes]
    return ChunkedTensor(whole.shape, chunks, [(r, c) for r, c, _, _ in boxes])


def test_looks_like_the_whole() -> None:
    t = cut((0, 0, 3, 8), (3, 4, 3, 4))
    assert t.shape == (6, 8) and t.dtype == torch.float32 and t.device.type == "cpu" and t.dim() == 2
    assert [tuple(c.shape) for c in t.chunks] == [(3, 8), (3, 4)] and t.offsets == [(0, 0), (3, 4)]
    assert repr(t) == "ChunkedTensor(size=(6, 8), dtype=torch.float32, chunks=[(0, 0)+(3, 8), (3, 4)+(3, 4)])"


def test_without_chunks() -> None:
    t = ChunkedTensor((6, 8), [], [], torch.bfloat16, "meta")
    assert t.shape == (6, 8) and t.dtype == torch.bfloat16 and t.device.type == "meta" and list(t.pieces()) == []


@pytest.mark.parametrize(
    ("chunks", "offsets", "message"),
    [
        ([torch.zeros(3, 8)], [(4, 0)], "is not inside"),
        ([torch.zeros(3, 8)], [(-1, 0)], "is not inside"),
        ([torch.zeros(3)], [(0,)], "is not inside"),
        ([torch.zeros(3, 8)], [], "one offset for each"),
        ([torch.zeros(1, 8), torch.zeros(1, 8).double()], [(0, 0), (1, 0)], "several dtypes"),
    ],
)
def test_bad_chunks(chunks: list[torch.Tensor], offsets: Sequence[Sequence[int]], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        ChunkedTensor((6, 8), chunks, offsets)


def test_fill_from_a_whole_tensor_and_from_pieces() -> None:
    t = cut((0, 0, 3, 8), (3, 4, 3, 4), whole=torch.zeros(6, 8))
    t.fill_from(WHOLE)
    assert torch.equal(t.chunks[1], WHOLE[3:, 4:])
    columns = cut((0, 0, 6, 3), (0, 3, 6, 5), whole=-WHOLE)
    t.copy_(columns)
    assert torch.equal(t.chunks[0], -WHOLE[:3])


def test_fill_is_refused() -> None:
    t = cut((0, 0, 3, 8))
    with pytest.raises(ShardError, match="expected size"):
        t.fill_from(torch.zeros(8, 6))
    with pytest.raises(ShardError, match="come from another plan"):
        t.fill_from(cut((0, 0, 3, 4)))
    assert torch.equal(t.chunks[0], WHOLE[:3])


def test_a_whole_tensor_takes_what_is_all_there() -> None:
    """As TorchRec's `state_dict_gather` has it: `whole.copy_(of_the_state_dict)`."""
    whole = torch.zeros(6, 8)
    whole.copy_(cut((0, 0, 3, 8), (3, 0, 3, 8)))
    torch.testing.assert_close(whole, WHOLE)
    with pytest.raises(ShardError, match=r"this rank's chunks alone: full_state_dict\(model\) gives plain tensors"):
        whole.zero_().copy_(cut((0, 0, 3, 8)))
    assert not whole.any()


def test_operations_of_a_state_dict() -> None:
    t = cut((0, 0, 3, 8), (3, 4, 3, 4))
    assert t.detach().chunks[0].data_ptr() == t.chunks[0].data_ptr()
    for other in (t.clone(), copy.deepcopy(t), torch.zeros_like(t)):
        assert isinstance(other, ChunkedTensor) and other.offsets == t.offsets
        assert other.chunks[0].data_ptr() != t.chunks[0].data_ptr()
    assert t.to(torch.float64).chunks[1].dtype == torch.float64
    assert ChunkedTensor((6, 8), [], []).to(torch.float64).dtype == torch.float64
    assert t.new_empty((2, 2)).shape == (2, 2)
    with pytest.raises(NotImplementedError, match=r"save_checkpoint\(path, model, optimizer\), .*full_state_dict"):
        t.sum()


def test_operations_of_lists() -> None:
    """As averages of weights make them of state dicts, of chunks and plain tensors in one list."""
    mean, now = ([cut((0, 0, 3, 8), whole=WHOLE * f), WHOLE[0] * f] for f in (1.0, 3.0))
    torch._foreach_lerp_(mean, now, weight=0.5)
    torch._foreach_add_(mean, now, alpha=2.0)
    torch._foreach_mul_(mean, [0.5, 0.25])
    torch._foreach_copy_(now, mean)
    for each in (mean, now):
        assert torch.equal(each[0].chunks[0], WHOLE[:3] * 4) and torch.equal(each[1], WHOLE[0] * 2)  # type: ignore[attr-defined]
    assert torch.equal(torch._foreach_neg(mean)[0].chunks[0], WHOLE[:3] * -4)  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="does not work on a ChunkedTensor"):
        torch._foreach_norm(mean)


def test_pieces_are_not_pickled_and_can_be_copied() -> None:
    t = cut((0, 0, 3, 8), (3, 4, 3, 4))
    writers = (pickle.dumps, lambda t: torch.save({"t": t}, io.BytesIO()), lambda t: t.numpy(), lambda t: t.tolist())
    for write in writers:
        with pytest.raises(ShardError, match=r"chunks alone.*save_checkpoint.*full_state_dict"):
            write(t)
    back = copy.deepcopy({"t": t})["t"]
    assert back.offsets == t.offsets and all(torch.equal(a, b) for a, b in zip(back.chunks, t.chunks, strict=True))


def test_pieces_are_small_and_cover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 64)  # two rows of eight
    t = cut((0, 0, 3, 8), (3, 4, 3, 4))
    pieces = [(offset, tuple(piece.shape)) for offset, piece in t.pieces()]
    assert pieces == [((0, 0), (2, 8)), ((2, 0), (1, 8)), ((3, 4), (3, 4))]
    experts = torch.arange(2 * 5 * 8.0).view(2, 5, 8)  # a row of 160 bytes
    deep = list(ChunkedTensor((4, 5, 8), [experts], [(2, 0, 0)]).pieces())
    assert [offset for offset, _ in deep] == [(i, j, 0) for i in (2, 3) for j in (0, 2, 4)]
    assert [piece.shape[1] for _, piece in deep] == [2, 2, 1] * 2
    whole = torch.zeros(2, 5, 8)
    for (i, j, _), piece in deep:
        whole[i - 2 : i - 1, j : j + piece.shape[1]] = piece
    assert torch.equal(whole, experts)
    assert list(ChunkedTensor((), [torch.tensor(1.0)], [()]).pieces()) == [((), torch.tensor(1.0))]
    assert list(ChunkedTensor((0, 4), [torch.zeros(0, 4)], [(0, 0)]).pieces()) == []


def test_torch_checkpoint_reads_other_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    with pytest.warns(UserWarning, match="single process"):
        save({"t": cut((0, 0, 3, 8), (3, 0, 3, 3), (3, 3, 3, 5))}, checkpoint_id=tmp_path)
    columns = cut((0, 0, 6, 5), (2, 5, 4, 3), whole=torch.zeros(6, 8))
    plain = torch.zeros(6, 8)
    for target in (columns, plain):
        with pytest.warns(UserWarning, match="single process"):
            load({"t": target}, checkpoint_id=tmp_path)
    assert torch.equal(plain, WHOLE)
    assert torch.equal(columns.chunks[0], WHOLE[:, :5]) and torch.equal(columns.chunks[1], WHOLE[2:, 5:])


def test_overlap() -> None:
    assert overlap_numel((3, 3), (0, 0), (3, 3), (1, 2)) == 2
    assert overlap_numel((3,), (0,), (3,), (3,)) == 0
    target = torch.zeros(3, 3)
    copy_overlap(target, (0, 0), torch.ones(3, 3), (1, 2))
    assert target.sum() == 2 and target[1, 2] == 1 and target[2, 2] == 1


def test_states_in_one_layout_are_compared_chunk_by_chunk() -> None:
    def held(*values: float, at: Sequence[tuple[int, int]] = ((0, 0), (2, 0))) -> ChunkedTensor:
        return ChunkedTensor((4, 2), [torch.full((1, 2), value) for value in values], at[: len(values)])

    torch.testing.assert_close(held(1, 2), held(1, 2), rtol=0, atol=0)
    assert not (held(1, 2) == held(1, 3)).all() and bool((held(1, 2) == held(1, 3)).any())
    assert bool((held() == held()).all()) and (held() == held()).dtype == torch.bool
    assert torch.equal((held(1, 2) * 2).chunks[1], torch.full((1, 2), 4.0))
    for other in (torch.ones(4, 2), held(1), held(1, 2, at=((0, 0), (1, 0)))):
        with pytest.raises(NotImplementedError, match="chunk by chunk"):
            held(1, 2) == other  # noqa: B015
