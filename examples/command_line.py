"""What the examples' command lines share: options with their defaults shown, and mistakes said once, in one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from launch import fail


class Parser(argparse.ArgumentParser):
    """Says what is wrong on rank 0 alone."""

    def __init__(self, description: str, epilog: str) -> None:
        super().__init__(description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        fail(f"{message} (see --help)")

    def options(self, title: str) -> Callable[..., None]:
        """A function (name, help, **settings) that adds an option to a new group."""
        group = self.add_argument_group(title)

        def add(name: str, help: str, **settings: object) -> None:
            if settings.get("default") is not None:
                help += " (default: %(default)s)"
            group.add_argument(name, help=help, **settings)  # type: ignore[arg-type]

        return add


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def mesh_shape(text: str) -> list[int]:
    return [positive(word) for word in text.split("x")]


def names(text: str) -> list[str]:
    return text.split(",")


positive.__name__ = "whole number"  # argparse shows these names in its errors
mesh_shape.__name__ = "mesh shape"
