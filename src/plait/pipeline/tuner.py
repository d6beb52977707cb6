"""Chooses the order and the size of micro-batches, step after step, from what steps took and links were like.

As in Ada-Grouper (arXiv 2303.01675), of the candidates that fit the memory limit the one that promises the
shortest step under the present network is taken, at a step boundary. We predict with an event model in place
of a cost sum, know more families than kFkB, and learn from what was measured:

1. What does not fit the limits is left at once.
2. When times or links have changed by more than ``drift``, everything is predicted anew.
3. A candidate is worth what it was measured to take under these conditions; if it was not run under them,
   what is predicted, corrected by what the predictions of those that were run lacked.
4. Of those within ``slack`` of the best, the one that needs the least memory is the target: when the network
   clears, k goes down.
5. It is taken if it saves more than ``margin``; or memory, once nothing has changed for ``patience`` steps.
6. Otherwise a single step may try what looks as good but was never run, such as another size of
   micro-batches. What tries have cost in excess stays below ``probe_share`` of the time.

The tuner is pure: no clock, no network, no randomness. It runs on one rank, and in a simulator as well.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from plait.errors import UsageError
from plait.pipeline.candidate import Candidate
from plait.pipeline.events import Prediction
from plait.pipeline.memory import StageMemory, peak_bytes, too_small
from plait.pipeline.network import Network
from plait.pipeline.orders import FAMILIES, Family, kfkb, work_conserving
from plait.pipeline.outlook import Conditions, Outlook, Times
from plait.pipeline.search import search
from plait.units import format_bytes, parse_whole

_HARDLY = 0.05
"""A prediction that changes by less: what was measured before still holds."""
Kind = Literal["keep", "memory", "faster", "thrift", "probe", "back"]
"""Why a decision was made; ``back`` is after a probe that showed nothing better."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How a tuner chooses. Shares are of a step's time."""

    micro_batches: tuple[int, ...]
    """Into how many the global batch may be cut; the first is the start."""
    families: tuple[Family, ...] = ("kfkb", "depth", "capped")
    margin: float = 0.02
    """What another candidate must save to be taken."""
    slack: float = 0.01
    """How much slower than the best a candidate with less memory may be."""
    drift: float = 0.15
    """A change of a time or transfer beyond this is a change of conditions."""
    patience: int = 3
    """Steps without a change of conditions before memory is saved or anything is tried."""
    reserve: float = 0.02
    """The share of a memory limit that is left free, for what nobody counts: threads, the allocator."""
    probe_share: float = 0.01
    probes: int = 4
    """Most tries under the same conditions."""

    def __post_init__(self) -> None:
        for name in ("micro_batches", "families"):
            given = getattr(self, name)
            if isinstance(given, str) or not isinstance(given, Iterable) or not (given := tuple(given)):
                works = {"micro_batches": "(8, 16)", "families": '("kfkb", "depth")'}[name]
                raise UsageError(f"{name} is {getattr(self, name)!r}", setting=name, works=works)
            object.__setattr__(self, name, given)
        counts = tuple(parse_whole(count, setting="micro_batches") for count in self.micro_batches)
        object.__setattr__(self, "micro_batches", counts)
        for name in ("patience", "probes"):
            parse_whole(getattr(self, name), setting=name, least=0)
        for name in ("margin", "slack", "drift", "reserve", "probe_share"):
            share = getattr(self, name)
            if not isinstance(share, (int, float)) or not 0 <= share < 1:
                raise UsageError(f"{name} is {share!r}", setting=name, works="0 to 1, 1 excluded")
        if unknown := set(self.families) - (set(FAMILIES) - {"listed"}):
            works = ", ".join(family for family in FAMILIES if family != "listed")
            raise UsageError(
                f"no families to choose from: {sorted(unknown)}", setting="families", works=works
            )


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one step was like; times in milliseconds, by stage where there are several."""

    candidate: Candidate
    """What the step ran."""
    step_ms: float
    forward_ms: tuple[float, ...]
    """Of a micro-batch of full size."""
    backward_ms: tuple[float, ...]
    network: Network | None
    """None while something has not crossed yet."""
    wake_ms: tuple[float, ...] | None = None
    """From the arrival of what a stage waited for to the start of its work."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the next step runs, and why."""

    candidate: Candidate
    kind: Kind
    reason: str
    predicted_ms: float | None
    """By the event model; None while nothing is known of the network."""
    memory_bytes: tuple[int, ...]
    """By stage."""

    @property
    def changed(self) -> bool:
        """Whether the next step runs something else than the last."""
        return self.kind != "keep"


