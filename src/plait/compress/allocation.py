"""Which layer gets how many bits: the cheapest widths whose total error stays within a budget.

After CGX (I. Markov, H. Ramezanikebrya, D. Alistarh, "CGX: adaptive system support for
communication-efficient deep learning", Middleware 2022): layers differ in size and in how much quantization
hurts them, so the error that uniform bits would make is better spent where it saves most. CGX groups layers
by k-means (see kmeans.py) and gives each group a width; here the best choice of all is computed.

| paper | here |
| --- | --- |
| layer l, its bit-width b_l | an entry of ``Allocation.bits`` (None: uncompressed) |
| squared error of layer l at b bits | ``LayerError.error_at(b)`` |
| E_4, the error of 4 bits everywhere | ``Allocation.reference_error`` |
| alpha | ``alpha`` |

    minimise    bytes on the wire, or the communication time that backward does not hide
    subject to  sum of squared errors  <=  alpha * sum of squared errors at ``reference_bits``

Errors are rounded up to multiples of at most 2^-59 of the budget, and all sums are exact, so the constraint
holds as stated, not to within rounding. Up to that the choice is optimal (``gap`` is 0), unless the search
was thinned; then ``gap`` says by how much at most it costs too much. No uniform width that satisfies the
constraint is ever cheaper.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from plait.collective import Link, ring_ms
from plait.compress.frontier import LARGEST, Options, cheapest
from plait.compress.observation import LayerError
from plait.document import checked, read_json
from plait.errors import UsageError
from plait.units import parse_whole

FORMAT = "plait.plan.compress/1"

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """The communication time that is left when backward has ended.

    One layer after another is reduced, in the order in which their gradients get ready, each by a ring (or
    scatter-reduce-allgather, which sends as much) over ``world`` workers.
    """

    ready_ms: tuple[float, ...]
    """By layer: when its gradient is there, counted from the start of backward."""
    link: Link
    world: int
    backward_ms: float | None = None
    """When backward ends; when the last gradient is ready, if not given."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ready_ms", tuple(self.ready_ms))
        for time_ms in (*self.ready_ms, *([] if self.backward_ms is None else [self.backward_ms])):
            if not 0 <= time_ms < math.inf:
                raise UsageError(
                    f"a gradient ready, or backward ended, after {time_ms} ms",
                    setting="ready_ms, backward_ms",
                    works="0 or more",
                )
        self.transfer_ms(0)

    def transfer_ms(self, count_bytes: int) -> float:
        """How long a layer of so many bytes keeps the wire."""
        return ring_ms(count_bytes, self.world, self.link)

    def end_ms(self) -> float:
        """When backward ends."""
        return max(self.ready_ms, default=0.0) if self.backward_ms is None else self.backward_ms


Cost = Literal["bytes"] | Exposed
"""What is minimised."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A plan: the width of every layer, and what that costs by the observations it was made from."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    bits: dict[str, int | None]
    """By layer; None is uncompressed."""
    elements: int
    payload_bytes: int
    """All layers, as they cross the wire once."""
    exact_bytes: int
    """The same, uncompressed."""
    squared_error: float
    reference_error: float
    """The squared error of ``reference_bits`` everywhere."""
    reference_bits: int = 4
    alpha: float
    exposed_ms: float | None = None
    """Communication time that backward does not hide, where that was asked for."""
    gap: float | None = None
    """By what share at most a cheaper choice could be cheaper; None where nothing is claimed."""
    nonfinite: tuple[str, ...] = ()
    """Layers that are uncompressed because their error is not finite; they do not count in any error."""

    def __post_init__(self) -> None:
        if not self.bits:
            raise UsageError("a plan without layers", setting="bits", works='{"layer": 4}')
        for name, bits in self.bits.items():
            if bits is not None and not 1 <= bits <= 8:
                raise UsageError(f"layer {name!r} has {bits} bits", setting="bits", works="1 to 8, or None")
        for field, value in vars(self).items():
            if isinstance(value, (int, float)) and not (value >= 0 and math.isfinite(value)):
                raise UsageError(f"{field} is {value}", setting=field, works="0 or more")

    @property
    def cost(self) -> float:
        """What was minimised: bytes, or exposed milliseconds."""
        return self.payload_bytes if self.exposed_ms is None else self.exposed_ms

    @property
    def holds(self) -> bool:
        """Whether the error is within alpha times the reference, to the rounding of these two numbers."""
        return self.squared_error <= self.alpha * self.reference_error * (1 + 1e-12)

    @property
    def mean_bits(self) -> float:
        """Bits on the wire for each element, all told."""
        return 8 * self.payload_bytes / self.elements if self.elements else 0.0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than uncompressed."""
        return self.exact_bytes / self.payload_bytes if self.payload_bytes else 1.0

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {"format": FORMAT, **asdict(self), "nonfinite": list(self.nonfinite)}

    @classmethod
    def from_json(cls, data: Any, *, source: str = "plan") -> Allocation:
        """Read what ``to_json`` gives; ``source`` names the file in errors."""
        return checked(cls, data, format=FORMAT, source=source)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Allocation:
        """Read a plan; an error names the file and the field."""
        return cls.from_json(read_json(path), source=str(path))


