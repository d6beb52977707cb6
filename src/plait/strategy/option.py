"""One way to train a job on a cluster: what a step takes, what it holds where, or why it cannot be had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from plait.sim.reduction import Reduction

StrategyName = Literal["data", "pipeline", "burst", "spill"]
Bits = int | Literal["auto"] | None
"""What a number of a gradient travels in; ``"auto"`` is chosen layer by layer, None is fp32."""


LEAST_GAIN = 1.1
"""How many times faster compressed gradients must be than exact ones to be preferred. A prediction is off by
about as much, and who did not ask for compression should not get other losses for nothing."""


WORTH_DEVICES = 1.03
"""How many times faster more devices must be than fewer to be preferred, and other strategies than plain data
parallelism. Predictions are not that good, and each device is one more process that takes memory, starts, and
may fail."""


class Plan(Protocol):
    """What a runtime executes and the simulator plays."""

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A strategy for a job, with its figures by device name; times are milliseconds of one step."""

    strategy: StrategyName
    name: str
    """Such as ``data, 4 bits``."""
    batch: int
    """Rows of a step over all devices."""
    step_ms: float | None = None
    """With the optimizer; None where it cannot be had."""
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """The most that each device holds in a step; devices that are not used are left out."""
    budget_bytes: Mapping[str, int] = field(default_factory=dict)
    """What each of them may hold."""
    wire_bytes: float = 0.0
    """What devices send each other in a step, all together."""
    parts_ms: Mapping[str, float] = field(default_factory=dict)
    """Where the step's time goes on the busiest device: ``compute``, ``wire`` (waiting for it), ``optimizer``
    and so on; they add up to the step."""
    idle_ms: Mapping[str, float] = field(default_factory=dict)
    """By device of the cluster, how long a step leaves it free for other work."""
    background_samples_per_s: float = 0.0
    """What background jobs get through on that idle time, each on one device where it fits beside this."""
    plan: Plan | None = None
    collective: Reduction | None = None
    """What reduces gradients, and what that costs; None where none are."""
    bits: Bits = None
    """What a runtime is to send gradients in: a number, or ``"auto"``; None where it leaves them as they are
    (where ``auto`` declined too) or sends none."""
    why_not: str | None = None
    """Why it cannot be had, with the numbers."""
    works: str | None = None
    """What would let it be had."""
    remarks: tuple[str, ...] = ()
    """What the figures rest on that was not measured."""

    @property
    def feasible(self) -> bool:
        """Whether it can be had."""
        return self.step_ms is not None

    @property
    def weighed_ms(self) -> float:
        """The step by which options are compared: gradients that are not exact must gain something."""
        return (self.step_ms or 0.0) * (1.0 if self.bits is None else LEAST_GAIN)

    @staticmethod
    def preferred(options: Iterable[Option]) -> Option:
        """The fastest of options that can be had, or one that is hardly slower on fewer devices, or plain."""
        known = list(options)
        bound_ms = WORTH_DEVICES * min(option.weighed_ms for option in known)
        close = [option for option in known if option.weighed_ms <= bound_ms]
        return min(close, key=lambda option: (option.devices, option.strategy != "data", option.weighed_ms))

    @property
    def devices(self) -> int:
        """How many it uses."""
        return len(self.memory_bytes)

    @property
    def samples_per_s(self) -> float:
        """Rows a second; 0 where it cannot be had."""
        return 0.0 if self.step_ms is None else 1e3 * self.batch / self.step_ms if self.step_ms else 0.0

    @property
    def total_samples_per_s(self) -> float:
        """With background work on what is idle."""
        return self.samples_per_s + self.background_samples_per_s

    @property
    def idle_devices(self) -> float:
        """Idle time as a number of devices that would do nothing else."""
        return sum(self.idle_ms.values()) / self.step_ms if self.step_ms else 0.0

    @property
    def peak_bytes(self) -> int:
        """What the device that holds most holds."""
        return max(self.memory_bytes.values(), default=0)

    def to_json(self) -> dict[str, Any]:
        """The option as plain data, its plan too."""
        return {
            "strategy": self.strategy,
            "bits": self.bits,
            "name": self.name,
            "feasible": self.feasible,
            "why_not": self.why_not,
            "works": self.works,
            "batch": self.batch,
            "devices": self.devices,
            "step_ms": self.step_ms,
            "samples_per_s": self.samples_per_s,
            "parts_ms": dict(self.parts_ms),
            "memory_bytes": dict(self.memory_bytes),
            "budget_bytes": dict(self.budget_bytes),
            "wire_bytes": self.wire_bytes,
            "idle_ms": dict(self.idle_ms),
            "idle_devices": self.idle_devices,
            "background_samples_per_s": self.background_samples_per_s,
            "plan": None if self.plan is None else self.plan.to_json(),
            "remarks": list(self.remarks),
        }
