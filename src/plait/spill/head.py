"""A unit of a job, what it reports, and all that is known of a job between two units; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Phase = Literal["create", "forward", "turn", "backward", "update", "evaluate"]
Stage = Literal["create", "step", "evaluate", "done"]
State = tuple[tuple[int, ...], tuple[int, ...], str, bool]
"""Shape, strides, type of a value or gradient at hand, and whether a gradient is wanted for it."""


@dataclass(frozen=True)
class Unit:
    """One turn of a job on a device."""

    job: str
    step: int
    phase: Phase
    shard: int
    part: int = 0
    """Which part of the evaluation data."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a unit did."""

    milliseconds: float = 0.0
    loss: float | None = None
    """Of the whole step, from the last shard."""
    weight: float | None = None
    """Of the whole step, from the first and the last shard; zero ends the step."""
    norm: float | None = None
    """The global norm of the gradients, from the last backward, where they are clipped."""
    norms: dict[str, float] = field(default_factory=dict)
    """Of the gradient of each parameter, where they are clipped."""
    layouts: dict[str, State] = field(default_factory=dict)
    """Of the values and gradients that were written, by key."""
    generators: dict[str, str] = field(default_factory=dict)
    """The random generator's state after a shard's forward, by ``shard/micro-batch``, in base64."""
    references: tuple[str, ...] = ()
    """Segments that the kept graph refers to."""
    casts: tuple[str, ...] = ()
    """The tied parameters that autocast made copies of."""
    present: dict[str, str] = field(default_factory=dict)
    """For a segment of moments: which entries hold something, as 0 and 1."""
    sums: tuple[float, ...] = ()
    """Of an evaluation so far."""
    evaluated: dict[str, Any] | None = None
    """The result of an evaluation that is complete."""
    learning_rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Head:
    """All that is known of a job between two units; between two steps it is small."""

    job: str
    stage: Stage = "create"
    position: int = 0
    """In the units of the stage."""
    step: int = 0
    """Steps done."""
    losses: tuple[float, ...] = ()
    skipped: tuple[int, ...] = ()
    evaluations: tuple[dict[str, Any], ...] = ()
    present: dict[str, str] = field(default_factory=dict)
    frozen: bool = False
    """What is frozen exists already, made by another job that shares it."""
    scratch: tuple[str, ...] = ()
    """Scratch segments that are defined now."""
    layouts: dict[str, State] = field(default_factory=dict)
    generators: dict[str, str] = field(default_factory=dict)
    references: dict[int, tuple[str, ...]] = field(default_factory=dict)
    casts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    norm: float | None = None
    devices: dict[int, int] = field(default_factory=dict)
    """The device that holds a shard's graph, or its gradients."""
    sums: tuple[float, ...] = ()

    @property
    def rests(self) -> bool:
        """Between two steps: nothing but committed segments and this is needed to go on."""
        return self.position == 0 and not self.scratch

    def to_json(self) -> dict[str, Any]:
        """As plain data, for the note of a commit."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Head:
        """Read what ``to_json`` gave, also through JSON text."""
        fields = dict(data)
        for name in ("losses", "skipped", "evaluations", "scratch", "sums"):
            fields[name] = tuple(fields[name])
        fields["layouts"] = {k: (tuple(v[0]), tuple(v[1]), v[2], v[3]) for k, v in fields["layouts"].items()}
        for name in ("references", "casts"):
            fields[name] = {int(k): tuple(v) for k, v in fields[name].items()}
        fields["devices"] = {int(k): v for k, v in fields["devices"].items()}
        return cls(**fields)
