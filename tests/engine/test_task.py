"""A task in a file."""

import json

import pytest

from plait.engine.task import FILE, Task
from plait.errors import FileError
from reference_jobs import BASE

TASK = Task(
    name="small",
    kind="train",
    strategy="data",
    jobs=(BASE.to_json(),),
    devices=("here/0", "here/1"),
    cores=((0,), (1,)),
    compress=4,
    after=("big",),
    save_every=5,
    expected_step_ms=2.5,
)


def test_a_task_is_read_as_it_was_written(tmp_path):
    TASK.save(tmp_path)
    assert Task.load(tmp_path) == TASK
    assert TASK.names == ("small",)
    assert TASK.read_jobs() == [BASE]
    assert TASK.workers == 2


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"format": "plait.task/9"}, "another format"),
        ({"colour": "red"}, "colour"),
        ({"devices": None}, "not a task"),
    ],
)
def test_what_is_no_task_is_told(tmp_path, change, word):
    TASK.save(tmp_path)
    file = tmp_path / FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(FileError, match=word):
        Task.load(tmp_path)


def test_a_folder_without_a_task_is_told(tmp_path):
    with pytest.raises(FileError, match=FILE):
        Task.load(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(FileError, match="not a task"):
        Task.load(tmp_path)
