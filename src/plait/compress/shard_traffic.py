"""All that a parameter group of FSDP2 sends, compressed: gradients, weights, and gradients among replicas."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.compress import communicator
from plait.compress.call import plain_codec
from plait.compress.codec import Codec, Exact, Quantizer
from plait.compress.collectives import all_gather, all_reduce, reduce_scatter
from plait.compress.compression import Compression
from plait.compress.given import damaged, entry
from plait.compress.layout import Piece
from plait.compress.observation import WIDTHS, measure
from plait.compress.price import WORTH_ELEMENTS, worth_it
from plait.compress.report import Report
from plait.compress.rules import EXACT
from plait.compress.shard_group import DTYPES, Exchange, ShardedParameter, ShardGroup, Waiting
from plait.compress.work import Work
from plait.units import parse_whole


class ShardTraffic:
    """The three exchanges of one group."""

    def __init__(
        self,
        group: ShardGroup,
        compression: Compression,
        bits: Mapping[str, int],
        weights: Mapping[str, int],
    ) -> None:
        self.group = group
        self.step = 0
        """Backward passes so far that sent gradients: each rounds with random numbers of its own."""
        self.declined: dict[Exchange, frozenset[int]] = {}
        """The widths that are slower than no compression."""
        self.errors: dict[str, float] = {}
        """By parameter: the relative error of quantizing its gradient once, as last measured."""
        self.exposed_s = 0.0
        """Spent waiting."""
        self._compression = compression
        self._asked: dict[Exchange, dict[str, int]] = {"scatter": {}, "gather": {}, "reduce": {}}
        own = {each.name: bits[each.name] for each in group.parameters if each.trainable}
        if group.sharers is not None and group.sharers.size() > 1:
            self._asked["scatter"] = own
            self._asked["gather"] = {each.name: weights[each.name] for each in group.parameters if weights}
        if group.replicas is not None and group.replicas.size() > 1:
            self._asked["reduce"] = own
        self._names = tuple(own)
        self._reports: dict[Exchange, Report] = {exchange: Report() for exchange in self._asked}
        self._lock = threading.Lock()
        self._pieces: dict[tuple[object, ...], tuple[tuple[Piece, ...], ...]] = {}

    # What is compressed, and how much.

    def _bits(self, exchange: Exchange) -> dict[str, int]:
        """In force for an exchange; empty where it is torch's own."""
        slow = self.declined.get(exchange, frozenset())
        found = {name: EXACT if bits in slow else bits for name, bits in self._asked[exchange].items()}
        return {} if slow and set(found.values()) == {EXACT} else found

    @property
    def bits(self) -> dict[str, int]:
        """In force for gradients; where sharers and replicas differ, the fewer."""
        both = self._bits("scatter"), self._bits("reduce")
        return {name: min(bits.get(name, EXACT) for bits in both) for name in self._names}

    @property
    def gather_bits(self) -> dict[str, int]:
        """In force for weights."""
        return self._bits("gather")

    def decline(self) -> None:
        """Leave alone what is not worth it, by measurements that all workers share."""
        settings, current = self._compression.settings, communicator.current()
        for exchange, asked in self._asked.items():
            codecs = {bits: self._codec(exchange, bits, torch.empty(0)) for bits in set(asked.values())}
            codecs.pop(EXACT, None)
            if not codecs:
                continue
            workers = self.group.replicas if exchange == "reduce" else self.group.sharers
            mesh = current.mesh(workers, communicator.ranks_of(workers), settings)
            pace, speeds = current.measured(mesh, [*codecs.values(), Exact()], settings)
            topology = settings.topology(mesh.hosts, everyone=exchange != "reduce")
            hosts = len(communicator.ranks_of(workers)) if topology is None else len(topology.hosts)
            size = settings.chunk_bytes
            # Judged by an all-reduce, which is twice either of its halves, compressed or not.
            self.declined[exchange] = frozenset(
                bits
                for bits, codec in codecs.items()
                if not worth_it(WORTH_ELEMENTS, codec, hosts, pace, speeds=speeds, chunk_bytes=size)
            )

    def install(self) -> None:
        """Take over from torch what there is to compress."""
        self._pieces.clear()
        self.group.replace(
            scatter=self._scatter if self._bits("scatter") else None,
            gather=self._gather if self._bits("gather") else None,
            reduce=self._reduce if self._bits("reduce") else None,
        )

    # What torch calls.

    def _scatter(self, output: Tensor, input: Tensor, workers: dist.ProcessGroup, op: Any) -> Waiting:
        if op == dist.ReduceOp.PREMUL_SUM:  # what torch makes of a gradient_divide_factor
            input.mul_(op.__getstate__()[1])
            op = "sum"
        self._observe(input.view(workers.size(), -1))
        work = reduce_scatter(
            output,
            input,
            pieces=self._sent("scatter", self.group.reduced, input),
            group=workers,
            op=op,
            async_op=True,
            seed=self._compression.seed,
            step=self.step,
            overwrite=True,  # torch has filled the input for this call alone
            settings=self._compression.settings,
        )
        self.step += 1
        return _Timed(self, "scatter", work)

    def _gather(self, output: Tensor, input: Tensor, workers: dist.ProcessGroup) -> Waiting:
        held = sum(each.count for each in self.group.parameters)
        if (workers.size(), input.numel()) != (self.group.parts, held) or input.dtype not in DTYPES:
            # Weights that are sharded otherwise between forward and backward pass (where rounding them once
            # more would change them), and those of types that send themselves in their own way.
            handle: Waiting = self.group.gather(output, input, workers, async_op=True)
            return handle
        work = all_gather(
            output,
            input,
            pieces=self._sent("gather", self.group.parameters, input),
            group=workers,
            async_op=True,
            seed=self._compression.seed,
            step=0,
            settings=self._compression.settings,
        )
        return _Timed(self, "gather", work)

    def _reduce(self, tensor: Tensor, op: Any) -> Waiting:
        if not self._bits("scatter"):
            self._observe(tensor.view(1, -1))
            self.step += 1
        (pieces,) = self._sent("reduce", self.group.reduced, tensor)
        work = all_reduce(
            tensor,
            pieces=pieces,
            group=self.group.replicas,
            op=op,
            async_op=True,
            seed=self._compression.seed,
            step=self.step - 1,
            settings=self._compression.settings,
        )
        return _Timed(self, "reduce", work)

    def _sent(
        self, exchange: Exchange, sent: tuple[ShardedParameter, ...], tensor: Tensor
    ) -> tuple[tuple[Piece, ...], ...]:
        """What lies in each part of a buffer."""
        key = exchange, tensor.dtype, tuple(each.name for each in sent)
        if key not in self._pieces:
            bits = self._bits(exchange)
            # A parameter that was frozen when bits were chosen has none.
            codecs = [self._codec(exchange, bits.get(each.name, EXACT), tensor) for each in sent]
            self._pieces[key] = self.group.pieces(exchange, sent, codecs)
        return self._pieces[key]

    def _codec(self, exchange: Exchange, bits: int, tensor: Tensor) -> Codec:
        if bits == EXACT or (bits == 16 and tensor.dtype != torch.float32):
            return plain_codec(tensor)
        if bits != 16 and exchange == "gather":
            return Quantizer(bits=bits, bucket=self._compression.bucket, stochastic=False)
        return self._compression.codec_at(bits)

    # What came of it.

    def _observe(self, parts: Tensor) -> None:
        """Measure this worker's gradients before they are sent, now and then."""
        if not self._compression.adaptation.observes(self.step):
            return
        first, in_force = 0, self.bits
        for each in self.group.reduced:
            gradient, bits = parts[:, first : first + each.count], in_force.get(each.name, EXACT)
            first += each.count
            if isinstance(self._compression.codec_at(bits), Quantizer) and bits in WIDTHS:
                layer = measure(
                    gradient.flatten().float(),
                    name=each.name,
                    bucket=self._compression.bucket,
                    stochastic=self._compression.stochastic,
                    seed=self.step,
                )
                if layer.squared_norm > 0:
                    self.errors[each.name] = math.sqrt(layer.error_at(bits) / layer.squared_norm)

    def count(self, exchange: Exchange, work: Work) -> None:
        """Enter a finished operation."""
        with self._lock:
            self._reports[exchange].add(work.report)

    def reports(self) -> dict[Exchange, Report]:
        """Copies of what each exchange took so far."""
        with self._lock:
            return {exchange: Report(**vars(report)) for exchange, report in self._reports.items()}

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "step": self.step,
            "declined": {exchange: sorted(widths) for exchange, widths in self.declined.items()},
        }

    def check_state(self, state: object) -> None:
        """Refuse what cannot be a state."""
        parse_whole(entry(state, "step", object), setting=f"step of {self.group.name!r}", least=0)
        for exchange, widths in entry(state, "declined", Mapping).items():
            known = isinstance(widths, (list, tuple)) and all(bits in (*WIDTHS, 16) for bits in widths)
            if exchange not in self._asked or not known:
                raise damaged(f"{widths!r} bits declined for {exchange!r} of {self.group.name!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, after ``check_state``."""
        self.step = int(state["step"])
        if self._compression.decline:
            self.declined = {exchange: frozenset(widths) for exchange, widths in state["declined"].items()}


class _Timed:
    """A handle that notes how long it was waited for."""

    def __init__(self, traffic: ShardTraffic, exchange: Exchange, work: Work | None) -> None:
        assert work is not None, "a handle was asked for"
        self._traffic, self._work = traffic, work
        work.then(lambda ended: traffic.count(exchange, ended))

    def wait(self) -> bool:
        """Return when the result is there, or raise what went wrong."""
        start = time.perf_counter()
        done = self._work.wait()
        self._traffic.exposed_s += time.perf_counter() - start
        return done
