"""Sinks: what they are given, what is refused, and that none of them ends a run."""

import importlib.util
import math
import re
import threading

import pytest
from made_runs import row

from plait.engine.sinks import MLflow, Sinks, TensorBoard, WeightsAndBiases, chosen, numbers
from plait.errors import UsageError


class Kept:
    """A sink of a user's own."""

    def __init__(self, fails_at=None):
        self.calls = []
        self._fails_at = fails_at

    def open(self, run, config):
        self.calls.append(("open", run, dict(config)))

    def scalar(self, job, name, value, step):
        if step == self._fails_at:
            raise ConnectionError("the tracker\nis away")
        self.calls.append((job, name, value, step))

    def close(self):
        self.calls.append(("close",))


def test_the_numbers_of_a_row():
    given = {
        **row("gpt", 3, loss=0.5, at_s=1.0),
        "device": "a/0",
        "skipped": True,
        "norm": None,
        "bits": 4,
        "evaluation": {"loss": math.inf, "accuracy": 0.5, "note": "x"},
    }
    assert numbers(given) == {
        "loss": 0.5,
        "seconds": 0.1,
        "samples_per_s": 160.0,
        "bits": 4.0,
        "evaluation/loss": math.inf,
        "evaluation/accuracy": 0.5,
    }


def test_a_loss_of_null_was_not_finite():
    assert math.isnan(numbers({"job": "a", "step": 0, "loss": None})["loss"])
    assert math.isnan(numbers({"evaluation": {"loss": None}})["evaluation/loss"])


def test_a_sink_of_ones_own_gets_every_number():
    kept, warned = Kept(), []
    sinks = Sinks(chosen([kept], "nowhere"), warn=warned.append)
    sinks.open("first", {"strategy": "auto"})
    sinks.row({"job": "gpt", "step": 0, "attempt": 0, "time": 1.0, "loss": 2.0, "bits": 4})
    sinks.close()
    assert kept.calls == [
        ("open", "first", {"strategy": "auto"}),
        ("gpt", "loss", 2.0, 0),
        ("gpt", "bits", 4.0, 0),
        ("close",),
    ]
    assert warned == []


def test_a_sink_that_fails_is_left_out_with_a_warning_and_the_others_go_on():
    broken, whole, warned = Kept(fails_at=1), Kept(), []
    sinks = Sinks([broken, whole], warn=warned.append)
    sinks.open("first", {})
    for step in range(4):
        sinks.row({"job": "gpt", "step": step, "loss": 1.0})
    sinks.close()
    assert warned == ["Kept gets no more numbers of this run: ConnectionError: the tracker is away"]
    assert [call[-1] for call in broken.calls[1:]] == [0, "close"]
    assert [call[-1] for call in whole.calls[1:-1]] == [0, 1, 2, 3]


class Stuck(Kept):
    """A tracker that does not answer."""

    def __init__(self):
        super().__init__()
        self.free = threading.Event()

    def scalar(self, job, name, value, step):
        self.free.wait(60)


def test_a_sink_that_does_not_answer_makes_nobody_wait():
    stuck, whole, warned = Stuck(), Kept(), []
    sinks = Sinks([stuck, whole], warn=warned.append)
    sinks.open("first", {})
    for step in range(3):
        sinks.row({"job": "gpt", "step": step, "loss": 1.0})
    sinks.close(within_s=0.2)
    stuck.free.set()
    assert whole.calls[-1] == ("close",)
    assert len(warned) == 1
    assert re.fullmatch(
        r"Stuck gets no more numbers of this run: it has not taken \d rows in time", warned[0]
    )


def test_a_sink_that_falls_behind_is_left_out():
    stuck, warned = Stuck(), []
    sinks = Sinks([stuck], warn=warned.append)
    sinks.open("first", {})
    for step in range(10_002):  # one is with the sink
        sinks.row({"job": "gpt", "step": step, "loss": 1.0})
    sinks.row({"job": "gpt", "step": 10_002, "loss": 1.0})
    sinks.close()
    stuck.free.set()
    assert warned == ["Stuck gets no more numbers of this run: it is 10000 rows behind"]


def test_one_that_was_never_opened_is_closed_for_nothing():
    kept = Kept()
    Sinks([kept], warn=pytest.fail).close()
    assert kept.calls == []


def test_a_sink_that_cannot_be_opened():
    class Closed(Kept):
        def open(self, run, config):
            raise PermissionError("no account")

    warned = []
    sinks = Sinks([Closed()], warn=warned.append)
    sinks.open("first", {})
    sinks.row({"job": "gpt", "step": 0, "loss": 1.0})
    sinks.close()
    assert warned == ["Closed gets no more numbers of this run: PermissionError: no account"]


def test_tensorboard_has_a_folder_for_each_job(tmp_path):
    (sink,) = chosen(["tensorboard"], tmp_path / "tensorboard")
    assert isinstance(sink, TensorBoard)
    warned = []
    sinks = Sinks([sink], warn=warned.append)
    sinks.open("first", {})
    assert not (tmp_path / "tensorboard").exists()
    for name in ("gpt", "a/b"):
        sinks.row(row(name, 0))
    sinks.close()
    assert warned == []
    assert sorted(folder.name for folder in (tmp_path / "tensorboard").iterdir()) == ["a%2Fb", "gpt"]
    (file,) = (tmp_path / "tensorboard" / "gpt").iterdir()
    for tag in (b"loss", b"samples_per_s", b"seconds"):
        assert tag in file.read_bytes()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tensorbord"], r"no sink 'tensorbord'.*tensorboard, wandb, mlflow"),
        ([object()], r"is no sink.*open, scalar and close"),
    ],
)
def test_sinks_that_there_are_not(names, message):
    with pytest.raises(UsageError, match=message):
        chosen(names, "nowhere")


@pytest.mark.parametrize(
    ("name", "message"), [("wandb", "pip install wandb"), ("mlflow", "pip install mlflow-skinny")]
)
def test_a_package_that_is_not_installed_is_named_before_the_run(name, message):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(UsageError, match=rf"package {name} is not installed.*{message}"):
        chosen([name], "nowhere")


def test_weights_and_biases_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    warned = []
    sinks = Sinks([WeightsAndBiases("tests")], warn=warned.append)
    sinks.open("first", {"strategy": "auto"})
    for step in range(2):
        sinks.row(row("gpt", step))
    sinks.close()
    assert warned == []
    (kept,) = tmp_path.rglob("*.wandb")
    assert b"gpt/loss" in kept.read_bytes()


def test_mlflow_in_a_file(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    warned = []
    sinks = Sinks([MLflow("tests", uri=uri)], warn=warned.append)
    sinks.open("first", {"strategy": "auto"})
    for step in range(2):
        sinks.row(row("gpt", step))
    sinks.close()
    assert warned == []
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "gpt/loss")] == [
        (0, 4.0),
        (1, 2.0),
    ]
