"""Files for Slurm, Kubernetes and torchrun: what they say, and what they run with commands of our own."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from plait import __version__, reference
from plait.engine.emit import Surroundings, emit, label
from plait.engine.launcher import import_path
from plait.engine.result import JobResult
from plait.engine.task import Task
from plait.errors import UsageError
from reference_jobs import job

DNS = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SBATCH = {
    "job-name",
    "ntasks",
    "cpus-per-task",
    "gpus-per-task",
    "mem-per-cpu",
    "time",
    "partition",
    "output",
}


def task(name="gpt", workers=3, **changes):
    jobs = (json.dumps({"name": "gpt", "threads": 2}),)
    devices = tuple(f"node{i}/0" for i in range(workers))
    return Task(
        **({"name": name, "kind": "train", "strategy": "data", "jobs": jobs, "devices": devices} | changes)
    )


def checked(path):
    """The text of a script that bash can read."""
    subprocess.run(["bash", "-n", path], check=True)
    return path.read_text()


def directives(text):
    """Those of sbatch, which reads no further than the first line that is not a comment."""
    head = text.partition("\nset ")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert all(line.startswith("#") for line in head)
    found = [re.fullmatch(r"#SBATCH --([a-z-]+)=(\S+)", line) for line in head if line.startswith("#SBATCH")]
    assert all(found), head
    assert text.count("#SBATCH") == len(found)
    return {match[1]: match[2] for match in found}


@pytest.fixture
def stand_ins(tmp_path):
    """Commands that say how they were called; returns what runs a script with these before all others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    commands = {
        "scontrol": 'test "$*" = "show hostnames node[3-4]"; printf "node3\\nnode4\\n"',
        # Three tasks, two of them on the first node.
        "srun": "while [[ $1 == --* ]]; do shift; done\n"
        'for at in "0 0 0" "1 1 0" "2 0 1"; do read -r p l n <<< "$at"\n'
        'SLURM_PROCID=$p SLURM_LOCALID=$l SLURM_NODEID=$n SLURM_STEP_TASKS_PER_NODE="$LAYOUT" "$@"; done',
        "python": 'echo "$RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR $MASTER_PORT '
        '${PLAIT_ENGINE-none}: $*"',
    }
    for name, command in commands.items():
        (folder / name).write_text(f"#!/bin/bash\nset -e\n{command}\n")
        (folder / name).chmod(0o755)

    def run(script, **variables):
        own = {"PATH": f"{folder}:{os.environ['PATH']}", "PLAIT_ENGINE": "here:1", **variables}
        return subprocess.run(["bash", script], env=own, capture_output=True, text=True, check=False)

    return run


def test_slurm_asks_for_what_a_task_needs(tmp_path):
    [path] = emit(tmp_path, task(), "slurm")
    assert path == tmp_path / "tasks" / "gpt" / "slurm.sh"
    assert directives(checked(path)) == {
        "job-name": "plait-gpt",
        "ntasks": "3",
        "cpus-per-task": "2",
        "output": f"{tmp_path}/tasks/gpt/slurm-%j.log",
    }
    assert Task.load(path.parent) == task()  # where its workers look

    more = Surroundings(gpu=True, memory_bytes=3 << 30, time_limit="1:00:00", partition="long")
    text = checked(emit(tmp_path, task(after=("first",)), "slurm", given=more)[0])
    assert directives(text).items() >= {
        ("gpus-per-task", "1"),
        ("mem-per-cpu", "1536M"),
        ("time", "1:00:00"),
        ("partition", "long"),
    }
    assert directives(text).keys() <= SBATCH
    assert "afterok" in text
    assert "--gpu-bind=none" in text


def test_a_task_whose_devices_are_one_workers_care_is_one_worker(tmp_path):
    spill = task(kind="spill", strategy="spill", name="sweep")
    found = directives(checked(emit(tmp_path, spill, "slurm", given=Surroundings(gpu=True))[0]))
    assert (found["ntasks"], found["cpus-per-task"], found["gpus-per-task"]) == ("1", "6", "3")


