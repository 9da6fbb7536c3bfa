"""`python -m dmp doctor`: versions that do not fit are told from metadata, imports that die from their own process."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest

from dmp.__main__ import main
from dmp.commands import doctor
from dmp.commands.installed import TESTED, findings

FITS = {
    "torch": "2.13.0+cpu",
    "numpy": "2.4.6",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchrec": "1.8.0",
    "tensordict": "0.15.3",
    "torchmetrics": "1.0.3",
    "tqdm": "4.70.1",
    "pyre-extensions": "0.0.32",
    "scipy": "1.17.1",
    "jinja2": "3.1.6",
    "safetensors": "0.6.0",
}


def said(**changes: str | None) -> list[str]:
    """What is wrong, of the set that fits with these changes; None for what is not there."""
    versions = FITS | {name.replace("_", "-"): version for name, version in changes.items()}
    return [each.text for each in findings({n: v for n, v in versions.items() if v is not None}) if each.is_wrong]


def test_a_set_that_fits() -> None:
    assert list(findings(FITS)) == []
    cuda = FITS | {"torch": "2.13.0+cu130", "fbgemm-gpu": "1.8.0"}
    del cuda["fbgemm-gpu-cpu"]
    assert list(findings(cuda)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch": "2.9.1"}, ["torch 2.9.1 is too old", "fbgemm-gpu-cpu 1.8.0 is built for torch 2.13; .*~=1.4.0"]),
        ({"torch": "2.14.0"}, ["fbgemm-gpu-cpu 1.8.0 is built for torch 2.13; torch is 2.14.0: pip install"]),
        ({"torch": None}, ["torch has no metadata"]),
        ({"numpy": None}, ["numpy is missing", "torchrec 1.8.0 imports what is not installed, numpy"]),
        ({"torchrec": "1.7.0"}, ["torchrec 1.7.0 loads with FBGEMM 1.7.0 alone; fbgemm-gpu-cpu is 1.8.0.*~=1.7.0"]),
        ({"fbgemm_gpu_cpu": None}, ["torchrec 1.8.0 needs FBGEMM of its own version.*-cpu~=1.8.0"]),
        ({"fbgemm_gpu": "1.8.0"}, ["share one folder, and overwrite each other", "is the CUDA build, torch"]),
        ({"torchmetrics": "1.8.2"}, ["torchmetrics 1.8.2: torchrec 1.8.0 is made for 1.0.3"]),
        ({"tensordict": None, "tqdm": None}, ["not installed, tensordict tqdm: pip install tensordict tqdm"]),
    ],
)
def test_what_does_not_fit(changes: dict[str, str | None], expected: list[str]) -> None:
    texts = said(**changes)
    assert len(texts) == len(expected)
    assert all(re.search(pattern, text) for pattern, text in zip(expected, texts, strict=True))
    assert all("\n" not in text for text in texts)


@pytest.mark.parametrize(
    ("torch", "others", "is_noted"),
    [("2.14.1", "1.9.2", False), ("2.13.0", "1.8.0", False), ("2.15.0", "1.10.0", True)],
)
def test_what_is_newer_than_what_is_tested_is_noted(
    torch: str, others: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = FITS | {"torch": torch, "torchrec": others, "fbgemm-gpu-cpu": others[:-1] + "0"}
    monkeypatch.setattr(doctor, "installed_versions", lambda: versions)
    assert main(["doctor", "--quick"]) == 0
    assert ("note: tested with torch 2.13, " in capsys.readouterr().out) == is_noted


def test_fbgemm_is_asked_for_of_the_release_that_fits_torch() -> None:
    assert "fbgemm-gpu-cpu~=1.9.0" in next(findings({"torch": "2.14.1", "numpy": "2"})).text


def test_what_is_optional_is_no_error() -> None:
    bare = list(findings({"torch": "2.13.0", "numpy": "2"}))
    assert bare and not any(each.is_wrong for each in bare)


def test_an_older_torch_is_too_old() -> None:
    assert "torch 2.12.1 is too old: expected 2.13" in next(findings({"torch": "2.12.1", "numpy": "2"})).text


def test_the_set_that_is_tested_is_what_is_installed_by_make() -> None:
    parser = configparser.ConfigParser()
    parser.read(Path(__file__).resolve().parents[1] / "setup.cfg")
    pinned = dict(re.findall(r"([\w-]+)==(\d+\.\d+)", parser["options.extras_require"]["torchrec"]))
    assert {name: pinned[name] for name in ("torch", "fbgemm-gpu-cpu")} == {
        name: version for name, version in TESTED[0].items() if name in pinned
    }


def test_an_import_that_dies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_TRIED", ("dmp", "torch"))
    codes = {"import dmp": "raise OSError('libcuda.so.1: no such file')", "import torch": "import os; os.abort()"}
    why_not = doctor._why_not
    monkeypatch.setattr(doctor, "_why_not", lambda code: why_not(codes[code]))
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "wrong: dmp cannot be imported: OSError: libcuda.so.1: no such file" in text
    assert "wrong: torch cannot be imported: the process dies of signal 6" in text


def test_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ok: versions fit"
