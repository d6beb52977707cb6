"""What ``plait doctor`` says of software: Python, packages, torch, the compiled kernels, Ray, the extras."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from plait.cli.finding import Finding
from plait.extras import PLAIT, install, requirements

_PYTHON = (3, 11)
_EXTRAS = {
    "hf": "models of Hugging Face's transformers cannot be built",
    "ray": "Ray cannot start workers; subprocesses and torchrun can",
    "gpu": "there are no Triton kernels; on a CPU nothing needs them",
    "tune": "there is no search for hyperparameters with Optuna",
    "lightning": "Lightning scripts cannot be run",
}
"""What is lost without an extra. Those for developing plait are left out."""
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_KERNELS = "PLAIT_NATIVE"
_RAY_MODE, _RAY_ADDRESS = "RAY_AUTH_MODE", "RAY_ADDRESS"
_IMPORT_S = 120.0
"""How long `import torch` may take: seconds from the page cache, a minute from a slow network disk."""
_ASK = """
import json, torch
from torch import distributed
here = distributed.is_available()
nccl = here and distributed.is_nccl_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "gloo": here and distributed.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
}))
"""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What torch says of itself."""

    version: str
    cuda: str | None = None
    """The version of CUDA that it is built with."""
    gpus: tuple[str, ...] = ()
    gloo: bool = True
    nccl: str | None = None


def ask_torch() -> Torch | str:
    """Import torch in a process of its own, where it harms nobody; else, why that does not work."""
    # As the scripts that plait installs: without the current directory, where anything may be called torch.
    command = [sys.executable, "-P", "-c", _ASK]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"not done within {_IMPORT_S:g} s"
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return said[-1] if said else f"exit code {done.returncode}"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return Torch(**answer | {"gpus": tuple(answer["gpus"])})


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Whether this Python is one that plait runs on."""
    fine = version >= _PYTHON
    return Finding(
        name="python",
        state="ok" if fine else "fault",
        found=".".join(map(str, version)),
        consequence=None if fine else "plait does not run",
        remedy=None if fine else f"Python {'.'.join(map(str, _PYTHON))} or later",
    )


def packages() -> Iterator[Finding]:
    """The packages that plait needs, each in a version that it is tested with or not."""
    for requirement in requirements():
        remedy = f"pip install '{requirement}'"
        name, version = _name(requirement), installed(_name(requirement))
        if version is None:
            yield Finding(
                name=name,
                state="fault",
                found="not installed",
                consequence="plait does not run",
                remedy=remedy,
            )
        elif admits(requirement, version):
            yield Finding(name=name, state="ok", found=f"{version}{_bounds(requirement)}")
        else:
            yield Finding(
                name=name,
                state="without",
                found=f"{version}, where {requirement} is needed",
                consequence="plait is not tested with it, and may not work",
                remedy=remedy,
            )


def backends(torch: Torch | str) -> Iterator[Finding]:
    """What carries tensors between processes, as torch itself says."""
    if isinstance(torch, str):
        yield Finding(
            name="import torch",
            state="fault",
            found=torch,
            consequence="nothing can be trained",
            remedy="pip install --force-reinstall torch, in the version above",
        )
        return
    yield Finding(
        name="gloo",
        state="ok" if torch.gloo else "without",
        found="between CPUs" if torch.gloo else f"not in torch {torch.version}",
        consequence=None if torch.gloo else "CPUs of several processes cannot train together",
        remedy=None if torch.gloo else "a build of torch with gloo, as pip installs it",
    )
    there = torch.nccl is not None
    yield Finding(
        name="nccl",
        state="ok" if there else "without",
        found=f"{torch.nccl}, between GPUs" if there else f"not in torch {torch.version}",
        consequence=None if there else "GPUs cannot train together; CPUs need gloo alone",
        remedy=None if there else "a build of torch with CUDA",
    )


def kernels() -> Finding:
    """Which of the compiled kernels run: the codec, checksums, copies and the planner's search."""
    from plait import native
    from plait.errors import UsageError

    asked = os.environ.get(_KERNELS)
    try:
        used = native.isa()
    except UsageError as error:
        return Finding(
            name="kernels",
            state="fault",
            found=f"{_KERNELS}={asked}",
            consequence=error.what,
            remedy=f"unset {_KERNELS}, or {error.works}",
        )
    here = native.isas()
    found = f"{used} (can run: {', '.join(here)})"
    chosen = asked not in (None, "", "1")
    if used == "python":
        why = native.missing() or f"{_KERNELS}={asked} turns the compiled kernels off"
        consequence = f"{why}; they run in Python, many times slower"
        remedy = f"unset {_KERNELS}" if chosen else "a C++17 compiler, then install plait again"
    elif used == "scalar":
        consequence = "codec and checksums run without vector instructions"
        remedy = "a processor with AVX2 or AVX-512" if here[-1] == used else f"unset {_KERNELS}"
    else:
        return Finding(name="kernels", state="ok", found=found)
    return Finding(name="kernels", state="without", found=found, consequence=consequence, remedy=remedy)


