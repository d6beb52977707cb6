"""A model's tensors by name: one place that the model and all blocks look at."""

import torch
from torch import nn

from plait.chain import Chain
from plait.state import State


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, words):
        return self.head(torch.relu(self.inner(self.words(words))) * self.table + self.seen)


def test_a_replaced_tensor_is_replaced_for_everyone():
    model = Tied()
    state = State(model)
    made = nn.Parameter(torch.zeros(6, 4))
    state.replace("words.weight", made)
    assert state["words.weight"] is made
    assert model.words.weight is made
    assert model.head.weight is made, "under all names of a tied weight"


def test_blocks_of_every_cut_see_a_replaced_tensor():
    chain = Chain.trace(Tied(), torch.zeros(2, 3, dtype=torch.long))
    cut = chain.cut([1])
    words = torch.arange(6).view(2, 3)
    chain.model.load_state_dict({n: torch.ones_like(t) for n, t in chain.state_dict().items()}, assign=True)
    expected = chain.model(words)
    assert torch.equal(chain(words), expected)
    assert torch.equal(cut(words), expected), "also what the model replaced by itself"


def test_what_a_state_dict_holds():
    state = State(Tied(), {"literal": torch.ones(())})
    saved = {name: state.is_saved(name) for name in ("words.weight", "seen", "table", "literal")}
    assert saved == {"words.weight": True, "seen": True, "table": False, "literal": False}


def test_a_recurrent_layer_notices():
    model = nn.LSTM(4, 4)
    state, x = State(model), torch.randn(3, 2, 4)
    for name, parameter in list(model.named_parameters()):
        state.replace(name, nn.Parameter(torch.zeros_like(parameter)))
    assert torch.equal(model(x)[0], torch.zeros(3, 2, 4))


def test_a_recurrent_layer_notices_a_replaced_bias_alone():
    model = nn.LSTM(4, 4)
    State(model).replace("bias_ih_l0", nn.Parameter(torch.full((16,), 9.0)))
    assert model(torch.zeros(1, 1, 4))[0].min() > 0.5
