"""A cluster as a TOML file, format "plait.cluster/1": checked when read, in human units when written.

    format = "plait.cluster/1"

    [[hosts]]
    name = "node0"

    [[devices]]
    name = "node0/0"
    host = "node0"
    memory = "24GiB"

    [[links]]
    bandwidth = "1gbit"
    latency = "40us"

A size is text with a unit or a number of bytes, a rate text or bytes a second, a time text or seconds.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from plait.cluster.cluster import Cluster
from plait.cluster.parts import ANY, Device, Host, Link, Tier, bytes_per_s, milliseconds
from plait.errors import FileError, PlaitError, UsageError
from plait.units import parse_bytes

FORMAT = "plait.cluster/1"

Quantity = TypeVar("Quantity", int, float)


def _quantity(parse: Callable[..., Quantity], *numbers: type) -> BeforeValidator:
    """Reads text or a number (a Boolean is none, although Python says so) with one of plait's units."""

    def read(value: object) -> Quantity:
        if isinstance(value, bool) or not isinstance(value, (str, *numbers)):
            raise ValueError(f"{value!r} is neither a number nor text with a unit")
        return parse(value, setting="")

    return BeforeValidator(read)


Size = Annotated[int, _quantity(parse_bytes, int)]
Rate = Annotated[float, _quantity(bytes_per_s, int, float)]
Milliseconds = Annotated[float, _quantity(milliseconds, int, float)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Host(_Table):
    name: str
    address: str | None = None
    egress: Rate | None = None


class _Device(_Table):
    name: str
    host: str
    memory: Size
    kind: Literal["cpu", "cuda"] = "cpu"
    cores: list[int] = []
    threads: int = 1
    gflops: float | None = None


class _Tier(_Table):
    name: str
    host: str
    capacity: Size
    read: Rate | None = None
    write: Rate | None = None
    directory: str | None = None
    direct: bool | None = None


class _Link(_Table):
    source: str = Field(default=ANY, alias="from")
    target: str = Field(default=ANY, alias="to")
    bandwidth: Rate
    latency: Milliseconds = 0.0


class _File(_Table):
    format: Literal["plait.cluster/1"]
    hosts: list[_Host]
    devices: list[_Device]
    tiers: list[_Tier] = []
    links: list[_Link] = []


_TABLES: Mapping[str, type[_Table]] = {"hosts": _Host, "devices": _Device, "tiers": _Tier, "links": _Link}


def load(path: Path) -> Cluster:
    """Read a cluster; every fault is a FileError that names the file and, where there is one, the key."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise FileError(
            f"{path}: cannot be read: {error.strerror}", setting="cluster file", works="a file that exists"
        ) from None
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: is not UTF-8 text (byte {error.start})", setting="cluster file", works="TOML"
        ) from None
    return parse(text, path)


def parse(text: str, path: Path = Path("cluster")) -> Cluster:
    """Read a cluster from the text of such a file; ``path`` is what errors call it."""
    try:
        return _cluster(_File.model_validate(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise FileError(
            f"{path}: is not TOML: {_with_line(str(error), text)}", setting="cluster file"
        ) from None
    except ValidationError as error:
        raise _fault(path, error) from None
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", setting=error.setting, works=error.works) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets a thousand deep
        raise FileError(f"{path}: cannot be read as TOML: {error}", setting="cluster file") from None


def _with_line(message: str, text: str) -> str:
    """The parser's message, with a line where it only says that the text ended."""
    return message.replace("at end of document", f"at line {len(text.splitlines())}, where the file ends")


def _fault(path: Path, error: ValidationError) -> FileError:
    # A key that is not known comes first: it is often the reason why another is missing.
    faults = sorted(error.errors(include_url=False), key=lambda fault: fault["type"] != "extra_forbidden")
    fault, more = faults[0], len(faults) - 1
    location = fault["loc"]
    key = re.sub(r"\.(\d+)", r"[\1]", ".".join(str(part) for part in location))
    works = None
    if fault["type"] == "extra_forbidden":
        table = _TABLES.get(str(location[0]), _File) if len(location) > 1 else _File
        works = ", ".join(field.alias or name for name, field in table.model_fields.items())
        what = f"{key} is not a key that plait knows"
    elif fault["type"] == "missing":
        what = f"{key} is missing"
        works = f'format = "{FORMAT}"' if key == "format" else None
    else:
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, PlaitError):
            message, works = cause.what, cause.works
        else:
            message = str(cause or f"{fault['msg']}, not {fault['input']!r}")
        what = f"{key}: {message}"
    if more:
        what += f" (and {more} more {'fault' if more == 1 else 'faults'})"
    return FileError(f"{path}: {what}", setting=key, works=works)


