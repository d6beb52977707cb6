"""The estimate, on arrivals that the event model makes from a network that is known."""

import math
import random

import pytest

from plait.errors import UsageError
from plait.pipeline.estimate import Arrival, Estimator
from plait.pipeline.events import Load, predict
from plait.pipeline.network import Link, Network, Wire
from plait.pipeline.orders import depth, kfkb, one_f_one_b, work_conserving

MEGABIT = 1e6 / 8
SIZE = 256 * 1024


def arrivals(network, order, *, offsets_ms=None, noise=None, size=SIZE):
    """What receivers note in a step: a header comes a latency after its payload begins to move."""
    offsets_ms = offsets_ms or [0.0] * order.stages
    loads = [Load(forward_ms=20, backward_ms=40, output_bytes=size, gradient_bytes=size)] * order.stages
    prediction = predict(order, loads, network)
    found = []
    for wire, messages in enumerate(prediction.messages):
        link, backward = divmod(wire, 2)
        sender, receiver = (link + 1, link) if backward else (link, link + 1)
        for micro_batch, handed, begun, there in messages:
            late = 0.0 if noise is None else noise()
            found.append(
                Arrival(
                    link=link,
                    direction="backward" if backward else "forward",
                    micro_batch=micro_batch,
                    size_bytes=size,
                    sent_ms=handed + offsets_ms[sender],
                    started_ms=begun + network.wires[wire].latency_ms + offsets_ms[receiver],
                    arrived_ms=there + offsets_ms[receiver] + late,
                )
            )
    return found


def rates(network):
    return [wire.bytes_per_s / MEGABIT for wire in network.wires]


ORDERS = [one_f_one_b(4, 16), kfkb(4, 16, 3), depth(4, 16, 4), work_conserving(4, 16, 8)]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.label)
@pytest.mark.parametrize("megabit", [1000, 100, 60, 40, 20])
def test_rate_and_latency_of_equal_links(order, megabit):
    """Down to where cards are never idle and no message ever has a wire for itself."""
    truth = Network.uniform(4, latency_ms=0.7, bytes_per_s=megabit * MEGABIT)
    estimator = Estimator(4)
    estimator.observe(arrivals(truth, order))
    assert rates(estimator.network) == pytest.approx([megabit] * 6, rel=0.1)
    assert [wire.latency_ms for wire in estimator.network.wires] == pytest.approx([0.7] * 6, abs=0.05)


def test_one_slow_link_is_found_and_the_others_are_not_blamed():
    fast, slow = Wire(latency_ms=0.5, bytes_per_s=100 * MEGABIT), Wire(latency_ms=2, bytes_per_s=30 * MEGABIT)
    truth = Network(
        links=(
            Link(forward=fast, backward=fast),
            Link(forward=fast, backward=fast),
            Link(forward=slow, backward=slow),
        )
    )
    estimator = Estimator(4)
    for order in (one_f_one_b(4, 16), depth(4, 16, 3)):
        estimator.observe(arrivals(truth, order))
        assert rates(estimator.network) == pytest.approx([100, 100, 100, 100, 30, 30], rel=0.1)
    assert [w.latency_ms for w in estimator.network.wires] == pytest.approx([0.5] * 4 + [2] * 2, abs=0.05)


def test_directions_are_told_apart():
    there, back = Wire(latency_ms=1, bytes_per_s=80 * MEGABIT), Wire(latency_ms=1, bytes_per_s=20 * MEGABIT)
    truth = Network(links=(Link(forward=there, backward=back),))
    estimator = Estimator(2)
    estimator.observe(arrivals(truth, kfkb(2, 12, 2)))
    assert rates(estimator.network) == pytest.approx([80, 20], rel=0.05)


def test_clocks_that_differ_do_not_matter_and_are_found():
    truth = Network.uniform(4, latency_ms=0.7, bytes_per_s=60 * MEGABIT)
    offsets_ms = [0.0, 1e6, -3e5, 42.0]
    estimator = Estimator(4)
    estimator.observe(arrivals(truth, kfkb(4, 16, 2), offsets_ms=offsets_ms))
    assert estimator.offsets_ms == pytest.approx(offsets_ms, abs=0.1)
    assert rates(estimator.network) == pytest.approx([60] * 6, rel=0.1)


def test_a_change_is_seen_after_one_step():
    estimator = Estimator(4)
    for megabit in (1000, 100, 40, 1000, 60):
        truth = Network.uniform(4, latency_ms=0.5, bytes_per_s=megabit * MEGABIT)
        estimator.observe(arrivals(truth, kfkb(4, 16, 2)))
        assert rates(estimator.network) == pytest.approx([megabit] * 6, rel=0.1)


def test_a_few_transfers_that_went_wrong_are_ignored():
    draw = random.Random(3)
    truth = Network.uniform(4, latency_ms=0.5, bytes_per_s=100 * MEGABIT)
    estimator = Estimator(4)
    late = lambda: 80.0 if draw.random() < 0.1 else draw.uniform(0, 0.5)  # noqa: E731
    estimator.observe(arrivals(truth, one_f_one_b(4, 16), noise=late))
    assert rates(estimator.network) == pytest.approx([100] * 6, rel=0.1)


def test_latency_and_bandwidth_are_told_apart():
    for latency_ms, megabit in ((30, 1000), (0.1, 70)):  # both are about 30 ms for one message
        truth = Network.uniform(2, latency_ms=latency_ms, bytes_per_s=megabit * MEGABIT)
        estimator = Estimator(2)
        estimator.observe(arrivals(truth, kfkb(2, 12, 2)))
        assert rates(estimator.network) == pytest.approx([megabit] * 2, rel=0.05)
        assert estimator.network.wires[0].latency_ms == pytest.approx(latency_ms, abs=0.1)


def test_nothing_is_said_before_something_crossed_each_wire():
    estimator = Estimator(3)
    assert estimator.network is None
    whole = arrivals(Network.uniform(3, bytes_per_s=1e6), one_f_one_b(3, 4))
    estimator.observe([arrival for arrival in whole if arrival.link == 0])
    assert estimator.network is None
    estimator.observe(whole)
    assert estimator.network is not None


def test_a_transfer_that_took_no_time_has_a_finite_rate():
    estimator = Estimator(2)
    for direction in ("forward", "backward"):
        estimator.observe(
            [
                Arrival(
                    link=0,
                    direction=direction,
                    micro_batch=0,
                    size_bytes=8,
                    sent_ms=0,
                    started_ms=0,
                    arrived_ms=0,
                )
            ]
        )
    assert all(math.isfinite(rate) for rate in rates(estimator.network))


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="window of 0 steps"):
        Estimator(2, window_steps=0)
