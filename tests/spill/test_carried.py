"""Segments that are copied to other memory for a unit, and back: with the CPU's own as the other memory."""

import pytest
import torch

from plait.spill.carried import Carried
from plait.spill.segment import Extent
from plait.spill.views import Place

PAGE = 4096
SEVEN = torch.full((4,), 7.0)


@pytest.fixture
def memory():
    return memoryview(bytearray(16 * PAGE))


def floats(memory, at):
    return torch.frombuffer(memory, dtype=torch.float32, count=4, offset=at)


def test_what_is_changed_or_written_comes_back_and_what_is_read_does_not(memory):
    for at in (0, PAGE, 2 * PAGE):
        floats(memory, at).fill_(1.0)
    modes = {"read": "read", "changed": "change", "written": "write"}
    views = Carried(memory, "cpu:0")
    views.use(
        {key: place * PAGE for place, key in enumerate(modes)},
        {key: Extent(PAGE, mode) for key, mode in modes.items()},
    )
    places = {key: Place(key, 0, (4,), (1,), torch.float32) for key in modes}
    assert torch.equal(views.tensor(places["read"]), torch.ones(4))
    assert torch.equal(views.tensor(places["changed"]), torch.ones(4))
    for place in places.values():
        views.tensor(place).copy_(SEVEN)
    assert torch.equal(floats(memory, PAGE), torch.ones(4)), "not before the unit has ended"
    views.use({})
    assert torch.equal(floats(memory, 0), torch.ones(4))
    assert torch.equal(floats(memory, PAGE), SEVEN)
    assert torch.equal(floats(memory, 2 * PAGE), SEVEN)
    assert not any(memory[3 * PAGE :])


def test_tensors_are_found_again_and_share_no_versions(memory):
    views = Carried(memory, "cpu:0")
    views.use({"a": 0, "b": 8 * PAGE}, {"a": Extent(PAGE, "change"), "b": Extent(2 * PAGE, "change")})
    place = Place("b", 64, (3, 4), (1, 3), torch.float32)
    one, other = views.tensor(place), views.tensor(place)
    before = other._version
    one.add_(1)
    assert other._version == before
    assert not one._is_view()
    assert torch.equal(one, other)
    assert views.locate(one) == place
    assert views.locate(one[1:, 2]) == Place("b", 64 + 4 * 7, (2,), (1,), torch.float32)
    assert views.locate(torch.ones(3)) is None
    assert views.locate(torch.empty(0)) is None
    assert views.tensor(Place("nowhere", 0, (0, 3), (3, 1), torch.float32)).shape == (0, 3)
