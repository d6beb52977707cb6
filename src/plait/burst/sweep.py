"""One forward and backward pass of a batch over the blocks, on one rank.

    widths      block 0: 2    block 1: 2    block 2: 1    block 3: 2
    rank 0      F0   F1   gets rows   F2   gives rows   F3 | B3   gets   B2   gives   B1   B0
    rank 1      F0   F1   gives rows  --   gets rows    F3 | B3   gives  --   gets    B1   B0

A rank goes through all blocks in order and runs those that it is in. The model's inputs never move: every
rank is given the whole batch, and cuts its rows out of it at whatever width a block reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from plait.burst import terms
from plait.burst.diary import Doing
from plait.burst.form import Form
from plait.burst.reshard import Arriving, Passage, Post, landed
from plait.burst.rows import begin
from plait.chain import Chain
from plait.compat import tree_map
from plait.objective import Objective
from plait.visit import Boundary, Visit


@dataclass(frozen=True, kw_only=True)
class Route:
    """What stays the same from pass to pass, until the plan changes."""

    chain: Chain
    widths: tuple[int, ...]
    objective: Objective
    post: Post
    state: Callable[[int], dict[str, torch.Tensor]]
    """The parameters and buffers of a block."""
    entering: Callable[[Doing, int], AbstractContextManager[Any]]
    """Around a block's forward, the loss, or a block's backward."""
    idling: Callable[[bool], None]
    """Told whether this rank, if it waits now, waits for blocks that run elsewhere."""
    known: dict[str, list[Form]]
    """Forms by cut and direction, once the first pass has told them."""

    @property
    def rank(self) -> int:
        """This one."""
        return self.post.rank

    def runs(self, place: int) -> bool:
        """Whether this rank runs a block."""
        return self.rank < self.widths[place]

    def label(self, place: int) -> str:
        """A cut in words."""
        before, after = self.chain[place - 1].name, self.chain[place].name
        return f"the cut from {before!r} ({self.widths[place - 1]}) to {after!r} ({self.widths[place]})"

    def cuts(self) -> list[int]:
        """The blocks that are wider or narrower than the one before them."""
        return [place for place in range(1, len(self.widths)) if self.widths[place] != self.widths[place - 1]]

    def names(self, place: int, *, reverse: bool) -> list[str]:
        """The values that move at a cut, those first that are needed first."""
        chain = self.chain
        alive = [name for name in chain.live(place) if name not in chain.inputs]
        ahead = range(place - 1, -1, -1) if reverse else range(place, len(chain))
        need: dict[str, int] = {}
        for rank, other in enumerate(ahead):
            for name in (*chain[other].reads, *(chain[other].writes if reverse else ())):
                need.setdefault(name, rank)
        return sorted(alive, key=lambda name: need.get(name, len(chain)))


class Sweep:
    """A pass under way."""

    def __init__(self, route: Route, batch: Any, rows: int, signature: str) -> None:
        """``batch`` is whole and the same on every rank; batches of one signature have values of one form."""
        self._route, self._batch, self._rows, self._signature = route, batch, rows, signature
        self._visits: dict[int, Visit] = {}
        self._started: dict[int, dict[str, Any]] = {}
        self._end = Boundary()
        self._ahead: dict[str, Passage] = {}
        cuts = route.cuts()
        self._turns = [f"{place}/f" for place in cuts] + [f"{place}/b" for place in reversed(cuts)]

    # --- forward ------------------------------------------------------------------------------------

    def forward(self, weights: Sequence[float], total: float) -> float:
        """Run all blocks and the loss; this rank's part of the loss.

        ``weights`` are those of the ranks that run the last block, ``total`` that of the whole step.
        """
        route = self._route
        values: dict[str, Any] = {}
        self._expect(0)
        for place, block in enumerate(route.chain):
            if place and route.widths[place] != route.widths[place - 1]:
                values = self._cross(place, values, reverse=False)
            if not route.runs(place):
                continue
            route.idling(place > 0 and not route.runs(place - 1))
            given = {name: self._value(name, values, place) for name in block.reads}
            route.idling(False)
            state = route.state(place)
            with route.entering("forward", place), route.objective.autocast(route.post.device.type):
                visit = Visit(block, given, state=state)
            self._visits[place] = visit
            values.update(visit.writes)
            alive = route.chain.live(place + 1)
            values = {name: values[name] for name in alive if name in values}
        last = len(route.chain) - 1
        return self._loss(values, weights[route.rank], total) if route.runs(last) else 0.0

    def _loss(self, values: dict[str, Any], weight: float, total: float) -> float:
        route, last = self._route, len(self._route.chain) - 1
        alive = {name: self._value(name, values, last) for name in route.chain.live(last + 1)}
        with route.entering("loss", last):
            with route.objective.autocast(route.post.device.type):
                output = route.chain.finish({name: self._end.enter(name, v) for name, v in alive.items()})
                part, value = route.objective.share(output, self._cut(last), weight=weight, total=total)
            if part.requires_grad:
                part.backward()  # type: ignore[no-untyped-call]
            else:
                terms.check_learns(output, route.chain)
        return value

    def _value(self, name: str, values: dict[str, Any], place: int) -> Any:
        """A value that a block reads: an input, one computed here, or one on its way, which is waited for."""
        if name not in values:
            return self._inputs(place)[name]
        if isinstance(values[name], Arriving):
            arriving: Arriving = values[name]
            tensor = landed(self._route.post, arriving, self._route.label(place))
            values[name] = tensor.requires_grad_(arriving.form.differentiable)
        return values[name]

    def _cut(self, place: int) -> Any:
        """The rows of the batch that this rank has at the width of a block."""
        width, rank = self._route.widths[place], self._route.rank
        start, end = begin(self._rows, width, rank), begin(self._rows, width, rank + 1)
        return cut(self._batch, self._rows, start, end)

    def _inputs(self, place: int) -> dict[str, Any]:
        width = self._route.widths[place]
        if width not in self._started:
            args, kwargs = self._route.objective.model_inputs(self._cut(place))
            self._started[width] = self._route.chain.start(*args, **kwargs)
        return self._started[width]

    # --- backward -----------------------------------------------------------------------------------

    def backward(self, ended: Callable[[int], None]) -> None:
        """Run all blocks backward; ``ended`` is told of each, also of those that run elsewhere."""
        route = self._route
        gradients: dict[str, Any] = dict(self._end.gradients)
        self._end = Boundary()
        for place in reversed(range(len(route.chain))):
            if place + 1 < len(route.chain) and route.widths[place] != route.widths[place + 1]:
                gradients = self._cross(place + 1, gradients, reverse=True)
            if route.runs(place):
                block = route.chain[place]
                route.idling(place + 1 < len(route.chain) and not route.runs(place + 1))
                for name in (*block.reads, *block.writes):
                    if isinstance(gradients.get(name), Arriving):
                        gradients[name] = landed(route.post, gradients[name], route.label(place + 1))
                route.idling(False)
                with route.entering("backward", place):
                    self._visits.pop(place).backward(gradients)
            ended(place)

    # --- where widths differ ------------------------------------------------------------------------

    def _cross(self, place: int, held: dict[str, Any], *, reverse: bool) -> dict[str, Any]:
        """Take values, or gradients on the way back, from one width to another; theirs are the results."""
        route = self._route
        key = f"{place}/{'b' if reverse else 'f'}"
        before, after = self._widths(key)
        if route.rank >= max(before, after):
            return {}
        here = {}
        for name, value in held.items():
            if isinstance(value, Arriving):  # passed through, read by none of the blocks in between
                here[name] = landed(route.post, value, route.label(place))
                here[name].requires_grad_(value.form.differentiable and not reverse)
            else:
                here[name] = value
        forms = self._forms(key, here)
        passage = self._ahead.pop(key, None) or self._passage(key, forms)
        passage.depart(here)
        self._expect(self._turns.index(key) + 1)
        return dict(passage.arrive())

    def _widths(self, key: str) -> tuple[int, int]:
        place, way = key.split("/")
        widths = self._route.widths[int(place) - 1], self._route.widths[int(place)]
        return widths if way == "f" else (widths[1], widths[0])

    def _forms(self, key: str, held: Mapping[str, Any]) -> list[Form]:
        """What passes at a cut; rank 0, which runs every block, tells the others the first time."""
        route, place, reverse = self._route, int(key.split("/")[0]), key.endswith("b")
        name = f"{self._signature}/{key}"
        if name not in route.known:
            if route.rank == 0:
                found = self._read_forms(place, held, reverse)
                route.post.crew.tell(name, [form.to_json() for form in found])
            else:
                told = route.post.crew.hear(name, f"word of what passes {route.label(place)}")
                found = [Form.from_json(each) for each in told]
            route.known[name] = found
        return route.known[name]

    def _read_forms(self, place: int, held: Mapping[str, Any], reverse: bool) -> list[Form]:
        route = self._route
        names = route.names(place, reverse=reverse)
        if reverse:  # gradients lie as their values did; there is none for a value that the loss ignores
            values = {form.name: form for form in route.known[f"{self._signature}/{place}/f"]}
            return [values[name] for name in names if held.get(name) is not None]
        width = route.widths[place - 1]
        rows = begin(self._rows, width, 1)
        told = route.chain.values
        return [
            Form.of(name, held[name], rows, told[name] if told else None, cut=route.label(place))
            for name in names
        ]

    def _passage(self, key: str, forms: Sequence[Form]) -> Passage:
        before, after = self._widths(key)
        reverse = key.endswith("b")
        what = f"{'the gradients at ' if reverse else ''}{self._route.label(int(key.split('/')[0]))}"
        return Passage(
            self._route.post,
            forms,
            rows=self._rows,
            before=before,
            after=after,
            gradients=reverse,
            what=what,
        )

    def _expect(self, turn: int) -> None:
        """Post the receives of the next cut, if it is known what will come."""
        route = self._route
        for key in self._turns[turn:]:
            if route.rank < max(self._widths(key)):
                forms = route.known.get(f"{self._signature}/{key}")
                if forms is not None and key not in self._ahead:
                    self._ahead[key] = self._passage(key, forms)
                    self._ahead[key].expect()
                return


def cut(batch: Any, rows: int, start: int, end: int) -> Any:
    """Some rows of a batch: of every tensor that has as many as the batch."""

    def rows_of(leaf: Any) -> Any:
        whole = isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows
        return leaf[start:end] if whole else leaf

    return tree_map(rows_of, batch)
