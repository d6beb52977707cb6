"""Networks put together at random: whatever the shape, the chain is the model, however it is cut."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

WIDTH = 4
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))


class Network(nn.Module):
    """Runs a list of words, each of which does something to the present tensor or to those kept."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.layers = nn.ModuleDict()
        for place, word in enumerate(words):
            if word in ("linear", "residual", "in place"):
                self.layers[str(place)] = nn.Linear(WIDTH, WIDTH)
            elif word == "concatenate":
                self.layers[str(place)] = nn.Linear(2 * WIDTH, WIDTH)
            elif word == "norm":
                self.layers[str(place)] = nn.BatchNorm1d(WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x):
        kept, offset = [x], self.offset.expand(x.shape[0], -1)
        for place, word in enumerate(self.words):
            layer = self.layers[str(place)] if str(place) in self.layers else None  # noqa: SIM401
            if word == "linear":
                x = torch.relu(layer(x))
            elif word == "residual":
                x = x + torch.tanh(layer(self.shared(torch.tanh(x))))
            elif word == "in place":
                x = layer(x)
                x += offset
            elif word == "norm":
                x = layer(x)
            elif word == "dropout":
                x = F.dropout(x, 0.3, self.training)
            elif word == "shared":
                x = torch.tanh(self.shared(x))
            elif word == "keep":
                kept.append(x)
            elif word == "add":
                x = x * kept[len(kept) // 2] + offset
            elif word == "concatenate":
                x = torch.tanh(layer(torch.cat([x, kept.pop() if len(kept) > 1 else kept[0]], 1)))
        return x, kept[-1]


WORDS = ["linear", "residual", "in place", "norm", "dropout", "shared", "keep", "add", "concatenate"]


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(words=st.lists(st.sampled_from(WORDS), min_size=3, max_size=14), data=st.data())
def test_a_random_network_equals_its_chain(same, words, data):
    def pick_cuts(n):
        return sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []

    same(lambda: Network([*words, "linear"]), X, steps=1, pick_cuts=pick_cuts)
