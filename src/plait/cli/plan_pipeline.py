"""What ``plait plan --strategy pipeline`` shows: where the chain is cut, and what each stage does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.page import Section
    from plait.pipeline.plan import PipelinePlan
    from plait.profile import Profile

_COLUMNS = ("stage", "blocks", "busy ms", "memory")


def planned(
    profile: Profile, devices: int, batch: int, bandwidth: str, latency: str, memory: str | None
) -> PipelinePlan:
    """The best plan of so many stages."""
    from plait.pipeline.network import Network
    from plait.pipeline.planning import plan
    from plait.units import parse_bytes, parse_rate, parse_seconds

    network = Network.uniform(
        devices,
        latency_ms=1e3 * parse_seconds(latency, setting="--latency"),
        bytes_per_s=parse_rate(bandwidth, setting="--rate"),
    )
    limit = None if memory is None else parse_bytes(memory, setting="--memory")
    return plan(profile, devices, global_batch=batch, memory_bytes=limit, network=network)


def show(made: PipelinePlan, profile: Profile, as_json: bool) -> None:
    """As a table, or as JSON."""
    from plait.cli.console import print_json, print_table

    forecast, remarks = made.forecast, _remarks(made, profile)
    if as_json:
        shown = {"format": "plait.forecast.pipeline/1", "strategy": "pipeline", "step_ms": forecast.step_ms}
        print_json({**shown, "plan": made.to_json(), "remarks": remarks})
        return
    print_table(_title(made), _COLUMNS, _rows(made))
    sys.stdout.write("".join(f"note: {remark}\n" for remark in remarks))


def sections(made: PipelinePlan, profile: Profile) -> list[Section]:
    """For a page."""
    from plait.page import Paragraph, Table

    return [
        Paragraph(f"{_title(made)}."),
        *(Paragraph(f"Note: {remark}.") for remark in _remarks(made, profile)),
        Table(columns=_COLUMNS, rows=_rows(made)),
    ]


def _title(made: PipelinePlan) -> str:
    return f"{made.order}: a step of {made.forecast.step_ms:.4g} ms, without the optimizer"


def _rows(made: PipelinePlan) -> list[list[object]]:
    from plait.units import format_bytes

    forecast = made.forecast
    figures = zip(made.stages, forecast.busy_ms, forecast.peak_bytes, strict=True)
    return [
        [place, f"{stage.first} to {stage.end - 1}", f"{busy_ms:.4g}", format_bytes(peak)]
        for place, (stage, busy_ms, peak) in enumerate(figures)
    ]


def _remarks(made: PipelinePlan, profile: Profile) -> list[str]:
    least, more = divmod(made.global_batch, made.order.micro_batches)
    found = (profile.extrapolates(rows) for rows in (least, least + bool(more)))
    return list(dict.fromkeys(remark for remark in found if remark is not None))
