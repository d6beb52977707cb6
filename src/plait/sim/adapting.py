"""Plays a pipeline that adapts: after every step the tuner of :mod:`plait.pipeline.tuner` chooses the next.

Its own code decides, from what a run would tell it: how long forwards and backwards took, when messages were
sent and came (from which :mod:`plait.pipeline.estimate` finds the network), and the step itself. The report
that brings all this to the first stage is taken to cost nothing.
"""

from __future__ import annotations

import statistics
from typing import Unpack

from plait.cluster import Cluster
from plait.pipeline.candidate import Candidate
from plait.pipeline.estimate import Arrival, Estimator
from plait.pipeline.memory import peak_bytes
from plait.pipeline.plan import PipelinePlan
from plait.pipeline.tuner import Observation, Tuner, Tuning
from plait.profile import Profile
from plait.sim.pipeline import Stages
from plait.sim.played import Played
from plait.sim.scene import Circumstances, Scene
from plait.sim.staging import Staging
from plait.units import parse_whole


def play_adaptive(
    plan: PipelinePlan,
    profile: Profile,
    cluster: Cluster,
    *,
    steps: int = 16,
    tuning: Tuning | None = None,
    **circumstances: Unpack[Circumstances],
) -> Played:
    """Play so many steps on the stages of a plan; orders and micro-batches are the tuner's, 1F1B first.

    ``tuning`` is as in a run, by default with the plan's number of micro-batches alone; the memory of the
    devices is the limit. The rest is as for :func:`plait.sim.pipeline.play_pipeline`.
    """
    parse_whole(steps, setting="steps")
    staging = Staging.of(plan, profile)
    scene = Scene(cluster, staging.stages, track="stage", **circumstances)
    tuning = Tuning(micro_batches=(plan.order.micro_batches,)) if tuning is None else tuning
    play = _Play(scene, staging, plan.global_batch, tuning, steps)
    play.run()
    tried = list(dict.fromkeys(play.ran))
    peaks = zip(*(peak_bytes(candidate, play.memories) for candidate in tried), strict=True)
    return scene.played(
        play.steps_ms,
        work_ms=play.stages.work_ms,
        peak_bytes=[max(each) for each in peaks],
        decisions=[*staging.remarks(tried), *play.decisions],
    )


class _Play:
    """Steps under way, and what was learned from them."""

    def __init__(self, scene: Scene, staging: Staging, global_batch: int, tuning: Tuning, steps: int) -> None:
        self.scene, self.staging, self.steps = scene, staging, steps
        self.stages = Stages(scene, staging)
        largest = -(-global_batch // min(count for count in tuning.micro_batches))
        self.memories = staging.memories(largest)
        devices = scene.cluster.devices
        self.tuner = Tuner(
            stages=staging.stages,
            global_batch=global_batch,
            memories=self.memories,
            limits=[device.memory_bytes for device in devices],
            tuning=tuning,
        )
        hosts = list(dict.fromkeys(device.host for device in devices))
        self.estimator = Estimator(staging.stages, hosts=[hosts.index(device.host) for device in devices])
        self.steps_ms: list[float] = []
        self.ran: list[Candidate] = []
        """By step, what it ran."""
        self.decisions: list[str] = []

    def run(self) -> None:
        self.scene.crew.begin()
        self._begin()
        self.scene.simulation.run()

    def _begin(self) -> None:
        candidate = self.tuner.candidate
        self.ran.append(candidate)
        self.stages.begin(candidate, self.staging.loads(candidate.rows), self._following)

    def _following(self, step_ms: float) -> None:
        self.steps_ms.append(step_ms)
        if len(self.steps_ms) == self.steps:
            return
        self._learn()
        decision = self.tuner.decide()
        if decision.changed:
            self.decisions.append(
                f"after step {len(self.steps_ms)}: {decision.candidate} ({decision.reason})"
            )
        self._begin()

    def _learn(self) -> None:
        """Tell the tuner what the step was like, as the stages of a run would have seen it."""
        candidate, passed = self.ran[-1], self.stages.passed
        full = candidate.shares.count(1.0)
        medians = [
            tuple(
                statistics.median(
                    each.end_ms - each.start_ms
                    for each in passed
                    if each.stage == stage and each.kind == kind and each.micro_batch < full
                )
                for stage in range(self.staging.stages)
            )
            for kind in ("F", "B")
        ]
        self.estimator.observe(self._arrivals())
        first = [each for each in passed if each.stage == 0]
        self.tuner.observe(
            Observation(
                candidate=candidate,
                step_ms=first[-1].end_ms - first[0].start_ms,
                forward_ms=medians[0],
                backward_ms=medians[1],
                network=self.estimator.network,
            )
        )

    def _arrivals(self) -> list[Arrival]:
        """The messages as their receivers saw them: a header first, when nothing else is on the wire."""
        found: list[Arrival] = []
        free_ms: dict[int, float] = {}
        cluster, names = self.scene.cluster, self.scene.names
        for message in self.stages.messages:  # of one wire, in the order in which they were sent
            link, backward = divmod(message.wire, 2)
            latency_ms = cluster.link(names[link + backward], names[link + 1 - backward]).latency_ms
            found.append(
                Arrival(
                    link=link,
                    direction="backward" if backward else "forward",
                    micro_batch=message.micro_batch,
                    size_bytes=round(message.size_bytes),
                    sent_ms=message.sent_ms,
                    started_ms=max(message.sent_ms + latency_ms, free_ms.get(message.wire, 0.0)),
                    arrived_ms=message.arrived_ms,
                )
            )
            free_ms[message.wire] = message.arrived_ms
        return found
