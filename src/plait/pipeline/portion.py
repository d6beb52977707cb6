"""The part of a job's optimizer that steps one stage's parameters, and the state of the whole from all parts.

A job's optimizer may put parameters into groups by their names, their shapes or their place among all. So
each stage makes the optimizer of the whole model, with stand-ins for the parameters of other stages, and then
leaves those out: the groups are those of one device, some of them with fewer parameters or none. It is right
for optimizers that step each parameter by itself, as torch's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.job import Job
from plait.pipeline.holding import Holding


class Portion:
    """One stage's part of an optimizer; parameters are numbered as in the whole one."""

    def __init__(self, job: Job, holding: Holding) -> None:
        pairs, own = holding.named(), holding.parameters
        self.optimizer = job.build_optimizer(pairs)
        """Steps this stage's parameters."""
        names = {id(parameter): name for name, parameter in pairs}
        self._groups = [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        """The names of all parameters, by group."""
        self._own, self._holding = own.keys(), holding
        for group, members in zip(self.optimizer.param_groups, self._groups, strict=True):
            self._narrow(group, [own[name] for name in members if name in own], members)
        for parameter in [p for p in self.optimizer.state if names[id(p)] not in own]:
            del self.optimizer.state[parameter]

    @property
    def _order(self) -> list[str]:
        return [name for members in self._groups for name in members]

    def _narrow(self, group: dict[str, Any], parameters: Sequence[Any], members: Sequence[str]) -> None:
        """Let a group hold only this stage's."""
        group["params"] = list(parameters)
        if "param_names" in group:  # of an optimizer that was made from named parameters
            group["param_names"] = [name for name in members if name in self._own]

    def state(self) -> dict[int, Any]:
        """This stage's part of the optimizer's state, by number."""
        numbers = {name: number for number, name in enumerate(self._order)}
        mine = [name for name in self._order if name in self._own]
        return {
            numbers[mine[place]]: state
            for place, state in self.optimizer.state_dict()["state"].items()
            if self._holding.saves(mine[place])
        }

    def whole(self, parts: Iterable[Mapping[int, Any]]) -> dict[str, Any]:
        """The whole optimizer's ``state_dict`` from the parts of all stages."""
        content = self.optimizer.state_dict()
        found = {number: state for part in parts for number, state in part.items()}
        groups, begin = [], 0
        for group, members in zip(content["param_groups"], self._groups, strict=True):
            groups.append({**group, "params": list(range(begin, begin + len(members)))})
            if "param_names" in group:
                groups[-1]["param_names"] = list(members)
            begin += len(members)
        return {**content, "state": dict(sorted(found.items())), "param_groups": groups}

    def split(self, state: Mapping[str, Any], held: Sequence[Iterable[str]]) -> list[dict[str, Any]]:
        """By stage, what it needs of the whole ``state_dict``; one of another optimizer is a ValueError.

        ``held`` are the names of the parameters that each stage holds.
        """
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes != [len(members) for members in self._groups]:
            built = [len(members) for members in self._groups]
            raise ValueError(f"parameter groups of {sizes} parameters, where the job's optimizer has {built}")
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        by_name = dict(zip(self._order, numbers, strict=True))
        return [
            {**state, "state": {name: state["state"][by_name[name]] for name in names
                                if name in by_name and by_name[name] in state["state"]}}
            for names in held
        ]  # fmt: skip

    def load(self, part: Mapping[str, Any]) -> None:
        """Take what :meth:`split` has for this stage."""
        groups, states, place = [], {}, 0
        for group, members in zip(part["param_groups"], self._groups, strict=True):
            mine = [name for name in members if name in self._own]
            narrowed = {**group, "params": list(range(place, place + len(mine)))}
            if "param_names" in group:
                narrowed["param_names"] = mine
            groups.append(narrowed)
            for number, name in enumerate(mine, place):
                if name in part["state"]:
                    states[number] = part["state"][name]
            place += len(mine)
        self.optimizer.load_state_dict({**part, "state": states, "param_groups": groups})
