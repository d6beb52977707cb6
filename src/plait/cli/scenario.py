"""The cluster that a plan or a simulation is for, from the options of a command; repeated ones are what-ifs.

plait plan profile.json --devices 4 --devices 16 --rate 1gbit --rate 10gbit        # four scenarios
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.cluster import Cluster

UNLIMITED = 1 << 50
"""The memory of a device of which none is given: more than any has."""
_MOST = 64
"""Scenarios at a time."""
_DEVICES = 2
_MOST_DEVICES = 1024
"""Of a cluster made of figures: every two hosts have a link, and planners look at all of them."""
RATE, LATENCY = "1gbit", "50us"
"""Where none are given."""

Devices = Annotated[
    list[int] | None,
    typer.Option(
        help="How many there are (default: 2, or the cluster's; for jobs and no figures, this machine's). "
        "Repeat it to compare."
    ),
]
Batch = Annotated[
    list[int] | None,
    typer.Option(help="Rows of a step, over all devices (default: 32, or the job's). Repeat it to compare."),
]
Rate = Annotated[
    list[str] | None,
    typer.Option(
        "--rate",
        "--bandwidth",
        help="Between devices, such as 12GB/s (default: 1gbit, or the cluster's). Repeat it to compare.",
    ),
]
Latency = Annotated[
    list[str] | None,
    typer.Option(help="Of a message (default: 50us, or the cluster's). Repeat it to compare."),
]
Memory = Annotated[
    list[str] | None,
    typer.Option(
        help="Of each device, such as 8GiB (default: no limit, or the cluster's). Repeat it to compare."
    ),
]
Hosts = Annotated[
    int | None, typer.Option(help="Hosts that the devices are spread over (default: one for each).")
]
DiskRate = Annotated[
    str | None, typer.Option("--disk", help="Rate of a disk to spill to, on each host, such as 1GB/s.")
]
Kind = Annotated[
    str | None,
    typer.Option(help="Of the devices: cpu or cuda (default: what the profile was measured on, or cpu)."),
]
ClusterFile = Annotated[Path | None, typer.Option(help="A cluster file (.toml) in place of these figures.")]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One cluster and batch."""

    cluster: Cluster
    batch: int | None
    """None is the job's own."""
    varied: tuple[tuple[str, str], ...] = ()
    """What tells it from the others: option and value."""

    @property
    def label(self) -> str:
        """What tells it from the others, in words."""
        return ", ".join(f"{name} {value}" for name, value in self.varied)

    @property
    def limited(self) -> bool:
        """Whether the memory of its devices is known."""
        return any(device.memory_bytes < UNLIMITED for device in self.cluster.devices)


def machine_for(file: Path, job: str | None, given: Sequence[object]) -> Cluster | None:
    """This machine, for a jobs file and no option that says otherwise: what `plait run` would plan for."""
    from plait.cli.source import jobs_in, profile_in

    if any(value is not None for value in given) or profile_in(file) is not None:
        return None
    from plait.cli.console import status
    from plait.engine.machine import this_machine

    jobs_in(file, job, None)  # refused, if it is, before anything is measured
    with status("looking at this machine"):
        return this_machine(devices=None, memory_bytes=None, directory=Path.cwd())


def scenarios(
    *,
    file: Path | None,
    here: Cluster | None = None,
    devices: Sequence[int] | None,
    batch: Sequence[int] | None,
    rate: Sequence[str] | None,
    latency: Sequence[str] | None,
    memory: Sequence[str] | None,
    hosts: int | None = None,
    disk: str | None = None,
    kind: str | None = None,
) -> list[Scenario]:
    """Every combination of the values given; one where nothing is repeated.

    What is given changes the cluster of the file, or else the one that is ``here``, or else a modelled one.
    """
    from plait.cluster import Cluster

    if kind not in (None, "cpu", "cuda"):
        raise UsageError(f"there are no devices of kind {kind!r}", setting="--kind", works="cpu or cuda")
    base = here if file is None else Cluster.load(file)
    given = {"devices": devices, "batch": batch, "rate": rate, "latency": latency, "memory": memory}
    values: dict[str, list[Any]] = {name: list(its) if its else [None] for name, its in given.items()}
    repeated = [name for name, its in values.items() if len(its) > 1]
    found = []
    for chosen in product(*values.values()):
        named = dict(zip(values, chosen, strict=True))
        varied = tuple((name, str(named[name])) for name in repeated)
        rows = named.pop("batch")
        found.append(
            Scenario(
                cluster=_cluster(base, hosts=hosts, disk=disk, kind=kind, **named), batch=rows, varied=varied
            )
        )
    if len(found) > _MOST:
        counts = " x ".join(str(len(values[name])) for name in repeated)
        raise UsageError(
            f"{counts} values make {len(found)} scenarios",
            setting=", ".join(f"--{name}" for name in repeated),
            works=f"{_MOST} at most",
        )
    return found


