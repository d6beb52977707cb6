"""A block: a part of a model that takes named values and gives named values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.errors import TraceError, UsageError
from plait.state import State
from plait.value import Value


@dataclass(frozen=True)
class Mode:
    """What a step runs in training, or in evaluation: a stateless program, and the state it takes."""

    state: tuple[str, ...]
    run: Callable[..., tuple[torch.Tensor, ...]]
    """Called with the values read, then the state."""


@dataclass(frozen=True)
class Step:
    """The names of the values that go in and out, and what is run; a block has one or more steps."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    training: Mode
    evaluation: Mode


class Block(nn.Module):
    """One or more steps of a chain; called with the values it reads, it returns those it writes.

    It never changes what it reads, so a block can be run again from the same values.
    """

    def __init__(
        self,
        name: str,
        steps: Sequence[Step],
        reads: Sequence[str],
        writes: Sequence[str],
        state: State,
    ) -> None:
        super().__init__()
        self.name = name
        self.reads = tuple(reads)
        """Names of the values it takes, in order."""
        self.writes = tuple(writes)
        """Names of the values it gives, in order."""
        self.steps = tuple(steps)
        self._state = state
        used = [name for step in steps for name in (*step.training.state, *step.evaluation.state)]
        self.state_names = tuple(dict.fromkeys(used))
        """The model's names of the parameters, buffers and constants that it uses."""
        for key in self.state_names:
            state.hold(self, key)
        last = {name: place for place, step in enumerate(steps) for name in (*step.reads, *step.writes)}
        self._dead = [[n for n, place in last.items() if place == at and n not in self.writes]
                      for at in range(len(steps))]  # fmt: skip

    def state(self, name: str) -> torch.Tensor:
        """A parameter, buffer or constant by the model's name."""
        return self._state[name]

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the steps in order."""
        return self.call(values, {name: self._state[name] for name in self.state_names})

    def call(
        self, values: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """Run the steps with parameters and buffers given from outside."""
        self._check(values, state)
        held = dict(zip(self.reads, values, strict=True))
        for step, dead in zip(self.steps, self._dead, strict=True):
            mode = step.training if self.training else step.evaluation
            given = mode.run(*(held[name] for name in step.reads), *(state[name] for name in mode.state))
            if not isinstance(given, tuple) or len(given) != len(step.writes):
                count = len(given) if isinstance(given, tuple) else type(given).__name__
                raise TraceError(
                    f"block {self.name!r} gave {count} where {len(step.writes)} tensor(s) were expected",
                    setting="example_inputs",
                    works="Chain.of(blocks, example_inputs), so that the number of tensors is known",
                )
            held.update(zip(step.writes, given, strict=True))
            for name in dead:
                del held[name]
        return tuple(held[name] for name in self.writes)

    def _check(self, values: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        if len(values) != len(self.reads):
            raise UsageError(
                f"block {self.name!r} takes {len(self.reads)} values, and got {len(values)}",
                setting="values",
                works=", ".join(self.reads),
            )
        absent = next((name for name, tensor in state.items() if tensor.is_meta), None)
        if absent is not None and not any(isinstance(v, torch.Tensor) and v.is_meta for v in values):
            raise UsageError(
                f"block {self.name!r} does not exist yet: its {absent!r} is on the meta device",
                setting="block",
                works="chain.create(place, seed=...) or chain.load(place, path) before it runs",
            )

    def extra_repr(self) -> str:
        """What goes in and out."""
        return f"{self.name}: {', '.join(self.reads)} -> {', '.join(self.writes)}"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All that a chain is made of."""

    model: nn.Module
    state: State
    blocks: tuple[Block, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str | None, ...]
    values: dict[str, Value]
    frozen: frozenset[nn.Module]
    """Modules that stay in evaluation while the model trains."""
    unpack: Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]
    """From the model's arguments to the input values."""
    pack: Callable[[list[Any]], Any]
    """From the output values to what the model returns."""
    example: tuple[tuple[Any, ...], dict[str, Any]] | None


def frozen(model: nn.Module) -> frozenset[nn.Module]:
    """The modules of a training model that are in evaluation, as a frozen BatchNorm is."""
    return frozenset(module for module in model.modules() if model.training and not module.training)
