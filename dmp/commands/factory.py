"""What a user names on a command line as `my_pkg.models:make_model`: imported, and made.

A model is made under `torch.device("meta")`, so that tables of any size cost nothing. A factory that reads values is
called on the CPU (`--build-on cpu`), whose memory must then hold the model; so it must where one names a device itself.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmp.commands.refusal import FAILED, Refusal, in_one_line
from dmp.foreign import type_name

_FORM = "expected package.module:name, as my_pkg.models:make_model"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Arguments from which `made_module` makes the model."""
    about = "package.module:name of a function or class without arguments that gives an nn.Module, or of a module"
    parser.add_argument("model", metavar="MODULE:NAME", help=f"{about}; looked for in the current directory too")
    parser.add_argument(
        "--build-on",
        default="meta",
        choices=("meta", "cpu"),
        help="device under which the model is made; meta takes no memory (default: %(default)s)",
    )


def imported(path: str, what: str) -> Any:
    """The object at `package.module:name`; modules are looked for in the current directory too.

    Args:
        what: it is for, for errors: "the model".

    Raises:
        Refusal: no such module or name, or an import that fails.
    """
    module_name, _, name = path.partition(":")
    if module_name.endswith(".py"):
        stem = Path(module_name).stem
        raise Refusal(f"{what}: {_FORM}; {module_name} is a file: from its folder, {stem}:{name or 'make_model'}")
    if not name or not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        raise Refusal(f"{what}: {_FORM}; got {path!r}")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            text = f"there is no module {error.name!r}; looked in {Path.cwd()} and on Python's path"
            raise Refusal(f"{what}: {text}") from None
        raise Refusal(f"{what}: importing {module_name!r} raises {_told(error)}", FAILED) from error
    except (Exception, SystemExit) as error:
        raise Refusal(f"{what}: importing {module_name!r} raises {_told(error)}", FAILED) from error
    for part in name.split("."):
        if not hasattr(found, part):
            public = [each for each in dir(found) if not each.startswith("_")]
            close = get_close_matches(part, public, n=3, cutoff=0.4) or public[:8]
            raise Refusal(f"{what}: {module_name!r} has no {part!r}; it has {', '.join(close) or 'no public name'}")
        found = getattr(found, part)
    return found


def made(path: str, what: str) -> Any:
    """What a function or class without arguments makes, or an object that is no callable as it is.

    Raises:
        Refusal: what `imported` raises, a callable that needs arguments, or one that raises.
    """
    found = imported(path, what)
    return _called(found, path, what) if callable(found) else found


def made_module(path: str, build_on: str) -> nn.Module:
    """The model that a function or class without arguments makes, or a module that is there already.

    Args:
        build_on: device type under which it is made; `"meta"` takes no memory.

    Raises:
        Refusal: what `imported` raises, a factory that raises or needs arguments, or what is no `nn.Module`.
    """
    found = imported(path, "the model")
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise Refusal(f"the model: {path} is {_kind(found)}; expected a function, a class or an nn.Module")
    try:
        module = _called_on(build_on, found, path)
    except Refusal as refusal:
        if build_on != "meta" or refusal.code != FAILED:
            raise
        text = f"{refusal}. It was called under torch.device('meta'), where tensors have no values: if that is why, "
        text += "build it for real with --build-on cpu, at a size that memory holds; where memory is short, it names a "
        raise Refusal(text + "device of its own: leave that to the caller", FAILED) from refusal
    if not isinstance(module, nn.Module):
        raise Refusal(f"the model: {path}() gives {_kind(module)}; expected an nn.Module")
    return module


def _called_on(device: str, factory: Any, path: str) -> Any:
    """What a factory makes under a device. A package that it imports, and that reads values then, comes first."""
    imported_here: set[str] = set()
    while True:
        try:
            with torch.device(device):
                return _called(factory, path, "the model")
        except Refusal as refusal:
            name = _being_imported(refusal.__cause__)
            if name is None or name in imported_here:
                raise
            imported_here.add(name)
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise Refusal(f"the model: {path}() imports {name!r}, which raises {_told(error)}", FAILED) from error


def _being_imported(error: BaseException | None) -> str | None:
    """The module whose import an error came from, the first of those that import each other."""
    frames = () if error is None else (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame.f_globals.get("__name__") for frame in frames if frame.f_code.co_name == "<module>"), None)


def _called(function: Any, path: str, what: str) -> Any:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C: unknown, so call it and see
        signature = None
    if signature is not None:
        needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in (2, 4)]
        if needed:
            arguments = ", ".join(needed)
            raise Refusal(f"{what}: {path} needs arguments ({arguments}); name a function that takes none")
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise Refusal(f"{what}: {path}() raises {_told(error)}", FAILED) from error


def _told(error: BaseException) -> str:
    """An error in one line, with the place in the user's code that it comes from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return in_one_line(error) + place


def _is_library(filename: str) -> bool:
    """Of Python, an installed package, or these commands."""
    own = Path(__file__).parent.as_posix()
    return filename.startswith(("<", own, sys.base_prefix + "/lib")) or "site-packages" in filename


def _kind(value: Any) -> str:
    return f"the class {type_name(value)}" if isinstance(value, type) else f"an object of {type_name(value)}"
