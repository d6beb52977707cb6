"""Ray as plait sees it: a cluster that is there, or one of this machine that lives as long as the run.

A cluster of our own has Ray's token authentication on, as any has since Ray 2.59; one that is there has
what its owner gave it. Ray is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from plait.errors import UsageError
from plait.extras import install

_ADDRESS, _MODE = "RAY_ADDRESS", "RAY_AUTH_MODE"
_STORE_BYTES = 100 << 20
"""Of a cluster of our own: nothing goes through the object store."""
_PREFIX, _OWNER = "plait-ray-", "owner"
_LONGEST_FOLDER = 20
"""Below it Ray makes sockets, whose paths have 107 characters at most."""
_ANSWER_S = 5.0
"""Within which a cluster that is there takes a connection."""
_HEAD = "the address that `ray start --head` printed"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of Ray's that is alive."""

    name: str
    """Its host's; of several on one host, each with a part of its number."""
    number: str
    address: str
    cpus: float
    gpus: float
    memory_bytes: int

    def has(self, kind: Literal["cpu", "cuda"]) -> float:
        """How many CPUs or GPUs."""
        return self.cpus if kind == "cpu" else self.gpus


class Connection:
    """This process's connection to Ray, from its construction until ``close``.

    One that the user has made is used, and left as it is.
    """

    def __init__(self, address: str | None = None, *, cpus: int = 1, gpus: int = 0) -> None:
        """Connect to the cluster at an address, or start one of so many CPUs and GPUs on this machine."""
        self.ray = module("ray")
        self._folder: Path | None = None
        self._own = not self.ray.is_initialized()
        address = _existing(address)
        self.local = self._own and address is None
        """Whether the cluster is of our own making, and so on this machine alone."""
        if not self._own:
            _check_same(self.ray, address)
        elif address is None:
            self._start(cpus, gpus)
        else:
            _check_there(address)
            self._init(address, address=address)

    @staticmethod
    def would_start(address: str | None) -> bool:
        """Whether a connection to that address would start a cluster on this machine."""
        return _existing(address) is None and not module("ray").is_initialized()

    @property
    def address(self) -> str:
        """Where workers of the cluster reach this process."""
        return "127.0.0.1" if self.local else str(self.ray.util.get_node_ip_address())

    def nodes(self) -> list[Node]:
        """The nodes that are alive, by name: Ray gives them in any order."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        hosts = Counter(node["NodeManagerHostname"] for node in alive)
        found = [
            Node(
                name=host if hosts[host] == 1 else f"{host}-{node['NodeID'][:8]}",
                number=node["NodeID"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=node["Resources"].get("GPU", 0.0),
                memory_bytes=int(node["Resources"].get("memory", 0)),
            )
            for node in alive
            for host in [str(node["NodeManagerHostname"])]
        ]
        return sorted(found, key=lambda node: node.name)

    def close(self) -> None:
        """Disconnect; a cluster of our own ends, with its files."""
        if self._own:
            self.ray.shutdown(wait_for_processes=True)
            self._own = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self, cpus: int, gpus: int) -> None:
        if os.environ.get(_MODE, "token").lower() != "token":
            raise UsageError(
                f"{_MODE} is {os.environ[_MODE]!r}: whoever reaches a port of Ray could run programs here",
                setting=_MODE,
                works="token, or unset",
            )
        usual = tempfile.gettempdir()
        # A folder of its own, so that nothing stays behind and nobody joins this cluster by accident.
        place = Path(usual if len(usual) <= _LONGEST_FOLDER else "/tmp")
        _clear(place)
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=place)
        self._folder = Path(folder)
        (self._folder / _OWNER).write_text(str(os.getpid()))
        try:
            self._init(
                "this machine",
                address="local",
                num_cpus=cpus,
                num_gpus=gpus,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _temp_dir=folder,
            )
            self._folder.chmod(0o700)  # Ray lets everybody in
        except BaseException:
            self.close()
            raise

    def _init(self, where: str, **settings: Any) -> None:
        try:
            with _signals_kept():
                self.ray.init(**settings, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            raise UsageError(
                f"Ray cannot be had at {where}: {str(error).strip().partition(chr(10))[0]}",
                setting=f"address, {_MODE}, RAY_AUTH_TOKEN",
                works=f"{_HEAD}, with the same {_MODE} and token as there",
            ) from None


def _clear(place: Path) -> None:
    """Remove the folders of clusters whose owners were killed."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            owner = int((folder / _OWNER).read_text())
        except (OSError, ValueError):  # it is being made, or somebody else's
            continue
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def module(name: str) -> Any:
    """A module of Ray, which may not be installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"Ray cannot be imported: {error}", setting="engine", works=install("ray")) from None


def _existing(address: str | None) -> str | None:
    """The address of a cluster that is there, if one was given or is in the environment."""
    found = address or os.environ.get(_ADDRESS) or None
    if found is not None and "://" in found:
        raise UsageError(
            f"{found} is reached through Ray's client, and workers could not reach this process",
            setting=f"address, {_ADDRESS}",
            works=f"plait on a node of the cluster, and there {_HEAD}, or auto",
        )
    return None if found == "local" else found


def _check_same(ray: Any, address: str | None) -> None:
    connected = str(ray.get_runtime_context().gcs_address)
    if address not in (None, "auto", connected):
        raise UsageError(
            f"this process is connected to Ray at {connected}, and {address} is asked for",
            setting=f"address, {_ADDRESS}",
            works=f"{connected}, or ray.shutdown() first",
        )


def _check_there(address: str) -> None:
    """Ray itself would try for a minute."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"nobody answers at {address}: {error}", setting=f"address, {_ADDRESS}", works=_HEAD
        ) from None


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes over SIGTERM, which is not its to have here: a run that is asked to end saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            if handler is not None:  # else it was not set by Python, and cannot be
                signal.signal(number, handler)
