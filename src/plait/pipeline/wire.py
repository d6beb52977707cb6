"""What one stage says to its neighbours and hears from them.

Sends are never waited for, receives are posted before they are needed, every message says how long it is,
and whoever waits learns within a bound that a rank, near or far, has died or stalled. What crosses a link:

    downstream   note, activation 0, activation 1, ...     the note says what the step is, before any work
    upstream     gradient 0, gradient 1, ..., report       the report says how the step went
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plait.errors import PlaitError, WorkerError
from plait.pipeline.inbox import Inbox
from plait.pipeline.outbox import Outbox
from plait.watch import BEAT_S, Blame, Watch

T = TypeVar("T")
_SOON_S = 1.0
"""Within which threads that can end do."""
_STOPPED_S = 4 * BEAT_S
"""A wait for a beat that took so long was not the machine being slow: nothing ran."""


@dataclass(frozen=True)
class Neighbour:
    """Another stage: what comes from it, and what goes to it."""

    inbox: Inbox
    outbox: Outbox


class Wire:
    """The links of one stage to the stages before and after it."""

    def __init__(self, stage: Any, *, timeout_s: float) -> None:
        """``timeout_s`` is how long a rank may show no sign of life."""
        self.step = 0
        """How many steps have begun."""
        self.name: str | None = None
        """Of this pipeline: the first rank makes it up, the others are told."""
        self.changed = threading.Condition()
        """Notified of everything that someone may wait for."""
        group: Any = stage.group or dist.group.WORLD
        ranks = [stage.stage_index_to_group_rank[place] for place in range(stage.num_stages)]
        self._group = group
        self._ranks: list[int] = [dist.get_global_rank(group, rank) for rank in ranks]
        self._place: int = stage.stage_index
        self._neighbours: dict[int, Neighbour] = {}
        self.before = self.to(self._place - 1) if self._place else None
        self.after = self.to(self._place + 1) if self._place < len(ranks) - 1 else None
        self._watch: Watch | None = None
        if len(ranks) > 1:
            self._watch = Watch(
                group.get_group_store(),
                rank=self.rank,
                ranks=self._ranks,
                timeout_s=timeout_s,
                changed=self.changed,
            )
        self._failure: dict[str, str | None] | None = None

    @property
    def rank(self) -> int:
        """This stage's global rank."""
        return self._ranks[self._place]

    @property
    def sent_bytes(self) -> int:
        """What this stage has handed to the wire so far."""
        return sum(neighbour.outbox.sent_bytes for neighbour in self._neighbours.values())

    def to(self, place: int) -> Neighbour:
        """The link to another stage; those that are not next to this one get theirs when first asked for."""
        if place not in self._neighbours:
            peer = self._ranks[place]
            self._neighbours[place] = Neighbour(
                Inbox(peer, self._group, changed=self.changed, failed=self._lost),
                Outbox(peer, self._group, changed=self.changed, failed=self._lost),
            )
        return self._neighbours[place]

    def begin(self, timeout_s: float) -> None:
        """A step begins, in which a rank may show no sign of life for so long."""
        self.check()
        self.step += 1
        if self._watch is not None:
            self._watch.timeout_s = timeout_s

    def belong(self, name: str) -> None:
        """Take part in the pipeline of this name, and share complaints with its ranks."""
        if self._watch is not None:
            self._watch.share(name)
        if self.name not in (None, name):
            raise WorkerError(
                f"rank {self.rank} is in step {self.step} of one pipeline, and those before it in another's",
                setting="step",
                works="the steps of several pipelines in the same order on every rank",
            )
        self.name = name

    def says(self, doing: str) -> None:
        """Let the other ranks know what this one does."""
        if self._watch is not None:
            self._watch.doing = doing

    def wait(self, ready: Callable[[], T | None], for_what: str) -> T:
        """What ``ready`` gives, once it gives something; raises where a rank has died or stalled."""
        with self.changed:
            if (found := ready()) is not None:
                return found
            self.says(f"waiting for {for_what}")
            since_s = seen_s = time.monotonic()
            while (found := ready()) is None:
                self.check(since_s)
                self.changed.wait(BEAT_S)
                now_s = time.monotonic()
                if now_s - seen_s > _STOPPED_S:
                    since_s = now_s  # this process was stopped itself, so who is silent is not known
                seen_s = now_s
        return found

    def flush(self) -> None:
        """Wait until all sends are finished."""
        boxes = [neighbour.outbox for neighbour in self._neighbours.values()]
        self.wait(lambda: all(box.empty for box in boxes) or None, f"the sends of step {self.step} to leave")

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, and why, so that none waits for it."""
        if self._failure is not None:
            return
        error = root(error)
        who = f"rank {self.rank} raised {type(error).__name__} in step {self.step}"
        if isinstance(error, WorkerError):
            self._fail(error.what, error.setting, error.works)
        elif isinstance(error, PlaitError):
            self._fail(f"{who}: {error.what}", error.setting, error.works)
        else:
            said = (str(error).strip() or "nothing said").splitlines()[0]
            self._fail(f"{who}: {said}", "ranks", "see the log of that rank")

    def close(self) -> None:
        """End the threads: one that came back from gloo while Python shuts down would abort the process."""
        boxes = [box for each in self._neighbours.values() for box in (each.inbox, each.outbox)]
        threads = [box.thread for box in boxes]
        if self._watch is not None:
            self._watch.linger()
            self._watch.close()
            threads.append(self._watch.thread)
        for box in boxes:
            box.close()
        if not _ended(threads, _SOON_S) and boxes:
            # After a failure some wait for messages that will not come. A timeout makes gloo end all waits.
            with suppress(RuntimeError, ValueError):
                work: Any = dist.irecv(torch.empty(1), boxes[0].peer, group=self._group)
                work.wait(timedelta(milliseconds=1))
            _ended(threads, _SOON_S)

    def check(self, since_s: float | None = None) -> None:
        """Raise where this rank or another has failed, or, while waiting since a moment, one is silent."""
        if self._failure is None and self._watch is not None:
            if self._watch.complaint is not None:
                self._failure = json.loads(self._watch.complaint)
            elif since_s is not None and (blamed := self._watch.blame(since_s)) is not None:
                what = f"{blamed.what}; rank {self.rank} was {self._watch.doing}"
                self._fail(what, blamed.setting, blamed.works)
        if self._failure is not None:
            raise WorkerError(
                str(self._failure["what"]), setting=self._failure["setting"], works=self._failure["works"]
            )

    def _lost(self, peer: int, doing: str, error: BaseException) -> None:
        """A neighbour's thread has come to its end."""
        if isinstance(error, PlaitError):
            self._fail(error.what, error.setting, error.works)
        else:
            assert self._watch is not None, "there are neighbours"
            why = str(error).strip().splitlines()[0].split("] ", 1)[-1].split(". ")[0]
            if "Timed out" in why:
                last = self._watch.last_word(peer)
                gone = Blame(
                    what=f"rank {peer} took longer than the process group waits ({why}); it was {last}",
                    setting="timeout of init_process_group",
                    works="more than a stage computes at a time",
                )
            else:
                gone = self._watch.gone(peer, why)
            self._fail(f"{gone.what}; rank {self.rank} was {doing}", gone.setting, gone.works)
        with self.changed:
            self.changed.notify_all()

    def _fail(self, what: str, setting: str | None = None, works: str | None = None) -> None:
        said = json.dumps({"what": what, "setting": setting, "works": works})
        if self._watch is not None:
            said = self._watch.complain(said)
        self._failure = self._failure or json.loads(said)


def root(error: BaseException) -> BaseException:
    """What an error comes from, as torch's stages wrap what their modules raise; plait's own say enough."""
    seen = [error]
    while not isinstance(error, PlaitError) and error.__cause__ is not None and error.__cause__ not in seen:
        error = error.__cause__
        seen.append(error)
    return error


def _ended(threads: Sequence[threading.Thread], within_s: float) -> bool:
    until = time.monotonic() + within_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def wire_of(stage: Any, *, timeout_s: float) -> Wire:
    """The one wire of a stage, however many schedules drive it: messages match by their order alone."""
    found: Wire | None = getattr(stage, "plait_wire", None)
    if found is None:
        found = stage.plait_wire = Wire(stage, timeout_s=timeout_s)
        weakref.finalize(stage, found.close)
    return found
