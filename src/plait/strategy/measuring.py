"""The profile of a job, measured once on this machine and kept: a plan that is asked for again costs nothing.

A profile is kept under a digest of all that its figures depend on: the job's model, data, loss, optimizer and
the code of the files that define them, threads, precision, the batch sizes, the processor, and the versions
of torch and plait. Whatever changes, the digest does, and the job is measured anew. Code that those files
import is not looked into: after a change there, delete the file, or give another ``directory``.

Of the optimizer counts what changes its work, not its numbers (:mod:`plait.optimizer`): with another learning
rate, other betas, or a momentum of 0.8 for one of 0.9, a job is as it was measured before; with a momentum of
0, with ``amsgrad`` or ``fused``, it is not. Jobs that differ in nothing else share a profile, whatever they
are called. Of the code counts what defines something, not what lists jobs (:mod:`plait.strategy.code`).

Batch sizes are 1, 2, 4 ... and the batch itself, so that every share and micro-batch that a plan may use lies
between two that were measured.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from plait.cluster.machine import usable_cores
from plait.destination import make_folder
from plait.errors import FileError, UsageError
from plait.factory import Factory
from plait.job import Job
from plait.optimizer import work
from plait.profile import Profile
from plait.strategy.code import code_digest

_WAY = 2
"""How profiles are measured: raised with what they count, so that those of before are measured again."""
_MATTERS = ("model", "data", "inputs", "collate", "loss", "weight", "precision", "threads")
"""Fields of a job that its costs depend on, as they are; of the optimizer only what changes its work."""
_CODE = ("model", "data", "inputs", "collate", "loss", "weight", "optimizer")
"""Its functions whose code they depend on."""
_REPETITIONS = 5
_MOST_THREADS = 512
"""As many as the largest machines have: a job for one of them may be measured on a small one."""
_THREADS_A_CORE = 8


def profile_of(
    job: Job,
    *,
    devices: int,
    directory: str | Path | None = None,
    repetitions: int = _REPETITIONS,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """A job's profile for plans on up to so many devices: the one that is kept, or else measured now."""
    check_threads(job)
    sizes = batch_sizes(job.batch, devices, job.accumulate)
    folder = cache_folder() if directory is None else Path(directory)
    key = digest(job, sizes)[:16]
    for file in sorted(folder.glob(f"*-{key}.json")):  # whatever the job was called that was measured
        try:
            found = Profile.load(file)
            if progress is not None:
                progress(f"{job.name}: as measured before, from {file}")
            return found
        except FileError:  # one that was half written, or by another version
            file.unlink(missing_ok=True)
    make_folder(folder, setting="directory")
    found = _measure(job, sizes, repetitions, progress)
    # Another process may be writing the same: each replaces the file as a whole.
    file = folder / f"{job.name}-{key}.json"
    part = file.with_name(f"{file.name}.{os.getpid()}")
    found.save(part)
    part.replace(file)
    return found


def check_threads(job: Job) -> None:
    """Refuse so many torch threads that no machine has the cores, and measuring takes minutes or more."""
    cores = len(usable_cores())
    most = max(_MOST_THREADS, _THREADS_A_CORE * cores)
    if job.threads > most:
        raise UsageError(
            f"job {job.name!r} has {job.threads} threads, and this machine {cores} cores: they would wait "
            "for one another in every operation",
            setting="threads",
            works=f"1 to {cores}; at most {most}, for a larger machine",
        )


def batch_sizes(batch: int, devices: int, accumulate: int = 1) -> tuple[int, ...]:
    """The sizes to measure: powers of two from the smallest share that a plan may use to the largest."""
    largest = -(-batch // accumulate)
    smallest = max(1, batch // max(1, 8 * devices))  # a pipeline cuts a batch into 8 times its stages at most
    powers = [1 << power for power in range(largest.bit_length())]
    below = max((size for size in powers if size <= smallest), default=1)
    return tuple(sorted({size for size in powers if below <= size <= largest} | {largest}))


def steps_of(job: Job) -> int:
    """How many steps a job has; where it gives epochs, its data is asked."""
    if job.steps is not None:
        return job.steps
    return job.total_steps(job.build_batches().steps_per_epoch)


def digest(job: Job, sizes: Iterable[int]) -> str:
    """Of all that a profile depends on."""
    plain = json.loads(job.to_json())
    functions = {name: cast("Factory | None", getattr(job, name)) for name in _CODE}
    content = {
        "way": _WAY,
        "job": {name: plain[name] for name in _MATTERS},
        "optimizer": work(cast(Factory, job.optimizer)),
        "code": {name: None if each is None else code_digest(each) for name, each in functions.items()},
        "sizes": list(sizes),
        "machine": machine(),
        "versions": versions(),
    }
    return digest_of(content)


def digest_of(content: object) -> str:
    """Of plain data."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def cache_folder() -> Path:
    """Where profiles are kept: ``plait/profiles`` in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "plait" / "profiles"


def machine() -> str:
    """The processor, and how many cores it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor()} x{os.cpu_count()}"


def versions() -> list[str]:
    """Of torch and plait; empty where one is not installed."""
    found = []
    for package in ("torch", "plait"):
        try:
            found.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


def _measure(
    job: Job, sizes: tuple[int, ...], repetitions: int, progress: Callable[[str], None] | None
) -> Profile:
    if progress is not None:
        progress(f"tracing the model of {job.name}")
    return Profile.of_job(
        job,
        sizes,
        repetitions=repetitions,
        progress=None if progress is None else lambda text: progress(f"{job.name}: {text}"),
    )
