"""Watches gradients as training goes on, and has the bits in force.

What workers measure of their own gradients is exchanged bit by bit, averaged in the same order everywhere and
handed to the same pure decision, so that all arrive at the same bits for the same step. The exchange is
started behind the last gradients of a step and its outcome is used at the start of the next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.compress.adapt import Log, Replay, Tuner
from plait.compress.allocation import Cost, Exposed
from plait.compress.codec import Exact
from plait.compress.collectives import all_gather
from plait.compress.given import NUMBER, damaged, entry
from plait.compress.observation import WIDTHS, LayerError, average, measure
from plait.compress.rules import EXACT, Bits
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.compress.compression import Compression
    from plait.compress.work import Work


class Watch:
    """The bits of every parameter, and how they come about."""

    def __init__(self, compression: Compression, asked: Mapping[str, Bits], group: Any) -> None:
        self._compression, self._group = compression, group
        self._world = dist.get_world_size(group)
        self._chosen = dict.fromkeys(name for name, bits in asked.items() if bits == "auto")
        _check(compression, self._chosen)
        adaptation = compression.adaptation
        self._widths = adaptation.widths
        self._tuner: Tuner | Replay | None = None
        if self._chosen:
            replayed = compression.replay
            self._tuner = Tuner(adaptation) if replayed is None else Replay(replayed)
            for decision in self._tuner.log.decisions:
                _check_names(decision.plan.bits, self._chosen, "replay")
        start = adaptation.reference_bits
        self.bits = {name: start if bits == "auto" else bits for name, bits in asked.items()}
        """In force."""
        self._errors: dict[str, float] = {}
        self._seen: dict[str, LayerError] = {}
        self._ready_ns: dict[str, int] = {}
        self._waiting: tuple[int, list[LayerError], Tensor, Work] | None = None

    @property
    def errors(self) -> dict[str, float]:
        """By parameter: the relative error of quantizing it once, as last measured; a copy."""
        return dict(self._errors)

    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that can come into force, but uncompressed."""
        widths = set(self.bits.values()) - {EXACT}
        return tuple(sorted(widths | (set(self._widths) if self._chosen else set())))

    @property
    def log(self) -> Log | None:
        """The decisions so far; None where there are none to make."""
        return None if self._tuner is None else self._tuner.log

    def observes(self, step: int) -> bool:
        """Whether this step's gradients are looked at."""
        return self._compression.adaptation.observes(step) and self._world > 1

    def see(self, name: str, gradient: Tensor, step: int) -> None:
        """Measure a gradient before it is reduced."""
        if self.bits[name] not in WIDTHS and name not in self._chosen:
            return
        config = self._compression
        self._seen[name] = measure(
            gradient,
            name=name,
            widths=self._widths if name in self._chosen else (self.bits[name],),
            bucket=config.bucket,
            stochastic=config.stochastic,
            seed=step,
        )
        self._ready_ns[name] = time.perf_counter_ns()

    def exchange(self, step: int) -> None:
        """All of the step's gradients have been seen: tell the others, where there is a decision to make."""
        layers = [self._seen[name] for name in self._chosen if name in self._seen]
        for name, layer in self._seen.items():
            if self.bits[name] in layer.widths and layer.squared_norm > 0:
                self._errors[name] = math.sqrt(layer.error_at(self.bits[name]) / layer.squared_norm)
        if isinstance(self._tuner, Tuner) and layers:
            first_ns = min(self._ready_ns.values())
            ready = [(self._ready_ns[layer.name] - first_ns) / 1e6 for layer in layers]
            rows = [
                [*layer.squared_error, layer.squared_norm, layer.sampling_bound, ms]
                for layer, ms in zip(layers, ready, strict=True)
            ]
            # Numbers of 64 bits travel as two of 32 each, which are only copied.
            mine = torch.tensor(rows, dtype=torch.float64).view(-1).view(torch.float32)
            theirs = torch.empty(self._world * mine.numel())
            work = all_gather(
                theirs,
                mine,
                codec=Exact(),
                group=self._group,
                async_op=True,
                step=step,
                settings=self._compression.settings,
            )
            assert work is not None
            self._waiting = step, layers, theirs, work
        self._seen, self._ready_ns = {}, {}

    def settle(self) -> bool:
        """Take in what is on its way; whether bits changed."""
        if self._waiting is None:
            return False
        assert isinstance(self._tuner, Tuner)
        step, layers, theirs, work = self._waiting
        work.wait()
        self._waiting = None
        rows = theirs.view(torch.float64).view(self._world, len(layers), -1).tolist()
        width = len(self._widths)
        heard = [
            [
                replace(
                    layer, squared_error=row[:width], squared_norm=row[width], sampling_bound=row[width + 1]
                )
                for layer, row in zip(layers, ranked, strict=True)
            ]
            for ranked in rows
        ]
        self._tuner.observe(average(heard))
        ready = [math.fsum(ranked[i][-1] for ranked in rows) / self._world for i in range(len(layers))]
        return self._apply(self._tuner.decide(step, cost=self._cost(ready)))

    def decided(self, step: int) -> bool:
        """Make the decision that is due after a step, if any; whether bits changed."""
        changed = self.settle()
        if isinstance(self._tuner, Replay) and step >= 0:
            changed = self._apply(self._tuner.decide(step)) or changed
        return changed

    def _cost(self, ready_ms: list[float]) -> Cost:
        if self._compression.adaptation.cost == "bytes":
            return "bytes"
        from plait.compress import communicator
        from plait.compress.price import Pace

        current, settings = communicator.current(), self._compression.settings
        mesh = current.mesh(self._group, communicator.ranks_of(self._group), settings)
        pace, _ = current.measured(mesh, [Exact()], settings)
        # Layers of a bucket travel together, so the latency is not theirs one by one.
        link = Pace(bandwidth_bytes_per_s=pace.bandwidth_bytes_per_s)
        return Exposed(ready_ms=tuple(ready_ms), link=link, world=self._world)

    def _apply(self, plan: Any) -> bool:
        if plan is None:
            return False
        chosen = {name: EXACT if bits is None else bits for name, bits in plan.bits.items()}
        changed = any(self.bits.get(name) != bits for name, bits in chosen.items())
        self.bits.update((name, bits) for name, bits in chosen.items() if name in self.bits)
        return changed

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs; call ``settle`` first."""
        tuner = self._tuner.state_dict() if isinstance(self._tuner, Tuner) else None
        return {"bits": dict(self.bits), "tuner": tuner, "errors": self.errors}

    def check_state(self, state: object) -> None:
        """Refuse a checkpoint that is not whole, or of another model."""
        bits, errors = entry(state, "bits", Mapping), entry(state, "errors", Mapping)
        _check_names(bits, self.bits, "state")
        for name in bits:
            if bits[name] not in (*WIDTHS, 16, EXACT):
                raise damaged(f"{bits[name]!r} bits for {name!r}")
        for name in errors:
            entry(errors, name, NUMBER)
        tuner = entry(state, "tuner", Mapping, None)
        if tuner is None or not isinstance(self._tuner, Tuner):
            return
        log, seen = Tuner.read_state(tuner)
        for decision in log.decisions[-1:]:
            for name, width in decision.plan.bits.items():
                self._check_choice(name, width in (*self._widths, None), f"{width}")
        for layer in seen[0] if seen else ():
            self._check_choice(layer.name, layer.widths == self._widths, f"one of {layer.widths}")

    def _check_choice(self, name: str, fits: bool, given: str) -> None:
        if name not in self._chosen or not fits:
            raise UsageError(
                f"the state has {given} bits for {name!r}, which has {self._asked(name)}",
                setting="state",
                works="the same rules and the same least_bits as before",
            )

    def _asked(self, name: str) -> str:
        return f"one of {self._widths}" if name in self._chosen else str(self.bits.get(name, "none"))

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from a checkpoint after a step. Bits follow from decisions; others are as asked for."""
        self.check_state(state)
        self._errors = dict(state["errors"])
        if isinstance(self._tuner, Replay):
            self._apply(self._tuner.log.plan_at(step))
        elif self._tuner is not None and state["tuner"] is not None:
            self._tuner.load_state_dict(state["tuner"])
            self._apply(self._tuner.plan)


def _check(compression: Compression, chosen: Mapping[str, None]) -> None:
    """Refuse what would have no effect."""
    if compression.gather_bits is not None:
        raise UsageError(
            f"weights in {compression.gather_bits} bits, where each worker has them all",
            setting="gather_bits",
            works="gather_bits=None, or a model after fully_shard(model)",
        )
    if compression.replay is not None and not chosen:
        raise UsageError(
            "decisions to repeat, and no parameter with bits to choose", setting="replay", works='bits="auto"'
        )


def _check_names(found: Iterable[str], own: Iterable[str], setting: str) -> None:
    """Refuse what is not of the same parameters."""
    theirs, ours = dict.fromkeys(found), dict.fromkeys(own)
    for name in [*theirs, *ours]:
        if (name in theirs) != (name in ours):
            where, other = ("it", "the model") if name in theirs else ("the model", "it")
            raise UsageError(
                f"{setting} is of another model: {where} has bits for {name!r}, {other} has none",
                setting=setting,
                works=f"that of a model with {', '.join(list(ours)[:5])}{', ...' if len(ours) > 5 else ''}",
            )
