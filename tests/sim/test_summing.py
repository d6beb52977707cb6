"""Gradients of weights that stages share are summed before they are updated, as a run does it."""

import pytest

from plait.cluster import Cluster
from plait.pipeline.orders import one_f_one_b
from plait.pipeline.plan import Forecast, PipelinePlan, Stage
from plait.profile import BlockProfile, Profile, Times
from plait.sim.adapting import play_adaptive
from plait.sim.pipeline import play_pipeline


def chain(*tied, size=1000, **more):
    """A block a stage, 1 ms forward and 2 back, with ``size`` bytes of weights; what each shares."""
    return Profile(
        blocks=tuple(
            BlockProfile(
                name=f"b{place}",
                parameter_bytes=size,
                output_bytes_per_sample=0,
                milliseconds={1: Times(forward=1.0, backward=2.0)},
                tied=names,
                **more,
            )
            for place, names in enumerate(tied)
        )
    )


def plan(stages, micro_batches):
    nothing = Forecast(step_ms=0.0, busy_ms=(0.0,) * stages, peak_bytes=(0,) * stages)
    return PipelinePlan(
        stages=tuple(Stage(first=i, end=i + 1) for i in range(stages)),
        order=one_f_one_b(stages, micro_batches),
        global_batch=micro_batches,
        forecast=nothing,
    )


def cluster(stages, rate=1e6):
    """A thousand bytes take a millisecond."""
    return Cluster.uniform(hosts=stages, memory="1TiB", bandwidth=rate)


def spans(played, track):
    return [(span.start_ms, span.end_ms) for span in played.timeline.spans if span.track == track]


def test_the_last_stage_sends_at_once_and_has_the_sum_after_the_first():
    played = play_pipeline(
        plan(3, 2), chain(("w",), (), ("w",), optimizer_milliseconds=0.5), cluster(3), steps=1
    )
    # Stage 2 ends its backwards at 8, stage 0 at 12; the sum takes 1 ms, then both update.
    assert spans(played, "shared stage2 to stage0") == [(8.0, 9.0)]
    assert spans(played, "shared stage0 to stage2") == [(12.0, 13.0)]
    assert played.step_ms() == pytest.approx(13.5)
    optimizers = {span.track: span.start_ms for span in played.timeline.spans if span.name == "optimizer"}
    assert optimizers == {"stage0": 13.0, "stage1": 10.0, "stage2": 13.0}


def test_steps_follow_each_other_and_every_byte_crosses_twice():
    shared = chain(("w",), (), ("w",))
    played = play_pipeline(plan(3, 2), shared, cluster(3), steps=4)
    assert played.steps_ms["job"] == pytest.approx((13.0,) * 4)
    assert played.wire_bytes == pytest.approx({"node0": 4000.0, "node1": 0.0, "node2": 4000.0})
    assert play_pipeline(plan(3, 2), chain((), (), ()), cluster(3)).step_ms() == pytest.approx(12.0)


def test_a_copy_is_held_and_updated_where_it_is_used():
    played = play_pipeline(
        plan(2, 2),
        chain(("w",), ("w",), optimizer_milliseconds=0.5, optimizer_bytes=4000),
        cluster(2),
        steps=1,
    )
    assert list(played.peak_bytes.values()) == [2 * 1000 + 4000, 2 * (2 * 1000 + 4000)]
    assert played.work_ms["job"] == pytest.approx(2 * 2 * 3 + 3 * 0.5)


def test_three_stages_send_to_the_first_and_have_the_sum_from_it():
    played = play_pipeline(plan(3, 1), chain(("w",), ("w",), ("w",)), cluster(3), steps=2)
    # Backwards end at 5, 7 and 9; the sums to both others leave by one card, in twice the time.
    assert spans(played, "shared stage2 to stage0")[0] == (5.0, 6.0)
    assert spans(played, "shared stage1 to stage0")[0] == (7.0, 8.0)
    assert played.steps_ms["job"] == pytest.approx((9.0 + 2.0,) * 2)


def test_what_several_groups_share_comes_one_after_another():
    played = play_pipeline(plan(3, 1), chain(("w",), ("v",), ("v", "w")), cluster(3), steps=2)
    # w first, on stages 0 and 2, until 10; then v on 1 and 2: gradients until 11, the sum until 12.
    assert spans(played, "shared stage0 to stage2")[0] == (9.0, 10.0)
    assert spans(played, "shared stage2 to stage1")[0] == (10.0, 11.0)
    assert spans(played, "shared stage1 to stage2")[0] == (11.0, 12.0)


def test_a_pipeline_that_adapts_sums_too():
    shared, free = chain(("w",), (), ("w",)), chain((), (), ())
    with_sum, without = (play_adaptive(plan(3, 4), one, cluster(3), steps=3) for one in (shared, free))
    assert with_sum.steps_ms["job"][0] == pytest.approx(without.steps_ms["job"][0] + 1.0)


def test_what_nobody_knows_of_a_circumstance_is_refused():
    with pytest.raises(TypeError, match="weather"):
        play_pipeline(plan(2, 2), chain((), ()), cluster(2), weather="rain")
