"""The optimizer, parameter by parameter: the same numbers as all at once, with the state of one in memory.

The job's optimizer is built over all parameters, on the meta device, so that it forms its groups; a learning
rate schedule moves those as it always does. To update a parameter, the optimizer is given just this one, in
its group and with its state. An optimizer that mixes parameters (or counts steps outside of their state)
would give other numbers then, which is tried on small tensors before anything begins.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.errors import UsageError
from plait.job import Job
from plait.spill.views import name_of

_STEPS = 3
"""Of the trial: state may appear after the first one."""


@dataclass(frozen=True)
class StateShape:
    """What an optimizer keeps for each parameter."""

    entries: dict[str, tuple[tuple[str, bool, str], ...]]
    """By parameter: name, whether it has the parameter's shape or is one number, type."""
    eager: bool
    """It is there from the start, not from the first step on."""


class Updater:
    """A job's optimizer and schedule over parameters that are not there, lent one at a time."""

    def __init__(self, job: Job, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """``parameters`` are the trained ones, in the model's order; only their shapes and types matter."""
        self._job = job
        self._pairs = [(n, nn.Parameter(torch.empty_like(p, device="meta"))) for n, p in parameters]
        self._build()

    def _build(self) -> None:
        self._optimizer = self._job.build_optimizer(self._pairs)
        self._schedule = self._job.build_schedule(self._optimizer)
        self._step = 0
        self._group = _groups(self._optimizer, self._pairs)

    def at(self, step: int) -> None:
        """Bring the learning rates to those of a step: they depend on its number alone."""
        if step < self._step:
            self._build()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of schedules that move before their optimizer
            while self._step < step:
                if self._schedule is not None:
                    self._schedule.step()
                self._step += 1

    @property
    def learning_rate(self) -> float:
        """Of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def begins_at_zero(self) -> bool:
        """Whether state that does not exist yet may as well be zeros, made where it is to lie."""
        return type(self._optimizer) in (torch.optim.Adam, torch.optim.AdamW)

    def update(
        self, name: str, parameter: torch.Tensor, state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Update a parameter, which has its gradient, in place; the state afterwards."""
        group = self._group.get(name)
        if group is None:  # the optimizer was not given it
            return dict(state)
        return _lend(self._optimizer, group, name, parameter, state)


def _groups(optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[str, nn.Parameter]]) -> dict[str, int]:
    names = {id(parameter): name for name, parameter in pairs}
    return {names[id(parameter)]: place for place, group in enumerate(optimizer.param_groups)
            for parameter in group["params"] if id(parameter) in names}  # fmt: skip


def _lend(
    optimizer: torch.optim.Optimizer,
    group: int,
    name: str,
    parameter: torch.Tensor,
    state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Let an optimizer step with one parameter only."""
    groups, states = optimizer.param_groups, optimizer.state
    alone = {**groups[group], "params": [parameter]}
    if "param_names" in alone:
        alone["param_names"] = [name]
    optimizer.param_groups = [alone]
    optimizer.state = defaultdict(dict)
    if state:
        optimizer.state[parameter] = dict(state)
    try:
        optimizer.step()
        after: dict[str, Any] = optimizer.state.get(parameter, {})
    finally:
        optimizer.param_groups, optimizer.state = groups, states
    return {key: value for key, value in after.items() if value is not None}


def initial_state(job: Job, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimizer that makes its state at once makes for a parameter."""
    optimizer = job.build_optimizer([(name, nn.Parameter(parameter))])
    return {k: v for state in optimizer.state.values() for k, v in state.items() if v is not None}


def learn_state(job: Job, parameters: Iterable[tuple[str, torch.Tensor]]) -> StateShape:
    """Try the job's optimizer on small tensors: what does it keep, and can parameters take turns?"""
    small = {
        name: torch.rand([min(size, 3) for size in p.shape], generator=_drawn(name), dtype=torch.float64).to(
            p.dtype
        )
        for name, p in parameters
    }
    together = [(name, nn.Parameter(tensor.clone())) for name, tensor in small.items()]
    alone = [(name, nn.Parameter(tensor.clone())) for name, tensor in small.items()]
    first, second = job.build_optimizer(together), job.build_optimizer(alone)
    eager = len(first.state) > 0
    groups = _groups(second, alone)
    states: dict[str, Any] = {name: dict(second.state.get(p, {})) for name, p in alone}
    settings = _settings(first)
    for step in range(_STEPS):
        for (name, one), (_, other) in zip(together, alone, strict=True):
            one.grad = torch.rand(one.shape, generator=_drawn(f"{name}/{step}"), dtype=torch.float64).to(
                one.dtype
            )
            other.grad = one.grad.clone()
        try:
            first.step()
        except (TypeError, ValueError) as error:
            raise _refusal(first, f"cannot step by itself: {' '.join(str(error).split())[:200]}") from error
        for name, parameter in alone:
            if name in groups:
                states[name] = _lend(second, groups[name], name, parameter, states[name])
    if _settings(first) != settings:
        raise _refusal(first, "counts in its groups, which parameters that take turns do not have in common")
    if not all(torch.equal(a, b) for (_, a), (_, b) in zip(together, alone, strict=True)):
        raise _refusal(first, "gives other numbers when parameters take turns: it mixes them")
    entries = {name: _entries(first, name, p, states[name]) for name, p in alone}
    return StateShape(entries, eager)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    return [{k: repr(v) for k, v in group.items() if k not in ("params", "param_names")}
            for group in optimizer.param_groups]  # fmt: skip


def _entries(
    optimizer: torch.optim.Optimizer, name: str, parameter: torch.Tensor, state: Mapping[str, Any]
) -> tuple[tuple[str, bool, str], ...]:
    found = []
    for key, value in state.items():
        if not isinstance(value, torch.Tensor) or (value.shape != parameter.shape and value.ndim > 0):
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            )
            shape = tuple(parameter.shape)
            raise _refusal(optimizer, f"keeps {what[:60]} as {key!r} for {name!r} of shape {shape}")
        found.append((key, value.shape == parameter.shape, name_of(value.dtype)))
    return tuple(found)


def _drawn(key: str) -> torch.Generator:
    from plait.determinism import derive

    return torch.Generator().manual_seed(derive(0, "trial", key))


def _refusal(optimizer: torch.optim.Optimizer, what: str) -> UsageError:
    return UsageError(
        f"optimizer {type(optimizer).__name__} {what}",
        setting="optimizer",
        works="one that updates each parameter by itself, such as torch.optim:AdamW or torch.optim:SGD",
    )


def total_norm(norms: Sequence[tuple[float, torch.dtype]]) -> torch.Tensor:
    """The norm of all gradients from that of each, as ``torch.nn.utils.clip_grad_norm_`` has it."""
    if not norms:
        return torch.tensor(0.0)
    each = [torch.tensor(norm, dtype=dtype) for norm, dtype in norms]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(each), 2.0)
    return total


def clip(gradient: torch.Tensor, total: torch.Tensor, limit: float) -> None:
    """Scale a gradient by what its norm over all parameters exceeds the limit by."""
    gradient.mul_(torch.clamp(limit / (total + 1e-6), max=1.0))
