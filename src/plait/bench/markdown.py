"""The sections of a page as Markdown, so that a report reads the same in a browser and in a repository."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from plait.bench.forest import Forest
from plait.page import Heading, Paragraph, Section, Table, text


@dataclass(frozen=True, kw_only=True)
class Details:
    """Plain data that few want to see; a :class:`plait.page.Section`."""

    title: str
    data: Mapping[str, object]
    style: ClassVar[str] = "details pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85em}"
    script: ClassVar[str] = ""

    @property
    def html(self) -> str:
        """The title; a click shows the data."""
        return f"<details><summary>{text(self.title)}</summary><pre>{text(self.json)}</pre></details>"

    @property
    def json(self) -> str:
        """The data, a line a key."""
        rows = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in self.data.items()]
        return "{\n" + ",\n".join(rows) + "\n}"


def markdown(title: str, sections: Sequence[Section], pictures: Mapping[str, str]) -> str:
    """The text of a Markdown file; ``pictures`` are the files of the pictures, by their title."""
    parts = [f"# {title}"]
    for section in sections:
        match section:
            case Heading():
                parts.append(f"{'#' * section.level} {section.text}")
            case Paragraph():
                parts.append(_plain(section.text))
            case Table():
                parts.append(_table(section))
            case Forest():
                parts.append(f"![{section.title}]({pictures[section.title]})")
            case Details():
                shown = f"```json\n{section.json}\n```"
                parts.append(f"<details><summary>{text(section.title)}</summary>\n\n{shown}\n\n</details>")
            case _:
                raise TypeError(f"{type(section).__name__} cannot be written as Markdown")
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns)]
    lines += [[_cell(cell) for cell in row] for row in table.rows]
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{table.title}**\n\n{shown}" if table.title else shown


def _cell(cell: object) -> str:
    """One line, in which no letter ends the cell."""
    return _plain(" ".join(str(cell).split())).replace("|", "\\|")


def _plain(words: str) -> str:
    """Without what Markdown would take for HTML or emphasis."""
    return words.replace("<", "&lt;").replace("*", "\\*")
