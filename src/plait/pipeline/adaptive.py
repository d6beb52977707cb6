"""A schedule that chooses its order and the size of its micro-batches while it trains.

    every stage    measures: computing times, arrivals of messages, memory      (record, links, footprint)
    last to first  a report follows the last gradient of a step                 (no collective, no extra wait)
    first stage    estimates the network, asks the tuner for the next step      (estimate, tuner: both pure)
    first to last  the choice rides on the note with which the next step begins

So all ranks agree at every step boundary, and none waits for the agreement. The batch and the gradients stay
the same whatever is chosen, up to the order of float additions where the size of micro-batches changes; what
looks at a micro-batch as a whole (BatchNorm) sees micro-batches, as in any pipeline.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from plait.errors import UsageError
from plait.pipeline import compat
from plait.pipeline.batch import Batch, rows
from plait.pipeline.candidate import Candidate
from plait.pipeline.events import Prediction
from plait.pipeline.footprint import Footprint
from plait.pipeline.links import Links, Report, arrivals, own_host, times_ms, wake_ms
from plait.pipeline.memory import StageMemory
from plait.pipeline.note import Note
from plait.pipeline.orders import Order, kfkb, work_conserving
from plait.pipeline.schedule import ScheduleKFKB
from plait.pipeline.tuner import Decision, Observation, Tuner, Tuning
from plait.timeline import Timeline
from plait.units import parse_bytes, parse_whole

LOG = logging.getLogger("plait.pipeline")
_CAREFUL_STEPS = 2
"""Under a memory limit, steps with one micro-batch in flight until sizes are known."""
_UNLIKE_STEPS = 2
"""Batches of another size than the schedule was told, and none of that size, before it says so."""
_NEWS = 0.02
"""A change of a stage's memory by less is no news to the tuner."""


