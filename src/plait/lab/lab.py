"""The lab: hosts on one machine, each with its own network, memory and cores.

    with Lab(hosts=4, rate="1gbit", memory="2GiB", cores="0:1:0:1") as lab:
        lab.run(["python", "train.py"])          # a worker a host, with the torchrun contract
        lab.set_rate("100mbit", host=2)
        lab.cut(3)

Without root or iproute2 the same code runs on loopback, unshaped, and one line says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from plait.errors import LabError, UsageError
from plait.lab.command import check_command, entering
from plait.lab.cores import parse_cores
from plait.lab.host import Host
from plait.lab.label import VARIABLE, Label
from plait.lab.leftover import clean, remove
from plait.lab.logs import open_logs
from plait.lab.memory import MemoryGroup, can_limit, parse_limit
from plait.lab.network import INTERFACE, MOST_HOSTS, Network, missing, parse_link_rate
from plait.lab.trace import Follower, Step, Trace
from plait.lab.traffic import Flow
from plait.lab.watchdog import Watchdog
from plait.lab.workers import Outcome, Process, end, supervise
from plait.worker import Place, free_port

LOOPBACK_VARIABLE = "PLAIT_LAB_LOOPBACK"
"""Set to 1, it makes a loopback lab of every lab that does not insist on being another."""
GRACE_SECONDS = 3.0
"""How long a worker may take to end after it was asked to, before it is killed."""
_FIRST_PORT, _PORTS = 29500, 1000


def print_line(line: str) -> None:
    """Print a worker's line at once, so that hosts interleave as they speak."""
    print(line, flush=True)


