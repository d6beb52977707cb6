"""What ``plait plan`` shows of one job: its options side by side, on one cluster or on several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.cli.scenario import UNLIMITED, Scenario
from plait.strategy.figure import figure

if TYPE_CHECKING:
    from plait.cluster import Cluster
    from plait.page import Section
    from plait.plot import Plot
    from plait.strategy import Comparison, Option

WHAT_IF = "plait.what-if/1"
_COLUMNS = ("option", "devices", "step ms", "samples/s", "memory", "wire a step", "idle", "beside")


def show(scenario: Scenario, comparison: Comparison) -> None:
    """The options as a table, then why, why not, and what it rests on."""
    from plait.cli.console import print_table

    rows = [["→" if option is comparison.chosen else "", *_row(option)] for option in comparison.options]
    print_table(_title(comparison), ["", *_COLUMNS], rows)
    sys.stdout.write("\n".join(["", f"on {_where(scenario.cluster)}", *_said(comparison)]) + "\n")


def _where(cluster: Cluster) -> str:
    """A cluster in a few words: plans are made for one that need not be this machine."""
    from plait.units import counted, format_rate

    hosts = [host.name for host in cluster.hosts]
    parts = [counted(len(hosts), "host"), f"{counted(len(cluster.devices), 'device')} in all"]
    if len(hosts) > 1:
        slowest = min(cluster.egress_bytes_per_s(host) for host in hosts)
        parts.append(f"links of {format_rate(slowest)}")
    if not any(tier.name == "disk" for tier in cluster.tiers):
        parts.append("no disk that is known of")
    return f"{', '.join(parts)} (--cluster, --devices, --hosts, --rate, --disk for another)"


def show_what_if(found: Sequence[tuple[Scenario, Comparison]]) -> None:
    """A row an option, a column a scenario; the fastest of each column stands out."""
    from plait.cli.console import print_table

    first = found[0][1]
    rows = []
    for option in first.options:
        cells = []
        for scenario, comparison in found:
            its = comparison.option(option.name)
            mark = "→ " if its is comparison.chosen else ""
            cells.append("—" if its.step_ms is None else mark + figure(its.step_ms) + _on(its, scenario))
        rows.append([option.name, *cells])
    title = f"{first.demand.name}: milliseconds a step"
    print_table(title, ["option", *(scenario.label for scenario, _ in found)], rows)
    lines = [f"{scenario.label}: {comparison.why}" for scenario, comparison in found]
    notes = dict.fromkeys(note for _, comparison in found for note in _notes(comparison))
    sys.stdout.write("\n".join(["", *lines, *notes]) + "\n")


def _on(option: Option, scenario: Scenario) -> str:
    """How many devices an option takes where that is not all of them."""
    every = len(scenario.cluster.devices)
    return "" if option.devices == every else f" on {option.devices} of {every}"


def as_json(found: Sequence[tuple[Scenario, Comparison]]) -> dict[str, Any]:
    """One comparison, or all of them with what tells them apart."""
    if len(found) == 1:
        return found[0][1].to_json()
    scenarios = [
        {"scenario": dict(scenario.varied), "comparison": comparison.to_json()}
        for scenario, comparison in found
    ]
    return {"format": WHAT_IF, "scenarios": scenarios}


def sections(found: Sequence[tuple[Scenario, Comparison]]) -> list[Section]:
    """For a page: the same in full."""
    from plait.page import Heading, Paragraph, Table

    parts: list[Section] = list(_plots(found))
    for scenario, comparison in found:
        if scenario.label:
            parts.append(Heading(scenario.label))
        parts.append(Paragraph(f"{comparison.why}."))
        names = [option.name for option in comparison.options]
        chosen = None if comparison.chosen is None else names.index(comparison.chosen.name)
        rows = [[*_row(option), _words(option)] for option in comparison.options]
        parts.append(Table(title=_title(comparison), columns=[*_COLUMNS, "notes"], rows=rows, chosen=chosen))
        parts += [Paragraph(f"Also possible: {change.text}.") for change in comparison.changes[1:]]
        parts += [Paragraph(f"Note: {remark}.") for remark in comparison.remarks]
    return parts


def _title(comparison: Comparison) -> str:
    demand = comparison.demand
    return f"{demand.name}: a step of {demand.batch} rows"


def _row(option: Option) -> list[str]:
    from plait.units import format_bytes

    if option.step_ms is None:
        return [option.name, *["—"] * (len(_COLUMNS) - 1)]
    budget = min(option.budget_bytes.values(), default=UNLIMITED)
    memory = format_bytes(option.peak_bytes)
    return [
        option.name,
        str(option.devices),
        figure(option.step_ms),
        figure(option.samples_per_s),
        memory if budget >= UNLIMITED else f"{memory} of {format_bytes(budget)}",
        format_bytes(option.wire_bytes),
        f"{option.idle_devices:.3g}",
        figure(option.background_samples_per_s),
    ]


def _words(option: Option) -> str:
    if option.why_not is None:
        return "; ".join(option.remarks)
    works = option.works
    if option.strategy == "spill" and "no tier" in option.why_not:
        works = f"--disk 1GB/s, or {works}"
    return option.why_not if works is None else f"{option.why_not}; works: {works}"


def _said(comparison: Comparison) -> list[str]:
    lines = [comparison.why]
    lines += [f"  or: {change.text}" for change in comparison.changes[1:]]
    lines += [f"{option.name}: no, {_words(option)}" for option in comparison.options if not option.feasible]
    return [
        *lines,
        *_notes(comparison),
        "idle: devices that would do nothing else; beside: samples/s of another such job on them",
    ]


def _notes(comparison: Comparison) -> list[str]:
    """What the figures rest on; a remark of several options is said once."""
    holders: dict[str, list[str]] = {}
    for option in comparison.options:
        for remark in option.remarks:
            holders.setdefault(remark, []).append(option.name)
    every = [option.name for option in comparison.options if option.feasible]
    notes = [f"note: {remark}" for remark in comparison.remarks]
    for remark, names in holders.items():
        notes.append(f"note: {remark}" + ("" if names == every else f" ({'; '.join(names)})"))
    return notes


def _plots(found: Sequence[tuple[Scenario, Comparison]]) -> list[Plot]:
    """Where one figure is varied: every option over it."""
    from plait.plot import Plot, Series

    if len(found) == 1 or len(found[0][0].varied) != 1:
        return []
    name = found[0][0].varied[0][0]
    places = [_number(*scenario.varied[0]) for scenario, _ in found]
    series = []
    for option in found[0][1].options:
        steps = [comparison.option(option.name).step_ms for _, comparison in found]
        if any(step is not None for step in steps):
            series.append(Series(name=option.name, points=sorted(zip(places, steps, strict=True))))
    if not series:
        return []
    units = {
        "rate": "rate, bytes/s",
        "memory": "memory, bytes",
        "latency": "latency, s",
        "batch": "batch, rows",
    }
    logarithmic = min(places) > 0
    return [
        Plot(
            title=f"Step time by {name}",
            x=units.get(name, name),
            y="step, ms",
            series=series,
            log_x=logarithmic,
            log_y=True,
        )
    ]


def _number(name: str, value: str) -> float:
    from plait.units import parse_bytes, parse_rate, parse_seconds

    if name == "rate":
        return parse_rate(value)
    if name == "memory":
        return float(parse_bytes(value))
    return parse_seconds(value) if name == "latency" else float(value)