class AdaptiveSchedule(ScheduleKFKB):
    """Trains with the order and the micro-batches that are best for the network as it is now.

    >>> schedule = AdaptiveSchedule(stage, global_batch=64, memory_limit="4GiB", loss_fn=loss)
    >>> schedule.step(x)        # and so on, as with any schedule of torch's
    >>> schedule.decisions      # what was chosen, and why
    """

    def __init__(
        self,
        stage: Any,
        global_batch: int,
        *,
        memory_limit: int | str | None = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        micro_batches: Sequence[int] | None = None,
        tuning: Tuning | None = None,
        memory: StageMemory | None = None,
        scale_grads: bool = True,
        weight: Callable[[Any], float] | None = None,
        timeline: Timeline | None = None,
        timeout_s: float | str = 30.0,
        **options: Any,
    ) -> None:
        """``global_batch`` is the rows of a step; ``memory_limit`` what this rank may hold, all in all.

        ``micro_batches`` are the numbers that the batch may be cut into, ``tuning`` is how the choice is made
        (both count on the first rank), ``memory`` are the sizes of this stage, if they are known; without,
        they are measured. Resident memory of the process counts on a CPU, allocated memory on a GPU. The rest
        is as in :class:`ScheduleKFKB`.
        """
        compat.check_stage(stage)
        for setting, given, kind in (("tuning", tuning, Tuning), ("memory", memory, StageMemory)):
            if given is not None and not isinstance(given, kind):
                raise UsageError(f"{setting} is {given!r}", setting=setting, works=f"a {kind.__name__}")
        if taken := {"k", "order", "n_microbatches"} & set(options):
            what = f"{', '.join(sorted(taken))} given to a schedule that chooses itself"
            raise UsageError(what, setting=", ".join(sorted(taken)), works="micro_batches, or ScheduleKFKB")
        self.global_batch = parse_whole(global_batch, setting="global_batch")
        if tuning is None:
            counts = _usual(stage.num_stages, self.global_batch) if micro_batches is None else micro_batches
            tuning = Tuning(micro_batches=counts)  # type: ignore[arg-type]
        elif micro_batches is not None:
            raise UsageError("micro_batches beside a tuning", setting="micro_batches", works="one of the two")
        for count in tuning.micro_batches:
            if not stage.num_stages <= count <= self.global_batch:
                raise UsageError(
                    f"{self.global_batch} rows in {count} micro-batches for {stage.num_stages} stages",
                    setting="micro_batches",
                    works=f"{stage.num_stages} to {self.global_batch}",
                )
        self._tuning, self._given = tuning, memory
        self.memory_limit = memory_limit
        careful = memory is None and self._limit < math.inf
        first = max(tuning.micro_batches) if careful else tuning.micro_batches[0]
        order = (work_conserving if careful else kfkb)(stage.num_stages, first, 1)
        super().__init__(
            stage,
            first,
            loss_fn,
            scale_grads=scale_grads,
            order=order,
            weight=weight,
            timeline=timeline,
            timeout_s=timeout_s,
            **options,
        )
        self.decisions: list[Decision] = []
        """What was changed, and why; the last is in force."""
        self.decision: Decision | None = None
        """On the first rank, what was decided after the last step, with what is predicted of the next."""
        self._news: Decision | None = None
        self._footprint = Footprint(stage)
        self._host = own_host()
        self._unmeasured = memory is None
        self._learned = 0
        self._unlike = 0
        self._links = Links(stage.num_stages)
        self._tuner: Tuner | None = None
        self._limits: list[float] = []
        self._memories: list[StageMemory] = []
        """What the tuner was told."""

    @property
    def memory_limit(self) -> int | None:
        """Bytes that this rank may hold; a new one is obeyed from the step after the next."""
        return None if self._limit == math.inf else int(self._limit)

    @memory_limit.setter
    def memory_limit(self, limit: int | str | None) -> None:
        self._limit = math.inf if limit is None else float(parse_bytes(limit, setting="memory_limit"))

    @property
    def memory(self) -> StageMemory:
        """The sizes of this stage, as far as they are known."""
        return self._footprint.memory if self._given is None else self._given

    @property
    def peak_bytes(self) -> int:
        """What this rank held at most in the last step."""
        return self._footprint.peak_bytes

    @property
    def candidate(self) -> Candidate:
        """What the next step runs."""
        return Candidate(order=self._order, global_batch=self.global_batch)

    @property
    def prediction(self) -> Prediction | None:
        """On the first rank, how the next step should go; None while nothing is known of the network."""
        return None if self._tuner is None else self._tuner.prediction()

    def change(self, **_: Any) -> None:
        """Refused: the tuner chooses."""
        raise UsageError("an adaptive schedule chooses itself", setting="change", works="ScheduleKFKB")

    # --- a step ---------------------------------------------------------------------------------------

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any) -> None:
        count, chosen = rows((args, kwargs)), self._order
        usual = self._args_chunk_spec is None and self._kwargs_chunk_spec is None
        fewer = self._stage.is_first and usual and 0 < count < chosen.micro_batches
        self._whole = self._has_backward and count == self.global_batch
        if self._stage.is_first and self._has_backward and not self._whole:
            self._warn(count)
        if self._has_backward:
            self._footprint.begin(limited=self._given is None and self._limit < math.inf)
        if fewer:  # the last batch of an epoch, for instance
            self._take(_fewer(chosen, count))
        super()._run(args, kwargs, *rest)
        if fewer:
            self._take(chosen)

    def _warn(self, count: int) -> None:
        """On the first rank: say, once, that batches are not of the size that it was told."""
        self._unlike += 1
        if self._unlike == _UNLIKE_STEPS and self._learned == 0:
            LOG.warning(
                "%d batches, the last of %d rows, and global_batch is %d: nothing is learned from batches of "
                "another size, so the order stays as it is; works: AdaptiveSchedule(..., global_batch=%d)",
                self._unlike, count, self.global_batch, count,
            )  # fmt: skip

    def _note(self, pieces: Sequence[Any], batch_rows: int) -> Note:
        news, self._news = self._news, None
        if news is not None:
            self._announce(news)
        # A batch of another size is trained all the same, but nothing is learned from it.
        remarks = None if news is None else _to_json(news)
        return replace(super()._note(pieces, batch_rows), reports=self._whole, remarks=remarks)

    def _follow(self, note: Note) -> None:
        self._take(note.order)
        if note.remarks is not None:
            self._announce(_from_json(note.remarks))

    def _take(self, order: Order) -> None:
        self._order, self._n_microbatches = order, order.micro_batches

    def _announce(self, decision: Decision) -> None:
        self.decisions.append(decision)
        if self.timeline is not None:
            track, name = f"stage{self._stage.stage_index}", decision.candidate.order.label
            self.timeline.mark(track, name, reason=decision.reason, step=self._wire.step)

    def _compute_forward(self, batch: Batch, number: int) -> None:
        if not (self._unmeasured and self._has_backward and number == 0):
            super()._compute_forward(batch, number)
            return
        stage = self._stage
        with self._footprint.first_forward():
            super()._compute_forward(batch, number)
        outputs, inputs = stage.fwd_cache[number]
        self._footprint.after_first_forward(
            self.candidate.rows,
            [] if stage.is_first else inputs[: len(batch.inputs[number])],
            [] if stage.is_last else self._passes.crossing(outputs, training=True),
        )
        self._unmeasured = False

    # --- what was learned -----------------------------------------------------------------------------

    def _exchange_reports(self) -> None:
        """Send this rank's report, and those of the ranks after it, towards the first."""
        wire = self._wire
        begun_ns, ended_ns = self.record.begun_ns, time.perf_counter_ns()
        self._footprint.end(self.candidate)
        reports = [self._report().to_json()]
        if wire.after is not None:
            inbox = wire.after.inbox
            wire.wait(lambda: inbox.has("report", 0) or None, f"the report of step {wire.step}")
            reports += inbox.take("report", 0).extra
        if wire.before is not None:
            wire.before.outbox.send("report", wire.step, 0, extra=reports)
        else:
            self._learn([Report.from_json(report) for report in reports], (ended_ns - begun_ns) / 1e6)

    def _report(self) -> Report:
        full = self.candidate.shares.count(1.0)
        forward_ms, backward_ms = times_ms(self.record, full)
        came = arrivals(self.record, self._stage.stage_index)
        if self.timeline is not None:
            for each in came:
                name = f"{'F' if each.direction == 'forward' else 'B'}{each.micro_batch}"
                start_ns, end_ns = int(each.started_ms * 1e6), int(each.arrived_ms * 1e6)
                self.timeline.record(f"link{each.link} {each.direction}", name, start_ns, end_ns)
        return Report(
            stage=self._stage.stage_index,
            host=self._host,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            wake_ms=wake_ms(self.record),
            arrivals=came,
            memory=self.memory,
            peak_bytes=self.peak_bytes,
            limit_bytes=self._limit,
        )

    def _learn(self, reports: list[Report], step_ms: float) -> None:
        """On the first rank: what the next step will be."""
        self._learned += 1
        self._links.observe(reports)
        tuner = self._the_tuner(reports)
        if tuner is None:
            return
        tuner.observe(
            Observation(
                candidate=self.candidate,
                step_ms=step_ms,
                forward_ms=tuple(report.forward_ms for report in reports),
                backward_ms=tuple(report.backward_ms for report in reports),
                network=self._links.network,
                wake_ms=tuple(report.wake_ms for report in reports),
            )
        )
        self.decision = decision = tuner.decide()
        self._take(decision.candidate.order)
        if decision.changed:
            self._news = decision
            LOG.info("after step %d: %s (%s)", self._wire.step, decision.candidate, decision.reason)

    def _the_tuner(self, reports: list[Report]) -> Tuner | None:
        limits = [report.limit_bytes for report in reports]
        memories = [report.memory for report in reports]
        if self._tuner is None:
            unknown = self._given is None and min(limits) < math.inf
            if unknown and self._learned < _CAREFUL_STEPS:
                self._take(work_conserving(self._num_stages, max(self._tuning.micro_batches), 1))
                return None
            self._tuner = Tuner(
                stages=self._num_stages,
                global_batch=self.global_batch,
                memories=memories,
                limits=limits,
                tuning=self._tuning,
            )
        elif limits != self._limits:
            self._tuner.limit(limits)
        elif min(limits) < math.inf and (
            any(map(_is_news, memories, self._memories)) or any(r.peak_bytes > r.limit_bytes for r in reports)
        ):
            self._tuner.remember(memories)
        else:
            return self._tuner
        self._limits, self._memories = limits, memories
        return self._tuner