def scripts() -> Finding:
    """Whether ``PLAIT_COMPRESS`` reaches scripts that do not mention plait."""
    consequence = remedy = None
    if os.environ.get(_AUTOLOAD, "1") != "1":
        consequence = f"{_AUTOLOAD}={os.environ[_AUTOLOAD]} keeps plait out: PLAIT_COMPRESS does nothing"
        remedy = f"unset {_AUTOLOAD}"
    elif "plait" not in metadata.entry_points(group="torch.backends").names:
        consequence = "plait is not installed, so `import torch` misses it: PLAIT_COMPRESS does nothing"
        remedy = PLAIT
    return Finding(
        name="unmodified scripts",
        state="ok" if consequence is None else "without",
        found="heed PLAIT_COMPRESS" if consequence is None else "out of reach",
        consequence=consequence,
        remedy=remedy,
    )


def ray() -> Iterator[Finding]:
    """Where Ray is installed: who may run programs through it."""
    if installed("ray") is None:
        return
    mode, address = os.environ.get(_RAY_MODE, "token").lower(), os.environ.get(_RAY_ADDRESS)
    safe = mode == "token"
    yield Finding(
        name="ray access",
        state="ok" if safe else "without",
        found=f"authentication by {mode}" + (f", cluster at {address}" if address else ""),
        consequence=None
        if safe
        else "whoever reaches a port of Ray can run programs here: plait starts no cluster of its own",
        remedy=None if safe else f"unset {_RAY_MODE}, or token",
    )


def extras() -> Iterator[Finding]:
    """The extras, with what is lost without each."""
    for extra, consequence in _EXTRAS.items():
        found, there, needed = [], True, requirements(extra)
        for requirement in needed:
            version = installed(_name(requirement))
            fits = version is not None and admits(requirement, version)
            there = there and fits
            untested = "" if fits or version is None else f", where {requirement} is needed"
            found.append(f"{_name(requirement)} {version or 'not installed'}{untested}")
        yield Finding(
            name=f"extra {extra}",
            state="ok" if there else "without",
            found=", ".join(found),
            consequence=None if there else consequence,
            remedy=None if there else install(extra),
        )


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def admits(requirement: str, version: str) -> bool:
    """Whether the version keeps the requirement's lower and upper bounds, by its leading numbers."""

    def numbers(text: str) -> list[int]:
        leading = re.match(r"[\d.]*", text)
        return [int(part) for part in (leading.group() if leading else "").split(".") if part]

    here = numbers(version)
    lowest = re.search(r">=\s*([\d.]+)", requirement)
    beyond = re.search(r"<\s*([\d.]+)", requirement)
    return (lowest is None or here >= numbers(lowest.group(1))) and (
        beyond is None or here < numbers(beyond.group(1))
    )


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]


def _bounds(requirement: str) -> str:
    """The bounds alone, in brackets, the lower first."""
    parts = sorted(re.findall(r"[<>]=?\s*[\d.]+", requirement), reverse=True)
    return f" (needed: {','.join(parts)})" if parts else ""
