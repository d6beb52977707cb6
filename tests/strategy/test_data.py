"""Data parallelism as an option, beside the simulator that plays its plan."""

from dataclasses import replace

import pytest
from chains import CODECS, MIB, chain, cluster, demand
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.sim.data import held_bytes, play_data
from plait.strategy.data import allocation, automatic, compressed, plain
from plait.strategy.option import WORTH_DEVICES
from plait.strategy.site import Site


@pytest.mark.parametrize("bandwidth", ["100mbit", "1gbit", "40gbit"])
@pytest.mark.parametrize("devices", [1, 2, 4, 7])
def test_the_simulator_comes_to_the_same_figures(bandwidth, devices):
    of, on = demand(batch=21), cluster(devices, bandwidth=bandwidth)
    options = [plain(of, Site(cluster=on), exactly=True)]
    if devices > 1:
        options += [compressed(of, Site(cluster=on), CODECS, exactly=True)]
    for option in options:
        played = play_data(option.plan, of.profile, on, steps=2, collective=option.collective)
        assert option.step_ms == pytest.approx(played.step_ms(), rel=1e-9)
        assert tuple(option.memory_bytes.values()) == held_bytes(option.plan, of.profile)
        assert option.wire_bytes == pytest.approx(sum(played.wire_bytes.values()) / 2)
        assert sum(option.parts_ms.values()) == pytest.approx(option.step_ms)


def test_a_slower_device_packs_more_slowly():
    of, two = demand(profile=chain(parameters=40 * MIB), batch=16), cluster(2, bandwidth="10gbit")
    devices = tuple(replace(d, gflops=g) for d, g in zip(two.devices, (100.0, 40.0), strict=True))
    on = replace(two, devices=devices)
    option = compressed(of, Site(cluster=on), CODECS, exactly=True)
    played = play_data(option.plan, of.profile, on, steps=2, collective=option.collective)
    assert option.step_ms == pytest.approx(played.step_ms(), rel=1e-9)
    assert sum(option.parts_ms.values()) == pytest.approx(option.step_ms)


def test_as_many_devices_as_pay():
    fast, slow = (Site(cluster=cluster(8, bandwidth=rate)) for rate in ("100gbit", "1mbit"))
    assert plain(demand(batch=32), fast).devices == 8
    alone = plain(demand(batch=32), slow)
    assert alone.devices == 1
    assert alone.step_ms == pytest.approx(chain().step_ms(32))
    assert alone.wire_bytes == 0
    assert alone.idle_devices == pytest.approx(7)


def test_two_devices_are_not_taken_for_next_to_nothing():
    """At some speed of the wire two devices begin to be faster, and only beyond that do they pay."""
    of = demand(batch=16)
    gains = []
    for rate in range(1100, 1350, 10):
        site = Site(cluster=cluster(2, bandwidth=f"{rate}mbit"))
        gain = of.alone_ms / plain(of, site, exactly=True).step_ms
        gains.append(gain)
        assert plain(of, site).devices == (2 if gain > WORTH_DEVICES else 1), gain
    assert any(1 < gain < WORTH_DEVICES for gain in gains)
    assert min(gains) < 1
    assert max(gains) > WORTH_DEVICES


def test_compression_pays_on_a_thin_wire_and_not_on_a_thick_one():
    of = demand(profile=chain(parameters=40 * MIB), batch=32)
    thin, thick = (Site(cluster=cluster(4, bandwidth=rate)) for rate in ("1gbit", "400gbit"))
    assert compressed(of, thin, CODECS, exactly=True).step_ms < plain(of, thin, exactly=True).step_ms
    assert compressed(of, thick, CODECS, exactly=True).step_ms > plain(of, thick, exactly=True).step_ms


def test_auto_is_never_slower_than_fp32_and_keeps_feedback():
    of = demand(profile=chain(parameters=40 * MIB), batch=32)
    for rate in ("1gbit", "400gbit"):
        site = Site(cluster=cluster(4, bandwidth=rate))
        auto, fp32 = automatic(of, site, CODECS, exactly=True), plain(of, site, exactly=True)
        assert auto.step_ms <= fp32.step_ms
        assert auto.peak_bytes == fp32.peak_bytes + 6 * 40 * MIB
    assert "uncompressed" in auto.remarks[0]


def test_auto_keeps_the_error_of_the_reference_bits():
    made = allocation(chain())
    assert made.holds
    assert 4 <= made.mean_bits < 6
    assert allocation(chain(parameters=0)) is None
    assert (
        "no weights"
        in automatic(demand(profile=chain(parameters=0)), Site(cluster=cluster(2)), CODECS).why_not
    )


def test_too_little_memory_says_what_would_do():
    of = demand(profile=chain(parameters=100 * MIB))
    refused = plain(of, Site(cluster=cluster(2, memory="1GiB")))
    assert not refused.feasible
    assert refused.samples_per_s == 0
    assert "1.00 GiB" in refused.why_not
    assert "600.00 MiB" in refused.why_not
    need = refused.works.split(" of memory")[0]
    assert plain(of, Site(cluster=cluster(2, memory=need))).feasible


def test_micro_batches_save_memory_and_reduce_once():
    whole, cut = (
        plain(demand(batch=32, accumulate=n), Site(cluster=cluster(2)), exactly=True) for n in (1, 4)
    )
    assert cut.peak_bytes < whole.peak_bytes
    assert cut.wire_bytes == whole.wire_bytes
    assert cut.step_ms > whole.step_ms  # a pass has a fixed cost here, and less is hidden


def test_a_single_device_has_nothing_to_compress():
    refused = compressed(demand(), Site(cluster=cluster(1)), CODECS)
    assert "2 devices" in refused.why_not


def test_a_batch_beyond_what_was_measured_is_said():
    assert any("100" in remark for remark in plain(demand(batch=100), Site(cluster=cluster(1))).remarks)


@settings(max_examples=40, deadline=None)
@given(st.floats(1e6, 1e11), st.floats(1, 10), st.integers(1, 6), st.integers(6, 64))
def test_a_faster_link_is_never_slower(rate, factor, devices, batch):
    of = demand(batch=batch)
    for make in (lambda s: plain(of, s), lambda s: compressed(of, s, CODECS)):
        if devices > 1 or make(Site(cluster=cluster(1))).feasible:
            slow, fast = (make(Site(cluster=cluster(devices, bandwidth=r))) for r in (rate, factor * rate))
            fewer = WORTH_DEVICES if fast.devices < slow.devices else 1 + 1e-9
            assert fast.step_ms <= slow.step_ms * fewer
