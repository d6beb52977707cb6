"""How a run is repeated, as a part of its page: Python that plans the same, and the command that goes on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from plait.engine.reading import Reading
from plait.engine.record import CLUSTER
from plait.page import Heading, Paragraph, Section, text

_ARGUMENTS = ("strategy", "compress", "objective", "memory", "save_every", "max_slowdown")
"""Of ``plait.run``, as a run's config has them; what ``devices`` was, the cluster's file says."""


@dataclass(frozen=True)
class Code:
    """Lines as they would be typed; a :class:`plait.page.Section`."""

    text: str
    style: ClassVar[str] = (
        "pre{overflow-x:auto;padding:.6em .8em;background:#8881;font-size:.9em}"  # on light and on dark
    )
    script: ClassVar[str] = ""

    @property
    def html(self) -> str:
        """The lines."""
        return f"<pre>{text(self.text)}</pre>"


def repeat(run: Reading) -> Iterator[Section]:
    """The part of the page, from its heading on."""
    command = run.config.get("command")
    yield Heading("How to repeat it")
    if isinstance(command, list) and command:
        yield Code(shlex.join(str(word) for word in command))
    yield Code(snippet(run))
    if run.trials:
        sweeps = ", ".join(run.trials)
        yield Paragraph(f"Sweeps ({sweeps}) are not among these: ask for them as it was done here.")
    yield Paragraph("To go on with it, where it was stopped or has failed:")
    yield Code(shlex.join(["plait", "run", "--resume", str(run.record.directory)]))
    yield Paragraph("It was asked for with these settings:")
    yield Code(json.dumps(run.config, indent=1, ensure_ascii=False))


def snippet(run: Reading) -> str:
    """Python that asks for the same on the same cluster, in a new directory."""
    directory = run.record.directory
    imports = ["import plait", "from plait.engine.record import Record"]
    given = [f"Record.read({str(directory)!r}).jobs"]
    if run.trials:  # which are written down as the jobs that their trials are made from
        kept = [job for job in run.asked if job in run.jobs]
        given = [f"[job for job in {given[0]} if job.name in {kept!r}]"]
    if (directory / CLUSTER).is_file():
        imports.insert(1, "from plait.cluster import Cluster")
        given.append(f"cluster=Cluster.load({str(directory / CLUSTER)!r})")
    if run.config.get("engine") == "ray":
        given.append("engine='ray'")
    known = [(name, run.config.get(name)) for name in _ARGUMENTS]
    given += [f"{name}={value!r}" for name, value in known if value is not None]
    return "\n".join([*imports, "", f"plait.run({', '.join(given)})"])
