"""The figures of shards: what they add up to, and that no unit ever asks for more."""

import itertools
from types import SimpleNamespace

import pytest

from plait.spill import units
from plait.spill.description import saved_bytes
from plait.spill.forecast import arena_size
from plait.spill.homes import homes
from plait.spill.intervals import Intervals
from plait.spill.plan import MODES, Shard

PAGE = 4096
SLACK = 16
"""Pages between the tensors of a segment of saved ones."""


def pages(table, place):
    return table[place] / PAGE


def test_figures_of_a_chain(sketch):
    of = Intervals.of(*sketch([{"weights": 3, "moments": 2, "saved": 4, "transient": 2}] * 4))
    assert pages(of.weights, (1, 3)) == 6
    assert pages(of.moments, (1, 3)) == pytest.approx(12, abs=1)  # numbers beside them may take a page
    assert pages(of.inputs, (1, 3)) == 1
    assert pages(of.inputs, (0, 3)) == 0  # what comes from the data is never stored
    assert pages(of.boundary, (1, 3)) == 4  # a value in and out, and their gradients
    assert pages(of.boundary, (1, 4)) == 2  # the outputs stay with the last shard
    assert pages(of.saved, (1, 3)) == 4 + 4 + 1  # and the value between the two
    assert pages(of.thrift, (1, 3)) == 2 + 2 + 1
    assert pages(of.spilled, (1, 3)) == 5 + SLACK
    assert pages(of.saved, (2, 4)) == 0  # the last shard turns at once
    assert pages(of.saved_once, (2, 4)) == 9
    assert pages(of.transient, (1, 3)) == 2 + 2  # and gradients for both sides, before they are put away
    assert of.forward_ms[1, 3] == 2
    assert of.backward_ms[1, 3] == 4


def test_micro_batches_share_weights_and_not_values(sketch):
    one = Intervals.of(*sketch([{}] * 3))
    two = Intervals.of(*sketch([{}] * 3, micro_batches=(1, 1)))
    place = (1, 2)
    for name in ("inputs", "boundary", "saved", "thrift", "spilled", "forward_ms", "backward_ms"):
        assert getattr(two, name)[place] == 2 * getattr(one, name)[place], name
    for name in ("weights", "moments", "gradients", "saved_once", "transient", "update_ms"):
        assert getattr(two, name)[place] == getattr(one, name)[place], name


def test_a_tied_weight_is_there_where_it_is_used(sketch):
    of = Intervals.of(*sketch([{"weights": 5}, {"weights": 1}, {"weights": 1}], tied=(2,)))
    assert pages(of.weights, (2, 3)) == 1 + 5
    assert pages(of.weights, (0, 3)) == 7
    assert pages(of.lent, (2, 3)) == pages(of.awaited, (0, 1)) == pages(of.awaited, (0, 2)) == 5
    assert pages(of.lent, (1, 2)) == pages(of.lent, (0, 3)) == pages(of.awaited, (0, 3)) == 0
    assert pages(of.gradients, (2, 3)) == 6


def test_nothing_goes_back_beyond_the_first_block_that_is_trained(sketch):
    of = Intervals.of(*sketch([{"trained": False}, {"trained": False}, {}, {}]))
    assert of.saved[0, 2] == of.backward_ms[0, 2] == of.update_ms[0, 2] == 0
    assert of.backward_ms[0, 3] == of.backward_ms[2, 3] == 2
    assert of.changed[0, 2] == 0
    assert of.weights[0, 2] == 2 * PAGE


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clips", [False, True])
def test_no_unit_asks_for_more_than_its_shard_was_given(sketch, mode, clips):
    blocks = [{"weights": 3, "moments": 2}, {"weights": 2, "moments": 1}, {"trained": False}, {"moments": 2}]
    description, costs = sketch(blocks, tied=(3,), clips=clips, micro_batches=(1, 1))
    size, _ = arena_size(Intervals.of(description, costs))
    for count in range(4):
        for at in itertools.combinations((1, 2, 3), count):
            edges = list(itertools.pairwise([0, *at, 4]))
            room = [saved_bytes(description, costs, *edge, thrift=True) for edge in edges]
            shards = [
                Shard(first=first, end=end, activations=mode, saved_bytes=saved)
                for (first, end), saved in zip(edges, room, strict=True)
            ]
            for unit, asked in units_of_a_step(description, SimpleNamespace(shards=shards)):
                assert asked <= size[MODES.index(mode), *edges[unit.shard]], (edges, unit)


def units_of_a_step(description, plan):
    """Every unit of a step, with the bytes that it asks for."""
    home = homes(description, plan)
    sizes = {segment.key: segment.nbytes for segment in home.persistent}
    head = units.Head(job=description.job, stage="step")
    while head.step == 0:
        unit = units.next_unit(description, plan, head)
        sizes |= {s.key: s.nbytes for s in units.scratch_for(description, plan, unit, head)}
        asked = units.requests(description, plan, unit, head)
        yield unit, sum(sizes[request.key] for request in asked)
        layouts = {
            r.key: ((1,), (1,), "float32", True) for r in asked if "/value/" in r.key or "/grad" in r.key
        }
        turn = {"loss": 1.0, "weight": 1.0} if unit.phase == "turn" else {}
        # A kept graph may refer to all that its forward had.
        referred = tuple(r.key for r in asked) if unit.phase == "forward" else ()
        report = units.Report(layouts=layouts, references=referred, **turn)
        head = units.advance(description, plan, head, unit, report)
