"""``plait sim``: every strategy played, what-ifs and disturbances, and wrong options refused."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from browser import WHY_NOT, Browser, installed
from plait.cli.app import app
from plait.cluster import Cluster
from plait.errors import FileError, UsageError
from plait.profile import BlockProfile, Profile, Times
from plait.strategy import Codecs
from plait.timeline import Timeline


@pytest.fixture
def profile(tmp_path):
    """Four blocks alike, each with as many bytes of weights as a thin wire notices."""
    blocks = [
        BlockProfile(
            name=f"block{place}",
            parameter_bytes=10**6,
            output_bytes_per_sample=4096,
            saved_bytes_per_sample=8192,
            optimizer_milliseconds=0.5,
            milliseconds={rows: Times(forward=rows * 1.0, backward=rows * 2.0) for rows in (1, 4, 16)},
        )
        for place in range(4)
    ]
    file = tmp_path / "p.json"
    Profile(blocks=tuple(blocks), model="Net").save(file)
    return file


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """What is measured on the way is kept in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def run(*words):
    result = CliRunner().invoke(app, ["sim", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def simulated(*words):
    made = json.loads(run(*words, "--json").stdout)
    assert made["format"] == "plait.sim/1"
    return made["runs"]


FEW = ("--devices", 2, "--batch", 16, "--rate", "1gbit")
THIN = ("--devices", "2", "--batch", "16", "--rate", "100mbit")
"""A wire on which compression pays."""


@pytest.fixture
def packed(tmp_path):
    """A cache in which codecs are known to be fast, however busy this machine is."""
    folder = tmp_path / "cache"
    Codecs.kept(folder)
    (file,) = folder.iterdir()
    data = json.loads(file.read_text())
    data["speeds"] = {bits: dict.fromkeys(its, 1e-10) for bits, its in data["speeds"].items()}
    file.write_text(json.dumps({**data, "busy_s_per_byte": 1e-10}))
    return folder


@pytest.mark.parametrize("option", ["data, fp32", "data, 4 bits", "pipeline", "burst", "burst, 4 bits"])
def test_where_nothing_disturbs_the_simulation_is_what_was_planned(profile, packed, option):
    (one,) = simulated(profile, *FEW, "--option", option, "--cache", packed)
    assert one["step_ms"] == pytest.approx(one["planned_ms"], rel=1e-9)
    assert one["played"]["steps_ms"]["Net"] == pytest.approx([one["step_ms"]] * 3, rel=0.05)
    assert 0 < one["busy"] <= 1
    assert one["wire_bytes"] > 0


def test_a_spilled_job_reads_and_writes(profile):
    # Two processes take 344 MB of it by themselves.
    words = ("--devices", 1, "--batch", 16, "--memory", "354MB", "--disk", "1GB/s", "--strategy", "spill")
    (one,) = simulated(profile, *words)
    assert one["played"]["disk_bytes"]["read"] > 0


def test_the_table_and_the_steps_in_characters(profile):
    shown = run(profile, *FEW, "--strategy", "data", "--option", "data, fp32").stdout
    assert "Net: a step of 16 rows on 2 devices, simulated" in shown
    assert "node0/0 │" in shown
    assert "B backward   F forward   O optimizer" in shown
    many = run(profile, "--devices", 16, "--batch", 16, "--strategy", "data", "--rate", "100gbit").stdout
    assert "and 4 devices more" in many


def test_disturbances(profile, tmp_path):
    def step(*words):
        (one,) = simulated(profile, *FEW, "--option", "data, fp32", "--strategy", "data", *words)
        return one["step_ms"]

    alone = step()
    assert step("--straggler", "1=0.5") > 1.5 * alone
    assert step("--straggler", "node1/0=0.5") == step("--straggler", "1=0.5")
    assert step("--jitter", 0.1, "--seed", 1) == step("--jitter", 0.1, "--seed", 1)
    assert step("--jitter", 0.1, "--seed", 1) != step("--jitter", 0.1, "--seed", 2)
    trace = tmp_path / "trace.txt"
    trace.write_text("0 1gbit\n0.01 50mbit 1\n")
    assert step("--trace", trace) > 1.5 * alone


def test_background_work_and_a_tuner(profile):
    words = (profile, *FEW, "--strategy", "pipeline")
    shown = run(*words, "--background", "1ms").stdout
    assert "background: " in shown
    assert "of work done beside it" in shown
    (one,) = simulated(*words, "--adaptive", "--steps", 6, "--straggler", "0=0.5")
    assert len(one["played"]["steps_ms"]["Net"]) == 6


def test_what_if(profile, tmp_path):
    page = tmp_path / "page.html"
    words = (
        profile,
        "--devices",
        2,
        "--batch",
        16,
        "--rate",
        "100mbit",
        "--rate",
        "1gbit",
        "--rate",
        "10gbit",
    )
    runs = simulated(*words, "--strategy", "data", "--option", "data, fp32")
    steps = [one["step_ms"] for one in runs]
    assert steps == sorted(steps, reverse=True)
    shown = run(*words, "--strategy", "data", "--html", page).stdout
    assert shown.count("rate ") >= 3
    assert page.read_text().count('class="timeline') == 3


def test_a_plan_that_was_made_before(profile, tmp_path):
    file = tmp_path / "plan.json"
    made = CliRunner().invoke(
        app, ["plan", str(profile), *map(str, FEW), "--strategy", "data", "--out", str(file)]
    )
    assert made.exit_code == 0
    (one,) = simulated(profile, "--plan", file, "--rate", "1gbit")
    assert one["plan"] == json.loads(file.read_text())
    assert one["option"] == "the plan given"
    assert one["batch"] == 16
    with pytest.raises(UsageError, match=r"a plan for 16 rows.*--batch.*works: 16"):
        run(profile, "--plan", file, "--batch", 32)
    file.write_text('{"format": "plait.plan.magic/1"}')
    with pytest.raises(FileError, match=r"'plait\.plan\.magic/1'.*plait\.plan\.data/1"):
        run(profile, "--plan", file)


@pytest.mark.parametrize("option", ["data, 4 bits", "data, auto", "burst, 4 bits"])
def test_a_plan_in_a_file_keeps_its_compression(profile, tmp_path, packed, option):
    made = CliRunner().invoke(app, ["plan", str(profile), *THIN, "--cache", str(packed), "--json"])
    (wanted,) = (one for one in json.loads(made.stdout)["options"] if one["name"] == option)
    file = tmp_path / "plan.json"
    bits = {} if wanted["bits"] is None else {"bits": wanted["bits"]}
    file.write_text(json.dumps({**wanted["plan"], **bits}))
    (one,) = simulated(profile, "--plan", file, "--rate", "100mbit", "--cache", packed)
    assert one["step_ms"] == pytest.approx(wanted["step_ms"], rel=1e-9)
    assert one["wire_bytes"] == pytest.approx(wanted["wire_bytes"])
    assert wanted["bits"] == {"data, auto": "auto"}.get(option, 4)


def test_what_plan_writes_is_what_it_chose(profile, tmp_path, packed):
    file = tmp_path / "plan.json"
    words = ["plan", str(profile), *THIN, "--strategy", "burst", "--hosts", "2", "--cache", str(packed)]
    made = CliRunner().invoke(app, [*words, "--out", str(file), "--json"])
    assert json.loads(made.stdout)["chosen"] == "burst, 4 bits"
    assert json.loads(file.read_text())["bits"] == 4
    (chosen,) = (one for one in json.loads(made.stdout)["options"] if one["name"] == "burst, 4 bits")
    (one,) = simulated(profile, "--plan", file, "--rate", "100mbit", "--hosts", 2, "--cache", packed)
    assert one["step_ms"] == pytest.approx(chosen["step_ms"], rel=1e-9)


def test_timelines_are_written_and_compared(profile, tmp_path):
    words = (profile, *FEW, "--strategy", "data", "--option", "data, fp32")
    (one,) = simulated(*words)
    measured = tmp_path / "run.json"
    Timeline.from_json(one["played"]["timeline"]).save(measured)
    drawn, page = tmp_path / "t.svg", tmp_path / "page.html"
    shown = run(*words, "--measured", measured, "--timeline", drawn, "--html", page).stdout
    assert "against the measured timeline: makespan +0.0%" in shown
    both = drawn.read_text()
    assert both.index(">predicted: ") < both.index(">measured: ")
    (again,) = simulated(*words, "--measured", measured)
    assert again["measured"]["makespan"]["relative_error"] == 0
    text = page.read_text()
    assert text.index("simulated: ") < text.index("measured: ")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--strategy", "magic"], UsageError, "no strategy 'magic'"),
        (["--option", "magic"], UsageError, "no option 'magic'.*works: 'data, fp32', 'data, 4 bits'"),
        (["--kind", "tpu"], UsageError, "no devices of kind 'tpu'.*works: cpu or cuda"),
        (["--straggler", "9=0.5"], UsageError, "no device '9'"),
        (["--straggler", "1"], UsageError, "'1' is no device with a speed.*works: 1=0.5 or node1/0=0.5"),
        (["--straggler", "1=0"], UsageError, "'1=0' is no device with a speed"),
        (["--steps", "0"], UsageError, "--steps is 0"),
        (["--timeline", "t.png"], UsageError, r"end in '\.png'.*--timeline"),
        (["--jitter", "-1"], UsageError, "a jitter of -1.0.*--jitter"),
        (["--jitter", "1e308"], UsageError, r"a jitter of 1e\+308 .*--jitter\); works: 0.05, 10 at most"),
        (["--devices", "2000"], UsageError, r"2000 devices, and 1024 are .*--devices\); works: 1024"),
        (["--background", "soon"], UsageError, r"'soon' is not a duration.*--background\); works: 20ms"),
        (["--background", "0ms"], UsageError, r"takes 0.0 ms \(setting: --background\); works: 20ms"),
        (["--background", "1e-300s"], UsageError, r"takes 1e-297 ms \(setting: --background\); works: 20ms"),
        (["--disk", "fast"], UsageError, r"'fast' is not a rate \(setting: --disk\); works: 1GB/s"),
        (["--adaptive", "--strategy", "data"], UsageError, "only a pipeline.*--adaptive"),
        (["--trace", "none.txt"], FileError, "cannot read the trace none.txt"),
        (["--measured", "none.json"], FileError, "none.json"),
        (["--rate", "0gbit"], UsageError, "a rate must be above zero"),
        (["--rate", "1e-300B/s"], UsageError, "'1e-300B/s' is less than the smallest rate.*--rate"),
        (["--memory", "1MiB"], UsageError, "none of 7 ways fits.*works: [0-9.]+ MiB of memory a device"),
        (["--strategy", "spill"], UsageError, "no tier below its memory"),
        (["--html", "/nowhere/page.html"], FileError, "/nowhere/page.html cannot be written"),
        (["--rate", "1gbit", "--rate", "2gbit", "--timeline", "t.svg"], UsageError, "no one timeline"),
    ],
)
def test_wrong_options(profile, words, error, message):
    with pytest.raises(error, match=message):
        run(profile, "--devices", 2, "--batch", 16, *words)


