"""``plait plan``: a profile planned, and wrong files and options refused."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from plait.burst import BurstPlan
from plait.cli.app import app
from plait.cli.plan import plot
from plait.errors import FileError, UsageError
from plait.pipeline.plan import PipelinePlan
from plait.profile import BlockProfile, Profile, Times


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


def test_json_has_the_plan_and_the_frontier(profile):
    result = json.loads(run(profile, *OPTIONS, "--limit", 2, "--json").stdout)
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
    result = run(profile, "--devices", 2, "--batch", 32, "--rate", "1gbit", "--out", out, "--timeline", drawn)
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
    assert json.loads(run(*options, "--json").stdout)["plan"] == PipelinePlan.load(out).to_json()
    far = (profile, "--strategy", "pipeline", "--devices", 2, "--batch", 3200)
    assert "lies beyond the measured" in run(*far).stdout
    assert "lies beyond the measured" in json.loads(run(*far, "--json").stdout)["remarks"][0]


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["--strategy", "magic"], UsageError, "no strategy 'magic'.*burst, pipeline"),
        (["--limit", "0.5"], UsageError, "limit of 0.5.*works: 1"),
        (["--widths", "1,two"], UsageError, "'1,two' is no list of widths"),
        (["--deadline", "soon"], UsageError, "'soon' is not a duration.*--deadline"),
        (["--deadline", "1us"], UsageError, r"the fastest takes.*--deadline\); works: [0-9.e+]+ms"),
        (["--strategy", "pipeline", "--limit", "2"], UsageError, "--limit is for burst"),
        (["--bandwidth", "1parsec"], UsageError, "no unit of rate"),
        (["--memory", "1KiB"], UsageError, "no plan fits"),
        (["--out", "/nowhere/plan.json"], FileError, "/nowhere/plan.json cannot be written"),
    ],
)
def test_wrong_options(profile, words, error, message):
    with pytest.raises(error, match=message):
        run(profile, *words)


def test_wrong_files(tmp_path):
    with pytest.raises(UsageError, match=r"jobs file.*plait profile .*jobs.py --out profile.json"):
        run(tmp_path / "jobs.py")
    with pytest.raises(FileError, match=r"none.json cannot be read"):
        run(tmp_path / "none.json")


def test_the_plot():
    drawn = plot([(10.0, 1000.0), (100.0, 100.0), (1000.0, 10.0)], chosen=1)
    assert drawn[1].startswith("1000 |*")
    assert drawn[14].rstrip().endswith("*")
    assert sum(line.count("@") for line in drawn[1:15]) == 1
    assert plot([(1.0, 2.0), (1.0, 2.0)], chosen=0)[14].endswith("|@")


def test_neither_torch_nor_a_model_is_needed(profile):
    code = "import sys; from plait.cli.app import app\ntry: app()\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules"
    words = ["plan", str(profile), *map(str, OPTIONS), "--limit", "2"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "amplification" in done.stdout