@pytest.mark.parametrize(
    ("layout", "locals_"), [("2,1", (2, 2, 1)), ("2(x1),1(x4)", (2, 2, 1)), ("2(x2)", (2, 2, 2))]
)
def test_slurm_gives_every_worker_its_place(tmp_path, stand_ins, layout, locals_):
    [path] = emit(tmp_path, task("it's"), "slurm")
    checked(path)
    done = stand_ins(
        path, LAYOUT=layout, SLURM_JOB_NODELIST="node[3-4]", SLURM_JOB_ID="1234567", SLURM_NTASKS="3",
        SLURM_CPUS_PER_TASK="2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rest = f"3 node3 24567 none: -m plait.engine.worker {path.parent}"
    places = zip(range(3), (0, 1, 0), locals_, strict=True)
    assert done.stdout.splitlines() == [f"{rank} {local} {count} {rest}" for rank, local, count in places]


def test_kubernetes_has_a_service_and_a_job_that_find_each_other(tmp_path):
    given_ = Surroundings(image="registry.example/plait:1", gpu=True, memory_bytes=1 << 30, claim="data")
    [path] = emit(tmp_path / "first", task("GPT 2", after=("a", "b")), "kubernetes", given=given_)
    made = json.loads(path.read_text())
    assert yaml.safe_load(path.read_text()) == made
    assert (made["apiVersion"], made["kind"]) == ("v1", "List")
    service, job = made["items"]
    name = service["metadata"]["name"]
    assert DNS.fullmatch(name)
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["ports"][0]["port"] == 29500

    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["metadata"]["annotations"] == {"plait/after": "a, b"}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    pod = spec["template"]["spec"]
    assert (pod["subdomain"], pod["restartPolicy"]) == (name, "Never")
    [container] = pod["containers"]
    assert container["image"] == "registry.example/plait:1"
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": str(1 << 30)},
        "limits": {"nvidia.com/gpu": "1"},
    }
    assert {variable["name"]: variable["value"] for variable in container["env"]} == {
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": f"{job['metadata']['name']}-0.{name}",
        "MASTER_PORT": "29500",
    }
    [volume] = pod["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "data"}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": str(tmp_path)}]


def test_a_pod_runs_the_worker_of_its_index(tmp_path, stand_ins):
    [path] = emit(tmp_path, task("GPT 2"), "kubernetes")
    container = json.loads(path.read_text())["items"][1]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == f"plait:{__version__}"
    script = tmp_path / "pod.sh"
    script.write_text(" ".join(f"'{word}'" for word in container["command"]) + "\n")
    done = stand_ins(script, JOB_COMPLETION_INDEX="2")
    assert done.stdout.split(":")[0].split() == ["2", "none"]
    assert done.stdout.endswith(f": -m plait.engine.worker {path.parent}\n")


def test_torchrun_divides_workers_among_hosts(tmp_path, stand_ins):
    [path] = emit(tmp_path, task(workers=4), "torchrun")
    checked(path)
    run, worker = "-m torch.distributed.run", f"-m plait.engine.worker {path.parent}"
    alone = stand_ins(path)
    assert alone.stdout.partition(": ")[2] == f"{run} --standalone --nproc-per-node=4 {worker}\n"
    second = stand_ins(path, NNODES="2", NODE_RANK="1", MASTER_ADDR="node0")
    where = "--nnodes=2 --node-rank=1 --master-addr=node0 --master-port=29500 --nproc-per-node=2"
    assert second.stdout.partition(": ")[2] == f"{run} {where} {worker}\n"
    uneven = stand_ins(path, NNODES="3")
    assert uneven.returncode == 2
    assert "4 workers cannot be divided among 3 hosts" in uneven.stderr


def test_torchrun_trains(tmp_path):
    small = job()
    alone = task("small", workers=1, jobs=(small.to_json(),))
    [path] = emit(tmp_path, alone, "torchrun", given=Surroundings(python=sys.executable))
    own = {**os.environ, "PYTHONPATH": import_path(), "PLAIT_ENGINE": "127.0.0.1:1"}
    done = subprocess.run(["bash", path], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert JobResult.load(tmp_path / "jobs" / "small").losses == tuple(reference.train(small).losses)


@given(st.text(min_size=1))
def test_any_name_gives_a_label_of_dns(name):
    pod = f"plait-{label(name)}-99999"
    assert DNS.fullmatch(pod)
    assert len(pod) <= 63


def test_labels_of_different_names_differ():
    names = ["gpt", "GPT", "gpt ", "gpt-", "g" * 60, "g" * 61, "模型", "模形"]
    assert len({label(name) for name in names}) == len(names)


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"'pbs'.*works: slurm, kubernetes, torchrun"):
        emit(tmp_path, task(), "pbs")
    elsewhere = Surroundings(shared="/elsewhere")
    with pytest.raises(UsageError, match=f"not below /elsewhere.*works: {tmp_path.parent}"):
        emit(tmp_path, task(), "kubernetes", given=elsewhere)
    with pytest.raises(UsageError, match="has a blank"):
        emit(tmp_path, task("a b"), "slurm")
    assert not (tmp_path / "tasks").exists()  # nothing was written
