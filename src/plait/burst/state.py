"""How weights and the optimizer's state get from rank 0 to the others, whatever the plan.

Rank 0 is in every block, so it holds the whole model and the whole state of the optimizer: its state is the
consolidated one, equal to one device's in its form, and others take from it what a plan gives them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from plait.burst.crew import Crew


class Spread:
    """Takes tensors from rank 0 to the first ranks, in an order that is the same on all."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        crew.open("control", crew.world)
        self._lane = crew.lane("spread")

    def tensors(self, some: Sequence[torch.Tensor], width: int, what: str) -> None:
        """Overwrite tensors with those of rank 0, on the first ``width`` ranks."""
        if width == 1 or self._crew.rank >= width or not some:
            return
        group = self._crew.group("sync", width)
        errands = [
            self._lane.do(partial(_broadcast, tensor, group), f"taking {what} from rank 0") for tensor in some
        ]
        self._crew.finish(errands, f"{what} from rank 0")

    def object(self, content: Any, what: str) -> Any:
        """Rank 0's object, on every rank."""
        if self._crew.world == 1:
            return content
        box = [content]
        group = self._crew.group("control", self._crew.world)
        errand = self._lane.do(
            lambda: dist.broadcast_object_list(box, src=0, group=group, device=self._crew.device),
            f"taking {what} from rank 0",
        )
        self._crew.finish([errand], f"{what} from rank 0")
        return box[0]


def _broadcast(tensor: torch.Tensor, group: Any) -> None:
    """In place, whatever its layout."""
    with torch.no_grad():
        flat = tensor.detach()
        dense = flat if flat.is_contiguous() else flat.contiguous()
        dist.broadcast(dense, 0, group=group)
        if dense is not flat:
            flat.copy_(dense)


def spread_optimizer(
    optimizer: torch.optim.Optimizer,
    spread: Spread,
    crew: Crew,
    *,
    held: Mapping[str, nn.Parameter],
    names: Mapping[int, str],
    widths: Mapping[str, int],
    moved: set[str],
) -> None:
    """Give every rank's optimizer the parameters that it holds now, with rank 0's settings and state.

    ``names`` tells rank 0's parameters by identity, ``widths`` how many ranks hold each, ``moved`` which ones
    have come to ranks that did not hold them.
    """
    told = _described(optimizer, crew.device, names, moved) if crew.rank == 0 else None
    groups, states = spread.object(told, "the optimizer's settings")
    if crew.rank:
        old = dict(optimizer.state)
        optimizer.state.clear()
        optimizer.param_groups[:] = [_group(settings, some, held) for settings, some in groups]
        for name, parameter in held.items():
            if parameter in old and name not in moved:
                optimizer.state[parameter] = old[parameter]
    for name, state in states.items():
        if name not in held or crew.rank >= widths[name]:
            continue
        if crew.rank:
            made = {
                key: _room(held[name], value[1], value[2]) if _is_note(value) else value
                for key, value in state.items()
            }
            optimizer.state[held[name]] = made
        mine = optimizer.state[held[name]]
        tensors = [mine[key] for key, value in state.items() if _is_note(value)]
        spread.tensors(tensors, widths[name], f"the optimizer's state of {name!r}")


def _described(
    optimizer: torch.optim.Optimizer, device: torch.device, names: Mapping[int, str], moved: set[str]
) -> tuple[list[Any], dict[str, dict[str, Any]]]:
    """Settings with the parameters' names, and the state of each moved one, large tensors as notes."""
    groups = []
    states: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append(
            (settings, [names[id(parameter)] for parameter in group["params"] if id(parameter) in names])
        )
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None or name not in moved or parameter not in optimizer.state:
                continue
            states[name] = {
                key: ("tensor", tuple(value.shape), value.dtype)
                if isinstance(value, torch.Tensor) and value.device == device and value.numel() > 1
                else value
                for key, value in optimizer.state[parameter].items()
            }
    return groups, states


def _group(
    settings: dict[str, Any], names: Sequence[str], held: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """A group of an optimizer with those of its parameters that this rank holds."""
    mine = [name for name in names if name in held]
    if "param_names" in settings:  # of an optimizer that was made from named parameters
        settings = {**settings, "param_names": mine}
    return {**settings, "params": [held[name] for name in mine]}


def _room(parameter: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Where a tensor of a parameter's state comes; of its shape, it lies in memory as the parameter does."""
    if shape == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=parameter.device)


def _is_note(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and value[0] == "tensor"
