"""Everything side by side, from a profile and a cluster alone."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from chains import CODECS, MIB, chain, cluster, demand, spilling, with_disk

from plait.errors import UsageError
from plait.strategy import Demand, compare, plan
from plait.strategy.comparison import compare_demand, concluded, with_background
from plait.strategy.data import plain
from plait.strategy.option import Option
from plait.strategy.site import Site

NAMES = ["data, fp32", "data, 4 bits", "data, auto", "pipeline", "burst", "burst, 4 bits", "spill"]


def compared(profile=None, on=None, **settings):
    settings = {"batch": 16, "codecs": CODECS, **settings}
    return compare(profile or chain(), on or with_disk(cluster(4)), **settings)


QUICK = ["data", "burst"]


@pytest.fixture(scope="module")
def made():
    return compared()


def test_every_way_is_there_and_the_fastest_is_chosen(made):
    assert [option.name for option in made.options] == NAMES
    assert made.chosen.step_ms == min(option.step_ms for option in made.options if option.feasible)
    assert made.option("spill").devices == 1
    with pytest.raises(UsageError, match="'nothing'"):
        made.option("nothing")


@pytest.mark.parametrize("memory", [200 * MIB, spilling(200)])
def test_each_is_within_its_budget(memory):
    for option in compared(on=with_disk(cluster(4, memory=memory))).options:
        if option.feasible:
            assert option.memory_bytes.keys() == option.budget_bytes.keys()
            for device, held in option.memory_bytes.items():
                assert held <= option.budget_bytes[device] == memory
        else:
            assert option.why_not
            assert option.plan is None


def test_the_reason_has_the_numbers_of_both(made):
    chosen = made.chosen
    others = [o for o in made.options if o.feasible and o.strategy != chosen.strategy]
    second = min(others, key=lambda option: option.step_ms)
    for part in (chosen.name, f"{chosen.step_ms:.4g} ms", second.name, f"{second.step_ms:.4g} ms", "16 rows"):
        assert part in made.why
    assert "only way that fits of 7" in compared(on=cluster(1)).why


def test_a_thin_wire_and_a_thick_one_lead_to_different_ways():
    large = chain(parameters=40 * MIB)
    thick = compared(large, cluster(4, bandwidth="400gbit"), batch=64, strategies=QUICK)
    assert thick.option("data, fp32").step_ms < thick.option("data, 4 bits").step_ms
    thin = compared(large, cluster(4, bandwidth="1gbit"), batch=64, strategies=QUICK)
    assert thin.option("data, fp32").step_ms > thin.option("data, 4 bits").step_ms
    assert thin.chosen.step_ms > thick.chosen.step_ms


def test_the_optimizer_is_part_of_a_step_and_may_be_assumed():
    bare = chain(states=0)
    assert compared(bare, strategies=QUICK).remarks == (
        "the profile has no state of an optimizer: none is counted",
    )
    adam, sgd = (compared(bare, optimizer=name, strategies=QUICK) for name in ("adam", "sgd"))
    assert adam.remarks == ()
    held = [each.option("data, fp32").peak_bytes for each in (adam, sgd)]
    assert held[0] - held[1] == 2 * 6 * 4 * MIB
    with pytest.raises(UsageError, match="'adagrad'"):
        compared(optimizer="adagrad")


def test_a_job_that_asks_for_a_strategy_gets_no_other():
    made = compare_demand(demand(strategy="pipeline"), cluster(4), codecs=CODECS)
    assert [option.name for option in made.options] == ["pipeline"]
    some = compared(strategies=["data", "burst"])
    assert [option.name for option in some.options] == [*NAMES[:3], *NAMES[4:6]]
    with pytest.raises(UsageError, match="'magic'"):
        compared(strategies=["magic"])


def test_memory_and_what_a_process_takes_come_off_the_budget():
    less = compared(memory=300 * MIB, strategies=QUICK)
    assert set(less.chosen.budget_bytes.values()) == {300 * MIB}
    both = compared(memory=300 * MIB, process_bytes=100 * MIB, strategies=QUICK)
    assert set(both.chosen.budget_bytes.values()) == {200 * MIB}


def test_background_work_gets_what_is_idle_where_it_fits():
    thin = cluster(4, bandwidth="1mbit")
    alone = compared(on=thin, strategies=["data"]).option("data, fp32")
    assert alone.devices == 1
    # Three devices are idle, and one job runs on one of them.
    assert alone.background_samples_per_s == pytest.approx(alone.samples_per_s)
    assert alone.total_samples_per_s == pytest.approx(2 * alone.samples_per_s)
    small = demand(profile=chain(2), batch=4)
    other = compared(on=thin, background=small, strategies=["data"]).option("data, fp32")
    assert other.background_samples_per_s == pytest.approx(4e3 / chain(2).step_ms(4))
    tight = cluster(4, bandwidth="1mbit", memory="180MiB")
    tight = compared(on=tight, background=demand(batch=64), strategies=["data"])
    assert tight.option("data, fp32").background_samples_per_s == 0


def test_each_background_job_stays_on_one_device():
    of, small = demand(batch=1), demand(profile=chain(2), batch=1)
    site = Site(cluster=cluster(8, bandwidth="1mbit"))
    option = plain(of, site)
    alone = 1e3 / small.alone_ms
    rates = [
        with_background(option, small, site, jobs=jobs).background_samples_per_s for jobs in (1, 3, 7, 8, 9)
    ]
    assert rates == pytest.approx([alone, 3 * alone, 7 * alone, 7 * alone, 7 * alone])


def test_background_work_has_a_process_of_its_own_and_its_own_limit():
    of, beside = demand(), demand(profile=chain(2), batch=4)
    held, need, process = of.alone_bytes, beside.alone_bytes, 50 * MIB

    def rate(memory_bytes, limit=None, own=None):
        on = cluster(1, memory=memory_bytes)
        site = Site(cluster=on, memory_bytes=limit, process_bytes=process)
        option = replace(plain(of, site), idle_ms={on.devices[0].name: 1.0})
        return with_background(option, replace(beside, memory_bytes=own), site).background_samples_per_s

    enough = held + need + 2 * process
    assert rate(enough) > 0
    assert rate(enough - 1) == 0
    assert rate(enough, limit=held + process) > 0  # which is for the job in front alone
    assert rate(enough, own=need + process) > 0
    assert rate(enough, own=need + process - 1) == 0


def test_how_fast_gpus_pack_must_be_given():
    gpus = cluster(4)
    gpus = replace(gpus, devices=tuple(replace(device, kind="cuda") for device in gpus.devices))
    made = compared(on=gpus, codecs=None, strategies=QUICK)
    assert "not known" in made.option("data, 4 bits").why_not
    assert made.option("data, fp32").feasible
    assert compared(on=gpus, strategies=QUICK).option("data, 4 bits").feasible


def test_links_that_are_not_known_leave_one_device():
    two = cluster(2, per_host=2)
    unknown = replace(two, links=())
    made = compared(on=unknown)
    assert made.option("data, fp32").devices == 1
    assert any("nothing is known of the link" in remark for remark in made.option("data, fp32").remarks)
    for name in ("data, 4 bits", "pipeline", "burst"):
        assert "nothing is known of the link" in made.option(name).why_not


def test_a_cluster_that_cannot_talk_is_refused_before_anything_is_compared():
    with pytest.raises(UsageError, match="above zero"):
        cluster(2, bandwidth=0)
    two = cluster(2)
    with pytest.raises(UsageError, match="cannot be reached"):
        replace(two, links=two.links[1:])


def test_compressed_gradients_must_gain_a_tenth():
    memory = {"node0/0": 1}
    quick = Option(strategy="data", name="4", batch=1, step_ms=10.0, bits=4, memory_bytes=memory)
    for exact_ms, expected in ((10.9, "exact"), (11.1, "4")):
        near = Option(strategy="data", name="exact", batch=1, step_ms=exact_ms, memory_bytes=memory)
        found = concluded(demand(), Site(cluster=cluster()), [quick, near])
        assert found.chosen.name == expected
        assert ("preferred from 1.1 times" in found.why) == (expected == "exact")


def test_more_devices_must_gain_something():
    one, two = {"node0/0": 1}, {"node0/0": 1, "node1/0": 1}
    wide = Option(strategy="data", name="two", batch=1, step_ms=10.0, memory_bytes=two)
    for narrow_ms, expected in ((10.2, "one"), (10.4, "two")):
        narrow = Option(strategy="spill", name="one", batch=1, step_ms=narrow_ms, memory_bytes=one)
        found = concluded(demand(), Site(cluster=cluster()), [wide, narrow])
        assert found.chosen.name == expected
        assert ("more devices are preferred from 1.03 times" in found.why) == (expected == "one")


def test_a_batch_that_the_profile_does_not_cover_is_said():
    made = compared(batch=200, on=with_disk(cluster(1)), strategies=["data", "spill"])
    assert any("200" in remark for remark in made.option("spill").remarks)
    for bad in (0, 1.5, True):
        with pytest.raises(UsageError, match="batch"):
            compared(batch=bad)


def test_it_is_plain_data(made):
    data = json.loads(json.dumps(made.to_json()))
    assert data["format"] == "plait.comparison/1"
    assert data["chosen"] == made.chosen.name
    assert [option["name"] for option in data["options"]] == NAMES
    assert all((option["plan"] is None) == (not option["feasible"]) for option in data["options"])


def test_no_torch_is_needed(tmp_path):
    chain().save(tmp_path / "profile.json")
    code = (
        "import sys, plait; from plait.strategy import compare;"
        "made = compare(plait.Profile.load(sys.argv[1]), plait.Cluster.uniform(hosts=2, memory='4GiB',"
        "bandwidth='1gbit'), batch=8, strategies=['data', 'pipeline', 'spill']);"
        "assert made.chosen; from plait import native;"
        "sys.exit('torch' in sys.modules and native.missing() is None)"
    )
    home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "profile.json")], env=home, check=False)
    assert done.returncode == 0


def test_a_profile_of_another_kind_is_said_with_the_options():
    gpus = cluster(2)
    gpus = replace(gpus, devices=tuple(replace(device, kind="cuda") for device in gpus.devices))
    made = compared(replace(chain(), device="cpu"), gpus, strategies=QUICK)
    assert any("measured on cpu" in remark for remark in made.remarks)
    assert not any("measured" in remark for remark in compared(chain(), gpus, strategies=QUICK).remarks)


def test_codecs_are_measured_once_and_kept_where_it_is_said(tmp_path):
    heavy, on = chain(parameters=40 * MIB), cluster(2)
    first, again = (compared(heavy, on, codecs=None, directory=tmp_path, strategies=QUICK) for _ in range(2))
    for one, other in zip(first.options, again.options, strict=True):
        assert one.step_ms == other.step_ms
    (file,) = tmp_path.iterdir()
    for name in ("data, 4 bits", "burst, 4 bits"):
        assert any(f"kept in {file}" in remark for remark in again.option(name).remarks)
    assert not any("packed" in remark for remark in again.option("data, fp32").remarks)


def test_what_differs_by_nothing_is_not_said():
    even = compared(on=cluster(2, bandwidth="400gbit"), strategies=["data", "burst"], codecs=CODECS)
    assert "1 times" not in even.why
    assert "e-" not in even.why
    # What is as fast is not preferred to what is plain, and that is said.
    assert even.chosen.name == "data, fp32"
    assert even.chosen.step_ms > min(option.step_ms for option in even.options)
    assert even.why.endswith("but other ways than data parallelism are preferred from 1.03 times as fast on")


def test_options_are_named_in_quotes(made):
    with pytest.raises(UsageError, match=r"works: 'data, fp32', 'data, 4 bits'"):
        made.option("nothing")


def test_adamw_has_the_state_of_adam():
    assert demand().assuming("adamw") == demand().assuming("adam")


def test_names_of_files_are_refused_with_what_reads_them():
    with pytest.raises(UsageError, match=r"'four.toml' is no cluster.*Cluster\.load\('four\.toml'\)"):
        plan([demand()], "four.toml")
    with pytest.raises(UsageError, match=r"None is no cluster.*Cluster\.detect"):
        compare_demand(demand(), None)
    with pytest.raises(UsageError, match=r"Profile\.load\('p\.json'\)"):
        Demand(name="job", profile="p.json", batch=4)


def test_a_speed_that_is_not_known_is_said_before_anything_is_compared():
    two = cluster(2)
    on = replace(two, devices=(replace(two.devices[0], gflops=100.0), two.devices[1]))
    with pytest.raises(UsageError, match="the speed of device 'node1/0' is not known"):
        compared(on=on)


def test_bytes_that_would_fit_are_said_in_mebibytes():
    small = compared(chain(parameters=100 * MIB), cluster(2, memory="64MiB"), strategies=["burst"])
    need = small.option("burst").works.split(" ")[0]
    assert need.endswith("MiB")
    assert compared(chain(parameters=100 * MIB), cluster(2, memory=need), strategies=["burst"]).chosen
