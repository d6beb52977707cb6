"""``plait doctor``: what this machine can do, what is missing, what that costs and how to get it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plait.cli import EXIT_FAILED

if TYPE_CHECKING:
    from plait.cluster import Cluster

FORMAT = "plait.doctor/1"
_PYTHON = (3, 11)
_INSTALL = "pip install 'plait[{extra}]'"
_EXTRAS = {
    "hf": "models of Hugging Face's transformers cannot be built",
    "ray": "Ray cannot start workers; subprocesses and torchrun can",
    "gpu": "there are no Triton kernels; on a CPU nothing needs them",
    "tune": "there is no search for hyperparameters with Optuna",
    "lightning": "Lightning scripts cannot be run",
}
"""What is lost without an extra. Those for developing plait are left out."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at."""

    name: str
    state: Literal["ok", "without", "fault"]
    """``without``: plait works, less well or not all of it; ``fault``: plait cannot work."""
    found: str
    consequence: str | None = None
    remedy: str | None = None


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure memory, arithmetic, disk and loopback too (some seconds)."),
    ] = False,
    directory: Annotated[Path, typer.Option(help="Where spilled files would go.")] = Path(),
) -> None:
    """Say what plait can do on this machine, and what is missing.

    Ends with 0 unless plait cannot work here at all.
    """
    findings = [*_software(), *_machine(directory), *_lab(), *_extras()]
    works = all(finding.state != "fault" for finding in findings)
    cluster = _measured(directory) if measure and works else None
    if as_json:
        from plait.cli.console import print_json

        result: dict[str, object] = {"format": FORMAT, "works": works}
        result["findings"] = [asdict(finding) for finding in findings]
        print_json(result if cluster is None else result | {"cluster": asdict(cluster)})
    else:
        _show(findings)
        if cluster is not None:
            _show_cluster(cluster)
    if not works:
        raise typer.Exit(EXIT_FAILED)


def _software() -> Iterator[Finding]:
    here = sys.version_info[:3]
    yield Finding(
        name="python",
        state="ok" if here >= _PYTHON else "fault",
        found=".".join(map(str, here)),
        consequence=None if here >= _PYTHON else "plait does not run",
        remedy=None if here >= _PYTHON else f"Python {'.'.join(map(str, _PYTHON))} or later",
    )
    for requirement in _requirements():
        yield _package(requirement)
    from plait import native

    missing = native.missing()
    yield Finding(
        name="kernels",
        state="ok" if missing is None else "without",
        found=f"{native.isa()} (can run: {', '.join(native.isas())})",
        consequence=missing and f"{missing}; they run in Python, many times slower",
        remedy=missing and "a C++17 compiler, then install plait again; and PLAIT_NATIVE unset",
    )


def _requirements(extra: str | None = None) -> list[str]:
    """The requirements of plait itself, or of one of its extras, as they stand in its metadata."""
    found = []
    try:
        lines = metadata.requires("plait") or []
    except metadata.PackageNotFoundError:  # run from its sources without an installation
        lines = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        name = re.search(r"extra == ['\"]([^'\"]+)", marker)
        if (name and name.group(1)) == extra:
            found.append(requirement.strip())
    return found


