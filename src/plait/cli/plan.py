"""``plait plan``: a plan from a profile alone, with no model, no device and no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.burst.burst_plan import BurstPlan
    from plait.burst.frontier import Frontier
    from plait.pipeline.plan import PipelinePlan
    from plait.profile import Profile

_ROWS = 16
"""Of a longer frontier, the table shows so many plans."""
_PLOT = (64, 14)
"""Columns and lines."""


def plan(
    file: Annotated[Path, typer.Argument(help="A profile (.json), as `plait profile --out` writes it.")],
    strategy: Annotated[str, typer.Option(help="burst or pipeline.")] = "burst",
    devices: Annotated[int, typer.Option(help="How many there are.")] = 2,
    batch: Annotated[int, typer.Option(help="Rows of a step, over all devices.")] = 32,
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", "--rate", help="Between any two devices, such as 1gbit or 12GB/s.")
    ] = "1gbit",
    latency: Annotated[str, typer.Option(help="Of a message, such as 40us.")] = "50us",
    memory: Annotated[str | None, typer.Option(help="Of each device, such as 8GiB.")] = None,
    limit: Annotated[
        float | None,
        typer.Option(help="burst: the fastest plan within so many times the device time of one device."),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(help="burst: the cheapest plan whose step takes so long at most, such as 80ms."),
    ] = None,
    background_value: Annotated[
        float | None,
        typer.Option(help="burst: the best total, where idle devices do other work of this value."),
    ] = None,
    widths: Annotated[str | None, typer.Option(help="burst: widths to choose from, as in 1,2,4,8.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="burst: draw the step: .svg, .html, or .json for Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Plan a step for a number of devices, and say what it should take."""
    from plait.destination import check_file

    for path, setting in ((out, "--out"), (timeline, "--timeline")):
        if path is not None:
            check_file(path, setting=setting)
    profile = _profile(file)
    if strategy == "pipeline":
        _refuse_burst_options(
            limit=limit,
            deadline=deadline,
            background_value=background_value,
            widths=widths,
            timeline=timeline,
        )
        made = _pipelined(profile, devices, batch, bandwidth, latency, memory)
        _show_pipeline(made, profile, as_json)
        if out is not None:
            made.save(out)
        return
    if strategy != "burst":
        raise UsageError(
            f"there is no strategy {strategy!r} here", setting="--strategy", works="burst, pipeline"
        )
    frontier = _frontier(
        profile,
        devices=devices,
        batch=batch,
        bandwidth=bandwidth,
        latency=latency,
        memory=memory,
        widths=None if widths is None else _numbers(widths),
        limit=limit,
        deadline_ms=None if deadline is None else _milliseconds(deadline),
        background_value=background_value,
    )
    if as_json:
        _print_json(frontier)
    else:
        _show(frontier, profile)
    if out is not None:
        frontier.chosen.save(out)
    if timeline is not None:
        from plait.burst.events import predict
        from plait.burst.network import Network

        predict(frontier.chosen, profile, Network.of(bandwidth, latency)).timeline.export(timeline)


def _profile(file: Path) -> Profile:
    from plait.profile import Profile

    if file.suffix == ".py":
        raise UsageError(
            f"{file} is a jobs file, of which nothing is measured yet",
            setting="FILE",
            works=f"plait profile {file} --out profile.json, then plait plan profile.json",
        )
    return Profile.load(file)


def _frontier(profile: Profile, **settings: Any) -> Frontier:
    from plait.burst.planner import plan as planned

    try:
        return planned(profile, **settings)
    except UsageError as error:
        if error.setting != "deadline_ms":
            raise
        # Here it is read with a unit, and without one as seconds.
        works = f"{error.works}ms" if str(error.works)[:1].isdigit() else error.works
        raise UsageError(error.what, setting="--deadline", works=works) from None


def _refuse_burst_options(**options: Any) -> None:
    for name, given in options.items():
        if given is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for burst", setting=option, works=f"--strategy burst {option}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{text!r} is no list of widths", setting="--widths", works="1,2,4,8") from None


def _milliseconds(text: str) -> float:
    from plait.units import parse_seconds

    return 1e3 * parse_seconds(text, setting="--deadline")


def _print_json(frontier: Frontier) -> None:
    from plait.cli.console import print_json

    chosen = frontier.chosen
    forecast = chosen.forecast
    assert forecast is not None
    print_json(
        {
            "format": "plait.frontier.burst/1",
            "strategy": "burst",
            "step_ms": forecast.step_ms,
            "device_ms": forecast.device_ms,
            "single_ms": forecast.single_ms,
            "amplification": forecast.amplification,
            "devices": chosen.devices,
            "batch": chosen.batch,
            "blocks": list(chosen.blocks),
            "widths": list(chosen.widths),
            "idle_ms": list(forecast.idle_ms),
            "gap": frontier.gap,
            "frontier": [list(point) for point in frontier.points],
            "remarks": list(frontier.remarks),
        }
    )


