"""What code asks of a weight that it reads, and whose code it is: told from the frame and its instructions."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType

from torch import nn

from dmp import DistributedModelParallel

INDEXED = "[...]"
"""What is asked of a weight, where it is indexed."""

OPERATOR = "<operator>"
"""One that is not known by a sign."""

UNKNOWN = ""
"""Where it goes on in a way that is not followed: returned, kept, handed to what a condition chose."""


def asked_of(frame: FrameType) -> tuple[str, ...]:
    """What is asked of what a frame's present instruction gives, next to it or each time by way of a local name: an
    attribute, an operator, `INDEXED`, the name of the function or module that is called with it, or `UNKNOWN`."""
    return _asked_after(frame.f_code).get(frame.f_lasti, (UNKNOWN,))


@lru_cache(256)
def _asked_after(code: CodeType) -> Mapping[int, tuple[str, ...]]:
    """Where an instruction is -> what is asked of what it gives."""
    steps = [*_steps(code)]
    called = _called(steps)
    asked: dict[int, str] = {}
    by_name: dict[str, list[str]] = {}
    for i, (step, after) in enumerate(pairwise(steps)):
        is_local = "LOAD_FAST" in step.opname
        if after.opname in _ATTRIBUTES:
            asked[step.offset] = after.argval
        elif step.opname == "LOAD_ATTR" or is_local:
            taker, above = _taker(steps[i + 1 :])
            asked[step.offset] = UNKNOWN if taker is None else _what_takes(taker, above, called)
        if is_local:
            by_name.setdefault(step.argval, []).append(asked[step.offset])
    found: dict[int, tuple[str, ...]] = {offset: (what,) for offset, what in asked.items()}
    for step, after in pairwise(steps):
        if after.opname.startswith("STORE_FAST"):
            found[step.offset] = tuple(dict.fromkeys(by_name.get(after.argval, [UNKNOWN])))
    return found


_INDEXES = {"BINARY_SUBSCR": 2, "BINARY_SLICE": 3, "STORE_SUBSCR": 2, "STORE_SLICE": 3}
"""How much of the stack lies from what is indexed on."""
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_ARE_NO_STEPS = frozenset(("EXTENDED_ARG", "CACHE", "NOP", "KW_NAMES"))
_OF_ONE_NAME = re.compile("(?:LOAD|STORE)_FAST(?:_BORROW)?")


def _steps(code: CodeType) -> Iterator[dis.Instruction]:
    """Its instructions; those of two local names, which there are since Python 3.13, as two."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, tuple) and len(names := _OF_ONE_NAME.findall(step.opname)) == len(step.argval):
            for i, (opname, name) in enumerate(zip(names, step.argval, strict=True)):
                own = {"opname": opname, "opcode": dis.opmap[opname], "arg": 0, "argval": name}
                yield step._replace(**own, offset=step.offset + i)  # instructions lie at even places
        elif step.opname not in _ARE_NO_STEPS:
            yield step


def _called(steps: Sequence[dis.Instruction]) -> Mapping[int, str]:
    """Where a call is -> the name of what is called."""
    found: dict[int, str] = {}
    for i, (step, after) in enumerate(pairwise(steps)):
        leads_on = after.opname in _ATTRIBUTES  # such a step may leave two values where the first lay
        if step.opname in (*_ATTRIBUTES, "LOAD_GLOBAL", "LOAD_DEREF") and not leads_on:
            taker, _ = _taker(steps[i + 1 :])
            if taker is not None:
                found.setdefault(taker.offset, step.argval)  # what is called lies below what it is called with
    return found


def _what_takes(taker: dis.Instruction, above: int, called: Mapping[int, str]) -> str:
    name = taker.opname
    if name.startswith(("CALL", "PRECALL")):
        return called.get(taker.offset, UNKNOWN)
    operands = _INDEXES.get(name, 2 if taker.argrepr == "[]" else 0)
    if operands:
        return INDEXED if operands == above else UNKNOWN
    if name.startswith(("BINARY_", "INPLACE_", "COMPARE_OP")):  # one operation for each operator, before Python 3.11
        return taker.argrepr.removesuffix("=") or OPERATOR
    return {"UNARY_NEGATIVE": "neg", "GET_ITER": "__iter__", "UNPACK_SEQUENCE": "__iter__"}.get(name, UNKNOWN)


def _taker(steps: Sequence[dis.Instruction]) -> tuple[dis.Instruction | None, int]:
    """The instruction of these that takes what was loaded before them, by itself or in a list, and how much of the
    stack lay from it on; None where it goes another way."""
    depth = 1
    for step in steps:
        if "JUMP" in step.opname:
            break
        above, depth = depth, depth + dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname in ("BUILD_LIST", "BUILD_TUPLE") and step.arg and step.arg >= above:
            depth = 1
        elif depth < 1 or (depth == 1 and above >= depth):
            return step, above
    return None, 0


def reader() -> str:
    """Who reads: function, line, and the path of the module whose method it is in."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    ours = "torch.", f"{__package__}."
    own = next((f for f in frames if not f"{f.f_globals.get('__name__')}.".startswith(ours)), frames[0])
    line = f"{own.f_code.co_name} ({own.f_code.co_filename}:{own.f_lineno})"
    inner = frames[frames.index(own) :]
    module = next((m for m in map(self_of, inner) if m is not None), None)
    roots = [m for m in map(self_of, inner) if isinstance(m, DistributedModelParallel)]
    for root in roots[-1:]:
        path = next((path for path, m in root.named_modules() if m is module), "")
        return f"{type(module).__name__} at {path!r}, in {line},"
    return line


def self_of(frame: FrameType) -> nn.Module | None:
    """The module whose code a frame runs, by whatever name its methods have for it; a hook has the one around it."""
    code, held = frame.f_code, frame.f_locals.get("self")
    if held is None and code.co_argcount:
        held = frame.f_locals.get(code.co_varnames[0])
        if getattr(getattr(type(held), code.co_name, None), "__code__", None) is not code:
            return None
    return held if isinstance(held, nn.Module) else None
