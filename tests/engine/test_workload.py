"""Jobs and sweeps of one run: no two of them write to the same files."""

import pytest

from plait.engine.record import file_name
from plait.engine.workload import Workload
from plait.errors import UsageError
from plait.job import LONGEST_NAME
from plait.spill import Choice, Selection, no_halving
from reference_jobs import BASE, job


def sweep(name):
    return Selection(
        job(BASE, name=name), {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7)
    )


def named(*names):
    return [job(BASE, name=name) for name in names]


@pytest.mark.parametrize(
    ("given", "what", "works"),
    [
        ([*named("j-0"), sweep("j")], "job 'j-0' has the name of a trial of the sweep of job 'j'", "j.0"),
        ([sweep("j"), *named("j-12")], "job 'j-12' has the name of a trial", "j.12"),
        ([*named("j-0", "j.0"), sweep("j")], "job 'j-0' has the name of a trial", "j.0x"),
        ([sweep("j"), sweep("j-0")], "job 'j-0' has the name of a trial", "j.0"),
        ([sweep("j"), sweep("j-sweep")], "job 'j-sweep' has the name of the sweep", "j.sweep"),
        ([*named("j-sweep"), sweep("j")], "two jobs are named 'j-sweep'", "j-sweep-2"),
        ([*named("j"), sweep("j")], "a job and the job of a sweep are both named 'j'", "j-alone"),
        ([sweep("x" * 191)], "a sweep's job has a name of 191 characters", "at most 190"),
    ],
)
def test_names_by_which_files_would_be_shared_are_refused(given, what, works):
    with pytest.raises(UsageError) as caught:
        Workload.of(given)
    assert what in caught.value.what
    assert works in caught.value.works
    assert caught.value.setting == "jobs.name"


def test_the_longest_names_can_be_those_of_folders():
    assert file_name("x" * LONGEST_NAME)


def test_names_that_only_look_alike_are_taken():
    others = named("j0", "j-", "j-00", "j-1a", "j.0", "jj-0", "j-sweep-2")
    assert Workload.of([*others, sweep("j")]).jobs == tuple(others)


def test_what_is_no_job_is_refused_also_where_it_is_not_in_a_list(tmp_path):
    file = tmp_path / "jobs.py"
    file.write_text("job = 5\n")
    with pytest.raises(UsageError, match="5 is neither a job nor a sweep"):
        Workload.read(file)
