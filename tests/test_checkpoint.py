import hashlib
import io
import json
import os
import random
import resource
import signal
import threading
import time

import pytest
import torch

from plait import checkpoint
from plait.errors import FileError, UsageError

STATE = {
    "model": {"a": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
    "step": 7,
    "losses": [0.1, float("inf")],
    "none": None,
}


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return one == other


def test_a_state_comes_back_as_it_was(tmp_path):
    file = tmp_path / "new" / "folder" / "state"
    checkpoint.save(file, STATE)
    assert equal(checkpoint.load(file), STATE)
    checkpoint.save(file, {**STATE, "step": 8})
    assert checkpoint.load(file)["step"] == 8
    assert os.listdir(file.parent) == ["state"]


@pytest.fixture
def saved(tmp_path):
    file = tmp_path / "state"
    checkpoint.save(file, STATE)
    return file


@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_one_wrong_bit_is_found_wherever_it_is(saved, at):
    content = bytearray(saved.read_bytes())
    body = len(content) - 256
    content[256 + min(int(at * body), body - 1)] ^= 1
    saved.write_bytes(content)
    with pytest.raises(FileError, match=f"checkpoint {saved} is damaged: the checksum of its {body} bytes"):
        checkpoint.load(saved)


def headed(content, **changed):
    """The same with another header."""
    header = json.loads(content[:256]) | changed
    return json.dumps(header).encode().ljust(255) + b"\n" + content[256:]


def around(body):
    """A file whose header is right."""
    sizes = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return headed(b"{}".ljust(256) + body, format=checkpoint.FORMAT, **sizes)


def written(state):
    body = io.BytesIO()
    torch.save(state, body)
    return body.getvalue()


def test_one_wrong_bit_of_the_header_is_found_wherever_it_is(saved):
    content = saved.read_bytes()
    for at in range(content.index(b"}") + 1):
        saved.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        with pytest.raises(FileError, match=str(saved)):
            checkpoint.load(saved)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], "holds [0-9]+ of [0-9]+ bytes"),
        (lambda content: content[:300], "holds 44 of [0-9]+ bytes"),
        (lambda content: content + b"x", "holds [0-9]+ of [0-9]+ bytes"),
        (lambda content: b"", "has no header"),
        (lambda content: content[:100], "has no header"),
        (lambda content: b"PK" + content[2:], "has no header"),
        (
            lambda content: content.replace(b"checkpoint/1", b"checkpoint/2"),
            "has format 'plait.checkpoint/2'",
        ),
        (lambda content: b"[]" + b" " * 300, "has no header"),
        (lambda content: content.replace(b'"bytes"', b'"bytds"'), "in its header, bytes is missing"),
        (lambda content: content.replace(b'"sha256"', b'"sha257"'), "in its header, sha256 is missing"),
        (lambda content: content.replace(b'"bytes": ', b'"bytes":-'), "holds [0-9]+ of -[0-9]+ bytes"),
        (lambda content: headed(content, sha256=None), "in its header, sha256 is None"),
        (lambda content: headed(content, bytes=True), "in its header, bytes is True"),
        (lambda content: headed(content, bytes="7"), "in its header, bytes is '7'"),
        (lambda content: around(b"what torch did not write"), "is whole, but torch cannot read it: "),
        (lambda content: around(b"\x80"), "is whole, but torch cannot read it: "),
        (lambda content: around(b""), "is whole, but torch cannot read it: "),
        (lambda content: around(written([1, 2])), "holds a list, not a state"),
    ],
)
def test_what_is_not_whole_is_named(saved, damage, reason):
    saved.write_bytes(damage(saved.read_bytes()))
    with pytest.raises(FileError, match=reason) as caught:
        checkpoint.load(saved)
    assert str(saved) in caught.value.what
    assert caught.value.setting == "resume"


def test_one_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileError, match=f"there is no checkpoint {tmp_path}/state"):
        checkpoint.load(tmp_path / "state")


def test_a_full_disk_leaves_what_was_there(saved):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # stands in for the end of the disk
    try:
        with pytest.raises(FileError, match=f"checkpoint {saved} cannot be written: File too large"):
            checkpoint.save(saved, {"large": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert equal(checkpoint.load(saved), STATE)
    assert os.listdir(saved.parent) == ["state"]


def test_a_state_that_cannot_be_saved_leaves_what_was_there(saved):
    with pytest.raises(TypeError):
        checkpoint.save(saved, {"thread": threading.Lock()})
    assert equal(checkpoint.load(saved), STATE)
    assert os.listdir(saved.parent) == ["state"]


def save_until_killed(file, seed):
    def kill():
        time.sleep(random.Random(seed).uniform(0.05, 0.3))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill).start()
    for step in range(10**6):
        checkpoint.save(file, {"step": step, "weights": torch.full((200_000,), float(step))})


@pytest.mark.parametrize("seed", range(3))
def test_a_process_killed_while_writing_leaves_a_whole_one(ranks, tmp_path, seed):
    file = tmp_path / "state"
    checkpoint.save(file, {"step": -1, "weights": torch.full((200_000,), -1.0)})
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        ranks(1, save_until_killed, file, seed, group=False)
    state = checkpoint.load(file)
    assert torch.equal(state["weights"], torch.full((200_000,), float(state["step"])))
    checkpoint.save(file, STATE)  # what the killed one left half-written is no obstacle
    assert os.listdir(tmp_path) == ["state"]


@pytest.fixture
def folders(tmp_path):
    """One that holds a checkpoint, and one that does not exist yet."""
    full, new = tmp_path / "full", tmp_path / "new"
    checkpoint.save(full / checkpoint.NAME, STATE)
    return full, new


def origin(resume=None, directory=None, overwrite=False):
    return checkpoint.origin(resume=resume, directory=directory, overwrite=overwrite)


def test_where_a_run_goes_on_from(folders):
    full, new = folders
    file = full / checkpoint.NAME
    assert origin() is origin(directory=new) is origin(resume=False, directory=str(new)) is None
    assert origin(resume=full) == origin(resume=str(file)) == origin(resume=full, directory=new) == file
    assert origin(resume=True, directory=full) == file
    assert origin(resume=True, directory=new) is None
    assert origin(resume=full, directory=full) == origin(resume=full / "." / checkpoint.NAME, directory=full)
    assert origin(directory=full, overwrite=True) is None
    assert origin(resume=new, directory=full, overwrite=True) == new  # which is then found not to be there


def test_a_checkpoint_is_not_overwritten_by_a_run_that_does_not_know_it(folders):
    full, new = folders
    for resume in (None, False, new, new / checkpoint.NAME):
        with pytest.raises(FileError, match=f"{full} holds a checkpoint already") as caught:
            origin(resume=resume, directory=full)
        assert caught.value.setting == "directory"
        assert "'resume' to go on from it, 'overwrite' to begin again" in caught.value.works


def test_resume_needs_to_know_where_and_whether(folders):
    full, _ = folders
    with pytest.raises(UsageError, match="resume=True has no directory to look in"):
        origin(resume=True)
    with pytest.raises(UsageError, match="resume=True and overwrite=True contradict each other"):
        origin(resume=True, directory=full, overwrite=True)
