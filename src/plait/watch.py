"""Whether the other ranks of a job are alive, and why one of them gave up.

A rank that dies closes its connections, which its neighbours notice; one that is stopped, or whose cable is
cut, says nothing at all; and a rank far from it waits for another that waits too. So every rank counts up in
the store of the process group, twice a second, with a word on what it is doing. Who waits for a message looks
there: a count that stands still names the rank to blame, however far it is. A rank that has not begun to
count may be slow to build its model, and one that said farewell may have done its part: who waits for just
that rank is told that it has left. The first to give up writes why, and all others raise the same. Where
rank 0 keeps the store, it stays until the others have read that.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

BEAT_S = 0.5
"""Between two counts."""
_ANSWER_S = 2.0
"""Within which a store that is there answers."""
_DEAD_S = 4 * BEAT_S
"""What was under way when a rank left, or the store went, has come by then."""
_LINGER_S = 3.0
"""The longest that the keeper of the store stays for the others to read why it gave up."""
WAITING = "waiting "
"""How the word of a rank that waits begins."""
_SEE_LOG = "see the log of that rank"


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Who keeps this rank waiting, and what could be done about it."""

    what: str
    setting: str = "ranks"
    works: str = _SEE_LOG


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
        party: str | None = None,
    ) -> None:
        """``timeout_s`` is how long the others may be silent; ``changed`` is notified of a complaint.

        ``party`` is what the ranks take part in, where all can name it from the start: the pulse is then that
        of this rank in it, and complaints are shared at once. Otherwise the pulse is the process's.
        """
        self.timeout_s = timeout_s
        self.complaint: str | None = None
        """Why the first rank that gave up did so."""
        self.alike: dict[str, Any] = {}
        """What must be the same on all ranks whose first entry is the same, as the number of a step."""
        self.left: dict[int, tuple[float, str]] = {}
        """By rank that said farewell, when that was seen, and what it had been doing."""
        self.rounds = 0
        """How often this rank has counted up and looked at all others."""
        self.lost_s: float | None = None
        """Since when the store is gone."""
        self.doing = "starting"
        self._store = own_connection(store, timeout_s)
        self._rank, self._changed, self._party = rank, changed, party
        self._others = [other for other in ranks if other != rank]
        self._complaints: str | None = None
        """Where complaints are written, once what the ranks do has a name."""
        if party is not None:
            self.share(party)
        self._heard: dict[int, tuple[float, dict[str, Any]]] = {}
        """By rank, when its pulse was last seen to change, and what it was."""
        self._same_s: dict[int, float] = {}
        """By rank, since when it has been doing what it does."""
        self._round_s = time.monotonic()
        self._own, self._count = uuid.uuid4().hex[:8], 0
        pulses = {other: self._read(other) for other in self._others}
        self._past = {pulse["who"] for pulse in pulses.values() if pulse is not None and "left" in pulse}
        """Who had said farewell before this rank began: that was another party of theirs."""
        self._count_up()  # from here on the others know that this rank has begun
        self._ended = threading.Event()
        self.thread = _Pulse(self)
        self.thread.start()

    @property
    def doing(self) -> str:
        """What this rank does, for the others to read."""
        return self._doing

    @doing.setter
    def doing(self, doing: str) -> None:
        self._doing, self._worker = doing, threading.get_ident()

    @property
    def keeper(self) -> str:
        """Who keeps the store."""
        return "the agent of torchrun" if _agent() else "rank 0"

    def share(self, token: str) -> None:
        """Write and read complaints under a name that all ranks have been told."""
        self._complaints = f"plait/watch/{token}/complaint"

    def blame(self, since_s: float, on: int | None = None) -> Blame | None:
        """Who has been silent for too long, or is gone; None while all are well.

        Silence counts from when this rank began to wait (``since_s``, of the monotonic clock): before, it may
        have been this rank that heard nothing, as after it was stopped itself. ``on`` is the one rank that it
        waits for, if it is one.
        """
        now = time.monotonic()
        if on in self.left and now - max(self.left[on][0], since_s) > BEAT_S:
            return self.parted(on)
        if self.lost_s is not None:
            long = now - max(self.lost_s, since_s) > min(_DEAD_S, self.timeout_s)
            return self.orphaned() if long else None
        unheard_s = now - max(self._round_s, since_s)
        works = f"timeout_s above {self.timeout_s:g}, if ranks are silent for so long when all is well"
        if unheard_s > self.timeout_s:
            what = f"the store of the process group ({self.keeper} keeps it) has not answered"
            return Blame(what=f"{what} for {unheard_s:.1f} s", setting="timeout_s", works=works)
        silent = {
            other: (now - at, pulse["doing"])
            for other, (at, pulse) in list(self._heard.items())
            if now - max(at, since_s) - unheard_s > self.timeout_s
        }
        if not silent:
            return None
        if len(silent) > 1:
            whole = "ranks " + ", ".join(map(str, silent)) + " have"
            what = f"{whole} shown no sign of life for {min(silent.values())[0]:.1f} s"
        else:
            ((other, (silent_s, doing)),) = silent.items()
            what = f"rank {other} has shown no sign of life for {silent_s:.1f} s"
            what += f"; when last heard of it was {doing}"
        return Blame(what=what, setting="timeout_s", works=works)

    def parted(self, rank: int) -> Blame:
        """That a rank said farewell, though it was needed."""
        works = f"the same calls on every rank, or {_SEE_LOG}"
        return Blame(what=f"rank {rank} has left; before, it was {self.left[rank][1]}", works=works)

    def orphaned(self, why: str = "") -> Blame:
        """That the store is gone, and with it who keeps it; what that was, if it said farewell before."""
        if not _agent() and 0 in self.left:
            return self.parted(0)
        because = f" ({why})" if why else ""
        return Blame(what=f"{self.keeper}, which keeps the store of the process group, is gone{because}")

    def gone(self, peer: int | None, why: str) -> Blame:
        """Who is missing where a connection broke: of a collective (no peer) gloo does not tell; pulses do.

        A peer may have ended because of another rank. Its complaint says so then, unless the store is gone.
        """
        until_s, rounds = time.monotonic() + _DEAD_S + 2 * BEAT_S, self.rounds + 2
        while self.complaint is None and not self._ended.is_set() and time.monotonic() < until_s:
            if self.lost_s is not None:
                return self.orphaned(why)
            silent = self.silent(_DEAD_S)
            if silent and peer is None:
                numbers = ", ".join(map(str, silent))
                are = f"rank {numbers} is" if len(silent) == 1 else f"ranks {numbers} are"
                return Blame(what=f"{are} gone ({why})")
            if peer is not None and self.rounds >= rounds:
                break
            time.sleep(BEAT_S / 5)
        if peer is None:
            # Who was first to leave is the cause of what others have left for.
            first = min(self.left, key=lambda rank: self.left[rank][0], default=None)
            return Blame(what=f"a rank is gone ({why})") if first is None else self.parted(first)
        if peer in self.left:
            return self.parted(peer)
        return Blame(what=f"rank {peer} is gone ({why}); when last heard of it was {self.last_word(peer)}")

    def silent(self, for_s: float) -> list[int]:
        """The ranks that have not counted up for so long, while the store answers."""
        return [other for other, (at, _) in list(self._heard.items()) if self._round_s - at > for_s]

    def unchanged(self, for_s: float) -> dict[int, str]:
        """What each of the others does that has done the same for so long."""
        now = time.monotonic()
        return {
            other: str(pulse["doing"])
            for other, (_, pulse) in list(self._heard.items())
            if now - self._same_s[other] > for_s
        }

    def unlike(self) -> tuple[int, dict[str, Any]] | None:
        """A rank that has something else where all must have the same, and what it has."""
        mine = list(self.alike.items())
        for other, (_, pulse) in list(self._heard.items()):
            theirs = list(pulse["alike"].items())
            if mine[:1] == theirs[:1] and mine != theirs:
                return other, pulse["alike"]
        return None

    def last_word(self, rank: int) -> str:
        """What a rank was doing when it was last heard of."""
        if rank in self.left:
            return f"leaving, after it was {self.left[rank][1]}"
        return str(self._heard[rank][1]["doing"]) if rank in self._heard else "starting"

    def complain(self, why: str) -> str:
        """Tell all others why this rank gives up; returns the first complaint there was, maybe another's.

        Where the store does not answer in time (its keeper is gone, or this rank is cut off), the others will
        find out by themselves.
        """
        answers: list[str] = []
        if (key := self._complaints) is not None and self.lost_s is None:

            def tell() -> None:
                with suppress(Exception):
                    answers.append(self._store.compare_set(key, "", why).decode())

            telling = threading.Thread(target=tell, name="plait-complaint", daemon=True)
            telling.start()
            telling.join(min(self.timeout_s, _ANSWER_S))
        self.complaint = self.complaint or (answers[0] if answers else why)
        return self.complaint

    def linger(self) -> None:
        """Where this process keeps the store and something went wrong, stay until all others know what."""
        if self.complaint is None or self._complaints is None or self._rank != 0 or _agent():
            return
        until = time.monotonic() + _LINGER_S
        while time.monotonic() < until and self.lost_s is None:
            knowing = {other for other, (_, pulse) in list(self._heard.items()) if pulse["knows"]}
            if knowing.union(self.left, self.silent(_DEAD_S)) >= set(self._others):
                return
            time.sleep(BEAT_S / 10)

    def close(self) -> None:
        """Say farewell, and beat no longer."""
        self._ended.set()

    def beat(self) -> None:
        """Count up and look at the others until the end."""
        try:
            while not self._ended.is_set():
                self._count_up()
                self._look()
                self._round_s = time.monotonic()
                self.rounds += 1
                self._ended.wait(BEAT_S)
            if self.complaint is None:
                self._store.set(self._pulse(self._rank), json.dumps({"who": self._own, "left": self.doing}))
            else:
                self._count_up()  # who keeps the store sees that this rank knows
        except Exception:
            self.lost_s = time.monotonic()  # the round is not counted; who waits will see it

    def _count_up(self) -> None:
        self._count += 1
        pulse = {
            "who": self._own,
            "count": self._count,
            "doing": self._word(),
            "alike": self.alike,
            "knows": self.complaint is not None,
        }
        self._store.set(self._pulse(self._rank), json.dumps(pulse))

    def _word(self) -> str:
        """What this rank does here; while it waits in another party, it does nothing here either."""
        if not self.doing.startswith(WAITING):
            others = [thread.watch for thread in threading.enumerate() if isinstance(thread, _Pulse)]
            for other in others:
                if other.doing.startswith(WAITING) and other._worker == self._worker:
                    return f"{other.doing} of another model"
        return self.doing

    def _look(self) -> None:
        for other in self._others:
            pulse = self._read(other)
            if pulse is None:
                continue
            if "left" in pulse:
                self._heard.pop(other, None)
                if other not in self.left and (pulse["who"] not in self._past or self._party is not None):
                    self.left[other] = (time.monotonic(), pulse["left"])
                continue
            self.left.pop(other, None)
            if other not in self._heard or pulse != self._heard[other][1]:
                if other not in self._heard or pulse["doing"] != self._heard[other][1]["doing"]:
                    self._same_s[other] = time.monotonic()
                self._heard[other] = (time.monotonic(), pulse)
        key = self._complaints
        if key is not None and self.complaint is None and self._store.check([key]):
            found = self._store.get(key).decode()
            with self._changed:
                self.complaint = found
                self._changed.notify_all()

    def _read(self, rank: int) -> dict[str, Any] | None:
        """What a rank has written last, if anything."""
        if not self._store.check([self._pulse(rank)]):
            return None
        return dict(json.loads(self._store.get(self._pulse(rank))))

    def _pulse(self, rank: int) -> str:
        """Where a rank counts."""
        return f"plait/watch/pulse/{rank}" if self._party is None else f"plait/watch/{self._party}/{rank}"


class _Pulse(threading.Thread):
    """The thread of a watch, by which those of one process find each other."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(name="plait-pulse", daemon=True)
        self.watch = watch

    def run(self) -> None:
        """Beat."""
        self.watch.beat()


def _agent() -> bool:
    """Whether the process that started the ranks keeps the store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def own_connection(store: Any, timeout_s: float) -> Any:
    """A connection of its own: one thread's wait in a shared one would keep all others out."""
    try:
        own = store.clone()
    except (RuntimeError, NotImplementedError):  # not every kind of store can be cloned
        own = store
    own.set_timeout(timedelta(seconds=timeout_s))
    return own
