"""The event model against a recursion, against the closed form, and against the laws of the wires."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline.events import Load, predict
from plait.pipeline.network import Link, Network, Wire
from plait.pipeline.orders import depth, gpipe, kfkb, listed, one_f_one_b, per_link_depth, work_conserving


def uniform(stages, forward_ms=1.0, backward_ms=2.0, size=0):
    return [
        Load(forward_ms=forward_ms, backward_ms=backward_ms, output_bytes=size, gradient_bytes=size)
    ] * stages


def recursion_ms(order, loads, network):
    """When a list ends, where wires share nothing: each action waits for the one before and for its input."""
    last = order.stages - 1
    ends, gone, left = {}, {}, {stage: list(order.actions(stage)) for stage in range(order.stages)}
    free = dict.fromkeys(range(order.stages), 0.0)
    while any(left.values()):
        for stage, actions in left.items():
            while actions:
                kind, m = actions[0]
                source = stage - 1 if kind == "F" else stage + 1
                there = 0.0
                if 0 <= source <= last:
                    if (source, kind, m) not in ends:
                        break
                    link = network.links[min(stage, source)]
                    wire = link.forward if kind == "F" else link.backward
                    size = loads[source].output_bytes if kind == "F" else loads[source].gradient_bytes
                    begun = max(ends[source, kind, m], gone.get((source, kind, m - 1), 0.0))
                    gone[source, kind, m] = begun + 1e3 * size / wire.bytes_per_s
                    there = gone[source, kind, m] + wire.latency_ms
                length = loads[stage].forward_ms if kind == "F" else loads[stage].backward_ms
                free[stage] = ends[stage, kind, m] = max(free[stage], there) + length
                actions.pop(0)
    return max(free.values())


TIMES, SIZES, SPEEDS = st.floats(0.1, 10), st.integers(0, 5000), st.floats(1e5, 1e7)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.data())
def test_without_sharing_it_is_the_recursion(stages, micro_batches, data):
    loads = [
        Load(
            forward_ms=data.draw(TIMES),
            backward_ms=data.draw(TIMES),
            output_bytes=data.draw(SIZES),
            gradient_bytes=data.draw(SIZES),
        )
        for _ in range(stages)
    ]
    links = tuple(
        Link(
            forward=Wire(latency_ms=data.draw(TIMES), bytes_per_s=data.draw(SPEEDS)),
            backward=Wire(latency_ms=data.draw(TIMES), bytes_per_s=data.draw(SPEEDS)),
        )
        for _ in range(stages - 1)
    )
    network = Network(
        links=links, egress_bytes_per_s=(math.inf,) * stages, ingress_bytes_per_s=(math.inf,) * stages
    )
    order = data.draw(
        st.sampled_from(
            [kfkb(stages, micro_batches, k) for k in range(1, micro_batches + 1)]
            + [per_link_depth(stages, micro_batches, [(2, 0, 1)[i] for i in range(stages - 1)])]
        )
    )
    assert predict(order, loads, network).step_ms == pytest.approx(
        recursion_ms(order, loads, network), rel=1e-9
    )


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("latency_ms", [0.0, 1.0, 4.0, 9.0])
def test_the_period_of_kfkb_is_the_closed_form(stages, k, latency_ms):
    f, b = 1.0, 2.0
    network = Network.uniform(stages, latency_ms=latency_ms)
    short, long = (
        predict(kfkb(stages, m * k * stages, k), uniform(stages, f, b), network).step_ms for m in (20, 40)
    )
    period = (long - short) / (20 * k * stages)
    slowest = max(((n + k) * (f + b) + 2 * n * latency_ms) / ((n + 1) * k) for n in range(stages))
    assert period == pytest.approx(max(f + b, slowest), rel=1e-6)
    if latency_ms <= (k - 1) * (f + b) / 2:
        assert period == pytest.approx(f + b)


def test_a_pipeline_without_transfers_takes_what_everybody_knows():
    for stages, micro_batches in ((1, 4), (2, 6), (4, 8)):
        for order in (one_f_one_b(stages, micro_batches), gpipe(stages, micro_batches)):
            prediction = predict(order, uniform(stages), Network.uniform(stages))
            assert prediction.step_ms == pytest.approx((micro_batches + stages - 1) * 3)
            assert prediction.idle == pytest.approx((stages - 1) / (micro_batches + stages - 1))
            assert prediction.busy_ms == pytest.approx([3.0 * micro_batches] * stages)


def test_depth_hides_a_latency_that_1f1b_waits_for():
    loads, network = uniform(4), Network.uniform(4, latency_ms=1.5)
    hidden = (16 + 3) * 3 + 6 * 1.5
    assert predict(depth(4, 16, 2), loads, network).step_ms == pytest.approx(hidden)
    assert predict(kfkb(4, 16, 2), loads, network).step_ms == pytest.approx(hidden)
    assert predict(work_conserving(4, 16, 7), loads, network).step_ms == pytest.approx(hidden)
    assert predict(one_f_one_b(4, 16), loads, network).step_ms > 1.2 * hidden


def test_two_messages_that_leave_one_host_share_its_card():
    # Stage 1 hands over B0 and, a moment later, F1: alone each would take 10 ms.
    order = listed(["FFBB", "FBFB", "FBFB"])
    loads = uniform(3, 1.0, 1.0, 1000)
    network = Network.uniform(3, bytes_per_s=1e5)
    prediction = predict(order, loads, network)
    for wire, messages in enumerate(prediction.messages):
        for _, handed, begun, there in messages:
            assert handed <= begun
            assert there - begun >= 10 - 1e-9, wire
    alone = Network(links=network.links, egress_bytes_per_s=(1e9,) * 3, ingress_bytes_per_s=(1e9,) * 3)
    assert prediction.step_ms >= predict(order, loads, alone).step_ms


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4), st.integers(1, 8), st.floats(1e5, 1e7), st.floats(0, 5), st.data())
def test_no_host_sends_more_than_its_card_can(stages, micro_batches, rate, latency_ms, data):
    network = Network.uniform(stages, latency_ms=latency_ms, bytes_per_s=rate)
    loads = uniform(stages, data.draw(TIMES), data.draw(TIMES), 4000)
    order = data.draw(
        st.sampled_from([kfkb(stages, micro_batches, 1), work_conserving(stages, micro_batches, 3)])
    )
    last_share = data.draw(st.sampled_from([1.0, 0.5]))
    shares = [*[1.0] * (micro_batches - 1), last_share]
    prediction = predict(order, loads, network, shares=shares)
    for stage in range(stages):
        gone = [
            (begun, there - latency_ms, 4000 * (last_share if m == micro_batches - 1 else 1.0))
            for wire in (2 * stage - 1, 2 * stage)
            if 0 <= wire < 2 * (stages - 1)
            for m, _, begun, there in prediction.messages[wire]
        ]
        for start, _, _ in gone:
            for _, end, _ in gone:
                sent = sum(size for begun, ended, size in gone if start <= begun and ended <= end)
                assert sent <= rate * max(0.0, end - start) / 1e3 * (1 + 1e-6) + 1e-6
    for stage, actions in enumerate(prediction.actions):
        assert len(actions) == 2 * micro_batches
        assert all(a[3] <= b[2] + 1e-9 for a, b in pairwise(actions)), stage


def test_a_smaller_last_micro_batch_takes_less():
    loads, network = uniform(2, size=1000), Network.uniform(2, bytes_per_s=1e6)
    prediction = predict(one_f_one_b(2, 3), loads, network, shares=[1, 1, 0.5])
    lengths = {(kind, m): end - start for kind, m, start, end in prediction.actions[1]}
    assert lengths["F", 2] == pytest.approx(0.5)
    assert lengths["B", 2] == pytest.approx(1.0)
    assert lengths["F", 1] == pytest.approx(1.0)
    (*_, last) = prediction.messages[0]
    assert last[3] - last[2] == pytest.approx(0.5)


def test_the_timeline_has_stages_and_links():
    prediction = predict(
        kfkb(2, 4, 2), uniform(2, size=100), Network.uniform(2, latency_ms=1, bytes_per_s=1e6)
    )
    timeline = prediction.timeline
    assert timeline.tracks == ("link0 backward", "link0 forward", "stage0", "stage1")
    assert timeline.makespan_ms == pytest.approx(prediction.step_ms)
    assert [span.name for span in timeline.spans if span.track == "stage1"] == [
        "F0",
        "F1",
        "B0",
        "B1",
        "F2",
        "F3",
        "B2",
        "B3",
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: predict(one_f_one_b(3, 4), uniform(2), Network.uniform(3)),
            "2 loads and 2 links .* 3 stages",
        ),
        (lambda: predict(one_f_one_b(2, 4), uniform(2), Network.uniform(2), shares=[1, 1]), "shares of 1F1B"),
        (lambda: Load(forward_ms=-1, backward_ms=0), "forward_ms is -1"),
        (lambda: Load(forward_ms=1, backward_ms=math.inf), "backward_ms is inf"),
        (
            lambda: predict(listed(["FBFB", "FFBB"]), uniform(2), Network.uniform(2)),
            "does not come to an end",
        ),
        (
            lambda: predict(
                one_f_one_b(2, 4), uniform(2, size=10**9), Network.uniform(2, bytes_per_s=1e-300)
            ),
            "1F1B, .*more milliseconds than a number can hold",
        ),
        (
            lambda: predict(one_f_one_b(2, 4), uniform(2, size=1), Network.uniform(2, latency_ms=1e308)),
            "more milliseconds than a number can hold",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()
