"""A disk that is full, for real: what was there stays, and nothing half-written is left to take up room."""

import os
import subprocess

import pytest
import torch

from plait import checkpoint
from plait.engine.export import save_weights
from plait.engine.record import write_whole
from plait.engine.result import JobResult
from plait.engine.task import Task
from plait.errors import FileError

LARGE = 4 << 20


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of 2 MiB."""
    folder = tmp_path_factory.mktemp("disk")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "plait-test", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def text(folder, large):
    write_whole(folder / "file", "x" * (LARGE if large else 3))


def task(folder, large):
    Task(
        name="gpt", kind="train", strategy="data", jobs=("x" * (LARGE if large else 3),), devices=("here/0",)
    ).save(folder)


def result(folder, large):
    JobResult(name="gpt", end="finished", strategy="data", losses=(1.0,) * (LARGE if large else 3)).save(
        folder
    )


def state(folder, large):
    checkpoint.save(folder / "checkpoint", {"model": torch.zeros(LARGE if large else 3)})


def weights(folder, large):
    save_weights({"a": torch.zeros(LARGE if large else 3)}, folder / "model.safetensors")


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("write", [text, task, result, state, weights])
def test_nothing_is_lost_and_nothing_is_left(disk, write):
    folder = disk / write.__name__
    folder.mkdir()
    write(folder, large=False)
    before = contents(folder)
    free = os.statvfs(disk).f_bfree
    with pytest.raises(FileError, match=r"cannot be written: .*No space left on device") as caught:
        write(folder, large=True)
    assert caught.value.setting == "directory"
    assert contents(folder) == before
    assert os.statvfs(disk).f_bfree == free
    write(folder, large=False)
