"""The choices of policies, one by one."""

import pytest

from plait.spill.policies import JobView, ShardedLRTF, Sticky, View, policy

GRAIN = {"unit_ms": 1.0, "grain_ms": 1.0}


def view(*jobs, now=None, devices=2, device=0):
    return View(device=device, devices=devices, jobs=jobs, now=now)


@pytest.mark.parametrize("chosen", [ShardedLRTF(), Sticky()])
def test_no_work_is_no_choice(chosen):
    assert chosen.choose(view()) is None
    assert chosen.choose(view(JobView(name="a", remaining_ms=5, free=False))) is None


def test_lrtf_takes_the_longest_that_is_free():
    jobs = (
        JobView(name="a", remaining_ms=9, free=False),
        JobView(name="b", remaining_ms=5, missing_bytes=100),
        JobView(name="c", remaining_ms=4),
        JobView(name="d", remaining_ms=5),
    )
    assert ShardedLRTF().choose(view(*jobs)) == "b"
    assert ShardedLRTF().choose(view(*jobs, now="a")) == "b"


def test_sticky_stays_with_its_job():
    jobs = (
        JobView(name="a", remaining_ms=50, free=False, **GRAIN),
        JobView(name="b", remaining_ms=60, **GRAIN),
        JobView(name="c", remaining_ms=60, free=False, **GRAIN),
    )
    assert Sticky().choose(view(*jobs, now="a")) is None
    assert ShardedLRTF().choose(view(*jobs, now="a")) == "b"


def test_sticky_takes_what_lies_in_memory():
    jobs = (
        JobView(name="a", remaining_ms=60, missing_bytes=9, last_device=0, **GRAIN),
        JobView(name="b", remaining_ms=50, missing_bytes=8, **GRAIN),
        JobView(name="c", remaining_ms=55, missing_bytes=8, last_device=0, **GRAIN),
        JobView(name="d", remaining_ms=40, missing_bytes=8, last_device=0, begun=True, **GRAIN),
    )
    assert Sticky().choose(view(*jobs)) == "d"
    assert Sticky().choose(view(*jobs[:3])) == "c"
    assert Sticky().choose(view(*jobs[:3], device=1)) == "c"  # of equals the longest
    assert Sticky().choose(view(*jobs[:2], JobView(name="e", remaining_ms=99, free=False))) == "b"


def test_a_critical_job_goes_first():
    jobs = (
        JobView(name="a", remaining_ms=30, free=False, **GRAIN),
        JobView(name="b", remaining_ms=40, missing_bytes=99, **GRAIN),
        JobView(name="c", remaining_ms=8, **GRAIN),
    )
    # 78 in all, 39 a device: b has no time to lose.
    assert Sticky().choose(view(*jobs, now="a")) == "b"
    assert Sticky().choose(view(*jobs)) == "b"


def test_a_critical_job_is_not_left_for_another():
    jobs = (
        JobView(name="a", remaining_ms=40, free=False, **GRAIN),
        JobView(name="b", remaining_ms=20, **GRAIN),
        JobView(name="c", remaining_ms=18, free=False, **GRAIN),
    )
    assert Sticky().choose(view(*jobs, now="a")) is None


def test_a_reserve_is_left_of_each_job():
    jobs = (
        JobView(name="a", remaining_ms=3, free=False, **GRAIN),
        JobView(name="b", remaining_ms=20, missing_bytes=50, **GRAIN),
        JobView(name="c", remaining_ms=20, missing_bytes=60, **GRAIN),
        JobView(name="d", remaining_ms=20, free=False, **GRAIN),
    )
    # After its present unit a would have two units left: those wait for the end.
    assert Sticky().choose(view(*jobs, now="a")) == "b"


def test_a_crumb_is_not_left():
    others = tuple(JobView(name=name, remaining_ms=20, free=name == "b", **GRAIN) for name in "bcd")

    def left(remaining_ms, **changes):
        return JobView(name="a", remaining_ms=remaining_ms, **{"last_device": 0, **GRAIN, **changes})

    assert Sticky().choose(view(left(1.25, free=False), *others, now="a")) is None
    assert Sticky().choose(view(left(1.26, free=False), *others, now="a")) == "b"
    # Asked again, when the unit has ended.
    assert Sticky().choose(view(left(0.25, missing_bytes=9), *others)) == "a"
    assert Sticky().choose(view(left(0.26), *others)) == "b"
    # One that is left elsewhere is no reason to go there, nor one to leave what is under way.
    assert Sticky().choose(view(left(0.2, last_device=1), *others)) == "b"
    assert Sticky().choose(view(left(0.2), *others, now="c")) is None
    critical = JobView(name="e", remaining_ms=60, **GRAIN)
    assert Sticky().choose(view(left(1.2, free=False), critical, now="a")) == "e"


def test_in_the_end_all_take_turns():
    jobs = tuple(
        JobView(name=name, remaining_ms=ms, **GRAIN) for name, ms in (("a", 1), ("b", 2), ("c", 1.5))
    )
    others = tuple(JobView(name=f"x{i}", remaining_ms=2, free=False, **GRAIN) for i in range(9))
    assert Sticky().choose(view(*jobs, *others)) == "b"


def test_a_job_that_ends_is_no_choice():
    jobs = (
        JobView(name="a", remaining_ms=1, free=False, **GRAIN),
        JobView(name="b", remaining_ms=30, **GRAIN),
    )
    assert Sticky().choose(view(*jobs, now="a", devices=1)) == "b"
    assert Sticky().choose(view(jobs[0], now="a", devices=1)) is None


def test_by_name():
    assert isinstance(policy("sticky"), Sticky)
    assert isinstance(policy("lrtf"), ShardedLRTF)