def _package(requirement: str) -> Finding:
    """Whether a package is there, in a version that plait was tested with."""
    name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
    remedy = f"pip install '{requirement}'"
    version = _version(name)
    if version is None:
        return Finding(
            name=name, state="fault", found="not installed", consequence="plait does not run", remedy=remedy
        )
    if _admits(requirement, version):
        return Finding(name=name, state="ok", found=version)
    return Finding(
        name=name,
        state="without",
        found=f"{version}, where {requirement} is tested",
        consequence="what is not tested may not work",
        remedy=remedy,
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _admits(requirement: str, version: str) -> bool:
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


def _machine(directory: Path) -> Iterator[Finding]:
    import os

    from plait.cluster import machine
    from plait.units import format_bytes

    cores, all_cores, quota = machine.usable_cores(), os.cpu_count() or 1, machine.cpu_quota()
    limited = "" if quota is None else f", {quota:g} by the control group"
    yield Finding(name="cores", state="ok", found=f"{len(cores)} of {all_cores} usable{limited}")
    limit = machine.memory_limit_bytes()
    yield Finding(
        name="memory",
        state="ok",
        found=f"{format_bytes(machine.memory_available_bytes())} free of "
        f"{format_bytes(machine.memory_total_bytes() if limit is None else limit)}"
        + ("" if limit is None else " (the control group's limit)"),
    )
    kind = machine.file_system(directory)
    in_memory = kind in ("tmpfs", "ramfs")
    yield Finding(
        name="disk",
        state="without" if in_memory else "ok",
        found=f"{format_bytes(machine.disk_free_bytes(directory))} free in {directory.resolve()} ({kind})",
        consequence="files there take memory: spilling to them frees none" if in_memory else None,
        remedy="--directory on a disk" if in_memory else None,
    )
    yield _gpus(machine.gpu_count())


def _gpus(count: int) -> Finding:
    version = _version("torch") or ""
    if not count:
        return Finding(
            name="gpus",
            state="without",
            found="none",
            consequence="everything runs on the CPU; what needs a GPU is not run",
            remedy="an NVIDIA GPU with its driver, and torch built with CUDA",
        )
    built_without = version.endswith("+cpu")
    return Finding(
        name="gpus",
        state="without" if built_without else "ok",
        found=str(count),
        consequence=f"torch {version} is built without CUDA and cannot use them" if built_without else None,
        remedy="a build of torch with CUDA" if built_without else None,
    )


def _lab() -> Iterator[Finding]:
    from plait.lab.memory import can_limit, find_hierarchy
    from plait.lab.network import missing

    lacking = missing()
    yield Finding(
        name="lab network",
        state="ok" if lacking is None else "without",
        found="namespaces and shaped links" if lacking is None else f"{lacking} is missing",
        consequence=lacking and "the lab's hosts share the loopback device, which cannot be shaped",
        remedy=lacking and "root, and iproute2 (apt-get install iproute2)",
    )
    hierarchy, limits = find_hierarchy(), can_limit()
    found = "none with a memory controller" if hierarchy is None else f"version {hierarchy.version}"
    yield Finding(
        name="control groups",
        state="ok" if limits else "without",
        found=found if limits or hierarchy is None else f"{found}, not writable",
        consequence=None if limits else "the lab cannot hold a host to a memory limit",
        remedy=None if limits else "root, with control groups mounted writable",
    )


def _extras() -> Iterator[Finding]:
    for extra, consequence in _EXTRAS.items():
        needed = [re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in _requirements(extra)]
        versions = {name: _version(name) for name in needed}
        there = all(versions.values())
        yield Finding(
            name=f"extra {extra}",
            state="ok" if there else "without",
            found=", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()),
            consequence=None if there else consequence,
            remedy=None if there else _INSTALL.format(extra=extra),
        )


def _measured(directory: Path) -> Cluster:
    from plait.cluster import Cluster

    typer.echo("measuring memory, arithmetic, disk and loopback", err=True)
    return Cluster.detect(directory=directory).measure()


def _show(findings: list[Finding]) -> None:
    if sys.stdout.isatty():
        from plait.cli.console import print_table

        rows = []
        for f in findings:
            means = filter(None, (f.consequence, f.remedy and f"→ {f.remedy}"))
            rows.append([f.name, f.state, f.found, "\n".join(means)])
        print_table("plait doctor", ["what", "state", "found", "what that means"], rows)
        return
    for finding in findings:
        typer.echo(f"{finding.state:8}{finding.name:16}{finding.found}")
        for label, text in (("so", finding.consequence), ("remedy", finding.remedy)):
            if text:
                typer.echo(f"{'':8}{'':16}{label}: {text}")


def _show_cluster(cluster: Cluster) -> None:
    from plait.cli.console import print_table
    from plait.units import format_bytes, format_rate

    def speed(rate: float | None) -> str:
        return "" if rate is None else f"{format_bytes(rate)}/s"

    rows = [
        [
            device.name,
            f"{device.gflops:.4g} GFLOPS (fp32 matrix multiplication)",
            f"threads: {device.threads}",
        ]
        for device in cluster.devices
        if device.gflops is not None
    ]
    rows += [
        [tier.name, f"read {speed(tier.read_bytes_per_s)}, write {speed(tier.write_bytes_per_s)}",
         {None: "", True: "direct I/O", False: "no direct I/O: through the page cache"}[tier.direct]]
        for tier in cluster.tiers
    ]  # fmt: skip
    rows += [
        ["loopback", format_rate(link.bandwidth_bytes_per_s), f"{1e3 * link.latency_ms:.3g} µs one way"]
        for link in cluster.links
    ]
    print_table("measured", ["what", "speed", "how"], rows)
