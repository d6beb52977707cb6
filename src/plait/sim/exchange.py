"""Rows that go from ranks to ranks, one message at a time for each that sends and each that receives.

The time of a cut, as :mod:`plait.burst.costs` has it, is the longest of all ranks' sending and receiving.
That is reached if ranks take turns well, and in rows there is a way. Messages in the order of their rows are
a path: those of a rank that sends follow each other, and so do those of a rank that receives, and the last
of one may be the first of the next.

    sends      | 0: a b c | 1: d e f |        rank 0 takes  a b c,   c ends last
    receives       | 2: c d |   | 3: f g |     rank 2 takes  d c,     so 1 begins with d: d e f, ...

So every other rank goes through its messages backwards: a message that two ranks share is the first of both
or the last of both, and all are through when the busiest rank is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from plait.burst.rows import Move

End = tuple[str, int]
"""``sends`` or ``receives``, and the rank."""


def turns(moves: Sequence[Move]) -> dict[End, tuple[int, ...]]:
    """By end, its messages in the order of its turns, as places in ``moves`` (which are in that of rows)."""
    found: dict[End, list[int]] = {}
    for place, move in enumerate(moves):
        for end in _ends(move):
            found.setdefault(end, []).append(place)
    backwards: dict[End, bool] = {}
    for place, move in enumerate(moves):
        several = [end for end in _ends(move) if len(found[end]) > 1]
        if len(several) == 2:
            earlier, later = sorted(several, key=lambda end: found[end][0])
            assert found[earlier][-1] == found[later][0] == place, "messages of rows are a path"
            backwards[later] = not backwards.get(earlier, False)
    return {
        end: tuple(reversed(its)) if backwards.get(end, False) else tuple(its) for end, its in found.items()
    }


class Exchange:
    """Messages under way: each goes when it is the turn of both its ends."""

    def __init__(
        self,
        moves: Sequence[Move],
        send: Callable[[Move, Callable[[], None]], None],
        then: Callable[[], None],
    ) -> None:
        """``send`` is given a move and what to call when it has arrived; ``then`` comes after the last."""
        self._moves, self._send, self._then = moves, send, then
        self._turns = {end: deque(its) for end, its in turns(moves).items()}
        self._left = len(moves)

    def begin(self) -> None:
        """Send what can go at once."""
        for place in range(len(self._moves)):
            self._try(place)

    def _try(self, place: int) -> None:
        if all(self._turns[end][0] == place for end in _ends(self._moves[place])):
            self._send(self._moves[place], partial(self._arrive, place))

    def _arrive(self, place: int) -> None:
        ends = _ends(self._moves[place])
        for end in ends:
            self._turns[end].popleft()
        self._left -= 1
        if not self._left:
            self._then()
        for following in {self._turns[end][0] for end in ends if self._turns[end]}:
            self._try(following)


def _ends(move: Move) -> tuple[End, End]:
    return ("sends", move.source), ("receives", move.target)