def _cluster(read: _File) -> Cluster:
    return Cluster(
        hosts=tuple(
            Host(name=host.name, address=host.address, egress_bytes_per_s=host.egress) for host in read.hosts
        ),
        devices=tuple(
            Device(
                name=device.name,
                host=device.host,
                kind=device.kind,
                memory_bytes=device.memory,
                cores=tuple(device.cores),
                threads=device.threads,
                gflops=device.gflops,
            )
            for device in read.devices
        ),
        tiers=tuple(
            Tier(
                name=tier.name,
                host=tier.host,
                capacity_bytes=tier.capacity,
                read_bytes_per_s=tier.read,
                write_bytes_per_s=tier.write,
                directory=tier.directory,
                direct=tier.direct,
            )
            for tier in read.tiers
        ),
        links=tuple(
            Link(
                source=link.source,
                target=link.target,
                bandwidth_bytes_per_s=link.bandwidth,
                latency_ms=link.latency,
            )
            for link in read.links
        ),
    )


def to_toml(cluster: Cluster) -> str:
    """The file's text; a figure is written with a unit where that says exactly the same."""
    lines = ["# What there is to train on; plait reads it with Cluster.load.", f'format = "{FORMAT}"']

    def table(name: str, entries: Mapping[str, object]) -> None:
        lines.extend(("", f"[[{name}]]"))
        lines.extend(f"{key} = {_value(value)}" for key, value in entries.items() if value is not None)

    for host in cluster.hosts:
        egress = _bits(host.egress_bytes_per_s)
        table("hosts", {"name": host.name, "address": host.address, "egress": egress})
    for device in cluster.devices:
        table(
            "devices",
            {
                "name": device.name,
                "host": device.host,
                "kind": device.kind,
                "cores": list(device.cores) or None,
                "threads": device.threads,
                "memory": _size(device.memory_bytes),
                "gflops": device.gflops,
            },
        )
    for tier in cluster.tiers:
        table(
            "tiers",
            {
                "name": tier.name,
                "host": tier.host,
                "capacity": _size(tier.capacity_bytes),
                "read": _bytes(tier.read_bytes_per_s),
                "write": _bytes(tier.write_bytes_per_s),
                "directory": tier.directory,
                "direct": tier.direct,
            },
        )
    for link in cluster.links:
        ends = {} if link.source == ANY else {"from": link.source, "to": link.target}
        rate, latency = _bits(link.bandwidth_bytes_per_s), _time(link.latency_ms)
        table("links", {**ends, "bandwidth": rate, "latency": latency})
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, str):
        # A JSON string is a TOML one, except that TOML wants the delete character escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _size(count: int) -> str | int:
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count % scale == 0:
            return f"{count // scale}{unit}"
    return count


def _bits(rate: float | None) -> str | float | None:
    units = {"tbit": 1.25e11, "gbit": 1.25e8, "mbit": 1.25e5, "kbit": 125.0}
    return _exact(rate, units, lambda text: bytes_per_s(text, ""))


def _bytes(rate: float | None) -> str | float | None:
    units = {"TB/s": 1e12, "GB/s": 1e9, "MB/s": 1e6, "kB/s": 1e3}
    return _exact(rate, units, lambda text: bytes_per_s(text, ""))


def _time(duration_ms: float) -> str | float | None:
    units = {"s": 1e3, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
    text = _exact(duration_ms, units, lambda text: milliseconds(text, "latency"))
    return duration_ms * 1e-3 if text == duration_ms else text


def _exact(
    value: float | None, units: Mapping[str, float], parse: Callable[[str], float]
) -> str | float | None:
    """The value in the largest unit of which it has one, if that reads back the same; else the number."""
    unit = next((unit for unit, scale in units.items() if value is not None and value >= scale), None)
    if value is None or unit is None:
        return value
    text = f"{value / units[unit]:.6g}{unit}"
    return text if parse(text) == value else value
