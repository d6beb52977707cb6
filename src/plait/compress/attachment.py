"""What goes on between a model's buckets of gradients and the collectives, step by step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from plait.compress import communicator
from plait.compress.agreement import agree
from plait.compress.call import stop_recording
from plait.compress.codec import Codec, Exact
from plait.compress.collectives import all_reduce
from plait.compress.compression import Compression
from plait.compress.given import damaged, entry, saved
from plait.compress.layout import Piece
from plait.compress.memory import FeedbackMemory
from plait.compress.price import WORTH_ELEMENTS, price_ms
from plait.compress.race import race
from plait.compress.report import Comparison, Report, Summary
from plait.compress.rules import EXACT, described, parameters_of, plain_name, select
from plait.compress.watch import Watch
from plait.compress.work import Work
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.timeline import Timeline

FORMAT = "plait.compress.state/1"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_log = logging.getLogger(__name__)


class Bucket(Protocol):
    """What DDP hands over: gradients of some parameters, one after the other in a buffer."""

    def index(self) -> int:
        """Its place in the order of buckets, 0 for the first of a step."""

    def is_last(self) -> bool:
        """Whether it ends a step."""

    def buffer(self) -> Tensor:
        """The gradients as one row."""

    def gradients(self) -> list[Tensor]:
        """The gradients one by one."""

    def parameters(self) -> list[Tensor]:
        """What they are gradients of."""


Hook = Callable[[Bucket], "Future[Tensor]"]


def _outcome(ended: Future[Any]) -> Tensor:
    outcome = ended.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome  # type: ignore[no-any-return]


class Attachment:
    """Compresses the gradients of one model; made by :func:`plait.compress.attach`."""

    def __init__(
        self, model: nn.Module, group: Any, compression: Compression, timeline: Timeline | None = None
    ) -> None:
        self.compression = compression
        self.plain: Hook | None = None
        """What reduces a bucket that is not to be compressed."""
        self.on_detach: Callable[[], None] | None = None
        self.automatic: Callable[[Attachment], None] | None = None
        """Set where the environment asked for it: told of one of the script's own, which takes its place."""
        parameters = parameters_of(model)
        self.selected = select(
            described(model), compression.bits, compression.rules, smallest=compression.smallest
        )
        # Also those that were frozen after DDP had put them into its buckets.
        everything = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        self._names = {id(parameter): name for name, parameter in everything.items()}
        self._parameters = everything  # so that no other parameter can come to have the same id
        self._group, self._timeline = group, timeline
        shapes = {f"parameter {n}": f"{tuple(p.shape)} of {p.dtype}" for n, p in parameters.items()}
        agree({**compression.facts(), **shapes}, group, timeout_s=compression.settings.timeout_s)
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)
        if timeline is not None:
            communicator.record(timeline)
        self._step = -1
        asked = {each.parameter.name: each.bits for each in self.selected}
        self._watch = Watch(compression, asked, group)
        fed = compression.feeds_back(asked.values()) and self._world > 1
        self._memory = None
        if fed:
            self._memory = FeedbackMemory(
                world=self._world, bits=compression.feedback_bits, seed=compression.seed, rank=self._rank
            )
        self.declined: frozenset[int] = frozenset()
        """The widths that are not used because no compression is faster."""
        self.left = False
        """Whether everything is left to DDP, because that is fastest."""
        self._compared: Comparison | None = None
        if compression.decline and self._world > 1 and self._watch.widths:
            self._decline()
        self._totals, self._exposed_s, self._last_ns = Report(), 0.0, 0
        self._pieces: dict[tuple[str, ...], tuple[Piece, ...]] = {}
        self._said()

    # What there is to know.

    @property
    def bits(self) -> dict[str, int]:
        """The bits in force, by parameter; 32 is uncompressed."""
        slow = self._watch.widths if self.left else self.declined
        return {name: EXACT if bits in slow else bits for name, bits in self._watch.bits.items()}

    @property
    def memory_bytes(self) -> int:
        """What compression has allocated in this process: error feedback, and buffers of messages."""
        held = 0 if self._memory is None else self._memory.bytes
        return held + communicator.memory_bytes()

    @property
    def log(self) -> Any:
        """The decisions on bits so far, with ``save(path)``; None where bits are fixed."""
        return self._watch.log

    def report(self) -> Summary:
        """What compression saved and took so far, on this worker."""
        return Summary(
            steps=self._step + 1,
            bits=self.bits,
            errors=self._watch.errors,
            exposed_s=self._exposed_s,
            memory_bytes=self.memory_bytes,
            declined=tuple(sorted(self.declined)),
            left=self.left,
            compared=self._compared,
            total=Report(**vars(self._totals)),
        )

    def _decline(self) -> None:
        """Find out which widths do not pay, and whether any does; the same on all workers."""
        config, settings = self.compression, self.compression.settings
        codecs = {bits: config.codec_at(bits) for bits in self._watch.widths}
        current = communicator.current()
        mesh = current.mesh(self._group, communicator.ranks_of(self._group), settings)
        pace, speeds = current.measured(mesh, [*codecs.values(), Exact()], settings)
        topology = settings.topology(mesh.hosts)
        hosts = self._world if topology is None else len(topology.hosts)

        def price_s(codec: Codec) -> float:
            whole = [Piece(name="", count=WORTH_ELEMENTS, codec=codec)]
            return price_ms(whole, hosts, pace, speeds, chunk_bytes=settings.chunk_bytes) / 1e3

        plain_s, packed_s = price_s(Exact()), {bits: price_s(codec) for bits, codec in codecs.items()}
        self.declined = frozenset(bits for bits, price in packed_s.items() if price >= plain_s)
        used = [codec for bits, codec in codecs.items() if bits not in self.declined]
        count = min(sum(parameter.numel() for parameter in self._parameters.values()), WORTH_ELEMENTS)
        device = next(iter(self._parameters.values())).device
        ours, theirs = race(used[0] if used else Exact(), count, device, self._group, settings)
        self.left = theirs < ours
        if not used and plain_s > 0:  # foretold from what was measured: no packed numbers were sent
            best_s = min(packed_s.values())
            self._compared = Comparison(elements=WORTH_ELEMENTS, plain_s=plain_s, compressed_s=best_s)
        elif used and self.left:
            self._compared = Comparison(elements=count, plain_s=theirs, compressed_s=ours)

    def _said(self) -> None:
        if self._rank == 0:
            _log.info("%s", self)

    def __str__(self) -> str:
        compressed = [bits for bits in self.bits.values() if bits != EXACT]
        config, exact = self.compression, len(self.bits) - len(compressed)
        if not compressed:
            why = "uncompressed was asked for" if config.bits == EXACT else "none is large enough"
            if self.left or self.declined:
                why = "that is faster on this network"
            return f"plait leaves the gradients of all {exact} parameters uncompressed: {why}"
        widths = " and ".join(map(str, sorted(set(compressed)))) + " bits"
        if config.bits == "auto" and not (self.log and self.log.decisions):
            widths += " until others are chosen"
        feedback = "with" if self._memory is not None else "without"
        return (
            f"plait compresses the gradients of {len(compressed)} parameters to {config.codec or widths} "
            f"{feedback} error feedback, and leaves {exact} exact"
        )

    # One step after the other.

    def reduce(self, bucket: Bucket) -> Future[Tensor]:
        """Average a bucket of gradients over the workers: DDP's hook."""
        if bucket.index() == 0:
            self._step += 1
            if self._watch.decided(self._step - 1):
                self._pieces.clear()
        buffer, last = bucket.buffer(), bucket.is_last()
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        ours = not self.left and not buffer.is_sparse and buffer.dtype in _DTYPES
        if ours and self._watch.observes(self._step):
            for name, gradient in zip(names, bucket.gradients(), strict=True):
                if gradient.is_floating_point() and name in self._watch.bits:
                    self._watch.see(name, gradient, self._step)
        assert self.plain is not None, "an attachment is told what else to do"
        future = self._start(names, bucket.parameters(), buffer, last) if ours else self.plain(bucket)
        if last and self._watch.observes(self._step):
            self._watch.exchange(self._step)
        return future

    def _start(
        self, names: tuple[str, ...], parameters: Sequence[Tensor], buffer: Tensor, last: bool
    ) -> Future[Tensor]:
        if names not in self._pieces:
            bits = self.bits
            self._pieces[names] = tuple(
                Piece(
                    name=name,
                    count=parameter.numel() * (2 if parameter.is_complex() else 1),
                    codec=self.compression.codec_at(bits.get(name, EXACT)),
                )
                for name, parameter in zip(names, parameters, strict=True)
            )
        pieces = self._pieces[names]
        feedback, on_device = None, buffer.device.type != "cpu"
        if self._memory is not None and any(not isinstance(piece.codec, Exact) for piece in pieces):
            feedback = self._memory.lend({piece.name: piece.count for piece in pieces})  # type: ignore[misc]
        ended: Future[Any] = Future(devices=[buffer.device] if on_device else None)
        if last:
            self._last_ns = time.perf_counter_ns()
        work = all_reduce(
            buffer,
            pieces=pieces,
            group=self._group,
            op="average",
            async_op=True,
            seed=self.compression.seed,
            step=self._step,
            feedback=feedback,
            settings=self.compression.settings,
        )
        assert work is not None
        # DDP would take an exception in a future for a tensor. One that a callback raises it passes on.
        future: Future[Tensor] = ended.then(_outcome)
        lent = names if feedback is not None else None
        work.then(partial(self._done, ended=ended, result=buffer, lent=lent, step=self._step, last=last))
        return future

    def _done(
        self,
        work: Work,
        *,
        ended: Future[Any],
        result: Tensor,
        lent: tuple[str, ...] | None,
        step: int,
        last: bool,
    ) -> None:
        """On the communication thread, at the end of an operation."""
        error = work.exception()
        if error is None:
            try:
                self._account(work, last)
                if lent is not None and self._memory is not None:
                    self._memory.take_back(lent, step)
            except Exception as problem:
                error = problem
        ended.set_result(result if error is None else error)

    def _account(self, work: Work, last: bool) -> None:
        self._totals.add(work.report)
        if last:
            now_ns = time.perf_counter_ns()
            self._exposed_s += (now_ns - self._last_ns) / 1e9
            if self._timeline is not None:
                self._timeline.record("compress", "exposed", self._last_ns, now_ns)

    # Saving, restoring, ending.

    def state_dict(self, *, everyone: bool = False, to: int | None = None) -> dict[str, Any]:
        """What a checkpoint needs, so that a resumed run has the same bits.

        It holds what this worker knows. With ``everyone``, which all workers must call together, it holds
        what all of them know, and fits any number of workers: one file is then enough. Where only one rank of
        the group writes that file, ``to`` is its number, and the others get nothing.
        """
        if self._watch.settle():
            self._pieces.clear()  # or this run would go on with the bits before, and one resumed would not
        state = {
            "format": FORMAT,
            "rank": self._rank,
            "world": self._world,
            "step": self._step,
            "declined": sorted(self.declined),
            "left": self.left,
            "watch": self._watch.state_dict(),
            "feedback": None if self._memory is None else self._memory.state_dict(),
        }
        if not everyone:
            return state
        states: list[Any] = [None] * self._world
        if to is None:
            dist.all_gather_object(states, state, group=self._group)
        else:
            dist.gather_object(state, states if to == self._rank else None, group=self._group, group_dst=to)
        return {"format": FORMAT, "everyone": states} if to in (None, self._rank) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of this worker, or of everyone in a world of any size.

        What was asked for stays: fixed bits, and ``decline=False``. A state that is damaged or of another
        model changes nothing.
        """
        saved(state, FORMAT)
        states = entry(state, "everyone", list, tuple) if "everyone" in state else [state]
        self._check_states(states)
        places = [(s["rank"], s["world"]) for s in states]
        if "everyone" in state and places != [(rank, len(states)) for rank in range(len(states) or 1)]:
            raise damaged(f"it is of the ranks {', '.join(f'{rank} of {world}' for rank, world in places)}")
        mine = next((s for s in states if (s["rank"], s["world"]) == (self._rank, self._world)), None)
        fed = any(s["feedback"] for s in states) and self._memory is not None
        if mine is None and fed and "everyone" not in state:
            raise UsageError(
                f"the state of rank {state['rank']} of {state['world']} has error feedback, which rank "
                f"{self._rank} of {self._world} cannot use",
                setting="state",
                works="state_dict(everyone=True)",
            )
        source = mine or states[0]
        self._step = int(source["step"])
        self._watch.load_state_dict(source["watch"], self._step)
        if self.compression.decline and mine is not None:  # another world may be another network
            self.declined, self.left = frozenset(mine["declined"]), bool(mine["left"])
            self._compared = None  # the decision is that of another run
        self._pieces.clear()
        if self._memory is not None and mine is not None:
            self._memory.load_state_dict(mine["feedback"] or [])
        elif self._memory is not None and fed:
            self._memory.load_other_world([s["feedback"] or [] for s in states])

    def _check_states(self, states: Sequence[Any]) -> None:
        """Refuse what is not what all workers of a world, or one of them, have saved of this model."""
        counts = {name: parameter.numel() for name, parameter in self._parameters.items()}
        for state in states:
            saved(state, FORMAT)
            rank, world, step = (entry(state, name, int) for name in ("rank", "world", "step"))
            if not 0 <= rank < world or step < -1:
                raise damaged(f"step {step} of rank {rank} of {world}")
            declined, _ = entry(state, "declined", list, tuple), entry(state, "left", bool)
            if not all(bits in (*range(1, 9), 16) for bits in declined):
                raise damaged(f"{declined!r} bits declined")
            self._watch.check_state(entry(state, "watch", Mapping))
            FeedbackMemory.check_state(entry(state, "feedback", list, tuple, None) or [], counts)

    def detach(self) -> None:
        """Stop compressing: DDP does what it did before."""
        self._watch.settle()
        stop_recording(self._timeline)
        if self.on_detach is not None:
            self.on_detach()
            self.on_detach = None
