"""How the engine divides its time among workers."""

import queue
import types

from plait.engine.channel import Caller, Said
from plait.engine.course import Limits
from plait.engine.supervisor import _MOST_HEARD, Supervisor


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
