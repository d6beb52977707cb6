"""``plait doctor``: what this machine can do, what is missing, what that costs and how to get it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import EXIT_FAILED
from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.cli.finding import Finding
    from plait.cluster import Cluster

FORMAT = "plait.doctor/1"


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure nothing and leave torch alone: an answer at once.")
    ] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure longer, and arithmetic and loopback too (some seconds)."),
    ] = False,
    directory: Annotated[Path, typer.Option(help="Where spilled files would go.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what plait can do on this machine, and what is missing.

    Memory and disk are measured for about two seconds. Ends with 0 unless plait cannot work here at all.
    """
    from plait.cli.console import print_json, status

    if quick and measure:
        raise UsageError("measure nothing, and all", setting="--quick, --measure", works="one of them")
    if quick:
        findings = _look(directory, quick=True)
    else:
        with status("asking torch, measuring memory and disk"):
            findings = _look(directory, quick=False)
    works = all(finding.state != "fault" for finding in findings)
    cluster = _measured(directory) if measure and works else None
    if as_json:
        result: dict[str, object] = {"format": FORMAT, "works": works}
        result["findings"] = [asdict(finding) for finding in findings]
        print_json(result if cluster is None else result | {"cluster": asdict(cluster)})
    else:
        _show(findings)
        if cluster is not None:
            _show_cluster(cluster)
    if not works:
        raise typer.Exit(EXIT_FAILED)


def _look(directory: Path, *, quick: bool) -> list[Finding]:
    from plait.cli import hardware, software
    from plait.cluster.machine import gpu_count

    def whole() -> bool:
        return all(finding.state != "fault" for finding in found)

    found = [software.python(), *software.packages()]
    torch = software.ask_torch() if whole() and not quick else None
    found += [] if torch is None else software.backends(torch)
    found += [software.kernels()] if whole() else []  # which need numpy
    found += [software.scripts(), *hardware.processor(), *hardware.room(directory)]
    found.append(hardware.shared_pages())
    if whole() and not quick:
        found += [hardware.memory_bandwidth(), hardware.disk_bandwidth(directory)]
    found.append(hardware.gpus(gpu_count(), torch if isinstance(torch, software.Torch) else None))
    return [*found, *hardware.isolation(), *software.ray(), *software.extras()]


def _measured(directory: Path) -> Cluster:
    from plait.cli.console import status
    from plait.cluster import Cluster

    with status("measuring memory, arithmetic, disk and loopback"):
        return Cluster.detect(directory=directory).measure()


def _show(findings: Sequence[Finding]) -> None:
    if sys.stdout.isatty():
        from plait.cli.console import print_table

        rows = []
        for f in findings:
            means = filter(None, (f.consequence, f.remedy and f"→ {f.remedy}"))
            rows.append([f.name, f.state, f.found, "\n".join(means)])
        print_table("plait doctor", ["what", "state", "found", "what that means"], rows)
    else:
        for finding in findings:
            typer.echo(f"{finding.state:8}{finding.name:20}{finding.found}")
            for label, text in (("so", finding.consequence), ("remedy", finding.remedy)):
                if text:
                    typer.echo(f"{'':28}{label}: {text}")
    typer.echo(_summary(findings))


def _summary(findings: Sequence[Finding]) -> str:
    faults, without = (
        ", ".join(finding.name for finding in findings if finding.state == state)
        for state in ("fault", "without")
    )
    if faults:
        return f"plait cannot work here: {faults}"
    return "plait works here, " + (f"without or with less of: {without}" if without else "with all it knows")


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
