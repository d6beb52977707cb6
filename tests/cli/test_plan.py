"""``plait plan``: a profile planned, and wrong files and options refused."""

import json
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from plait.burst import BurstPlan
from plait.cli.app import app
from plait.cli.plan_burst import plot
from plait.cluster import Cluster
from plait.errors import FileError, UsageError
from plait.pipeline.plan import PipelinePlan
from plait.profile import BlockProfile, Profile, Times
from plait.sim import DataPlan
from plait.units import counted


@pytest.fixture
def profile(tmp_path):
    """Convolutions that scale, then a dense layer that has too many weights to."""
    blocks = [
        BlockProfile(
            name=name,
            parameter_bytes=size,
            output_bytes_per_sample=4096,
            milliseconds={rows: Times(forward=rows * each, backward=2 * rows * each) for rows in (1, 8, 32)},
        )
        for name, size, each in (("conv0", 10**4, 1.0), ("conv1", 10**5, 1.0), ("dense", 10**8, 0.1))
    ]
    file = tmp_path / "p.json"
    Profile(blocks=tuple(blocks), model="VGG").save(file)
    return file


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """What is measured on the way is kept in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def run(*words):
    result = CliRunner().invoke(app, ["plan", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


OPTIONS = (
    "--strategy",
    "burst",
    "--devices",
    8,
    "--batch",
    32,
    "--bandwidth",
    "266GB/s",
    "--latency",
    "40us",
)


FEW = ("--devices", 2, "--batch", 8, "--rate", "10gbit")


def test_json_has_the_plan_and_the_frontier(profile):
    result = json.loads(run(profile, *OPTIONS, "--limit", 2, "--json").stdout)
    assert result["format"] == "plait.frontier.burst/1"
    assert result["blocks"] == ["conv0", "conv1", "dense"]
    assert len(result["widths"]) == 3
    assert max(result["widths"]) <= 8
    assert [result["step_ms"], result["device_ms"]] in result["frontier"]
    assert result["device_ms"] <= 2 * result["single_ms"]
    for (step, device), (slower, cheaper) in pairwise(result["frontier"]):
        assert step < slower
        assert device > cheaper


def test_a_thin_wire_keeps_the_dense_layer_on_one_device(profile, tmp_path):
    out, drawn = tmp_path / "plan.json", tmp_path / "step.svg"
    result = run(
        profile, "--strategy", "burst", *FEW[:2], "--rate", "1gbit", "--out", out, "--timeline", drawn
    )
    assert "VGG: batch 32 on up to 2 devices" in result.stdout
    assert "2x2 1x1" in result.stdout
    assert "@ is the plan" in result.stdout
    assert "all plans worth having" in result.stdout
    assert BurstPlan.load(out).widths == (2, 2, 1)
    assert "<svg" in drawn.read_text()


def test_a_deadline_and_background_work(profile):
    options = (profile, "--devices", 4, "--bandwidth", "10gbit", "--json")
    late = json.loads(run(*options, "--deadline", "150ms").stdout)
    assert late["step_ms"] <= 150
    busy = json.loads(run(*options, "--background-value", "1").stdout)
    assert busy["widths"] == [1, 1, 1]
    few = json.loads(run(*options, "--widths", "1,4").stdout)
    assert set(few["widths"]) <= {1, 4}


def test_batch_sizes_that_were_not_measured_are_noted(profile):
    assert "note: batch 64 lies beyond" in run(profile, "--batch", 64).stdout


def test_a_pipeline(profile, tmp_path):
    out = tmp_path / "plan.json"
    options = (profile, "--strategy", "pipeline", "--devices", 2, "--batch", 32, "--out", out)
    assert "stage" in run(*options).stdout
    made = json.loads(run(*options, "--json").stdout)
    assert made["format"] == "plait.forecast.pipeline/1"
    assert made["plan"] == PipelinePlan.load(out).to_json()
    far = (profile, "--strategy", "pipeline", "--devices", 2, "--batch", 3200)
    assert "lies beyond the measured" in run(*far).stdout
    assert "lies beyond the measured" in json.loads(run(*far, "--json").stdout)["remarks"][0]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--strategy", "magic"], UsageError, "no strategy 'magic'.*auto, data, pipeline, burst, spill"),
        (["--limit", "0.5"], UsageError, "limit of 0.5.*works: 1"),
        (["--widths", "1,two"], UsageError, "'1,two' is no list of widths"),
        (["--deadline", "soon"], UsageError, "'soon' is not a duration.*--deadline"),
        (["--deadline", "1us"], UsageError, r"the fastest takes.*--deadline\); works: [0-9.e+]+ms"),
        (["--strategy", "pipeline", "--limit", "2"], UsageError, "--limit is for burst"),
        (["--bandwidth", "1parsec"], UsageError, "no unit of rate"),
        (["--strategy", "burst", "--memory", "1KiB"], UsageError, "no plan fits"),
        (["--rate", "0gbit"], UsageError, "a rate must be above zero.*--rate"),
        (["--memory", "0"], UsageError, "memory of 0 bytes.*--memory"),
        (["--devices", "0"], UsageError, "--devices is 0"),
        (["--devices", "4", "--hosts", "3"], UsageError, "4 devices on 3 hosts.*divides 4"),
        (
            ["--rate", "1gbit", "--rate", "2gbit", "--out", "p.json"],
            UsageError,
            "2 scenarios have no one plan",
        ),
        (["--limit", "2", "--hosts", "1"], UsageError, "--limit is for burst"),
        (["--job", "one"], UsageError, "is a profile, with no jobs.*--job"),
        (["--optimizer", "lion"], UsageError, "nothing is known of the optimizer 'lion'"),
        (["--cluster", "none.toml"], FileError, "none.toml"),
        (["--kind", "tpu"], UsageError, "no devices of kind 'tpu'.*works: cpu or cuda"),
        (["--strategy", "burst", "--memory", "2MiB"], UsageError, "no plan fits.*works: [0-9]+MiB"),
        (["--strategy", "pipeline", "--memory", "2MiB"], UsageError, "no cut.*works: [0-9]+MiB"),
        (
            [word for i in range(65) for word in ("--rate", f"{i + 1}gbit")],
            UsageError,
            "65 scenarios.*64 at most",
        ),
        (["--out", "/nowhere/plan.json"], FileError, "/nowhere/plan.json cannot be written"),
    ],
)
def test_wrong_options(profile, words, error, message):
    with pytest.raises(error, match=message):
        run(profile, *words)


def test_wrong_files(tmp_path):
    with pytest.raises(FileError, match=r"there is no jobs file .*jobs.py"):
        run(tmp_path / "jobs.py")
    with pytest.raises(FileError, match=r"none.json cannot be read"):
        run(tmp_path / "none.json")
    with pytest.raises(UsageError, match=r"is a cluster, if anything.*works: JOBS --cluster .*four\.toml"):
        run(tmp_path / "four.toml")


# --- comparing ------------------------------------------------------------------------------------------


def test_all_strategies_are_compared_and_the_fastest_is_taken(profile):
    result = json.loads(run(profile, *FEW, "--disk", "1GB/s", "--json").stdout)
    assert result["format"] == "plait.comparison/1"
    steps = {option["name"]: option["step_ms"] for option in result["options"]}
    assert set(steps) == {
        "data, fp32", "data, 4 bits", "data, auto", "pipeline", "burst", "burst, 4 bits", "spill"
    }  # fmt: skip
    assert all(step is not None for step in steps.values())
    assert steps[result["chosen"]] == min(steps.values())
    shown = run(profile, *FEW).stdout
    assert f"→ │ {result['chosen']}" in shown
    assert "spill: no, host 'node0' has no tier below its memory to spill to; works: --disk 1GB/s" in shown
    assert "note: the profile has no state of an optimizer" in shown


def test_one_strategy_alone(profile, tmp_path):
    out = tmp_path / "plan.json"
    result = json.loads(run(profile, *FEW, "--strategy", "data", "--out", out, "--json").stdout)
    assert {option["strategy"] for option in result["options"]} == {"data"}
    (chosen,) = (option for option in result["options"] if option["name"] == result["chosen"])
    assert DataPlan.load(out).to_json() == chosen["plan"]
    spilled = json.loads(run(profile, *FEW, "--strategy", "spill", "--disk", "1GB/s", "--json").stdout)
    assert spilled["chosen"] == "spill"


def test_what_if_a_faster_link_is_never_slower(profile, tmp_path):
    page = tmp_path / "page.html"
    words = (
        profile,
        "--devices",
        2,
        "--batch",
        8,
        "--rate",
        "1gbit",
        "--rate",
        "10gbit",
        "--strategy",
        "data",
    )
    found = json.loads(run(*words, "--json").stdout)["scenarios"]
    assert [one["scenario"] for one in found] == [{"rate": "1gbit"}, {"rate": "10gbit"}]
    slow, fast = ({o["name"]: o["step_ms"] for o in one["comparison"]["options"]} for one in found)
    assert all(fast[name] <= slow[name] for name in slow)
    shown = run(*words, "--html", page).stdout
    assert "rate 1gbit" in shown
    assert "milliseconds a step" in shown
    assert "Step time by rate" in page.read_text()


def test_gpus_can_be_asked_for(profile, tmp_path):
    result = json.loads(run(profile, *FEW, "--kind", "cuda", "--strategy", "data", "--json").stdout)
    (coded,) = (one for one in result["options"] if one["name"] == "data, 4 bits")
    assert "how fast a GPU" in coded["why_not"]
    file = tmp_path / "cluster.toml"
    Cluster.uniform(hosts=2, memory="1GiB", bandwidth="1gbit").save(file)
    words = (profile, "--cluster", file, "--batch", 8, "--strategy", "data", "--kind", "cuda", "--json")
    assert "how fast a GPU" in json.loads(run(*words).stdout)["options"][1]["why_not"]


def test_adamw_is_an_optimizer(profile):
    held = [
        json.loads(run(profile, *FEW, "--optimizer", name, "--strategy", "data", "--json").stdout)["options"][
            0
        ]
        for name in ("adamw", "adam")
    ]
    assert held[0]["memory_bytes"] == held[1]["memory_bytes"]


def test_what_fits_nowhere_ends_with_the_smallest_change(profile):
    result = run(profile, *FEW, "--memory", "64MiB")
    assert result.exit_code == 1
    assert re.search(
        r"the smallest change that makes it fit is [0-9.]+ MiB of memory a device", result.stdout
    )
    assert re.search(
        r"data, fp32: no, a device would hold [0-9.]+ MiB for [0-9] rows on [12] device", result.stdout
    )
    change = json.loads(run(profile, *FEW, "--memory", "64MiB", "--json").stdout)["changes"][0]
    assert change["setting"] == "memory"
    enough = run(profile, *FEW, "--memory", str(change["value"]), "--json")
    assert enough.exit_code == 0
    assert json.loads(enough.stdout)["chosen"] is not None


def test_a_cluster_file_and_figures_that_differ_from_it(profile, tmp_path):
    file = tmp_path / "cluster.toml"
    cluster = Cluster.uniform(hosts=6, memory="1GiB", bandwidth="1gbit", latency="40us")
    cluster.save(file)
    words = (profile, "--cluster", file, "--batch", 12, "--strategy", "data", "--json")
    options = json.loads(run(*words).stdout)["options"]
    budgets = {name for option in options for name in option["budget_bytes"]}
    assert budgets <= {f"node{host}/0" for host in range(6)}
    slow, fast = (
        {
            option["name"]: option["step_ms"]
            for option in json.loads(run(*words, "--rate", rate).stdout)["options"]
        }
        for rate in ("100mbit", "100gbit")
    )
    assert fast["data, 4 bits"] < slow["data, 4 bits"]
    with pytest.raises(UsageError, match=r"7 devices were asked of a cluster of 6.*--devices"):
        run(*words, "--devices", 7)
    with pytest.raises(UsageError, match="hosts are those of the cluster file"):
        run(*words, "--hosts", 3)


def test_a_cluster_with_a_host_that_cannot_be_reached(profile, tmp_path):
    file = tmp_path / "cluster.toml"
    cluster = Cluster.uniform(hosts=3, memory="1GiB", bandwidth="1gbit")
    text = cluster.to_toml().replace("[[links]]", "[[links]]\nfrom = 'node0'\nto = 'node1'", 1)
    file.write_text(text)
    with pytest.raises(FileError, match="cannot be reached from"):
        run(profile, "--cluster", file)


@pytest.mark.parametrize("strategy", ["auto", "data", "pipeline", "burst"])
def test_a_page_and_a_picture_of_the_plan(profile, tmp_path, strategy):
    page, drawn = tmp_path / "page.html", tmp_path / "step.svg"
    run(profile, *FEW, "--strategy", strategy, "--html", page, "--timeline", drawn)
    text = page.read_text()
    assert "default-src 'none'" in text
    assert 'class="timeline' in text
    assert "<table>" in text
    assert "<svg" in drawn.read_text()


JOBS = """
import functools, torch
from torch import nn
from plait import Job

