"""What is listed, with its reason: effects beyond our own objects, and private names of other packages."""

from __future__ import annotations

import ast
import logging
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from dmp import effects, private_names
from sharders.quiet import quiet
from tests.code_walk import PACKAGES, ROOT, module_files, nodes_of

EFFECT = re.compile(
    r"warnings\.\w*(catch|filter)\w*|logging\.disable|gc\.(disable|enable|freeze|unfreeze|set_threshold)|atexit\.\w+"
    r"|signal\.signal|os\.(setpriority|nice|chdir|umask|putenv|unsetenv|register_at_fork|sched_setaffinity)"
    r"|sys\.(set\w+|addaudithook)|faulthandler\.(enable|register)|(np\.|numpy\.)?random\.(seed|setstate)|torch\.seed"
    r"|(.+\.)?(manual_seed\w*|set_rng_state\w*|fork_rng|set_crc32_options|set_device\w*|add_safe_globals)|torch\.set_\w+"
    r"|(.+\.)?(init|destroy)_process_group|(.+\.)?register_(optimizer_step|module)_\w+|mock\.patch.*|copyreg\.\w+"
)
IS_LOCAL = re.compile(r"torch\.Generator\(.*|generator\..*")  # a generator of its own


def listed(module: ModuleType) -> dict[str, str]:
    """What its docstring lists, between backticks at the head of a line -> the reason after it."""
    text = re.sub(r"\n  +", " ", module.__doc__ or "")
    rows = re.findall(r"^- ((?:`[^`]+`,? ?)+): (.*)", text, re.MULTILINE)
    assert all(len(reason.split()) > 2 for _, reason in rows)
    return {name: reason for names, reason in rows for name in re.findall(r"`([^`]+)`", names)}


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.fixture(scope="module", autouse=True)
def _let_go() -> Iterator[None]:
    """Collections in the tests that follow would look at all nodes."""
    yield
    nodes_of.cache_clear()


def effects_in(source: str) -> set[str]:
    """Calls that change the process, swapped classes, and what is put into another's modules or classes."""
    theirs = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes_of(source)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in PACKAGES)
        for alias in node.names
    }
    found = set()
    for node in nodes_of(source):
        targets = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            held = {target.id for target in targets if isinstance(target, ast.Name)}
            theirs |= held if root_of(node.value) in theirs else set()
        for target in targets:
            is_theirs = isinstance(target, ast.Attribute | ast.Subscript) and root_of(target) in theirs
            if is_theirs or (isinstance(target, ast.Attribute) and target.attr in ("__class__", "__code__")):
                found.add(f"{ast.unparse(target)} =")
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("setattr", "delattr") and root_of(node.args[0]) in theirs:
                found.add(f"{called}({ast.unparse(node.args[0])})")
            elif called == "put_around" and root_of(node.args[0]) in theirs:
                found.add(f"{ast.unparse(node.args[0])}.{ast.literal_eval(node.args[1])} =")
            elif EFFECT.fullmatch(called) and not IS_LOCAL.match(called):
                found.add(called)
    return found


def ours(sources: Iterable[str]) -> set[str]:
    """Private names that a file of ours gives to something: a function, a class, a variable, an attribute of itself."""
    found = set()
    for source in sources:
        for node in nodes_of(source):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root_of(node) == "self":
                found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return {name for name in found if name.startswith("_")}


def is_affix(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr.endswith(("prefix", "suffix", "swith"))


def private_in(source: str, own: set[str]) -> Iterator[str]:
    """Private names of others: imported, overridden, by attribute, or in a text, as `getattr` takes it.

    Args:
        own: ours, but those that torch's classes have too, which count as torch's unless they are of `self`.
    """
    of_self = ours([source])
    joined = [node for node in nodes_of(source) if isinstance(node, ast.BinOp | ast.JoinedStr) or is_affix(node)]
    ends = {id(each) for node in joined for each in ast.iter_child_nodes(node)}  # a name's, no name
    for node in nodes_of(source):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] not in PACKAGES:
            paths = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (path for path in paths if re.search(r"(^|\.)_(?!_)", path))
        elif isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in of_self
            names = [] if is_own else [node.attr]
        elif isinstance(node, ast.ClassDef) and node.bases:
            names = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ends:
            names = [node.value]
        yield from (name for name in names if re.fullmatch(r"_(?!dmp_)[A-Za-z]\w*", name) and name not in own)


def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in module_files().values()}


def test_effects_on_the_whole_process_are_listed() -> None:
    found = {f"{path}: {effect}" for path, source in sources().items() for effect in effects_in(source)}
    named = set(listed(effects))
    assert (found - named, named - found) == (set(), set())


def test_private_names_of_others_are_listed() -> None:
    torchs = (nn.Module(), torch.Tensor, GradScaler, DistributedDataParallel, DeviceMesh)
    own = {name for name in ours(sources().values()) if not any(hasattr(each, name) for each in torchs)}
    own |= {"_fields", "_replace"}  # of named tuples
    found = {name for source in sources().values() for name in private_in(source, own)}
    named = set(listed(private_names))
    assert (found - named, named - found) == (set(), set())


@pytest.mark.parametrize(
    ("snippet", "effect"),
    [
        ("import warnings\nwith warnings.catch_warnings():\n    pass", "warnings.catch_warnings"),
        ("import torch\ntorch.set_num_threads(1)", "torch.set_num_threads"),
        ("import torch\ntorch.random.manual_seed(1)", "torch.random.manual_seed"),
        ("from torch import nn\nnn.Linear.forward = None", "nn.Linear.forward ="),
        ("from torch import nn\nlinear = nn.Linear\nsetattr(linear, name, 1)", "setattr(linear)"),
        ("from torch import nn\nput_around(nn.Linear, 'forward', mine)", "nn.Linear.forward ="),
        ("import os\nos.environ['A'] = 'b'", "os.environ['A'] ="),
        ("import sys\ndel sys.modules['a']", "sys.modules['a'] ="),
        ("def swap(module):\n    module.__class__ = dict", "module.__class__ ="),
        ("import torch\nmine = torch.Generator().manual_seed(1)\nheld = torch.x\nother.x = 1", None),
    ],
)
def test_an_effect_is_found(snippet: str, effect: str | None) -> None:
    assert effects_in(snippet) == ({effect} if effect else set())


def test_a_private_name_is_found() -> None:
    source = "from torch._x import y\nfrom dmp.a import _z\nself._mine = a._theirs\ngetattr(a, '_text')\nb + '_end'"
    assert list(private_in(source, ours([source]))) == ["torch._x.y", "_theirs", "_text"]


def test_silence_of_several_threads_ends() -> None:
    before = list(warnings.filters), logging.root.manager.disable

    def work() -> None:
        for _ in range(50):
            with quiet(logging.CRITICAL):
                time.sleep(0.0002)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (list(warnings.filters), logging.root.manager.disable) == before
