"""Background work: what devices leave idle, levels and their slices, units that are interrupted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.burst.controller import LADDER
from plait.burst.phases import Phase
from plait.errors import UsageError
from plait.sim.background import Background, Crew
from plait.sim.device import Device
from plait.sim.simulation import Simulation

OFF, QUARTER, HALF, IDLE, WAITING, ALWAYS = LADDER


def crew_of(
    backgrounds: Sequence[Background], *, devices: int = 1, **settings: Any
) -> tuple[Simulation, list[Device], Crew]:
    simulation = Simulation()
    made = [Device(simulation, f"d{place}", **settings) for place in range(devices)]
    return simulation, made, Crew(simulation, made, backgrounds)


def play(simulation: Simulation, crew: Crew, *, end_ms: float, **at: Callable[[], object]) -> None:
    """Run to ``end_ms``; ``at_30=...`` happens at 30 ms."""
    for when, action in at.items():
        simulation.at(float(when.removeprefix("at_")), action)  # type: ignore[arg-type]
    simulation.at(end_ms, crew.stop)
    crew.begin()
    simulation.run()


def test_an_idle_device_does_nothing_else() -> None:
    simulation, _, crew = crew_of([Background(name="sweep", unit_ms=4.0)])
    play(simulation, crew, end_ms=30.0)
    assert crew.units == {"sweep": 7}
    assert crew.work_ms == {"sweep": pytest.approx(30.0)}


def test_a_unit_that_is_interrupted_goes_on_from_where_it_was() -> None:
    simulation, (device,), crew = crew_of([Background(name="sweep", unit_ms=10.0, units=1)])
    ended: list[float] = []
    play(
        simulation,
        crew,
        end_ms=60.0,
        at_4=lambda: device.run("F", 20.0, lambda: ended.append(simulation.now_ms)),
    )
    assert ended == [24.0]
    spans = [(span.name, span.start_ms, span.end_ms) for span in simulation.timeline.spans]
    assert spans == [("sweep", 0.0, 4.0), ("F", 4.0, 24.0), ("sweep", 24.0, 30.0)]
    assert crew.units == {"sweep": 1}


def test_jobs_take_turns_unit_by_unit() -> None:
    simulation, _, crew = crew_of([Background(name="a", unit_ms=3.0), Background(name="b", unit_ms=1.0)])
    play(simulation, crew, end_ms=40.0)
    assert crew.units == {"a": 10, "b": 10}


def test_devices_share_the_units_of_a_job() -> None:
    jobs = [Background(name="sweep", unit_ms=2.0, units=5), Background(name="one", unit_ms=2.0, devices=(1,))]
    simulation, devices, crew = crew_of(jobs, devices=2)
    play(simulation, crew, end_ms=20.0)
    assert crew.units["sweep"] == 5
    assert crew.work_ms == {
        "sweep": pytest.approx(10.0),
        "one": pytest.approx(20.0 - (10.0 - devices[0].busy_ms())),
    }


def test_a_level_says_in_which_phases_it_runs() -> None:
    simulation, _, crew = crew_of([Background(name="sweep", unit_ms=100.0)])
    crew.allow(IDLE)
    play(
        simulation,
        crew,
        end_ms=50.0,
        at_10=lambda: crew.phase(0, Phase.COLLECTIVE),
        at_20=lambda: crew.phase(0, Phase.IDLE),
        at_25=lambda: crew.allow(WAITING),
        at_30=lambda: crew.phase(0, Phase.COLLECTIVE),
        at_40=lambda: crew.phase(0, Phase.COMPUTE),
        at_45=lambda: crew.allow(OFF),
    )
    runs = [(span.start_ms, span.end_ms) for span in simulation.timeline.spans]
    assert runs[0] == (0.0, 10.0)
    assert (runs[1][0], runs[-1][1]) == (20.0, 40.0)
    assert crew.work_ms["sweep"] == pytest.approx(30.0)


def test_a_share_of_the_time_is_given_in_slices() -> None:
    simulation, _, crew = crew_of([Background(name="sweep", unit_ms=1000.0)])
    crew.allow(QUARTER)
    play(simulation, crew, end_ms=400.0, at_210=lambda: crew.allow(HALF))
    runs = [(span.start_ms, span.end_ms) for span in simulation.timeline.spans]
    assert runs[:2] == [(0.0, 25.0), (100.0, 125.0)]
    assert runs[-1] == (300.0, 350.0)
    assert crew.work_ms["sweep"] == pytest.approx(25 + 25 + 50 + 50)


def test_the_clock_does_not_go_on_to_a_slice_that_nobody_asks_for() -> None:
    simulation, _, crew = crew_of([Background(name="sweep", unit_ms=1000.0)])
    crew.allow(QUARTER)
    play(simulation, crew, end_ms=130.0)
    assert simulation.now_ms == 130.0


def test_computing_becomes_longer_only_where_background_may_run_beside_it() -> None:
    _, _, crew = crew_of([Background(name="sweep", unit_ms=1.0, drag=0.1, devices=(0,))], devices=2)
    assert (crew.stretch(0), crew.stretch(1)) == (1.1, 1.0)
    crew.allow(WAITING)
    assert crew.stretch(0) == 1.0


def test_nothing_is_longer_once_the_units_are_done() -> None:
    simulation, _, crew = crew_of([Background(name="sweep", unit_ms=1.0, units=2, drag=0.1)])
    play(simulation, crew, end_ms=5.0)
    assert crew.stretch(0) == 1.0


def run(device: Device, work_ms: float) -> None:
    device.run("F", work_ms, lambda: None)


@given(
    works=st.lists(st.tuples(st.floats(0.0, 90.0), st.floats(0.1, 20.0)), max_size=8),
    units=st.lists(st.floats(0.3, 9.0), min_size=1, max_size=3),
    speed=st.sampled_from([1.0, 0.5, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_background_gets_all_that_the_foreground_leaves(
    works: list[tuple[float, float]], units: list[float], speed: float
) -> None:
    jobs = [Background(name=f"job{place}", unit_ms=ms) for place, ms in enumerate(units)]
    simulation, (device,), crew = crew_of(jobs, speed=speed)
    for start_ms, work_ms in works:
        simulation.at(start_ms, partial(run, device, work_ms))
    simulation.at(400.0, crew.stop)
    crew.begin()
    simulation.run()
    assert device.busy_ms(0) == pytest.approx(sum(ms for _, ms in works) / speed)
    assert sum(crew.work_ms.values()) == pytest.approx(speed * (400.0 - device.busy_ms(0)))
    for job, ms in zip(jobs, units, strict=True):
        assert crew.work_ms[job.name] - crew.units[job.name] * ms == pytest.approx(0.0, abs=ms + 1e-6)


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"name": ""}, "background.name"),
        ({"unit_ms": 0.0}, "unit_ms"),
        ({"unit_ms": 1e-297}, "unit_ms"),
        ({"unit_ms": float("nan")}, "unit_ms"),
        ({"units": 0}, "units"),
        ({"drag": -0.1}, "drag"),
    ],
)
def test_bad_figures_are_refused(wrong: dict[str, Any], setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        Background(**{"name": "sweep", "unit_ms": 1.0, **wrong})
    assert caught.value.setting == setting


def test_devices_and_names_must_be_there_once() -> None:
    with pytest.raises(UsageError, match="device 2 of 2"):
        crew_of([Background(name="sweep", unit_ms=1.0, devices=(2,))], devices=2)
    with pytest.raises(UsageError, match="two background jobs are called 'sweep'"):
        crew_of([Background(name="sweep", unit_ms=1.0)] * 2)
