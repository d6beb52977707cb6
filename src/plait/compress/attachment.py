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
from plait.compress.codec import Exact
from plait.compress.collectives import all_reduce
from plait.compress.compression import Compression
from plait.compress.layout import Piece
from plait.compress.memory import FeedbackMemory
from plait.compress.price import WORTH_ELEMENTS, worth_it
from plait.compress.report import Report, Summary
from plait.compress.rules import EXACT, described, parameters_of, select
from plait.compress.watch import Watch
from plait.compress.work import Work
from plait.errors import FileError, UsageError

if TYPE_CHECKING:
    from plait.timeline import Timeline

FORMAT = "plait.compress.state/1"
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


class Attachment:
    """Compresses the gradients of one model; made by :func:`plait.compress.attach`."""

    def __init__(
        self, model: nn.Module, group: Any, compression: Compression, timeline: Timeline | None = None
    ) -> None:
        self.compression = compression
        self.plain: Hook | None = None
        """What reduces a bucket that is not to be compressed."""
        self.on_detach: Callable[[], None] | None = None
        self.automatic = False
        """Made because the environment asked for it: one that the script asks for takes its place."""
        parameters = parameters_of(model)
        self.selected = select(
            described(model), compression.bits, compression.rules, smallest=compression.smallest
        )
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters  # so that no other parameter can come to have the same id
        self._group, self._timeline = group, timeline
        shapes = {f"parameter {n}": f"{tuple(p.shape)} of {p.dtype}" for n, p in parameters.items()}
        agree({**compression.facts(), **shapes}, group)
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
        self.declined = self._not_worth_it() if compression.decline and self._world > 1 else frozenset()
        self._totals, self._exposed_s, self._last_ns = Report(), 0.0, 0
        self._pieces: dict[tuple[str, ...], tuple[Piece, ...]] = {}
        self._said()

    # What there is to know.

    @property
    def bits(self) -> dict[str, int]:
        """The bits in force, by parameter; 32 is uncompressed."""
        return {name: EXACT if bits in self.declined else bits for name, bits in self._watch.bits.items()}

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
            total=Report(**vars(self._totals)),
        )

    def _not_worth_it(self) -> frozenset[int]:
        """The widths that would be slower than no compression; the same on all workers."""
        config, settings = self.compression, self.compression.settings
        widths = self._watch.widths
        if not widths:
            return frozenset()
        codecs = {bits: config.codec_at(bits) for bits in widths}
        current = communicator.current()
        mesh = current.mesh(self._group, communicator.ranks_of(self._group), settings)
        pace, speeds = current.measured(mesh, [*codecs.values(), Exact()], settings)
        topology = settings.topology(mesh.hosts)
        hosts = self._world if topology is None else len(topology.hosts)
        return frozenset(
            bits
            for bits, codec in codecs.items()
            if not worth_it(
                WORTH_ELEMENTS, codec, hosts, pace, speeds=speeds, chunk_bytes=settings.chunk_bytes
            )
        )

    def _said(self) -> None:
        if self._rank == 0:
            _log.info("%s", self)

    def __str__(self) -> str:
        compressed = {name: bits for name, bits in self.bits.items() if bits != EXACT}
        config, left = self.compression, len(self.bits) - len(compressed)
        if not compressed:
            wire = "uncompressed is faster on this network" if self.declined else "no parameter is selected"
            return f"plait leaves all {left} parameters uncompressed: {wire}"
        feedback = "with" if self._memory is not None else "without"
        return (
            f"plait compresses {len(compressed)} parameters to {config.codec or f'{config.bits} bits'} "
            f"{feedback} error feedback, and leaves {left} exact"
        )

    # One step after the other.

    def reduce(self, bucket: Bucket) -> Future[Tensor]:
        """Average a bucket of gradients over the workers: DDP's hook."""
        if bucket.index() == 0:
            self._step += 1
            if self._watch.decided(self._step - 1):
                self._pieces.clear()
        buffer = bucket.buffer()
        if buffer.is_sparse or buffer.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            assert self.plain is not None
            return self.plain(bucket)
        names = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        if self._watch.observes(self._step):
            for name, gradient in zip(names, bucket.gradients(), strict=True):
                self._watch.see(name, gradient, self._step)
        return self._start(names, bucket.parameters(), buffer, last=bucket.is_last())

    def _start(
        self, names: tuple[str, ...], parameters: Sequence[Tensor], buffer: Tensor, *, last: bool
    ) -> Future[Tensor]:
        if names not in self._pieces:
            self._pieces[names] = tuple(
                Piece(name=name, count=parameter.numel(), codec=self.compression.codec_at(self.bits[name]))
                for name, parameter in zip(names, parameters, strict=True)
            )
        pieces = self._pieces[names]
        feedback, on_device = None, buffer.device.type != "cpu"
        if self._memory is not None and any(not isinstance(piece.codec, Exact) for piece in pieces):
            feedback = self._memory.lend({piece.name: piece.count for piece in pieces})  # type: ignore[misc]
        future: Future[Tensor] = Future(devices=[buffer.device] if on_device else None)
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
        if last and self._watch.observes(self._step):
            self._watch.exchange(self._step)
        lent = names if feedback is not None else None
        work.then(partial(self._done, future=future, result=buffer, lent=lent, step=self._step, last=last))
        return future

    def _done(
        self,
        work: Work,
        *,
        future: Future[Tensor],
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
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)  # type: ignore[arg-type]

    def _account(self, work: Work, last: bool) -> None:
        self._totals.add(work.report)
        if last:
            now_ns = time.perf_counter_ns()
            self._exposed_s += (now_ns - self._last_ns) / 1e9
            if self._timeline is not None:
                self._timeline.record("compress", "exposed", self._last_ns, now_ns)

    # Saving, restoring, ending.

    def state_dict(self, *, everyone: bool = False) -> dict[str, Any]:
        """What a checkpoint needs, so that a resumed run has the same bits.

        It holds what this worker knows. With ``everyone``, which all workers must call together, it holds
        what all of them know, and fits any number of workers: one file is then enough.
        """
        self._watch.settle()
        state = {
            "format": FORMAT,
            "rank": self._rank,
            "world": self._world,
            "step": self._step,
            "declined": sorted(self.declined),
            "watch": self._watch.state_dict(),
            "feedback": None if self._memory is None else self._memory.state_dict(),
        }
        if not everyone:
            return state
        states: list[Any] = [None] * self._world
        dist.all_gather_object(states, state, group=self._group)
        return {"format": FORMAT, "everyone": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of this worker, or of everyone in a world of any size."""
        if state.get("format") != FORMAT:
            raise FileError(
                f"a state of format {state.get('format')!r}", setting="state", works="what state_dict() gave"
            )
        states = list(state.get("everyone", [state]))
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
        self._watch.load_state_dict(source["watch"])
        self.declined = frozenset(source["declined"])
        self._pieces.clear()
        if self._memory is not None and mine is not None:
            self._memory.load_state_dict(mine["feedback"] or [])
        elif self._memory is not None and fed:
            self._memory.load_other_world([s["feedback"] or [] for s in states])

    def detach(self) -> None:
        """Stop compressing: DDP does what it did before."""
        self._watch.settle()
        if self.on_detach is not None:
            self.on_detach()
            self.on_detach = None