class Lab:
    """Hosts on this machine, from entering the block to leaving it, however it is left.

    - `hosts`: how many, 1 to 250.
    - `rate`: of every link, each way (``"1gbit"``; a number is bytes per second); None does not shape.
    - `trace`: how the rate changes over time, counted from the first worker's start: a `Trace` or its file.
    - `memory`: the limit of each host, for all its processes together.
    - `cores`: ``"0-1"`` for all hosts, ``"0:1"`` host by host, or a sequence of sequences.
    - `loopback`: True uses no namespaces, False insists on them; None takes what the machine offers.
    """

    def __init__(
        self,
        *,
        hosts: int = 2,
        rate: str | float | None = None,
        trace: Trace | str | Path | None = None,
        memory: str | int | None = None,
        cores: str | Sequence[Sequence[int]] | None = None,
        loopback: bool | None = None,
    ) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise UsageError(f"a lab cannot have {hosts} hosts", setting="hosts", works=f"1 to {MOST_HOSTS}")
        self._rate = parse_link_rate(rate)
        self._trace = trace if isinstance(trace, Trace) or trace is None else Trace.load(trace)
        if self._trace is not None:
            self._trace.check_hosts(hosts)
        self._memory_bytes = None if memory is None else parse_limit(memory)
        self._cores = parse_cores(cores, hosts)
        self.missing = _missing(loopback)
        """Why this is a loopback lab; None when it has networks of its own."""
        self.hosts: tuple[Host, ...] = ()
        """The hosts, once the lab is entered; what they measured stays readable afterwards."""
        self.label = ""
        """What everything that this lab makes is named after, once it is entered."""
        self._network: Network | None = None
        self._follower: Follower | None = None
        self._processes: list[Process] = []
        self._runs = 0
        self._open: ExitStack | None = None

    @property
    def loopback(self) -> bool:
        """Whether the hosts share this machine's loopback, unshaped."""
        return self.missing is not None

    def __enter__(self) -> Self:
        if self.label:
            raise LabError("a lab is entered once", works="a new Lab(...) for each block")
        label = Label.new()
        self.label = str(label)
        with suppress(LabError):  # names are unique, so what cannot be removed is not in the way either
            clean()
        with ExitStack() as stack:
            # Left in reverse order: trace, processes, memory groups, all that carries the label, watchdog.
            stack.callback(Watchdog(label).end)
            stack.callback(remove, label)
            groups = self._limit_memory(label, stack)
            if self.loopback:
                unlimited = self._memory_bytes is not None and groups[0] is None
                effect = "shaped, and memory is not limited" if unlimited else "shaped"
                line = (
                    f"plait lab: {self.missing}: hosts share this machine's loopback, links are not {effect}"
                )
                print(line, file=sys.stderr, flush=True)
            else:
                self._network = Network(label, len(self._cores))
                self._network.build(self._rate)
            self.hosts = tuple(
                Host(i, self._network, group, cores)
                for i, (group, cores) in enumerate(zip(groups, self._cores, strict=True))
            )
            stack.callback(lambda: end(self._processes, GRACE_SECONDS))
            stack.callback(self._stop_trace)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            stack, self._open = self._open, None
            stack.__exit__(kind, error, trace)

    def _limit_memory(self, label: Label, stack: ExitStack) -> list[MemoryGroup | None]:
        hosts = range(len(self._cores))
        if self._memory_bytes is None or (self.loopback and not can_limit()):
            return [None for _ in hosts]
        groups = [MemoryGroup(self._memory_bytes, name=f"{label}-host{i}") for i in hosts]
        return [stack.enter_context(group) for group in groups]

    def set_rate(self, rate: str | float | None, host: int | None = None) -> None:
        """Shape one host's link, or all, from now on; None stops shaping."""
        self._apply(Step(seconds=0.0, rate_bytes_per_second=parse_link_rate(rate), host=host))

    def follow(self, trace: Trace) -> None:
        """Let the rates follow a trace that starts now, in place of any other."""
        self._wires("follow a trace")
        trace.check_hosts(len(self.hosts))
        self._stop_trace()
        self._follower = Follower(trace, self._apply)

    def cut(self, host: int) -> None:
        """Cut a host's link: nothing passes any more, and nobody is told."""
        self._wires("cut a link").set_link(self._host(host).index, up=False)

    def restore(self, host: int) -> None:
        """Mend a host's link."""
        self._wires("restore a link").set_link(self._host(host).index, up=True)

    def compete(self, source: int, target: int, *, streams: int = 1, rate: str | float | None = None) -> Flow:
        """Start TCP traffic that takes its share of the wire, as much as it gets or at most `rate`.

        It runs beside the hosts' own processes, neither counted in their memory nor kept to their cores.
        """
        if streams < 1:
            raise UsageError(f"a flow of {streams} streams", setting="streams", works="1")
        if self._host(source) is self._host(target):
            raise UsageError(f"a flow from host {source} to itself", setting="target", works="another host")
        limit = parse_link_rate(rate)
        return Flow(self, source, target, streams=streams, rate_bytes_per_second=limit)

    def places(self, per_host: int = 1) -> list[Place]:
        """The torchrun contract of one run's workers, by rank; ranks count through host after host."""
        if per_host < 1:
            raise UsageError(f"{per_host} workers a host", setting="per_host", works="1")
        # A new port for each run: the last one's may still be closing.
        port = free_port() if self.loopback else _FIRST_PORT + self._runs % _PORTS
        self._runs += 1
        world = len(self.hosts) * per_host
        return [
            Place(
                rank=rank,
                world=world,
                local_rank=rank % per_host,
                local_world=per_host,
                address=self._host(0).address,
                port=port,
            )
            for rank in range(world)
        ]

    def run(
        self,
        command: Sequence[str],
        *,
        per_host: int = 1,
        env: Mapping[str, str] | None = None,
        show: Callable[[str], None] = print_line,
        logs: Path | None = None,
        timeout_seconds: float | None = None,
        grace_seconds: float = GRACE_SECONDS,
    ) -> Outcome:
        """Run workers on every host until all have ended; the first that fails ends the others.

        Output goes line by line to `show` with the host in front, or into one file a worker in the folder
        `logs`. A worker that is to end is asked (SIGTERM) and after the grace killed, with all it started.
        """
        self._check_open()
        places = self.places(per_host)
        names = [f"host{p.rank // per_host}" + (f".{p.local_rank}" if per_host > 1 else "") for p in places]
        with ExitStack() as stack:
            if logs is None:
                writers: list[Callable[[str], None]] = [partial(_named, show, name) for name in names]
            else:
                writers = open_logs(logs, names, stack)
            workers: list[Process] = []
            stack.callback(lambda: end(workers, grace_seconds))
            for place in places:
                host = place.rank // per_host
                workers.append(
                    self.start(
                        host, command, place=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                    )
                )
            outcome = supervise(
                workers, writers, grace_seconds=grace_seconds, timeout_seconds=timeout_seconds
            )
        if self._follower is not None:
            self._follower.check()
        return outcome

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        place: Place | None = None,
        env: Mapping[str, str] | None = None,
        directory: Path | None = None,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        beside: bool = False,
    ) -> Process:
        """Start one process on a host; when the lab ends it is ended too, with all it started.

        It leads its own process group but stays in this session. With `beside` it shares the host's network
        only, not its memory limit and cores.
        """
        there = self._host(host)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if self.loopback else INTERFACE}
        environment |= {} if place is None else place.environment()
        environment |= env or {}
        environment[VARIABLE] = self.label
        check_command(command, environment, directory)
        if self._trace is not None and self._follower is None and self._network is not None and not beside:
            self.follow(self._trace)
        memory = None if beside else there.memory
        inside = entering(
            command,
            group=None if memory is None else memory.directory,
            cores=None if beside else there.cores,
            door=None if self._network is None else self._network.door(host),
        )
        process = subprocess.Popen(
            inside,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            process_group=0,
        )
        self._processes.append(process)
        return process

    def namespace(self, host: int) -> Path:
        """The file of a host's network namespace, for whoever has a socket to open there."""
        return self._wires("enter a network").door(self._host(host).index).namespace

    def _host(self, index: int) -> Host:
        self._check_open()
        if not 0 <= index < len(self.hosts):
            raise UsageError(
                f"there is no host {index} among {len(self.hosts)}",
                setting="host",
                works=f"0 to {len(self.hosts) - 1}",
            )
        return self.hosts[index]

    def _check_open(self) -> None:
        if self._open is None:
            raise LabError("the lab is not open", works="with Lab(...) as lab:")

    def _wires(self, what: str) -> Network:
        self._check_open()
        if self._network is None:
            raise LabError(
                f"cannot {what}: this lab has no links of its own ({self.missing})",
                setting="loopback",
                works="root, with iproute2",
            )
        return self._network

    def _apply(self, step: Step) -> None:
        hosts = range(len(self.hosts)) if step.host is None else [self._host(step.host).index]
        self._wires("change a rate").set_rate(step.rate_bytes_per_second, hosts)

    def _stop_trace(self) -> None:
        if self._follower is not None:
            self._follower.stop()


def _named(show: Callable[[str], None], name: str, line: str) -> None:
    show(f"{name} | {line}")


def _missing(loopback: bool | None) -> str | None:
    if loopback:
        return "loopback was asked for"
    if loopback is None and os.environ.get(LOOPBACK_VARIABLE, "0") not in ("", "0"):
        return f"{LOOPBACK_VARIABLE} is set"
    lacking = missing()
    if lacking is None:
        return None
    if loopback is False:
        raise LabError(
            f"a lab with its own networks needs {lacking}",
            setting="loopback",
            works="root with iproute2 installed, or a loopback lab",
        )
    return f"{lacking} is missing"
