"""Writes click logs in the Criteo format with a planted signal, so that the best AUC that any model can reach is known.

Categories are skewed (Zipf), some fields are empty. A line's label is drawn from the probability sigmoid(score), where
the score adds an effect of each category, of the integers, and of two pairs of categories. Beside the file lies a small
JSON with the AUC and log loss that those true probabilities themselves reach on the held-out lines: no model does
better but by luck.

    python examples/dlrm/generate.py clicks.tsv.gz --lines 150000
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from criteo import HELD_OUT, NUM_DENSE, NUM_SPARSE, is_held_out
from metrics import compute_metrics
from tqdm import tqdm

CARDINALITIES = np.geomspace(4, 20_000, NUM_SPARSE).astype(int)[np.argsort(np.arange(NUM_SPARSE) * 7 % NUM_SPARSE)]
_BLOCK_LINES = 10_000
_VERSION = 1  # goes up when the same seed gives other lines


@dataclass(frozen=True)
class Truth:
    """What is known of a generated file."""

    version: int
    """Of the planted signal: a file of another is written anew."""
    lines: int
    seed: int
    click_rate: float
    held_out: float
    held_out_lines: int
    best_auc: float
    """AUC of the true probabilities on the held-out lines."""
    best_log_loss: float
    num_bytes: int = 0
    """Of all lines, uncompressed; 0 where an earlier version does not say."""


class PlantedSignal:
    """The click model that lines are drawn from.

    The signal sits where a model can learn it from so many lines: wide tables (many rare categories) get small effects.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self.popularity = [1 / np.arange(2, n + 2) ** 1.4 for n in CARDINALITIES]
        self.popularity = [p / p.sum() for p in self.popularity]
        self.empty_category = rng.permutation(np.linspace(0, 0.4, NUM_SPARSE))
        self.empty_integer = rng.permutation(np.linspace(0, 0.4, NUM_DENSE))
        strength = np.select([CARDINALITIES < 100, CARDINALITIES < 1000], [0.45, 0.1], 0.03)
        self.effects = [rng.normal(0, s, n) for s, n in zip(strength, CARDINALITIES, strict=True)]
        narrow = np.argsort(CARDINALITIES)[:4]
        self.pairs = [
            (a, b, rng.normal(0, 0.7, CARDINALITIES[a]), rng.normal(0, 0.7, CARDINALITIES[b]))
            for a, b in (narrow[:2], narrow[2:])
        ]
        self.location, self.scale = rng.uniform(0.5, 3, NUM_DENSE), rng.uniform(0.4, 1.2, NUM_DENSE)
        self.slopes = rng.permutation(np.repeat([0.25, -0.25, 0.0], [3, 3, NUM_DENSE - 6]))
        self.names = [_distinct_hex(rng, n) for n in CARDINALITIES]

    def lines(self, num: int, rng: np.random.Generator) -> tuple[list[bytes], np.ndarray, np.ndarray]:
        """Draws lines: (their bytes without line ends, labels (num,), scores (num,))."""
        ids = np.stack([rng.choice(len(p), num, p=p) for p in self.popularity])  # (26, num)
        no_category = rng.random((NUM_SPARSE, num)) < self.empty_category[:, None]
        logs = self.location[:, None] + self.scale[:, None] * rng.normal(size=(NUM_DENSE, num))
        integers = np.maximum(np.expm1(logs).astype(np.int64), -1)
        no_integer = rng.random((NUM_DENSE, num)) < self.empty_integer[:, None]

        score = np.full(num, -1.3)
        for i, effect in enumerate(self.effects):
            score += np.where(no_category[i], 0.0, effect[ids[i]])
        for a, b, effect_a, effect_b in self.pairs:
            score += np.where(no_category[a] | no_category[b], 0.0, effect_a[ids[a]] * effect_b[ids[b]])
        score += self.slopes @ np.where(no_integer, 0.0, np.log1p(np.maximum(integers, 0)))
        labels = rng.random(num) < 1 / (1 + np.exp(-score))

        columns = [np.where(labels, "1", "0").tolist()]
        columns += [np.where(no_integer[i], "", integers[i].astype(str)).tolist() for i in range(NUM_DENSE)]
        columns += [np.where(no_category[i], "", self.names[i][ids[i]]).tolist() for i in range(NUM_SPARSE)]
        return ["\t".join(fields).encode() for fields in zip(*columns, strict=True)], labels, score


