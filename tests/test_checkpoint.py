import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import signal
import threading
import time
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp

from plait import checkpoint
from plait.errors import FileError, UsageError

STATE = {
    "model": {"a": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
    "step": 7,
    "losses": [0.1, float("inf")],
    "none": None,
}
DATA = "__0_0.distcp"


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("exchange", [True, False], ids=["in one step", "by two renames"])
def test_a_state_comes_back_as_it_was(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(checkpoint, "_exchange", lambda one, other: False)
    folder = tmp_path / "new" / "folder" / "state"
    checkpoint.save(folder, STATE)
    assert equal(checkpoint.load(folder), STATE)
    checkpoint.save(folder, {**STATE, "step": 8})
    assert checkpoint.load(folder)["step"] == 8
    assert os.listdir(folder.parent) == ["state"]
    assert sorted(os.listdir(folder)) == [".metadata", DATA, "plait.json"]


def test_what_a_distributed_checkpoint_would_lose_comes_back_too(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {
        "model": model.state_dict(),  # ordered, and with versions of its modules as an attribute
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "moment": image}, 1: {}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
        },
        "several": (torch.ones(2), [torch.zeros(0), "text", {"deep": [torch.ones((), dtype=torch.int64)]}]),
        "part": torch.arange(12.0).view(3, 4)[:, 1],
        "empty": {},
        "losses": [],
    }
    checkpoint.save(tmp_path / "state", state)
    loaded = checkpoint.load(tmp_path / "state")
    state["part"] = state["part"].contiguous()  # of what a tensor is a part, nobody needs to know
    assert equal(loaded, state)
    assert isinstance(loaded["model"], OrderedDict)
    assert loaded["model"]._metadata == model.state_dict()._metadata


def test_a_tied_weight_comes_back_as_one_tensor(tmp_path):
    weight = torch.randn(4, 3)
    checkpoint.save(tmp_path / "state", {"model": {"first": weight, "last": weight, "other": weight.clone()}})
    model = checkpoint.load(tmp_path / "state")["model"]
    assert model["first"] is model["last"]
    assert model["first"] is not model["other"]
    assert torch.equal(model["other"], weight)


def test_torch_reads_it_by_itself(tmp_path):
    """Into a model and an optimizer, by the names that torch has for what is in them, tied weights too."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "state", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    moment = torch.zeros(3, 3)
    wanted = {"model": other.state_dict(), "optimizer": {"state": {"0": {"exp_avg": moment}}}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(wanted, checkpoint_id=tmp_path / "state")
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert torch.equal(moment, optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "state"
    checkpoint.save(folder, STATE)
    return folder


@pytest.fixture
def saved(made, tmp_path):
    return shutil.copytree(made, tmp_path / "state")


@pytest.mark.parametrize("file", [".metadata", DATA])
@pytest.mark.parametrize("at", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_one_wrong_bit_is_found_wherever_it_is(saved, file, at):
    content = bytearray((saved / file).read_bytes())
    size = len(content)
    content[min(int(at * size), size - 1)] ^= 1
    (saved / file).write_bytes(content)
    with pytest.raises(
        FileError, match=f"checkpoint {saved} is damaged: the checksum of {file}, {size} bytes"
    ):
        checkpoint.load(saved)


def test_one_wrong_bit_of_the_manifest_is_found_wherever_it_is(saved):
    content = (saved / "plait.json").read_bytes()
    for at in range(len(content.rstrip())):
        (saved / "plait.json").write_bytes(
            content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        )
        with pytest.raises(FileError, match=str(saved)):
            checkpoint.load(saved)


def manifest(folder, change):
    """Have another manifest."""
    found = json.loads((folder / "plait.json").read_text())
    change(found)
    (folder / "plait.json").write_text(json.dumps(found))


def stating(folder, name, content):
    """A file with another content, of which the manifest knows."""
    (folder / name).write_bytes(content)
    sums = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest(folder, lambda found: found["files"].update({name: sums}))


def of_file(name, value):
    return lambda folder: manifest(folder, lambda found: found["files"][DATA].update({name: value}))


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: os.truncate(folder / DATA, 100), f"{DATA} has 100 of [0-9]+ bytes"),
        (lambda folder: os.truncate(folder / DATA, 10**6), f"{DATA} has 1000000 of [0-9]+ bytes"),
        (lambda folder: os.truncate(folder / ".metadata", 0), ".metadata has 0 of [0-9]+ bytes"),
        (lambda folder: os.unlink(folder / DATA), f"{DATA} is missing"),
        (lambda folder: os.unlink(folder / ".metadata"), ".metadata is missing"),
        (lambda folder: os.unlink(folder / "plait.json"), "it has no plait.json"),
        (lambda folder: os.truncate(folder / "plait.json", 20), "has a plait.json that cannot be read"),
        (lambda folder: (folder / "plait.json").write_text("[]"), "has a plait.json that cannot be read"),
        (
            lambda folder: manifest(folder, lambda found: found.update(format="plait.checkpoint/3")),
            "has format 'plait.checkpoint/3'",
        ),
        (lambda folder: manifest(folder, lambda found: found.pop("files")), "plait.json names no files"),
        (lambda folder: manifest(folder, lambda found: found["files"].clear()), "plait.json names no files"),
        (of_file("bytes", "7"), f"does not say the bytes of {DATA}"),
        (of_file("bytes", True), f"does not say the bytes of {DATA}"),
        (of_file("bytes", -1), "has [0-9]+ of -1 bytes"),
        (of_file("sha256", None), f"does not say the sha256 of {DATA}"),
        (
            lambda folder: manifest(folder, lambda found: found["files"].update({"../up": {}})),
            "names '../up', which is elsewhere",
        ),
        (lambda folder: stating(folder, ".metadata", b"what torch did not write"), "torch cannot read it: "),
        (
            lambda folder: stating(folder, ".metadata", pickle.dumps(Harmful())),
            "its table of contents asks for (posix|os).system",
        ),
        (
            lambda folder: stating(folder, DATA, b"0" * (folder / DATA).stat().st_size),
            "is whole, but torch cannot read it: ",
        ),
        (
            lambda folder: shutil.rmtree(folder) or folder.write_text("{}"),
            "a file, and a checkpoint is a folder",
        ),
    ],
)
def test_what_is_not_whole_is_named(saved, damage, reason, monkeypatch):
    monkeypatch.chdir(saved.parent)
    damage(saved)
    with pytest.raises(FileError, match=reason) as caught:
        checkpoint.load(saved)
    assert str(saved) in caught.value.what
    assert caught.value.setting == "resume"
    assert not (saved.parent / "harmed").exists()


def test_plain_values_are_read_without_running_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path / "state", {"job": Harmful(), "model": torch.ones(1)})
    with pytest.raises(FileError, match=r"torch cannot read it: .*[Ww]eights.only"):
        checkpoint.load(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]


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


def test_two_tensors_of_one_name_are_refused(saved):
    for state in ({1: torch.ones(1), "1": torch.ones(1)}, {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}):
        with pytest.raises(ValueError, match=r"called 1|duplicated flatten key a\.b"):
            checkpoint.save(saved, state)
    assert equal(checkpoint.load(saved), STATE)


def test_who_dies_between_the_renames_leaves_the_one_before(saved):
    """What is there then: the new one beside its place, and the old one beside it, too."""
    shutil.copytree(saved, saved.with_name("state.partial"))
    saved.rename(saved.with_name("state.before"))
    assert equal(checkpoint.load(saved), STATE)
    assert origin(resume=saved) == saved
    checkpoint.save(saved, {**STATE, "step": 9})
    assert checkpoint.load(saved)["step"] == 9
    assert os.listdir(saved.parent) == ["state"]


def test_two_folders_change_places_in_one_step(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not checkpoint._exchange(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot")
    assert (tmp_path / "one" / "other").exists()
    assert (tmp_path / "other" / "one").exists()
    assert not checkpoint._exchange(tmp_path / "one", tmp_path / "nothing")
    assert (tmp_path / "one" / "other").exists()


def test_one_before_that_was_not_removed_is_no_obstacle(saved):
    shutil.copytree(saved, saved.with_name("state.before"))
    checkpoint.save(saved, {**STATE, "step": 9})
    assert checkpoint.load(saved)["step"] == 9
    assert os.listdir(saved.parent) == ["state"]


def test_one_that_is_replaced_while_it_is_read_is_read_again(saved, monkeypatch):
    from plait import checkpoint_data

    read, calls = checkpoint_data.read, []

    def replaced(folder, *, device):
        calls.append(folder)
        if len(calls) == 1:
            monkeypatch.undo()
            checkpoint.save(saved, {**STATE, "step": 9})
            raise FileNotFoundError(2, "No such file or directory")
        return read(folder, device=device)

    monkeypatch.setattr(checkpoint_data, "read", replaced)
    assert checkpoint.load(saved)["step"] == 9


def test_a_state_that_cannot_be_saved_leaves_what_was_there(saved):
    with pytest.raises(TypeError):
        checkpoint.save(saved, {"thread": threading.Lock(), "model": torch.ones(1)})
    assert equal(checkpoint.load(saved), STATE)
    assert os.listdir(saved.parent) == ["state"]


def save_until_killed(file, seed):
    def kill():
        time.sleep(random.Random(seed).uniform(0.05, 0.3))
        os.kill(os.getpid(), signal.SIGKILL)

    import plait.checkpoint_data  # noqa: F401  (takes longer than the moment until the end)

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
def folders(made, tmp_path):
    """One that holds a checkpoint, and one that does not exist yet."""
    full, new = tmp_path / "full", tmp_path / "new"
    shutil.copytree(made, full / checkpoint.NAME)
    return full, new


def origin(resume=None, directory=None, overwrite=False):
    return checkpoint.origin(resume=resume, directory=directory, overwrite=overwrite)


def test_where_a_run_goes_on_from(folders):
    full, new = folders
    file = full / checkpoint.NAME
    (full.parent / "none").mkdir()
    assert origin(resume=full.parent / "none") == full.parent / "none" / checkpoint.NAME
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
