"""A step under ``plait run`` on one device against the same step in a loop by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.bench import Bench, Measured
from plait.bench.machine import Moment

HERE = Path(__file__).parent
UNCOUNTED = 5
"""Steps at the start that are slower than others."""
TURN_S = 2.0
"""How long one side goes on while the other stands still."""
PATIENCE_S = 120.0


class Side:
    """One of the two: processes that can be halted, and the times at which they ended steps."""

    def __init__(self, words: Sequence[str], output: Path, steps: Path) -> None:
        self._steps = steps
        self.turns: list[tuple[float, float]] = []
        """When it was alone."""
        with output.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def ends(self) -> list[float]:
        """When each step that it has told of ended."""
        if not self._steps.exists():
            return []
        lines = [line for line in self._steps.read_text().split("\n")[:-1] if line]
        rows = [json.loads(line) for line in lines]
        return [row if isinstance(row, float) else row["time"] for row in rows if not _no_step(row)]

    @property
    def over(self) -> bool:
        """Whether it has ended; raises where it failed."""
        code = self._process.poll()
        if code:
            raise RuntimeError(f"{self._process.args} failed: {code}")
        return code == 0

    def send(self, number: signal.Signals) -> None:
        """To it and to all that it has started."""
        for pid in _family(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Leave nothing of it."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def warm_up(self) -> None:
        """Let it do the steps that do not count, and halt it."""
        until = time.monotonic() + PATIENCE_S
        while len(self.ends) <= UNCOUNTED:
            if self.over or time.monotonic() > until:
                raise RuntimeError(f"{self._process.args} did no {UNCOUNTED} steps")
            time.sleep(0.05)
        self.send(signal.SIGSTOP)

    def take_turn(self) -> None:
        """Go on alone for a while."""
        begun = time.time()
        self.send(signal.SIGCONT)
        time.sleep(TURN_S)
        self.send(signal.SIGSTOP)
        self.turns.append((begun, time.time()))

    def step_ms(self) -> float:
        """What a step took of its own turns."""
        counted = [end for end in self.ends if self.turns[0][0] <= end <= self.turns[-1][1]]
        own_s = sum(max(0.0, min(end, counted[-1]) - max(begun, counted[0])) for begun, end in self.turns)
        return 1e3 * own_s / (len(counted) - 1)


def _no_step(row: object) -> bool:
    return isinstance(row, dict) and "loss" not in row


def _family(root: int) -> list[int]:
    """A process and all that come from it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


@contextmanager
def started(words: Sequence[str], output: Path, steps: Path) -> Iterator[Side]:
    side = Side(words, output, steps)
    try:
        yield side
    finally:
        side.end()


def pair(steps: int, core: int, starting: list[float]) -> tuple[float, float]:
    """Milliseconds a step of both sides, on one core by turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = [str(HERE / "run.py"), str(steps), str(core), str(folder / "run")]
        loop = [str(HERE / "loop.py"), str(steps), str(core)]
        with started(run, folder / "run.out", folder / "run" / "metrics.jsonl") as ours:
            ours.warm_up()
            starting.append(ours.ends[0] - float((folder / "run.out").read_text().split()[0]))
            with started(loop, folder / "loop", folder / "loop") as theirs:
                theirs.warm_up()
                while not ours.over and not theirs.over:
                    ours.take_turn()
                    theirs.take_turn()
                return ours.step_ms(), theirs.step_ms()


def run(bench: Bench) -> None:
    steps = bench.pick(quick=80, full=250)
    core = sorted(os.sched_getaffinity(0))[0]
    bench.configure(steps=steps, uncounted=UNCOUNTED, core=core, turn_s=TURN_S)
    starting: list[float] = []
    before = Moment.now()
    pairs = [pair(steps, core, starting) for _ in range(bench.pick(quick=3, full=7))]
    activity = Moment.now().since(before)
    ours, plain = (
        Measured(name=name, values=values, better="lower", activity=activity)
        for name, values in zip(("plait run", "by hand"), zip(*pairs, strict=True), strict=True)
    )
    bench.case(
        "a step under plait run", ours, unit="ms", against=("a loop by hand", plain), at_least=0.98
    )  # at most 2% more
    bench.case(
        "from the call to the first step's end", sum(starting) / len(starting), unit="s", better="lower"
    )
