"""``plait launch``: torchrun, with compressed gradients in a script that knows nothing of them.

With ``--background`` any command runs behind the training that shares its cores, within a bound on what that
costs the training.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from plait.cli import EXIT_USAGE

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def launch(
    command: Annotated[
        list[str], typer.Argument(help="A script with its arguments, or any command, after `--`.")
    ],
    bits: Annotated[
        str,
        typer.Option(envvar="PLAIT_COMPRESS", help="auto, 1 to 8, off, or fields as in bits=3,seed=1."),
    ] = "auto",
    nproc_per_node: Annotated[str, typer.Option(help="Workers on each host, or auto.")] = "1",
    nnodes: Annotated[str, typer.Option(help="How many hosts, or from:to.")] = "1",
    node_rank: Annotated[int | None, typer.Option(help="Which of the hosts this is.")] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of host 0.")] = None,
    master_port: Annotated[int | None, typer.Option(help="A free port of host 0.")] = None,
    rdzv_backend: Annotated[str | None, typer.Option(help="How hosts meet: c10d or static.")] = None,
    rdzv_endpoint: Annotated[str | None, typer.Option(help="Where hosts meet, host:port.")] = None,
    rdzv_id: Annotated[str | None, typer.Option(help="A name that the hosts share.")] = None,
    max_restarts: Annotated[int, typer.Option(help="How often failed workers start again.")] = 0,
    module: Annotated[bool, typer.Option("--module", "-m", help="The script is a module's name.")] = False,
    background: Annotated[
        bool, typer.Option("--background", help="Run behind the training on these cores, in what it leaves.")
    ] = False,
    max_slowdown: Annotated[
        float, typer.Option(help="With --background: what a step of the foreground may take, of it alone.")
    ] = 1.05,
    threads: Annotated[int, typer.Option(help="With --background: threads of the command.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="With --background: memory limit of the command, such as 2GiB.")
    ] = None,
    end_with_foreground: Annotated[
        bool, typer.Option("--end-with-foreground", help="With --background: end when the training ends.")
    ] = False,
) -> None:
    """Run a training script with torchrun, its gradients compressed; the script stays as it is.

    Ends with the exit code of the worker that failed first (128 + n when signal n ended it), or 0. With
    --background, runs any command in the background of other training on this host.
    """
    from plait.compress.environment import parse

    if parse(bits, setting="--bits") is not None:
        _check_reach()
    _check_hosts(nnodes)
    given = {
        "nproc-per-node": nproc_per_node,
        "nnodes": nnodes,
        "node-rank": node_rank,
        "master-addr": master_addr,
        "master-port": master_port,
        "rdzv-backend": rdzv_backend,
        "rdzv-endpoint": rdzv_endpoint,
        "rdzv-id": rdzv_id,
        "max-restarts": max_restarts,
    }
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    words += _started(command, module)
    os.environ["PLAIT_COMPRESS"] = bits
    if background:
        several = nproc_per_node != "1" or nnodes != "1"
        started = [*_TORCHRUN, *words] if several else _plain(command, module)
        code = _behind(started, max_slowdown, threads, memory, outlive=not end_with_foreground)
    else:
        os.environ.setdefault("PLAIT_PUBLISH", "foreground")
        code = _torchrun(words)
    if code:
        raise typer.Exit(code)


def _check_reach() -> None:
    """Workers must load plait when they import torch, else they would train uncompressed."""
    from importlib.metadata import entry_points

    from plait.errors import UsageError
    from plait.extras import PLAIT

    if os.environ.get(_AUTOLOAD, "1") != "1":
        what = f"{_AUTOLOAD}={os.environ[_AUTOLOAD]} keeps plait out of the workers"
        raise UsageError(what, setting=_AUTOLOAD, works=f"{_AUTOLOAD}=1, or --bits off")
    if "plait" not in entry_points(group="torch.backends").names:
        raise UsageError(
            "this plait is not installed, so that `import torch` does not find it",
            setting="installation",
            works=f"{PLAIT}, or --bits off",
        )


def _check_hosts(nnodes: str) -> None:
    from plait.errors import UsageError

    least, _, most = nnodes.partition(":")
    bounds = [int(bound) if bound.isdecimal() else 0 for bound in (least, most or least)]
    if not 0 < bounds[0] <= bounds[1]:
        raise UsageError(f"{nnodes!r} is no number of hosts", setting="--nnodes", works="2, or 1:4")


def _started(command: Sequence[str], module: bool) -> list[str]:
    """The command in torchrun's words: a module, a Python script, or any other program."""
    from plait.errors import UsageError

    first = command[0]
    if module:
        return ["--module", *command]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UsageError(f"there is no script {first}", setting="COMMAND", works="the path of a script")
        return list(command)
    if shutil.which(first) is None:
        raise UsageError(
            f"{first!r} is neither a Python script nor a program",
            setting="COMMAND",
            works="train.py, python, or a module's name after --module",
        )
    return ["--no-python", *command]


def _plain(command: Sequence[str], module: bool) -> list[str]:
    """The command as a process of its own, with no torchrun around it."""
    if module:
        return [sys.executable, "-m", *command]
    return [sys.executable, *command] if command[0].endswith(".py") else list(command)


def _behind(
    command: Sequence[str], max_slowdown: float, threads: int, memory: str | None, *, outlive: bool
) -> int:
    """Run a command in the background until it ends; its exit code."""
    from plait.burst import background

    with background(
        command, max_slowdown=max_slowdown, threads=threads, memory=memory, outlive=outlive
    ) as work:
        said = "on cores that others leave idle; beside a foreground, its steps may take"
        print(
            f"plait: {shlex.join(command)} runs {said} {max_slowdown:g} times as long at most",
            file=sys.stderr,
            flush=True,
        )
        try:
            code = work.wait()
        finally:  # a signal ends it, too, and then it is as much worth knowing what it got
            print(f"plait: {work.report}", file=sys.stderr, flush=True)
        assert code is not None, "waiting has no limit"
    return code if code >= 0 else 128 - code


def _torchrun(words: Sequence[str]) -> int:
    """Run torchrun in this process, and return the exit code that the workers mean."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(list(words)))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
        print(f"plait: rank {rank} ended first, {how}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as error:
        print(f"plait: ended by {error.sigval.name}, and the workers with it", file=sys.stderr)
        return 128 + int(error.sigval)
    except ValueError as error:  # torchrun's own complaint about an option
        print(f"plait: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0