def allocate(
    layers: Sequence[LayerError],
    alpha: float = 1.0,
    *,
    reference_bits: int = 4,
    cost: Cost = "bytes",
    states: int = 4096,
) -> Allocation:
    """The cheapest widths with a total squared error of at most alpha times that of ``reference_bits``.

    A layer may also stay uncompressed; one whose error is not finite does, and ``nonfinite`` names it.
    ``states`` bounds the search: time and memory grow with it, and beyond it the result is no longer optimal
    for certain (see ``gap``). Of equally cheap plans, the one with the least error is taken.
    """
    _check(layers, alpha, reference_bits)
    states = parse_whole(states, setting="states")
    wire = _wire(layers, cost)
    over, under = float(alpha).as_integer_ratio()
    budget = over * _total(layers, {layer.name: reference_bits for layer in layers}) // under
    # Everything uncompressed has no error, so there always is one.
    _, _, uniform = min(
        ((wire.end(layers, bits), error, bits) for bits, error in _uniform(layers) if error <= budget),
        key=lambda known: known[:2],
    )
    rows, limit = _rows(layers, wire, budget)
    # Rounding up may bar a uniform width that meets the constraint to the last bit: it is handed over.
    known = [row.bits.index(uniform[row.name]) for row in rows]
    # After the layers comes the end of backward, with nothing to send.
    end = Options(np.array([0]), np.array([0]), wire.backward)
    choice = cheapest([*(row.options for row in rows), end], limit, known=[*known, 0], states=states)
    bits = {row.name: row.bits[option] for row, option in zip(rows, choice.options, strict=False)}
    exposed = choice.cost - wire.backward
    gap = (choice.cost - max(choice.least, wire.backward)) / exposed if exposed else 0.0
    return price(layers, bits, alpha, reference_bits=reference_bits, cost=cost, gap=gap)


def price(
    layers: Sequence[LayerError],
    bits: Mapping[str, int | None],
    alpha: float = 1.0,
    *,
    reference_bits: int = 4,
    cost: Cost = "bytes",
    gap: float | None = None,
) -> Allocation:
    """The plan with these widths, whether it keeps the budget (``holds``) or not.

    Layers with a non-finite error are left uncompressed, whatever ``bits`` says.
    """
    _check(layers, alpha, reference_bits)
    if missing := [layer.name for layer in layers if layer.name not in bits]:
        raise UsageError(f"layer {missing[0]!r} has no width", setting="bits", works="one for every layer")
    chosen = {layer.name: bits[layer.name] if layer.finite else None for layer in layers}
    wire = _wire(layers, cost)
    finite = [layer for layer in layers if layer.finite]
    return Allocation(
        bits=chosen,
        elements=sum(layer.count for layer in layers),
        payload_bytes=sum(layer.bytes_at(chosen[layer.name]) for layer in layers),
        exact_bytes=sum(layer.exact_bytes for layer in layers),
        squared_error=math.fsum(layer.error_at(chosen[layer.name]) for layer in finite),
        reference_error=math.fsum(layer.error_at(reference_bits) for layer in finite),
        reference_bits=reference_bits,
        alpha=alpha,
        exposed_ms=None if cost == "bytes" else (wire.end(layers, chosen) - wire.backward) / _PER_MS,
        gap=gap,
        nonfinite=tuple(layer.name for layer in layers if not layer.finite),
    )


