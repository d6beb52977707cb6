"""What a span on the timeline costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Thread
from time import perf_counter_ns

from plait.bench import Bench
from plait.timeline import Timeline


def two_clock_reads(calls: int) -> None:
    for _ in range(calls):
        perf_counter_ns()
        perf_counter_ns()


def span(timeline: Timeline, calls: int) -> None:
    for _ in range(calls):
        with timeline.span("device0", "forward"):
            pass


def span_with_info(timeline: Timeline, calls: int) -> None:
    for _ in range(calls):
        with timeline.span("device0", "forward", block=3):
            pass


def record(timeline: Timeline, calls: int) -> None:
    for _ in range(calls):
        start_ns = perf_counter_ns()
        timeline.record("device0", "forward", start_ns, perf_counter_ns())


def mark(timeline: Timeline, calls: int) -> None:
    for _ in range(calls):
        timeline.mark("device0", "saved")


def sample(timeline: Timeline, calls: int) -> None:
    for _ in range(calls):
        timeline.sample("device0", "bytes", 12.0)


def two_threads(timeline: Timeline, calls: int) -> None:
    threads = [Thread(target=span, args=(timeline, calls // 2)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def torch_annotation() -> Callable[[int], None]:
    from torch.profiler import record_function

    def annotate(calls: int) -> None:
        for _ in range(calls):
            with record_function("forward"):
                pass

    return annotate


def run(bench: Bench) -> None:
    calls = bench.pick(quick=10_000, full=50_000)
    repetitions = bench.pick(quick=11, full=41)
    # Smaller than the number of calls, so that the ring is full and every span overwrites another.
    capacity = 4096
    bench.configure(calls=calls, capacity=capacity)
    peer = "torch record_function"
    ours = {
        "span": span,
        "span with info": span_with_info,
        "record": record,
        "mark": mark,
        "sample": sample,
        "span, two threads at once": two_threads,
    }
    sides: dict[str, Callable[[], object]] = {
        name: partial(function, Timeline(capacity=capacity), calls) for name, function in ours.items()
    }
    sides["two clock reads"] = partial(two_clock_reads, calls)
    sides[peer] = partial(torch_annotation(), calls)
    measured = bench.interleave(sides, repetitions=repetitions, retries=bench.pick(quick=0, full=2))
    micros = {one.name: one.scaled(1e6 / calls) for one in measured}
    for name in ours:
        bench.case(
            name,
            micros[name],
            unit="µs",
            against=(peer, micros[peer]),
            limit=("two clock reads", micros["two clock reads"])
            if name.startswith(("span", "record"))
            else None,
            at_most=2.0,
            aim=1.0,
        )
