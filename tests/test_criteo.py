"""The click logs of examples/dlrm: who reads which line, what is said of a malformed one, and the best AUC."""

from __future__ import annotations

import gzip
import os
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "dlrm"))

import criteo
import generate
from criteo import FEATURES, NUM_DENSE, NUM_FIELDS, NUM_SPARSE, Batch, CriteoReader
from metrics import compute_metrics


def line(number: int, label: int | str = 0, categories: list[str] | None = None) -> str:
    """A well-formed line that its first integer tells from all others."""
    integers = [str(number)] + [""] * (NUM_DENSE - 1)
    return "\t".join([str(label), *integers, *(categories or ["0000002a"] * NUM_SPARSE)])


def write(path: Path, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,237 lines of uneven length, with a gzip copy beside."""
    rng = random.Random(0)
    lines = []
    for number in range(1237):
        categories = [rng.choice(["", f"{rng.getrandbits(32):08x}"]) for _ in range(NUM_SPARSE)]
        lines.append(line(number, rng.randint(0, 1), categories))
    path = tmp_path_factory.mktemp("criteo") / "log.tsv"
    write(path.with_suffix(".tsv.gz"), "\n".join(lines) + "\n")
    return write(path, "\n".join(lines) + "\n")


def numbers(batch: Batch) -> list[int]:
    """The line numbers that `line` hid in the first integer."""
    return torch.expm1(batch.dense[:, 0].double()).round().long().tolist()


def test_parses_every_field(tmp_path: Path) -> None:
    integers = ["7", "-2", "", "0", "999999999999999999", *[""] * 8]
    categories = ["", "DEADBEEF", "deadbeef", *["00000000"] * 23]
    path = write(tmp_path / "a", "\t".join(["1", *integers, *categories]))
    (batch,) = CriteoReader(path, 1000, 8, part="all")
    assert batch.labels.tolist() == [1.0]
    expected = torch.tensor([7.0, -2, 0, 0, 999999999999999999] + [0] * 8).double()
    torch.testing.assert_close(batch.dense[0].double(), expected.sign() * expected.abs().log1p())
    assert batch.sparse.keys() == FEATURES
    assert batch.sparse.lengths().tolist() == [0] + [1] * 25
    ids = batch.sparse.to_dict()
    hashed = criteo.hash_to_rows(np.full((1, 26), 0xDEADBEEF, dtype=np.uint64), [1000] * 26)[0]
    assert ids["cat_1"].values().tolist() == [hashed[1]]
    assert ids["cat_2"].values().tolist() == [hashed[2]]
    assert len(set(batch.sparse.values().tolist())) > 20  # one value lands elsewhere in each feature


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.sampled(3)
def test_ranks_partition_every_global_batch(log: Path, num_ranks: int, suffix: str) -> None:
    whole = list(CriteoReader(log, 100, 64, part="all"))
    shares = [
        list(CriteoReader(f"{log}{suffix}", 100, 64, part="all", rank=r, num_ranks=num_ranks)) for r in range(num_ranks)
    ]
    assert sorted(n for batch in whole for n in numbers(batch)) == list(range(1237))
    assert {len(share) for share in shares} == {len(whole)}
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        assert [n for part in parts for n in numbers(part)] == numbers(batch)
        assert torch.equal(torch.cat([part.dense for part in parts]), batch.dense)
        assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels)
        for feature in FEATURES:
            bags = [part.sparse[feature] for part in parts]
            assert torch.equal(torch.cat([bag.values() for bag in bags]), batch.sparse[feature].values())
            assert torch.equal(torch.cat([bag.lengths() for bag in bags]), batch.sparse[feature].lengths())


def test_tiny_windows_and_many_ranks_lose_no_line(tmp_path: Path) -> None:
    path = write(tmp_path / "few", "\n".join(line(n) for n in range(3)))
    for num_ranks in (1, 3, 7, 400):
        read = [
            n
            for r in range(num_ranks)
            for batch in CriteoReader(path, 10, 1, part="all", rank=r, num_ranks=num_ranks)
            for n in numbers(batch)
        ]
        assert sorted(read) == [0, 1, 2]


def test_batches_are_about_as_large_as_asked(log: Path) -> None:
    for part in ("all", "train", "heldout"):
        reader = CriteoReader(log, 100, 50, part=part)
        sizes = [len(batch.labels) for batch in reader]
        assert len(sizes) == reader.num_steps
        assert all(30 < size < 70 for size in sizes[:-1])


def test_held_out_lines_are_the_same_whatever_the_rest(log: Path) -> None:
    def read(part: str, batch_size: int, num_ranks: int) -> Counter[int]:
        return Counter(
            n
            for r in range(num_ranks)
            for batch in CriteoReader(log, 10, batch_size, part=part, rank=r, num_ranks=num_ranks)
            for n in numbers(batch)
        )

    train, heldout = read("train", 64, 1), read("heldout", 64, 1)
    assert train + heldout == Counter(range(1237))
    assert 80 < len(heldout) < 170
    assert read("heldout", 17, 3) == heldout
    assert read("train", 100, 4) == train


@pytest.mark.parametrize("text", ["a\nb\n", "a\r\nb\r\n", "a\r\nb"])
def test_line_ends(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "ends", text.replace("a", line(1)).replace("b", line(2)))
    assert [n for batch in CriteoReader(path, 10, 8, part="all") for n in numbers(batch)] == [1, 2]


MALFORMED = {
    "1\t2": "expected 40 fields separated by tabs, got 2",
    line(1) + "\t": "expected 40 fields separated by tabs, got 41",
    "": "an empty line",
    line(1, 2): "label is '2', expected 0 or 1",
    line(1, ""): "label is '', expected 0 or 1",
    line(1, "01"): "label is '01', expected 0 or 1",
    line(1).replace("\t1\t", "\t1.5\t", 1): "integer 0 of 13 is '1.5', expected a whole number",
    line(1).replace("\t1\t", "\t-\t", 1): "integer 0 of 13 is '-', expected a whole number",
    line(1).replace("\t1\t", "\t1234567890123456789\t", 1): "integer 0 of 13 is '1234567890123456789', expected",
    line(1, 0, ["zzzzzzzz"] + [""] * 25): "category 0 of 26 is 'zzzzzzzz', expected 8 hexadecimal digits",
    line(1, 0, [""] * 25 + ["abc"]): "category 25 of 26 is 'abc', expected 8 hexadecimal digits",
    line(1, 0, [""] * 25 + ["\x00" * 8]): "category 25 of 26 is",
    "x" * 100_000: "no end of line within",
    line(1) + "\x85\x85": "category 25 of 26 is",
}


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_malformed_line_is_named(tmp_path: Path, text: str, suffix: str) -> None:
    lines = [line(n) for n in range(30)]
    lines[20] = text
    path = write(tmp_path / f"bad{suffix}", "\n".join(lines) + "\n")
    errors = []
    for r in range(3):
        try:
            list(CriteoReader(path, 10, 4, part="all", rank=r, num_ranks=3))
        except ValueError as error:
            errors.append(str(error))
    (error,) = errors  # of the one rank whose line it is
    assert error.startswith(f"{path}, line 21: {MALFORMED[text]}")

    readers = [CriteoReader(path, 10, 4, part="all", rank=r, num_ranks=3, on_error="skip") for r in range(3)]
    read = sorted(n for reader in readers for batch in reader for n in numbers(batch))
    assert read == [n for n in range(30) if n != 20]
    assert sum(reader.skipped for reader in readers) == 1


def test_parser_and_explanation_agree() -> None:
    """Every line that `parse` leaves out has a reason in `why_malformed`, and no other has: lines damaged at random."""
    rng = random.Random(0)
    whole = line(12, 1, [f"{rng.getrandbits(32):08x}" for _ in range(NUM_SPARSE)])
    texts = []
    for _ in range(3000):
        characters = list(whole)
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(len(characters))
            characters[at] = rng.choice(
                ["", "\t", "0", "-", "f", "g", "G", "é", "/", ":", "@", "`", " ", "\x00", "\xff"]
            )
        texts.append("".join(characters).encode())
    ends = np.cumsum([len(text) + 1 for text in texts]) - 1
    starts = np.r_[0, ends[:-1] + 1]
    fields = criteo.parse(b"\n".join(texts), starts, ends)
    assert 500 < fields.well_formed.sum() < 2500
    for text, well_formed in zip(texts, fields.well_formed, strict=True):
        if well_formed:
            with pytest.raises(AssertionError):
                criteo.why_malformed(text)
        else:
            assert criteo.why_malformed(text)
    for i, text in enumerate(text for text, ok in zip(texts, fields.well_formed, strict=True) if ok):
        split = text.decode().split("\t")
        assert fields.labels[i] == int(split[0])
        assert fields.dense[i].tolist() == [int(word or 0) for word in split[1 : 1 + NUM_DENSE]]
        assert fields.categories[i].tolist() == [int(word or "0", 16) for word in split[1 + NUM_DENSE :]]


def test_what_is_no_click_log(tmp_path: Path, log: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        CriteoReader(tmp_path / "missing", 10, 8)
    with pytest.raises(IsADirectoryError, match="is a directory"):
        CriteoReader(tmp_path, 10, 8)
    for name in ("empty", "empty.gz"):
        with pytest.raises(ValueError, match="is empty"):
            CriteoReader(write(tmp_path / name, ""), 10, 8)
    compressed = Path(f"{log}.gz").read_bytes()
    cut = tmp_path / "cut.gz"
    cut.write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(ValueError, match=r"cut\.gz: truncated or damaged gzip"):
        list(CriteoReader(cut, 10, 8))
    cut.write_bytes(compressed[:-6] + b"\0" * 6)
    with pytest.raises(ValueError, match=r"cut\.gz: truncated or damaged gzip"):
        list(CriteoReader(cut, 10, 8))


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 0},
        {"rank": 2, "num_ranks": 2},
        {"part": "test"},
        {"on_error": "ignore"},
        {"rows": [1] * 25},
        {"rows": 0},
        {"held_out": 1.5},
    ],
)
def test_settings_are_checked(log: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must"):
        CriteoReader(**{"path": log, "rows": 10, "batch_size": 8, **settings})  # type: ignore[arg-type]


def test_hash_spreads_neighbouring_values() -> None:
    values = np.repeat(np.arange(50_000, dtype=np.uint64)[:, None] * 256, NUM_SPARSE, axis=1)
    ids = criteo.hash_to_rows(values, [1000] * 26)
    assert ids.min() >= 0
    assert ids.max() < 1000
    counts = np.stack([np.bincount(ids[:, f], minlength=1000) for f in range(NUM_SPARSE)])
    assert counts.min() > 15  # of 50 expected
    assert counts.max() < 100
    assert (ids[:, 0] == ids[:, 1]).mean() < 0.01
    assert criteo.hash_to_rows(values[:1], [7] * 26)[0].max() < 7


def test_a_reader_holds_no_more_than_its_window(tmp_path: Path) -> None:
    """What is asked of the file at once does not depend on its size."""
    path = write(tmp_path / "long", "\n".join(line(n) for n in range(20_000)))
    file = criteo.open_bytes(str(path))
    asked = []

    class Watched:
        size = file.size

        def read_at(self, offset: int, size: int) -> bytes:
            asked.append(size)
            return file.read_at(offset, size)

    reader = CriteoReader(path, 10, 100, part="all", rank=1, num_ranks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(criteo, "open_bytes", lambda _: Watched())
        assert sum(len(batch.labels) for batch in reader) > 9_000
    assert max(asked) < reader.window_bytes / 2 + 2 * criteo._MAX_LINE_BYTES


def test_generator_is_deterministic(tmp_path: Path) -> None:
    first = generate.generate(str(tmp_path / "a.tsv"), 2000, seed=3)
    again = generate.generate(str(tmp_path / "b.tsv"), 2000, seed=3)
    packed = generate.generate(str(tmp_path / "c.tsv.gz"), 2000, seed=3)
    other = generate.generate(str(tmp_path / "d.tsv"), 2000, seed=4)
    assert first == again == packed != other
    data = (tmp_path / "a.tsv").read_bytes()
    assert (tmp_path / "b.tsv").read_bytes() == data == gzip.decompress((tmp_path / "c.tsv.gz").read_bytes())
    assert generate.read_truth(str(tmp_path / "a.tsv")) == first
    assert {len(text.split(b"\t")) for text in data.splitlines()} == {NUM_FIELDS}
    assert sorted(os.listdir(tmp_path)) == sorted(
        f"{n}{s}" for n in ("a.tsv", "b.tsv", "c.tsv.gz", "d.tsv") for s in ("", ".json")
    )


def test_generator_writes_over_nothing_that_it_did_not_write(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.tsv", line(1))
    with pytest.raises(ValueError, match="was not generated"):
        generate.ensure_generated(str(path), 10)
    assert path.read_text() == line(1)
    assert generate.ensure_generated(str(tmp_path / "new.tsv"), 1000).lines == 1000
    assert generate.ensure_generated(str(tmp_path / "new.tsv"), 2000).lines == 2000


def test_best_auc_is_that_of_the_true_probabilities(tmp_path: Path) -> None:
    """Drawn labels again and again from the scores reach the AUC that the file's own labels are said to reach."""
    truth = generate.generate(str(tmp_path / "log.tsv"), 30_000)
    rng = np.random.default_rng(7)
    _, _, scores = generate.PlantedSignal(0).lines(10_000, rng)
    drawn = [
        compute_metrics(torch.from_numpy(scores), torch.from_numpy(rng.random(10_000) < 1 / (1 + np.exp(-scores)))).auc
        for _ in range(5)
    ]
    assert abs(truth.best_auc - np.mean(drawn)) < 0.02
    held_out = sum(len(batch.labels) for batch in CriteoReader(tmp_path / "log.tsv", 10, 512, part="heldout"))
    assert held_out == truth.held_out_lines
    blurred = scores + rng.normal(0, 1, len(scores))
    labels = torch.from_numpy(rng.random(len(scores)) < 1 / (1 + np.exp(-scores)))
    assert (
        compute_metrics(torch.from_numpy(blurred), labels).auc < compute_metrics(torch.from_numpy(scores), labels).auc
    )


def test_auc_and_log_loss() -> None:
    from torchmetrics.functional.classification import binary_auroc

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5000, generator=generator).mul(8).round().div(8)  # many ties
    labels = (torch.rand(5000, generator=generator) < logits.sigmoid()).float()
    metrics = compute_metrics(logits, labels)
    assert metrics.num_rows == 5000
    assert metrics.auc == pytest.approx(binary_auroc(logits.sigmoid(), labels.long()).item(), abs=1e-6)
    wins = (logits[labels == 1, None] - logits[None, labels == 0]).sign().double().mean()
    assert metrics.auc == pytest.approx(0.5 + wins.item() / 2, abs=1e-12)
    shuffled = torch.randperm(5000, generator=generator)
    assert compute_metrics(logits[shuffled], labels[shuffled]).auc == metrics.auc
    assert metrics.log_loss == pytest.approx(
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).item(), abs=1e-6
    )
