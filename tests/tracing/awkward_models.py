"""Models of our own, one for each awkward thing that models do, with examples of their inputs."""

import itertools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
WORDS = torch.arange(10).view(2, 5)


class Three(nn.Module):
    """Three linear layers, for the models below to use."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class SeveralInputs(Three):
    def forward(self, x, y, *, scale):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)) + y) * scale))


class NestedInputs(Three):
    def forward(self, pair, options):
        return self.c(torch.relu(self.b(torch.relu(self.a(pair[0])) + options["y"])))


class IntegerInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(5, 8)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 20)

    def forward(self, words):
        places = torch.arange(words.shape[1])
        hidden = F.dropout(self.words(words) + self.places(places), 0.3, self.training)
        return self.b(torch.relu(self.a(hidden)))


class UnusedInput(Three):
    def forward(self, x, unused, flag=True):
        return self.c(torch.relu(self.b(torch.relu(self.a(x))))) if flag else x


class SeveralAcross(nn.Module):
    """Two streams side by side: two tensors cross every cut."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.right = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        left = right = x
        for one, other in zip(self.left, self.right, strict=True):
            left, right = torch.tanh(one(left)) + right, torch.tanh(other(right)) * left
        return left, right


class UNet(nn.Module):
    def __init__(self, depth=3, width=4):
        super().__init__()
        widths = [3, *(width * 2**level for level in range(depth + 1))]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths[:-1]))
        self.middle = nn.Conv2d(widths[-2], widths[-1], 3, padding=1)
        self.up = nn.ModuleList(
            nn.Conv2d(a + b, b, 3, padding=1) for a, b in zip(widths[:1:-1], widths[-2:0:-1], strict=False)
        )
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x))
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for layer in self.up:
            x = torch.relu(layer(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1)))
        return self.norm(x)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.m, self.n = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.3)

    def forward(self, x):
        return self.n(self.b(torch.relu(self.m(self.a(x)))))


class FrozenNorm(Normed):
    def __init__(self):
        super().__init__()
        self.m.eval()


class SharedNorm(Three):
    def __init__(self):
        super().__init__()
        self.n = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.c(self.n(self.b(torch.relu(self.n(self.a(x))))))


class Counter(Three):
    """One buffer is changed in place, one assigned anew."""

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("k", torch.ones(8), persistent=False)

    def forward(self, x):
        self.n.add_(1)
        hidden = torch.relu(self.a(x)) * self.k
        self.k = 0.5 * self.k + hidden.detach().mean(0)
        return self.c(self.b(hidden) * self.n) + self.k


class SwappedBuffers(Three):
    def __init__(self):
        super().__init__()
        self.register_buffer("p", torch.zeros(8))
        self.register_buffer("q", torch.ones(8))

    def forward(self, x):
        hidden = torch.relu(self.a(x) * self.p)
        self.p, self.q = self.q, self.p
        return self.c(torch.relu(self.b(hidden)) * self.p) + self.q


class MovingAverage(Three):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return self.c(self.b(hidden - self.mean))


class Dropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(torch.relu(layer(x)), 0.4, self.training)
        return x + torch.rand_like(x) * self.training


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        return self.head(torch.relu(self.a(self.words(words))))


class TiedThrice(Three):
    """One weight twice in an early block and once in a late one; one tensor in three blocks."""

    def __init__(self):
        super().__init__()
        self.middle = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        x = self.b(torch.tanh(self.b(hidden)) + hidden)
        for place, layer in enumerate(self.middle):
            x = torch.tanh(layer(x))
            if place % 4 == 3:
                x = x * hidden
        return self.c(self.b(x))


class SharedView(Three):
    """A view of a parameter, made once and used by every block, and the parameter itself besides."""

    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        places, turned = self.places[:1].expand(x.shape[0], -1), self.a.weight.t()
        x = torch.relu((x + places) @ turned)
        x = torch.relu(self.b(x) * places)
        x = torch.relu(x @ turned) + places
        return self.c(x) + self.a(x) * self.places[1]


class InPlace(Three):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        hidden = self.act(self.a(x))
        y = self.b(hidden)
        y += hidden
        y = self.act(y)
        z = x.new_zeros(x.shape[0], 2, 8)
        z[:, 0], z[:, 1] = y, self.c(y)
        return z


class ChangedInput(Three):
    def forward(self, x):
        x.mul_(2)
        x[:, 0] = 0
        hidden = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(hidden)) + x), x


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


