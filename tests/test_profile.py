"""Profiles: reading them without torch, the lines between measured batch sizes, and measuring."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FileError, UsageError
from plait.profile import BlockProfile, Profile, Times

pytestmark = pytest.mark.filterwarnings("error")


def block(name="a", **changes):
    fields = {
        "parameter_bytes": 100,
        "output_bytes_per_sample": 8,
        "milliseconds": {1: Times(forward=1.0, backward=2.0), 4: Times(forward=2.5, backward=6.0)},
    }
    return BlockProfile(name=name, **(fields | changes))


times = st.builds(
    Times,
    forward=st.floats(0, 1e6),
    backward=st.floats(0, 1e6),
    forward_spread=st.floats(0, 1e3),
    backward_spread=st.floats(0, 1e3),
    repetitions=st.integers(0, 100),
)
blocks = st.builds(
    BlockProfile,
    name=st.just("x"),
    parameter_bytes=st.integers(0, 10**12),
    output_bytes_per_sample=st.integers(0, 10**9),
    milliseconds=st.dictionaries(st.integers(1, 512), times, min_size=1, max_size=4),
    optimizer_bytes=st.integers(0, 10**12),
    tied=st.lists(st.sampled_from(["w", "v.bias"]), max_size=2, unique=True).map(tuple),
    saved_bytes_per_sample=st.integers(0, 10**9),
    transient_bytes=st.integers(0, 10**9),
    transient_bytes_per_sample=st.integers(0, 10**9),
    optimizer_milliseconds=st.floats(0, 1e6),
)


@given(st.lists(blocks, min_size=1, max_size=4), st.integers(1, 8))
@settings(deadline=None)  # it imports pydantic and writes files
def test_a_profile_survives_its_file(tmp_path_factory, rows, threads):
    named = tuple(replace(row, name=f"block{i}", inputs=None) for i, row in enumerate(rows))
    profile = Profile(blocks=named, model="m", device="cpu", threads=threads)
    path = tmp_path_factory.mktemp("profile") / "p.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_inputs_survive_and_none_is_not_the_same_as_nothing(tmp_path):
    profile = Profile(blocks=(block("a"), block("b", inputs=()), block("c", inputs=("a", "b")), block("d")))
    profile.save(tmp_path / "p.json")
    assert [b.inputs for b in Profile.load(tmp_path / "p.json").blocks] == [None, (), ("a", "b"), None]


def test_only_five_fields_are_needed():
    times_at_1 = {"1": {"forward": 1, "backward": 2}}
    row = {"name": "a", "parameter_bytes": 4, "output_bytes_per_sample": 8, "milliseconds": times_at_1}
    profile = Profile.from_json({"format": "plait.profile/1", "blocks": [row]})
    assert profile.blocks[0].optimizer_bytes == 0
    assert profile.blocks[0].backward_ms(1) == 2.0


def test_times_lie_on_lines_between_the_measured_sizes():
    one = block()
    assert one.forward_ms(1) == 1.0
    assert one.forward_ms(2) == pytest.approx(1.5)
    assert one.forward_ms(4) == 2.5
    assert one.forward_ms(8) == pytest.approx(4.5)
    single = block(milliseconds={4: Times(forward=2.0, backward=4.0)})
    assert single.forward_ms(2) == pytest.approx(1.0)


@given(st.dictionaries(st.integers(1, 64), times, min_size=1, max_size=5), st.integers(1, 200))
def test_times_are_never_negative_and_exact_where_measured(measured, batch):
    one = block(milliseconds=measured)
    assert one.forward_ms(batch) >= 0
    for size, row in measured.items():
        assert one.backward_ms(size) == pytest.approx(row.backward, rel=1e-9, abs=1e-9)


def test_it_says_when_a_batch_was_not_measured():
    profile = Profile(blocks=(block("a"), block("b", milliseconds={2: Times(forward=1.0, backward=1.0)})))
    assert profile.extrapolates(2) is None
    assert "batch 3" in profile.extrapolates(3)
    assert "block 'b'" in profile.extrapolates(3)
    assert "1 to 4" in profile.extrapolates(8)
    assert profile.batch_sizes == ()


def test_reading_a_profile_needs_no_torch(tmp_path):
    Profile(blocks=(block(),)).save(tmp_path / "p.json")
    code = (
        "import sys; from plait import Profile; p = Profile.load(sys.argv[1]); p.step_ms(3); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p.json")], check=True)


def spoiled(**changes):
    data = Profile(blocks=(block("a"), block("b"))).to_json()
    data.update(changes)
    return data


def with_block(**changes):
    data = spoiled()
    data["blocks"][1].update(changes)
    return data


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (spoiled(format="plait.profile/9"), ["format", "plait.profile/9"]),
        ([], ["format", "list"]),
        (spoiled(blocks=[]), ["at least one block"]),
        (spoiled(colour="red"), ["colour"]),
        (spoiled(threads=0), ["threads"]),
        (with_block(parameter_bytes="many"), ["blocks.1.parameter_bytes"]),
        (with_block(parameter_bytes=-1), ["parameter_bytes", "-1"]),
        (with_block(milliseconds={}), ["blocks.1", "no times"]),
        (with_block(milliseconds={"0": {"forward": 1, "backward": 1}}), ["batch 0"]),
        (with_block(parameter_bytes=10**400), ["parameter_bytes", "10000"]),
        (
            with_block(milliseconds={size: {"forward": 1, "backward": 1} for size in ("1", "01")}),
            ["blocks.1.milliseconds", "'01' is no batch size"],
        ),
        (with_block(milliseconds={"1.0": {"forward": 1, "backward": 1}}), ["'1.0' is no batch size"]),
        (with_block(milliseconds={"x": {"forward": 1, "backward": 1}}), ["blocks.1.milliseconds"]),
        (with_block(milliseconds={"1": {"forward": 1}}), ["blocks.1.milliseconds.1.backward"]),
        (
            with_block(milliseconds={"1": {"forward": float("nan"), "backward": 1}}),
            ["milliseconds.forward", "nan"],
        ),
        (with_block(name="a"), ["two blocks", "'a'"]),
        (with_block(inputs=["z"]), ["'z'", "no block before it"]),
        (with_block(widht=2), ["blocks.1.widht"]),
    ],
)
def test_a_wrong_field_is_named_with_the_file(tmp_path, data, names):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FileError) as caught:
        Profile.load(path)
    for name in [str(path), *names]:
        assert name in str(caught.value)


def test_a_truncated_or_missing_file_is_named(tmp_path):
    path = tmp_path / "p.json"
    Profile(blocks=(block(),)).save(path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(FileError, match=r"p\.json is no JSON, or not whole: .* in line"):
        Profile.load(path)
    with pytest.raises(FileError, match=r"gone\.json cannot be read"):
        Profile.load(tmp_path / "gone.json")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"threads": ' + "1" * 5000 + "}"])
def test_a_file_beyond_the_parsers_limits_is_named(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(FileError, match=r"p\.json is no JSON, or not whole: "):
        Profile.load(tmp_path / "p.json")


def test_a_profile_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(FileError, match="cannot be written: Is a directory"):
        Profile(blocks=(block(),)).save(tmp_path)


@pytest.mark.parametrize("batch", [float("nan"), float("inf"), -1])
def test_a_batch_that_is_none_has_no_time(batch):
    for ask in (block().forward_ms, block().backward_ms, Profile(blocks=(block(),)).step_ms):
        with pytest.raises(UsageError, match=f"a batch of {batch:g} has no time"):
            ask(batch)


def test_a_batch_of_zero_has_no_time():
    with pytest.raises(UsageError, match="batch of 0"):
        block().forward_ms(0)
