"""Reading a model's blocks one at a time from safetensors files, as Hugging Face saves them."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from plait import deferred
from plait.chain import Chain
from plait.errors import FileError, TraceError
from plait.weights import read

WORDS = torch.arange(12).view(2, 6)
X = torch.randn(2, 4)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, dtype=torch.bfloat16)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return self.b((torch.relu(self.norm(self.a(x))) + self.table + torch.tensor([1.0])).bfloat16())


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config, **ends))


@pytest.fixture(scope="module")
def language():
    """A chain of a GPT-2 that does not exist, and one that does."""
    logging.disable(logging.WARNING)
    made = Chain.trace(deferred.construct(gpt2), {"input_ids": WORDS}).eval()
    yield made, deferred.build(gpt2, seed=3).eval()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("shard", ["1GB", "10KB"], ids=["one file", "many files"])
def test_a_saved_model_is_read_block_by_block(language, shard, tmp_path):
    chain, model = language
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shard == "10KB")
    for place in range(len(chain)):
        chain.release(place)
    for place in reversed(range(len(chain))):
        absent = [name for name in chain[place].state_names if chain[place].state(name).is_meta]
        chain.load(place, tmp_path)
        assert all(not chain[place].state(name).is_meta for name in absent)
    with torch.no_grad():
        assert torch.equal(chain(input_ids=WORDS).logits, model(input_ids=WORDS).logits)
    assert chain.model.lm_head.weight is chain.model.transformer.wte.weight


def test_a_tied_weight_is_found_under_its_other_name(language, tmp_path):
    chain, model = language
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del state["transformer.wte.weight"]
    save_file(state, tmp_path / "weights.safetensors")
    chain.release(0)
    chain.load(0, tmp_path / "weights.safetensors")
    assert torch.equal(chain.model.transformer.wte.weight, model.lm_head.weight)


@pytest.fixture
def normed(tmp_path):
    torch.manual_seed(0)
    model = Normed()
    model(X)
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    return Chain.trace(deferred.construct(Normed), X), model, file


def test_buffers_are_read_and_what_is_not_saved_stays(normed):
    chain, model, file = normed
    for place in range(len(chain)):
        chain.load(place, file)
    assert chain.model.norm.num_batches_tracked == 1
    assert torch.equal(chain.model.norm.running_var, model.norm.running_var)
    assert torch.equal(chain(X), model(X))


def test_weights_take_on_the_models_type(normed):
    chain, _model, file = normed
    state = {name: tensor.double() for name, tensor in load_file(file).items()}
    save_file(state, file)
    for place in range(len(chain)):
        chain.load(place, file)
    assert chain.model.a.weight.dtype == torch.float32
    assert chain.model.b.weight.dtype == torch.bfloat16
    assert chain.model.norm.num_batches_tracked.dtype == torch.int64


def rewrite(file, change):
    state = load_file(file)
    change(state)
    save_file(state, file)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda state: state.pop("a.bias"), "holds no tensor 'a.bias' among its 8"),
        (
            lambda state: state.update({"a.bias": torch.zeros(5)}),
            r"has 'a.bias' with shape \(5,\), and the model wants \(4,\)",
        ),
    ],
    ids=["missing", "shape"],
)
def test_a_tensor_that_is_not_as_it_should_be(normed, change, what):
    chain, _, file = normed
    rewrite(file, change)
    with pytest.raises(FileError, match=what) as caught:
        chain.load(0, file)
    assert str(file) in str(caught.value)
    assert chain.model.a.weight.is_meta, "nothing is loaded if not all can be"


def test_a_truncated_file(normed):
    chain, _, file = normed
    content = file.read_bytes()
    for length in (len(content) - 8, 4, 0):
        file.write_bytes(content[:length])
        with pytest.raises(FileError, match="cannot be read") as caught:
            chain.load(0, file)
        assert str(file) in str(caught.value)


def test_no_file_at_all(normed, tmp_path):
    chain, _, _ = normed
    for path in (tmp_path / "nothing", tmp_path / "nothing.safetensors"):
        with pytest.raises(FileError, match="no safetensors file at"):
            chain.load(0, path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}", b"\xff\xfe"], ids=repr)
def test_an_index_that_is_none(content, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(FileError, match="is no index of tensors"):
        read(tmp_path, ["a"], aliases={})


def test_an_index_that_names_a_file_that_is_not_there(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileError, match=r"gone\.safetensors cannot be read"):
        read(tmp_path, ["a"], aliases={})


def test_an_index_that_promises_what_its_file_does_not_hold(tmp_path):
    save_file({"b": torch.ones(1)}, tmp_path / "part.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    with pytest.raises(FileError, match=r"part\.safetensors cannot be read.*'?a'?"):
        read(tmp_path, ["a"], aliases={})


def test_only_what_is_asked_for_is_read(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, file)
    found = read(tmp_path, ["b"], aliases={})
    assert list(found) == ["b"]
    assert torch.equal(found["b"], torch.zeros(3))


def test_buffers_lost_on_the_meta_device_are_read_or_missed(tmp_path):
    with torch.device("meta"):
        model = Normed()
    chain = Chain.trace(model, X)
    whole = Normed()
    file = tmp_path / "model.safetensors"
    save_file(whole.state_dict(), file)
    with pytest.raises(TraceError, match="buffer 'table' was lost") as caught:
        chain.load(0, file)
    assert "construct" in caught.value.works
    assert torch.equal(model.norm.running_var, whole.norm.running_var)
