"""Pickles that run something when `pickle` reads them: each would make the file that it is given."""

from __future__ import annotations

import copyreg
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

METADATA, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


class Name(NamedTuple):
    """A global."""

    module: str
    name: str


class Call:
    """What a pickle has called."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args


class State:
    """What a pickle sets the state of."""

    def __init__(self, of: Any, state: Any) -> None:
        self.of, self.state = of, state


class First:
    """Several values, of which the first is left."""

    def __init__(self, *values: Any) -> None:
        self.values = values


def assembled(value: Any) -> bytes:
    """The operations that leave a value on the stack."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, Name):
        return assembled(value.module) + assembled(value.name) + pickle.STACK_GLOBAL
    if isinstance(value, Call):
        return assembled(value.function) + assembled(value.args) + pickle.REDUCE
    if isinstance(value, State):
        return assembled(value.of) + assembled(value.state) + pickle.BUILD
    if isinstance(value, First):
        return b"".join(map(assembled, value.values)) + pickle.POP * (len(value.values) - 1)
    if isinstance(value, tuple):
        return pickle.MARK + b"".join(map(assembled, value)) + pickle.TUPLE
    if isinstance(value, list):
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(assembled, value)) + pickle.APPENDS
    if isinstance(value, dict):
        items = b"".join(assembled(k) + assembled(v) for k, v in value.items())
        return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
    if isinstance(value, str):
        data = value.encode()
        return pickle.BINUNICODE + struct.pack("<I", len(data)) + data
    if isinstance(value, int) and not isinstance(value, bool):
        return pickle.BININT + struct.pack("<i", value)
    return {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]


def whole(value: Any) -> bytes:
    return pickle.PROTO + b"\x04" + assembled(value) + pickle.STOP


SYSTEM = Name("posix", "system")
IMPORT = Name("importlib", "import_module")
CLASS = Name(METADATA, "BytesStorageMetadata")


def _touch(marker: Path) -> str:
    return f"touch {marker}"