def model(): return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def data(seed): return [(torch.ones(4), torch.tensor(i % 2)) for i in range(8)]

def job(name, **more): return Job(name=name, model=model, data=data, loss="plait.losses:cross_entropy",
                                  optimizer=functools.partial(torch.optim.SGD, lr=0.1),
                                  batch=4, steps=5, **more)
jobs = [job("one"), job("two"), job("behind", priority="background")]
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A jobs file, and where its profiles are kept between tests."""
    file = tmp_path_factory.mktemp("jobs") / "jobs.py"
    file.write_text(JOBS)
    return file, "--cache", file.parent / "cache"


def test_jobs_are_measured_once_and_placed(jobs, tmp_path):
    page, out = tmp_path / "page.html", tmp_path / "plan.json"
    shown = run(*jobs, "--devices", 2, "--rate", "10gbit", "--html", page, "--out", out).stdout
    assert "no way beats" in shown
    made = json.loads(out.read_text())
    placed = {placement["job"]: placement["how"] for placement in made["ways"][0]["placements"]}
    assert placed["one"] == placed["two"] == "foreground"
    assert made["makespan_ms"] >= made["bound_ms"] > 0
    kept = {file.stat().st_mtime_ns for file in jobs[2].iterdir()}
    again = json.loads(run(*jobs, "--devices", 2, "--rate", "10gbit", "--json").stdout)
    assert again["ways"][0]["makespan_ms"] == made["ways"][0]["makespan_ms"]
    assert {file.stat().st_mtime_ns for file in jobs[2].iterdir()} == kept
    assert 'class="timeline' in page.read_text()


def test_one_job_of_a_file(jobs):
    result = json.loads(run(*jobs, "--job", "two", "--devices", 2, "--json").stdout)
    assert result["job"]["name"] == "two"
    assert result["job"]["steps"] == 5
    with pytest.raises(UsageError, match=r"no job 'three'.*one, two"):
        run(*jobs, "--job", "three")
    with pytest.raises(UsageError, match=r"2 scenarios for several jobs.*--job"):
        run(*jobs, "--rate", "1gbit", "--rate", "2gbit")


def test_jobs_are_planned_for_this_machine_where_nothing_else_is_said(jobs, tmp_path, monkeypatch):
    """As `plait run` does; any figure of hardware asks for a modelled cluster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mine = {device.name for device in Cluster.detect().devices}
    made = json.loads(run(*jobs, "--json").stdout)
    assert {name for one in made["ways"][0]["placements"] for name in one["devices"]} <= mine
    shown = " ".join(run(*jobs, "--job", "one").stdout.split())
    assert f"on 1 host, {counted(len(mine), 'device')}" in shown
    shown = " ".join(run(*jobs, "--job", "one", "--latency", "50us").stdout.split())
    assert "on 2 hosts, 2 devices in all, links of 1.00 Gbit/s" in shown


