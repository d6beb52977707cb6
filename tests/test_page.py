"""Pages of sections: what is on them, what cannot be put there, and that they ask nobody for anything."""

import re

import pytest

from plait.errors import FileError, UsageError
from plait.page import Heading, Paragraph, Table, page, save
from plait.plot import Plot, Series
from plait.timeline import Span, Timeline
from plait.timeline.picture import Gantt

CURVE = Plot(title="Scaling", x="devices", y="ms", series=[Series(name="data", points=[(1, 2.0), (2, 1.0)])])
GANTT = Gantt(timelines={"": Timeline.of([Span("a", "x", 0, 1)])})


def test_sections_stand_in_order_and_are_escaped():
    text = page("A <page>", [Heading("One & two"), Paragraph("less < more"), Heading("Three", level=3)])
    assert "<title>A &lt;page&gt;</title>" in text
    assert (
        text.index("<h2>One &amp; two</h2>") < text.index("<p>less &lt; more</p>") < text.index("<h3>Three")
    )
    assert "<script" not in text
    assert "script-src 'none'" in text


def test_a_table_aligns_numbers_and_marks_a_row():
    table = Table(
        title="Options", columns=("name", "ms", "note"), rows=[("a<b", 1.23456, ""), ("c", 20, "—")], chosen=1
    )
    assert "<th>name<th class=number>ms<th class=number>note" in table.html
    assert "<tr><td>a&lt;b<td class=number>1.235" in table.html
    assert "<tr class=chosen><td>c<td class=number>20" in table.html
    assert "<caption>Options</caption>" in table.html


def test_what_several_sections_need_is_written_once():
    text = page("Two", [GANTT, CURVE, GANTT])
    assert text.count("<script>") == 1
    assert text.count(GANTT.script) == 1
    assert text.count(GANTT.style) == 1
    assert text.count('class="timeline') == 2


def test_the_page_asks_nobody_for_anything():
    text = page("All", [Heading("h"), Paragraph("p"), Table(columns=["a"], rows=[[1]]), CURVE, GANTT])
    assert "default-src 'none'" in text
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", text)  # its own script and no other
    outside = re.findall(r"https?://[^\"' ]+|\b(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttp", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_what_cannot_be_put_there(tmp_path):
    with pytest.raises(UsageError, match="row 1 has 2 cells under 1 column heads"):
        Table(columns=["a"], rows=[[1], [1, 2]])
    with pytest.raises(UsageError, match=r"level 7.*2 or 3"):
        Heading("x", level=7)
    with pytest.raises(FileError, match="cannot be written: No such file"):
        save(tmp_path / "none" / "page.html", "x", [])
