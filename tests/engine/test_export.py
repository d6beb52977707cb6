"""Weights of a checkpoint as safetensors: equal to the bit, tied ones once, whole or not there."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from plait import checkpoint, reference
from plait.engine.export import export, save_weights
from plait.errors import FileError
from reference_jobs import BASE


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.5, dtype=torch.float64))


def test_a_trained_job(tmp_path):
    result = reference.train(BASE, directory=tmp_path)
    path = export(tmp_path)
    assert path == tmp_path / "model.safetensors"
    trained, found = result.model.state_dict(), load_file(path)
    assert list(found) == sorted(trained)
    for name, tensor in trained.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    model = BASE.build_model()
    assert load_model(model, path) == (set(), [])
    assert not list(tmp_path.glob("*.partial"))


def test_tied_weights_are_written_once_and_load_under_all_names(tmp_path):
    model = Tied()
    checkpoint.save(tmp_path / checkpoint.NAME, {"model": model.state_dict()})
    path = export(tmp_path / checkpoint.NAME, tmp_path / "elsewhere" / "tied.safetensors")
    assert set(load_file(path)) == {"embed.weight", "scale"}
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    other = Tied()
    load_model(other, path)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert other.head.weight is other.embed.weight


def test_views_and_empty_tensors_keep_their_values(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    state = {
        "row": whole[1],
        "turned": whole.T,
        "all": whole,
        "none": torch.empty(0),
        "none2": torch.empty(0),
    }
    path = save_weights(state, tmp_path / "w.safetensors")
    found = load_file(path)
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)


def test_what_a_module_keeps_besides_tensors_is_left_out(tmp_path):
    path = save_weights({"a": torch.ones(2), "a._extra_state": {"x": 1}}, tmp_path / "w.safetensors")
    assert set(load_file(path)) == {"a"}


def test_a_later_export_replaces_an_earlier_one(tmp_path):
    for value in (1.0, 2.0):
        save_weights({"a": torch.full((2,), value)}, tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors")["a"].tolist() == [2.0, 2.0]


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(FileError, match="there is no checkpoint"):
        export(tmp_path)
    checkpoint.save(tmp_path / checkpoint.NAME, {"step": 3})
    with pytest.raises(FileError, match="has no model"):
        export(tmp_path)
    (tmp_path / checkpoint.NAME / checkpoint.MANIFEST).write_bytes(b"not one")
    with pytest.raises(FileError, match="not a checkpoint that plait reads"):
        export(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"cannot be written.*room for the weights"):
        save_weights({"a": torch.ones(1)}, tmp_path / "file" / "w.safetensors")


def test_a_full_disk_leaves_what_was_there(tmp_path):
    import resource
    import signal

    save_weights({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        with pytest.raises(FileError, match="cannot be written"):
            save_weights({"a": torch.zeros(4096)}, tmp_path / "w.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert load_file(tmp_path / "w.safetensors")["a"].tolist() == [1.0, 1.0]
    assert not list(tmp_path.glob("*.partial"))
