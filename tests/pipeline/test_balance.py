"""Cuts against all cuts that there are."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline.balance import balance, wire_bytes_per_row
from plait.pipeline.candidate import Candidate
from plait.pipeline.memory import StageMemory, peak_bytes, stage_bytes
from plait.pipeline.network import Link, Network, Wire
from plait.pipeline.orders import one_f_one_b
from plait.profile import BlockProfile, Profile, Times


def block(name, ms, out=0, *, parameters=0, saved=0, transient=0, inputs=None):
    return BlockProfile(
        name=name,
        parameter_bytes=parameters,
        output_bytes_per_sample=out,
        milliseconds={1: Times(forward=ms / 3, backward=ms * 2 / 3)},
        saved_bytes_per_sample=saved,
        transient_bytes=transient,
        inputs=inputs,
    )


def chain(*ms, out=0):
    return Profile(blocks=tuple(block(f"b{i}", each, out) for i, each in enumerate(ms)))


def test_equal_blocks_are_shared_equally():
    found = balance(chain(*[1.0] * 8), 4)
    assert found.cuts == (2, 4, 6)
    assert found.period_ms == pytest.approx(2.0)
    assert [load.forward_ms + load.backward_ms for load in found.loads] == pytest.approx([2.0] * 4)


def test_one_stage_is_the_whole_chain():
    found = balance(chain(1, 2, 3), 1)
    assert (found.cuts, found.stages, found.period_ms) == ((), 1, pytest.approx(6))


def test_a_device_twice_as_fast_gets_twice_the_work():
    assert balance(chain(*[1.0] * 9), 2, speeds=[2, 1]).cuts == (6,)


def test_memory_as_people_write_it():
    profile = Profile(blocks=tuple(block(f"b{i}", 1.0, parameters=2**20) for i in range(4)))
    assert balance(profile, 2, memory_bytes="4MiB").cuts == (2,)
    assert balance(profile, 2, memory_bytes=["2MiB", "6MiB"]).cuts == (1,)
    with pytest.raises(UsageError, match=r"a stage of 4\.00 MiB"):
        balance(profile, 2, memory_bytes="3MiB")


def test_a_slow_link_moves_the_cut_to_where_less_crosses():
    profile = Profile(blocks=(block("a", 1, 1000), block("b", 1, 10), block("c", 1, 1000), block("d", 1)))
    assert balance(profile, 2).cuts == (2,)
    wide = Profile(blocks=(block("a", 1, 10), block("b", 1, 1000), block("c", 1, 1000), block("d", 1)))
    assert balance(wide, 2, network=Network.uniform(2, bytes_per_s=1e9)).cuts == (2,)
    # 1000 bytes take 10 ms there, more than any stage computes.
    assert balance(wide, 2, network=Network.uniform(2, bytes_per_s=1e5)).cuts == (1,)


def test_of_equal_periods_the_one_with_fewer_bytes():
    profile = Profile(blocks=(block("a", 2, 50), block("b", 0.01, 5), block("c", 2)))
    assert balance(profile, 2).cuts == (2,)


def test_what_skips_blocks_crosses_every_cut_between():
    blocks = (block("a", 1, 100), block("b", 1, 10), block("c", 1, 1), block("d", 1, 7, inputs=("a", "c")))
    assert wire_bytes_per_row(blocks) == (0, 100, 110, 101, 0)


def test_memory_moves_a_cut():
    blocks = [block(f"b{i}", 1, 10, parameters=100 if i < 2 else 1000, saved=5) for i in range(4)]
    profile = Profile(blocks=tuple(blocks))
    free = balance(profile, 2, micro_batches=4)
    assert free.cuts == (2,)
    held = [
        stage_bytes(Candidate(order=one_f_one_b(2, 4), global_batch=4), s, m)
        for s, m in enumerate(free.memories)
    ]
    tight = balance(profile, 2, micro_batches=4, memory_bytes=[math.inf, held[1] - 1])
    assert tight.cuts == (3,)


def test_too_little_memory_says_how_much_is_needed():
    profile = Profile(blocks=tuple(block(f"b{i}", 1, 10, parameters=1000, saved=50) for i in range(5)))
    with pytest.raises(UsageError, match="no cut of 5 blocks into 2 stages") as caught:
        balance(profile, 2, memory_bytes=4000)
    least = int(caught.value.works.split(",")[0])
    balance(profile, 2, memory_bytes=least)
    with pytest.raises(UsageError, match="memory_bytes"):
        balance(profile, 2, memory_bytes=least - 1)


def slowest_ms(profile, ends, rows, speeds, network):
    """The period of a cut, part by part."""
    crossing = [rows * size for size in wire_bytes_per_row(profile.blocks)]
    periods = []
    for stage, (begin, end) in enumerate(itertools.pairwise(ends)):
        its = profile.blocks[begin:end]
        periods.append(sum(b.forward_ms(rows) + b.backward_ms(rows) for b in its) / speeds[stage])
        wires = network.wires
        leaving = ([(crossing[begin], wires[2 * stage - 1])] if stage else []) + (
            [(crossing[end], wires[2 * stage])] if stage < len(ends) - 2 else []
        )
        coming = ([(crossing[begin], wires[2 * stage - 2])] if stage else []) + (
            [(crossing[end], wires[2 * stage + 1])] if stage < len(ends) - 2 else []
        )
        for used in (leaving, coming):
            if used:
                periods += [1e3 * size / wire.bytes_per_s for size, wire in used]
                periods.append(
                    1e3 * sum(size for size, _ in used) / max(wire.bytes_per_s for _, wire in used)
                )
    return max(periods)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.data())
def test_it_is_the_best_of_all_cuts(count, data):
    draw = data.draw
    n, rows = draw(st.integers(1, min(4, count))), draw(st.integers(1, 3))
    blocks = tuple(
        block(
            f"b{i}",
            draw(st.floats(0.1, 10)),
            draw(st.integers(0, 2000)),
            parameters=draw(st.integers(0, 500)),
            saved=draw(st.integers(0, 100)),
            transient=draw(st.integers(0, 100)),
            inputs=(f"b{draw(st.integers(0, i - 1))}", f"b{i - 1}")
            if i > 1 and draw(st.booleans())
            else None,
        )
        for i in range(count)
    )
    profile = Profile(blocks=blocks)
    speeds = [draw(st.floats(0.5, 4)) for _ in range(n)]
    rate = st.floats(1e5, 1e7)
    network = Network(
        links=tuple(
            Link(forward=Wire(bytes_per_s=draw(rate)), backward=Wire(bytes_per_s=draw(rate)))
            for _ in range(n - 1)
        )
    )
    limits = [draw(st.sampled_from([math.inf, 4000.0, 8000.0])) for _ in range(n)]
    candidate = Candidate(order=one_f_one_b(n, 4 * n), global_batch=4 * n * rows)
    periods = {}
    for cuts in itertools.combinations(range(1, count), n - 1):
        ends = [0, *cuts, count]
        memories = sizes(blocks, ends, rows)
        if all(used <= limit for used, limit in zip(peak_bytes(candidate, memories), limits, strict=True)):
            periods[cuts] = slowest_ms(profile, ends, rows, speeds, network)
    if not periods:
        with pytest.raises(UsageError, match="no cut of"):
            balance(profile, n, rows=rows, speeds=speeds, memory_bytes=limits, network=network)
        return
    found = balance(profile, n, rows=rows, speeds=speeds, memory_bytes=limits, network=network)
    best_ms = min(periods.values())
    crossing = wire_bytes_per_row(blocks)
    close = [cuts for cuts, ms in periods.items() if ms <= 1.01 * best_ms * (1 + 1e-12)]
    assert found.cuts in close
    assert found.period_ms == pytest.approx(periods[found.cuts])
    assert sum(crossing[c] for c in found.cuts) == min(sum(crossing[c] for c in cuts) for cuts in close)


def sizes(blocks, ends, rows):
    crossing = wire_bytes_per_row(blocks)
    return [
        StageMemory(
            static_bytes=sum(2 * b.parameter_bytes + b.optimizer_bytes for b in blocks[begin:end]),
            saved_bytes_per_row=sum(b.saved_bytes_per_sample for b in blocks[begin:end]),
            input_bytes_per_row=crossing[begin],
            output_bytes_per_row=crossing[end],
            transient_bytes=max(b.transient(rows) for b in blocks[begin:end]),
        )
        for begin, end in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 4}, "3 blocks cannot make 4 stages.*works: 1 to 3"),
        ({"n": 0}, "n is 0"),
        ({"n": 2, "rows": 0}, "rows is 0"),
        ({"n": 2, "speeds": [1.0]}, "speeds is"),
        ({"n": 2, "speeds": [1.0, math.inf]}, "speeds is"),
        ({"n": 2, "speeds": ["1", "2"]}, "speeds is"),
        ({"n": 2, "speeds": "12"}, "speeds is"),
        ({"n": 2, "memory_bytes": [1.0, 0.0]}, "memory_bytes is"),
        ({"n": 2, "memory_bytes": [1.0, math.nan]}, "memory_bytes is"),
        ({"n": 2, "memory_bytes": "4Gb"}, "a small b, which is a bit"),
        ({"n": 2, "network": Network.uniform(3)}, "a network of 3 stages for 2"),
    ],
)
def test_what_cannot_be_is_refused(fields, says):
    with pytest.raises(UsageError, match=says):
        balance(chain(1, 1, 1), **fields)
