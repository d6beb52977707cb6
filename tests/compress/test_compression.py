import pytest

from plait.compress.codec import Cast, Exact, Quantizer
from plait.compress.compression import Compression
from plait.compress.rules import Rule
from plait.errors import UsageError


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
    ],
)
def test_mistakes(given, setting, works):
    with pytest.raises(UsageError) as caught:
        Compression.of(given)
    assert caught.value.setting == setting
    assert works in str(caught.value)