def _total(layers: Sequence[LayerError], bits: Mapping[str, int | None]) -> int:
    """The squared error of the finite layers as a multiple of 2^-1074, of which every float is a multiple."""
    return sum(_fixed(layer.error_at(bits[layer.name])) for layer in layers if layer.finite)


def _fixed(number: float) -> int:
    over, under = number.as_integer_ratio()
    return over << 1075 - under.bit_length()


def _uniform(layers: Sequence[LayerError]) -> Iterator[tuple[dict[str, int | None], int]]:
    """Every width that all layers were measured at, and uncompressed, each with its error."""
    shared = set.intersection(*(set(layer.widths) for layer in layers))
    for width in (*sorted(shared), None):
        bits = {layer.name: width if layer.finite else None for layer in layers}
        yield bits, _total(layers, bits)


# --- in whole numbers ---------------------------------------------------------------------------------

_PER_MS = 10**6
"""Times are whole nanoseconds."""


class _Wire(NamedTuple):
    """The cost in ticks: nanoseconds, or bytes, for which every layer is ready at once."""

    order: list[int]
    """Places of the layers in the order in which they are sent."""
    ready: list[int]
    backward: int
    ticks: Callable[[int], int]

    def end(self, layers: Sequence[LayerError], bits: Mapping[str, int | None]) -> int:
        """When the last layer has been sent and backward has ended."""
        idle = 0
        for place in self.order:
            layer = layers[place]
            idle = max(idle, self.ready[place]) + self.ticks(layer.bytes_at(bits[layer.name]))
        return max(idle, self.backward)


def _wire(layers: Sequence[LayerError], cost: Cost) -> _Wire:
    if cost == "bytes":
        return _Wire(list(range(len(layers))), [0] * len(layers), 0, int)
    if not isinstance(cost, Exposed):
        raise UsageError(f"there is no cost {cost!r}", setting="cost", works='"bytes" or Exposed(...)')
    if len(cost.ready_ms) != len(layers):
        raise UsageError(
            f"there are {len(cost.ready_ms)} ready times for {len(layers)} layers",
            setting="ready_ms",
            works="one for every layer",
        )
    longest_ms = max(cost.end_ms(), *cost.ready_ms) + sum(
        cost.transfer_ms(max(layer.exact_bytes, *layer.payload_bytes)) for layer in layers
    )
    if longest_ms * _PER_MS > LARGEST / 2:
        raise UsageError(
            f"a step would take {longest_ms / 1e3:.3g} s on this wire", setting="link", works="a faster one"
        )
    return _Wire(
        sorted(range(len(layers)), key=lambda place: cost.ready_ms[place]),
        [round(ready_ms * _PER_MS) for ready_ms in cost.ready_ms],
        round(cost.end_ms() * _PER_MS),
        lambda count_bytes: math.ceil(cost.transfer_ms(count_bytes) * _PER_MS),
    )


class _Row(NamedTuple):
    name: str
    bits: tuple[int | None, ...]
    options: Options


def _rows(layers: Sequence[LayerError], wire: _Wire, budget: int) -> tuple[list[_Row], int]:
    """The options of each layer in sending order, and the budget, both with 60 bits.

    Errors are rounded up and the budget down.
    """
    dropped = max(0, budget.bit_length() - 60)
    rows = []
    for place in wire.order:
        layer = layers[place]
        errors = {bits: _fixed(layer.error_at(bits)) for bits in layer.widths if layer.finite}
        widths = (*(bits for bits, error in errors.items() if error <= budget), None)
        rounded = [0 if bits is None else -(-errors[bits] >> dropped) for bits in widths]
        costs = [wire.ticks(layer.bytes_at(bits)) for bits in widths]
        rows.append(_Row(layer.name, widths, Options(np.array(rounded), np.array(costs), wire.ready[place])))
    return rows, budget >> dropped


def _check(layers: Sequence[LayerError], alpha: float, reference_bits: int) -> None:
    if not layers:
        raise UsageError("there are no layers to choose bits for", setting="layers", works="one or more")
    if not (alpha > 0 and math.isfinite(alpha)):
        raise UsageError(f"alpha is {alpha}", setting="alpha", works="1.0")
    names = [layer.name for layer in layers]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"two layers are called {twice!r}", setting="layers", works="one name each")
    for layer in layers:
        layer.error_at(reference_bits)
