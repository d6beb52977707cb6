"""Words between the ranks of a pipeline: whatever they hold, and in the order of the calls."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from plait.errors import WorkerError
from plait.pipeline.council import Council
from plait.pipeline.wire import wire_of


def word(rank):
    """All kinds of tensors, and what is none."""
    return {
        "step": torch.tensor(float(rank)),
        "none": torch.empty(0, 3),
        "image": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last) + rank,
        "half": [torch.full((3,), rank, dtype=torch.bfloat16), torch.tensor([True, False])],
        "plain": (rank, None, float("nan"), "text"),
    }


def joined():
    place = dist.get_rank()
    stage = PipelineStage(nn.Linear(2, 2), place, dist.get_world_size(), torch.device("cpu"))
    wire = wire_of(stage, timeout_s=30.0)
    return stage, wire, Council(wire, place=place, stages=dist.get_world_size())


def talk():
    stage, wire, council = joined()
    place = stage.stage_index
    gathered = council.gather(word(place), "words")
    own = council.hand_out(gathered, "words")
    told = council.tell("first" if place == 0 else "not heard", "a word")
    wire.flush()
    return gathered, own, told


def test_words_reach_those_they_are_for_as_they_were(ranks):
    found = ranks(3, talk)
    assert found[1][0] is found[2][0] is None
    for place, (_, own, told) in enumerate(found):
        assert told == "first"
        for given in [found[0][0][place], own] if place else [own]:  # the first rank's never left it
            expected = word(place)
            assert repr(given.pop("plain")) == repr(expected.pop("plain"))
            assert given["image"].is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(given, expected, rtol=0, atol=0)


def confused():
    """The first rank leaves a call out."""
    stage, _, council = joined()
    calls = [council.tell] if stage.stage_index == 0 else [council.gather, council.tell]

    def call():
        for each in (*calls, council.gather):
            each("a word", "a word")

    with pytest.raises(WorkerError) as caught:
        call()
    return str(caught.value)


def test_ranks_that_call_in_another_order_are_told(ranks):
    assert any("where word" in said and "was expected" in said for said in ranks(2, confused))
