"""How many cores a process has: those that it may run on, or what the quotas of its control groups leave of them."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from unittest import mock

import pytest

from sharders.shared_memory.cores import cores, quota

FIRST = "9:name=systemd:/\n4:memory:/pod/box\n1:cpu,cpuacct:/pod/box\n0::/\n"


def files(root: Path, group: str, **texts: str) -> Path:
    """A tree with these quotas, and the groups of this process; "a/b.max" is written a__b_max."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, text in texts.items():
        *folders, last = name.split("__")
        file = {"max": "cpu.max", "quota": "cpu.cfs_quota_us", "period": "cpu.cfs_period_us"}[last]
        path = root.joinpath("sys/fs/cgroup", *folders, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("group", "texts", "found"),
    [
        ("0::/\n", {"max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"max": "max 100000\n"}, inf),
        ("0::/pod/box\n", {"pod__box__max": "max 100000\n", "pod__max": "50000 100000\n"}, 0.5),
        ("0::/pod/box\n", {"pod__box__max": "100000 100000\n", "pod__max": "400000 100000\n"}, 1),
        ("0::/../../other\n", {"max": "300000 100000\n"}, 3),
        (FIRST, {"cpu,cpuacct__pod__box__quota": "200000\n", "cpu,cpuacct__pod__box__period": "100000\n"}, 2),
        (FIRST, {"cpu__quota": "25000\n", "cpu__period": "50000\n"}, 0.5),
        (FIRST, {"cpu__quota": "-1\n", "cpu__period": "100000\n"}, inf),
        (FIRST, {"cpu__quota": "25000\n", "unified__max": "10000 100000\n"}, 0.1),
        ("0::/\n", {"max": "\n"}, inf),
        ("0::/\n", {"max": "0 0\n"}, inf),
        ("nonsense", {}, inf),
        ("", {}, inf),
    ],
)
def test_quotas(tmp_path: Path, group: str, texts: dict[str, str], found: float) -> None:
    assert quota(files(tmp_path, group, **texts)) == found


def test_what_cannot_be_read_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path) == inf
    root = files(tmp_path, "0::/\n")
    (root / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    assert quota(root) == inf
    (root / "proc/self/cgroup").write_bytes(b"0::/\xff\n")
    with mock.patch.object(Path, "read_text", side_effect=PermissionError):
        assert quota(root) == inf
    assert quota(root) == inf


def test_the_fewer_of_both(tmp_path: Path) -> None:
    root = files(tmp_path, "0::/\n", max="150000 100000\n")
    for allowed, found in ((1, 1), (8, 1.5)):
        with mock.patch.object(os, "sched_getaffinity", return_value=set(range(allowed))):
            assert cores(root) == found
    assert 0 < cores() <= len(os.sched_getaffinity(0))
