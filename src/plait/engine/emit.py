"""Files that start a task's workers without an engine: for Slurm, Kubernetes or plain torchrun.

The workers are the very same, ``python -m plait.engine.worker FOLDER`` under the torchrun contract, and the
folder is on a directory that all hosts share. Nobody restarts them: started again, they go on from their
checkpoint. These files are checked by tests, and have not been run on a cluster.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait import __version__
from plait.destination import make_folder, write_text
from plait.engine.launcher import MODULE
from plait.engine.record import file_name
from plait.engine.task import FILE, Task
from plait.errors import UsageError

Kind = Literal["slurm", "kubernetes", "torchrun"]
PORT = 29500
"""Where rank 0 listens, on a host of its own."""
_LONGEST_LABEL = 40
"""Of the 63 that DNS allows: a pod adds its index and five letters."""
_ENGINE = "PLAIT_ENGINE"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the files cannot know of the place where they will be used."""

    python: str = "python"
    """The interpreter that has plait, on every host."""
    gpu: bool = False
    """Whether a device is a GPU."""
    memory_bytes: int | None = None
    """Of each worker; None: the scheduler's default."""
    time_limit: str | None = None
    """Slurm's, such as ``12:00:00``."""
    partition: str | None = None
    """Slurm's."""
    image: str | None = None
    """The container that has plait and the jobs' code; None: ``plait`` with this version as its tag."""
    claim: str = "plait"
    """The persistent volume claim that holds the shared directory."""
    shared: str | None = None
    """The directory that the claim is mounted at, here and in pods; None: the one that holds the run's."""


def emit(
    run_directory: str | Path, task: Task, kind: Kind = "slurm", *, given: Surroundings | None = None
) -> list[Path]:
    """Write what starts the workers of a task, into the task's folder of the run; returns the files."""
    writers: Mapping[str, tuple[str, Callable[[Task, Path, Surroundings], str]]] = {
        "slurm": ("slurm.sh", slurm),
        "kubernetes": ("kubernetes.json", kubernetes),
        "torchrun": ("torchrun.sh", torchrun),
    }
    if kind not in writers:
        raise UsageError(f"nothing is known of {kind!r}", setting="emit", works=", ".join(writers))
    folder = Path(run_directory).resolve() / "tasks" / file_name(task.name)
    name, text = writers[kind]
    content = text(task, folder, given or Surroundings())
    make_folder(folder, setting="directory")
    if not (folder / FILE).exists():
        task.save(folder)
    write_text(folder / name, content, setting="directory")
    return [folder / name]


def slurm(task: Task, folder: Path, given: Surroundings) -> str:
    """A script for ``sbatch``."""
    directives: dict[str, str | int | None] = {
        "job-name": f"plait-{label(task.name)}",
        "ntasks": task.workers,
        "cpus-per-task": _cpus(task),
        "gpus-per-task": _devices(task) if given.gpu else None,
        "mem-per-cpu": _memory_per_cpu(task, given),
        "time": given.time_limit,
        "partition": given.partition,
        "output": _slurm_path(folder, "slurm-%j.log"),
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in directives.items() if value is not None]
    after = (
        [f"# To be submitted after {', '.join(task.after)}: sbatch --dependency=afterok:ID"]
        if task.after
        else []
    )
    # All GPUs of a node are to be seen: a worker takes the one that its local rank says.
    bind = " --gpu-bind=none" if given.gpu else ""
    text = _SLURM.format(bind=bind, **_words(folder, given))
    return "\n".join(["#!/bin/bash", *lines, *after, text])


_SLURM = """\
set -euo pipefail
unset {engine}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${{hosts[0]}}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export WORLD_SIZE="$SLURM_NTASKS"
# Slurm writes tasks per node as 2(x3),1 for 2, 2, 2 and 1; a worker needs the number of its own node.
worker='
counts=()
for part in ${{SLURM_STEP_TASKS_PER_NODE//,/ }}; do
  times=1
  if [[ $part == *x* ]]; then times=${{part##*x}}; times=${{times%)}}; fi
  for ((i = 0; i < times; i++)); do counts+=("${{part%%(*}}"); done
done
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${{counts[$SLURM_NODEID]}}
exec "$@"
'
srun --kill-on-bad-exit=1 --distribution=block --cpus-per-task="$SLURM_CPUS_PER_TASK"{bind} \\
  bash -c "$worker" worker {python} -m {module} {folder}
"""


