"""What `make` installs: the versions that load together, said once each, and the same wherever they are said."""

from __future__ import annotations

import configparser
import os
import re
from pathlib import Path

import pytest

from dmp.commands.installed import OLDEST_TORCH

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    assert parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def makefile() -> str:
    return (ROOT / "Makefile").read_text()


def pins(text: str) -> dict[str, str]:
    """Package -> version, for each `package==version`."""
    found = re.findall(r"([A-Za-z][\w.-]*)==([\w.]+)", text)
    assert len(found) == len(dict(found)), f"pinned twice: {found}"
    return dict(found)


def extras(setup: configparser.ConfigParser) -> dict[str, str]:
    return dict(setup["options.extras_require"])


def test_setup_cfg_parses(setup: configparser.ConfigParser) -> None:
    assert setup["metadata"]["name"] == "dmp-torch"
    assert setup["options"]["python_requires"] == ">=3.10"
    assert setup["options"]["install_requires"].split() == [f"torch>={'.'.join(map(str, OLDEST_TORCH))}", "numpy"]
    assert {"planner", "torchrec", "dev"} <= extras(setup).keys()


def test_pins_of_the_makefile_are_those_of_setup_cfg(setup: configparser.ConfigParser, makefile: str) -> None:
    recipe, extra = pins(makefile), pins(extras(setup)["torchrec"])
    assert recipe["torch"] == extra["torch"]
    assert recipe["torchrec"] == extra["fbgemm-gpu-cpu"], "TorchRec loads with the FBGEMM of its own version alone"
    assert recipe.keys() == {"torch", "torchrec"}, "any other version belongs in setup.cfg"


def test_torchrec_comes_without_its_dependencies(setup: configparser.ConfigParser, makefile: str) -> None:
    """It would bring the CUDA build of FBGEMM."""
    lines = [line for line in makefile.splitlines() if "torchrec==" in line]
    assert len(lines) == 1
    assert "--no-deps" in lines[0]
    assert not any(re.match(r"torchrec\b", line) for extra in extras(setup).values() for line in extra.splitlines())


def test_make_installs_every_extra(setup: configparser.ConfigParser, makefile: str) -> None:
    named = re.search(r"--editable '\.\[([\w,]+)\]'", makefile)
    assert named
    assert set(named[1].split(",")) == extras(setup).keys()


def test_every_package_is_found_and_typed(setup: configparser.ConfigParser) -> None:
    included = setup["options.packages.find"]["include"].split()
    for package in ("dmp", "sharders", "planner"):
        assert {package, f"{package}.*"} <= set(included)
        assert (ROOT / package / "py.typed").is_file()
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_ci_script_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
