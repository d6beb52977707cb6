"""What happened when: spans on tracks, recorded while a run goes on or played by a simulator.

A real run and a simulated one give the same type, so that they can be drawn together, and their
difference is a number. Nothing here imports torch.
"""

from plait.timeline.clock import ClockOffset, answer_clock, estimate_offset, measure_clock
from plait.timeline.compare import Comparison, Difference
from plait.timeline.span import Sample, Span
from plait.timeline.timeline import Timeline

__all__ = [
    "ClockOffset",
    "Comparison",
    "Difference",
    "Sample",
    "Span",
    "Timeline",
    "answer_clock",
    "estimate_offset",
    "measure_clock",
]
