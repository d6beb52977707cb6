"""Performs units in a device's process, on tensors that are views of the store's memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from plait.data import Batches
from plait.determinism import reproducible
from plait.errors import UsageError
from plait.job import Job
from plait.spill import creation, slab
from plait.spill.adopted import Adopted
from plait.spill.carried import Carried
from plait.spill.describe import Traced, describe, signature, trace
from plait.spill.description import Costs, Description
from plait.spill.footprint import private_bytes
from plait.spill.homes import Plan, moments_key
from plait.spill.segment import Extent
from plait.spill.shard import ShardPass, global_norm
from plait.spill.units import Head, Report, Unit
from plait.spill.update import clip
from plait.spill.views import Views


class Runner:
    """One device's hands: it knows jobs, and runs their units on what is in memory."""

    def __init__(self, memory: memoryview, device: str = "cpu") -> None:
        """``device`` is where units compute: ``"cpu"``, which needs no copies, or a GPU (not run so far)."""
        self._device = device
        self.map(memory)
        self._jobs: dict[str, Adopted] = {}
        self._traced: list[Traced] = []
        self._most_bytes = 0

    def map(self, memory: memoryview) -> None:
        """Find segments in other memory from now on."""
        self._views = Views(memory) if self._device == "cpu" else Carried(memory, self._device)

    def keep_freed(self, most_bytes: int) -> None:
        """Hold so much memory of this process's own at most: what is free of it stays at hand."""
        self._most_bytes = most_bytes

    # --- before a run -------------------------------------------------------------------------------------

    def describe(self, job: Job) -> Description:
        """What planning and scheduling must know of a job."""
        with reproducible(job.threads):
            traced, batches = self._trace(job)
            return describe(job, traced, batches)

    def measure(self, job: Job, *, repetitions: int = 3) -> Costs:
        """What the job's blocks cost at the rows of its largest micro-batch; one at a time is in memory."""
        from plait.spill.measuring import measure

        with reproducible(job.threads):
            traced, batches = self._trace(job)
            description = describe(job, traced, batches)
            return measure(job, traced.chain, batches, description, repetitions=repetitions)

    def adopt(
        self, job: Job, plan: Plan, description: Description, *, weights: str | Path | None = None
    ) -> None:
        """Work for a job from now on; ``weights`` is a safetensors file or folder that it starts from."""
        with reproducible(job.threads):
            traced, batches = self._trace(job)
            source = None if weights is None else Path(weights)
            self._jobs[job.name] = Adopted.of(
                job, plan, description, traced, batches, source, self._views.device
            )

    def forget(self, job: Job | str) -> None:
        """Work for a job no more."""
        self._jobs.pop(job if isinstance(job, str) else job.name, None)
        used = {id(adopted.traced) for adopted in self._jobs.values()}
        # The last one stays: the next job is often another of the same model, and tracing takes seconds.
        self._traced = [traced for traced in self._traced if id(traced) in used] or self._traced[-1:]

    def _trace(self, job: Job) -> tuple[Traced, Batches]:
        """The job's chain; jobs of the same model share one, since state is passed in."""
        batches = job.build_batches()
        known = signature(job, batches)
        for traced in self._traced:
            if traced.fits(job, known):
                return traced, batches
        made = trace(job, batches)
        self._traced.append(made)
        return made, batches

    # --- units --------------------------------------------------------------------------------------------

    def perform(
        self,
        unit: Unit,
        places: Mapping[str, int],
        head: Head,
        extents: Mapping[str, Extent] | None = None,
    ) -> Report:
        """Run a unit on the segments that it asked for: where they begin, and what they are."""
        adopted = self._jobs[unit.job]
        started = time.perf_counter()
        slab.leave(self._most_bytes - private_bytes())
        self._views.use(places, extents)
        adopted.begin(unit.step)
        with reproducible(adopted.job.threads):
            if unit.phase == "create":
                report = creation.create(adopted, self._views, unit, head)
            elif unit.phase == "update":
                report = self._update(adopted, unit, head)
            else:
                turn = ShardPass(adopted, self._views, unit, head)
                report = getattr(turn, unit.phase)()
        self._views.use({})
        elapsed = (time.perf_counter() - started) * 1e3
        return replace(report, milliseconds=elapsed)

    def _update(self, adopted: Adopted, unit: Unit, head: Head) -> Report:
        """Update the parameters whose home a shard is."""
        homes, description, s = adopted.homes, adopted.description, unit.shard
        adopted.updater.at(unit.step)
        gradients = adopted.gradients.pop(s, {})
        total = None
        if description.clips:
            assert adopted.job.clip_norm is not None, "a job that clips has a limit"
            total = global_norm(adopted, head.norms)
            segment = homes.gradient_segment(s)
            entries = {entry.name: entry for entry in segment.entries}
            gradients = {p.name: self._views.entry(segment.key, entries[p.name], p.stride)
                         for p in homes.at_home[s] if p.name in head.norms}  # fmt: skip
        present = {m: head.present.get(m, "") for _, m in homes.update_keys(s) if m is not None}
        bits = {m: _bits(adopted, m, text) for m, text in present.items()}
        for parameter in homes.at_home[s]:
            gradient = gradients.pop(parameter.name, None)
            if gradient is None:  # it took no part in the loss
                continue
            home = homes.parameters[parameter.name]
            if total is not None and adopted.job.clip_norm is not None:
                clip(gradient, total, adopted.job.clip_norm)
            leaf = self._views.entry(home.key, home.entry, parameter.stride).requires_grad_()
            leaf.grad = gradient
            held = bits.get(moments_key(home.key), {})
            places = {name: self._views.entry(place.key, place.entry, parameter.stride if like else ())
                      for name, like, _ in parameter.state
                      for place in [homes.states[parameter.name, name]]}  # fmt: skip
            state = {name: place for name, place in places.items() if held[f"{parameter.name}|{name}"]}
            if not state and adopted.updater.begins_at_zero:
                state = {name: place.zero_() for name, place in places.items()}
            after = adopted.updater.update(parameter.name, leaf, state)
            for name, tensor in after.items():
                if name not in places:
                    raise UsageError(
                        f"the optimizer began to keep {name!r} for {parameter.name!r} at step {unit.step}",
                        setting="optimizer",
                        works="one whose state is all there after three steps",
                    )
                if tensor.data_ptr() != places[name].data_ptr():
                    places[name].copy_(tensor)
                held[f"{parameter.name}|{name}"] = True
            del gradient, leaf, after, state
        texts = {m: "".join("1" if there else "0" for there in held.values()) for m, held in bits.items()}
        return Report(present=texts, learning_rate=adopted.updater.learning_rate)


def _bits(adopted: Adopted, key: str, text: str) -> dict[str, bool]:
    """Which entries of a segment of moments hold something, in their order."""
    segment = next(segment for segment in adopted.homes.persistent if segment.key == key)
    text = text or "0" * len(segment.entries)
    return {entry.name: bit == "1" for entry, bit in zip(segment.entries, text, strict=True)}
