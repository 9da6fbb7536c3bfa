"""A thread that sees when ranks part ways: one of them is dead, or two wait for each other in different calls.

[Note: how] Nothing is exchanged while all goes well; once a second the thread reads one counter in the store that the
process group was made with. A rank that has been in one entry (see call_log.py) for a while raises the counter, upon
which every rank writes down where it is; the one that asked compares:
    the same entry, or one that the other has passed     the other is slow, or idle: wait
    another entry of the same number                     they have parted
    nobody moves at all, in different calls              they have parted: see [Note: still]
    none, after an error that has left a pass there      it does not come: see [Note: left] in left.py
    it has ended, or does not answer for a minute        it is lost
The first to know writes the *verdict* into the store; every rank that it concerns reports it to the log, then ends its
gloo connections, so that what waits raises at once, and entries turn that into the verdict.

[Note: still] A rank is still when it is in an entry or in a call of torch's that may wait (backward, a collective),
its main thread uses no time, its stack does not change and no byte moves on its connections. A rank that loads data,
evaluates, computes or compiles is not still, however long that takes.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from dmp.errors import RanksError
from dmp.ranks import call_log
from dmp.ranks.answers import (
    STILL_S,
    SUSPECT_S,
    Answer,
    find_all_still,
    find_left,
    find_parted,
    ranks_are,
    who_is_awaited,
    who_is_idle,
)
from dmp.ranks.connections import backend_of, cloned, shut_all, traffic
from dmp.ranks.left import handled, left
from dmp.ranks.stacks import line_of, place_of

_log = logging.getLogger("dmp")

LOST_AFTER = "DMP_LOST_AFTER_S"
"""Environment variable: seconds after which a rank that does not answer is lost; 60 by default."""

_IDLE_S, _BUSY_S = 1.0, 0.3  # between looks
_ABSENT_S = 10.0  # before a rank that waits says for whom
_ENDED_S = 4.0  # an answer is awaited when a connection has broken
_ACKNOWLEDGED_S = 2.0
_LET_GO_S = 0.2


class PeerLost(RanksError):
    """Another rank is gone: what it has done, and what the others still do, is not known."""


class Watchdog:
    """Of one process group. `start` makes it."""

    def __init__(self, group: dist.ProcessGroup, store: Any, patience_s: float) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._store = store
        self._patience_s = patience_s
        self._pid = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._wake, self._stopped = threading.Event(), False
        self._answered, self._asked = -1, 0
        self._asked_at: dict[int, float] = {}
        self._mark: Any = None
        self._waits: dict[str, int] = {}
        self._still_since = time.monotonic()
        self._suspicious_since: float | None = None
        self._has_lost = False
        self._warned_of: Any = None
        # gloo connects every rank of the default group to every other, unless it is asked to wait until they speak.
        self._most_open = traffic().num_open
        self._is_meshed = backend_of(group) == "gloo" and self._most_open >= self.size - 1
        self._looked = threading.Condition()
        self._failure: Exception | None = None
        self._done = False
        self._thread = threading.Thread(target=self._run, name="dmp-watchdog", daemon=True)

    def begin(self) -> None:
        self._asked = self._store.add("asked", 0)
        self._answer(0.0)
        self._thread.start()

    def stop(self, *, followed: bool = False) -> None:
        """Say that this rank ends, and end the thread.

        Args:
            followed: by another in the same store, where peers of the new group would read that this rank has ended.
        """
        if os.getpid() != self._pid or self._stopped:
            return
        self._stopped = True
        self._wake.set()
        self._thread.join(2.0)
        if not self._thread.is_alive() and self._failure is None and not followed:
            with suppress(Exception):
                self._store.set(f"left/{self.rank}", "1")

    def explain(self) -> RanksError | None:
        """Why a collective of this rank has broken, where that is another rank's doing; takes a few seconds at most."""
        if threading.current_thread() is self._thread:
            return None
        with self._looked:
            if self._suspicious_since is None:
                self._suspicious_since = time.monotonic()
            self._wake.set()
            self._looked.wait_for(lambda: self._suspicious_since is None or self._done, _ENDED_S + 3.0)
        return call_log.Verdict.error

    def wait_in_store(self, key: str, count: int) -> int:
        """Return when `count` ranks have come here as often as this one; how often that is.

        Raises:
            RanksError: they will not.
        """
        arrived = self._store.add(key, 1)
        times: int = -(-arrived // count)
        self.poll_store(key, times * count, count)
        return times

    def wait_for_one(self, key: str, is_awaited: bool) -> None:
        """Return when one rank has come here as often as this one; at once where this is that one.

        Raises:
            RanksError: it will not.
        """
        if is_awaited:
            self._store.add(key, 1)
            return
        self._waits[key] = self._waits.get(key, 0) + 1
        self.poll_store(key, self._waits[key], self.size)

    def poll_store(self, key: str, wanted: int, count: int) -> None:
        """Return when a number in the store has come to what is wanted.

        No collective breaks here when a rank dies, so connections are watched, which its end closes.

        Args:
            count: ranks that ask, so that they do so less often where they are many.
        """
        pause_s, watched = 0.001, time.monotonic()
        while self._store.add(key, 0) < wanted:
            if time.monotonic() - watched > _IDLE_S:
                self._watch_connections()
                watched = time.monotonic()
            if call_log.Verdict.error is not None:
                raise type(call_log.Verdict.error)(str(call_log.Verdict.error))
            if isinstance(self._failure, dist.DistNetworkError):  # what is read there may answer what was asked before
                raise self._failure
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, max(0.05, count / 2000))

    def _watch_connections(self) -> None:
        """Ask what is behind it where there are fewer than before."""
        before, self._most_open = self._most_open, traffic().num_open
        if self._most_open < before:
            self.explain()

    # ---- the thread ----

    def _run(self) -> None:
        while not self._stopped:
            if isinstance(self._failure, dist.DistNetworkError):  # a connection does not come back
                self._host_is_gone(self._failure)
            else:
                try:
                    self._look()
                except Exception as error:  # of the store: its host is gone
                    self._failure = error
                    self._host_is_gone(error)
            busy = bool(call_log.running) or self._suspicious_since is not None
            self._wake.wait(_BUSY_S if busy else _IDLE_S)
            if not self._stopped:
                self._wake.clear()

    def _look(self) -> None:
        if self._done:
            return
        stuck_s, still_s = self._observe()
        asked = self._store.add("asked", 0)
        if asked != self._answered:
            self._asked = asked
            if self._store.check(["verdict"]):
                self._adopt(json.loads(self._store.get("verdict")))
                return
            self._answer(still_s)
        if stuck_s > SUSPECT_S or still_s > STILL_S or self._suspicious_since is not None:
            self._compare(still_s)

    def _observe(self) -> tuple[float, float]:
        """For how long this rank has been in one entry, and for how long it has been still."""
        now = time.monotonic()
        oldest = max((now - e.since for e in list(call_log.running.values())), default=0.0)
        inner = max(list(call_log.running.values()), key=lambda e: e.since, default=None)
        place = place_of(self._main)
        if call_log.work or (not place.waits_in and now - (inner.since if inner else now) < SUSPECT_S):
            self._mark, self._still_since, self._has_lost = None, now, False
            return oldest, 0.0
        threads = {e.thread: place_of(e.thread).mark for e in list(call_log.running.values())}
        moved = traffic()
        self._most_open = max(self._most_open, moved.num_open)
        self._has_lost = self._is_meshed and moved.num_open < self.size - 1
        mark = (place.mark, tuple(threads.items()), tuple(call_log.running), self._used_s(), moved.num_bytes)
        if mark != self._mark:
            self._mark, self._still_since = mark, now
        return oldest, now - self._still_since

    def _used_s(self) -> float:
        """Processor time of the main thread, to a tenth."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return round(time.clock_gettime(time.pthread_getcpuclockid(self._main)), 1)

    def _answer(self, still_s: float) -> None:
        place = place_of(self._main)
        now = time.monotonic()
        running = list(call_log.running.values())
        told = {
            "asked": self._asked,
            "come": {key: [s.number, s.last, list(s.dropped)] for key, s in list(call_log.sequences.items())},
            "running": [[e.sequence.key, e.number, e.name, round(now - e.since, 2)] for e in running],
            "waits_in": place.waits_in,
            "left": left(),
            "handles": "" if running or place.waits_in else handled(self._main),
            "line": ", ".join(filter(None, (line_of(self._main), *call_log.work))),
            "still_s": round(still_s, 2),
        }
        self._store.set(f"at/{self.rank}", json.dumps(told))
        self._answered = self._asked

    def _compare(self, still_s: float) -> None:
        """Ask, and judge by what has been answered so far."""
        now = time.monotonic()
        recent = max(self._asked_at.values(), default=0.0)
        if now - recent > 1.0 + self.size / 64:
            self._asked = self._store.add("asked", 1)
            self._asked_at[self._asked] = now
            for old in list(self._asked_at)[:-200]:
                del self._asked_at[old]
            self._answer(still_s)
        mine = list(call_log.running.values())
        ranks = sorted({rank for e in mine for rank in e.sequence.ranks} or range(self.size))
        answers, ended = self._read(ranks)
        verdict = self._ended(ranks, answers, ended, now, still_s)
        if verdict is None:
            answers[self.rank] = Answer(**json.loads(self._store.get(f"at/{self.rank}")))
            text = find_parted(mine, answers, self.rank) or find_left(mine, answers, self.rank, self._patience_s)
            if text is None and still_s > STILL_S:
                text = find_all_still([rank for rank in ranks if rank != self.rank], answers, self._asked)
            verdict = None if text is None else ("parted", text)
        if verdict is not None:
            kind, text = verdict
            told = {"kind": kind, "text": text, "ranks": ranks}
            self._store.compare_set("verdict", "", json.dumps(told))
            self._store.add("asked", 1)
            self._adopt(json.loads(self._store.get("verdict")), is_first=True)
            return
        with self._looked:
            since = self._suspicious_since
            if since is not None and now - since > _ENDED_S:
                self._suspicious_since = None
                self._looked.notify_all()

    def _read(self, ranks: list[int]) -> tuple[dict[int, Answer], list[int]]:
        """What the others have answered, and which have ended."""
        answers: dict[int, Answer] = {}
        others = [rank for rank in ranks if rank != self.rank]
        here = others
        if not self._store.check([f"at/{rank}" for rank in others]):
            here = [rank for rank in others if self._store.check([f"at/{rank}"])]
        values = self._store.multi_get([f"at/{rank}" for rank in here]) if here else []
        for rank, value in zip(here, values, strict=True):
            answers[rank] = Answer(**json.loads(value))
        ended = [rank for rank in others if self._store.check([f"left/{rank}"])]
        return answers, ended

    def _ended(
        self, ranks: list[int], answers: dict[int, Answer], ended: list[int], now: float, still_s: float
    ) -> tuple[str, str] | None:
        """Ranks that are lost. One that has ended may have done its part: what it sent last is still on its way."""
        if ended and (self._suspicious_since is not None or still_s > SUSPECT_S):
            return "lost", f"{ranks_are(ended)} gone: the program has ended there"
        absent = [rank for rank in ranks if rank not in answers and rank != self.rank]
        if absent and self._has_lost:
            gone = ranks_are(absent, many="is")
            gone = gone if len(absent) == 1 else f"one of {gone}"
            return "lost", f"{gone} gone: a connection has been closed, and no call of dmp was ever made there"
        if still_s > _ABSENT_S:
            self._warn(absent, answers, still_s)
        suspicious = self._suspicious_since
        silent: list[int] = []
        for rank, answer in answers.items():
            unanswered = [at for asked, at in self._asked_at.items() if asked > answer.asked]
            wait_s = now - min(unanswered, default=now)
            broken = suspicious is not None and now - suspicious > _ENDED_S and wait_s > _ENDED_S - 1
            if wait_s > self._patience_s or broken:
                silent.append(rank)
        if not silent:
            return None
        if suspicious is not None:
            return "lost", f"{ranks_are(silent)} gone: a connection broke and no answer comes from there"
        return "lost", (
            f"{ranks_are(silent, 'has', 'have')} not answered for {self._patience_s:g} s "
            f"(killed, stopped or cut off; {LOST_AFTER} sets the time)"
        )

    def _warn(self, absent: list[int], answers: dict[int, Answer], still_s: float) -> None:
        """Once for each wait, for whom it is: they may be slow, or never come."""
        waiting = next(iter(list(call_log.running.values())), None)
        wait = self._still_since if waiting is None else waiting
        if self._warned_of == wait:
            return
        self._warned_of = wait
        texts = [f"{ranks_are(absent, 'has', 'have')} come to no call of dmp so far"] if absent else []
        texts.append(who_is_idle(answers) if waiting is None else who_is_awaited(waiting, answers))
        if any(texts):
            name = place_of(self._main).waits_in if waiting is None else waiting.name
            text = "; ".join(filter(None, texts))
            _log.warning("rank %d has waited for %d s in %s: %s", self.rank, still_s, name, text)

    def _host_is_gone(self, error: Exception) -> None:
        if self._done:
            return
        stuck_s, still_s = self._observe()
        # A rank may go on without the store, and without the one that had it: in calls of torch's among the others.
        if stuck_s < SUSPECT_S and still_s < self._patience_s and self._suspicious_since is None:
            return
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = "torchrun's agent" if agent else "rank 0, unless the program has made the store itself"
        why = str(error).splitlines()[0][:120]
        text = f"what hosts the process group's store is gone ({host}): the store no longer answers ({why})"
        self._adopt({"kind": "lost", "text": text, "ranks": list(range(self.size))})

    def _adopt(self, told: dict[str, Any], is_first: bool = False) -> None:
        """Take a verdict as it is, tell of it, and end what waits."""
        self._done = True
        if self.rank in told["ranks"]:
            kind = PeerLost if told["kind"] == "lost" else RanksError
            call_log.Verdict.error, call_log.Verdict.ranks = kind(told["text"]), frozenset(told["ranks"])
            _log.error("rank %d: %s", self.rank, told["text"])
            if self._failure is None:
                self._acknowledge(told["ranks"], is_first)
            shut_all()
        with self._looked:
            self._suspicious_since = None
            self._looked.notify_all()

    def _acknowledge(self, ranks: list[int], is_first: bool) -> None:
        """So that all have read it before the first of them ends, and the store with it."""
        with suppress(Exception):
            count = self._store.add("heard", 1)
            until = time.monotonic() + _ACKNOWLEDGED_S
            while is_first and count < len(ranks) and time.monotonic() < until:
                time.sleep(0.05)
                count = self._store.add("heard", 0)


_SAME_STORE = (
    "this process group was made in the store of an earlier one, which torchrun's is for all of a program: torch may "
    "read addresses of the earlier group there, and then its init_process_group hangs, or cannot connect, on some "
    "ranks. Give each group a store of its own: init_process_group('gloo', store=PrefixStore('second', store), "
    "rank=..., world_size=...)"
)
_current: list[Watchdog] = []


def start() -> Watchdog | None:
    """The watchdog of the default group, made where there is none; None for one process, or without a real store."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        return None
    with _starting:
        return _started(world)


