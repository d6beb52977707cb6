"""Crossings of plans cost what the plans themselves do."""

import random

import numpy as np
import pytest

from plait.burst.costs import Costs
from plait.burst.crossing import Crossings
from plait.burst.network import Network
from plait.profile import BlockProfile, Profile, Times


def made(source, blocks):
    found = []
    for place in range(blocks):
        each = source.uniform(0.1, 2)
        found.append(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=int(10 ** source.uniform(3, 6)),
                output_bytes_per_sample=int(10 ** source.uniform(2, 5)),
                milliseconds={
                    size: Times(forward=1 + each * size, backward=2 * each * size) for size in (1, 16)
                },
                optimizer_milliseconds=source.random(),
            )
        )
    return Profile(blocks=tuple(found))


@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e8])  # the wire decides, both do, computing decides
def test_the_running_sums_come_to_the_same(bandwidth):
    source = random.Random(bandwidth)
    costs = Costs(made(source, 12), [1, 2, 3, 4, 8], batch=30, network=Network.of(bandwidth, 1e-4))
    plans = np.array([[source.randrange(5) for _ in range(12)] for _ in range(8)])
    fronts, backs = Crossings(costs, plans), Crossings(costs, plans[::-1])
    front, behind = np.array([0, 1, 2, 3]), np.array([3, 3, 5, 7])
    step_ms, device_ms = fronts.cross(front, backs, behind)
    assert step_ms.shape == (4, 11)
    for cut in range(11):
        crossed = fronts.crossed(front, backs, behind, np.full(4, cut))
        assert (crossed[:, : cut + 1] == plans[front, : cut + 1]).all()
        assert (crossed[:, cut + 1 :] == plans[::-1][behind, cut + 1 :]).all()
        score = costs.score(crossed)
        assert step_ms[:, cut] == pytest.approx(score.step_ms)
        assert device_ms[:, cut] == pytest.approx(score.device_ms)
    few = fronts.cross(front, backs, behind, cuts=3)
    assert few[0] == pytest.approx(step_ms[:, :3])
