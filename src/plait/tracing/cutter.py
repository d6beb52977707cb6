"""Where an exported graph is cut into blocks.

The operations stay in the recorded order, which is also the order of random draws, and are cut where
little has to cross:

1. Operations that only view or change a tensor in place belong to that tensor's storage. No cut falls
   between a tensor and a change of it, so what crosses a cut is never changed afterwards.
2. At each place, count the storages in use on both sides. A storage that spans more than ``_LONG``
   weighted operations (a U-Net's skip, an attention mask, an encoder's output) is background and does not
   count: cutting across it is the price of cutting at all. Nor do views of parameters, nor what is only
   waiting to be returned.
3. Cuts may fall where that count is at a local minimum, and not more than one above the lower of the
   nearest such places on either side: outside a residual or attention block, never within one.
4. Between two operations with weights (a parameter of two or more dimensions), the place with the fewest
   bytes crossing is taken, the last of equals: activations, norms and pooling stay with the layer before
   them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import fx

from plait.compat import linear
from plait.tracing.graph import Graph
from plait.tracing.nodes import changed_by, source_of

_LONG = 8


def cuts(graph: Graph) -> list[int]:
    """The places before which the operations are cut."""
    end, weighted = len(graph.operations), graph.weighted()
    allowed = set().union(*_low_plateaus(_counts(graph, weighted))) - _forbidden(graph)
    crossing = _Ranges(end)
    for node, until in graph.last_uses(outputs=True).items():
        crossing.add(graph.position[node] + 1, until, _bytes(node))
    sizes = crossing.totals()
    chosen = []
    for left, right in pairwise(weighted):
        places = [place for place in range(left + 1, right + 1) if place in allowed]
        if places:
            chosen.append(min(places, key=lambda place: (sizes[place], -place)))
    return chosen


def _counts(graph: Graph, weighted: Sequence[int]) -> list[int]:
    """The number of storages, without background, that cross a cut at each place; one at least."""
    end, marks = len(graph.operations), set(weighted)
    before = [0, *accumulate(int(place in marks) for place in range(end))]  # weighted, before a place
    spans: dict[fx.Node, tuple[int, int]] = {}
    for node, until in graph.last_uses(outputs=False).items():
        start, root = graph.position[node], graph.root[node]
        first, latest = spans.get(root, (start, until))
        spans[root] = min(first, start), max(latest, until)
    counts = _Ranges(end)
    for root, (start, until) in spans.items():
        if root not in graph.viewed and before[until] - before[start + 1] <= _LONG:
            counts.add(start + 1, until, 1)
    return [max(1, count) for count in counts.totals()]


def _forbidden(graph: Graph) -> set[int]:
    """Places that a tensor crosses which is changed in place later, or what is no tensor of known size."""
    places: set[int] = set()
    for place, node in enumerate(graph.operations):
        for changed in changed_by(node):
            made = [graph.position[n] for n in _same_storage(changed, graph)]
            places.update(range(min(made, default=place) + 1, place + 1))
    for first, last in graph.updates:  # such a buffer belongs to one block
        places.update(range(graph.position[first] + 1, graph.position[last] + 1))
    for node, until in graph.last_uses(outputs=True).items():
        if not _has_size(node):
            places.update(range(graph.position[node] + 1, until + 1))
    return places


def _same_storage(node: fx.Node, graph: Graph) -> Iterator[fx.Node]:
    """The operations and inputs that lead to a node by views and changes in place, itself first."""
    above: fx.Node | None = node
    while above is not None and above in graph.position:
        yield above
        above = source_of(above)


def _has_size(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(linear(size) is not None for size in value.shape)


def _bytes(node: fx.Node) -> int:
    """The size at a batch of two."""
    if not _has_size(node):
        return 0
    total: int = node.meta["val"].element_size()
    for factor, constant in (linear(size) or (0, 0) for size in node.meta["val"].shape):
        total *= 2 * factor + constant
    return total


class _Ranges:
    """Numbers for the places 0 to end, built by adding to ranges of them."""

    def __init__(self, end: int) -> None:
        self._steps = [0] * (end + 2)

    def add(self, first: int, last: int, amount: int) -> None:
        """Add to the places from first to last."""
        self._steps[first] += amount
        self._steps[last + 1] -= amount

    def totals(self) -> list[int]:
        """The number at each place."""
        return list(accumulate(self._steps))[:-1]


def _low_plateaus(counts: Sequence[int]) -> list[range]:
    """Plateaus that are lower than what lies beside them, less those that stand high between lower ones."""
    found: list[range] = []
    start = 0
    for place in range(1, len(counts) + 1):
        if place == len(counts) or counts[place] != counts[start]:
            falls = start == 0 or counts[start - 1] > counts[start]
            rises = place == len(counts) or counts[place] > counts[start]
            if falls and rises:
                found.append(range(start, place))
            start = place
    while True:
        heights = [counts[plateau.start] for plateau in found]
        high = [i for i in range(1, len(found) - 1) if heights[i] > 1 + min(heights[i - 1], heights[i + 1])]
        if not high:
            return found
        del found[max(high, key=lambda i: heights[i])]