def test_a_job_that_there_is_not_is_refused_before_the_machine_is_measured(jobs, monkeypatch):
    monkeypatch.setattr("plait.engine.machine.this_machine", lambda **_: pytest.fail("it was measured"))
    with pytest.raises(UsageError, match="no job 'three'"):
        run(*jobs, "--job", "three")


def test_the_plot():
    drawn = plot([(10.0, 1000.0), (100.0, 100.0), (1000.0, 10.0)], chosen=1)
    assert drawn[1].startswith("1000 |*")
    assert drawn[14].rstrip().endswith("*")
    assert sum(line.count("@") for line in drawn[1:15]) == 1
    assert plot([(1.0, 2.0), (1.0, 2.0)], chosen=0)[14].endswith("|@")


def test_neither_torch_nor_a_model_is_needed(profile):
    code = "import sys; from plait.cli.app import app\ntry: app()\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    for words, said in ((["--limit", "2", *OPTIONS], "amplification"), (FEW, "samples/s")):
        line = [sys.executable, "-c", code, "plan", str(profile), *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout


def test_it_is_said_for_which_cluster_a_plan_is(profile):
    shown = " ".join(run(profile, "--devices", 2, "--rate", "1gbit").stdout.split())
    assert "on 2 hosts, 2 devices in all, links of 1.00 Gbit/s, no disk that is known of" in shown


def test_an_option_that_leaves_devices_out_says_so_where_scenarios_are_compared(profile):
    rates = ("--rate", "1mbit", "--rate", "100gbit")
    shown = run(profile, "--strategy", "data", "--devices", 4, *rates).stdout
    row = next(line for line in shown.splitlines() if line.startswith("│ data, fp32"))
    assert re.search(r"on 1 of 4\s+│\s+(→ )?[\d.]+\s+│", row), shown
