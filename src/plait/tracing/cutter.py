"""Where an exported graph is cut into blocks.

The operations stay in the recorded order, which is also the order of random draws, and are cut where
little has to cross:

1. Operations that only view or change a tensor in place belong to that tensor's storage. No cut falls
   between a tensor and a change of it, so what crosses a cut is never changed afterwards.
2. At each place, count the storages in use on both sides, without background: what spans more than
   ``_LONG`` operations with weights (a parameter of two or more dimensions), as an encoder's output does,
   or more than ``_SHORT`` if it is only joined to something else at its end, as a U-Net's skip or an
   attention mask is. Cutting across these is the price of cutting at all. Views of parameters do not count
   either, nor does what is only waiting to be returned, nor an input before its first use.
3. Cuts may fall where that count is at a local minimum, and not above the nearest such places on both
   sides: outside a residual or attention block, never within one.
4. Between two operations with weights, the place with the fewest bytes crossing is taken, the last of
   equals: activations, norms and pooling stay with the layer before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import fx

from plait.compat import linear, nesting
from plait.tracing.graph import Graph
from plait.tracing.nodes import CONCATENATE, ELEMENTWISE, changed_by, has_size, sources

_LONG = 8
_SHORT = 2


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
    spans: dict[fx.Node, tuple[int, int, fx.Node]] = {}
    for node, until in graph.last_uses(outputs=False).items():
        root, start = graph.root[node], graph.position[node]
        if start < 0:
            start = graph.first_use(node) - 1
        first, latest, reader = spans.get(root, (start, until, node))
        spans[root] = min(first, start), max(latest, until), node if until >= latest else reader
    counts = _Ranges(end)
    for root, (start, until, node) in spans.items():
        limit = _SHORT if _is_joined(graph.operations[until], node) else _LONG
        if root not in graph.viewed and before[until] - before[start + 1] <= limit:
            counts.add(start + 1, until, 1)
    return [max(1, count) for count in counts.totals()]


def _is_joined(node: fx.Node, argument: fx.Node) -> bool:
    """Whether an argument is joined to something else: concatenated, spread over it, or a mask for it."""
    if node.target is torch.ops.aten.scaled_dot_product_attention.default:
        return argument is node.kwargs.get("attn_mask") or argument in node.args[3:4]
    smaller = _size(argument) < _size(node)
    return node.target in CONCATENATE or (node.target in ELEMENTWISE and smaller)


def _forbidden(graph: Graph) -> set[int]:
    """Places that a tensor crosses which is changed in place later, or what is no tensor of known size.

    Nor may a cut fall inside `torch.vmap`, where tensors are rows of others.
    """
    places: set[int] = set()
    depth = 0
    for place, node in enumerate(graph.operations):
        if depth:
            places.add(place)
        depth += nesting(node.target)
    for place, node in enumerate(graph.operations):
        for changed in changed_by(node):
            made = [graph.position[n] for n in sources(changed) if n in graph.position]
            places.update(range(min(made, default=place) + 1, place + 1))
    for first, last in graph.updates:  # such a buffer belongs to one block
        places.update(range(graph.position[first] + 1, graph.position[last] + 1))
    for node, until in graph.last_uses(outputs=True).items():
        if not has_size(node):
            places.update(range(graph.position[node] + 1, until + 1))
    return places


def _size(node: fx.Node) -> int:
    """The number of elements at a batch of two; 0 where it is not known."""
    if not has_size(node):
        return 0
    sizes = (linear(size) or (0, 0) for size in node.meta["val"].shape)
    return prod(2 * factor + constant for factor, constant in sizes)


def _bytes(node: fx.Node) -> int:
    size = _size(node)
    return size * int(node.meta["val"].element_size()) if size else 0


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
        high = [i for i in range(1, len(found) - 1) if heights[i] > min(heights[i - 1], heights[i + 1])]
        if not high:
            return found
        del found[max(high, key=lambda i: heights[i])]
