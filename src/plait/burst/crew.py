"""The ranks that run a plan together, seen from one of them: their groups, and who has failed.

Whoever waits, waits here: for a message, a collective, or word from the first rank. Meanwhile the pulse of
all ranks is watched (:mod:`plait.watch`), so that a rank which dies or stalls ends all others within a bound,
with an error that names it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from plait.burst import terms
from plait.burst.lane import Errand, Lane
from plait.errors import PlaitError, UsageError, WorkerError
from plait.watch import BEAT_S, WAITING, Blame, Watch, own_connection
from plait.worker import Place

T = TypeVar("T")
MEETING_S = 120.0
"""Within which all ranks come to begin: some build their models, or read their data, longer than others."""
_PATIENCE = timedelta(hours=2)
"""Of gloo itself: the pulse finds out far earlier."""
_DEAD_S = 4 * BEAT_S
"""Who has shown no pulse for so long, when a connection broke, is gone."""
_SOON_S = 1.0
"""Within which threads that can end do."""
_COME_S = 0.05
"""Between two looks for a rank that has not come yet."""
_LOOK_S = 0.005
"""Between two looks for word from another rank."""


class Crew:
    """All ranks of the process group; a world of one needs no process group."""

    def __init__(self, *, device: torch.device, timeout_s: float) -> None:
        """``timeout_s`` is how long a rank may show no sign of life."""
        if not timeout_s > 0:
            raise UsageError(f"timeout_s is {timeout_s}", setting="timeout_s", works="30")
        self.device, self.timeout_s = device, timeout_s
        self.changed = threading.Condition()
        """Notified of everything that someone may wait for."""
        self.waiting: Callable[[bool], None] = lambda begins: None
        """Called where a wait begins and where it ends."""
        self.sent_bytes = 0
        """What this rank has handed to the wire so far, for whatever purpose but weights and state."""
        self.rank, self.world = _place()
        self._groups: dict[tuple[str, int], Any] = {}
        self._lanes: list[Lane] = []
        self._watch: Watch | None = None
        self._failure: dict[str, str | None] | None = None
        self._agreed = 0
        self._closed = False
        self._doing = "before the first step"
        if self.world > 1:
            base: Any = dist.group.WORLD
            self._kept: Any = base.get_group_store()
            """Where this rank keeps it for all, it stays until this crew ends, as the group may not."""
            self._store = own_connection(self._kept, timeout_s)
            # The how-manyth crew of its process this is, which is the same on every rank.
            self._prefix = f"plait/burst/crew{self._store.add(f'plait/burst/crews/{self.rank}', 1)}"
            self._watch = Watch(
                self._kept,
                rank=self.rank,
                ranks=range(self.world),
                timeout_s=timeout_s,
                changed=self.changed,
                party=self._prefix,
            )

    # --- meeting ------------------------------------------------------------------------------------

    def meet(self, facts: Mapping[str, Any], *, within_s: float = MEETING_S) -> None:
        """Wait for all ranks, and raise on each if they do not hold the same facts."""
        until_s = time.monotonic() + within_s

        def come(key: str, rank: int) -> bool | None:
            if self._ask(lambda store: store.check([key])):
                return True
            if time.monotonic() > until_s:
                raise WorkerError(
                    f"rank {rank} did not come within {within_s:g} s to run the plan",
                    setting="ranks",
                    works="BurstParallel made on all ranks, at about the same time",
                )
            return None

        self._compare(
            facts,
            lambda key, rank: self.wait(
                lambda: come(key, rank), f"rank {rank} to come", every_s=_COME_S, on=rank
            ),
        )

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise on every rank if they do not hold the same facts."""
        self._compare(facts, lambda key, rank: self._look(key, f"what rank {rank} wants", rank))

    def _compare(self, facts: Mapping[str, Any], come: Callable[[str, int], object]) -> None:
        if self.world == 1:
            return
        self._agreed += 1
        keys = [f"{self._prefix}/facts/{self._agreed}/{rank}" for rank in range(self.world)]
        self._ask(lambda store: store.set(keys[self.rank], json.dumps(dict(facts))))
        for rank, key in enumerate(keys):
            come(key, rank)
        terms.compare(self._ask(lambda store: [json.loads(store.get(key)) for key in keys]))

    def open(self, name: str, width: int) -> None:
        """Make a group of the first ranks, for one kind of traffic; all ranks, also those outside, call it.

        Each group is a mesh of connections, so there is one for a name and a width.
        """
        if width > 1 and (name, width) not in self._groups:
            group = dist.new_group(list(range(width)), timeout=_PATIENCE)
            self._groups[name, width] = group
            if self.device.type == "cuda" and self.rank < width:
                # NCCL meets in its first call, in which all must take part.
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def group(self, name: str, width: int) -> Any:
        """A group that was made."""
        return self._groups[name, width]

    def lane(self, name: str) -> Lane:
        """A thread for one kind of traffic."""
        lane = Lane(name, device=self.device, changed=self.changed, failed=self.lost)
        self._lanes.append(lane)
        return lane

    # --- waiting ------------------------------------------------------------------------------------

    def says(self, doing: str) -> None:
        """Let the other ranks know what this one does."""
        self._doing = doing
        if self._watch is not None:
            self._watch.doing = doing

    def alike(self, facts: dict[str, Any]) -> None:
        """Let all who wait make sure that ranks whose first fact is the same have the others alike, too."""
        if self._watch is not None:
            self._watch.alike = facts

    def wait(
        self,
        ready: Callable[[], T | None],
        for_what: str,
        *,
        every_s: float = BEAT_S,
        on: int | None = None,
    ) -> T:
        """What ``ready`` gives, once it gives something; raises where a rank has died, stalled or left.

        ``on`` is the one rank that is waited for, if it is one.
        """
        with self.changed:
            if (found := ready()) is not None:
                return found
            if self._watch is not None:
                self._watch.doing = f"{WAITING}for {for_what} {self._doing}"
            self.waiting(True)
            since_s = seen_s = time.monotonic()
            try:
                while (found := ready()) is None:
                    self.check(since_s, on)
                    self.changed.wait(every_s)
                    now_s = time.monotonic()
                    if now_s - seen_s > _DEAD_S:
                        since_s = now_s  # this process was stopped itself, so who is silent is not known
                    seen_s = now_s
            finally:
                self.waiting(False)
                self.says(self._doing)
        return found

    def finish(self, errands: Iterable[Errand], for_what: str) -> None:
        """Wait until all of them are done."""
        some = list(errands)
        self.wait(lambda: all(errand.done for errand in some) or None, for_what)

    def tell(self, key: str, content: Any) -> None:
        """Leave word for the ranks that will ask for it."""
        self._ask(lambda store: store.set(f"{self._prefix}/word/{key}", json.dumps(content)))

    def hear(self, key: str, for_what: str) -> Any:
        """What rank 0 has left word of, waited for."""
        name = f"{self._prefix}/word/{key}"
        self._look(name, for_what, 0)
        return json.loads(self._ask(lambda store: store.get(name)))

    def _look(self, key: str, for_what: str, on: int) -> None:
        self.wait(
            lambda: self._ask(lambda store: store.check([key])) or None, for_what, every_s=_LOOK_S, on=on
        )

    def _ask(self, question: Callable[[Any], T]) -> T:
        """What the store answers; without one there is no going on."""
        try:
            return question(self._store)
        except RuntimeError as error:  # torch's DistError is one
            if self._watch is not None:
                self._blame(self._watch.orphaned(_short(error)))
            self.check()
            raise

    def count(self, sent_bytes: int) -> None:
        """Note what was handed to the wire; any thread may."""
        with self.changed:
            self.sent_bytes += sent_bytes

    # --- failing ------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Raise where there is no going on, before anything is begun."""
        self.check()
        if self._closed:
            raise UsageError("it is closed", setting="close", works="a new BurstParallel, on every rank")

    def check(self, since_s: float | None = None, on: int | None = None) -> None:
        """Raise where this rank or another has failed, or, while waiting since a moment, one is gone."""
        if self._failure is None and self._watch is not None:
            if self._watch.complaint is not None:
                self._failure = json.loads(self._watch.complaint)
            elif since_s is not None:
                self._look_around(self._watch, since_s, on)
        if self._failure is not None:
            raise WorkerError(
                str(self._failure["what"]), setting=self._failure["setting"], works=self._failure["works"]
            )

    def _look_around(self, watch: Watch, since_s: float, on: int | None) -> None:
        if (unlike := watch.unlike()) is not None:
            self._differ(watch, *unlike)
        elif (blamed := watch.blame(since_s, on)) is not None:
            self._blame(blamed)
        elif time.monotonic() - since_s > self.timeout_s:
            self._check_circle(watch)

    def _differ(self, watch: Watch, rank: int, theirs: dict[str, Any]) -> None:
        pair = sorted([(self.rank, watch.alike), (rank, theirs)], key=lambda one: one[0])
        (first, ours), (second, others) = pair
        try:
            terms.compare_two(first, ours, second, others)
        except WorkerError as error:
            self._fail(error.what, error.setting, error.works)

    def _check_circle(self, watch: Watch) -> None:
        """Alive as they are, if all wait and have long waited, or have left, nothing will come any more."""
        others = watch.unchanged(self.timeout_s)
        if len(others) + len(watch.left) < self.world - 1:
            return
        if not all(doing.startswith(WAITING) for doing in others.values()):
            return
        if watch.left:
            self._blame(watch.parted(min(watch.left)))
            return
        everyone = sorted({**others, self.rank: watch.doing}.items())
        self._fail(
            "all ranks wait for each other: " + "; ".join(f"rank {rank} {doing}" for rank, doing in everyone),
            "batch",
            "the same calls with batches of the same shapes on every rank",
        )

    @contextmanager
    def told(self, doing: str) -> Iterator[None]:
        """Let the others know of an error, so that none waits for this rank."""
        try:
            yield
        except BaseException as error:
            self.give_up(error, doing)
            raise

    def give_up(self, error: BaseException, doing: str) -> None:
        """Tell the other ranks that this one has failed, and why, so that none waits for it."""
        if self._failure is not None:
            return
        while error.__cause__ is not None and not isinstance(error, PlaitError):
            error = error.__cause__
        who = f"rank {self.rank} raised {type(error).__name__} {doing}"
        if isinstance(error, WorkerError):
            self._fail(error.what, error.setting, error.works)
        elif isinstance(error, PlaitError):
            self._fail(f"{who}: {error.what}", error.setting, error.works)
        else:
            said = (str(error).strip() or "nothing said").splitlines()[-1].strip()
            self._fail(f"{who}: {said}", "ranks", "see the log of that rank")

    def close(self) -> None:
        """End the threads, then the groups.

        A thread that came back from gloo while Python shuts down would abort the process.
        """
        if self._closed:
            return
        self._closed = True
        threads = [lane.thread for lane in self._lanes]
        for lane in self._lanes:
            lane.close()
        if self._watch is not None:
            self._watch.linger()
            self._watch.close()
            self._kept = None
            threads.append(self._watch.thread)
        if not _ended(threads, _SOON_S):
            # After a failure some wait for messages that will not come. A timeout makes gloo end all waits.
            for (_, width), group in self._groups.items():
                if self.rank < width and self.device.type == "cpu":
                    with suppress(RuntimeError, ValueError):
                        work: Any = dist.irecv(torch.empty(1), (self.rank + 1) % width, group=group)
                        work.wait(timedelta(milliseconds=1))
            _ended(threads, _SOON_S)
        elif self._failure is None and dist.is_available() and dist.is_initialized():
            # Each group is a mesh of sockets and threads. After a failure they are left to the process's end.
            for group in self._groups.values():
                with suppress(RuntimeError, ValueError):  # who ended the process group has ended it, too
                    dist.destroy_process_group(group)
            self._groups.clear()

    def lost(self, errand: Errand, error: BaseException) -> None:
        """Something that others were needed for has failed: tell all why."""
        if isinstance(error, RuntimeError) and not isinstance(error, PlaitError):  # as gloo's and NCCL's are
            why = _short(error)
            gone = Blame(what=f"a rank is gone ({why})")
            if self._watch is not None:
                gone = self._watch.gone(errand.peer, why)
            self._fail(f"{gone.what}; rank {self.rank} was {errand.doing}", gone.setting, gone.works)
        else:
            self.give_up(error, errand.doing)
        with self.changed:
            self.changed.notify_all()

    def _blame(self, blame: Blame) -> None:
        doing = self._doing if self._watch is None else self._watch.doing
        self._fail(f"{blame.what}; rank {self.rank} was {doing}", blame.setting, blame.works)

    def _fail(self, what: str, setting: str | None = None, works: str | None = None) -> None:
        said = json.dumps({"what": what, "setting": setting, "works": works})
        if self._watch is not None:
            said = self._watch.complain(said)
        self._failure = self._failure or json.loads(said)


def _short(error: BaseException) -> str:
    """What gloo or the store says, without where in its source."""
    why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return why.split("] ", 1)[-1].split(". ")[0]


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = Place.from_environment()
    if place.world > 1:
        raise UsageError(
            f"this is rank {place.rank} of {place.world}, and there is no process group",
            setting="process group",
            works="torch.distributed.init_process_group() first",
        )
    return 0, 1


def _ended(threads: Iterable[threading.Thread], within_s: float) -> bool:
    until = time.monotonic() + within_s
    some = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in some:
        thread.join(max(0.0, until - time.monotonic()))
    return not any(thread.is_alive() for thread in some)
