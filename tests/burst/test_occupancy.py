"""Who had a device when, as spans."""

from plait.burst.occupancy import Occupancy, with_idle
from plait.burst.phases import Phase
from plait.timeline import Timeline

MS = 10**6


def test_foreground_background_and_idle_fill_the_device():
    """
    foreground  compute...... collective............ compute....
    background                train.......
    idle                                 ...........
    ms          0             10         20         30          40
    """
    timeline = Timeline()
    occupancy = Occupancy(timeline, 2)
    for at, phase in ((0, Phase.COMPUTE), (10, Phase.COLLECTIVE), (30, Phase.COMPUTE), (40, Phase.IDLE)):
        occupancy.entered(at * MS, phase)
    occupancy.used(0, 10 * MS, 0.0001, 1, "train")  # noise
    occupancy.used(10 * MS, 30 * MS, 0.020, 2, "train")  # two threads
    drawn = with_idle(timeline)
    assert [(s.track, s.name, s.start_ms, s.end_ms) for s in drawn.spans] == [
        ("device2/foreground", "compute", 0, 10),
        ("device2/background", "train", 10, 20),
        ("device2/foreground", "collective", 10, 30),
        ("device2/idle", "idle", 20, 30),
        ("device2/foreground", "compute", 30, 40),
    ]


def test_without_background_a_waiting_device_is_idle():
    timeline = Timeline()
    occupancy = Occupancy(timeline, 0)
    for at, phase in ((0, Phase.COMPUTE), (4, Phase.IDLE), (10, Phase.COMPUTE)):
        occupancy.entered(at * MS, phase)
    idle = [span for span in with_idle(timeline).spans if span.track == "device0/idle"]
    assert [(span.start_ms, span.end_ms) for span in idle] == [(4, 10)]
