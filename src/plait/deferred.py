"""A model whose weights do not exist yet: built on the meta device, created parameter by parameter.

``construct`` runs a model's factory while recording every tensor operation on a tape instead of
executing it. Parameters stay on the meta device, so a model larger than memory can be built, traced and
cut; buffers, which are small and often hold tables, are computed at once. A parameter is created later
by replaying just the operations that lead to it, each draw from a generator seeded by (seed, parameter
name). So a model created shard by shard equals one created whole, whatever the order, and whatever the
constructor did is done: custom initialisers, truncated normals, zeroed padding rows, loaded weights. Only
a random generator of the constructor's own is not asked.

Why not `torch.device("meta")` and `reset_parameters`: many models initialise in `__init__`, in `apply`
or in a parent module, and non-persistent buffers are lost. Why not seed once and build whole: the draws
of one parameter would depend on all that came before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from plait.compat import swap, tree_leaves, tree_map
from plait.errors import TraceError, UsageError
from plait.state import State
from plait.tape import Tape
from plait.units import parse_whole

_PLAN = "_plait_plan"
_PART = "_plait_part"
_TABLES = {"_parameters", "_buffers", "_modules"}


@dataclass(frozen=True)
class _Plan:
    """How to create the parameters of a model that does not exist yet."""

    tape: Tape
    recorded: dict[str, torch.Tensor]
    """The parameters that the tape leads to, by name, as they were recorded."""

    def __deepcopy__(self, memo: object) -> _Plan:
        return self  # it never changes, and a copied model has the same names


def _plan(module: nn.Module, tape: Tape) -> _Plan:
    recorded = {name: p.detach() for name, p in module.named_parameters() if p.is_meta and tape.knows(p)}
    tape.label(recorded)
    plan = _Plan(tape, recorded)
    for part in module.modules():
        object.__setattr__(part, _PART, True)
    object.__setattr__(module, _PLAN, plan)
    return plan


def construct(factory: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    """Build a model with its parameters on the meta device and its buffers real.

    ``create`` makes the parameters later. Those that the factory itself brought in from elsewhere (loaded
    weights) stay as they are. ``seed`` is for buffers that are drawn at random.
    """
    seed, tape = parse_whole(seed, setting="seed", least=0), Tape()
    with tape.recording():
        module = factory()
    _plan(module, tape)
    _keep_buffers(module, tape, seed)
    return module


def _keep_buffers(module: nn.Module, tape: Tape, seed: int) -> None:
    """Create the buffers, and tensors kept without registering them, that were recorded."""
    buffers = {name: b for name, b in module.named_buffers(remove_duplicate=False) if tape.knows(b)}
    tape.label(buffers)
    made: dict[int, torch.Tensor] = {}

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter) or not tape.knows(leaf):
            return leaf
        return made.setdefault(id(leaf), tape.create(leaf, seed=seed))

    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = real(buffer)
        for name, value in list(vars(owner).items()):
            if name not in _TABLES and any(real(leaf) is not leaf for leaf in tree_leaves(value)):
                object.__setattr__(owner, name, tree_map(real, value))


def build(factory: Callable[[], nn.Module], *, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """Build a model whole, every parameter from (seed, its name): the same bits as made in parts."""
    module = construct(factory, seed=seed)
    parameters, state = dict(module.named_parameters()), State(module)
    for name, tensor in create(module, seed=seed, device=device).items():
        made = nn.Parameter(tensor, requires_grad=parameters[name].requires_grad)
        try:
            swap(parameters[name], made)  # also for a list of parameters that the model keeps
        except RuntimeError:  # weak references to it, as an LSTM has
            state.replace(name, made)
    object.__delattr__(module, _PLAN)
    for part in module.modules():
        object.__delattr__(part, _PART)
    return module.to(device)


def create(
    module: nn.Module,
    names: Iterable[str] | None = None,
    *,
    seed: int,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Create parameters of a model on the meta device: all, or the named ones (tied ones by first name).

    A model that was built under ``torch.device("meta")`` rather than by ``construct`` is initialised by
    its modules' own ``reset_parameters`` and, where it has one, Hugging Face's ``_init_weights``.
    """
    seed = parse_whole(seed, setting="seed", least=0)
    plan: _Plan = getattr(module, _PLAN, None) or _plan_from_initialisers(module)
    made: dict[str, torch.Tensor] = {}
    for name in plan.recorded if names is None else names:
        if name not in plan.recorded:
            raise UsageError(
                f"{name!r} is no parameter on the meta device of this model",
                setting="names",
                works=", ".join(list(plan.recorded)[:3]) + ", ...",
            )
        if not plan.tape.initialised(plan.recorded[name]):
            raise TraceError(
                f"nothing initialises parameter {name!r} of a model that was built on the meta device",
                setting="model",
                works="build it with plait.deferred.construct(factory), or read the weights from safetensors",
            )
        made[name] = plan.tape.create(plan.recorded[name], seed=seed, device=device)
    return made


def _plan_from_initialisers(module: nn.Module) -> _Plan:
    """Record what the modules' own initialisers do, on stand-ins for the parameters and buffers."""
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if lost:
        raise TraceError(
            f"buffer {lost[0]!r} was lost when the model was built on the meta device",
            setting="model",
            works="build it with plait.deferred.construct(factory), which keeps buffers",
        )
    if any(hasattr(part, _PART) for part in module.modules()):
        raise TraceError(
            "the model was put together from parts of another that plait.deferred.construct built, "
            "which alone knows how they are initialised",
            setting="model",
            works="give construct a factory that puts the model together",
        )
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    stand_in, tape = copy.deepcopy(module, memo), Tape()
    for parameter in stand_in.parameters():
        tape.adopt(parameter)
    with tape.recording(), torch.no_grad():
        for owner in stand_in.modules():
            if callable(getattr(owner, "reset_parameters", None)):
                owner.reset_parameters()  # type: ignore[operator]
        initialise = getattr(stand_in, "_init_weights", None)
        if callable(initialise):
            stand_in.apply(initialise)
    plan = _plan(stand_in, tape)
    object.__setattr__(module, _PLAN, plan)
    return plan