def _distinct_hex(rng: np.random.Generator, num: int) -> np.ndarray:
    """(num,) distinct strings of 8 hexadecimal digits."""
    values = np.unique(rng.integers(0, 1 << 32, 2 * num + 8))
    return np.array([f"{value:08x}" for value in rng.permutation(values)[:num]])


def generate(path: str, lines: int, seed: int = 0, *, progress: bool = False) -> Truth:
    """Writes `lines` lines to `path`, and what is known of them to `path`.json; the same bytes for the same seed.

    Args:
        path: gzip when it ends in .gz.
        lines: how many.
        seed: of the planted signal and of the lines.
        progress: show a bar.
    """
    if lines < 1:
        raise ValueError(f"lines must be at least 1, got {lines}")
    signal = PlantedSignal(seed)
    rng = np.random.default_rng([seed, 2])
    scores, labels = [], []  # of the held-out lines
    clicks, num_bytes = 0, 0
    partial = f"{path}.{os.getpid()}.{secrets.token_hex(8)}.partial"
    try:
        with open(partial, "wb") as raw, tqdm(total=lines, unit=" lines", desc="generate", disable=not progress) as bar:
            out: IO[bytes] | gzip.GzipFile = gzip.GzipFile("", "wb", 6, raw, mtime=0) if path.endswith(".gz") else raw
            for done in range(0, lines, _BLOCK_LINES):
                text, label, score = signal.lines(min(_BLOCK_LINES, lines - done), rng)
                num_bytes += out.write(b"\n".join(text) + b"\n")
                clicks += int(label.sum())
                held_out = _held_out(text)
                scores.append(score[held_out])
                labels.append(label[held_out])
                bar.update(len(text))
            if out is not raw:
                out.close()
        best = compute_metrics(torch.from_numpy(np.concatenate(scores)), torch.from_numpy(np.concatenate(labels)))
        truth = Truth(
            _VERSION, lines, seed, clicks / lines, HELD_OUT, best.num_rows, best.auc, best.log_loss, num_bytes
        )
        with open(truth_path(path), "w") as file:
            json.dump(asdict(truth), file, indent=1)
            file.write("\n")
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    return truth


def _held_out(text: list[bytes]) -> np.ndarray:
    ends = np.cumsum([len(line) for line in text])
    return is_held_out(b"".join(text), np.r_[0, ends[:-1]], ends, HELD_OUT)


def truth_path(path: str) -> str:
    return f"{path}.json"


def read_truth(path: str) -> Truth | None:
    """What is known of the file at `path`; None for a file that was not generated."""
    if not os.path.exists(truth_path(path)):
        return None
    try:
        with open(truth_path(path)) as file:
            return Truth(**json.load(file))
    except (TypeError, ValueError):  # another's file of that name
        return None


GENERATED = str(Path(__file__).resolve().parents[2] / ".demo" / "clicks.tsv")
GENERATED_LINES = 150_000
"""What the example trains on when it is given no file."""


def ensure_generated(path: str, lines: int, seed: int = 0, *, progress: bool = False) -> Truth:
    """Generates the file unless it is there already; a file that was not generated is never written over."""
    if os.path.exists(path):
        truth = read_truth(path)
        if truth is None:
            raise ValueError(f"{path} exists and was not generated (no {truth_path(path)} beside it): not written over")
        if truth.num_bytes and not path.endswith(".gz") and os.path.getsize(path) != truth.num_bytes:
            raise ValueError(f"{path} has been changed since it was generated: not written over")
        if (truth.version, truth.lines, truth.seed) == (_VERSION, lines, seed):
            return truth
    elif os.path.lexists(truth_path(path)) and read_truth(path) is None:
        raise ValueError(f"{truth_path(path)} exists and was not generated: not written over")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return generate(path, lines, seed, progress=progress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="file to write; gzip when it ends in .gz")
    parser.add_argument("--lines", type=int, default=GENERATED_LINES, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default %(default)s)")
    args = parser.parse_args()
    try:
        truth = ensure_generated(args.path, args.lines, args.seed, progress=True)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    print(f"{args.path}: {truth.lines:,} lines, {truth.click_rate:.1%} clicks, best reachable AUC {truth.best_auc:.4f}")


if __name__ == "__main__":
    main()
