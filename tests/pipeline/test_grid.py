"""The coloured grid."""

import xml.etree.ElementTree as ET

import pytest

from plait.errors import UsageError
from plait.pipeline import grid
from plait.pipeline.events import Load, predict
from plait.pipeline.network import Network
from plait.pipeline.orders import kfkb, one_f_one_b
from plait.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def step(order, forward_ms=10.0):
    loads = [Load(forward_ms=forward_ms, backward_ms=2 * forward_ms)] * order.stages
    return predict(order, loads, Network.uniform(order.stages, latency_ms=1)).timeline


def cells(root):
    """(colour, x, y, width, title) of every forward and backward."""
    return [
        (
            r.get("fill")[:8],
            float(r.get("x")),
            float(r.get("y")),
            float(r.get("width")),
            r.find(f"{SVG}title").text,
        )
        for r in root.iter(f"{SVG}rect")
        if r.find(f"{SVG}title") is not None
    ]


def test_every_action_is_a_cell_in_the_row_of_its_stage():
    order = kfkb(3, 6, 2)
    root = ET.fromstring(grid.svg({"predicted": step(order)}))
    found = cells(root)
    assert len(found) == 3 * 2 * 6
    rows = sorted({y for _, _, y, _, _ in found})
    assert len(rows) == 3
    for stage, y in enumerate(rows):
        names = [title.split(":")[0] for _, _, top, _, title in sorted(found, key=lambda c: c[1]) if top == y]
        assert names == [f"{kind}{m}" for kind, m in order.actions(stage)]
    assert {colour for colour, *_, title in found if title[0] == "F"} == {"hsl(212 "}
    assert {colour for colour, *_, title in found if title[0] == "B"} == {"hsl(140 "}


def test_predicted_above_measured_on_one_scale():
    panels = {"predicted": step(one_f_one_b(2, 4)), "measured": step(one_f_one_b(2, 4), 20.0).shifted(5000)}
    root = ET.fromstring(grid.svg(panels))
    titles = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "title"]
    assert [title.split(":")[0] for title in titles] == ["predicted", "measured"]
    assert "idle" in titles[0]
    found = cells(root)
    rows = sorted({y for _, _, y, _, _ in found})
    above = [width for _, _, y, width, title in found if y == rows[0] and title.startswith("F0")]
    below = [width for _, _, y, width, title in found if y == rows[2] and title.startswith("F0")]
    assert below[0] == pytest.approx(2 * above[0], abs=0.02)
    starts = [x for _, x, y, _, title in found if title.startswith("F0") and y in (rows[0], rows[2])]
    assert starts[0] == pytest.approx(starts[1])


def test_decisions_are_lines():
    spans = [*step(one_f_one_b(2, 2)).spans, Span("tuner", "faster <k=2>", 0.0, 0.0, {"reason": "a & b"})]
    text = grid.svg({"measured": Timeline.of(spans)})
    root = ET.fromstring(text)
    (mark,) = [line for line in root.iter(f"{SVG}line") if line.get("class") == "mark"]
    assert mark.find(f"{SVG}title").text == "faster <k=2>, reason=a & b"


def test_one_step_of_many():
    spans = [Span("stage0", "F0", 10.0 * i, 10.0 * i + 5, {"step": i}) for i in range(3)]
    one = grid.of_step(Timeline.of(spans), 1)
    assert [span.start_ms for span in one.spans] == [10.0]
    with pytest.raises(UsageError, match=r"no span is of step 7.*one of 0, 1, 2"):
        grid.of_step(Timeline.of(spans), 7)


def test_files(tmp_path):
    panels = {"predicted": step(one_f_one_b(2, 2))}
    grid.save(tmp_path / "grid.svg", panels)
    ET.fromstring((tmp_path / "grid.svg").read_text())
    grid.save(tmp_path / "grid.html", panels)
    page = (tmp_path / "grid.html").read_text()
    assert "default-src 'none'" in page
    assert "src=" not in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("http") == 1  # http-equiv
    with pytest.raises(UsageError, match=r"end in '\.png'"):
        grid.save(tmp_path / "grid.png", panels)


def test_what_cannot_be_drawn():
    with pytest.raises(UsageError, match="no timeline"):
        grid.svg({})
    with pytest.raises(UsageError, match="'measured' has no span such as F0"):
        grid.svg({"measured": Timeline.of([Span("stage0", "forward", 0, 1)])})
