"""A page of headings, paragraphs, tables and pictures in one HTML file that loads nothing from anywhere.

    from plait.page import Heading, Paragraph, Table, save
    from plait.plot import Plot, Series             # curves
    from plait.timeline.picture import Gantt        # timelines, with zoom

    save("report.html", "Sixteen devices", [
        Paragraph("What the step would take."),
        Table(columns=("devices", "step ms"), rows=[(1, 96.0), (2, 51.5)]),
        Plot(title="Scaling", x="devices", y="step ms", series=[Series(name="data", points=[(1, 96.0)])]),
    ])

Whatever has the three attributes of a :class:`Section` can stand on a page. The page's security policy
refuses every request and every script but its own, so that names within data cannot become code.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import ClassVar, Protocol

from plait.destination import write_text
from plait.errors import UsageError

_STYLE = """
:root{color-scheme:light dark}
body{margin:1.5em auto;padding:0 1em;max-width:1200px;background:#fff;color:#222}
body{font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.6em;margin:.3em 0}h2{font-size:1.25em;margin:1.6em 0 .4em}
h3{font-size:1.05em;margin:1.2em 0 .3em}
p{max-width:75ch;margin:.5em 0}
body>svg{display:block;max-width:100%;height:auto;margin:.8em 0}
.scroll{overflow-x:auto;margin:.8em 0}
table{border-collapse:collapse;font-size:.93em}caption{text-align:left;font-weight:600;padding:.2em 0}
th,td{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}
th{border-bottom:2px solid #999}
.number{text-align:right;font-variant-numeric:tabular-nums}
tr.chosen{background:#eef6ee;font-weight:600}
@media(prefers-color-scheme:dark){body{background:#16191f;color:#ddd}
th,td{border-bottom-color:#333a44}th{border-bottom-color:#667}tr.chosen{background:#1d3326}}
""".strip()


class Section(Protocol):
    """Something that stands on a page."""

    @property
    def html(self) -> str:
        """The section itself; what comes from outside is escaped in it."""
        ...

    @property
    def style(self) -> str:
        """CSS that it needs; equal ones of several sections are written once."""
        ...

    @property
    def script(self) -> str:
        """JavaScript that brings all sections of its kind to life; written once as well."""
        ...


@dataclass(frozen=True)
class Heading:
    """A heading; the page's own title is of level 1."""

    text: str
    level: int = 2
    style: ClassVar[str] = ""
    script: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.level not in (2, 3):
            raise UsageError(f"a heading of level {self.level}", setting="level", works="2 or 3")

    @property
    def html(self) -> str:
        """The heading."""
        return f"<h{self.level}>{text(self.text)}</h{self.level}>"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text."""

    text: str
    style: ClassVar[str] = ""
    script: ClassVar[str] = ""

    @property
    def html(self) -> str:
        """The paragraph."""
        return f"<p>{text(self.text)}</p>"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under column heads; columns of numbers are aligned right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    chosen: int | None = None
    """The row that stands out."""
    style: ClassVar[str] = ""
    script: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for place, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise UsageError(
                    f"row {place} has {len(row)} cells under {len(self.columns)} column heads",
                    setting="rows",
                    works=f"rows of {len(self.columns)} cells",
                )

    @property
    def html(self) -> str:
        """The table; a wide one scrolls by itself."""
        cells = [[_cell(cell) for cell in row] for row in self.rows]
        kinds = [
            " class=number" if _numeric(row[i] for row in cells) else "" for i in range(len(self.columns))
        ]
        parts = ["<div class=scroll><table>"]
        if self.title:
            parts.append(f"<caption>{text(self.title)}</caption>")
        heads = "".join(f"<th{kind}>{text(head)}" for kind, head in zip(kinds, self.columns, strict=True))
        parts.append(f"<thead><tr>{heads}</thead><tbody>")
        for place, row in enumerate(cells):
            shown = "".join(f"<td{kind}>{text(cell)}" for kind, cell in zip(kinds, row, strict=True))
            parts.append(f"<tr{' class=chosen' if place == self.chosen else ''}>{shown}")
        return "\n".join([*parts, "</tbody></table></div>"])


def page(title: str, sections: Sequence[Section]) -> str:
    """The text of a page with these sections under a title."""
    styles = "\n".join(dict.fromkeys([_STYLE, *(section.style for section in sections)]))
    script = "\n".join(dict.fromkeys(section.script for section in sections if section.script))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'" if script else "script-src 'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {allowed}"
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{text(title)}</title>\n<style>{styles}</style></head>\n<body><h1>{text(title)}</h1>",
        *(section.html for section in sections),
    ]
    if script:
        parts.append(f"<script>{script}</script>")
    return "\n".join([*parts, "</body></html>\n"])


def save(path: str | Path, title: str, sections: Sequence[Section]) -> None:
    """Write a page to a file."""
    write_text(Path(path), page(title, sections), setting="page")


def text(words: object) -> str:
    """Text for a page or a picture, escaped; XML has no way to write most control characters."""
    return escape("".join(c if c >= " " or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(words)))


def _cell(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _numeric(cells: Iterable[str]) -> bool:
    kept = [cell.strip() for cell in cells if cell.strip()]
    return bool(kept) and all(cell[0] in "-+.0123456789—" for cell in kept)
