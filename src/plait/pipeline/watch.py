"""Whether the other ranks of a pipeline are alive, and why one of them gave up.

A rank that dies closes its connections, which its neighbours notice; one that is stopped, or whose cable is
cut, says nothing at all; and a stage far from it waits for a neighbour that waits too. So every rank counts
up in the store of the process group, about once a second, with a word on what it is doing. Who waits for a
message looks there: a count that stands still names the rank to blame, wherever it sits in the pipeline. The
first to give up writes why, and all others raise the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

BEAT_S = 0.5
"""Between two counts."""
_ANSWER_S = 2.0
"""Within which a store that is there answers."""


class Watch:
    """The pulse of this rank, and what is known of the others'."""

    def __init__(
        self,
        store: Any,
        *,
        token: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        changed: threading.Condition,
    ) -> None:
        """``token`` tells this pipeline from others in the store; ``changed`` is notified of a complaint."""
        self.timeout_s = timeout_s
        self.doing = "starting"
        """What this rank does, for the others to read."""
        self.complaint: str | None = None
        """Why the first rank that gave up did so."""
        self._store = _own_connection(store, timeout_s)
        self._prefix, self._rank, self._changed = f"plait/pipeline/{token}", rank, changed
        self._others = [other for other in ranks if other != rank]
        now = time.monotonic()
        self._heard = dict.fromkeys(self._others, (now, -1, "starting"))
        self._round_s = now
        self._ended = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="plait-pulse", daemon=True)
        self.thread.start()

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
            other: (now - at, doing)
            for other, (at, _, doing) in self._heard.items()
            if now - max(at, since_s) - unheard_s > self.timeout_s
        }
        if not silent:
            return None
        if len(silent) > 1:
            whole = "ranks " + ", ".join(map(str, silent)) + " have"
            return f"{whole} shown no sign of life for {min(silent.values())[0]:.1f} s"
        ((other, (silent_s, doing)),) = silent.items()
        return f"rank {other} has shown no sign of life for {silent_s:.1f} s; then it was {doing}"

    def last_word(self, rank: int) -> str:
        """What a rank was doing when it was last heard of."""
        return self._heard[rank][2] if rank in self._heard else "unknown"

    def complain(self, why: str) -> str:
        """Tell all others why this rank gives up; returns the first complaint there was, maybe another's.

        Where the store does not answer in time (its keeper is gone, or this rank is cut off), the others will
        find out by themselves.
        """
        answers: list[str] = []

        def tell() -> None:
            with suppress(Exception):
                answers.append(self._store.compare_set(f"{self._prefix}/complaint", "", why).decode())

        telling = threading.Thread(target=tell, name="plait-complaint", daemon=True)
        telling.start()
        telling.join(min(self.timeout_s, _ANSWER_S))
        self.complaint = self.complaint or (answers[0] if answers else why)
        return self.complaint

    def close(self) -> None:
        """Beat no longer."""
        self._ended.set()

    def _beat(self) -> None:
        count = 0
        while not self._ended.is_set():
            count += 1
            try:
                self._store.set(f"{self._prefix}/{self._rank}", json.dumps([count, self.doing]))
                self._look()
            except Exception:
                return  # the round is not counted; who waits will see that the store has gone
            self._round_s = time.monotonic()
            self._ended.wait(BEAT_S)

    def _look(self) -> None:
        for other in self._others:
            key = f"{self._prefix}/{other}"
            if not self._store.check([key]):
                continue
            count, doing = json.loads(self._store.get(key))
            if count != self._heard[other][1]:
                self._heard[other] = (time.monotonic(), count, doing)
        if self.complaint is None and self._store.check([f"{self._prefix}/complaint"]):
            found = self._store.get(f"{self._prefix}/complaint").decode()
            with self._changed:
                self.complaint = found
                self._changed.notify_all()


def _own_connection(store: Any, timeout_s: float) -> Any:
    """A connection of its own: one thread's wait in a shared one would keep all others out."""
    try:
        own = store.clone()
    except (RuntimeError, NotImplementedError):  # not every kind of store can be cloned
        own = store
    own.set_timeout(timedelta(seconds=timeout_s))
    return own