class Tuner:
    """Takes in a step after another; says what to run next."""

    def __init__(
        self,
        *,
        stages: int,
        global_batch: int,
        memories: Sequence[StageMemory],
        limits: Sequence[float],
        tuning: Tuning,
    ) -> None:
        """``limits``: bytes that each stage may hold; if nothing fits, the error names what would."""
        self.stages, self.global_batch, self.tuning = stages, global_batch, tuning
        self._memories, self._limits = tuple(memories), tuple(limits)
        self._times = Times()
        self._why = ""
        """What the last change of conditions was."""
        self._stale: str | None = None
        """Why predictions must be made anew, though the network may be the same."""
        self._network: Network | None = None
        self._wake_ms: tuple[float, ...] | None = None
        self._outlook: Outlook | None = None
        self._searched: tuple[int, Conditions] | None = None
        """Rows and conditions that the predictions are of."""
        self._known: list[Candidate] = []
        self._measured: dict[Candidate, deque[float]] = {}
        """What steps took under these conditions."""
        self._calm_steps = 0
        self._probes = 0
        self._probed_from: Candidate | None = None
        self._elapsed_ms = self._excess_ms = 0.0
        self.candidate = self._smallest()
        """What to run now."""

    # --- what is known --------------------------------------------------------------------------------

    def observe(self, seen: Observation) -> None:
        """Take in a step."""
        self._elapsed_ms += seen.step_ms
        if self._probed_from is not None and (before := self._measured.get(self._probed_from)):
            self._excess_ms += max(0.0, seen.step_ms - statistics.median(before))
        rows = seen.candidate.rows
        new_size = rows not in self._times
        self._times.observe(rows, seen.forward_ms, seen.backward_ms)
        if seen.network is None:
            return
        self._network, self._wake_ms = seen.network, seen.wake_ms
        change = self._change()
        if change is not None:
            self._look_again(change, rows)
        elif self._searched is not None and rows != self._searched[0]:
            if new_size:  # times that were guessed are known now
                measured = dict(self._measured)
                self._look_again(self._why, rows)
                self._measured |= measured
            self._searched = rows, self._fresh_outlook().conditions(rows)
        self._calm_steps += 1
        self._measured.setdefault(seen.candidate, deque(maxlen=5)).append(seen.step_ms)

    def limit(self, limits: Sequence[float]) -> None:
        """Set other limits, in bytes by stage; the next decision obeys them."""
        self._limits = tuple(limits)
        self._smallest()
        self._stale = "the limits changed"

    def remember(self, memories: Sequence[StageMemory]) -> None:
        """Set other sizes, when they have been measured better."""
        self._memories = tuple(memories)
        self._smallest()
        self._stale = "sizes are known better"

    def _change(self) -> str | None:
        """What has changed since the predictions were made; None where they still hold."""
        if self._searched is None:
            return "first look"
        rows, before = self._searched
        return self._fresh_outlook().conditions(rows).differ(before, self.tuning.drift) or self._stale

    def _fresh_outlook(self) -> Outlook:
        assert self._network is not None, "there is a network to look at"
        return Outlook(self._times, self._network, self._memories, self._usable, wake_ms=self._wake_ms)

    def _look_again(self, why: str, rows: int) -> None:
        """Predict everything anew; what was measured still holds if the present step hardly changes by it."""
        before, self._outlook, self._why, self._stale = self._outlook, self._fresh_outlook(), why, None
        self._searched = rows, self._outlook.conditions(rows)
        counts = self.tuning.micro_batches
        self._known = search(self._outlook, self.stages, self.global_batch, counts, self.tuning.families)
        if before is None or not _about(
            self._outlook.step_ms(self.candidate), before.step_ms(self.candidate), _HARDLY
        ):
            self._measured.clear()
            self._calm_steps = self._probes = 0

    # --- what to do -----------------------------------------------------------------------------------

    def decide(self) -> Decision:
        """Choose for the next step."""
        if self._outlook is not None and self._stale is not None:
            self._look_again(self._stale, self.candidate.rows)
        now, outlook = self.candidate, self._outlook
        fits = self._fits(now)
        if outlook is None or not self._known:
            if fits:
                return self._decision(now, "keep", "nothing is known of the network yet")
            return self._move(self._smallest(), "memory", self._too_much(now))
        known = [candidate for candidate in self._known if outlook.known(candidate)] or self._known
        target = self._target(known)
        if not fits:
            return self._move(target, "memory", self._too_much(now))
        came_from, self._probed_from = self._probed_from, None
        now_ms, target_ms = self._worth(now), self._worth(target)
        if 1 - target_ms / now_ms > self.tuning.margin:
            reason = f"{self._why}: {target_ms:.4g} ms a step in place of {now_ms:.4g}"
            return self._move(target, "faster", reason)
        if came_from is not None and came_from in known:
            before_ms = self._worth(came_from)
            if now_ms > (1 - self.tuning.slack) * before_ms:
                return self._move(
                    came_from, "back", f"a try of {now_ms:.4g} ms a step, {before_ms:.4g} before"
                )
        if self._calm_steps >= self.tuning.patience:
            held, needed = (outlook.peak_bytes(one) for one in (now, target))
            if sum(needed) < 0.9 * sum(held):
                saved = f"{format_bytes(max(needed))} in place of {format_bytes(max(held))}"
                return self._move(target, "thrift", f"as fast with {saved}")
            if (probe := self._probe(outlook)) is not None:
                return probe
        return self._decision(now, "keep", f"{now_ms:.4g} ms a step, and {target_ms:.4g} at best")

    def prediction(self) -> Prediction | None:
        """The step that ``candidate`` is predicted to make; None while nothing is known of the network."""
        return None if self._outlook is None else self._outlook.prediction(self.candidate)

    def _worth(self, candidate: Candidate) -> float:
        """Milliseconds that a step takes: what was measured, or else what is predicted, corrected.

        What was measured is moved towards the prediction, which counts as two steps, by ``margin`` at most:
        a single lucky step does not decide, and a prediction that is far off does not hold.
        """
        assert self._outlook is not None, "worth is asked for after a look"
        predicted_ms = self._outlook.step_ms(candidate) * self._correction(candidate.order.family)
        measured = self._measured.get(candidate)
        if not measured:
            return predicted_ms
        steps, middle_ms, most = len(measured), statistics.median(measured), self.tuning.margin
        mixed_ms = (steps * middle_ms + 2 * predicted_ms) / (steps + 2)
        return min(max(mixed_ms, (1 - most) * middle_ms), (1 + most) * middle_ms)

    def _correction(self, family: Family) -> float:
        """What a prediction is to be multiplied with, by what candidates that were run took.

        Those of the same family err alike; of what others err, half is taken to be common to all.
        """
        assert self._outlook is not None, "there were predictions"
        ratios: dict[bool, list[float]] = {True: [], False: []}
        for candidate, measured in self._measured.items():
            ratio = statistics.median(measured) / self._outlook.step_ms(candidate)
            ratios[candidate.order.family == family].append(ratio)
        if ratios[True]:
            return statistics.median(ratios[True])
        return 1 + (statistics.median(ratios[False]) - 1) / 2 if ratios[False] else 1.0

    def _target(self, known: Sequence[Candidate]) -> Candidate:
        """Of those about as good as the best, the one with the least memory."""
        worth = {one: self._worth(one) for one in known}
        best_ms = min(worth.values())
        close = [one for one in known if worth[one] <= (1 + self.tuning.slack) * best_ms]
        return min(close, key=lambda one: (sum(peak_bytes(one, self._memories)), worth[one]))

    def _probe(self, outlook: Outlook) -> Decision | None:
        """Try for a step what was not run and may be better, if the time for tries allows."""
        now_ms = self._worth(self.candidate)
        left_ms = self.tuning.probe_share * self._elapsed_ms - self._excess_ms
        orders, sizes = [], []
        for one in self._known:
            if one in self._measured:
                continue
            expected_ms = self._worth(one)
            # An order is predicted well; a size that was never run may disappoint, or surprise.
            if outlook.known(one):
                # Prediction against prediction: what was measured is noisy, and would make many promising.
                promising = outlook.step_ms(one) <= (1 - self.tuning.slack / 2) * outlook.step_ms(
                    self.candidate
                )
                if promising and 0.02 * now_ms <= left_ms and self._probes < self.tuning.probes:
                    orders.append((expected_ms, sum(outlook.peak_bytes(one)), one.order.digest, one))
            elif max(0.25 * now_ms, expected_ms - now_ms) <= left_ms:
                away = abs(one.rows - self.candidate.rows)
                sizes.append((away, expected_ms, one.order.digest, one))
        if not orders and not sizes:
            return None
        best = min(orders)[-1] if orders else min(sizes)[-1]
        self._probes += bool(orders)
        self._probed_from = self.candidate
        reason = f"a try: {self._worth(best):.4g} ms a step are predicted, {now_ms:.4g} were measured before"
        return self._move(best, "probe", reason)

    def _move(self, candidate: Candidate, kind: Kind, reason: str) -> Decision:
        self.candidate = candidate
        return self._decision(candidate, kind, reason)

    def _decision(self, candidate: Candidate, kind: Kind, reason: str) -> Decision:
        predicted_ms = None if self._outlook is None else self._outlook.step_ms(candidate)
        return Decision(
            candidate=candidate,
            kind=kind,
            reason=reason,
            predicted_ms=predicted_ms,
            memory_bytes=peak_bytes(candidate, self._memories),
        )

    def _smallest(self) -> Candidate:
        """1F1B with the first number of micro-batches that fits, or what takes the least; else an error."""
        counts = [count for count in self.tuning.micro_batches if count <= self.global_batch]
        orders = [kfkb(self.stages, count, 1) for count in counts]
        if "capped" in self.tuning.families:  # a cap below what 1F1B has in flight is slow, but it fits
            caps = range(self.stages, 0, -1)
            orders += [work_conserving(self.stages, count, cap) for cap in caps for count in counts]
        all_ = [Candidate(order=order, global_batch=self.global_batch) for order in orders]
        for candidate in all_:
            if self._fits(candidate):
                return candidate
        raise too_small(all_, self._memories, self._limits, reserve=self.tuning.reserve)

    @property
    def _usable(self) -> tuple[float, ...]:
        return tuple((1 - self.tuning.reserve) * limit for limit in self._limits)

    def _fits(self, candidate: Candidate) -> bool:
        used = peak_bytes(candidate, self._memories)
        return all(each <= limit for each, limit in zip(used, self._usable, strict=True))

    def _too_much(self, candidate: Candidate) -> str:
        over = max(
            zip(peak_bytes(candidate, self._memories), self._usable, range(self.stages), strict=True),
            key=lambda one: one[0] - one[1],
        )
        used, limit, stage = over
        return f"stage {stage} would hold {format_bytes(used)}, the limit is {format_bytes(limit)}"


def _about(one: float, other: float, share: float) -> bool:
    return abs(one - other) <= share * other
