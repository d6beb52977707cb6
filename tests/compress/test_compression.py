import pytest

from plait.compress.adapt import Decision, Log
from plait.compress.allocation import allocate
from plait.compress.codec import Cast, Exact, Quantizer
from plait.compress.compression import Compression
from plait.compress.observation import LayerError
from plait.compress.rules import Rule
from plait.compress.sparse import TopK
from plait.errors import FileError, UsageError


def test_codecs():
    config = Compression(bucket=64, stochastic=False)
    assert config.codec_at(3) == Quantizer(bits=3, bucket=64, stochastic=False)
    assert config.codec_at(16) == Cast("fp16")
    assert config.codec_at(32) == Exact()


@pytest.mark.parametrize(
    ("asked", "bits", "expected"),
    [
        (None, [4, 32], False),
        (None, [8, 3], True),
        (None, ["auto"], True),
        (None, [32, 16], False),
        (True, [8], True),
        (True, [32], False),
        (False, [2], False),
    ],
)
def test_when_there_is_error_feedback(asked, bits, expected):
    assert Compression(error_feedback=asked).feeds_back(bits) is expected


def test_facts_name_every_setting():
    one, other = Compression(bits=4), Compression(bits=3, rules=(Rule(pattern="a", bits=8),))
    differing = [name for name, fact in one.facts().items() if other.facts()[name] != fact]
    assert differing == ["bits", "rules"]


@pytest.mark.parametrize(
    ("given", "setting", "works"),
    [
        ({"bits": 9}, "bits", "1 to 8"),
        ({"bitz": 4}, "bitz", "bits"),
        ({"bucket": 0}, "bucket", "1"),
        ({"smallest": -1}, "smallest", "0"),
        ({"seed": -1}, "seed", "0"),
        ({"rules": [4]}, "rules", "Rule("),
        ({"feedback_bits": 16}, "feedback_bits", "8 or 32"),
        ({"gather_bits": "auto"}, "gather_bits", "8"),
        ({"gather_bits": 9}, "gather_bits", "8"),
        ({"rules": None}, "rules", "Rule("),
        ({"rules": "head"}, "rules", "Rule("),
        ({"rules": {}}, "rules", "Rule("),
        ({"codec": TopK}, "codec", "works: TopK()"),
        ({"codec": "topk"}, "codec", "TopK()"),
        ({"codec": TopK(), "bits": "auto"}, "codec", 'other than "auto"'),
        ({"stochastic": "no"}, "stochastic", "True or False"),
        ({"decline": 0}, "decline", "True or False"),
        ({"error_feedback": "no"}, "error_feedback", "True, False or None"),
        ({"adaptation": {"alpha": 2.0}}, "adaptation", "Adaptation("),
        ({"settings": {"timeout_s": 5}}, "settings", "Settings("),
        ({"replay": 5}, "replay", "bits.json"),
        ({"feedback_bits": "8"}, "feedback_bits", "8 or 32"),
    ],
)
def test_mistakes(given, setting, works):
    with pytest.raises(UsageError) as caught:
        Compression.of(given)
    assert caught.value.setting == setting
    assert works in str(caught.value)


def test_one_rule_needs_no_list():
    rule = Rule(pattern="head", bits=8)
    assert Compression(rules=rule) == Compression(rules=iter([rule])) == Compression(rules=(rule,))


def test_a_schedule_is_read_at_once_and_workers_compare_what_it_says(tmp_path):
    path = tmp_path / "bits.json"
    with pytest.raises(FileError, match=r"bits\.json cannot be read"):
        Compression(bits="auto", replay=path)
    layer = LayerError(
        name="a",
        count=8,
        widths=(4,),
        squared_error=(1.0,),
        payload_bytes=(12,),
        exact_bytes=32,
        squared_norm=2.0,
    )
    log = Log(decisions=(Decision(step=3, changed=True, why="", plan=allocate([layer])),))
    log.save(path)
    read, other = (Compression(bits="auto", replay=each) for each in (path, Log()))
    assert read.replay == log
    assert read.facts() == Compression(bits="auto", replay=log).facts()
    assert read.facts()["replay"] != other.facts()["replay"]
    assert "of 1 decisions" in read.facts()["replay"]
