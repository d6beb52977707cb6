"""How the rate of links changes over time: the preempted network, as data.

A trace is a text of lines, each ``SECONDS RATE [HOST]``, separated by blanks or commas::

    # seconds  rate     host (all when left out)
    0          1gbit
    2.5        500mbit
    4          100mbit  1
    6          none     1      # host 1 is not shaped
    10         repeat          # starts over at second 0

Seconds never decrease. ``repeat`` may only be the last line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from plait.errors import FileError, PlaitError
from plait.lab.network import parse_link_rate

_WORKS = "0 1gbit"
_LEAST_HOLD_SECONDS = 0.1
"""A change takes some milliseconds to make; a trace that repeats at once would do nothing else."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """From one moment on, one host's links (or all) have another rate."""

    seconds: float
    rate_bytes_per_second: float | None
    """None: not shaped."""
    host: int | None = None
    """None: all hosts."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Steps in order of time; with `repeat_seconds` the trace starts over at that moment."""

    steps: tuple[Step, ...]
    repeat_seconds: float | None = None

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace from a file."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(
                f"cannot read the trace {path}: {error}", setting="trace", works="a text file"
            ) from None
        return cls.parse(text, name=str(path))

    @classmethod
    def parse(cls, text: str, *, name: str = "trace") -> Trace:
        """Read a trace from text; `name` stands in the error of a line that is wrong."""
        steps: list[Step] = []
        repeat: float | None = None
        for number, line in enumerate(text.splitlines(), start=1):
            fields = line.partition("#")[0].replace(",", " ").split()
            if not fields:
                continue
            try:
                if repeat is not None:
                    raise ValueError("a line after `repeat`")
                if len(fields) == 2 and fields[1] == "repeat":
                    repeat = _repeat_seconds(fields[0], steps)
                else:
                    steps.append(_step(fields, steps))
            except ValueError as error:
                what = error.what if isinstance(error, PlaitError) else str(error)
                raise FileError(f"{name}, line {number}: {what}", setting="trace", works=_WORKS) from None
        if not steps:
            raise FileError(f"{name} has no line with a rate", setting="trace", works=_WORKS)
        return cls(steps=tuple(steps), repeat_seconds=repeat)

    def play(self) -> Iterator[Step]:
        """The steps in order, for ever when the trace repeats; `seconds` then go on counting."""
        begin = 0.0
        while True:
            for step in self.steps:
                yield Step(
                    seconds=begin + step.seconds,
                    rate_bytes_per_second=step.rate_bytes_per_second,
                    host=step.host,
                )
            if self.repeat_seconds is None:
                return
            begin += self.repeat_seconds

    def check_hosts(self, hosts: int) -> None:
        """Raise when the trace speaks of a host that a lab of `hosts` does not have."""
        for step in self.steps:
            if step.host is not None and step.host >= hosts:
                raise FileError(
                    f"the trace changes host {step.host} at {step.seconds} s, but there are {hosts} hosts",
                    setting="trace",
                    works=f"hosts 0 to {hosts - 1}",
                )


def _seconds(text: str, steps: list[Step]) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number of seconds") from None
    earliest = steps[-1].seconds if steps else 0.0
    if not earliest <= seconds < float("inf"):
        raise ValueError(f"second {text} does not come after second {earliest:g}")
    return seconds


def _step(fields: list[str], steps: list[Step]) -> Step:
    if len(fields) not in (2, 3):
        raise ValueError(f"{len(fields)} fields where SECONDS RATE [HOST] were expected")
    seconds = _seconds(fields[0], steps)
    rate = None if fields[1] == "none" else parse_link_rate(fields[1])
    if len(fields) == 2:
        return Step(seconds=seconds, rate_bytes_per_second=rate)
    if not fields[2].isdecimal():
        raise ValueError(f"{fields[2]!r} is not the number of a host")
    return Step(seconds=seconds, rate_bytes_per_second=rate, host=int(fields[2]))


def _repeat_seconds(text: str, steps: list[Step]) -> float:
    seconds = _seconds(text, steps)
    if not steps or seconds < steps[-1].seconds + _LEAST_HOLD_SECONDS:
        raise ValueError(f"`repeat` must come {_LEAST_HOLD_SECONDS} s or more after the last change")
    return seconds


class Follower:
    """Plays a trace in the background, from now until it ends or is stopped."""

    def __init__(self, trace: Trace, apply: Callable[[Step], None]) -> None:
        self._trace = trace
        self._apply = apply
        self._stopped = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="plait-trace", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the trace; links keep the rate they have."""
        self._stopped.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what ended the trace early: a run without its trace measures something else."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _follow(self) -> None:
        begin = time.monotonic()
        try:
            for step in self._trace.play():
                if self._stopped.wait(max(0.0, begin + step.seconds - time.monotonic())):
                    return
                self._apply(step)
        except Exception as error:
            self._failure = error
