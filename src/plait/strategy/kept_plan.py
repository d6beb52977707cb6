"""A plan in a file, with what its gradients travel in: the same for a runtime and for the simulator.

The file is that of the plan's own strand (``plait.plan.burst/1`` and so on). Where gradients are compressed
it has one field more, ``bits``: a number, or ``"auto"`` for bits that a run chooses layer by layer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.burst.burst_plan import BurstPlan
from plait.cluster import Cluster
from plait.destination import write_text
from plait.document import read_json
from plait.errors import FileError
from plait.pipeline.plan import PipelinePlan
from plait.profile import Profile
from plait.sim.data_plan import BITS_WORK, DataPlan, known_bits
from plait.sim.reduction import Reduction, reduction_of
from plait.spill.plan import SpillPlan
from plait.strategy.codecs import Codecs, Mixed
from plait.strategy.comparison import packing
from plait.strategy.data import mixed
from plait.strategy.option import Bits, Option, Plan
from plait.strategy.site import Site

_KINDS: dict[str, type[BurstPlan] | type[DataPlan] | type[PipelinePlan] | type[SpillPlan]] = {
    "plait.plan.data/1": DataPlan,
    "plait.plan.pipeline/1": PipelinePlan,
    "plait.plan.burst/1": BurstPlan,
    "plait.plan.spill/1": SpillPlan,
}


@dataclass(frozen=True, kw_only=True)
class KeptPlan:
    """A plan of any strand, and the bits of its gradients."""

    plan: Plan
    bits: Bits = None
    """None is fp32, as torch sends it."""

    @classmethod
    def of(cls, option: Option) -> KeptPlan | None:
        """That of an option; None where it cannot be had."""
        return None if option.plan is None else cls(plan=option.plan, bits=option.bits)

    @property
    def devices(self) -> int:
        """How many it is for."""
        if isinstance(self.plan, PipelinePlan):
            return len(self.plan.stages)
        return self.plan.devices if isinstance(self.plan, BurstPlan | DataPlan) else 1

    @property
    def batch(self) -> int | None:
        """Rows of a step; None where the plan is for any number."""
        if isinstance(self.plan, PipelinePlan):
            return self.plan.global_batch
        return self.plan.batch if isinstance(self.plan, BurstPlan | DataPlan) else None

    def collective(
        self,
        profile: Profile,
        cluster: Cluster,
        codecs: Codecs | None = None,
        directory: str | Path | None = None,
    ) -> Reduction | None:
        """What reduces gradients in these bits there, at the price of ``codecs``; None are those of this
        machine, kept in ``directory``."""
        if self.bits is None:
            return None
        if self.bits in (16, 32):
            return reduction_of(None, self.bits)
        known = packing(Site(cluster=cluster), codecs, directory)
        if self.bits == "auto":
            return mixed(profile, known)
        return Mixed(parts=((self.bits, 1.0),), codecs=known)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, with ``bits`` where gradients are compressed."""
        data = self.plan.to_json()
        return data if self.bits is None else {**data, "bits": self.bits}

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> KeptPlan:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        found = data.get("format") if isinstance(data, dict) else None
        kind = _KINDS.get(found) if isinstance(found, str) else None
        if kind is None:
            raise FileError(
                f"{source}: field 'format' is {found!r}", setting="format", works=", ".join(_KINDS)
            )
        if kind is DataPlan:
            plan = DataPlan.from_json(data, source=source)
            return cls(plan=plan, bits=plan.bits)
        bits = data.get("bits")
        if bits is not None and (kind is not BurstPlan or not known_bits(bits)):
            raise FileError(
                f"{source}: field 'bits' is {bits!r} in {found}",
                setting="bits",
                works=BITS_WORK if kind is BurstPlan else "a plan of data or burst",
            )
        plain = {name: value for name, value in data.items() if name != "bits"}
        return cls(plan=kind.from_json(plain, source=source), bits=bits)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n", setting="plan file")

    @classmethod
    def load(cls, path: str | Path) -> KeptPlan:
        """Read a plan of any strand; an error names the file and the field."""
        data = read_json(path, works="what `plait plan --out` writes", setting="plan file")
        return cls.from_json(data, source=str(path))
