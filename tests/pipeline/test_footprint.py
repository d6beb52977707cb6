import pytest
import torch
from torch import nn

from plait.pipeline.candidate import Candidate
from plait.pipeline.footprint import Footprint, Gauge
from plait.pipeline.orders import kfkb

MIB = 2**20


class Stage:
    """What a footprint asks of a stage."""

    stage_index, device = 0, "cpu"

    def __init__(self):
        self.submod = nn.Linear(512, 512)


def test_the_peak_is_that_since_the_beginning(ranks):
    ranks(1, peak_since_the_beginning, group=False)


def peak_since_the_beginning():
    gauge = Gauge(torch.device("cpu"))
    gauge.follow()
    held = torch.ones(16 * MIB // 4)
    before = gauge.begin(trim=True)
    more = torch.ones(32 * MIB // 4)
    del more
    after = gauge.peak()
    assert 31 * MIB <= after - before <= 40 * MIB
    assert gauge.begin() - before <= 8 * MIB
    assert gauge.peak() - before <= 8 * MIB
    assert held.sum() == held.numel()


def test_saved_tensors_are_counted_once_and_without_weights():
    stage = Stage()
    footprint = Footprint(stage)
    x = torch.randn(8, 512)
    with footprint.first_forward():
        middle = torch.tanh(stage.submod(x))  # saves x and its own result
        output = middle * middle  # saves the same result, twice
    footprint.after_first_forward(8, [x], [output])
    row = 512 * 4
    assert footprint.memory.saved_bytes_per_row == 3 * row  # x, middle, and the output that is sent
    assert footprint.memory.input_bytes_per_row == footprint.memory.output_bytes_per_row == row


def test_what_a_step_takes_beyond_the_parts_is_learned(ranks):
    ranks(1, beyond_the_parts, group=False)


def beyond_the_parts():
    footprint = Footprint(Stage())
    candidate = Candidate(order=kfkb(1, 4, 1), global_batch=8)
    for _ in range(2):
        footprint.begin(limited=True)
        passing = torch.ones(64 * MIB // 4)
        del passing
        footprint.end(candidate)
    known = footprint.memory
    assert known.static_bytes > 50 * MIB  # the process itself
    assert known.transient_bytes_per_row * candidate.rows == pytest.approx(64 * MIB, rel=0.2)
