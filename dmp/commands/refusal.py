"""What is wrong with a command line, or with what it names: one line on stderr and an exit code, no traceback.

Exit codes: 0 for what was done, 1 for what failed, 2 for a command line that cannot be followed (argparse's), 3 where
no plan fits.
"""

from __future__ import annotations

FAILED, WRONG_USE, NO_PLAN = 1, 2, 3


class Refusal(Exception):
    """Ends a command with a message and an exit code."""

    def __init__(self, message: str, code: int = WRONG_USE) -> None:
        super().__init__(message)
        self.code = code


def in_one_line(error: BaseException) -> str:
    """An error's class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
