"""The errors a user can meet. Each says what was expected, what came, where, and what to do."""

from __future__ import annotations


class DmpError(Exception):
    """Base of every error raised on purpose by this project."""


class PlanError(DmpError, ValueError):
    """A plan that does not fit its module or mesh, or a module that fits no plan.

    Attributes:
        table: fully-qualified parameter name the error is about, or None.
        rank: table rank (see `ShardingEnv.table_rank`) that cannot hold it, or None.
        bytes_short: bytes missing on that rank, or None.
    """

    def __init__(
        self, message: str, *, table: str | None = None, rank: int | None = None, bytes_short: int | None = None
    ) -> None:
        super().__init__(message)
        self.table = table
        self.rank = rank
        self.bytes_short = bytes_short


class ShardError(DmpError, ValueError):
    """A module, optimizer or layout that a sharder cannot run as asked."""


class InputError(DmpError, ValueError):
    """A batch that a sharded module cannot look up; names feature, value and rank, and is raised on every rank."""


class CheckpointError(DmpError, RuntimeError):
    """A state or checkpoint that does not fit the model; the model is unchanged."""


class RanksError(CheckpointError):
    """Ranks that are in different calls, each of which waits for the others. A `CheckpointError` too: saves meet it."""
