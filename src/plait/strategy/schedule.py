"""Which job gets how many devices, and when: jobs that can run at several widths, on devices that are alike.

A job takes so long on so many devices and keeps them until it ends. Once widths and an order are chosen, each
job in turn starts on the devices that are free first:

    device 0  | A A A A | C C |
    device 1  | A A A A | D D D |         order A, B, C, D; A is two wide
    device 2  | B B | D D D .....

Some order gives the best schedule for the widths there are: take that schedule's own order of starting; then
by induction no job starts later than there. With few jobs all widths and orders are tried. With many, widths
come from a target T (each job as narrow as can be so that it ends within T, which takes the least device
time; J. Turek, J. Wolf, P. Yu, "Approximate algorithms for scheduling parallelizable tasks", SPAA 1992), for
every T that changes them; then single jobs are widened, narrowed and moved while that helps.

`lower_bound_ms` is what no schedule beats: the least T for which those least device times fit into T on all
devices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, permutations, product
from typing import NamedTuple

Times = Mapping[int, float]
"""By number of devices, how long a job takes, in milliseconds."""
_FEW = 20_000
"""So many schedules are simply all tried."""
_ROUNDS = 4000
"""Schedules that are tried beyond, at most."""
_TARGETS = 256


class Run(NamedTuple):
    """A job on devices."""

    job: int
    devices: tuple[int, ...]
    start_ms: float
    end_ms: float


def lower_bound_ms(times: Sequence[Times], devices: int) -> float:
    """No schedule is shorter."""
    if not times:
        return 0.0
    known = [{k: ms for k, ms in one.items() if k <= devices} for one in times]
    least = max(min(one.values()) for one in known)
    marks = sorted({ms for one in known for ms in one.values() if ms >= least})
    for mark, after in zip(marks, [*marks[1:], math.inf], strict=True):
        area = sum(min(k * ms for k, ms in one.items() if ms <= mark) for one in known)
        if max(mark, area / devices) < after:
            return max(mark, area / devices)
    raise AssertionError("the last interval has no end")


def in_order(times: Sequence[Times], widths: Sequence[int], order: Sequence[int], devices: int) -> list[Run]:
    """Start each job in turn on the devices that are free first."""
    free = [(0.0, device) for device in range(devices)]
    runs = []
    for job in order:
        taken = [heapq.heappop(free) for _ in range(widths[job])]
        start_ms = taken[-1][0]
        end_ms = start_ms + times[job][widths[job]]
        for _, device in taken:
            heapq.heappush(free, (end_ms, device))
        runs.append(Run(job, tuple(sorted(device for _, device in taken)), start_ms, end_ms))
    return runs


def makespan_ms(runs: Sequence[Run]) -> float:
    """When the last job ends."""
    return max((run.end_ms for run in runs), default=0.0)


def every(times: Sequence[Times], devices: int) -> Iterator[list[Run]]:
    """All schedules that may be the best."""
    jobs = range(len(times))
    for widths in product(*([k for k in one if k <= devices] for one in times)):
        for order in permutations(jobs):
            yield in_order(times, widths, order, devices)


def shortest(times: Sequence[Times], devices: int) -> list[Run]:
    """A schedule that is short; the shortest, where there are few jobs."""
    if not times:
        return []
    choices = math.prod(sum(k <= devices for k in one) for one in times)
    if choices * math.factorial(min(len(times), 12)) <= _FEW:
        return min(every(times, devices), key=makespan_ms)
    return _Search(times, devices).best()


class _Search:
    """Looks for a short schedule."""

    def __init__(self, times: Sequence[Times], devices: int) -> None:
        self.times = [{k: ms for k, ms in sorted(one.items()) if k <= devices} for one in times]
        self.devices, self.left = devices, _ROUNDS
        self.bound_ms = lower_bound_ms(times, devices)
        self.widths: list[int] = []
        self.order: list[int] = []
        self.ms = math.inf

    def best(self) -> list[Run]:
        for widths in self._targets():
            for order in self._orders(widths):
                self._try(widths, order)
        while self._improve():
            pass
        return in_order(self.times, self.widths, self.order, self.devices)

    def _try(self, widths: list[int], order: list[int]) -> bool:
        self.left -= 1
        ms = makespan_ms(in_order(self.times, widths, order, self.devices))
        if ms >= self.ms * (1 - 1e-12):
            return False
        self.ms, self.widths, self.order = ms, widths, order
        return True

    def _targets(self) -> list[list[int]]:
        """The widths of least device time for every target that changes them, or some, if these are many."""
        found: dict[tuple[int, ...], None] = {}
        every = {ms for one in self.times for ms in one.values() if ms >= self.bound_ms}
        marks = sorted(every | {self.bound_ms})
        for target in marks[:: max(1, len(marks) // _TARGETS)]:
            found[tuple(_least_area(one, target) for one in self.times)] = None
        return [list(widths) for widths in found]

    def _orders(self, widths: Sequence[int]) -> list[list[int]]:
        jobs = range(len(self.times))
        longest = sorted(jobs, key=lambda job: -self.times[job][widths[job]])
        largest = sorted(jobs, key=lambda job: -widths[job] * self.times[job][widths[job]])
        widest = sorted(longest, key=lambda job: -widths[job])
        return [longest, largest, widest]

    def _improve(self) -> bool:
        """One job narrower or wider, or earlier: whether that helped."""
        for job in self.order:
            for k in self.times[job]:
                if self.left <= 0 or self.ms <= self.bound_ms:
                    return False
                widths = [k if other == job else width for other, width in enumerate(self.widths)]
                orders = [self.order, *self._orders(widths)]
                if k != self.widths[job] and any(self._try(widths, order) for order in orders):
                    return True
            for place in range(len(self.order)):
                order = [other for other in self.order if other != job]
                order.insert(place, job)
                if self.left > 0 and self._try(self.widths, order):
                    return True
        return False


def _least_area(times: Times, target_ms: float) -> int:
    """The width with the least device time among those that end before the target."""
    soon = [k for k, ms in times.items() if ms <= target_ms * (1 + 1e-12)]
    return min(soon, key=lambda k: k * times[k])


# --- throughput ---------------------------------------------------------------------------------------

Rates = Mapping[int, float]
"""By number of devices, what a job gets through in a second."""


def fullest(rates: Sequence[Rates], devices: int) -> list[int]:
    """The widths (0: it waits) with the highest rates together, by dynamic programming over devices."""
    best = [0.0] * (devices + 1)
    choices: list[list[int]] = []
    for one in rates:
        following, chosen = list(best), [0] * (devices + 1)
        for count in range(devices + 1):
            for k, rate in one.items():
                if k <= count and best[count - k] + rate > following[count]:
                    following[count], chosen[count] = best[count - k] + rate, k
        best = following
        choices.append(chosen)
    widths, left = [0] * len(rates), devices
    for job in reversed(range(len(rates))):
        widths[job] = choices[job][left]
        left -= widths[job]
    return widths


def upper_bound_rate(rates: Sequence[Rates], devices: int) -> float:
    """No assignment gets through more, not even one that shares devices by time.

    A job that changes its width from time to time gets through what lies on the concave envelope of its
    rates; of all envelopes the steepest pieces are taken until no device is left.
    """
    pieces: list[tuple[float, float]] = []
    for one in rates:
        pieces += _envelope({0: 0.0, **{k: rate for k, rate in one.items() if k <= devices}})
    left, total = float(devices), 0.0
    for slope, width in sorted(pieces, reverse=True):
        used = min(width, left)
        total += slope * used
        left -= used
    return total


def _envelope(points: Rates) -> list[tuple[float, float]]:
    """The rising pieces of the least concave function above: slope and width."""
    hull: list[tuple[int, float]] = []
    for k, rate in sorted(points.items()):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (k, rate)):
            hull.pop()
        hull.append((k, rate))
    pairs = pairwise(hull)
    return [(_slope(a, b), float(b[0] - a[0])) for a, b in pairs if b[1] > a[1]]


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def in_waves(times: Sequence[Times], rates: Sequence[Rates], devices: int) -> list[Run]:
    """Whenever devices are free, the waiting jobs with the highest rates together take them."""
    waiting, free, now_ms = list(range(len(times))), list(range(devices)), 0.0
    runs: list[Run] = []
    ends: list[tuple[float, tuple[int, ...]]] = []
    while waiting:
        widths = fullest([rates[job] for job in waiting], len(free))
        for job, width in list(zip(waiting, widths, strict=True)):
            if width:
                taken, free = tuple(free[:width]), free[width:]
                runs.append(Run(job, taken, now_ms, now_ms + times[job][width]))
                heapq.heappush(ends, (runs[-1].end_ms, taken))
                waiting.remove(job)
        if waiting:
            assert ends, "a job that has a width gets it when all devices are free"
            now_ms, back = heapq.heappop(ends)
            free = sorted([*free, *back])
            while ends and ends[0][0] <= now_ms:
                free = sorted([*free, *heapq.heappop(ends)[1]])
    return runs
