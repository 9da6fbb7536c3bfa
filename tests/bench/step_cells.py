"""The cells of the step's matrix: which tables, batches and layouts TorchRec and ours are compared on.

Each kind of tables and layout meets each number of ranks, bag and optimizer. Batch size, dim and skew of the ids are
dealt out over these cells by a seeded draw, in which every two values of two properties meet somewhere: the whole
product would take hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from tests.bench.workload import Workload, criteo_rows

KINDS = {  # name -> (layout, pooled)
    "table-wise": ("table_wise", True),
    "row-wise": ("row_wise", True),
    "column-wise": ("column_wise", True),
    "mixed": ("mixed", True),
    "table-row-wise": ("table_row_wise", True),  # two hosts of two ranks
    "sequence, table-wise": ("table_wise", False),
    "sequence, row-wise": ("row_wise", False),
}
OPTIMIZERS = {"rowwise_adagrad": "Adagrad", "sgd": "SGD"}
RANKS, BATCHES, BAGS = (2, 4), (512, 2048), (1, 32)
DIMS = (16, 64, 64, 128)  # half of the cells have 64
ROWS = criteo_rows(100_000)
SEED = 1809


@dataclass(frozen=True)
class Cell:
    """A step that is timed.

    Args:
        kind: of `KINDS`.
        fbgemm: whether our side may use FBGEMM's kernels.
    """

    kind: str
    ranks: int
    work: Workload
    fbgemm: bool = True

    @property
    def layout(self) -> str:
        """Its name in `make_plan`."""
        return KINDS[self.kind][0]

    @property
    def hosts(self) -> int:
        """On which the ranks are said to be."""
        return 2 if self.layout == "table_row_wise" else 1

    @property
    def axes(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Shape and names of our mesh."""
        if self.hosts > 1:
            return (self.hosts, self.ranks // self.hosts), ("host", "local")
        return (self.ranks,), ("dp",)

    @property
    def name(self) -> str:
        """All that tells it from others."""
        work = self.work
        bag = "1 id" if work.max_bag == 1 else f"0..{work.max_bag} ids"
        parts = [self.kind, f"W {self.ranks}", f"B {work.batch_size}", bag, f"dim {work.dim}"]
        parts += ["Zipf"] * work.skewed + [OPTIMIZERS[work.optimizer]] + ["no FBGEMM"] * (not self.fbgemm)
        return ", ".join(parts)


def _dealt(seed: int) -> Iterator[Cell]:
    draw = Random(seed)
    for (kind, (layout, pooled)), ranks, bag, optimizer in product(KINDS.items(), RANKS, BAGS, OPTIMIZERS):
        batch, dim, skewed = draw.choice(BATCHES), draw.choice(DIMS), draw.random() < 0.5
        if layout == "table_row_wise" and ranks == 2:
            continue
        if not pooled and bag > 1:
            batch, dim = min(BATCHES), min(dim, 64)  # each id has a row of results
        yield Cell(kind, ranks, Workload(ROWS, dim, batch, bag, pooled, skewed, optimizer))


MATRIX = tuple(_dealt(SEED))
WITHOUT_FBGEMM = tuple(
    Cell(cell.kind, cell.ranks, cell.work, False)
    for cell in MATRIX
    if cell.ranks == 2 and cell.kind in ("table-wise", "row-wise", "sequence, table-wise") and cell.work.max_bag == 1
)
CELLS = tuple(sorted(MATRIX + WITHOUT_FBGEMM, key=lambda cell: (cell.ranks, cell.work.dim)))  # these share weights
QUICK = CELLS[3::5]  # some of each kind
