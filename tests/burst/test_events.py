"""A plan played event by event comes to what the tables say."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.burst import BurstPlan
from plait.burst.costs import evaluate
from plait.burst.events import predict
from plait.burst.network import Network
from plait.errors import UsageError
from plait.profile import BlockProfile, Profile, Times


def made(source, blocks):
    """A graph of blocks that may share a weight."""
    found = []
    for place in range(blocks):
        times = {size: Times(forward=1 + size, backward=source.uniform(1, 3) * size) for size in (1, 8)}
        inputs = (
            None if source.random() < 0.5 else tuple(f"b{k}" for k in range(place) if source.random() < 0.5)
        )
        found.append(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=source.randint(0, 10**6),
                output_bytes_per_sample=source.randint(0, 10**5),
                milliseconds=times,
                optimizer_milliseconds=source.random(),
                inputs=inputs,
                tied=("x",) if source.random() < 0.3 else (),
            )
        )
    return Profile(blocks=tuple(found))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_tables_and_the_events_agree(seed):
    source = random.Random(seed)
    profile, batch, devices = made(source, source.randint(1, 7)), source.randint(5, 20), 5
    plan = BurstPlan.of(
        [block.name for block in profile.blocks],
        [source.randint(1, devices) for _ in profile.blocks],
        batch=batch,
        devices=devices,
    )
    rows = [[10 ** source.uniform(6, 8) for _ in range(devices)] for _ in range(devices)]
    network = Network.of(rows if source.random() < 0.5 else 1e7, source.choice([0.0, 1e-3]))
    played = predict(plan, profile, network)
    assert (played.step_ms, played.device_ms) == pytest.approx(
        evaluate(profile, plan.widths, batch=batch, network=network)
    )
    assert devices * played.step_ms - sum(played.idle_ms) == pytest.approx(played.device_ms)
    ends = [0.0]
    for _, start_ms, end_ms in played.syncs:  # one wire
        assert start_ms >= ends[-1] - 1e-9
        ends.append(end_ms)
    for device, gaps in enumerate(played.gaps):
        track = played.timeline.busy_ms(f"device{device}")
        assert track == pytest.approx(played.step_ms)  # idle is a span, too
        assert sum(end - start for start, end in gaps) == pytest.approx(played.idle_ms[device])


def test_the_drawing():
    """Two wide blocks, then two narrow ones: device 1 is free while these run."""
    times = {size: Times(forward=float(size), backward=float(size)) for size in (1, 2)}
    blocks = tuple(
        BlockProfile(name=name, parameter_bytes=size, output_bytes_per_sample=0, milliseconds=times)
        for name, size in (("0", 1000), ("1", 1500), ("2", 0), ("3", 0))
    )
    plan = BurstPlan.of("0123", [2, 2, 1, 1], batch=2)
    played = predict(plan, Profile(blocks=blocks), Network.of(1e6))
    spans = {(s.track, s.name): (s.start_ms, s.end_ms) for s in played.timeline.spans}
    assert spans == {
        ("device0", "forward 0"): (0, 1), ("device1", "forward 0"): (0, 1),
        ("device0", "forward 1"): (1, 2), ("device1", "forward 1"): (1, 2),
        ("device0", "forward 2"): (2, 4), ("device0", "forward 3"): (4, 6),
        ("device0", "backward 3"): (6, 8), ("device0", "backward 2"): (8, 10),
        ("device1", "idle"): (2, 10),
        ("device0", "backward 1"): (10, 11), ("device1", "backward 1"): (10, 11),
        ("device0", "backward 0"): (11, 12), ("device1", "backward 0"): (11, 12),
        ("wire", "sync 1"): (12, 12.5), ("wire", "sync 0"): (12.5, 13.5),
        ("device0", "wait"): (12, 13.5), ("device1", "wait"): (12, 13.5),
    }  # fmt: skip
    assert played.syncs == (("1", 11, 12), ("1", 12, 12.5), ("0", 12.5, 13.5))
    assert played.gaps == ((), ((2, 10),))


def test_a_plan_of_another_chain():
    profile = made(random.Random(0), 2)
    with pytest.raises(UsageError, match="2 blocks and a plan of 2 differ in 'b1' and 'x'"):
        predict(BurstPlan.of(["b0", "x"], [1, 1], batch=4), profile, Network.of(1e6))
    with pytest.raises(UsageError, match="a network of 2 devices for a plan of 3"):
        predict(BurstPlan.of(["b0", "b1"], [3, 1], batch=4), profile, Network.of([[0, 1e6], [1e6, 0]]))
