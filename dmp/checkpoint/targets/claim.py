"""The right to save to a path, which one save has at a time: a file `.x.claim` beside the path x.

[Note: alive]
The file says who has it: the host with its process namespace, the process and when that began, and a word of its own.
On the same host the system tells whether the process still runs. Of another host nobody can ask; so who has a claim
touches the file every few seconds, and one that rests for several times as long belongs to the dead. That is watched,
not computed: clocks of hosts differ. What the dead left is taken over.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dmp.checkpoint.targets.new_file import write_new
from dmp.errors import CheckpointError

_BEAT_S, _SILENT_S, _LOOK_S = 5.0, 30.0, 0.5
_WORDS = ("place", "host", "pid", "began", "since", "word")

_of_this_process: set[str] = set()


class Claim:
    """Held from `take_claim` to `release`."""

    def __init__(self, target: Path) -> None:
        self.path = claim_of(target)
        self.word = secrets.token_hex(16)
        self._is_over = threading.Event()

    def put(self) -> bool:
        """Whether the path was free, and is now ours.

        Raises:
            OSError: it cannot be written.
        """
        pid = os.getpid()
        said = (_place(), socket.gethostname(), pid, _began(pid), time.strftime("%Y-%m-%d %H:%M:%S"), self.word)
        data = json.dumps(dict(zip(_WORDS, said, strict=True))).encode()
        _of_this_process.add(self.word)  # before anyone can read it
        try:
            self._write(data)
        except OSError as error:
            _of_this_process.discard(self.word)
            if isinstance(error, FileExistsError):
                return False
            raise
        return True

    def _write(self, data: bytes) -> None:
        """In one step, and only where nothing is."""
        beside = self.path.with_name(f"{self.path.name}.{self.word}")
        write_new(beside, data)
        try:
            os.link(beside, self.path)
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            write_new(self.path, data)
        finally:
            beside.unlink()

    def touch(self) -> None:
        """Every few seconds, until it is over; see [Note: alive]."""
        while not self._is_over.wait(_BEAT_S):
            with suppress(OSError):
                os.utime(self.path)

    def check(self) -> None:
        """Before what cannot be taken back.

        Raises:
            CheckpointError: another one took it for a dead one's.
        """
        if _read(self.path).get("word") != self.word:
            raise CheckpointError(f"{self.path} is another save's by now: this one made no sign of life for too long")

    def release(self) -> None:
        """For the next."""
        self._is_over.set()
        with suppress(OSError):
            if _read(self.path).get("word") == self.word:
                self.path.unlink()
        _of_this_process.discard(self.word)


def claim_of(target: Path) -> Path:
    """Where the claim on a path lies."""
    return target.with_name(f".{target.name}.claim")


def take_claim(target: Path) -> Claim:
    """The right to save to a path.

    Raises:
        CheckpointError: another save has it, or something else lies in its place.
        OSError: it cannot be written.
    """
    claim = Claim(target)
    for _ in range(10):
        if claim.put():
            threading.Thread(target=claim.touch, name="dmp-claim", daemon=True).start()
            return claim
        try:
            other = _read(claim.path)
        except FileNotFoundError:
            continue  # just released
        alive = _is_alive(other)
        if alive or (alive is None and _changes(claim.path)):
            raise CheckpointError(
                f"{target} is being saved by process {other.get('pid')} on {other.get('host')} since "
                f"{other.get('since')}: wait for that, or give another path (its claim is {claim.path})"
            )
        drop_claim(claim.path, other)
    raise CheckpointError(f"{target} is being saved by others, again and again")


def is_dead(claim: Path) -> bool:
    """Whether who put a claim is known to have ended, or there is none."""
    try:
        return _is_alive(_read(claim)) is False
    except FileNotFoundError:
        return True
    except (CheckpointError, OSError):
        return False


def drop_claim(path: Path, of: dict[str, Any] | None = None) -> None:
    """Take a dead one's away, in one step; if it became another's meanwhile, that one has it back."""
    away = path.with_name(f"{path.name}.{secrets.token_hex(16)}")
    with suppress(FileNotFoundError):
        of = _read(path) if of is None else of
        os.rename(path, away)
        if _read(away) != of:
            with suppress(OSError):
                os.link(away, path)
        away.unlink()


def _read(path: Path) -> dict[str, Any]:
    """What a claim says; nothing where its writing was cut short.

    Raises:
        CheckpointError: it is no claim.
        FileNotFoundError: there is none.
    """
    said: Any = None
    if not (path.is_dir() or path.is_symlink()):
        data = path.read_bytes()
        if not data:
            return {}
        with suppress(ValueError, RecursionError):
            said = json.loads(data)
    if not isinstance(said, dict) or said.keys() != set(_WORDS):
        raise CheckpointError(f"{path} is no file of ours, which a save puts there while it runs: move it away")
    return said


def _is_alive(said: dict[str, Any]) -> bool | None:
    """Whether the process of a claim still saves; None where this host cannot say."""
    if not said or said["place"] != _place():
        return None
    if said["pid"] == os.getpid():
        return said["word"] in _of_this_process
    began = _began(said["pid"])
    if began is not None:
        return bool(began == said["began"])
    if os.path.exists("/proc/self/stat"):
        return False
    try:
        os.kill(int(said["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return None
    return None


def _changes(path: Path) -> bool:
    """Whether somebody touches a claim; looks for as long as a live one could rest."""
    seen = None
    deadline = time.monotonic() + _SILENT_S
    while time.monotonic() < deadline:
        try:
            with path.open("rb") as file:  # opened each time: file systems of a network then ask anew
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            return False
        if seen not in (None, (status.st_ino, status.st_mtime_ns)):
            return True
        seen = (status.st_ino, status.st_mtime_ns)
        time.sleep(_LOOK_S)
    return False


def _place() -> str:
    """Within which a process number means one process."""
    boot, namespace = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}"


def _began(pid: object) -> str | None:
    """When a process began, in the system's own count; None where it has ended, or nobody says."""
    try:
        text = Path(f"/proc/{int(str(pid))}/stat").read_text()
    except (OSError, ValueError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
