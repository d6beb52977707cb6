"""A plan's file says what gradients travel in, for every strand."""

import json
from dataclasses import replace

import pytest
from chains import CODECS, MIB, chain, cluster, demand, with_disk

from plait.errors import FileError, UsageError
from plait.sim import play_burst, play_data
from plait.sim.data_plan import DataPlan
from plait.strategy import KeptPlan, plan
from plait.strategy.bursted import bursted
from plait.strategy.comparison import STRATEGIES, options_of
from plait.strategy.data import automatic
from plait.strategy.site import Site

HEAVY = demand(profile=chain(parameters=40 * MIB, scale=8.0))


def options(of=HEAVY, on=None):
    site = Site(cluster=with_disk(cluster(2)) if on is None else on)
    return {
        option.name: option
        for option in options_of(of, site, strategies=STRATEGIES, codecs=CODECS, exactly=True)
    }


def test_every_option_says_what_travels():
    found = options()
    assert all(option.feasible for option in found.values())
    assert {name: option.bits for name, option in found.items()} == {
        "data, fp32": None,
        "data, 4 bits": 4,
        "data, auto": "auto",
        "pipeline": None,
        "burst": None,
        "burst, 4 bits": 4,
        "spill": None,
    }
    assert {name: option.to_json()["bits"] for name, option in found.items()} == {
        name: option.bits for name, option in found.items()
    }


def test_nothing_travels_where_auto_declines_and_on_one_device():
    fast = Site(cluster=cluster(2, bandwidth="400gbit"))
    declined = automatic(HEAVY, fast, CODECS)
    assert "uncompressed" in declined.remarks[0]
    assert declined.bits is None
    assert declined.plan.bits is None
    thin = bursted(HEAVY, Site(cluster=cluster(2, bandwidth="1kbit")), CODECS)
    assert thin.devices == 1
    assert thin.bits is None


def test_a_placement_says_it_too():
    made = plan([HEAVY], cluster(2), codecs=CODECS, strategies=["data"])
    (placement,) = made.to_json()["ways"][0]["placements"]
    assert (placement["strategy"], placement["bits"]) == ("data", 4)
    assert KeptPlan.from_json({**placement["plan"]}).bits == 4


@pytest.mark.parametrize("name", ["data, fp32", "data, 4 bits", "data, auto", "pipeline", "burst", "spill"])
def test_a_file_is_read_as_it_was_written(tmp_path, name):
    option = options()[name]
    kept = KeptPlan.of(option)
    kept.save(tmp_path / "plan.json")
    assert KeptPlan.load(tmp_path / "plan.json") == kept
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["format"] == f"plait.plan.{option.strategy}/1"
    again = type(option.plan).from_json(data)  # what is not compressed, and data, a runtime reads by itself
    assert again == option.plan
    assert kept.devices == option.devices
    assert kept.batch == (None if name == "spill" else HEAVY.batch)


@pytest.mark.parametrize("name", ["data, 4 bits", "data, auto", "burst, 4 bits"])
def test_what_is_read_is_played_like_what_was_planned(tmp_path, name):
    option, on = options()[name], cluster(2)
    KeptPlan.of(option).save(tmp_path / "plan.json")
    kept = KeptPlan.load(tmp_path / "plan.json")
    assert kept.bits == option.bits
    collective = kept.collective(HEAVY.profile, on, CODECS)
    assert collective == option.collective
    player = play_burst if option.strategy == "burst" else play_data
    steps = [
        player(made, HEAVY.profile, on, collective=through).step_ms()
        for made, through in ((option.plan, option.collective), (kept.plan, collective))
    ]
    assert steps[0] == steps[1]


def test_bits_that_are_not_compressed_have_a_collective_too():
    kept = KeptPlan(plan=DataPlan(devices=2, batch=16, bits=32), bits=32)
    assert kept.collective(HEAVY.profile, cluster(2)).wire_bytes(4000, 2) == 4000
    assert KeptPlan(plan=DataPlan(devices=2, batch=16)).collective(HEAVY.profile, cluster(2)) is None


def test_of_a_gpu_nobody_knows_how_fast_it_packs():
    devices = tuple(replace(device, kind="cuda") for device in cluster(2).devices)
    on = replace(cluster(2), devices=devices)
    kept = KeptPlan(plan=DataPlan(devices=2, batch=16, bits=4), bits=4)
    with pytest.raises(UsageError, match="how fast a GPU"):
        kept.collective(HEAVY.profile, on)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "plait.plan.magic/1"}, r"'plait\.plan\.magic/1'.*plait\.plan\.data/1"),
        ({"bits": 9}, "bits"),
        ({"bits": 2.5}, "bits"),
        ({"bits": "many"}, "bits"),
    ],
)
@pytest.mark.parametrize("name", ["data, fp32", "burst"])
def test_wrong_files(tmp_path, name, change, message):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**options()[name].plan.to_json(), **change}))
    with pytest.raises(FileError, match=message) as error:
        KeptPlan.load(file)
    assert "plan.json" in str(error.value)


def test_a_pipeline_has_no_gradients_to_compress(tmp_path):
    data = {**options()["pipeline"].plan.to_json(), "bits": 4}
    with pytest.raises(FileError, match=r"'bits' is 4 in plait\.plan\.pipeline/1"):
        KeptPlan.from_json(data)
    with pytest.raises(FileError, match="'format' is None"):
        KeptPlan.from_json([])