def _usual(stages: int, global_batch: int) -> tuple[int, ...]:
    """Numbers of micro-batches worth a try: enough to fill the pipeline, not so many that they are tiny."""
    found = [stages * times for times in (4, 2, 8, 1) if stages * times <= global_batch]
    if not found:
        raise UsageError(
            f"{global_batch} rows for {stages} stages", setting="global_batch", works=f"{stages} or more"
        )
    return tuple(found)


def _fewer(order: Order, micro_batches: int) -> Order:
    """The same order for fewer micro-batches."""
    data = {**order.to_json(), "micro_batches": micro_batches}
    return Order.from_json(data | ({"k": min(order.k, micro_batches)} if order.k is not None else {}))


def _is_news(now: StageMemory, before: StageMemory) -> bool:
    """Whether a stage's sizes have changed by enough to choose anew."""
    total = before.static_bytes + before.transient_bytes
    grown = abs(now.static_bytes + now.transient_bytes - total)
    rest = [replace(each, static_bytes=0, transient_bytes=0) for each in (now, before)]
    return grown > _NEWS * total or rest[0] != rest[1]


def _to_json(decision: Decision) -> dict[str, Any]:
    return {**vars(decision), "candidate": decision.candidate.to_json()}


def _from_json(data: dict[str, Any]) -> Decision:
    given = {"candidate": Candidate.from_json(data["candidate"]), "memory_bytes": tuple(data["memory_bytes"])}
    return Decision(**{**data, **given})
