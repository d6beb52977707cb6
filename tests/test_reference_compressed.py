"""The strategy "data" with compressed gradients: a run that is resumed ends with the bits of a whole one."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait.compress
from plait import checkpoint, losses, reference
from plait.compress import Adaptation
from plait.job import Job

QUICK = Adaptation(warmup_steps=2, every_steps=3, observe_steps=2)
"""Bits are chosen anew after steps 2, 5, 8: those with which 3, 6, 9 steps are done."""


def net():
    return nn.Sequential(nn.Linear(5, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 3))


def points(seed):
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(seed))
    return list(zip(x, x.argmax(1) % 3, strict=True))


JOB = Job(
    name="compressed",
    model=net,
    data=points,
    loss=losses.cross_entropy,
    optimizer=functools.partial(torch.optim.AdamW, lr=0.02),
    batch=9,
    steps=11,
)


def train(text, options, found=None, **more):
    """On every rank: the losses, the weights, and the bits at the end.

    What was ``found`` on the wire, whether all is left to DDP, stands in for a measurement, which is another
    every time.
    """
    attached = []

    def attach(model):
        attached.append(plait.compress.attach(model, adaptation=QUICK, **{"decline": False, **options}))
        if found is not None:
            attached[0].left, attached[0].declined = found, frozenset()
        return attached[0]

    result = reference.train(Job.from_json(text), attach=attach, **more)
    assert not dist.is_initialized()
    bits, steps = attached[0].bits, attached[0].report().steps
    return result.losses, [p.detach() for p in result.model.parameters()], bits, steps


def stopped(text, options, found, directory, stop):
    train(text, options, found, directory=directory, stop_after=stop)


def resumed(text, options, directory):
    return train(text, options, resume=directory)


def saving(text, options, directory):
    return train(text, options, directory=directory, save_every=1)


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(*pair) for pair in zip(one[1], other[1], strict=True))
    assert one[2:] == other[2:]


AUTO, DECLINING = {"bits": "auto"}, {"bits": 4, "decline": True}
CASES = {  # what is asked for, what is found, how many ranks, after how many steps they stop
    "4 bits": ({"bits": 4}, None, 2, 5),
    "2 bits": ({"bits": 2}, None, 2, 5),
    "2 bits, 3 ranks": ({"bits": 2, "feedback_bits": 8}, None, 3, 1),
    "auto": (AUTO, None, 2, 5),
    "auto, as bits change": (AUTO, None, 2, 6),
    "found to pay": (DECLINING, False, 2, 5),
    "left to DDP, 3 ranks": (DECLINING, True, 3, 5),
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_with_the_same_bits(ranks, tmp_path, case):
    options, found, world, stop = CASES[case]
    text = JOB.to_json()
    whole = ranks(world, train, text, options, found, group=False)
    ranks(world, stopped, text, options, found, tmp_path, stop, group=False)
    for one in (*whole[1:], *ranks(world, resumed, text, options, tmp_path, group=False)):
        assert_same(one, whole[0])


def test_saving_changes_nothing_also_where_bits_change(ranks, tmp_path):
    text = JOB.to_json()
    whole = ranks(2, train, text, AUTO, group=False)
    saved = ranks(2, saving, text, AUTO, tmp_path, group=False)
    assert set(whole[0][2].values()) != {4, 32}  # they have changed
    for one in (*whole[1:], *saved):
        assert_same(one, whole[0])


def test_a_run_goes_on_with_fewer_ranks_and_without_what_it_remembered(ranks, tmp_path):
    text, options = JOB.to_json(), {"bits": 2}
    ranks(3, stopped, text, options, None, tmp_path, 5, group=False)
    one, other = ranks(2, resumed, text, options, tmp_path, group=False)
    assert_same(one, other)
    assert one[3] == JOB.steps  # rounding went on where it was
    assert one[0][-1] < one[0][0]
    plainly = reference.train(JOB, resume=tmp_path)  # where nothing is compressed
    assert plainly.losses[:5] == one[0][:5]

    file = tmp_path / reference.CHECKPOINT
    state = checkpoint.load(file)
    assert len(state.pop("attached")["everyone"]) == 3
    checkpoint.save(file, state)  # as earlier versions, and runs that do not compress, leave it
    one, other = ranks(2, resumed, text, options, tmp_path, group=False)
    assert_same(one, other)
    assert one[3] == JOB.steps - 5
    assert one[0][-1] < one[0][0]
