"""Plans of bits, against trying every plan there is."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cluster import Link
from plait.compress.allocation import Allocation, Exposed, allocate, price
from plait.compress.observation import WIDTHS, LayerError
from plait.errors import FileError, UsageError

FOUR = (1, 2, 4, 8)
LINK = Link(bandwidth_bytes_per_s=1e6, latency_ms=0.05)


def layer(name="a", count=1000, errors=(64.0, 16.0, 1.0, 0.1), widths=FOUR):
    return LayerError(
        name=name,
        count=count,
        widths=widths,
        squared_error=errors,
        payload_bytes=tuple(8 + math.ceil(count * bits / 8) for bits in widths),
        exact_bytes=4 * count,
        squared_norm=1.0,
    )


def many(count, seed=0, widths=WIDTHS):
    """Layers of different sizes and magnitudes."""
    rng = np.random.default_rng(seed)
    sizes = 2 ** rng.integers(6, 12, count) * 2 ** rng.integers(6, 10, count)
    scale = np.exp(rng.normal(0, 1.5, count)).tolist()
    return [
        layer(
            f"l{i}",
            int(sizes[i]),
            tuple(float(scale[i] * sizes[i] / (2**b - 1) ** 2) for b in widths),
            widths,
        )
        for i in range(count)
    ]


# Multiples of 2^-20, of which every sum is exact, and few of them, so that ties are common.
errors = st.one_of(st.integers(0, 8), st.integers(0, 2**40).map(lambda whole: whole * 2.0**-20))
alphas = st.sampled_from([2.0**-10, 0.25, 0.5, 1.0, 1.5, 2.0, 16.0])


@st.composite
def models(draw, most=6):
    return [
        layer(f"l{i}", draw(st.integers(1, 64)), tuple(float(draw(errors)) for _ in FOUR))
        for i in range(draw(st.integers(1, most)))
    ]


def total(layers, bits):
    return sum(Fraction(layer.error_at(bits[layer.name])) for layer in layers)


def within(layers, alpha):
    """(bits, error) of every plan that keeps the budget."""
    budget = Fraction(alpha) * total(layers, {layer.name: 4 for layer in layers})
    plans = [({}, Fraction(0))]
    for layer in layers:
        choices = [(width, Fraction(layer.error_at(width))) for width in (*FOUR, None)]
        plans = [
            (bits | {layer.name: width}, error + more) for bits, error in plans for width, more in choices
        ]
    return [(bits, error) for bits, error in plans if error <= budget]


def size(layers, bits):
    return sum(layer.bytes_at(bits[layer.name]) for layer in layers)


@given(layers=models(most=4), alpha=alphas)
@settings(max_examples=150, deadline=None)
def test_no_plan_has_fewer_bytes_and_none_of_as_few_has_less_error(layers, alpha):
    found = allocate(layers, alpha)
    best = min((size(layers, bits), error) for bits, error in within(layers, alpha))
    assert (found.payload_bytes, total(layers, found.bits)) == best
    assert found.gap == 0


@given(
    layers=models(most=3),
    alpha=alphas,
    ready=st.lists(st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.2]), min_size=3, max_size=3),
    backward=st.sampled_from([None, 0.3]),
)
@settings(max_examples=150, deadline=None)
def test_no_plan_exposes_less_time(layers, alpha, ready, backward):
    cost = Exposed(ready_ms=tuple(ready[: len(layers)]), link=LINK, world=2, backward_ms=backward)

    def exposed(bits):
        idle = Fraction(0)
        for place in sorted(range(len(layers)), key=lambda place: ready[place]):
            count = layers[place].bytes_at(bits[layers[place].name])
            # A ring of two sends two messages of half the bytes; whole nanoseconds, rounded up.
            sent = math.ceil((2 * (count / 2 / 1e6 * 1e3 + 0.05)) * 1e6)
            idle = max(idle, round(ready[place] * 1e6)) + sent
        end = max(ready[: len(layers)]) if backward is None else backward
        return max(Fraction(0), idle - round(end * 1e6))

    found = allocate(layers, alpha, cost=cost)
    best = min((exposed(bits), error) for bits, error in within(layers, alpha))
    assert (exposed(found.bits), total(layers, found.bits)) == best
    assert found.exposed_ms == pytest.approx(float(best[0]) / 1e6, abs=1e-12)


@given(
    table=st.lists(
        st.tuples(*[st.floats(0, 1e300, allow_subnormal=True)] * len(FOUR)), min_size=1, max_size=4
    ),
    alpha=st.floats(1e-300, 1e300, exclude_min=True),
)
@settings(max_examples=150, deadline=None)
def test_the_budget_is_kept_exactly_whatever_the_numbers(table, alpha):
    layers = [layer(f"l{i}", 10 + i, row) for i, row in enumerate(table)]
    found = allocate(layers, alpha)
    budget = Fraction(alpha) * total(layers, {layer.name: 4 for layer in layers})
    assert total(layers, found.bits) <= budget
    # Rounding may bar what is within 2^-59 of the budget a layer, and nothing else.
    closer = budget * (1 - Fraction(len(layers), 2**58))
    for bits, error in within(layers, alpha):
        if error <= closer:
            assert found.payload_bytes <= size(layers, bits)


@given(layers=models(), alpha=st.tuples(alphas, alphas))
@settings(max_examples=100, deadline=None)
def test_more_error_allowed_never_costs_more(layers, alpha):
    low, high = (allocate(layers, a) for a in sorted(alpha))
    assert high.payload_bytes <= low.payload_bytes


@given(layers=models(), alpha=alphas)
@settings(max_examples=100, deadline=None)
def test_no_uniform_width_within_the_budget_is_cheaper(layers, alpha):
    found = allocate(layers, alpha)
    budget = Fraction(alpha) * total(layers, {layer.name: 4 for layer in layers})
    for width in (*FOUR, None):
        bits = {layer.name: width for layer in layers}
        if total(layers, bits) <= budget:
            assert found.payload_bytes <= price(layers, bits).payload_bytes


def test_uniform_bits_are_found_when_the_budget_is_theirs_to_the_last_bit():
    # Sums of these are not exact in 60 bits, and every other plan within the budget is dearer.
    layers = [layer(f"l{i}", 1000, (9e9, 8e9, error, error)) for i, error in enumerate((0.1, 1e-17, 1e5 / 3))]
    found = allocate(layers)
    assert set(found.bits.values()) == {4}
    assert found.holds


def test_an_error_is_never_rounded_away():
    # With a at 2 bits the budget of 1 is used up, and the 2^-70 of b at 2 bits is too much.
    layers = [layer("a", 1000, (9e9, 1.0, 1.0, 1.0)), layer("b", 1000, (9e9, 2.0**-70, 0.0, 0.0))]
    assert allocate(layers).bits == {"a": 2, "b": 4}


def test_by_hand():
    """Uniform 4 bits err by 2. The small error of b goes down to one bit, and pays for no more of a.

         1 bit  2 bits  4 bits  8 bits
    a      64     16      1      0.1        1000 elements
    b     0.9    0.5      1e-3   1e-6       4000 elements
    """
    layers = [layer(), layer("b", 4000, (0.9, 0.5, 1e-3, 1e-6))]
    found = allocate(layers, 2.0)
    assert found.bits == {"a": 4, "b": 1}
    assert found.payload_bytes == 8 + 500 + 8 + 500
    assert found.squared_error == 1.9
    assert found.reference_error == 1.001
    assert found.mean_bits == 8 * 1016 / 5000
    assert found.ratio == 20000 / 1016
    # At 1.001, a at 4 bits leaves no room for b below 4 bits, which would cost more than eight for a.
    assert allocate(layers, 1.0).bits == {"a": 8, "b": 1}
    assert allocate(layers, 1e-9).bits == {"a": None, "b": None}


def test_time_that_backward_hides_is_not_saved():
    # 1000 elements take 0.6 ms at 4 bits and 4.1 ms exact; a is long sent when b gets ready.
    layers = [layer(), layer("b")]
    hidden = Exposed(ready_ms=(0.0, 100.0), link=LINK, world=2)
    assert allocate(layers, 1.0, cost=hidden).bits == {"a": None, "b": 4}
    at_once = Exposed(ready_ms=(100.0, 100.0), link=LINK, world=2)
    assert allocate(layers, 1.0, cost=at_once).bits == {"a": 4, "b": 4}
    # Where backward goes on after all is sent, nothing is gained by any bits at all.
    all_hidden = Exposed(ready_ms=(0.0, 100.0), link=LINK, world=2, backward_ms=200.0)
    found = allocate(layers, 1.0, cost=all_hidden)
    assert (found.exposed_ms, found.bits) == (0.0, {"a": None, "b": None})


def test_a_layer_whose_error_is_not_finite_is_left_exact_and_named():
    for bad in (math.nan, math.inf):
        layers = [
            layer(),
            layer("broken", errors=(bad, bad, bad, bad)),
            layer("part", errors=(bad, 1.0, 1.0, 1.0)),
        ]
        found = allocate(layers)
        assert found.bits == {"a": 4, "broken": None, "part": None}
        assert found.nonfinite == ("broken", "part")
        assert found.squared_error == found.reference_error == 1.0
    assert price([layer("broken", errors=(math.nan,) * 4)], {"broken": 4}).bits == {"broken": None}
    every = allocate([layer("broken", errors=(math.nan,) * 4)])
    assert (every.bits, every.squared_error, every.ratio) == ({"broken": None}, 0.0, 1.0)


def test_layers_without_error_or_elements_get_what_is_cheapest():
    constant = layer("constant", 1000, (0.0,) * 4)
    empty = LayerError(
        name="empty",
        count=0,
        widths=FOUR,
        squared_error=(0.0,) * 4,
        payload_bytes=(0,) * 4,
        exact_bytes=0,
        squared_norm=0.0,
    )
    found = allocate([constant, empty])
    assert found.bits["constant"] == 1
    assert found.holds
    assert allocate([empty]).payload_bytes == 0


@pytest.mark.parametrize("seed", range(3))
def test_hundreds_of_layers_are_optimal_within_a_thousandth(seed):
    layers = many(300, seed)
    found = allocate(layers)
    assert found.gap <= 1e-3
    assert found.holds
    uniform = price(layers, {layer.name: 4 for layer in layers})
    assert found.payload_bytes < uniform.payload_bytes
    rough = allocate(layers, states=64)
    assert rough.payload_bytes >= found.payload_bytes * (1 - found.gap)
    assert found.payload_bytes >= rough.payload_bytes * (1 - rough.gap)


def test_the_order_of_layers_does_not_matter():
    layers = many(40)
    assert allocate(layers[::-1]).payload_bytes == allocate(layers).payload_bytes
    assert allocate(layers[::-1]).bits == allocate(layers).bits
    assert list(allocate(layers).bits) == [layer.name for layer in layers]


def test_other_processes_and_processors_find_the_same_plan():
    """A rank may run on a processor with other vector instructions, in which numpy adds in another order."""
    layers = many(60)
    code = (
        "import json, sys\n"
        "from plait.compress.allocation import allocate\n"
        "from plait.compress.observation import LayerError\n"
        "layers = [LayerError(**layer) for layer in json.load(sys.stdin)]\n"
        "print(json.dumps([allocate(layers, alpha, states=200).to_json() for alpha in (0.5, 1.0, 2.0)]))\n"
        "assert 'torch' not in sys.modules"
    )
    here = [allocate(layers, alpha, states=200).to_json() for alpha in (0.5, 1.0, 2.0)]
    text = json.dumps([asdict(layer) for layer in layers])
    for environment in ({"PYTHONHASHSEED": "7"}, {"NPY_DISABLE_CPU_FEATURES": _vector_instructions()}):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            input=text,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == here


def _vector_instructions():
    found = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    return " ".join(found)


def test_a_plan_survives_a_file(tmp_path):
    layers = [layer(), layer("broken", errors=(math.nan,) * 4)]
    cost = Exposed(ready_ms=(0.0, 1.0), link=LINK, world=3)
    for plan in (
        allocate(layers, 0.7),
        allocate(layers, 0.7, cost=cost),
        price(layers, {"a": 1, "broken": 8}),
    ):
        assert Allocation.from_json(json.loads(json.dumps(plan.to_json()))) == plan
        plan.save(tmp_path / "plan.json")
        assert Allocation.load(tmp_path / "plan.json") == plan
    assert plan.to_json()["format"] == "plait.plan.compress/1"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "plait.plan.compress/2"}, "field 'format' is 'plait.plan.compress/2'"),
        ({"bits": {}}, "plan without layers"),
        ({"bits": {"a": 9}}, "layer 'a' has 9 bits .*works"),
        ({"bits": {"a": "x"}}, "field 'bits.a"),
        ({"alpha": -1}, "alpha is -1"),
        ({"payload_bytes": "many"}, "field 'payload_bytes'"),
        ({"surprise": 1}, "field 'surprise'"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(tmp_path, change, match):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(allocate([layer()]).to_json() | change))
    with pytest.raises(FileError, match=match) as caught:
        Allocation.load(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_plans(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(FileError, match="cannot be read"):
        Allocation.load(path)
    path.write_text('{"format": ')
    with pytest.raises(FileError, match="not whole"):
        Allocation.load(path)
    path.write_text("[]")
    with pytest.raises(FileError, match="'list'"):
        Allocation.load(path)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (lambda: allocate([]), "no layers"),
        (lambda: allocate([layer()], 0), "alpha is 0 .*works: 1.0"),
        (lambda: allocate([layer()], -1.0), "alpha is -1.0"),
        (lambda: allocate([layer()], math.nan), "alpha is nan"),
        (lambda: allocate([layer()], math.inf), "alpha is inf"),
        (lambda: allocate([layer()], reference_bits=3), "not measured at 3 bits .*works: 1, 2, 4, 8"),
        (lambda: allocate([layer(), layer()]), "two layers are called 'a'"),
        (lambda: allocate([layer()], states=0), "states is 0"),
        (lambda: allocate([layer()], cost="joules"), "no cost 'joules'"),
        (
            lambda: allocate([layer()], cost=Exposed(ready_ms=(1.0, 2.0), link=LINK, world=2)),
            "2 ready times for 1 layers",
        ),
        (
            lambda: allocate(
                [layer(count=10**12)],
                cost=Exposed(ready_ms=(1.0,), link=Link(bandwidth_bytes_per_s=1.0), world=2),
            ),
            r"would take 4e\+12 s",
        ),
        (lambda: Exposed(ready_ms=(-1.0,), link=LINK, world=2), "after -1.0 ms"),
        (lambda: Exposed(ready_ms=(math.nan,), link=LINK, world=2), "after nan ms"),
        (lambda: Exposed(ready_ms=(1.0,), link=LINK, world=0), "world of 0"),
        (lambda: price([layer()], {"b": 4}), "layer 'a' has no width"),
        (lambda: price([layer()], {"a": 3}), "not measured at 3 bits"),
        (lambda: replace(price([layer()], {"a": 4}), squared_error=math.nan), "squared_error is nan"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, match):
    with pytest.raises(UsageError, match=match):
        wrong()
