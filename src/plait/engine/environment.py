"""What a run ran on: versions, the machine, and the variables that change what it computes or how fast."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "transformers", "ray", "lightning")
_PREFIXES = ("PLAIT_", "OMP_", "KMP_", "MKL_", "TORCH_", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_")
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
"""A variable with one of these in its name is nobody's business."""


def environment() -> dict[str, Any]:
    """As it is now, as plain data; packages are asked for their versions without being imported."""
    from plait import __version__
    from plait.cluster.machine import memory_limit_bytes, memory_total_bytes, usable_cores

    return {
        "python": platform.python_version(),
        "plait": __version__,
        **{name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "platform": platform.platform(),
        "host": platform.node(),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "usable_cores": len(usable_cores()),
        "memory_bytes": memory_total_bytes(),
        "memory_limit_bytes": memory_limit_bytes(),
        "variables": variables(os.environ),
    }


def variables(all_of_them: Mapping[str, str]) -> dict[str, str]:
    """Those of an environment that matter to a run, in order, and none that may hold a secret."""
    return {
        name: value
        for name, value in sorted(all_of_them.items())
        if name.startswith(_PREFIXES) and not any(part in name for part in _SECRET)
    }


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not as it was, such as ``torch 2.13.0, now 2.13.1``."""
    before, after = _flat(then), _flat(now)
    return [
        f"{name} {_said(before.get(name))}, now {_said(after.get(name))}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _flat(described: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in described.items() if name != "variables"} | dict(
        described.get("variables", {})
    )


def _said(value: object) -> str:
    return "none" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
