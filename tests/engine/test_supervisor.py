"""How the engine divides its time among workers."""

import queue
import types

from made_runs import job

from plait.engine.channel import Caller, Said
from plait.engine.course import Attempt, Limits
from plait.engine.live import View
from plait.engine.record import Record
from plait.engine.sinks import Sinks
from plait.engine.supervisor import _MOST_HEARD, Supervisor
from plait.engine.task import Task


def test_a_worker_that_talks_without_end_does_not_keep_others_waiting():
    supervisor = Supervisor([], None, None, None, None, limits=Limits(), narrow=lambda task, left: None)
    supervisor._board = types.SimpleNamespace(inbox=queue.SimpleQueue())
    said = Said(caller=Caller(task="loud", attempt=0, rank=0), message={"hello": True})
    for _ in range(_MOST_HEARD + 5):
        supervisor._board.inbox.put(said)
    supervisor._hear()
    assert supervisor._board.inbox.qsize() == 5
    supervisor._hear()
    assert supervisor._board.inbox.empty()
    supervisor._hear()  # and waits for no more than a moment where nobody speaks


def test_the_end_of_a_task_is_said_after_the_last_step_of_all_its_jobs(tmp_path):
    sweep = Task(name="s-sweep", kind="search", strategy="spill", jobs=(job("s").to_json(),), devices=("a",))
    said = []
    with Record.create(tmp_path / "run", config={}, plan={}, jobs=[]) as record:
        heard = View(said.append), Sinks([], warn=said.append)
        supervisor = Supervisor(
            [sweep], None, record, *heard, limits=Limits(), narrow=lambda task, left: None
        )
        course = supervisor._courses["s-sweep"]
        attempt = Attempt(number=0, workers=[], started_s=0.0, moved_s=0.0)
        caller = Caller(task="s-sweep", attempt=0, rank=0)
        for step in range(2):
            told = {"job": "s-0", "step": step, "attempt": 0, "loss": 1.0}
            supervisor._take(course, attempt, Said(caller=caller, message={"row": told}))
        supervisor._end(course, "finished")
    assert said == ["s-0: step 1, loss 1", "s-0: step 2, loss 1", "s-sweep: finished"]
