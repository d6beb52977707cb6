"""``plait lab``: run a command on emulated hosts, check their links, remove what killed runs left behind."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from plait.cli import EXIT_FAILED

if TYPE_CHECKING:
    from plait.lab import Lab, Outcome, Transfer

app = typer.Typer(
    help="Hosts on one machine: namespaces, shaped links, memory limits.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

CHECK_FORMAT = "plait.lab.check/1"
RUN_FORMAT = "plait.lab.run/1"
CLEAN_FORMAT = "plait.lab.clean/1"

_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command("run", context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="What each worker runs, after `--`.")],
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 2,
    rate: Annotated[str, typer.Option(help="Rate of every link, each way, or `none`.")] = "none",
    trace: Annotated[Path | None, typer.Option(help="File with the rate over time.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of each host, as 2GiB.")] = None,
    cores: Annotated[str | None, typer.Option(help="Cores: 0-1 for all, or host by host 0:1.")] = None,
    per_host: Annotated[int, typer.Option(help="Workers on each host.")] = 1,
    logs: Annotated[Path | None, typer.Option(help="Folder for one file of output a worker.")] = None,
    as_json: _Json = False,
) -> None:
    """Run COMMAND as a worker on every host, with the variables that torchrun sets.

    Ends with 0, or as the first worker that failed (128 + n when signal n ended it).
    """
    from plait.destination import make_folder
    from plait.lab import Lab

    prepared = Lab(hosts=hosts, rate=_rate(rate), trace=trace, memory=memory, cores=cores)
    if logs is not None:
        make_folder(logs, setting="--logs")
    with prepared as lab:
        outcome = lab.run(command, per_host=per_host, show=_to_stderr if as_json else _to_stdout, logs=logs)
    _report_run(lab, outcome, as_json)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


@app.command("check")
def check(
    hosts: Annotated[list[str], typer.Option(help="How many hosts; several: 2,4.")] = ["4"],  # noqa: B006
    rate: Annotated[list[str], typer.Option(help="Rate; several: 100mbit,1gbit.")] = ["1gbit"],  # noqa: B006
    size: Annotated[list[str], typer.Option(help="Bytes sent at once: 8MiB,64MiB.")] = ["64MiB"],  # noqa: B006
    as_json: _Json = False,
) -> None:
    """Measure every link, beside what was asked of it.

    Ends with 1 when goodput is off by more than 10% at a rate of up to 1 Gbit/s. Headers take 4.4% of it.
    """
    from plait.cli.console import print_json, track
    from plait.lab import Lab, measure_bandwidth
    from plait.units import parse_bytes

    sizes = [parse_bytes(text, setting="size") for text in _each(size)]
    asked = [(_count(n), _rate(r)) for n in _each(hosts) for r in _each(rate)]
    labs = [Lab(hosts=count, rate=one) for count, one in asked]
    results: list[dict[str, object]] = []
    for prepared, (_, one) in zip(labs, asked, strict=True):
        with prepared as lab:
            for size_bytes in sizes:
                pairs = len(lab.hosts) * (len(lab.hosts) - 1)
                with closing(measure_bandwidth(lab, size_bytes)) as measuring:
                    transfers = [next(measuring) for _ in track(range(pairs), "measuring links")]
                results.append(_result(lab, one is not None, transfers))
                if not as_json:
                    _print_matrix(lab, one, transfers)
    holds = all(result["holds"] is not False for result in results)
    if as_json:
        print_json({"format": CHECK_FORMAT, "holds": holds, "checks": results})
    if not holds:
        raise typer.Exit(EXIT_FAILED)


@app.command("clean")
def clean(as_json: _Json = False) -> None:
    """Remove what killed labs left behind; those that still run are not touched."""
    from plait.cli.console import print_json
    from plait.lab import clean as clean_labs

    removed = clean_labs()
    if as_json:
        print_json({"format": CLEAN_FORMAT, "removed": [asdict(leftover) for leftover in removed]})
        return
    for leftover in removed:
        spaces, groups = len(leftover.namespaces), len(leftover.groups)
        counts = f"{leftover.processes} processes, {spaces} namespaces, {groups} memory groups"
        typer.echo(f"{leftover.label}: removed {counts}")
    if not removed:
        typer.echo("nothing was left behind")


def _each(options: Sequence[str]) -> list[str]:
    return [part for option in options for part in option.split(",")]


def _count(text: str) -> int:
    from plait.errors import UsageError

    if not text.strip().isdecimal():
        raise UsageError(f"{text!r} is not a number of hosts", setting="--hosts", works="2")
    return int(text)


def _rate(text: str) -> str | None:
    return None if text == "none" else text


def _to_stdout(line: str) -> None:
    typer.echo(line)


def _to_stderr(line: str) -> None:
    typer.echo(line, err=True)


def _report_run(lab: Lab, outcome: Outcome, as_json: bool) -> None:
    from plait.cli.console import print_json
    from plait.units import format_bytes

    for host in lab.hosts:
        if host.memory is not None and host.oom_kills:
            limit = format_bytes(host.memory.limit_bytes)
            _to_stderr(
                f"plait lab: host {host.index} reached its memory limit of {limit}: {host.oom_kills} killed"
            )
    if outcome.first_failed is not None:
        code = outcome.exit_codes[outcome.first_failed]
        how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        _to_stderr(f"plait lab: rank {outcome.first_failed} failed first, with {how}")
    if as_json:
        peaks = [{"memory_peak_bytes": h.memory_peak_bytes, "oom_kills": h.oom_kills} for h in lab.hosts]
        print_json(
            {"format": RUN_FORMAT, "loopback": lab.loopback, "missing": lab.missing}
            | asdict(outcome)
            | {"hosts": peaks}
        )


def _result(lab: Lab, shaped: bool, transfers: Sequence[Transfer]) -> dict[str, object]:
    judged = [transfer.holds for transfer in transfers if transfer.holds is not None]
    holds = all(judged) if judged else None
    if shaped and lab.loopback:  # it cannot keep a rate, whatever came out
        holds = False
    measured = [
        asdict(transfer)
        | {
            "bytes_per_second": transfer.bytes_per_second,
            "of_asked": transfer.of_asked,
            "holds": transfer.holds,
        }
        for transfer in transfers
    ]
    return {
        "hosts": len(lab.hosts),
        "missing": lab.missing,
        "size_bytes": transfers[0].size_bytes,
        "holds": holds,
        "transfers": measured,
    }


def _print_matrix(lab: Lab, rate: str | None, transfers: Sequence[Transfer]) -> None:
    from plait.cli.console import print_table
    from plait.units import format_bytes, format_rate

    hosts, asked = len(lab.hosts), transfers[0].asked_bytes_per_second
    rows = []
    for source in range(hosts):
        cells = {t.target: _cell(t) for t in transfers if t.source == source}
        rows.append([f"host {source}", *(cells.get(target, "") for target in range(hosts))])
    title = f"{hosts} hosts, {format_bytes(transfers[0].size_bytes)}, "
    title += "not shaped" if asked is None else f"{format_rate(asked)} asked"
    print_table(title, ["Mbit/s, from", *(f"to host {target}" for target in range(hosts))], rows)
    if asked is not None:
        shares = [transfer.of_asked or 0.0 for transfer in transfers]
        verdicts = {None: "not judged above 1 Gbit/s", True: "holds", False: "off by more than 10%"}
        held = all(t.holds for t in transfers) if transfers[0].holds is not None else None
        typer.echo(f"goodput {min(shares):.1%} to {max(shares):.1%} of asked: {verdicts[held]}\n")
    elif rate is not None:
        typer.echo(f"{rate} was asked, and links that are not shaped ({lab.missing}) cannot keep it: fails\n")


def _cell(transfer: Transfer) -> str:
    got = transfer.bytes_per_second * 8 / 1e6
    asked = transfer.asked_bytes_per_second
    return f"{got:.1f}" if asked is None else f"{got:.1f} of {asked * 8 / 1e6:g}"