def _show(frontier: Frontier, profile: Profile) -> None:
    import sys

    from plait.cli.console import print_table

    chosen = frontier.plans.index(frontier.chosen)
    rows = []
    for place in _shown(len(frontier), chosen):
        made = frontier.plans[place]
        forecast = made.forecast
        assert forecast is not None
        rows.append(
            [
                "→" if place == chosen else "",
                f"{forecast.step_ms:.4g}",
                f"{forecast.speedup:.2f}",
                f"{forecast.device_ms:.4g}",
                f"{forecast.amplification:.2f}",
                _runs(made),
            ]
        )
    name = profile.model or "profile"
    title = f"{name}: batch {frontier.fastest.batch} on up to {frontier.fastest.devices} devices"
    print_table(title, ["", "step ms", "speed-up", "device ms", "amplification", "blocks x width"], rows)
    lines = [""] if len(frontier) == 1 else ["", *plot(frontier.points, chosen), ""]
    exact = "these are all plans worth having"
    below = frontier.gap / (1 + frontier.gap)
    near = f"no plan has both figures more than {100 * below:.1f}% below all of these"
    count = "1 plan" if len(frontier) == 1 else f"{len(frontier)} plans"
    lines.append(f"{count}; {exact if frontier.gap == 0 else near}")
    lines += [f"note: {remark}" for remark in frontier.remarks]
    sys.stdout.write("\n".join(lines) + "\n")


def _shown(count: int, chosen: int) -> list[int]:
    """The plans that the table shows, the chosen one and both ends among them."""
    if count <= _ROWS:
        return list(range(count))
    return sorted({round(k * (count - 1) / (_ROWS - 1)) for k in range(_ROWS)} | {chosen})


def _runs(made: BurstPlan, most: int = 6) -> str:
    """The widths, blocks of one width together: ``13x8 3x1``."""
    found: list[list[int]] = []
    for width in made.widths:
        if found and found[-1][1] == width:
            found[-1][0] += 1
        else:
            found.append([1, width])
    text = " ".join(f"{count}x{width}" for count, width in found[:most])
    return text + (f" ... ({len(found)} runs)" if len(found) > most else "")


def plot(points: Sequence[tuple[float, float]], chosen: int) -> list[str]:
    """The points in characters, both figures on a logarithmic scale; the chosen one stands out."""
    columns, lines = _PLOT
    places = []
    for axis, size in ((0, columns), (1, lines)):
        logs = [math.log(max(point[axis], 1e-9)) for point in points]
        low, high = min(logs), max(logs)
        places.append([round((value - low) / (high - low or 1) * (size - 1)) for value in logs])
    grid = [[" "] * columns for _ in range(lines)]
    for x, y in zip(*places, strict=True):
        grid[lines - 1 - y][x] = "*"
    grid[lines - 1 - places[1][chosen]][places[0][chosen]] = "@"
    top, bottom = (f"{pick(point[1] for point in points):.4g}" for pick in (max, min))
    edge = max(len(top), len(bottom))
    left = [top.rjust(edge), *[" " * edge] * (lines - 2), bottom.rjust(edge)]
    found = ["device ms"] + [f"{mark} |{''.join(row).rstrip()}" for mark, row in zip(left, grid, strict=True)]
    first, last = (f"{pick(point[0] for point in points):.4g}" for pick in (min, max))
    found.append(f"{' ' * edge} +{'-' * columns}")
    found.append(f"{' ' * edge}  {first}{last.rjust(columns - len(first))}  step ms (@ is the plan)")
    return found


def _pipelined(
    profile: Profile, devices: int, batch: int, bandwidth: str, latency: str, memory: str | None
) -> PipelinePlan:
    from plait.pipeline.network import Network
    from plait.pipeline.planning import plan as planned
    from plait.units import parse_bytes, parse_rate, parse_seconds

    network = Network.uniform(
        devices,
        latency_ms=1e3 * parse_seconds(latency, setting="--latency"),
        bytes_per_s=parse_rate(bandwidth, setting="--bandwidth"),
    )
    limit = None if memory is None else parse_bytes(memory, setting="--memory")
    return planned(profile, devices, global_batch=batch, memory_bytes=limit, network=network)


def _show_pipeline(made: PipelinePlan, profile: Profile, as_json: bool) -> None:
    import sys

    from plait.cli.console import print_json, print_table
    from plait.units import format_bytes

    forecast = made.forecast
    least, more = divmod(made.global_batch, made.order.micro_batches)
    found = (profile.extrapolates(rows) for rows in (least, least + bool(more)))
    remarks = list(dict.fromkeys(remark for remark in found if remark is not None))
    if as_json:
        shown = {"strategy": "pipeline", "step_ms": forecast.step_ms, "plan": made.to_json()}
        print_json({**shown, "remarks": remarks})
        return
    rows = [
        [place, f"{stage.first} to {stage.end - 1}", f"{busy_ms:.4g}", format_bytes(peak)]
        for place, (stage, busy_ms, peak) in enumerate(
            zip(made.stages, forecast.busy_ms, forecast.peak_bytes, strict=True)
        )
    ]
    title = f"{made.order}: a step of {forecast.step_ms:.4g} ms, without the optimizer"
    print_table(title, ["stage", "blocks", "busy ms", "memory"], rows)
    sys.stdout.write("".join(f"note: {remark}\n" for remark in remarks))
