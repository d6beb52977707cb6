"""Whether the other ranks of a job are alive, and why one of them gave up.

A rank that dies closes its connections, which its neighbours notice; one that is stopped, or whose cable is
cut, says nothing at all; and a rank far from it waits for another that waits too. So every rank counts up in
the store of the process group, twice a second, with a word on what it is doing. Who waits for a message looks
there: a count that stands still names the rank to blame, however far it is. A rank that has not begun to
count may be slow to build its model, and one that said farewell has done its part: neither is to blame. The
first to give up writes why, and all others raise the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

BEAT_S = 0.5
"""Between two counts."""
_ANSWER_S = 2.0
"""Within which a store that is there answers."""
_FAREWELL = json.dumps(None)
"""In the place of a count."""


class Watch:
    """The pulse of this rank, and what is known of the others'."""

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        changed: threading.Condition,
    ) -> None:
        """``timeout_s`` is how long the others may be silent; ``changed`` is notified of a complaint."""
        self.timeout_s = timeout_s
        self.doing = "starting"
        """What this rank does, for the others to read."""
        self.complaint: str | None = None
        """Why the first rank that gave up did so."""
        self._store = own_connection(store, timeout_s)
        self._rank, self._changed = rank, changed
        self._others = [other for other in ranks if other != rank]
        self._complaints: str | None = None
        """Where complaints are written, once what the ranks do has a name."""
        self._heard: dict[int, tuple[float, list[Any]]] = {}
        """By rank, when its pulse was last seen to change, and what it was: who, count, doing."""
        self._same_s: dict[int, float] = {}
        """By rank, since when it has been doing what it does."""
        self._round_s = time.monotonic()
        self._own, self._count = uuid.uuid4().hex[:8], 0
        self._count_up()  # from here on the others know that this rank has begun
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="plait-pulse", daemon=True)
        self.thread.start()

    def share(self, token: str) -> None:
        """Write and read complaints under a name that all ranks have been told."""
        self._complaints = f"plait/watch/{token}/complaint"

    def blame(self, since_s: float) -> str | None:
        """Who has been silent for too long; None while all are well.

        Silence counts from when this rank began to wait (``since_s``, of the monotonic clock): before, it may
        have been this rank that heard nothing, as after it was stopped itself.
        """
        now = time.monotonic()
        unheard_s = now - max(self._round_s, since_s)
        if unheard_s > self.timeout_s:
            keeper = "its agent" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            return (
                f"the store of the process group ({keeper} keeps it) has not answered for {unheard_s:.1f} s"
            )
        silent = {
            other: (now - at, pulse[-1])
            for other, (at, pulse) in list(self._heard.items())
            if now - max(at, since_s) - unheard_s > self.timeout_s
        }
        if not silent:
            return None
        if len(silent) > 1:
            whole = "ranks " + ", ".join(map(str, silent)) + " have"
            return f"{whole} shown no sign of life for {min(silent.values())[0]:.1f} s"
        ((other, (silent_s, doing)),) = silent.items()
        return f"rank {other} has shown no sign of life for {silent_s:.1f} s; then it was {doing}"

    def silent(self, for_s: float) -> list[int]:
        """The ranks that have not counted up for so long, while the store answers."""
        return [other for other, (at, _) in list(self._heard.items()) if self._round_s - at > for_s]

    def unchanged(self, for_s: float) -> dict[int, str]:
        """What each of the others does that has done the same for so long."""
        now = time.monotonic()
        return {
            other: str(pulse[-1])
            for other, (_, pulse) in list(self._heard.items())
            if now - self._same_s[other] > for_s
        }

    def last_word(self, rank: int) -> str:
        """What a rank was doing when it was last heard of."""
        return str(self._heard[rank][1][-1]) if rank in self._heard else "starting"

    def complain(self, why: str) -> str:
        """Tell all others why this rank gives up; returns the first complaint there was, maybe another's.

        Where the store does not answer in time (its keeper is gone, or this rank is cut off), the others will
        find out by themselves.
        """
        answers: list[str] = []
        if (key := self._complaints) is not None:

            def tell() -> None:
                with suppress(Exception):
                    answers.append(self._store.compare_set(key, "", why).decode())

            telling = threading.Thread(target=tell, name="plait-complaint", daemon=True)
            telling.start()
            telling.join(min(self.timeout_s, _ANSWER_S))
        self.complaint = self.complaint or (answers[0] if answers else why)
        return self.complaint

    def close(self) -> None:
        """Say farewell, and beat no longer."""
        self._ended.set()

    def _beat(self) -> None:
        try:
            while not self._ended.is_set():
                self._count_up()
                self._look()
                self._round_s = time.monotonic()
                self._ended.wait(BEAT_S)
            if self.complaint is None:
                self._store.set(_pulse(self._rank), _FAREWELL)
        except Exception:
            return  # the round is not counted; who waits will see that the store has gone

    def _count_up(self) -> None:
        self._count += 1
        self._store.set(_pulse(self._rank), json.dumps([self._own, self._count, self.doing]))

    def _look(self) -> None:
        for other in self._others:
            if not self._store.check([_pulse(other)]):
                continue
            pulse = json.loads(self._store.get(_pulse(other)))
            if pulse is None:
                self._heard.pop(other, None)
            elif other not in self._heard or pulse != self._heard[other][1]:
                if other not in self._heard or pulse[-1] != self._heard[other][1][-1]:
                    self._same_s[other] = time.monotonic()
                self._heard[other] = (time.monotonic(), pulse)
        key = self._complaints
        if key is not None and self.complaint is None and self._store.check([key]):
            found = self._store.get(key).decode()
            with self._changed:
                self.complaint = found
                self._changed.notify_all()


def _pulse(rank: int) -> str:
    """Where a rank counts: it is the process that lives or dies, whatever it takes part in."""
    return f"plait/watch/pulse/{rank}"


def own_connection(store: Any, timeout_s: float) -> Any:
    """A connection of its own: one thread's wait in a shared one would keep all others out."""
    try:
        own = store.clone()
    except (RuntimeError, NotImplementedError):  # not every kind of store can be cloned
        own = store
    own.set_timeout(timedelta(seconds=timeout_s))
    return own
