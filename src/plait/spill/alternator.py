"""Many jobs take turns on many devices: the loop that hands out units, one at a time to each device.

A job has at most one unit under way, so each keeps plain sequential semantics whatever the others do. The
policy is a pure function of what can be seen (:mod:`plait.spill.policies`); this loop asks it whenever a
device has room for another unit, requests the unit's segments while the unit before it computes, and tells
the store what will be needed after that.

    device 0   | A F0 | B F0 | A F1 | B F1 | ...      computing
    store      | B F0's segments | A F1's | ...       on their way meanwhile

All of it happens in one thread. Whatever finishes elsewhere (a unit, a transfer, a commit) posts what is to
be done next to that thread.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from plait.errors import PlaitError, WorkerError
from plait.spill import units
from plait.spill.device import Call, Device, DeviceLost
from plait.spill.listener import Listener
from plait.spill.outcome import End
from plait.spill.outlook import Outlook
from plait.spill.policies import Policy
from plait.spill.sharing import Sharing, define
from plait.spill.slot import Slot, Turn
from plait.spill.store import Lease, Store
from plait.spill.task import Task
from plait.timeline import Timeline

MOST_DEATHS = 3
"""Devices that may die under a job, with no commit between, before the job is given up."""
COMMIT_SECONDS = 30.0
Result = TypeVar("Result")


class Alternator:
    """The loop, and the tasks that it runs; other threads reach it through :meth:`post`."""

    def __init__(
        self,
        *,
        store: Store,
        devices: Sequence[Device],
        revive: Callable[[Device], None],
        private_bytes: int,
        policy: Policy,
        listener: Listener,
        commit_every: int | None = None,
        prefetch: bool = True,
        timeline: Timeline | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._slots = [Slot(device=device) for device in devices]
        self._latest = self._slots[0]
        self._revive = revive
        self._listener = listener
        self._commit_every = commit_every
        self._prefetch = prefetch
        self._timeline = timeline
        self._clock = clock
        self._sharing = Sharing(store)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.tasks: dict[str, Task] = {}
        """All of them by name, ended ones too; for the loop's thread."""
        self.expects_more = False
        """Whether to wait for more tasks where all have ended."""
        self._halted = False
        self._outlook = Outlook(
            store=store,
            slots=self._slots,
            tasks=self.tasks,
            sharing=self._sharing,
            policy=policy,
            private_bytes=private_bytes,
        )

    def post(self, action: Callable[[], None]) -> None:
        """Have something done in the loop's thread; for any thread."""
        self._events.put(action)

    # What follows runs in the loop's thread.

    def run(self) -> None:
        """Hand out units until every task has ended."""
        self._fill()
        self._look_ahead()
        while self.expects_more or any(task.state != "ended" for task in self.tasks.values()):
            if self._halted:
                return
            self._events.get()()
            while not self._events.empty():
                self._events.get()()
            if not self._halted:
                self._fill()
                if self._events.empty():  # else a device may be waiting for what is to be done next
                    self._look_ahead()

    def _look_ahead(self) -> None:
        if self._prefetch:
            self._outlook.expect()

    def add(self, task: Task) -> None:
        """Take in a task whose segments are defined."""
        assert task.name not in self.tasks, f"there is a task {task.name!r} already"
        task.committed_at = self._clock()
        self.tasks[task.name] = task
        if task.state == "waiting" and task.rests:  # it goes on from a commit, and may be done
            self._settle(task)

    def halt(self) -> None:
        """End the loop at once, whatever is under way."""
        self._halted, self.expects_more = True, False

    def hold(self, task: Task, action: Callable[[Callable[[], None]], Result]) -> Future[Result]:
        """Do something with a task when it is between two steps; it waits until it is told to go on."""
        future: Future[Result] = Future()

        def act() -> None:
            task.state = "held"
            try:
                future.set_result(action(lambda: self.post(partial(self._go_on, task))))
            except BaseException as error:
                future.set_exception(error)
                self._go_on(task)

        task.holds.append(act)
        if task.state == "waiting":
            self._settle(task)
        return future

    def _go_on(self, task: Task) -> None:
        task.state = "waiting"
        self._settle(task)

    def leave(self, task: Task, end: End) -> None:
        """End a task: as soon as it has no unit under way, or, ``interrupted``, when its step is done."""
        if task.state == "ended":
            return
        if task.leaving is None or end == "stopped":
            task.leaving = end
        if task.state == "waiting":
            self._settle(task)
        elif end == "stopped" or task.rests:
            self._withdraw(task)

    def _fill(self) -> None:
        """Give every device what it computes now and next."""
        # Of those that are idle, the one that was busy last: it knows the task that it has just worked for.
        slots = sorted(self._slots, key=lambda slot: (slot.running is not None, slot is not self._latest))
        while not all(self._offer(slot) for slot in slots):
            pass  # a task failed, and no event will tell of it: all devices choose anew

    def _offer(self, slot: Slot) -> bool:
        """Give a device what it computes now and next; False where a task failed at that, and has ended."""
        self._start(slot)
        ready = slot.next is None and (self._prefetch or slot.running is None)
        task = self._outlook.choose(slot) if ready else None
        return task is None or self._request(slot, task)

    # A turn: segments are requested, granted, computed with, released.

    def _request(self, slot: Slot, task: Task) -> bool:
        """Ask for what a task's next unit needs; False where that failed, and the task with it."""
        unit = task.unit
        assert unit is not None, f"{task.name} is done and was chosen"
        try:
            self._sharing.begin(task)
            for segment in units.scratch_for(task.description, task.plan, unit, task.head):
                self._store.define(segment)
            granted = self._store.request(task.requests())
        except PlaitError as error:
            self._fail(task, error)
            return False
        turn = Turn(task=task, unit=unit)
        task.state, slot.next = "requested", turn
        granted.add_done_callback(lambda done: self.post(partial(self._granted, slot, turn, done)))
        return True

    def _granted(self, slot: Slot, turn: Turn, done: Future[Lease]) -> None:
        if (error := done.exception()) is not None:
            if slot.next is turn:
                slot.next = None
            turn.task.state = "waiting"
            self._fail(turn.task, error)
            return
        turn.lease = done.result()
        if turn.withdrawn:
            turn.lease.release()
            turn.task.state = "waiting"
            self._settle(turn.task)

    def _withdraw(self, task: Task) -> None:
        """Take back a turn that has not begun; the task settles when the store has answered."""
        for slot in self._slots:
            if slot.next is not None and slot.next.task is task:
                turn, slot.next = slot.next, None
                turn.withdrawn = True
                if turn.lease is not None:
                    turn.lease.release()
                    task.state = "waiting"
                    self._settle(task)

    def _start(self, slot: Slot) -> None:
        """Compute the next turn, if its segments are there and nothing is being computed."""
        turn = slot.next
        if slot.running is not None or turn is None or turn.lease is None or turn.withdrawn:
            return
        slot.running, slot.next = turn, None
        task, device = turn.task, slot.device
        task.state, task.last_device = "running", slot.index
        if task.name not in slot.adopted:
            slot.adopted[task.name] = device.call(
                "adopt", task.job, task.plan, task.description, weights=task.weights
            )
        call = device.call("perform", turn.unit, turn.lease.places, task.head, turn.lease.extents)
        call.add_done_callback(lambda done: self.post(partial(self._done, slot, turn, call)))
        self._listener.moved(task, f"device {slot.index}")

    def _done(self, slot: Slot, turn: Turn, call: Call) -> None:
        task = turn.task
        assert turn.lease is not None, "what was computed had its segments"
        turn.lease.release()
        slot.running, self._latest, task.state = None, slot, "waiting"
        error = slot.adopted[task.name].exception() or call.exception()
        if isinstance(error, DeviceLost):
            self._lost(slot, task, error)
            return
        if task.returns:
            self._settle(task)
            return
        before = task.head
        if error is None:
            report: units.Report = call.result()
            try:
                task.head = units.advance(
                    task.description, task.plan, before, turn.unit, report, device=slot.index
                )
            except PlaitError as refused:
                error = refused
        if error is not None:
            self._fail(task, error)
            return
        for key in units.drops(task.description, task.plan, turn.unit, before, task.head):
            self._store.drop(key)
        self._account(slot, turn, call)
        self._settle(task)

    def _account(self, slot: Slot, turn: Turn, call: Call) -> None:
        task, unit = turn.task, turn.unit
        seconds = (call.end_ns - call.start_ns) / 1e9
        task.busy_seconds += seconds
        task.took(unit, seconds)
        if self._timeline is not None:
            name = f"{task.name} {unit.phase} {unit.shard}"
            track, when = f"device {slot.index}", (call.start_ns, call.end_ns)
            self._timeline.record(track, name, *when, job=task.name, step=unit.step)

    # Between units.

    def _settle(self, task: Task) -> None:
        """A task has nothing under way: end it, commit it, or let it wait for its turn."""
        assert task.state == "waiting", f"{task.name} is {task.state}"
        self._listener.moved(task, "waiting")
        if task.returns and task.leaving not in ("stopped", "failed"):
            self._go_back(task)
            if task.end is not None:
                return
        try:
            shares = self._sharing.commit(task, lambda done: self.post(partial(self._shared, task, done)))
        except PlaitError as error:
            self._fail(task, error)
            return
        if shares:
            task.state = "held"
            return
        if task.rests and task.holds and task.leaving is None:
            task.holds.pop(0)()
            return
        if task.rests and task.leaving is None:
            decision = self._listener.stepped(task)
            task.paused = task.paused or decision == "pause"
            task.leaving = "stopped" if decision == "stop" else None
        if task.leaving is not None and (task.leaving != "interrupted" or task.head.stage == "create"):
            self._end(task, task.leaving)
        elif task.rests and (task.unit is None or task.leaving is not None):
            self._commit(task, last=True)
        elif task.rests and not task.commits and self._is_due(task):
            self._commit(task, last=False)

    def _shared(self, task: Task, done: Future[None]) -> None:
        task.state = "waiting"
        if (error := done.exception()) is not None:
            self._fail(task, error)
            return
        self._sharing.made(task)
        self._settle(task)

    def _is_due(self, task: Task) -> bool:
        since = task.head.step - task.committed_step
        if self._commit_every is not None:
            return since >= self._commit_every
        return since > 0 and self._clock() - task.committed_at >= COMMIT_SECONDS

    def _commit(self, task: Task, *, last: bool) -> None:
        """Make the task's state survive; only the last commit keeps it waiting."""
        if last:
            task.state = "committing"
            self._listener.moved(task, "committing")
        if task.commits:  # the last one follows when this is done
            return
        task.commits, task.committed_at, step = True, self._clock(), task.head.step
        try:
            committed = self._store.commit(task.name, task.note)
        except PlaitError as error:
            task.commits = False
            self._fail(task, error)
            return
        committed.add_done_callback(lambda done: self.post(partial(self._committed, task, step, done)))

    def _committed(self, task: Task, step: int, done: Future[None]) -> None:
        task.commits = False
        if (error := done.exception()) is not None:
            self._fail(task, error)
            return
        task.committed_step, task.deaths = step, 0
        if task.state == "committing":
            task.state = "waiting"
            if step == task.head.step:
                self._end(task, task.leaving or "finished")
            else:
                self._commit(task, last=True)

    def _fail(self, task: Task, error: BaseException) -> None:
        """Leave a task out from now on, as soon as it has nothing under way; its last commit stays."""
        task.fail(error)
        task.leaving = "failed"
        if task.state == "committing":
            task.state = "waiting"
        if task.state == "waiting":
            self._end(task, "failed")
        else:
            self._withdraw(task)

    def _end(self, task: Task, end: End) -> None:
        self._let_go(task)
        try:
            self._sharing.abandon(task)
            if end == "stopped":
                self._store.drop_group(task.name)
            elif end == "failed" or not task.rests:
                self._store.revert(task.name)
        except PlaitError as error:  # its files cannot be read or written; others may have better ones
            if task.error is None:
                task.fail(error)
            end = "failed"
        task.state, task.end = "ended", end
        self._listener.moved(task, end)
        self._listener.ended(task)

    # A device died.

    def _lost(self, slot: Slot, task: Task, error: DeviceLost) -> None:
        """Start the device anew; what it had a hand in goes back to its last commit."""
        task.deaths += 1
        self._listener.noted(f"{error.what}; it was started again")
        slot.adopted.clear()
        self._revive(slot.device)
        for other in self.tasks.values():
            if other is task or (other.state != "ended" and other.tied == slot.index):
                other.returns = True
                if other.state == "waiting":
                    self._settle(other)
                else:
                    self._withdraw(other)

    def _go_back(self, task: Task) -> None:
        """Take a task that has nothing under way back to its last commit, or to its beginning."""
        task.returns = False
        self._let_go(task)
        if task.deaths >= MOST_DEATHS:
            what = f"{task.deaths} devices died while they computed for job {task.name!r}"
            self._fail(task, WorkerError(what, setting="memory", works="more, if the system ran out of it"))
            return
        try:
            self._store.revert(task.name)  # after a commit that is under way
            self._sharing.abandon(task)
            note = self._store.committed(task.name)
            if note is None:
                define(self._store, task.description, task.plan)
        except PlaitError as error:
            self._fail(task, error)
            return
        task.head = units.Head(job=task.name) if note is None else units.Head.from_json(note["head"])
        self._listener.noted(f"job {task.name} went back to step {task.head.step}")

    def _let_go(self, task: Task) -> None:
        """Have all devices forget a task."""
        for slot in self._slots:
            if task.name in slot.adopted:
                del slot.adopted[task.name]
                slot.device.call("forget", task.job)
