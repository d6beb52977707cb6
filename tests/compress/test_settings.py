import numpy as np
import pytest

from plait.compress.settings import Settings
from plait.errors import UsageError


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("algorithm", "butterfly"),
        ("chunk_bytes", 0),
        ("timeout_s", 0.0),
        ("timeout_s", "5"),
        ("timeout_s", None),
        ("timeout_s", True),
        ("leaders", "no"),
        ("inner_exact", "no"),
        ("shared_memory", 1),
        ("verify", None),
    ],
)
def test_settings_that_cannot_be(setting, value):
    with pytest.raises(UsageError) as caught:
        Settings(**{setting: value})
    assert caught.value.setting == setting
    assert caught.value.works


def test_numbers_of_numpy_are_numbers():
    assert Settings(timeout_s=np.float32(5)).timeout_s == 5
