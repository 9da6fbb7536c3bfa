"""`doctor`: whether what is installed fits together, before an import dies; then each import, in its own process."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping

from dmp.commands.installed import TESTED, findings, installed_versions
from dmp.registry import plugins

NAME = "doctor"
ABOUT = "check the installation: versions that do not fit, each in a line with what to do, and what cannot be imported"

_TRIED = ("torch", "fbgemm_gpu", "torchrec", "scipy.optimize", "jinja2", "dmp", "sharders", "planner")
_GROUPS = ("dmp.sharders", "dmp.planners", "dmp.sources", "dmp.targets")
_DISTRIBUTIONS = {"fbgemm_gpu": ("fbgemm-gpu", "fbgemm-gpu-cpu"), "scipy.optimize": ("scipy",)}
_PATIENCE_S = 300


def add(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("--quick", action="store_true", help="metadata alone: import nothing")


def run(given: argparse.Namespace) -> int:
    """Print what is found; 1 where something does not fit."""
    versions = installed_versions()
    shown = [*TESTED[0], "fbgemm-gpu", "numpy", "scipy", "jinja2"]
    print(f"Python {sys.version.split()[0]}; " + ", ".join(f"{n} {versions[n]}" for n in shown if n in versions))
    found = list(findings(versions))
    wrong = [each.text for each in found if each.is_wrong]
    for text in wrong:
        print(f"wrong: {text}")
    for each in found:
        if not each.is_wrong:
            print(f"note: {each.text}")
    if not given.quick:
        for failure in _failed_imports(versions):
            wrong.append(failure)
            print(f"wrong: {failure}")
    if not wrong:
        print("ok: " + ("versions fit" if given.quick else "versions fit, and all that is installed can be imported"))
        if not any(_is_of(versions, tested) for tested in TESTED):
            sets = (", ".join(f"{name} {version}" for name, version in tested.items()) for tested in TESTED)
            print(f"note: tested with {'; or '.join(sets)}")
    return 1 if wrong else 0


def _is_of(versions: Mapping[str, str], tested: Mapping[str, str]) -> bool:
    """Whether what is installed of a set is of its releases."""
    return all(versions[name].startswith(f"{v}.") for name, v in tested.items() if name in versions)


def _failed_imports(versions: dict[str, str]) -> list[str]:
    """What cannot be imported, and entry points that cannot be loaded, with the last line of each error."""
    tried = [name for name in _TRIED if _is_expected(name, versions)]
    statements = {name: f"import {name}" for name in tried}
    for group in _GROUPS:
        for name, point in plugins(group).items():
            module, _, attribute = point.value.partition(":")
            statements[f"{group}: {name} = {point.value}"] = f"import {module.strip()}" + (
                f"; {module.strip()}.{attribute.split('[')[0].strip()}" if attribute else ""
            )
    return [f"{name} cannot be imported: {why}" for name, code in statements.items() if (why := _why_not(code))]


def _is_expected(name: str, versions: dict[str, str]) -> bool:
    known = _DISTRIBUTIONS.get(name, (name,))
    return name in ("torch", "dmp", "sharders", "planner") or any(each in versions for each in known)


def _why_not(code: str) -> str:
    """Why a statement fails in a fresh process; empty where it does not."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it does not come back in {_PATIENCE_S} s"
    if done.returncode == 0:
        return ""
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode < 0:
        return f"the process dies of signal {-done.returncode}" + (f" ({said[-1]})" if said else "")
    return said[-1] if said else f"it ends with exit code {done.returncode}"
