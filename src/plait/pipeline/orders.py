"""The orders in which the stages of a pipeline run their forwards (F) and backwards (B).

S. Wang et al., "Ada-Grouper: Accelerating Pipeline Parallelism in Preempted Network by Adaptive
Group-Scheduling for Micro-Batches", arXiv 2303.01675, 2023: groups of k micro-batches, so that transfers hide
behind compute.

    1F1B     stage 0  F0 F1 .. B0 F2 B1 F3 B2 .. B3
             stage 1  .. F0 B0 F1 B1 F2 B2 F3 B3 ..

    k = 2    stage 0  F0 F1 F2 F3 B0 B1 .. .. B2 B3
             stage 1  .. F0 F1 B0 B1 F2 F3 B2 B3 ..

=========================  =======================================================================
the paper                  here
=========================  =======================================================================
k, the group count         ``k``; 1 is 1F1B, M is GPipe; the last group is smaller where k does not divide M
M, S                       ``micro_batches``, ``stages``
=========================  =======================================================================

We add what takes less memory for the same hiding. In a *depth* order a stage runs more forwards ahead of the
stage after it, by a number of its own for each link (1 everywhere is 1F1B). A *capped* order is no list but a
rule: backward if its gradient is there, else forward while fewer than ``caps[stage]`` are in flight.

In every order here both kinds run in the order of micro-batches. So wires that are first in, first out match
without agreement, gradients add up in the same order whatever the choice, and how far a stage has come is two
numbers: forwards and backwards done. With M micro-batches, all lists take O(S M) to make.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from plait.errors import UsageError
from plait.units import parse_whole

Kind = Literal["F", "B"]
Family = Literal["kfkb", "depth", "capped", "listed"]
FAMILIES: tuple[Family, ...] = get_args(Family)


class Action(NamedTuple):
    """A forward or backward of one micro-batch."""

    kind: Kind
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Order:
    """When each stage runs what; made by the functions of this module.

    Whoever runs a stage counts its forwards and backwards and asks :meth:`choices` (or :meth:`next`) what may
    come now. This is the only question, for lists and for the rule alike.
    """

    family: Family
    stages: int
    micro_batches: int
    k: int | None = None
    """Of family ``kfkb``: micro-batches in a group."""
    depths: tuple[int, ...] | None = None
    """Of family ``depth``, by link: how many more forwards the stage before it runs ahead."""
    caps: tuple[int, ...] | None = None
    """Of family ``capped``, by stage: most micro-batches in flight."""
    steps: tuple[str, ...] | None = None
    """By stage, its kinds as text, ``"FFBFBB"``; None where a rule decides (``capped``)."""

    def choices(self, stage: int, forwards: int, backwards: int) -> tuple[Kind, ...]:
        """The kinds that may run after so many: run the first whose input is there, else wait for any.

        Empty when the stage is done. The input of a forward is the activation of the stage before; that of a
        backward, the gradient of the stage after. The first stage's forwards and the last stage's backwards
        need none.
        """
        if self.steps is not None:
            done = forwards + backwards
            return (_kind(self.steps[stage][done]),) if done < 2 * self.micro_batches else ()
        assert self.caps is not None, "an order is a list or has caps"
        in_flight = forwards - backwards
        more = forwards < self.micro_batches and in_flight < self.caps[stage]
        if stage == self.stages - 1 and in_flight:
            more = False  # its gradient is there at once, so the backward always comes first
        return (*(("B",) if in_flight else ()), *(("F",) if more else ()))

    def next(self, stage: int, forwards: int, backwards: int, ready: Container[Kind]) -> Action | None:
        """What a stage runs now, where ``ready`` are the kinds whose next input is there; None is to wait."""
        for kind in self.choices(stage, forwards, backwards):
            if kind in ready:
                return Action(kind, forwards if kind == "F" else backwards)
        return None

    def actions(self, stage: int) -> tuple[Action, ...] | None:
        """The list of a stage; None where a rule decides."""
        if self.steps is None:
            return None
        counts = {"F": 0, "B": 0}
        found = []
        for kind in self.steps[stage]:
            found.append(Action(_kind(kind), counts[kind]))
            counts[kind] += 1
        return tuple(found)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches that have gone forward and not yet backward on a stage."""
        return self._in_flight[stage]

    def inputs_ahead(self, stage: int, backwards: int) -> int:
        """How many inputs can have been sent to a stage, at most, once it has sent so many gradients.

        A runtime posts receives up to here: no transfer then waits for a receive, and no buffer is idle.
        """
        return self.micro_batches if stage == 0 else self.most_forwards(stage - 1, backwards)

    def gradients_ahead(self, stage: int, forwards: int) -> int:
        """How many gradients can have been sent to a stage, at most, once it has sent so many activations."""
        return forwards if stage == self.stages - 1 else self.most_backwards(stage + 1, forwards)

    def most_forwards(self, stage: int, backwards: int) -> int:
        """How many forwards a stage can have done while it has done so many backwards."""
        if self.steps is None:
            return min(self.micro_batches, backwards + self._in_flight[stage])
        return self._before[stage]["B"][backwards]

    def least_forwards(self, stage: int, backwards: int) -> int:
        """How many forwards a stage has surely done once it has done so many backwards."""
        if self.steps is None or not backwards:
            return backwards
        return self._before[stage]["B"][backwards - 1]

    def most_backwards(self, stage: int, forwards: int) -> int:
        """How many backwards a stage can have done while it has done so many forwards."""
        return forwards if self.steps is None else self._before[stage]["F"][forwards]

    def least_backwards(self, stage: int, forwards: int) -> int:
        """How many backwards a stage has surely done once it has done so many forwards."""
        if self.steps is None:
            return max(0, forwards - self._in_flight[stage])
        return self._before[stage]["F"][forwards - 1] if forwards else 0

    @property
    def label(self) -> str:
        """A short name: ``1F1B``, ``3F3B``, ``GPipe``, ``depth 2``, ``depth 1-3-1``, ``capped 4``."""
        if self.k is not None:
            return (
                "1F1B" if self.k == 1 else "GPipe" if self.k == self.micro_batches else f"{self.k}F{self.k}B"
            )
        numbers = self.depths if self.family == "depth" else self.caps
        if numbers is None:
            return self.family
        same = len(set(numbers)) == 1
        return f"{self.family} {numbers[0] if same else '-'.join(map(str, numbers))}".strip()

    def __str__(self) -> str:
        return f"{self.label}, {self.stages} stages, {self.micro_batches} micro-batches"

    def to_json(self) -> dict[str, Any]:
        """As plain data; lists are made again from their numbers, so it stays short."""
        data: dict[str, Any] = {
            "family": self.family,
            "stages": self.stages,
            "micro_batches": self.micro_batches,
        }
        name = _NUMBERS[self.family]
        value = getattr(self, name)
        return {**data, name: value if isinstance(value, int) else list(value)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Order:
        """The order of what ``to_json`` gave."""
        family = data.get("family")
        if family not in FAMILIES:
            raise UsageError(
                f"{family!r} is no family of orders", setting="family", works=", ".join(FAMILIES)
            )
        wanted = {"family", "stages", "micro_batches", _NUMBERS[family]}
        if set(data) != wanted:
            what = f"an order of family {family!r} has the fields {sorted(data)}"
            raise UsageError(what, setting="order", works=str(sorted(wanted)))
        stages, micro_batches = data["stages"], data["micro_batches"]
        if family == "kfkb":
            return kfkb(stages, micro_batches, data["k"])
        if family == "depth":
            return per_link_depth(stages, micro_batches, data["depths"])
        if family == "capped":
            return work_conserving(stages, micro_batches, data["caps"])
        order = listed(data["steps"])
        if (order.stages, order.micro_batches) != (stages, micro_batches):
            what = f"the lists are of {order}, not of {stages} stages and {micro_batches} micro-batches"
            raise UsageError(what, setting="steps", works=f"{stages} lists of {2 * micro_batches} letters")
        return order

    @property
    def digest(self) -> str:
        """Equal on all ranks just where their orders are."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def _in_flight(self) -> tuple[int, ...]:
        if self.steps is None:
            assert self.caps is not None, "an order is a list or has caps"
            # A micro-batch in flight on a stage is in flight on all before it.
            last = self.stages - 1
            smallest = [min(self.micro_batches, *self.caps[: stage + 1]) for stage in range(last)]
            return (*smallest, 1)
        return tuple(_most_in_flight(steps) for steps in self.steps)

    @cached_property
    def _before(self) -> tuple[dict[Kind, tuple[int, ...]], ...]:
        """By stage and kind: how many of the other kind come before its first, second, ... and in all."""
        assert self.steps is not None, "only lists have a before"
        return tuple(
            {"F": _others_before(steps, "F"), "B": _others_before(steps, "B")} for steps in self.steps
        )


_NUMBERS: Mapping[Family, str] = {"kfkb": "k", "depth": "depths", "capped": "caps", "listed": "steps"}


def one_f_one_b(stages: int, micro_batches: int) -> Order:
    """1F1B: stage r of S runs S-1-r forwards, then one forward and one backward in turn."""
    return kfkb(stages, micro_batches, 1)


def gpipe(stages: int, micro_batches: int) -> Order:
    """All forwards, then all backwards: kFkB in one group."""
    return kfkb(stages, micro_batches, micro_batches)


def kfkb(stages: int, micro_batches: int, k: int) -> Order:
    """1F1B over groups of k micro-batches; at most min(M, k(S-r)) are in flight on stage r."""
    stages, micro_batches = _sizes(stages, micro_batches)
    k = parse_whole(k, setting="k")
    if k > micro_batches:
        what = f"groups of k = {k} of only {micro_batches} micro-batches"
        raise UsageError(what, setting="k", works=f"1 to {micro_batches}")
    groups = [min(k, micro_batches - begin) for begin in range(0, micro_batches, k)]
    steps = tuple(_alternating(groups, warm_up=stages - 1 - stage) for stage in range(stages))
    return Order(family="kfkb", stages=stages, micro_batches=micro_batches, k=k, steps=steps)


def depth(stages: int, micro_batches: int, delta: int) -> Order:
    """1F1B whose warm-up grows by ``delta`` a stage: at most 1 + delta(S-1-r) are in flight on stage r."""
    stages, _ = _sizes(stages, micro_batches)
    return per_link_depth(
        stages, micro_batches, [parse_whole(delta, setting="delta", least=0)] * (stages - 1)
    )


def per_link_depth(stages: int, micro_batches: int, depths: Sequence[int]) -> Order:
    """1F1B in which a stage's warm-up exceeds that of the stage after it by the depth of the link between.

    A slow link alone gets depth. At 0, the stages on both sides take turns: that saves memory, not time.
    """
    stages, micro_batches = _sizes(stages, micro_batches)
    depths = tuple(parse_whole(each, setting="depths", least=0) for each in depths)
    if len(depths) != stages - 1:
        what = f"{len(depths)} depths for the {stages - 1} links between {stages} stages"
        raise UsageError(what, setting="depths", works=str([1] * (stages - 1)))
    ones = [1] * micro_batches
    steps = tuple(_alternating(ones, warm_up=sum(depths[stage:])) for stage in range(stages))
    return Order(family="depth", stages=stages, micro_batches=micro_batches, depths=depths, steps=steps)


def work_conserving(stages: int, micro_batches: int, caps: int | Sequence[int]) -> Order:
    """The rule: backward if its gradient is there, else forward while fewer than the cap are in flight.

    One cap for all stages, or one each. No cap can deadlock: the oldest micro-batch may always go on.
    """
    stages, micro_batches = _sizes(stages, micro_batches)
    given = caps if isinstance(caps, Sequence) else [caps] * stages
    caps = tuple(parse_whole(each, setting="caps") for each in given)
    if len(caps) != stages:
        what = f"{len(caps)} caps for {stages} stages"
        raise UsageError(what, setting="caps", works=f"one number, or {stages}")
    return Order(family="capped", stages=stages, micro_batches=micro_batches, caps=caps)


def listed(steps: Sequence[str]) -> Order:
    """An order from lists of your own: by stage, its kinds as text, ``["FFBFBB", "FBFBFB"]``.

    Every stage must run every micro-batch forward and, later, backward; whether the stages together come to
    an end is checked by :func:`plait.pipeline.validity.check`.
    """
    steps = tuple(steps)
    if not steps:
        raise UsageError("an order of no stage", setting="steps", works='["FFBFBB", "FBFBFB"]')
    micro_batches = steps[0].count("F")
    for stage, text in enumerate(steps):
        if set(text) != {"F", "B"} or text.count("F") != micro_batches or text.count("B") != micro_batches:
            what = f"stage {stage} has the list {text!r}, stage 0 has {micro_batches} forwards"
            raise UsageError(
                what, setting="steps", works="the letters F and B, as many of each on every stage"
            )
        ahead = 0
        for place, kind in enumerate(text):
            ahead += 1 if kind == "F" else -1
            if ahead < 0:
                what = f"stage {stage} runs B{text[:place].count('B')} before its forward, in {text!r}"
                raise UsageError(what, setting="steps", works='"F" before each "B"')
    return Order(family="listed", stages=len(steps), micro_batches=micro_batches, steps=steps)


def _sizes(stages: int, micro_batches: int) -> tuple[int, int]:
    return parse_whole(stages, setting="stages"), parse_whole(micro_batches, setting="micro_batches")


def _alternating(groups: Sequence[int], *, warm_up: int) -> str:
    """So many groups forward, then a group forward and a group backward in turn, then what is left."""
    warm_up = min(warm_up, len(groups))
    forwards, backwards = ["F" * size for size in groups], ["B" * size for size in groups]
    steady = len(groups) - warm_up
    turns = [f + b for f, b in zip(forwards[warm_up:], backwards[:steady], strict=True)]
    return "".join([*forwards[:warm_up], *turns, *backwards[steady:]])


def _most_in_flight(steps: str) -> int:
    most = now = 0
    for kind in steps:
        now += 1 if kind == "F" else -1
        most = max(most, now)
    return most


def _others_before(steps: str, kind: Kind) -> tuple[int, ...]:
    found, others = [], 0
    for each in steps:
        if each == kind:
            found.append(others)
        else:
            others += 1
    return (*found, others)


def _kind(letter: str) -> Kind:
    return "F" if letter == "F" else "B"
