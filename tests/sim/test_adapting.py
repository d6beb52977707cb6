"""The tuner's own code in the loop: what it is told, what it decides, and that the next step obeys."""

import pytest

from plait.cluster import Cluster
from plait.errors import UsageError
from plait.pipeline.orders import one_f_one_b
from plait.pipeline.plan import Forecast, PipelinePlan, Stage
from plait.pipeline.tuner import Tuning
from plait.profile import BlockProfile, Profile, Times
from plait.sim.adapting import play_adaptive
from plait.sim.background import Background
from plait.sim.pipeline import play_pipeline
from plait.sim.trace import Trace

STAGES, COUNT = 4, 16
PLAN = PipelinePlan(
    stages=tuple(Stage(first=i, end=i + 1) for i in range(STAGES)),
    order=one_f_one_b(STAGES, COUNT),
    global_batch=COUNT,
    forecast=Forecast(step_ms=0.0, busy_ms=(0.0,) * STAGES, peak_bytes=(0,) * STAGES),
)
PROFILE = Profile(
    blocks=tuple(
        BlockProfile(
            name=f"b{i}",
            parameter_bytes=1000,
            output_bytes_per_sample=2**18,
            saved_bytes_per_sample=2**20,
            milliseconds={1: Times(forward=20.0, backward=40.0), 2: Times(forward=38.0, backward=76.0)},
        )
        for i in range(STAGES)
    )
)


def cluster(rate="1gbit", memory="1GiB"):
    return Cluster.uniform(hosts=STAGES, memory=memory, bandwidth=rate, latency="50us")


def preempted(*points):
    return {f"node{i}": Trace.of(points) for i in range(STAGES)}


def test_it_begins_with_1f1b_and_goes_on_with_what_the_tuner_says():
    fixed = play_pipeline(PLAN, PROFILE, cluster("50mbit"), steps=1)
    found = play_adaptive(PLAN, PROFILE, cluster("50mbit"), steps=8)
    steps = found.steps_ms["job"]
    assert steps[0] == pytest.approx(fixed.step_ms(), rel=1e-9)
    assert max(steps[2:]) < 0.9 * steps[0]
    assert found.decisions[0].startswith("after step 1: ")
    assert "first look" in found.decisions[0]


def test_on_a_network_that_is_as_it_was_seen_the_prediction_comes_true():
    found = play_adaptive(PLAN, PROFILE, cluster("200mbit"), steps=4)
    promised = float(found.decisions[0].split("first look: ")[1].split(" ms")[0])
    assert found.steps_ms["job"][1] == pytest.approx(promised, rel=0.02)


def test_it_follows_a_network_that_is_preempted_and_cleared():
    trace = preempted((0, 1.0), (6000, 0.06), (16_000, 1.0))
    fixed = play_pipeline(PLAN, PROFILE, cluster(), steps=20, traces=trace)
    found = play_adaptive(PLAN, PROFILE, cluster(), steps=20, traces=trace)
    assert found.makespan_ms < 0.92 * fixed.makespan_ms
    slowed = [d for d in found.decisions if "a transfer from stage" in d]
    assert len(slowed) >= 2, "one change for each of the two"
    assert found.steps_ms["job"][-1] == pytest.approx(found.steps_ms["job"][2], rel=0.02)


def test_memory_of_the_devices_is_the_limit():
    roomy = play_adaptive(PLAN, PROFILE, cluster("40mbit"), steps=6)
    # 1F1B has four micro-batches in flight on the first stage; a few more fit here, sixteen do not.
    tight = play_adaptive(PLAN, PROFILE, cluster("40mbit", memory="9MiB"), steps=6)
    assert max(roomy.peak_bytes.values()) > 9 * 2**20 >= max(tight.peak_bytes.values())
    assert tight.steps_ms["job"][-1] >= roomy.steps_ms["job"][-1]


def test_what_fits_nowhere_is_refused_with_the_least_that_works():
    with pytest.raises(UsageError, match="needs") as error:
        play_adaptive(PLAN, PROFILE, cluster(memory="1MiB"))
    assert error.value.setting == "memory_limit"


def test_it_may_choose_among_numbers_of_micro_batches():
    tuning = Tuning(micro_batches=(8, 16), probe_share=0.2)
    found = play_adaptive(PLAN, PROFILE, cluster("1gbit"), steps=12, tuning=tuning)
    assert any("16 micro-batches" in decision for decision in found.decisions)


def test_background_leaves_decisions_alone():
    alone, beside = (
        play_adaptive(PLAN, PROFILE, cluster("50mbit"), steps=6, background=background)
        for background in ((), [Background(name="sweep", unit_ms=3.0)])
    )
    assert beside.decisions == alone.decisions
    assert beside.steps_ms["job"] == pytest.approx(alone.steps_ms["job"], rel=1e-9)
    assert beside.work_ms["sweep"] > 0


def test_equal_seeds_give_equal_decisions():
    runs = [
        play_adaptive(PLAN, PROFILE, cluster("50mbit"), steps=6, jitter=0.1, seed=seed).to_json()
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
