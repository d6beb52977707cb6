"""Train jobs whose models are larger than memory, many at once, exactly as if they had fitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from plait.errors import UsageError
from plait.job import Job
from plait.spill.handle import Fitting
from plait.spill.outcome import Outcomes
from plait.spill.policies import PolicyName
from plait.spill.progress import OnEvaluation, OnStep, Show
from plait.spill.settings import as_list, check_jobs
from plait.timeline import Timeline


def fit(
    jobs: Job | Iterable[Job],
    *,
    memory: str | int,
    directory: str | Path,
    devices: int = 1,
    device: str = "cpu",
    policy: PolicyName = "sticky",
    resume: bool = False,
    commit_every: int | None = None,
    prefetch: bool = True,
    lend: bool = False,
    export: bool = True,
    weights: Mapping[str, str | Path] | None = None,
    timeline: Timeline | None = None,
    show: Show = None,
    on_step: OnStep = None,
    on_evaluation: OnEvaluation = None,
) -> Outcomes:
    """Train jobs within a budget of memory, and return what came of each.

    Each job ends with the bits that :func:`plait.reference.train` gives it. A job that fails does not stop
    the others: its outcome has the error.

    Args:
        memory: Of all processes together, with their interpreters: ``"2GiB"``.
        directory: Where the jobs' state lives while they run, and their outcomes and weights afterwards.
        devices: Processes that compute, each with its share of the cores.
        device: What each computes on: ``"cpu"``, or ``"cuda"`` for a GPU each, which has not been run.
        policy: Which job a free device takes: ``"sticky"`` stays with one as long as that saves transfers,
            ``"lrtf"`` takes the one with the longest remaining time, as Hydra does.
        resume: Go on with what the directory holds; jobs that it does not hold begin. The same call survives
            restarts.
        commit_every: Steps between commits of a job, to which it goes back after a crash; None commits about
            every 30 seconds, and at the end.
        prefetch: Bring in what comes next while a device computes; False is there to see what that is worth.
        lend: Where jobs are fewer than devices, give them the cores of those that would be idle, and threads
            to match: a job then ends with the bits of that many threads.
        export: Write the trained weights of each job, as safetensors.
        weights: Files that jobs start from, by name of the job: safetensors, or a folder of them as Hugging
            Face saves it. Other jobs start from their seed.
        timeline: Records what every device computed and the disk moved.
        show: None shows a table on a terminal and lines elsewhere; False nothing; a function gets the lines.
        on_step: Called between the steps of every job with its name, how many steps are done, and the last
            one's loss; in another thread, and again for steps that are repeated after a crash.
        on_evaluation: Called in the same way after each evaluation, with the job's name and what was found.
    """
    given = as_list(jobs)
    check_jobs(given)
    names = [job.name for job in given]
    for name in weights if isinstance(weights, Mapping) else ():  # anything else is refused below
        if name not in names:
            raise UsageError(f"there is no job {name!r}", setting="weights", works=", ".join(names))
    with Fitting(
        memory=memory,
        directory=directory,
        devices=devices,
        device=device,
        policy=policy,
        resume=resume,
        commit_every=commit_every,
        prefetch=prefetch,
        lend=lend,
        export=export,
        weights={} if weights is None else weights,
        timeline=timeline,
        show=show,
        on_step=on_step,
        on_evaluation=on_evaluation,
    ) as fitting:
        fitting.add(given)
        return fitting.wait()
