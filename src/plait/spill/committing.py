"""Commits: what is dirty is written to slots that the last commit does not use, the file is flushed, and then
the manifest is replaced, which is the moment at which the commit happens.

Between the call and that moment no segment changes that is not yet written; one that is may change and even
leave memory, except that it finds no slot before the end: the old one and the new one are both needed.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any

from plait.errors import UsageError
from plait.spill.group import Commit, Group
from plait.spill.guard import Guard
from plait.spill.holding import Holding
from plait.spill.manifest import Manifest
from plait.spill.movement import COMMIT
from plait.spill.traffic import Pool, Transfer


class Committing:
    """The commits of a store; called with its lock held."""

    def __init__(self, writers: Pool, guard: Guard) -> None:
        self._writers = writers
        self._guard = guard
        self.count = 0

    def begin(
        self, group: Group, note: dict[str, Any], holdings: list[Holding], future: Future[None]
    ) -> None:
        """Commit the segments of a group; nobody may be changing them."""
        if group.commit is not None:
            raise UsageError(
                f"a commit of {group.name} is under way", setting="group", works="wait for its future first"
            )
        if group.file is not None and group.file.failed is not None:
            raise group.file.failed
        commit = Commit(note=note, future=future, holdings=holdings)
        future.set_running_or_notify_cancel()
        for holding in commit.holdings:
            holding.due = holding.dirty
            holding.trouble = None
            if holding.dirty:
                commit.due.add(holding)
            else:
                holding.pending = holding.current
        group.commit = commit
        self._advance(group, commit)

    def saved(self, group: Group, holding: Holding, error: BaseException | None) -> None:
        """A segment was written, or not."""
        commit = group.commit
        if commit is None or holding not in commit.due:
            return
        if error is not None:
            self._end(group, commit, error)
            return
        commit.due.remove(holding)
        holding.due, holding.pending = False, holding.current
        self._advance(group, commit)

    def _advance(self, group: Group, commit: Commit) -> None:
        if not commit.due:
            manifest = group.next_manifest(commit)
            work = [partial(group.conclude, manifest)]
            done = partial(self._concluded, group, commit, manifest)
            self._writers.submit(Transfer(work, done, priority=COMMIT))

    def _concluded(self, group: Group, commit: Commit, manifest: Manifest, transfer: Transfer) -> None:
        with self._guard.landing():
            if transfer.error is None:
                self.count += 1
                group.manifest = manifest
                for holding in commit.holdings:
                    holding.committed = holding.pending
                group.release_graves()
            self._end(group, commit, transfer.error)

    def _end(self, group: Group, commit: Commit, error: BaseException | None) -> None:
        group.commit = None
        for holding in commit.holdings:
            holding.due = False
            # Where nobody knows which manifest the disk has, the slots of both stay as they are.
            if group.file is None or group.file.failed is None:
                holding.pending = None
        self._guard.answer(commit.future, error=error)