class Outputs(Three):
    def forward(self, x):
        hidden = torch.relu(self.a(x))
        y = self.b(hidden)
        last = self.c(y)
        nested = Pair(y, [last, "text", 0.5])
        return {"hidden": hidden, "none": None, "nested": nested, "input": x, "view": last[0], "again": y}


class ReturnsState(Three):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x):
        return self.c(torch.relu(self.b(self.a(x)))), self.scale, self.table, self.table[2:]


class PartWithoutGradient(Three):
    def forward(self, x):
        with torch.no_grad():
            hidden = F.dropout(torch.relu(self.a(x)), 0.5, self.training)
        y = self.b(hidden)
        return self.c(y.detach() + torch.ones_like(y)) + y


class Frozen(Three):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)
        self.b.weight.requires_grad_(False)

    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class BatchArithmetic(Three):
    def forward(self, x):
        n = x.shape[0]
        hidden = self.a(x).reshape(n * 2, 4).reshape(n, -1) / n
        places = torch.arange(n, dtype=hidden.dtype).view(n, 1)
        hidden = self.b(hidden + places) * (1.0 / n**0.5)
        return self.c(hidden).sum(0) / (n + 1), (hidden @ hidden.t()).reshape(-1)


class ModeConstants(Three):
    """A literal, an unregistered tensor, and something else in training than in evaluation."""

    def __init__(self):
        super().__init__()
        self.table = torch.linspace(0, 1, 8)

    def forward(self, x):
        scale = torch.tensor([0.5]) if self.training else torch.tensor([2.0])
        return self.c(torch.relu(self.b(torch.relu(self.a(x)) * scale + self.table)))


class Names(nn.Module):
    """Children and parameters called as things of plait and torch are."""

    NAMES = ("name", "reads", "writes", "steps", "state", "state_names", "call", "_state")

    def __init__(self):
        super().__init__()
        for name in self.NAMES:
            self.add_module(name, nn.Linear(8, 8))
        self.register_parameter("values", nn.Parameter(torch.randn(8)))
        self.register_buffer("blocks", torch.ones(8))

    def forward(self, x):
        for name in self.NAMES:
            x = torch.relu(self._modules[name](x * self._buffers["blocks"]))
        return x + self._parameters["values"]


class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        made = torch.nn.utils.parametrizations
        self.a, self.b = made.weight_norm(nn.Linear(8, 8)), made.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Convolutions(nn.Module):
    """Channels moved about, so that gradients come back in another layout than the values had."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.m, self.n, self.c = nn.LayerNorm(4), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.m(self.a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.n(torch.relu(self.b(x)).permute(0, 2, 3, 1))
        return self.c(x).permute(0, 3, 1, 2)


class Mapped(Three):
    """Rows one by one, and draws that differ between them."""

    def forward(self, x):
        def row(r):
            return self.b(F.dropout(torch.relu(self.a(r)), 0.3, self.training))

        return self.c(torch.relu(torch.vmap(row, randomness="different")(x)))


class Cached(Three):
    """Plain attributes that no later call computes with, or that are the same in every call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(8.0))
        self.table, self.last, self.seen = None, torch.zeros(8), []

    def forward(self, x):
        if self.table is None:
            self.table = self.frequencies.cos() + torch.ones_like(x[:1])
        self.last = torch.relu(self.a(x))
        self.seen.append(self.last.detach())
        return self.c(torch.relu(self.b(self.last * self.table)))


MODELS = {
    SeveralInputs: ((X, X.flip(0)), {"scale": torch.tensor(0.7)}),
    NestedInputs: (([X, X + 1], {"y": X.flip(0)}), {}),
    IntegerInputs: (WORDS, {}),
    UnusedInput: ((X, torch.zeros(3)), {"flag": True}),
    SeveralAcross: (X, {}),
    UNet: (IMAGE, {}),
    Normed: (IMAGE, {}),
    FrozenNorm: (IMAGE, {}),
    SharedNorm: (X, {}),
    Counter: (X, {}),
    SwappedBuffers: (X, {}),
    MovingAverage: (X, {}),
    Tied: (WORDS, {}),
    TiedThrice: (X, {}),
    SharedView: (X, {}),
    InPlace: (X, {}),
    ChangedInput: (X, {}),
    Outputs: (X, {}),
    ReturnsState: (X, {}),
    PartWithoutGradient: (X, {}),
    Frozen: (X, {}),
    ModeConstants: (X, {}),
    Names: (X, {}),
    Parametrized: (X, {}),
    Convolutions: (IMAGE, {}),
    Mapped: (X, {}),
    Cached: (X, {}),
}
BLOCKS = {SeveralInputs: 3, UNet: 7, Tied: 3, TiedThrice: 15, Outputs: 3}
