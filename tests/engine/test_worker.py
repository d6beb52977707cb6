"""What a worker says of its end."""

import signal

import pytest

from plait.engine.task import Task
from plait.engine.worker import SILENCE, _failed, main
from plait.errors import UsageError
from reference_jobs import BASE


class Teller:
    def tell(self, **message):
        self.message = message


@pytest.fixture
def _signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
def test_how_long_others_may_be_silent_reaches_whoever_trains(tmp_path, monkeypatch):
    folder, heard = tmp_path / "tasks" / "small", []
    folder.mkdir(parents=True)
    Task(name="small", kind="train", strategy="data", jobs=(BASE.to_json(),), devices=("node0/0",)).save(
        folder
    )
    monkeypatch.setattr(
        "plait.engine.training.carry_out",
        lambda task, folder, teller, recording: heard.append(teller) or True,
    )
    monkeypatch.setattr("plait.engine.worker.keep_freed", lambda: None)  # it would hold for all that follows
    monkeypatch.setenv(SILENCE, "45")
    assert main([str(folder)]) == 0
    assert [teller.silence_s for teller in heard] == [45.0]


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
