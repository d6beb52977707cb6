"""What forward saves is found again in backward, after everything has moved."""

import pytest
import torch
from torch import nn

from plait.spill.saving import CASTS, CHEAP, Saving, nothing_kept, restore, store
from plait.spill.views import Place, Views

SIZE = 96
KEYS = {"w": 0, "x": 1 << 17, "y": 2 << 17, "saved": 3 << 17}


class Shelf:
    """Two tensors and room for more in memory that shifts on demand."""

    def __init__(self):
        self._bytes = bytearray(1 << 20)
        self.views = Views(memoryview(self._bytes))
        self.views.use(KEYS)
        self.places = {
            name: Place(name, 0, (SIZE, SIZE), (SIZE, 1), torch.float32) for name in ("w", "x", "y")
        }
        generator = torch.Generator().manual_seed(0)
        for name in ("w", "x"):
            self[name].copy_(torch.randn(SIZE, SIZE, generator=generator) / 8)

    def __getitem__(self, name):
        return self.views.tensor(self.places[name])

    def shift(self):
        """Everything lies elsewhere, and garbage where it was."""
        whole = bytes(self._bytes)
        moved = {"w": 3 << 17, "x": 2 << 17, "y": 1 << 17, "saved": 0}
        self._bytes[:] = b"\xa5" * len(whole)
        for key, at in KEYS.items():
            self._bytes[moved[key] : moved[key] + (1 << 17)] = whole[at : at + (1 << 17)]
        self.views.use(moved)


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def block(x, w, norm=None):
    """An activation of many parts, a product of an input with itself, a view, dropout."""
    h = gelu_new(x @ w)
    h = nn.functional.layer_norm(h.t(), (SIZE,)) @ w
    h = nn.functional.dropout(torch.relu(h) * h, 0.3) @ w.t()
    return torch.sigmoid(h.view(-1, 2).transpose(0, 1)) * 2


def expected(function):
    shelf = Shelf()
    w, x = shelf["w"].clone().requires_grad_(), shelf["x"].clone().requires_grad_()
    torch.manual_seed(1)
    y = function(x, w)
    y.square().sum().backward()
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("again", [(), CHEAP], ids=["keep", "thrift"])
@pytest.mark.parametrize("spilled", [False, True])
def test_gradients_have_the_same_bits_after_all_has_moved(again, spilled):
    shelf = Shelf()
    w, x = shelf["w"].requires_grad_(), shelf["x"].requires_grad_()
    saving = Saving(shelf.views, again=again)
    torch.manual_seed(1)
    with saving.forward():
        y = block(x, w)
    before = saving.nbytes
    if spilled:
        saving.spill("saved", 1 << 17)
        assert saving.nbytes < before
    keys = saving.close()
    assert {"w"} <= set(keys) <= {"w", "x", "saved"}
    assert ("saved" in keys) == spilled
    result, gradient = y.detach().clone(), 2 * y.detach()
    shelf.shift()
    y.backward(gradient)
    wanted = expected(block)
    assert torch.equal(result, wanted[0])
    assert torch.equal(x.grad, wanted[1])
    assert torch.equal(w.grad, wanted[2])


def kept_bytes(function, again):
    shelf = Shelf()
    saving = Saving(shelf.views, again=again)
    with saving.forward():
        y = function(shelf["x"].requires_grad_(), shelf["w"].requires_grad_())
    found = saving.nbytes
    saving.close()
    return found, y


def test_thrift_keeps_less():
    one = SIZE * SIZE * 4
    assert kept_bytes(lambda x, w: gelu_new(x @ w) @ w, CHEAP)[0] == one, "the input of the activation"
    assert kept_bytes(lambda x, w: gelu_new(x @ w) @ w, ())[0] >= 4 * one
    assert kept_bytes(lambda x, w: torch.relu(x) @ w, CHEAP)[0] == 0, "of what lies in a segment, nothing"
    assert kept_bytes(block, CHEAP)[0] < kept_bytes(block, ())[0] / 2


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_of_a_mask_one_byte_an_element_is_kept(share):
    def function(x, w):
        return nn.functional.dropout((x @ w).t(), share) @ w

    shelf = Shelf()
    x, w = shelf["x"].requires_grad_(), shelf["w"].requires_grad_()
    saving = Saving(shelf.views, again=CHEAP)
    torch.manual_seed(1)
    with saving.forward():
        y = function(x, w)
    if share in (0.1, 0.5):
        dropped = SIZE * SIZE * 4
        assert saving.nbytes == dropped + SIZE * SIZE, (
            "what comes out, as its input is not kept, and the mask"
        )
    saving.close()
    shelf.shift()
    y.backward(2 * y.detach())
    _, *wanted = expected(function)
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(w.grad, wanted[1])