def test_what_takes_long_is_said(profile):
    words = (profile, *FEW, "--strategy", "data", "--option", "data, fp32")
    assert "playing 3 steps of data, fp32\n" in run(*words).stderr
    shown = run(*words, "--rate", "2gbit", "--steps", 1).stderr
    assert "playing 1 step of data, fp32 (rate 2gbit)\n" in shown


def test_a_profile_of_another_device_is_said(profile):
    file = profile.with_name("measured.json")
    replace(Profile.load(profile), device="cpu").save(file)
    shown = run(file, *FEW, "--kind", "cuda", "--strategy", "data").stdout
    assert "measured on cpu, and the cluster has cuda" in shown
    assert "measured on" not in run(file, *FEW, "--strategy", "data", "--option", "data, fp32").stdout
    replace(Profile.load(profile), device="cuda").save(file)  # then the devices are GPUs, unless said
    assert "measured on" not in run(file, *FEW, "--strategy", "data").stdout


def test_torch_is_not_needed(profile):
    code = "import sys; from plait.cli.app import app\ntry: app()\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    line = [sys.executable, "-c", code, "sim", str(profile), *map(str, FEW)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stdout


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


def test_several_jobs_are_planned_and_played(tmp_path):
    file, page = tmp_path / "jobs.py", tmp_path / "page.html"
    file.write_text(JOBS)
    words = (file, "--cache", tmp_path / "cache", "--devices", 2, "--rate", "10gbit")
    made = json.loads(run(*words, "--json").stdout)
    assert made["format"] == "plait.sim.workload/1"
    assert {name for one in made["runs"] for name in one["jobs"]} >= {"one", "two"}
    shown = run(*words, "--html", page).stdout
    assert "planned and simulated steps" in shown
    assert page.read_text().count('class="timeline') == 1 + len(made["runs"])  # the plan, and what was played
    (one,) = simulated(*words, "--job", "one")
    assert one["step_ms"] > 0


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A jobs file, and where its profiles are kept between tests."""
    file = tmp_path_factory.mktemp("jobs") / "jobs.py"
    file.write_text(JOBS)
    return file, "--cache", file.parent / "cache"


def test_the_plan_of_several_jobs_is_played_from_its_file(jobs, tmp_path):
    out = tmp_path / "plan.json"
    where = ("--devices", 2, "--rate", "10gbit")
    made = CliRunner().invoke(app, ["plan", *map(str, (*jobs, *where)), "--out", str(out)])
    assert made.exit_code == 0
    again = json.loads(run(*jobs, "--plan", out, "--rate", "10gbit", "--json").stdout)
    assert again["plan"] == json.loads(out.read_text())
    fresh = json.loads(run(*jobs, *where, "--json").stdout)
    assert [one["jobs"] for one in again["runs"]] == [one["jobs"] for one in fresh["runs"]]
    for ours, theirs in zip(again["runs"], fresh["runs"], strict=True):
        assert ours["played"]["steps_ms"] == theirs["played"]["steps_ms"]
    with pytest.raises(UsageError, match=r"has the batch of each job.*--batch"):
        run(*jobs, "--plan", out, "--batch", 4)
    Timeline.of([]).save(tmp_path / "run.json")
    with pytest.raises(UsageError, match=r"these are several jobs.*--measured.*--job"):
        run(*jobs, "--plan", out, "--measured", tmp_path / "run.json")
    with pytest.raises(UsageError, match=r"no device 'node1/0'"):
        run(*jobs, "--plan", out, "--devices", 1)


def test_jobs_are_played_on_this_machine_where_nothing_else_is_said(jobs, tmp_path, monkeypatch):
    """With a plan for it, too; one for more devices is played on a modelled cluster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, mine = tmp_path / "plan.json", {device.name for device in Cluster.detect().devices}
    made = CliRunner().invoke(app, ["plan", *map(str, jobs), "--out", str(out)])
    assert made.exit_code == 0
    for words in ((), ("--plan", out)):
        assert set(json.loads(run(*jobs, *words, "--json").stdout)["plan"]["devices"]) == mine
    many = len(mine) + 1
    made = CliRunner().invoke(app, ["plan", *map(str, jobs), "--devices", str(many), "--out", str(out)])
    assert made.exit_code == 0
    again = json.loads(run(*jobs, "--plan", out, "--json").stdout)
    assert len(again["plan"]["devices"]) == many


