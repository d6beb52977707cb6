"""What a worker says of its end."""

import pytest

from plait.engine.worker import _failed
from plait.errors import UsageError


class Teller:
    def tell(self, **message):
        self.message = message


def looked_up(batch):
    return batch["weights"]


def test_an_error_of_the_jobs_own_code_is_told_with_its_line_and_the_log(tmp_path):
    teller, log = Teller(), tmp_path / "rank0.log"
    with pytest.raises(KeyError) as caught:
        looked_up({})
    assert _failed(caught.value, teller, log) == 1
    line = looked_up.__code__.co_firstlineno + 1
    assert teller.message["error"]["text"] == f"KeyError: 'weights' (test_worker.py:{line})"
    assert teller.message["error"]["log"] == str(log)
    assert _failed(UsageError("too many", setting="jobs", works="one"), teller, log) == 2
    assert "log" not in teller.message["error"]
