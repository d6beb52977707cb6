"""What stages do and hold: as the planner has it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.pipeline.balance import balance
from plait.pipeline.candidate import Candidate
from plait.pipeline.orders import one_f_one_b
from plait.profile import BlockProfile, Profile, Times
from plait.sim.staging import Staging


def block(place, tied=(), **more):
    return BlockProfile(
        name=f"b{place}",
        parameter_bytes=10 + place,
        output_bytes_per_sample=100 + place,
        milliseconds={1: Times(forward=1 + place, backward=2 + place), 4: Times(forward=3.5, backward=9)},
        optimizer_bytes=5,
        saved_bytes_per_sample=30 * place,
        transient_bytes=7 - place,
        transient_bytes_per_sample=place,
        optimizer_milliseconds=0.25 * place,
        tied=tuple(tied),
        **more,
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_stages_are_those_of_the_planner(n, rows, skips):
    blocks = [block(place) for place in range(6)]
    if skips:
        blocks[4] = block(4, inputs=("b0", "b3"))
    profile = Profile(blocks=tuple(blocks))
    cut = balance(profile, n, rows=rows)
    staging = Staging(profile=profile, ends=(0, *cut.cuts, 6))
    for ours, theirs in zip(staging.loads(rows), cut.loads, strict=True):
        assert vars(ours) == pytest.approx(vars(theirs), rel=1e-12)
    for ours, theirs in zip(staging.memories(rows), cut.memories, strict=True):
        assert vars(ours) == pytest.approx(vars(theirs), rel=1e-12)
    assert sum(staging.optimizer_ms) == 0.25 * 15


def test_what_the_figures_rest_on_is_said():
    profile = Profile(blocks=(block(0, tied=("w",)), block(1), block(2, tied=("w",))))
    staging = Staging(profile=profile, ends=(0, 1, 3))
    small, large = (Candidate(order=one_f_one_b(2, 2), global_batch=batch) for batch in (2, 20))
    (said,) = staging.remarks([small])
    assert said.startswith("stages 0, 1 share weights: all 10 B of b0")
    assert staging.remarks([large])[0] == "batch 10 lies beyond the measured 1 to 4 of block 'b0'"
    assert Staging(profile=profile, ends=(0, 3)).remarks([small]) == ()


def test_what_stages_share_is_said_once_for_all_weights():
    names = tuple(f"w{place}" for place in range(12))
    staging = Staging(profile=Profile(blocks=(block(0, tied=names), block(1, tied=names))), ends=(0, 1, 2))
    assert len(staging.remarks([Candidate(order=one_f_one_b(2, 2), global_batch=2)])) == 1


def test_a_copy_has_memory_and_an_update_of_its_own():
    profile = Profile(blocks=(block(1, tied=("w",)), block(2), block(3, tied=("w",))))
    staging = Staging(profile=profile, ends=(0, 1, 3))
    free = Staging(profile=Profile(blocks=(block(1), block(2), block(3))), ends=(0, 1, 3))
    assert staging.optimizer_ms == (0.25, 0.25 * (2 + 3) + 0.25)
    more = [
        ours.static_bytes - theirs.static_bytes
        for ours, theirs in zip(staging.memories(1), free.memories(1), strict=True)
    ]
    assert more == [0, 2 * 11 + 5]


def test_another_profile_is_refused():
    from plait.pipeline.planning import plan

    made = plan(Profile(blocks=(block(0), block(1))), 2, global_batch=4)
    with pytest.raises(UsageError, match="a plan of 2 blocks and a profile of 1") as error:
        Staging.of(made, Profile(blocks=(block(0),)))
    assert error.value.setting == "profile"
