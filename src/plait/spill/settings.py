"""What a run is given: checked as a whole before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from plait.cluster.machine import memory_limit_bytes, memory_total_bytes, usable_cores
from plait.destination import make_folder
from plait.errors import FileError, UsageError
from plait.job import Job
from plait.spill.footprint import PROCESS_BYTES, likely_bytes, private_bytes
from plait.spill.policies import PolicyName
from plait.spill.segment import PAGE_BYTES
from plait.units import format_bytes, parse_bytes, parse_whole


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How jobs are to be run."""

    memory: str | int
    """Of all processes together, with their interpreters: ``"2GiB"``. Held in bytes."""
    directory: str | Path
    """Where state, weights and outcomes go."""
    devices: int = 1
    device: str = "cpu"
    """What each computes on: ``"cpu"``, its share of the cores, or ``"cuda"``, a GPU (not run so far)."""
    policy: PolicyName = "sticky"
    resume: bool = False
    """Go on with what the directory holds; jobs that it does not hold begin."""
    commit_every: int | None = None
    """Steps between commits of a job; None commits about every 30 seconds, and at the end."""
    prefetch: bool = True
    """Bring in what the next unit needs while one computes; without, transfers and computing take turns."""
    export: bool = True
    """Write the trained weights of jobs that finish."""
    weights: Mapping[str, str | Path] = field(default_factory=dict)
    """Files that jobs start from, by name of the job."""
    lend: bool = False
    """Where jobs are fewer than devices, give them the cores of those that would be idle."""

    def __post_init__(self) -> None:
        for name in ("resume", "prefetch", "export", "lend"):
            check_bool(getattr(self, name), setting=name)
        object.__setattr__(self, "devices", parse_whole(self.devices, setting="devices"))
        object.__setattr__(self, "memory", _budget_bytes(self.memory, self.devices))
        if self.commit_every is not None:
            object.__setattr__(self, "commit_every", parse_whole(self.commit_every, setting="commit_every"))
        if self.policy not in get_args(PolicyName):
            raise UsageError(
                f"there is no policy {self.policy!r}", setting="policy", works=", ".join(get_args(PolicyName))
            )
        cores = len(usable_cores())
        if self.devices > cores:
            raise UsageError(
                f"{self.devices} devices were asked of a machine with {cores} cores to use",
                setting="devices",
                works=f"1 to {cores}",
            )
        _check_kind(self.device, self.devices, self.memory_bytes)
        _check_weights(self.weights)
        directory = _path(self.directory, setting="directory", works="'runs/first'")
        make_folder(directory, setting="directory")
        object.__setattr__(self, "directory", directory)

    @property
    def memory_bytes(self) -> int:
        """The budget."""
        assert isinstance(self.memory, int)
        return self.memory

    @property
    def path(self) -> Path:
        """The directory."""
        return Path(self.directory)

    @property
    def state(self) -> Path:
        """Where the store keeps its files."""
        return self.path / "state"

    def cores(self, device: int) -> tuple[int, ...]:
        """The cores of a device."""
        all_cores = usable_cores()
        first, end = (n * len(all_cores) // self.devices for n in (device, device + 1))
        return all_cores[first:end]

    def lent(self, jobs: Sequence[Job]) -> tuple[Settings, list[Job]]:
        """As many devices as there are jobs, each with more cores, and the jobs with as many threads more."""
        if not self.lend or not 0 < len(jobs) < self.devices:
            return self, list(jobs)
        wider = replace(self, devices=len(jobs))
        cores = min(len(wider.cores(device)) for device in range(len(jobs)))
        threads = [min(cores, self.devices // len(jobs) * job.threads) for job in jobs]
        return wider, [replace(j, threads=max(j.threads, n)) for j, n in zip(jobs, threads, strict=True)]

    def weights_of(self, name: str) -> Path:
        """Where a job's trained weights go."""
        return self.path / f"{name}.safetensors"

    def outcome_of(self, name: str) -> Path:
        """Where a job's outcome goes."""
        return self.path / f"{name}.json"


def _budget_bytes(memory: str | int, devices: int) -> int:
    """The budget in bytes, where the machine has it and processes could run in it."""
    budget = parse_bytes(memory)
    limit = min(memory_total_bytes(), memory_limit_bytes() or memory_total_bytes())
    # A limit of a control group is rounded down to whole pages: who gives both the same number has that many.
    if not 0 < budget < limit + PAGE_BYTES:
        raise UsageError(
            f"a budget of {format_bytes(budget)} on a machine with {format_bytes(limit)}",
            setting="memory",
            works=f"up to {format_bytes(limit)}",
        )
    taken = private_bytes()
    if budget <= taken:
        # This process may have torch still to import, and more than torch by now.
        likely = likely_bytes(devices) + max(0, taken - PROCESS_BYTES)
        raise UsageError(
            f"a budget of {format_bytes(budget)} for {devices + 1} processes, of which this one alone takes "
            f"{format_bytes(taken)} already",
            setting="memory",
            works=f"about {min(limit, likely) >> 20}MiB and what the model takes",
        )
    return min(budget, limit)


def check_likely(memory_bytes: int, devices: int, *, what: str) -> None:
    """Refuse a budget in which the processes alone should not fit; before any of them is there."""
    likely = likely_bytes(devices)
    if memory_bytes > likely:
        return
    each = -(-likely // devices)
    raise UsageError(
        f"{format_bytes(memory_bytes)} of memory is too little for {what}: {devices + 1} processes take "
        f"about {format_bytes(likely)} by themselves",
        setting="memory",
        works=f"about {-(-each // (1 << 20))}MiB a device and what the model takes",
    )


def _check_kind(device: str, devices: int, memory_bytes: int) -> None:
    """Refuse GPUs that are not there, or that could not hold what a unit may need of the memory."""
    if device not in ("cpu", "cuda"):
        raise UsageError(f"there is no device {device!r}", setting="device", works="cpu or cuda")
    if device == "cpu":
        return
    import torch

    count = torch.cuda.device_count()
    if count < devices:
        raise UsageError(
            f"{devices} GPUs were asked for, and torch {torch.__version__} sees {count}",
            setting="device, devices",
            works="device='cpu'" if count == 0 else f"devices={count}",
        )
    least = min(torch.cuda.get_device_properties(i).total_memory for i in range(devices))
    if least < memory_bytes:
        raise UsageError(
            f"a unit may need up to {format_bytes(memory_bytes)}, and a GPU has {format_bytes(least)}",
            setting="memory",
            works=f"{least >> 20}MiB",
        )


def _check_weights(weights: object) -> None:
    """Refuse files to start from that are not there."""
    works = "{'a job': 'start.safetensors'}"
    if not isinstance(weights, Mapping):
        raise UsageError(f"{weights!r} does not give jobs their weights", setting="weights", works=works)
    for name, given in weights.items():
        if not _path(given, setting="weights", works=works).exists():
            raise FileError(
                f"there is no {given} for job {name!r} to start from",
                setting="weights",
                works="a safetensors file, or a folder of them",
            )


def _path(given: object, *, setting: str, works: str) -> Path:
    if not isinstance(given, (str, Path)) or not str(given):
        raise UsageError(f"{given!r} is no path", setting=setting, works=works)
    return Path(given)


def check_bool(given: object, *, setting: str) -> None:
    """Refuse what is neither True nor False: a text like "no" would count as True."""
    if not isinstance(given, bool):
        raise UsageError(f"{setting} is {given!r}", setting=setting, works="True or False")


def as_list(jobs: object) -> list[Job]:
    """Jobs as a list, from one or from anything that yields them; they are not looked at yet."""
    if isinstance(jobs, Job):
        return [jobs]
    if not isinstance(jobs, Iterable):
        raise UsageError(f"{jobs!r} is not a job", setting="jobs", works="plait.Job(...), or a list of them")
    return list(jobs)


def check_jobs(jobs: Sequence[Job], taken: Sequence[str] = ()) -> None:
    """Refuse what cannot be run together."""
    if not jobs and not taken:
        raise UsageError("there are no jobs", setting="jobs", works="at least one")
    names = list(taken)
    for job in jobs:
        if not isinstance(job, Job):
            raise UsageError(f"{job!r} is not a job", setting="jobs", works="plait.Job(...)")
        if job.name in names:
            raise UsageError(f"two jobs are named {job.name!r}", setting="name", works=f"{job.name}-2")
        names.append(job.name)
