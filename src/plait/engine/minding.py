"""Background work of a run: one process minds it, and another, which gets what nobody else wants, trains.

Once nothing is left to do in the foreground, it trains like any other process: at idle priority it would
starve on a machine where others keep the cores busy.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from plait.burst.handle import background
from plait.engine.launcher import MODULE
from plait.engine.task import Task
from plait.engine.telling import Teller

if TYPE_CHECKING:
    from plait.engine.worker import Situation

_LOOK_S = 1.0
_LEAVING_S = 60.0
"""How long the work may take to come to a checkpoint once it is asked to."""


def mind(task: Task, folder: Path, situation: Situation, teller: Teller) -> int:
    """Start the work behind whatever trains on this host, report what that costs, and return how it ended."""
    jobs = task.read_jobs()
    work = background(
        [sys.executable, "-m", MODULE, str(folder)],
        max_slowdown=task.max_slowdown,
        threads=max(job.threads for job in jobs),
        memory=task.memory_bytes if task.kind == "train" else None,  # who spills keeps to it by itself
        cores=situation.cores or None,
        environment=replace(situation, behind=True).environment(),
    )
    asked_s: float | None = None
    promoted = False
    try:
        while (code := work.wait(_LOOK_S)) is None:
            report = work.report
            found = {} if report.slowdown is None else {"foreground_slowdown": report.slowdown.mean}
            if report.share is not None:
                # Alone it may only have been starting, which says little of what it could have had.
                found["background_share"] = min(1.0, report.share)
            if found:
                teller.tell(facts={"jobs": list(task.names), **found})
            if teller.is_alone and not promoted:
                promoted = True
                work.promote()
                priority, _, _ = work.report.protection.partition(", ")
                text = f"nothing is left in the foreground: it goes on with {priority}"
                teller.tell(event={"kind": "decision", "text": text})
            if teller.should_stop and asked_s is None:
                asked_s = time.monotonic()  # the engine has asked the work itself, too
                work.resume()
            if asked_s is not None and time.monotonic() - asked_s > _LEAVING_S:
                break
        if code is None or code < 0:
            how = f"was ended by signal {-code}" if code is not None else "did not come to a checkpoint"
            teller.tell(error={"kind": "WorkerError", "text": f"the background work {how}", "final": False})
            return 1
        return code
    finally:
        report = work.stop()
        teller.tell(event={"kind": "background", "text": str(report), "job": task.name})
