"""Tensors in shared memory, found again wherever their segment lies."""

import pytest
import torch

from plait.spill.segment import Entry
from plait.spill.views import Place, Views, flat, name_of, span, type_of


@pytest.fixture
def views():
    views = Views(memoryview(bytearray(1 << 16)))
    views.use({"a": 4096, "b": 16384, "c": 8192})
    return views


def test_a_view_is_found_again_after_its_segment_moved(views):
    place = Place("b", 64, (3, 4), (1, 3), torch.float32)
    views.tensor(place).copy_(torch.arange(12.0).view(3, 4))
    assert views.locate(views.tensor(place)) == place
    assert views.locate(views.tensor(place)[1:, 2]) == Place("b", 64 + 4 * 7, (2,), (1,), torch.float32)
    assert views.locate(torch.ones(3)) is None
    kept = views.tensor(place).clone()
    views.use({"b": 0})
    assert not torch.equal(views.tensor(place), kept), "the bytes were not moved along"
    assert views.locate(views.tensor(place)) == place


def test_views_do_not_share_versions(views):
    place = Place("a", 0, (4,), (1,), torch.float32)
    one, other = views.tensor(place), views.tensor(place)
    one.add_(1)
    assert other._version == 0
    assert torch.equal(one, other)
    assert not one._is_view(), "autocast keeps copies of whole tensors only"


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.float64, torch.uint8])
def test_every_type(views, dtype):
    entry = Entry(name="x", shape=(2, 3), dtype=name_of(dtype), offset=128)
    views.entry("c", entry).copy_(torch.ones(2, 3))
    assert type_of(entry.dtype) is dtype
    assert torch.equal(views.entry("c", entry), torch.ones(2, 3, dtype=dtype))


def test_what_has_no_elements_needs_no_memory(views):
    assert views.tensor(Place("nowhere", 0, (0, 3), (3, 1), torch.float32)).shape == (0, 3)
    assert views.locate(torch.empty(0)) is None
    assert Views(memoryview(b"")).locate(torch.ones(2)) is None


def test_spans():
    assert span((2, 3), (3, 1)) == span((2, 3), (1, 2)) == 6
    assert span((4, 5), (0, 1)) == 5
    assert span((), ()) == 1
    assert span((2, 0), (1, 1)) == 0
    base = torch.arange(12).view(3, 4)
    assert torch.equal(flat(base[:, 1:3]), torch.arange(1, 11))
