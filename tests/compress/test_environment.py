"""What PLAIT_COMPRESS says."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.compress.adapt import Adaptation, Log
from plait.compress.compression import Compression
from plait.compress.environment import asked_for, parse
from plait.compress.settings import Settings
from plait.errors import FileError, UsageError


@pytest.mark.parametrize("text", ["", " ", "off", "OFF", "0", "no", "none", "false"])
def test_off(text):
    assert parse(text) is None
    assert asked_for({"PLAIT_COMPRESS": text}) is None


def test_unset_is_off(monkeypatch):
    assert asked_for({}) is None
    monkeypatch.setenv("PLAIT_COMPRESS", "3")
    assert asked_for() == Compression(bits=3)


@pytest.mark.parametrize(
    ("text", "compression"),
    [
        ("auto", Compression(bits="auto")),
        ("AUTO", Compression(bits="auto")),
        ("4", Compression(bits=4)),
        ("16", Compression(bits=16)),
        ("bits=3,error_feedback=true,seed=1", Compression(bits=3, error_feedback=True, seed=1)),
        ("auto, seed = 7", Compression(bits="auto", seed=7)),
        ("seed=7", Compression(seed=7)),
        ("2,error_feedback=off", Compression(bits=2, error_feedback=False)),
        ("2,error_feedback=none", Compression(bits=2)),
        ("4,decline=no,stochastic=false", Compression(bits=4, decline=False, stochastic=False)),
        ("4,gather_bits=8,feedback_bits=8", Compression(gather_bits=8, feedback_bits=8)),
        (
            "auto,adaptation.alpha=2,adaptation.warmup_steps=10",
            Compression(bits="auto", adaptation=Adaptation(alpha=2.0, warmup_steps=10)),
        ),
        (
            "4,settings.timeout_s=30,settings.algorithm=ring,settings.verify=yes",
            Compression(settings=Settings(timeout_s=30.0, algorithm="ring", verify=True)),
        ),
    ],
)
def test_what_works(text, compression):
    assert parse(text) == compression


def test_a_schedule_is_read_at_once(tmp_path):
    path, log = tmp_path / "bits.json", Log()
    with pytest.raises(FileError, match=r"PLAIT_COMPRESS='auto,replay=.*bits.json cannot be read"):
        parse(f"auto,replay={path}")
    log.save(path)
    assert parse(f"auto,replay={path}") == Compression(bits="auto", replay=log)


@pytest.mark.parametrize(
    ("text", "what", "works"),
    [
        ("atuo", "PLAIT_COMPRESS: bits cannot be 'atuo'", "bits=4 or bits=auto"),
        ("9", "PLAIT_COMPRESS='9': bits is 9", "1 to 8"),
        ("-1", "PLAIT_COMPRESS='-1': bits is -1", "1 to 8"),
        ("4.5", "bits cannot be '4.5'", "bits=4 or bits=auto"),
        ("true", "bits cannot be 'true'", "bits=4 or bits=auto"),
        ("bit=4", "there is no field 'bit'", "bits"),
        ("4,error-feedback=true", "there is no field 'error-feedback'", "error_feedback"),
        ("4,zzz=1", "there is no field 'zzz'", "bits, bucket, stochastic"),
        ("4,rules=x", "there is no field 'rules'", ""),
        ("4,settings=x", "there is no field 'settings'", ""),
        ("4,error_feedback=maybe", "error_feedback cannot be 'maybe'", "error_feedback=true"),
        ("4,feedback_bits=16", "feedback_bits cannot be '16'", "feedback_bits=8 or feedback_bits=32"),
        ("4,seed=-1", "seed is -1", "1"),
        ("4,adaptation.alpha=0", "alpha is 0.0", "1.0"),
        ("4,seed=1,seed=2", "gives seed twice", "once"),
        ("4,bits=3", "gives bits twice", "once"),
        ("4,", "'' is no field with its value", "bits=3,error_feedback=true"),
        ("4,seed", "'seed' is no field with its value", "bits=3,error_feedback=true"),
        ("4,seed=", "'seed=' is no field with its value", "bits=3,error_feedback=true"),
        ("=4", "'=4' is no field with its value", "bits=3,error_feedback=true"),
    ],
)
def test_what_does_not(text, what, works):
    with pytest.raises(UsageError) as raised:
        parse(text)
    assert what in raised.value.what
    assert works in raised.value.works
    assert raised.value.setting == "PLAIT_COMPRESS"


def test_the_error_names_where_the_value_came_from():
    with pytest.raises(UsageError, match=r"--bits: bits cannot be 'x'"):
        parse("x", setting="--bits")


WORDS = {
    "bits": st.one_of(st.integers(1, 8), st.sampled_from([16, 32, "auto"])),
    "bucket": st.sampled_from([64, 128, 1024]),
    "stochastic": st.booleans(),
    "smallest": st.integers(0, 10**6),
    "error_feedback": st.sampled_from([None, True, False]),
    "feedback_bits": st.sampled_from([8, 32]),
    "seed": st.integers(0, 2**60),
    "decline": st.booleans(),
}


@given(st.fixed_dictionaries({}, optional=WORDS))
def test_every_field_that_is_a_word_can_be_written_and_read(values):
    text = ",".join(f"{name}={value}" for name, value in values.items())
    assert (parse(text) or Compression()) == replace(Compression(), **values)


def test_no_field_of_a_word_is_forgotten():
    """A new field of Compression can be given at once, or it is known why it cannot."""
    with pytest.raises(UsageError) as raised:
        parse("4,zzz=1")
    listed = {name.split(".")[0] for name in raised.value.works.split(", ")}
    assert {field.name for field in fields(Compression)} - listed == {"rules", "codec"}
