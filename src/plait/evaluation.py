"""How well a model does on data that it is not trained on, however the rows are shared out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from plait.errors import UsageError
from plait.factory import Factory, Importable
from plait.units import parse_whole

if TYPE_CHECKING:
    import torch

    from plait.job import Job


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a job is evaluated on, and when: every few steps and after the last one."""

    data: Importable
    """``data(seed)`` as in the job; all of it is used, in order."""
    every: int | None = None
    """Steps between evaluations; None evaluates after the last step only."""
    batch: int | None = None
    """Rows at a time; None is as many as a micro-batch has. The result is the same but for rounding."""
    metrics: Mapping[str, Importable] = field(default_factory=dict)
    """More to report than the loss: by name, ``metric(output, batch)``, a mean like a loss, as a number or a
    tensor of one element. Batches combine as sum(w*m)/sum(w), w being ``metric.weight(batch)``, or where it
    has none, the weight of the loss."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", Factory.of(self.data, setting="evaluation.data"))
        for name in ("every", "batch"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, parse_whole(value, setting=f"evaluation.{name}", least=1))
        if not isinstance(self.metrics, Mapping) or "loss" in self.metrics:
            raise UsageError(
                f"metrics are {self.metrics!r}, not functions by names other than 'loss'",
                setting="evaluation.metrics",
                works="{'accuracy': 'plait.losses:accuracy'}",
            )
        metrics = {
            name: Factory.of(metric, setting=f"evaluation.metrics.{name}")
            for name, metric in self.metrics.items()
        }
        object.__setattr__(self, "metrics", metrics)

    def metric(self, name: str) -> functools.partial[Any]:
        """A metric by its name, imported."""
        return cast(Factory, self.metrics[name]).load(
            setting=f"evaluation.metrics.{name}", given=("output", "batch")
        )

    def __hash__(self) -> int:
        return hash((self.data, self.every, self.batch, tuple(self.metrics.items())))


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What came of one evaluation."""

    step: int
    """How many steps were done."""
    loss: float
    metrics: dict[str, float]

    @property
    def figures(self) -> dict[str, float]:
        """The loss and the metrics, by name."""
        return {"loss": self.loss, **self.metrics}


class Evaluator:
    """The evaluation data, loss and metrics of a job, built once."""

    def __init__(self, job: Job) -> None:
        assert job.evaluation is not None, "the job has no evaluation"
        self._objective = job.build_objective()
        self._batches = job.build_evaluation()
        self._means: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
            "loss": (self._objective.mean, self._objective.weigh)
        }
        for name in job.evaluation.metrics:
            metric = job.evaluation.metric(name)
            weight = getattr(metric.func, "weight", self._objective.weigh)
            self._means[name] = (functools.partial(_measured, name, metric), weight)

    @property
    def rows(self) -> int:
        """How many rows the evaluation data has."""
        return len(self._batches.dataset)

    def tally(
        self, forward: Callable[..., Any], rows: range, *, device: torch.device | str = "cpu"
    ) -> list[float]:
        """Sums of w*value and of w over some rows, for the loss and each metric in turn.

        ``forward`` is called as the model is, and must be in evaluation mode. Tallies of different rows
        (other ranks') add up element by element.
        """
        import torch

        sums = [0.0] * (2 * len(self._means))
        for start in range(rows.start, rows.stop, self._batches.batch):
            cut = range(start, min(start + self._batches.batch, rows.stop))
            batch = self._batches.fetch(cut, device=device)
            args, kwargs = self._objective.model_inputs(batch)
            with torch.no_grad(), self._objective.autocast(torch.device(device).type):
                output = self._objective.call(forward, args, kwargs)
                for place, (mean, weigh) in enumerate(self._means.values()):
                    weight = float(weigh(batch))
                    if weight > 0:  # the mean over nothing is not a number
                        sums[2 * place] += float(mean(output, batch)) * weight
                        sums[2 * place + 1] += weight
        return sums

    def result(self, step: int, sums: Sequence[float]) -> Evaluated:
        """What the tallies of all rows come to."""
        means = [
            total / weight if weight else math.nan
            for total, weight in zip(sums[::2], sums[1::2], strict=True)
        ]
        metrics = dict(zip(self._means, means, strict=True))
        return Evaluated(step=step, loss=metrics.pop("loss"), metrics=metrics)


def _measured(name: str, metric: Callable[..., Any], output: Any, batch: Any) -> float:
    """One metric of one batch, checked."""
    from plait.objective import described, explained

    setting = f"evaluation.metrics.{name}"
    with explained(f"metric {name!r}", setting=setting, works="such as plait.losses:accuracy"):
        value = metric(output, batch)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"metric {name!r} returned {described(value)}",
            setting=setting,
            works="a mean: one number, or a tensor of one element",
        ) from None
