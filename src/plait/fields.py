"""The fields of a job by name: those that there are, and where a word belongs that is none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from plait.errors import FileError, UsageError

_OPTIMIZERS = {"momentum": "SGD", "dampening": "SGD", "nesterov": "SGD"} | dict.fromkeys(
    ("lr", "weight_decay", "betas", "eps", "amsgrad"), "AdamW"
)
"""Arguments of optimizers that are taken for a job's, each with an optimizer that has it."""


def check_known(kind: type, given: Mapping[str, Any]) -> None:
    """Refuse a word that is no field of a job."""
    known = [part.name for part in fields(kind)]
    for name, value in given.items():
        if name in known:
            continue
        whose = f"job {given['name']!r}" if "name" in given else "a job"
        if name in _OPTIMIZERS:
            raise UsageError(
                f"{whose} has no field {name!r}: it belongs to the optimizer",
                setting=name,
                works=f"optimizer=functools.partial(torch.optim.{_OPTIMIZERS[name]}, {name}={value!r})",
            )
        raise UsageError(f"{whose} has no field {name!r}", setting=name, works=", ".join(known))


def read(kind: type, content: dict[str, Any], prefix: str) -> Any:
    """An object of its fields as a file has them; a wrong or missing one is named."""
    known = {part.name: part for part in fields(kind)}
    for name in content:
        if name not in known:
            raise FileError(
                f"a job has no field {prefix}{name}", setting=prefix + name, works=", ".join(known)
            )
    for name, part in known.items():
        if part.default is MISSING and part.default_factory is MISSING and name not in content:
            raise FileError(f"the job has no {prefix}{name}", setting=prefix + name, works="give it")
    return kind(**content)
