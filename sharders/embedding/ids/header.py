"""The first exchange of every call: sizes of what follows, and whatever any rank has found wrong.

It has a fixed size for every module, so ranks that are at different modules, or have different plans, meet here and say
so instead of hanging. Where a channel tells sizes, payloads of any size come right behind: an exchange less in every
call, 80 microseconds of 1,800 with 26 small tables on two ranks. A fault that one rank finds in its batch is raised on
all of them. Where a batch has a size for each feature, a second exchange carries these: by then the ranks know that
they are at one module.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dmp import Calls, InputError, ranks
from sharders.channel import Channel, Sizes, Transfer
from sharders.embedding.batches.input_faults import Fault, Kind, packed, unpacked
from sharders.embedding.exchange.touched_rows import NOTHING, Touched

_WORDS = 13
"""Fingerprint, number of the entry, digest of backward passes; batch size, words, flags, checksum, touched (2); fault
(4)."""

_HEAD = struct.Struct(f"={_WORDS}q")
HEAD_BYTES = _HEAD.size
"""In front of each payload that travels with its header, all of which have a multiple of 8 bytes."""

_OUT_OF_TURN = 1 << 56
"""Set in the fingerprint of `take_turn`, which has 56 bits."""

_PER_FEATURE = -1
"""In place of the batch size: each feature has its own."""


@dataclass(frozen=True)
class Header:
    """What a rank says before its payload.

    Args:
        batch_sizes: samples it has: one number for all features, or one for each.
        words: of its payload for the receiver.
        is_training: gradients will follow.
        is_weighted: its payload carries weights.
        wants_weight_gradient: the weights get gradients.
        checksum: of the batch that its tensor group should share; 0 where there is nothing to compare.
        fault: what is wrong with its batch, or None.
        is_sparse: see `Sent`.
        touched: of data-parallel tables; see touched_rows.py.
    """

    batch_sizes: tuple[int, ...]
    words: int
    is_training: bool
    is_weighted: bool
    wants_weight_gradient: bool
    checksum: int
    fault: Fault | None
    is_sparse: bool = False
    touched: Touched = NOTHING

    def packed(self, *before: int) -> list[int]:
        """As integers, behind these three of the call."""
        batch_size = self.batch_sizes[0] if len(self.batch_sizes) == 1 else _PER_FEATURE
        flags = self.flags + 8 * self.is_sparse
        return [*before, batch_size, self.words, flags, self.checksum, *self.touched, *packed(self.fault)]

    @property
    def flags(self) -> int:
        """How the module is called, as one number."""
        return self.is_training + 2 * self.is_weighted + 4 * self.wants_weight_gradient

    @staticmethod
    def unpacked(words: Sequence[int]) -> Header:
        """Inverse of `packed`."""
        batch_size, num_words, flags, checksum, rows, elements, *fault = words[3:]
        told = bool(flags & 1), bool(flags & 2), bool(flags & 4)
        sent = bool(flags & 8), Touched(rows, elements)
        return Header((batch_size,), num_words, *told, checksum, unpacked(fault), *sent)

    def manner(self) -> str:
        """How the module is called, in words."""
        gradient = " with a gradient" if self.wants_weight_gradient else ""
        weights = f"weights{gradient}" if self.is_weighted else "no weights"
        return f"{'trains' if self.is_training else 'does not train'} and has {weights}"


class Behind(NamedTuple):
    """Payloads that travel with their headers.

    Args:
        memory: flat, of the channel; for each rank `HEAD_BYTES`, which are written, and its payload.
        sizes: elements for each rank, of the head too.
    """

    memory: torch.Tensor
    sizes: Sizes


def go_along(channel: Channel, device: torch.device) -> bool:
    """Whether payloads travel with their headers."""
    return channel.size > 1 and channel.tells_sizes and device.type == "cpu"


class Handshake:
    """Headers of one module.

    Args:
        content: text that must be equal on all ranks: tables and layouts.
        features: names, for messages.
        channel: between the ranks that exchange; carries headers, and payloads behind them, alone: a header never meets
            anything else.
        data_ranks: which of the different batches each of them has.
        rank_names: what each of them is called.
        tensor_axes: mesh axes along which the batch is the same, for messages.
        replicas: ranks of the other copies that do not exchange ids with this one, but must hear of a fault.
    """

    def __init__(
        self,
        content: str,
        features: Sequence[str],
        channel: Channel,
        data_ranks: Sequence[int],
        rank_names: Sequence[int],
        tensor_axes: Sequence[str],
        replicas: Channel | None = None,
    ) -> None:
        self.replicas, self.rank_names = replicas, list(rank_names)
        self.features, self.channel, self.size = list(features), channel, channel.size
        self.data_ranks, self.tensor_axes = list(data_ranks), list(tensor_axes)
        firsts = {data_rank: rank for rank, data_rank in reversed([*enumerate(data_ranks)])}
        self._of_same_samples = [(r, firsts[of]) for r, of in enumerate(data_ranks) if firsts[of] != r]
        self._content = content
        self.rename("the module")

    def rename(self, name: str, calls: Calls | None = None) -> None:
        """Set the module's name and its model's calls, which are part of what is compared."""
        calls = calls or Calls()
        self.name, self._calls, self._model = name, calls, calls.model
        calls.num_compared = max(calls.num_compared, self.size)
        self.forward, self.lookup = f"the forward of {name!r}", f"the lookup of {name!r}"
        self.backward = f"the backward of {name!r}"
        """Names of the calls, for messages."""
        digest = hashlib.sha256((name + self._content + calls.model).encode()).digest()
        self._fingerprint = int.from_bytes(digest[:7], "big")

    def exchange(
        self, mine: Sequence[Header], device: torch.device, here: ranks.entry, behind: Behind | None = None
    ) -> tuple[list[Header], Transfer | None]:
        """Send a header to every rank; returns theirs, and what has come behind them with the heads, if anything goes.

        Args:
            mine: for each rank.
            device: to send from.
            here: the call under way, which is counted alike from now on.
            behind: payloads, where these `go_along`.

        Raises:
            InputError: on every rank alike, what any rank found, or how they differ.
        """
        came: Transfer | None = None
        if self.size == 1:
            headers = list(mine)
        else:
            backwards = here.take_backwards()
            digest = zlib.crc32(repr(backwards).encode(), self._calls.digest())
            rows = [h.packed(self._fingerprint, here.number, digest) for h in mine]
            words, came = self._send(rows, device, behind)
            here.align(max(w[1] for w in words))
            if any(w[0] != self._fingerprint for w in words):
                self._of_all_copies((self.rank_names[0], Fault(Kind.ELSEWHERE)), device)
                self._raise_mismatch(here.name, "begins a batch")
            if any(w[2] != digest for w in words):
                self._of_all_copies((self.rank_names[0], Fault(Kind.ELSEWHERE)), device)
                self._raise_parted_backwards(backwards)
            # Those that say what one of this rank's does, as where all bags have one id, are not made again.
            own = zip(rows, mine, strict=True) if len(mine[0].batch_sizes) == 1 else ()
            known = {tuple(row[3:]): header for row, header in own}
            headers = [known.get(tuple(w[3:])) or Header.unpacked(w) for w in words]
        found = next(((r, h.fault) for r, h in zip(self.rank_names, headers, strict=True) if h.fault is not None), None)
        difference: InputError | None = None
        if found is None:
            try:
                self._check_same_manner(headers)
                self._check_same_samples(headers)
            except InputError as error:
                difference, found = error, (self.rank_names[0], Fault(Kind.ELSEWHERE))
        found = self._of_all_copies(found, device)
        if difference is not None:
            raise difference
        if found is not None:
            raise found[1].error(self.features, self.name, found[0])
        if any(header.batch_sizes == (_PER_FEATURE,) for header in headers):
            headers = self._with_sizes(headers, mine[0].batch_sizes, device)
        return headers, came

    def alone(self, mine: Sequence[Header]) -> list[Header]:
        """What `exchange` gives where nobody else has samples, and nobody is asked.

        Raises:
            InputError: on this rank.
        """
        me = self.channel.rank
        fault = mine[me].fault
        if fault is not None:
            raise fault.error(self.features, self.name, self.rank_names[me])
        nothing = tuple(0 for _ in mine[me].batch_sizes)
        return [h if r == me else replace(h, batch_sizes=nothing, touched=NOTHING) for r, h in enumerate(mine)]

    def take_turn(
        self, doing: str, device: torch.device, here: ranks.entry, told: tuple[int, ...] = ()
    ) -> list[tuple[int, ...]]:
        """Meet before what is unusual, lest another rank do something else in its place; one exchange.

        Args:
            doing: what is to be done, as in "finishes call 3".
            device, here: as of `exchange`.
            told: by this rank to the others, up to 10 words.

        Returns:
            What each rank has told.

        Raises:
            RanksError: on every rank: they do something else.
        """
        turn, digest = self._fingerprint ^ _OUT_OF_TURN, zlib.crc32(doing.encode())
        row = [turn, here.number, digest, *told, *[0] * (_WORDS - 3 - len(told))]
        words, _ = self._send([row] * self.size, device)
        here.align(max(w[1] for w in words))
        if any(w[0] != turn or w[2] != digest for w in words):
            self._raise_mismatch(here.name, doing)
        return [tuple(w[3 : 3 + len(told)]) for w in words]

    def _send(
        self, rows: Sequence[Sequence[int]], device: torch.device, behind: Behind | None = None
    ) -> tuple[list[Sequence[int]], Transfer | None]:
        """A row of `_WORDS` to each rank; theirs, and what has come where payloads go along."""
        if not go_along(self.channel, device):
            send = torch.tensor(rows, dtype=torch.int64, device=device).view(-1)
            sizes = [_WORDS] * self.size
            words = self.channel.all_to_all(send, sizes, sizes).wait().view(self.size, _WORDS).tolist()
            return words, None
        if behind is None:
            memory = self.channel.empty(self.size * _WORDS, torch.int64, device)
            behind = Behind(memory, [_WORDS] * self.size)
        at, item = behind.memory.data_ptr(), behind.memory.itemsize
        for row, count in zip(rows, behind.sizes, strict=True):
            ctypes.memmove(at, _HEAD.pack(*row), HEAD_BYTES)
            at += count * item
        transfer = self.channel.all_to_all(behind.memory, behind.sizes, None)
        first = transfer.wait().data_ptr()
        heads = [ctypes.string_at(first + start * item, HEAD_BYTES) for start in transfer.starts()]
        return [*map(_HEAD.unpack, heads)], transfer

    def _with_sizes(self, headers: Sequence[Header], mine: tuple[int, ...], device: torch.device) -> list[Header]:
        """The headers, with a batch size for each feature; one exchange."""
        num = len(self.features)
        send = torch.tensor(mine if len(mine) == num else mine * num, dtype=torch.int64, device=device)
        sizes = [num] * self.size
        came = self.channel.all_to_all(send.repeat(self.size), sizes, sizes).wait().view(self.size, num).tolist()
        return [replace(header, batch_sizes=tuple(of_rank)) for header, of_rank in zip(headers, came, strict=True)]

    def _check_same_manner(self, headers: Sequence[Header]) -> None:
        for rank, header in enumerate(headers):
            if header.flags != headers[0].flags:
                alone = (
                    ". To evaluate on one rank alone have its tables whole on each, by data_parallel() in the plan, "
                    "and no gradients (torch.no_grad())"
                )
                raise InputError(
                    f"ranks call {self.name} in different ways: rank 0 {headers[0].manner()}, rank {rank} "
                    f"{header.manner()}; call it the same way on every rank"
                    + alone
                    * (header.is_training != headers[0].is_training)
                )

    def _of_all_copies(self, found: tuple[int, Fault] | None, device: torch.device) -> tuple[int, Fault] | None:
        """The first fault of any copy: one that goes on alone would wait for the others in the next average."""
        if self.replicas is None:
            return found
        rank, fault = found or (0, None)
        mine = torch.tensor([rank, *packed(fault)], dtype=torch.int64, device=device)
        told = ((of_rank[0], unpacked(of_rank[1:])) for of_rank in self.replicas.all_gather(mine).tolist())
        return next(((rank, fault) for rank, fault in told if fault is not None), None)

    def _check_same_samples(self, headers: Sequence[Header]) -> None:
        for rank, first in self._of_same_samples:
            if headers[rank].checksum != headers[first].checksum:
                axes = ", ".join(repr(axis) for axis in self.tensor_axes)
                raise InputError(
                    f"ranks {first} and {rank} call {self.name} with different batches, and lie along mesh axis {axes}"
                    f", whose ranks must all have the same samples: both are data rank {self.data_ranks[rank]}. Does a "
                    "data loader shard over all ranks? Its sampler's num_replicas is env.data_size, its rank this "
                    "process's place on the mesh's other axes. Where each rank loads samples of its own on purpose: "
                    "sharders.gather_batch(batch, env) makes one batch of them"
                )

    def _raise_parted_backwards(self, mine: list[tuple[str, int]]) -> None:
        """A backward pass has no header: where the sizes fit, ranks have taken each other's gradients for their own."""
        both = mine, self._calls.facts()
        said = ranks.gather_objects("the forward after different backward passes", both, self.channel.group)
        told = [of_rank for of_rank, _ in said]
        if all(of_rank == told[0] for of_rank in told):
            raise ranks.RanksError(
                f"the ranks have made different steps of optimizers on {self._calls.model or 'the model'} since they "
                "were last compared, and what it holds has parted. The last ones: "
                + "; ".join(f"rank {name}: {facts}" for name, (_, facts) in zip(self.rank_names, said, strict=True))
                + ". Whether a step is made, and with which learning rate, must be decided on all ranks alike, as by a "
                "loss that is averaged over them; go on from a checkpoint"
            )
        by_name = [", ".join(name for name, _ in of_rank) or "none" for of_rank in told]
        by_call = [", ".join(f"{name}, call {number}" for name, number in of_rank) for of_rank in told]
        texts = by_call if len(set(by_name)) == 1 else by_name
        raise ranks.RanksError(
            "the ranks have run different backward passes since the forward before this one: "
            + "; ".join(f"rank {name}: {text}" for name, text in zip(self.rank_names, texts, strict=True))
            + ". Gradients of their tables went to one another: go on from a checkpoint, with a loss that reaches the "
            "same tables on every rank"
        )

    def _raise_mismatch(self, place: str, doing: str) -> None:
        """What each rank does, where headers of different calls have met.

        Args:
            place: the call that this rank is in.
            doing: what it begins there.
        """
        mine = self.name, self._content, self._model, f"in {place} ({doing})"
        told = ranks.gather_objects("the forward of different modules", mine, self.channel.group)
        for rank, (name, content, model, _) in enumerate(told):
            if (name, content) == told[0][:2] and model != told[0][2]:
                raise InputError(
                    f"ranks are not at the same model: rank 0 calls {name!r} of {told[0][2]}, rank {rank} that of "
                    f"{model}; every rank must run the same models in the same order, and copy them alike"
                )
            if (name, content) != told[0][:2]:
                what = f"calls {name!r}" if name != told[0][0] else f"has other tables, layouts or kernels in {name!r}"
                raise InputError(
                    f"ranks are not at the same module: rank 0 calls {told[0][0]!r}, rank {rank} {what}; every rank "
                    "must run the same modules in the same order, with the same plan, and update copies of tables by "
                    "the same kernel (kernel= of their sharder)"
                )
        places = {rank: does for rank, (*_, does) in zip(self.rank_names, told, strict=True)}
        assert len(set(places.values())) > 1, "fingerprints differ, contents do not"
        raise ranks.RanksError(ranks.parted_text(places))
