"""What a user wants trained, as one frozen description that every strand reads in the same way.

A job holds names and plain values only, so it travels as JSON and workers build it themselves. Its
meaning, kept by :mod:`plait.reference` and every strand:

- the rows of step n come from (seed, n) alone (:mod:`plait.data`);
- initial weights come from (seed, parameter name) (:mod:`plait.deferred`), dropout from (seed, step,
  micro-batch, rank) (:mod:`plait.determinism`);
- the loss of a step is sum(w*l)/sum(w) over whatever parts the batch was cut into
  (:mod:`plait.objective`);
- torch threads are set from the job, because their number changes bits.

A step: gradients of the step's loss, summed over ``accumulate`` micro-batches; clipped by their global
norm; ``optimizer.step()``; ``schedule.step()``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

from plait.doing import say
from plait.errors import FileError, PlaitError, UsageError
from plait.evaluation import Evaluation
from plait.factory import Factory, Importable, load_file
from plait.fields import check_known, read
from plait.units import parse_bytes, parse_whole

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from plait.data import Batches
    from plait.objective import Objective

FORMAT = "plait.job/1"

Precision = Literal["fp32", "bf16", "fp64"]
OnNonfinite = Literal["stop", "skip"]
Priority = Literal["foreground", "background"]
Strategy = Literal["auto", "data", "pipeline", "burst", "spill"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "nonfinite": get_args(OnNonfinite),
    "priority": get_args(Priority),
    "strategy": get_args(Strategy),
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LONGEST_NAME = 200
"""Of a job: files are called after it, and systems allow them 255 bytes."""
_MODEL_LOSS = "plait.losses:model_loss"
_MAY_CHANGE = {"steps", "epochs", "evaluation", "priority", "strategy", "memory"}
"""Fields that do not change what a step computes."""
_COUNTS = {"batch": 32, "steps": 100}
"""Counts to begin with, where 1 would work and hardly be meant."""
_GIVEN = {
    "model": (),
    "data": ("seed",),
    "loss": ("output", "batch"),
    "optimizer": ("parameters",),
    "schedule": ("optimizer",),
    "weight": ("batch",),
    "inputs": ("batch",),
    "collate": ("samples",),
}
"""What each function of a job is called with."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, on what, how, and for how long.

    Functions are given by importable name (``"module:function"``), as functions at the top level of a
    module, or, with keyword arguments, as ``functools.partial(function, layers=4)`` or
    ``Factory("module:function", layers=4)``.
    """

    name: str
    """Letters, digits, dots, dashes and underscores, up to 200: also the name of its run directory."""
    model: Importable
    """``model()`` returns an nn.Module. Frozen parameters (``requires_grad=False``) stay as they are."""
    data: Importable
    """``data(seed)`` returns a map-style data set of samples: tensors, tuples or dicts of them."""
    loss: Importable
    """``loss(output, batch)`` returns a mean; see :mod:`plait.losses`."""
    optimizer: Importable
    """``optimizer(parameters)``, given the trainable (name, parameter) pairs, as torch's own accept them."""
    batch: int
    """Rows of the global batch: of one step, over all workers."""
    steps: int | None = None
    """How many steps; or give epochs."""
    epochs: int | None = None
    """How many passes over the data, each of ``rows // batch`` steps; or give steps."""
    schedule: Importable | None = None
    """``schedule(optimizer)`` returns a learning rate scheduler, stepped once after each step."""
    weight: Importable | None = None
    """``weight(batch)``, the denominator of the loss's mean; None is the loss's own, or else rows."""
    inputs: Importable | None = None
    """``inputs(batch)``: what the model is called with, a dict for keywords or a tuple. None: a dict batch
    as keywords (its ``labels`` only for ``model_loss``), a tuple without its last, a tensor itself."""
    collate: Importable | None = None
    """``collate(samples)`` returns a batch; None is torch's default, which stacks."""
    accumulate: int = 1
    """Micro-batches that a step's rows are cut into, to need less memory."""
    clip_norm: float | None = None
    """Largest global norm of the gradients; None does not clip."""
    precision: Precision = "fp32"
    """bf16: weights in fp32, forward and loss under autocast. fp64: weights and real inputs in double."""
    nonfinite: OnNonfinite = "stop"
    """When a step's loss (or, where it is clipped, the gradients' norm) is not finite: stop with an error, or
    skip the update and go on. Either way the weights and the optimizer stay as they were before the step."""
    evaluation: Evaluation | None = None
    """What to evaluate on, and when."""
    seed: int = 0
    """Of initial weights, the order of the data, and dropout."""
    threads: int = 1
    """Torch threads of each worker."""
    priority: Priority = "foreground"
    """Background jobs take what foreground ones leave."""
    strategy: Strategy = "auto"
    """How to train it; auto lets plait choose. :mod:`plait.reference` trains every job plainly."""
    memory: str | int | None = None
    """Memory budget of each device, such as ``"2GiB"``; None is the device's own. Held in bytes."""

    def __new__(cls, **given: Any) -> Self:
        """Refuse a field that there is not with those that there are, which the call alone would not name."""
        check_known(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise UsageError(f"{self.name!r} cannot be a job's name", setting="name", works="'gpt-small.2'")
        if len(self.name) > LONGEST_NAME:
            raise UsageError(
                f"a job's name of {len(self.name)} characters: {self.name[:40]}...",
                setting="name",
                works=f"1 to {LONGEST_NAME} characters",
            )
        for name in ("model", "data", "loss", "optimizer"):
            object.__setattr__(self, name, Factory.of(getattr(self, name), setting=name))
        for name in ("schedule", "weight", "inputs", "collate"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Factory.of(getattr(self, name), setting=name))
        for name in ("batch", "accumulate", "seed", "threads", "steps", "epochs"):
            value = getattr(self, name)
            if value is not None or name not in ("steps", "epochs"):
                least, works = 0 if name == "seed" else 1, _COUNTS.get(name, 1)
                object.__setattr__(self, name, parse_whole(value, setting=name, least=least, works=works))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"there is no {name} {getattr(self, name)!r}", setting=name, works=", ".join(choices)
                )
        self._check_together()
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_bytes(self.memory, setting="memory"))
            if self.memory == 0:
                raise UsageError("a memory budget of 0 bytes", setting="memory", works="2GiB")

    def _check_together(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            got = "neither steps nor epochs" if self.steps is None else "both steps and epochs"
            raise UsageError(f"a job has {got}", setting="steps, epochs", works="one of them: steps=100")
        if self.accumulate > self.batch:
            raise UsageError(
                f"a batch of {self.batch} rows cannot be cut into {self.accumulate} micro-batches",
                setting="accumulate",
                works=f"1 to {self.batch}",
            )
        clip = self.clip_norm
        if clip is not None:
            number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
            if not (number and 0 < clip <= sys.float_info.max):
                raise UsageError(f"gradients cannot be clipped to {clip!r}", setting="clip_norm", works="1.0")
            object.__setattr__(self, "clip_norm", float(clip))
        if self.evaluation is not None and not isinstance(self.evaluation, Evaluation):
            raise UsageError(
                f"{self.evaluation!r} is not an evaluation",
                setting="evaluation",
                works="plait.job.Evaluation(data=..., every=100)",
            )
        if cast(Factory, self.loss).target == _MODEL_LOSS and self.weight is None:
            raise UsageError(
                "a model's own loss does not tell what it is the mean over, so the job must",
                setting="weight",
                works="'plait.losses:next_tokens' (causal language models) or 'plait.losses:targets'",
            )

    # What the job says, as objects.

    def make_model(self) -> nn.Module:
        """Call the model's factory, as it is; give this to :mod:`plait.deferred` to place the weights."""
        from torch import nn

        model = self._load("model")()
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{cast(Factory, self.model).target} returned a {type(model).__name__}",
                setting="model",
                works="a function that returns an nn.Module",
            )
        return model

    def build_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """The model with its initial weights, in training mode and in the job's precision."""
        from plait import deferred

        say("building the model")
        model = deferred.build(self.make_model, seed=self.seed, device=device)
        return (model.double() if self.precision == "fp64" else model).train()

    def build_batches(self) -> Batches:
        """The training data, as batches by step."""
        return self._batches(self._load("data")(self.seed), self.batch)

    def build_evaluation(self) -> Batches:
        """The evaluation data; its ``batch`` is how many rows to take at a time."""
        assert self.evaluation is not None, "the job has no evaluation"
        data = cast(Factory, self.evaluation.data).load(setting="evaluation.data", given=_GIVEN["data"])
        dataset = data(self.seed)
        if not len(dataset):
            raise UsageError("the evaluation data has no rows", setting="evaluation.data", works="at least 1")
        rows = self.evaluation.batch or -(-self.batch // self.accumulate)
        return self._batches(dataset, min(rows, len(dataset)))

    def _batches(self, dataset: Any, batch: int) -> Batches:
        from torch.utils.data import default_collate

        from plait.data import Batches

        collate = default_collate if self.collate is None else self._load("collate")
        return Batches(
            dataset=dataset,
            batch=batch,
            seed=self.seed,
            collate=collate,
            double=self.precision == "fp64",
        )

    def build_optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """The optimizer of (name, parameter) pairs; frozen ones are left out."""
        from torch.optim import Optimizer

        trained = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
        if not trained:
            raise UsageError("no parameter requires a gradient", setting="model", works="at least one")
        optimizer = self._load("optimizer")(trained)
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"{cast(Factory, self.optimizer).target} returned a {type(optimizer).__name__}",
                setting="optimizer",
                works="a torch.optim.Optimizer",
            )
        return optimizer

    def build_schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        """The learning rate schedule of an optimizer, if the job has one."""
        from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

        if self.schedule is None:
            return None
        schedule = self._load("schedule")(optimizer)
        if not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau):
            raise UsageError(
                f"{cast(Factory, self.schedule).target} returned a {type(schedule).__name__}, which is not "
                "stepped by the number of steps alone",
                setting="schedule",
                works="such as Factory('torch.optim.lr_scheduler:CosineAnnealingLR', T_max=100)",
            )
        return schedule

    def build_objective(self) -> Objective:
        """What runs in every step: inputs, loss and weight."""
        from plait import losses
        from plait.objective import Objective, all_inputs, inputs_without_labels

        loss = self._load("loss")
        own_weight = getattr(loss.func, "weight", losses.rows)
        own_inputs = all_inputs if loss.func is losses.model_loss else inputs_without_labels
        return Objective(
            loss=loss,
            weight=own_weight if self.weight is None else self._load("weight"),
            inputs=own_inputs if self.inputs is None else self._load("inputs"),
            bf16=self.precision == "bf16",
        )

    def total_steps(self, steps_per_epoch: int) -> int:
        """How many steps the job takes."""
        return self.steps if self.steps is not None else cast(int, self.epochs) * steps_per_epoch

    def _load(self, name: str) -> functools.partial[Any]:
        return cast(Factory, getattr(self, name)).load(setting=name, given=_GIVEN[name])

    # The job as text.

    def to_json(self) -> str:
        """The job as JSON text, format "plait.job/1"."""
        return json.dumps({"format": FORMAT, **_plain(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what :meth:`to_json` wrote; a wrong or unknown field is named."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FileError(f"not JSON: {error}", setting="job", works="what Job.to_json() wrote") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            got = content.get("format") if isinstance(content, dict) else content
            raise FileError(f"the format is {got!r}", setting="format", works=FORMAT)
        content = {name: value for name, value in content.items() if name != "format"}
        if isinstance(content.get("evaluation"), dict):
            content["evaluation"] = read(Evaluation, content["evaluation"], "evaluation.")
        return cast(Job, read(cls, content, ""))

    @property
    def digest(self) -> str:
        """A hash of all that the job says, the same in every process."""
        text = json.dumps(_plain(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def differs(self, text: str) -> tuple[str, Any, Any] | None:
        """The first field by which steps differ from those of a job in JSON text: its name, theirs, ours."""
        then, now = json.loads(text), _plain(self)
        for name, value in now.items():
            if name not in _MAY_CHANGE and then.get(name) != value:
                return name, then.get(name), value
        return None

    @property
    def memory_bytes(self) -> int | None:
        """The memory budget of each device."""
        return cast("int | None", self.memory)


def read_jobs(path: str | Path) -> list[Job]:
    """The jobs of a file: a .json that holds one, or a .py that defines ``jobs``, a list, or ``job``."""
    file = Path(path)
    if file.suffix not in (".json", ".py") or not file.is_file():
        raise FileError(f"there is no jobs file {file}", setting="path", works="jobs.py or job.json")
    if file.suffix == ".json":
        try:
            return [Job.from_json(file.read_text())]
        except PlaitError as error:
            raise FileError(f"{file}: {error.what}", setting=error.setting, works=error.works) from None
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"{file} cannot be read: {error}", setting="path", works="job.json") from None
    module = load_file(file)
    found = getattr(module, "jobs", [getattr(module, "job", None)])
    if isinstance(found, (list, tuple)) and (swept := [item for item in found if hasattr(item, "job")]):
        raise FileError(
            f"{file} has a {type(swept[0]).__name__} of {swept[0].job.name!r} among its jobs, "
            "and only a run can say what its trials will be",
            setting="path",
            works=f"plait run {file} --dry-run, which shows where and in how much memory it would search",
        )
    if not isinstance(found, (list, tuple)) or not found or not all(isinstance(job, Job) for job in found):
        raise FileError(
            f"{file} defines neither a list of jobs nor a job",
            setting="path",
            works="jobs = [Job(...)]",
        )
    names = [job.name for job in found]
    for name in names:
        if names.count(name) > 1:
            raise FileError(
                f"{file} has {names.count(name)} jobs named {name!r}", setting="name", works=f"{name}-2"
            )
    return list(found)


def read_job(path: str | Path, name: str | None = None) -> Job:
    """One job of a file: the one of that name; without a name, the only one."""
    jobs = read_jobs(path)
    names = ", ".join(job.name for job in jobs)
    if name is None and len(jobs) > 1:
        raise UsageError(f"{path} has {len(jobs)} jobs", setting="job", works=f"the name of one: {names}")
    for job in jobs:
        if name is None or job.name == name:
            return job
    raise UsageError(f"{path} has no job {name!r}", setting="job", works=names)


def _plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, Factory):
        return value.plain()
    if isinstance(value, (Job, Evaluation)):
        return {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return value
