"""The plan of several jobs, read from the file that ``plait plan --out`` wrote: who runs where, when and how.

Of the file's ways the first is read, which is the one to take. What the jobs are is not in it: their names
are those of a jobs file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.document import fields_of, read_json
from plait.errors import FileError, PlaitError
from plait.strategy.kept_plan import KeptPlan
from plait.strategy.option import Option
from plait.strategy.workload import FORMAT, Placement, Way


@dataclass(frozen=True, kw_only=True)
class KeptWorkload:
    """The way to take, and what it is for."""

    way: Way
    devices: tuple[str, ...]
    """Names of all devices that it was made for."""
    batches: Mapping[str, int]
    """By job, rows of a step."""
    why: str
    data: Mapping[str, Any]
    """All that is in the file."""

    @classmethod
    def read(cls, path: str | Path) -> KeptWorkload | None:
        """From a file; None where it holds something else, which may be the plan of a single job."""
        data = read_json(path, works="what `plait plan --out` writes", setting="plan file")
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            return None
        return cls.from_json(data, source=str(path))

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> KeptWorkload:
        """Read what ``WorkloadPlan.to_json`` gives; ``source`` names the file in errors."""
        fields = fields_of(data, format=FORMAT, source=source)
        try:
            batches = {name: int(made["job"]["batch"]) for name, made in fields["jobs"].items()}
            if not fields["ways"]:
                what = f"{source}: {fields['why']}"
                raise FileError(what, setting="ways", works="the plan of jobs that fit")
            taken = fields["ways"][0]
            placements = tuple(
                _placement(one, batches[one["job"]], f"{source}: job {one['job']!r}")
                for one in taken["placements"]
            )
            return cls(
                way=Way(
                    name=str(taken["name"]),
                    placements=placements,
                    makespan_ms=float(taken["makespan_ms"]),
                    samples_per_s=float(taken["samples_per_s"]),
                ),
                devices=tuple(fields["devices"]),
                batches=batches,
                why=str(fields["why"]),
                data=data,
            )
        except PlaitError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise FileError(
                f"{source} is not whole: {type(error).__name__} {error}",
                setting="plan file",
                works="what `plait plan --out` writes",
            ) from None


def _placement(data: Mapping[str, Any], batch: int, source: str) -> Placement:
    plan = data["plan"]
    kept = KeptPlan.from_json({**plan, "bits": data["bits"]} if data["bits"] else plan, source=source)
    option = Option(
        strategy=data["strategy"],
        name=str(data["option"]),
        batch=batch,
        step_ms=float(data["step_ms"]),
        memory_bytes=dict.fromkeys(data["devices"], 0),
        plan=kept.plan,
        bits=kept.bits,
    )
    return Placement(
        job=str(data["job"]),
        how=data["how"],
        option=option,
        devices=tuple(data["devices"]),
        start_ms=float(data["start_ms"]),
        end_ms=float(data["end_ms"]),
        done=float(data["done"]),
    )