def _started(world: dist.ProcessGroup) -> Watchdog | None:
    if _current and _current[0].group is world:
        if _current[0]._pid == os.getpid():
            return _current[0]
        raise RanksError(str(call_log.Verdict.error))
    if dist.get_world_size(world) == 1 or backend_of(world) == "fake":
        return None
    patience_s = float(os.environ.get(LOST_AFTER, "60"))
    own = cloned(dist.distributed_c10d._get_default_store(), patience_s)  # private: what the group was made with
    store = dist.distributed_c10d.PrefixStore("dmp_watchdog", own)
    made = Watchdog(world, store, patience_s)
    for old in _current:  # torchrun has one store for every group that a program makes, one after the other
        is_same = old._pid == os.getpid() and store.check([f"at/{old.rank}"])
        old.stop(followed=is_same)
        if is_same:
            made._waits = old._waits
            _log.warning(_SAME_STORE)
    call_log.forget()
    made.begin()
    _current[:] = [made]
    return made


def leave() -> None:
    """Say that this process ends, and let gloo's threads finish; no group is ended that the program has made.

    A thread that has yet to drop the tensor of the last collective needs the interpreter for it, and aborts the process
    when it finds that gone.
    """
    for one in _current:
        one.stop()
        time.sleep(_LET_GO_S)


def await_group() -> None:
    """Start as soon as there is a group, in a process that a launcher has started as one of several.

    A rank that never comes to a call of ours can be told only where it is seen.
    """
    if os.environ.get("WORLD_SIZE", "1") in ("", "1") or not dist.is_available():
        return

    def wait() -> None:
        while not dist.is_initialized():
            time.sleep(_IDLE_S)
        start()

    threading.Thread(target=wait, name="dmp-awaits-group", daemon=True).start()


def _forked() -> None:
    """In a process that this one forks, as a loader's worker: what waits there for other ranks would wait for ever."""
    for dog in _current:
        call_log.Verdict.ranks = frozenset(range(dog.size))
        call_log.Verdict.error = RanksError(
            f"process {os.getpid()} was forked from rank {dog.rank} of the group, process {dog._pid}, which alone "
            "exchanges for that rank; run wrapped models there, and give others their results, or dmp.to_unsharded"
        )


_starting = threading.Lock()
atexit.register(leave)
os.register_at_fork(after_in_child=_forked)
