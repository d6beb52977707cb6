"""The plain trainer as a worker: jobs from files, an exit code and a line for what goes wrong."""

import functools
import json
from pathlib import Path

import pytest

from plait import reference, reference_worker
from plait.factory import Factory
from plait.job import Evaluation
from reference_jobs import ADAM, BASE, EVERYTHING, job, net, points, steps_with


def run_worker(capsys, *words):
    """The exit code, what was printed, and what was complained of."""
    code = reference_worker.main([str(word) for word in words])
    out, error = capsys.readouterr()
    return code, json.loads(out, parse_constant=pytest.fail) if out else None, error


def test_a_worker_takes_its_job_from_a_file_and_survives_a_restart(tmp_path, capsys):
    (tmp_path / "job.json").write_text(EVERYTHING.to_json())
    command = [tmp_path / "job.json", "--directory", tmp_path / "run", "--save-every", "3", "--resume"]
    reference.train(EVERYTHING, directory=tmp_path / "run", stop_after=2)  # what an earlier start came to
    code, told, _ = run_worker(capsys, *command)
    result = reference.train(EVERYTHING)
    assert (code, told["format"], told["job"]) == (0, "plait.reference/1", "small")
    assert told["losses"] == list(result.losses)
    assert told["evaluations"][-1]["step"] == 7
    assert (told["steps"], told["finished"], told["skipped"]) == (7, True, [])
    assert run_worker(capsys, *command)[1]["losses"] == told["losses"]
    code, _, error = run_worker(capsys, *command[:-1])
    assert code == 2
    assert "holds a checkpoint already" in error
    assert run_worker(capsys, *command[:-1], "--overwrite")[0] == 0
    assert run_worker(capsys, tmp_path / "job.json", "--resume", tmp_path / "run")[0] == 0


def test_or_from_a_jobs_file_by_name(tmp_path, capsys):
    file = tmp_path / "jobs.py"
    file.write_text(
        f"import dataclasses\nfrom plait.job import Job\none = Job.from_json({BASE.to_json()!r})\n"
        "jobs = [one, dataclasses.replace(one, name='short', steps=1, strategy='spill', memory='1MiB')]"
    )
    code, told, error = run_worker(capsys, file, "--job", "short")
    assert (code, told["job"], told["steps"]) == (0, "short", 1)
    assert "job 'short' is trained plainly; its strategy and memory are for others to read" in error
    code, told, error = run_worker(capsys, file, "--job", "small")
    assert (code, told["steps"], error) == (0, 7, "")
    code, told, error = run_worker(capsys, file)
    assert (code, told) == (2, None)
    assert (
        error == f"plait.reference: {file} has 2 jobs (setting: job); works: the name of one: small, short\n"
    )


def test_what_is_not_finite_is_null_in_json(tmp_path, capsys):
    (bad,) = steps_with(11)
    one = job(data=functools.partial(points, broken_at=11), optimizer=ADAM, steps=5, nonfinite="skip")
    one = job(one, evaluation=Evaluation(data=functools.partial(points, broken_at=0)))
    (tmp_path / "job.json").write_text(one.to_json())
    code, told, _ = run_worker(capsys, tmp_path / "job.json")
    assert code == 0
    assert [step for step, loss in enumerate(told["losses"]) if loss is None] == [bad] == told["skipped"]
    assert told["evaluations"][0]["loss"] is None


def from_disk(seed):
    return Path("/no/such/rows").read_text().splitlines()


BAD_JOBS = [
    ({"batch": 41}, 2, "a global batch of 41 rows is larger than the data set of 40"),
    ({"model": Factory(net, colour=1)}, 2, "takes no argument 'colour'"),
    ({"loss": "torch.nn.functional:cross_entropy"}, 2, "the loss failed when called with"),
    ({"data": from_disk}, 2, "No such file or directory: '/no/such/rows'"),
    ({"data": functools.partial(points, broken_at=11)}, 1, "job 'small' has a loss of nan"),
]


@pytest.mark.parametrize(("changes", "code", "reason"), BAD_JOBS, ids=[bad[2][:20] for bad in BAD_JOBS])
def test_a_worker_ends_with_a_line_and_a_code(tmp_path, capsys, changes, code, reason):
    (tmp_path / "job.json").write_text(job(**changes).to_json())
    got, told, error = run_worker(capsys, tmp_path / "job.json")
    assert (got, told) == (code, None)
    assert error.startswith("plait.reference: ")
    assert reason in error
    assert error.count("\n") == 1


def test_so_it_does_over_its_files(tmp_path, capsys):
    file = tmp_path / "job.json"
    code, _, error = run_worker(capsys, file)
    assert (code, "there is no jobs file" in error) == (2, True)
    file.write_text('{"format": "plait.profile/1"}')
    code, _, error = run_worker(capsys, file)
    assert (code, "job.json: the format is 'plait.profile/1'" in error) == (2, True)
    file.write_text(BASE.to_json())
    reference.train(job(seed=4), directory=tmp_path, stop_after=1)
    code, _, error = run_worker(capsys, file, "--directory", tmp_path, "--resume")
    assert (code, "is of another job: its seed is 4" in error) == (2, True)
    code, _, error = run_worker(capsys, file, "--save-every", "0", "--directory", tmp_path / "new")
    assert (code, "save_every is 0" in error) == (2, True)
    with pytest.raises(SystemExit) as ended:
        reference_worker.main([str(file), "--colour"])
    assert ended.value.code == 2


def test_a_checkpoint_that_cannot_be_written_late_is_a_run_that_failed(tmp_path, capsys):
    (tmp_path / "job.json").write_text(job(steps=2).to_json())
    code, told, error = run_worker(
        capsys, tmp_path / "job.json", "--directory", tmp_path / "job.json" / "run"
    )
    assert (code, told) == (1, None)
    assert "cannot be written" in error