def only(found: Sequence[Scenario]) -> Scenario:
    """The one scenario, where several make no sense."""
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} scenarios for several jobs", setting="--job", works="one job, or one value of each"
        )
    return found[0]


def _cluster(
    base: Cluster | None,
    *,
    devices: int | None,
    rate: str | None,
    latency: str | None,
    memory: str | None,
    hosts: int | None,
    disk: str | None,
    kind: str | None,
) -> Cluster:
    """The cluster of a file with some figures changed, or one of hosts that are all alike."""
    from plait.units import parse_bytes, parse_whole

    for name, count in (("devices", devices), ("hosts", hosts)):
        if count is not None:
            parse_whole(count, setting=f"--{name}")
    size = None if memory is None else parse_bytes(memory, setting="--memory")
    if size == 0:
        raise UsageError("a memory of 0 bytes", setting="--memory", works="8GiB")
    if base is None:
        base = _uniform(devices or _DEVICES, hosts, size, rate or RATE, latency or LATENCY)
    elif hosts is not None:
        raise UsageError("the hosts are those of the cluster file", setting="--hosts", works="no --hosts")
    else:
        if devices is not None:
            base = _taken(base, devices)
        if size is not None:
            base = replace(base, devices=tuple(replace(one, memory_bytes=size) for one in base.devices))
        base = _between(base, rate, latency)
    if kind is not None:
        its: Any = kind  # one of the two that there are
        base = replace(base, devices=tuple(replace(one, kind=its) for one in base.devices))
    return base if disk is None else _with_disk(base, disk)


def _uniform(devices: int, hosts: int | None, memory: int | None, rate: str, latency: str) -> Cluster:
    from plait.cluster import Cluster
    from plait.cluster.parts import bytes_per_s, milliseconds

    if devices > _MOST_DEVICES:
        what = f"{devices} devices, and {_MOST_DEVICES} are the most that are planned for"
        raise UsageError(what, setting="--devices", works=str(_MOST_DEVICES))
    count = devices if hosts is None else hosts
    if devices % count:
        raise UsageError(
            f"{devices} devices on {count} hosts", setting="--hosts", works=f"a number that divides {devices}"
        )
    return Cluster.uniform(
        hosts=count,
        devices_per_host=devices // count,
        memory=memory or UNLIMITED,
        bandwidth=bytes_per_s(rate, setting="--rate"),
        latency=milliseconds(latency, "--latency") / 1e3,
    )


def _between(base: Cluster, rate: str | None, latency: str | None) -> Cluster:
    """With other figures of the links between hosts; those within them stay."""
    from plait.cluster import ANY
    from plait.cluster.parts import bytes_per_s, milliseconds

    changed: dict[str, Any] = {}
    hosts = base.hosts
    if rate is not None:
        changed["bandwidth_bytes_per_s"] = bytes_per_s(rate, setting="--rate")
        hosts = tuple(replace(host, egress_bytes_per_s=None) for host in hosts)
    if latency is not None:
        changed["latency_ms"] = milliseconds(latency, "--latency")
    links = tuple(
        replace(link, **changed) if link.source != link.target or link.source == ANY else link
        for link in base.links
    )
    return replace(base, hosts=hosts, links=links)


def _taken(base: Cluster, devices: int) -> Cluster:
    try:
        return base.take(devices)
    except UsageError as error:
        raise UsageError(error.what, setting="--devices", works=error.works) from None


def _with_disk(base: Cluster, rate: str) -> Cluster:
    """With a disk of that rate below every host, in place of what is known of any."""
    from plait.cluster import Tier
    from plait.units import parse_rate

    try:
        figure = parse_rate(rate)
    except UsageError as error:
        raise UsageError(error.what, setting="--disk", works="1GB/s") from None
    kept = [tier for tier in base.tiers if tier.name == "ram"]
    disks = [
        Tier(
            name="disk",
            host=host.name,
            capacity_bytes=UNLIMITED,
            read_bytes_per_s=figure,
            write_bytes_per_s=figure,
        )
        for host in base.hosts
    ]
    return replace(base, tiers=(*kept, *disks))
