"""What is said of a workload's plan."""

import pytest

from plait.strategy.account import describe
from plait.strategy.option import Option
from plait.strategy.workload import Placement, Way

OPTION = Option(strategy="data", name="data, fp32", batch=8, step_ms=10.0)


def placement(job, *devices, how="foreground"):
    return Placement(job=job, how=how, option=OPTION, devices=devices, start_ms=0.0, end_ms=1.0)


def way(name, seconds, *placements, rate=0.0):
    return Way(name=name, placements=placements, makespan_ms=1e3 * seconds, samples_per_s=rate)


ONE = (placement("gpt", "a/0", "b/0"), placement("behind", "a/0", how="background"))
TWO = (placement("gpt", "a/0"), placement("vit", "b/0"))


def test_a_job_alone_with_others_behind_it():
    ways = [way("alone", 9.168, *ONE), way("alone, with room for background work", 12.39, *ONE)]
    assert describe(ways, "makespan", 9168.0) == (
        "the foreground job gpt runs alone on 2 devices: it ends after 9.168 s, and no schedule ends "
        "earlier; leaving room for background work would make that 12.39 s"
    )
    assert "; " not in describe(ways[:1], "makespan", 9168.0)
    on_one = way("alone, by rate", 9.0, placement("gpt", "a/0"))
    assert describe([on_one], "makespan", 4500.0) == (
        "the job gpt runs alone on a/0, as wide as gets through most samples at the start: it ends after "
        "9 s, and no schedule could end before 4.5 s"
    )


@pytest.mark.parametrize(
    ("name", "how", "instead"),
    [
        ("side by side", "run side by side", "running them side by side"),
        (
            "side by side, by rate",
            "run side by side, as wide as gets through most samples at the start",
            "running them side by side, as wide as gets through most samples at the start",
        ),
        (
            "alternated",
            "take turns on the devices of one host",
            "letting them take turns on one host's devices",
        ),
        (
            "alternated on 2, side by side on 1",
            "run by turns on 2, side by side on 1 devices",
            "running them by turns on 2, side by side on 1 devices",
        ),
    ],
)
def test_many_jobs(name, how, instead):
    best, other = way(name, 4, *TWO), way("one after another", 5, *TWO)
    assert describe([best, other], "makespan", 4000.0) == (
        f"the 2 jobs {how}: the last ends after 4 s, and no schedule ends earlier; "
        "running them one after another would make that 5 s"
    )
    assert describe([other, way(name, 6, *TWO)], "makespan", 5000.0).endswith(
        f"; {instead} would make that 6 s"
    )
    same = way(name, 4.01, *TWO)
    assert "; " not in describe([other, same], "makespan", 4000.0)


def test_by_throughput():
    ways = [
        way("side by side", 4, *TWO, *ONE[1:], rate=90),
        way("side by side, by rate", 4, *TWO, *ONE[1:], rate=80),
    ]
    assert describe(ways, "throughput", 100.0) == (
        "the 2 foreground jobs run side by side: they get through 90 samples/s at the start, background work "
        "included, 90% of what no assignment of devices exceeds; making each as wide as gets through most "
        "samples at the start would make that 80 samples/s"
    )
