"""What workers hand on to the trainers of the strategies."""

import pickle
import subprocess
import sys
import threading

import pytest

from plait.burst import BurstPlan
from plait.engine import recording as recording_module
from plait.engine import telling
from plait.engine.task import SELECTION, Task
from plait.engine.training import _Pace, carry_out
from plait.pipeline.orders import kfkb
from plait.pipeline.plan import Forecast, PipelinePlan, Stage
from plait.spill import Choice, Selection, no_halving
from reference_jobs import BASE


class Teller:
    def wait_for_stop(self, over):
        return not over.wait()


class Recording:
    details = None


@pytest.mark.parametrize("kind", ["spill", "search"])
@pytest.mark.parametrize("save_every", [None, 5])
def test_jobs_that_take_turns_commit_as_often_as_was_asked(tmp_path, monkeypatch, kind, save_every):
    given = []

    def spilled(what, **settings):
        given.append(settings["commit_every"])
        raise KeyboardInterrupt  # as if it was asked to stop

    monkeypatch.setattr("plait.spill.fit", spilled)
    monkeypatch.setattr("plait.spill.search", spilled)
    sweep = Selection(BASE, {"optimizer.lr": Choice([0.1])}, no_halving(trials=1, most_steps=7))
    (tmp_path / SELECTION).write_bytes(pickle.dumps(sweep))
    task = Task(
        name="turns", kind=kind, strategy="spill", jobs=(BASE.to_json(),), devices=("node0/0",),
        save_every=save_every,
    )  # fmt: skip
    assert not carry_out(task, tmp_path, Teller(), Recording())
    assert given == [save_every]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_saving_needs_is_imported_before_the_first_step_where_it_is_saved(rank):
    """In a process of its own: here, others have imported it."""
    code = (
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from plait.engine import training\n"
        "found = []\n"
        "def train(*given):\n"
        "    found.append('torch.distributed.checkpoint' in sys.modules)\n"
        "    return SimpleNamespace(finished=False)\n"
        "training._train = train\n"
        "task = SimpleNamespace(kind='train', names=('a',), read_jobs=lambda: [None])\n"
        f"teller = SimpleNamespace(rank={rank}, doing=print)\n"
        "training.carry_out(task, None, teller, None)\n"
        "print(found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"[{rank == 0}]\n"


@pytest.mark.parametrize(("silence_s", "waits_s"), [(10.0, 30.0), (60.0, 60.0)])
@pytest.mark.parametrize("strategy", ["pipeline", "burst"])
def test_ranks_wait_for_each_other_as_long_as_the_run_does(
    tmp_path, monkeypatch, strategy, silence_s, waits_s
):
    given = []

    def trained(job, plan, **settings):
        given.append(settings["timeout_s"])
        raise KeyboardInterrupt

    monkeypatch.setattr("plait.pipeline.training.train", trained)
    monkeypatch.setattr("plait.burst.training.train", trained)
    plans = {
        "pipeline": PipelinePlan(
            stages=(Stage(first=0, end=1), Stage(first=1, end=2)),
            order=kfkb(2, 2, 1),
            global_batch=8,
            forecast=Forecast(step_ms=1.0, busy_ms=(1.0, 1.0), peak_bytes=(1, 1)),
        ),
        "burst": BurstPlan(blocks=("a",), widths=(2,), devices=2, batch=8),
    }
    task = Task(
        name="small", kind="train", strategy=strategy, jobs=(BASE.to_json(),), devices=("a", "b"),
        plan=plans[strategy].to_json(),
    )  # fmt: skip
    teller = telling.Teller(
        line=None, stop=threading.Event(), run=tmp_path, attempt=0, rank=1, silence_s=silence_s
    )
    recording = recording_module.Recording(task, tmp_path, attempt=0, rank=1)
    with pytest.raises(KeyboardInterrupt):
        carry_out(task, tmp_path, teller, recording)
    assert given == [waits_s]


def test_steps_of_jobs_that_take_turns_are_timed_from_one_to_the_next():
    times = iter([10.0, 10.1, 10.5, 12.5])
    pace = _Pace({"a": 8, "b": 4}, clock=lambda: next(times))
    assert pace.after("a", 3) == {}  # when it began, nobody knows
    assert pace.after("b", 1) == {}
    assert pace.after("a", 4) == {"seconds": 0.5, "samples_per_s": 16.0}
    assert pace.after("a", 6) == {"seconds": 1.0, "samples_per_s": 8.0}  # two steps
    assert pace.after("trial-0", 1) == {}