def _code(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


def _script(marker: Path) -> str:
    path = marker.with_name(marker.name + ".py")
    path.write_text(_code(marker))
    return str(path)


def _inner(marker: Path) -> str:
    path = marker.with_name(marker.name + ".inner")
    path.write_bytes(whole(Call(SYSTEM, _touch(marker))))
    return str(path)


def _extension(marker: Path) -> bytes:
    if ("posix", "system") not in copyreg._extension_registry:  # type: ignore[attr-defined]
        copyreg.add_extension("posix", "system", 0xF0)
    return assembled(Call(pickle.EXT1 + b"\xf0", _touch(marker)))


_VALUES: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda marker: Call(SYSTEM, _touch(marker)),
    "os.popen": lambda marker: Call(Name("os", "popen"), _touch(marker)),
    "exec": lambda marker: Call(Name("builtins", "exec"), _code(marker)),
    "eval": lambda marker: Call(Name("builtins", "eval"), _code(marker)),
    "compile": lambda marker: Call(
        Name("builtins", "exec"), Call(Name("builtins", "compile"), _code(marker), "x", "exec")
    ),
    "getattr": lambda marker: Call(Call(Name("builtins", "getattr"), Call(IMPORT, "os"), "system"), _touch(marker)),
    "__import__": lambda marker: Call(
        Call(Name("builtins", "getattr"), Call(Name("builtins", "__import__"), "os"), "system"), _touch(marker)
    ),
    "partial": lambda marker: Call(Call(Name("functools", "partial"), SYSTEM, _touch(marker))),
    "attrgetter": lambda marker: Call(
        Call(Call(Name("operator", "attrgetter"), "system"), Call(IMPORT, "os")), _touch(marker)
    ),
    "methodcaller": lambda marker: Call(
        Call(Name("operator", "methodcaller"), "system", _touch(marker)), Call(IMPORT, "os")
    ),
    "subprocess": lambda marker: Call(Name("subprocess", "check_call"), ["touch", str(marker)]),
    "Popen": lambda marker: (
        assembled(Name("subprocess", "Popen")) + assembled((["touch", str(marker)],)) + pickle.NEWOBJ,
        Call(SYSTEM, _touch(marker)),
    ),
    "runpy": lambda marker: Call(Name("runpy", "run_path"), _script(marker)),
    "timeit": lambda marker: Call(Name("timeit", "timeit"), _code(marker), "pass", Name("time", "time"), 1),
    "pickle in a pickle": lambda marker: Call(
        Name("pickle", "load"), Call(Name("builtins", "open"), _inner(marker), "rb")
    ),
    "torch.load": lambda marker: Call(
        Name("torch.serialization", "_legacy_load"),
        *(Call(Name("builtins", "open"), _inner(marker), "rb"), None, Call(IMPORT, "pickle")),
    ),
    "torch.hub": lambda marker: Call(Name("torch.hub", "_import_module"), "planted", _script(marker)),
    "a dotted name of torch": lambda marker: Call(Name("torch", "os.system"), _touch(marker)),
    "a dotted name of the writer": lambda marker: Call(Name(FILES, "os.system"), _touch(marker)),
    "a dotted name of the metadata": lambda marker: Call(Name(METADATA, "os.system"), _touch(marker)),
    "a module that torch imports": lambda marker: Call(
        Call(Name("builtins", "getattr"), Name(FILES, "os"), "system"), _touch(marker)
    ),
    "an extension": _extension,
    "memo": lambda marker: First(
        assembled(Call(Name("os", "getpid"))),
        *(assembled("posix") + pickle.BINPUT + b"\x07", assembled("system") + pickle.BINPUT + b"\x08"),
        Call(pickle.BINGET + b"\x07" + pickle.BINGET + b"\x08" + pickle.STACK_GLOBAL, _touch(marker)),
    ),
    "an argument of OrderedDict": lambda marker: Call(
        Name("collections", "OrderedDict"), [("a", Call(SYSTEM, _touch(marker)))]
    ),
    "an argument of torch.Size": lambda marker: Call(Name("torch", "Size"), (Call(SYSTEM, _touch(marker)),)),
    "a key": lambda marker: {Call(SYSTEM, _touch(marker)): 1},
    "a persistent id": lambda marker: assembled(Call(SYSTEM, _touch(marker))) + pickle.BINPERSID,
    "a state": lambda marker: State(Call(CLASS), {"x": Call(SYSTEM, _touch(marker))}),
    "copyreg": lambda marker: Call(
        Name("copyreg", "_reconstructor"), CLASS, Name("builtins", "object"), Call(SYSTEM, _touch(marker))
    ),
    "by the name of an old module": lambda marker: Call(
        Name("torch.distributed._shard.checkpoint.filesystem", "os.system"), _touch(marker)
    ),
}
GADGETS: dict[str, Callable[[Path], bytes]] = {
    **{name: lambda marker, value=value: whole(value(marker)) for name, value in _VALUES.items()},  # type: ignore[misc]
    "protocol 0": lambda marker: f"cos\nsystem\n(S'{_touch(marker)}'\ntR.".encode(),
    "INST": lambda marker: f"(S'{_touch(marker)}'\nios\nsystem\n.".encode(),
    "OBJ": lambda marker: f"(cos\nsystem\nS'{_touch(marker)}'\no.".encode(),
}
"""Name -> the pickle, given the file that it would make."""

PLANTERS: dict[str, bytes] = {
    "a class": whole(First(State(CLASS, (None, {"planted": 1})))),
    "a class that is used": whole(State(Name(METADATA, "TensorProperties"), (None, {"planted": 1}))),
    "a module": whole(State(Name(METADATA, "torch"), {"planted": 1})),
    "a function": whole(State(Name("torch.serialization", "_get_layout"), {"planted": 1})),
}
"""Name of what they set an attribute `planted` of -> the pickle."""


def targets_of_planters() -> list[Any]:
    """What would have the attribute."""
    import torch
    from torch.distributed.checkpoint import metadata

    return [metadata.BytesStorageMetadata, metadata.TensorProperties, torch, torch.serialization._get_layout]


if __name__ == "__main__":  # each of them, on its own: `python -m tests.gadgets FOLDER`
    import sys

    folder = Path(sys.argv[1])
    for name, make in GADGETS.items():
        child = os.fork()
        if not child:
            data = make(folder / name.replace(" ", "_"))
            try:
                pickle.loads(data)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}")
            os._exit(0)
        os.waitpid(child, 0)
    for name, data in PLANTERS.items():
        try:
            pickle.loads(data)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}")
    print("planted:", [hasattr(target, "planted") for target in targets_of_planters()])