def test_a_weight_that_autocast_casts_is_cast_again():
    def product(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).float()

    assert kept_bytes(product, ())[0] == 2 * SIZE * SIZE * 2
    assert kept_bytes(product, CASTS)[0] == 0


def test_what_was_written_is_kept_where_it_was_written_to():
    shelf = Shelf()
    x = shelf["x"].requires_grad_()
    saving = Saving(shelf.views)
    with saving.forward():
        y = torch.tanh(x @ shelf["w"])
    assert saving.nbytes == SIZE * SIZE * 4
    place = store(shelf.views, "y", y.detach())
    saving.written(y.detach(), place)
    assert saving.nbytes == 0
    assert set(saving.close()) == {"w", "y"}
    wanted = torch.autograd.grad(
        torch.tanh((other := shelf["x"].clone().requires_grad_()) @ shelf["w"].clone()).sum(), other
    )[0]
    shelf.shift()
    y.sum().backward()
    assert torch.equal(x.grad, wanted)


def test_what_will_change_is_copied():
    shelf = Shelf()
    x, scale = shelf["x"].requires_grad_(), shelf["w"]
    saving = Saving(shelf.views, again=CHEAP, fleeting=[scale])
    with saving.forward():
        y = (x * scale).sum()
    assert saving.close() == ()
    wanted = scale.clone()
    shelf["w"].fill_(7)
    y.backward()
    assert torch.equal(x.grad, wanted)


def test_values_changed_in_place_are_not_made_again_from_what_they_were():
    def function(x, w):
        h = torch.tanh(x)
        h = h.mul_(2).relu_() if not h.requires_grad else (x @ w).relu_().mul(3).add_(1)
        return torch.sigmoid(h) @ w

    shelf = Shelf()
    x, w = shelf["x"].requires_grad_(), shelf["w"].requires_grad_()
    saving = Saving(shelf.views, again=CHEAP)
    torch.manual_seed(1)
    with saving.forward():
        y = function(x, w)
    saving.close()
    shelf.shift()
    y.backward(2 * y.detach())
    _, *wanted = expected(function)
    assert torch.equal(x.grad, wanted[0])
    assert torch.equal(w.grad, wanted[1])


def test_room_that_is_too_small_is_used_as_far_as_it_goes():
    shelf = Shelf()
    saving = Saving(shelf.views)
    with saving.forward():
        y = torch.tanh(torch.tanh(torch.tanh(shelf["x"].requires_grad_())))
    whole = saving.nbytes
    saving.spill("saved", whole // 2)
    assert 0 < saving.nbytes < whole
    del y


def test_a_forward_that_keeps_nothing_has_no_way_back():
    x = torch.ones(3, requires_grad=True)
    with nothing_kept():
        y = torch.tanh(x)
    assert y.requires_grad
    with pytest.raises(AssertionError, match="kept nothing"):
        y.sum().backward()


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(24.0).view(2, 3, 4), torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0),
     torch.arange(4.0).expand(3, 4), torch.arange(24.0).view(4, 6)[:, ::2], torch.zeros(0, 3),
     torch.tensor(3), torch.ones(1, 5, 1, 2).to(memory_format=torch.channels_last),
     torch.tensor([True, False])],
)  # fmt: skip
def test_layouts_survive_a_segment(tensor):
    shelf = Shelf()
    store(shelf.views, "y", tensor)
    found = restore(shelf.views, "y", tuple(tensor.shape), tensor.stride(), tensor.dtype)
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()
