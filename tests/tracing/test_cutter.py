"""Where a model is cut: at the grain of layers and residual blocks, where little crosses."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plait.chain import Chain
from plait.visit import Walk

X = torch.randn(2, 8)
IMAGE = torch.randn(2, 3, 16, 16)


def names(model, inputs):
    return [block.name for block in Chain.trace(model, inputs)]


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))


def test_a_plain_network_has_one_block_a_layer_with_its_activation():
    class Plain(Layers):
        def forward(self, x):
            for layer in self.layers:
                x = F.gelu(F.layer_norm(layer(x), (8,)))
            return x

    chain = Chain.trace(Plain(4), X)
    assert [block.name for block in chain] == [f"layers.{place}" for place in range(4)]
    assert [block.writes for block in chain] == [(f"layers.{place}",) for place in range(4)]
    first = chain[0](X)[0]
    assert torch.equal(first, F.gelu(F.layer_norm(chain.model.layers[0](X), (8,))))


def test_nothing_is_cut_within_a_residual():
    class Residual(Layers):
        def forward(self, x):
            for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = x + other(F.gelu(one(x)))
            return x

    chain = Chain.trace(Residual(8), X)
    assert [len(block.parameters_of_layers) for block in Layered.of(chain)] == [2, 2, 2, 2]


def test_parallel_branches_of_a_residual_stay_together():
    class Parallel(Layers):
        def forward(self, x):
            for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = x + torch.tanh(one(torch.tanh(x))) + torch.tanh(other(torch.sigmoid(x)))
            return x

    chain = Chain.trace(Parallel(8), X)
    assert [len(block.parameters_of_layers) for block in Layered.of(chain)] == [2, 2, 2, 2]


class Layered:
    """A block, and the layers whose parameters it holds."""

    def __init__(self, block):
        self.parameters_of_layers = {name.rpartition(".")[0] for name in block.state_names}

    @classmethod
    def of(cls, chain):
        return [cls(block) for block in chain]


class UNet(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        widths = [3, *(4 * 2**level for level in range(depth + 1))]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(widths[:-1]))
        self.middle = nn.Conv2d(widths[-2], widths[-1], 3, padding=1)
        pairs = zip(widths[:1:-1], widths[-2:0:-1], strict=False)
        self.up = nn.ModuleList(nn.Conv2d(a + b, b, 3, padding=1) for a, b in pairs)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x))
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = torch.relu(self.middle(x))
        for layer in self.up:
            x = torch.relu(layer(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1)))
        return x


def test_long_skips_do_not_hinder_cutting():
    chain = Chain.trace(UNet(), IMAGE)
    expected = ["down.0", "down.1", "down.2", "middle", "up.0", "up.1", "up.2"]
    assert [block.name for block in chain] == expected
    middle = expected.index("middle")
    assert chain.live(middle) == ("down.0", "down.1", "down.2"), "pooling comes after the cut"
    elements = [channels * side * side for channels, side in [(4, 16), (8, 8), (16, 4)]]
    assert chain.cut_bytes(5)[middle - 1] == 4 * 5 * sum(elements)


def test_a_mask_for_every_layer_does_not_hinder_cutting():
    class Masked(Layers):
        def forward(self, x):
            mask = (x.sum(-1, keepdim=True) > 0).to(x.dtype)
            for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
                x = x + other(torch.relu(one(x)) * mask)
            return x

    assert len(Chain.trace(Masked(8), X)) == 4


def test_attention_and_feed_forward_are_two_blocks():
    model, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    chain = Chain.trace(model, x)
    assert [block.name for block in chain] == ["self_attn", "block"]
    # Without gradients, torch's layer would take a faster path with other last bits.
    assert torch.equal(chain(x), model(x))


def test_the_cut_falls_where_fewest_bytes_cross():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            return self.b(F.interpolate(F.max_pool2d(torch.relu(self.a(x)), 7), size=6))

    chain = Chain.trace(Pooled(), IMAGE)
    assert chain.values["a"].shape(1) == (1, 8, 2, 2)


def test_a_module_used_again_is_numbered():
    class Again(Layers):
        def forward(self, x):
            for _ in range(3):
                x = torch.relu(self.layers[0](x))
            return x

    chain = Chain.trace(Again(1), X)
    assert [block.name for block in chain] == ["layers.0", "layers.0#2", "layers.0#3"]
    assert chain.tied == {"layers.0.weight": (0, 1, 2), "layers.0.bias": (0, 1, 2)}


def test_no_cut_between_a_tensor_and_a_change_of_it():
    class Changed(Layers):
        def forward(self, x):
            kept = self.layers[0](x)
            x = self.layers[2](torch.relu(self.layers[1](kept.detach())))
            kept += x
            return self.layers[3](kept)

    chain = Chain.trace(Changed(4), X)
    assert [block.name for block in chain] == ["layers", "layers.3"]


def test_a_change_without_gradient_counts_as_one():
    class Changed(Layers):
        def forward(self, x):
            kept = self.layers[0](x).detach()
            x = self.layers[2](torch.relu(self.layers[1](kept.clone())))
            with torch.no_grad():
                kept.mul_(2)
            return self.layers[3](kept + x)

    assert names(Changed(4), X) == ["layers", "layers.3"]


def test_what_does_not_grow_in_proportion_to_the_batch_does_not_cross():
    class Pairs(Layers):
        def forward(self, x):
            x = torch.relu(self.layers[0](x))
            pairs = (x @ x.t()).reshape(-1)
            x = torch.relu(self.layers[2](torch.relu(self.layers[1](x))))
            return self.layers[3](x) * pairs.mean(), pairs

    chain = Chain.trace(Pairs(4), X)
    assert [block.name for block in chain] == ["layers.0", "layers"]
    assert chain.cut_bytes(4) == (4 * 8 * 4,)


def test_a_buffer_that_is_assigned_belongs_to_one_block():
    class Scaled(Layers):
        def __init__(self, count):
            super().__init__(count)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x):
            for place, layer in enumerate(self.layers):
                x = torch.relu(layer(x))
                if place == 3:
                    x = x * self.scale
                    self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean(0)
            return x

    chain = Chain.trace(Scaled(8), X)
    assert len(chain) == 8
    assert [block.name for block in chain if "scale" in block.state_names] == ["layers.3"]


def test_a_view_of_a_parameter_is_made_where_the_model_makes_it():
    class Placed(Layers):
        def __init__(self, count):
            super().__init__(count)
            self.places = nn.Parameter(torch.randn(1, 8))

        def forward(self, x):
            places = self.places.expand(x.shape[0], -1)
            for layer in self.layers:
                x = torch.relu(layer(x + places))
            return x

    chain = Chain.trace(Placed(4), X)
    assert len(chain) == 4
    assert [block.name for block in chain if "places" in block.state_names] == ["layers.0"]
    row = 3 * 8 * 4
    assert chain.cut_bytes(3) == (2 * row, 2 * row, row), "it crosses, and is added before the last cut"


class Mapped(Layers):
    """Looks words up and runs two layers row by row."""

    def __init__(self):
        super().__init__(3)
        self.words = nn.Embedding(5, 8)

    def forward(self, words):
        def row(word):
            return self.layers[1](torch.relu(self.layers[0](self.words(word))))

        return self.layers[2](torch.vmap(row)(words))


def test_nothing_is_cut_within_a_vmap():
    words = torch.arange(4).view(2, 2)
    chain = Chain.trace(Mapped(), words)
    assert [block.name for block in chain] == ["block", "layers.2"]
    assert torch.equal(Walk(chain).forward(words), chain.model(words))
    torch.rand(2)


def test_a_failure_within_a_vmap_leaves_torch_as_it_was():
    """Torch would refuse to draw, as it does inside vmap."""
    chain = Chain.trace(Mapped(), torch.arange(4).view(2, 2))
    with pytest.raises(IndexError):
        chain(torch.full((2, 2), 9))
    torch.rand(2)


def test_sizes_need_no_input_to_cross():
    """A block that reads something with the batch in it makes its sizes from that."""

    class Sized(Layers):
        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + torch.zeros(x.shape[0], 1)
            return x

    chain = Chain.trace(Sized(3), X)
    assert [block.reads for block in chain] == [("input:0",), ("layers.0",), ("layers.1",)]
