"""Which installed packages fit each other, from their metadata alone: nothing is imported, for an import may die.

FBGEMM 1.n is built for torch 2.(n + 5), as its releases' table says, and TorchRec n needs FBGEMM n; with others the
import fails on a missing symbol, or a kernel ends the process. This project is tested with the sets of `TESTED`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from typing import NamedTuple

TESTED = (
    {"torch": "2.13", "fbgemm-gpu-cpu": "1.8", "torchrec": "1.8"},
    {"torch": "2.14", "fbgemm-gpu-cpu": "1.9", "torchrec": "1.9"},
)
"""The first is what `make` installs."""
OLDEST_TORCH = (2, 13)
"""FSDP2 of earlier ones does not average gradients that some rank's loss does not reach."""
_OLDEST_PYTHON = (3, 10)
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
_INSTALL = "pip install fbgemm-gpu-cpu"
_TORCHREC_IMPORTS = ("tensordict", "torchmetrics", "tqdm", "pyre-extensions", "numpy")
_EXTRAS = {
    "scipy": "the planner solves without its linear programmes: pip install scipy",
    "jinja2": "`--html` and PlanReport.save_html need it: pip install jinja2",
    "tqdm": "no progress line: pip install tqdm",
    "safetensors": "safetensors files are read, but not written: pip install safetensors",
}


class Finding(NamedTuple):
    """A thing that does not fit, or is missing."""

    is_wrong: bool
    """Else it is optional."""
    text: str


def installed_versions() -> dict[str, str]:
    """Distribution name, in lower case with dashes -> version."""
    found: dict[str, str] = {}
    for each in distributions():
        name = each.metadata["Name"]
        if name:  # of a half-removed package there is none
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), each.version)
    return found


def findings(versions: Mapping[str, str]) -> Iterator[Finding]:
    """What does not fit among these, each with what to do, the worst first."""
    if sys.version_info < _OLDEST_PYTHON:
        yield Finding(True, f"Python {sys.version.split()[0]}: expected 3.10 or later")
    torch = versions.get("torch")
    if torch is None:
        yield Finding(True, "torch has no metadata: it is not installed by pip here; pip install torch==2.13.0")
    elif _numbers(torch) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Finding(True, f"torch {torch} is too old: expected {oldest} or later; pip install torch==2.13.0")
    if "numpy" not in versions:
        yield Finding(True, "numpy is missing: the planner and ranks that send objects need it; pip install numpy")
    yield from _of_fbgemm(versions, torch)
    yield from _of_torchrec(versions)
    for name, what in _EXTRAS.items():
        if name not in versions:
            yield Finding(False, f"{name} is not installed: {what}")


def _of_fbgemm(versions: Mapping[str, str], torch: str | None) -> Iterator[Finding]:
    here = [name for name in _FBGEMM if name in versions]
    if not here:
        text = f"no FBGEMM: tables are looked up by torch's operations, slower; {_INSTALL}~={_fbgemm_for(torch)}"
        yield Finding(False, f"{text} (fbgemm-gpu with CUDA)")
        return
    if len(here) > 1:
        both = " and ".join(f"{name} {versions[name]}" for name in here)
        yield Finding(True, f"{both} share one folder, and overwrite each other: pip uninstall both, install one")
    name = here[0]
    version = versions[name]
    if torch is None:
        return
    wanted = (2, _numbers(version)[1] + 5)
    if _numbers(version)[0] == 1 and _numbers(torch) != wanted:
        yield Finding(
            True,
            f"{name} {version} is built for torch {wanted[0]}.{wanted[1]}; torch is {torch}: "
            f"pip install torch~={wanted[0]}.{wanted[1]}.0, or {name}~={_fbgemm_for(torch)}",
        )
    if name == "fbgemm-gpu" and "+cpu" in torch:
        yield Finding(
            True,
            f"fbgemm-gpu {version} is the CUDA build, torch {torch} the CPU's: its import looks for CUDA's libraries; "
            f"pip uninstall fbgemm-gpu, pip install fbgemm-gpu-cpu=={version}",
        )


def _of_torchrec(versions: Mapping[str, str]) -> Iterator[Finding]:
    torchrec = versions.get("torchrec")
    if torchrec is None:
        return
    fbgemm = next((name for name in _FBGEMM if name in versions), None)
    if fbgemm is None:
        text = f"torchrec {torchrec} needs FBGEMM of its own version: {_INSTALL}~={_release(torchrec)}"
        yield Finding(True, f"{text} (fbgemm-gpu with CUDA)")
    elif _numbers(versions[fbgemm]) != _numbers(torchrec):
        yield Finding(
            True,
            f"torchrec {torchrec} loads with FBGEMM {_release(torchrec)} alone; {fbgemm} is {versions[fbgemm]}: "
            f"pip install {fbgemm}~={_release(torchrec)}, or --no-deps torchrec~={_release(versions[fbgemm])}",
        )
    missing = [name for name in _TORCHREC_IMPORTS if name not in versions]
    if missing:
        names = " ".join(missing)
        yield Finding(True, f"torchrec {torchrec} imports what is not installed, {names}: pip install {names}")
    metrics = versions.get("torchmetrics")
    if metrics is not None and _numbers(metrics) != (1, 0):
        text = f"torchmetrics {metrics}: torchrec {torchrec} is made for 1.0.3, and its metrics fail with others; "
        yield Finding(True, text + "pip install torchmetrics==1.0.3")


def _fbgemm_for(torch: str | None) -> str:
    """`2.14.1` -> `1.9.0`; for what no release of FBGEMM was built for, what this project's own is."""
    major, minor = _numbers(torch or "")
    return f"1.{minor - 5}.0" if (major, minor) >= (2, 5) else f"{TESTED[0]['fbgemm-gpu-cpu']}.0"


def _release(version: str) -> str:
    """`1.9.2` -> `1.9.0`, behind `~=` the newest of its patches: FBGEMM's and TorchRec's are not numbered alike."""
    return ".".join(map(str, _numbers(version))) + ".0"


def _numbers(version: str) -> tuple[int, int]:
    """`2.13.0+cpu` -> (2, 13)."""
    found = re.match(r"(\d+)(?:\.(\d+))?", version)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)