def test_background_jobs_are_played_too(jobs):
    words = (*jobs, "--devices", 3, "--rate", "1mbit")  # nothing pays on a second device
    made = json.loads(run(*words, "--json").stdout)
    assert sorted(name for one in made["runs"] for name in one["jobs"]) == ["behind", "one", "two"]
    rows = [line for line in run(*words).stdout.splitlines() if "│ background" in line]
    assert len(rows) == 1
    beside = run(*jobs, "--devices", 1, "--background", "1ms").stdout
    assert "background: " in beside
    assert "0 devices" not in beside


def test_the_page_in_a_browser(profile, tmp_path):
    if installed() is None:
        pytest.skip(WHY_NOT)
    page = tmp_path / "page.html"
    run(profile, *FEW, "--strategy", "pipeline", "--html", page)
    browser = Browser(tmp_path)
    try:
        browser.open(page)
        assert browser.errors == []
        assert [url.split(":")[0] for url in browser.requests] == ["file"]
        browser.eval("document.querySelector('svg.timeline').scrollIntoView()")
        x, y, width, height = browser.box(".span")
        browser.mouse("Moved", x + width / 2, y + height / 2)
        assert "ms" in browser.eval("document.querySelector('.tip').innerText")
        browser.mouse("Wheel", x + width / 2, y + height / 2, deltaX=0, deltaY=-300)
        assert browser.eval("document.querySelector('.scaled').getAttribute('transform')").startswith(
            "scale(2.7"
        )
    finally:
        browser.close()