def kubernetes(task: Task, folder: Path, given: Surroundings) -> str:
    """A headless Service and an Indexed Job for ``kubectl apply -f``, as JSON, which is YAML."""
    shared = folder.parents[2] if given.shared is None else Path(given.shared)
    if not folder.is_relative_to(shared):
        raise UsageError(
            f"the run is at {folder.parents[1]}, which is not below {shared}",
            setting="shared",
            works=str(folder.parents[2]),
        )
    name = f"plait-{label(task.name)}"
    resources: dict[str, Any] = {"requests": {"cpu": str(_cpus(task))}}
    if given.memory_bytes is not None:
        resources["requests"]["memory"] = str(given.memory_bytes)
    if given.gpu:
        resources["limits"] = {"nvidia.com/gpu": str(_devices(task))}
    # One worker a pod: a pod is a host of its own.
    variables = {
        "WORLD_SIZE": str(task.workers),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": f"{name}-0.{name}",
        "MASTER_PORT": str(PORT),
    }
    start = f'export RANK="$JOB_COMPLETION_INDEX"; unset {_ENGINE}; exec "$@"'
    container = {
        "name": "worker",
        "image": given.image or f"plait:{__version__}",
        "command": ["sh", "-c", start, "worker", given.python, "-m", MODULE, str(folder)],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": resources,
        "volumeMounts": [{"name": "shared", "mountPath": str(shared)}],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": given.claim}}],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "selector": {"job-name": name},
            "publishNotReadyAddresses": True,
            "ports": [{"name": "meeting", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "annotations": {"plait/after": ", ".join(task.after)} if task.after else {},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": task.workers,
            "parallelism": task.workers,
            # A worker alone that came back would wait for others that have long begun.
            "backoffLimit": 0,
            "template": {"spec": pod},
        },
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, job]}, indent=2) + "\n"


def torchrun(task: Task, folder: Path, given: Surroundings) -> str:
    """A script that runs ``torchrun``: alone for one host, or on each of several with its number."""
    return _TORCHRUN.format(world=task.workers, **_words(folder, given))


_TORCHRUN = """\
#!/bin/bash
# On one host: bash torchrun.sh
# On each of two: NNODES=2 NODE_RANK=0 MASTER_ADDR=host0 bash torchrun.sh, and NODE_RANK=1 on the other.
set -euo pipefail
unset {engine}
hosts=${{NNODES:-1}}
if (({world} % hosts)); then
  echo "{world} workers cannot be divided among $hosts hosts: NNODES must divide {world}" >&2
  exit 2
fi
where=(--standalone)
if ((hosts > 1)); then
  where=(--nnodes="$hosts" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR"
    --master-port="${{MASTER_PORT:-{port}}}")
fi
exec {python} -m torch.distributed.run "${{where[@]}}" --nproc-per-node=$(({world} / hosts)) \\
  -m {module} {folder}
"""


def label(name: str) -> str:
    """A name as DNS has them: small letters, digits and hyphens; one that had to be changed gets a number."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:_LONGEST_LABEL].strip("-")
    if plain == name:
        return plain
    number = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return f"{plain}-{number}".strip("-")


def _words(folder: Path, given: Surroundings) -> dict[str, str]:
    """What both scripts say, quoted for a shell."""
    return {
        "engine": _ENGINE,
        "folder": shlex.quote(str(folder)),
        "module": MODULE,
        "port": str(PORT),
        "python": shlex.quote(given.python),
    }


def _devices(task: Task) -> int:
    """Of each worker."""
    return 1 if task.kind == "train" else len(task.devices)


def _cpus(task: Task) -> int:
    """Of each worker."""
    return _devices(task) * max(int(json.loads(job).get("threads", 1)) for job in task.jobs)


def _memory_per_cpu(task: Task, given: Surroundings) -> str | None:
    """As Slurm counts memory, which knows none of a task."""
    if given.memory_bytes is None:
        return None
    return f"{-(-given.memory_bytes // (_cpus(task) << 20))}M"


def _slurm_path(folder: Path, name: str) -> str:
    if re.search(r"\s", str(folder)):
        raise UsageError(
            f"{folder} has a blank in it, which a directive of sbatch cannot have",
            setting="directory, name",
            works="a path without blanks",
        )
    return f"{str(folder).replace('%', '%%')}/{name}"
