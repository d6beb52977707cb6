"""The timeline as a whole: reading, merging, files and exports."""

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import FileError, UsageError
from plait.timeline import Sample, Span, Timeline

# A few awkward characters: drawing from all of Unicode costs seconds on first use.
words = st.text('aé<&"\\\n/\x00😀', max_size=3)
milliseconds = st.floats(-1e9, 1e9)
scalars = st.none() | st.booleans() | st.integers() | words | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    spans = []
    for _ in range(draw(st.integers(0, 6))):
        start, end = sorted([draw(milliseconds), draw(milliseconds)])
        info = draw(st.dictionaries(words, scalars, max_size=2))
        spans.append(Span(draw(st.sampled_from(["a", "b/c", "d10"])), draw(words), start, end, info))
    samples = st.builds(Sample, st.sampled_from(["a", "e"]), words, milliseconds, milliseconds)
    return Timeline.of(spans, draw(st.lists(samples, max_size=4)), dropped=draw(st.integers(0, 9)))


def two_stages() -> Timeline:
    """Two stages, three micro-batches, 1F1B: as drawn in ``drawing.py``."""
    order = {
        "stage0": {"forward": [0, 1, 2], "backward": [5, 6, 7]},
        "stage1": {"forward": [1, 2, 3], "backward": [4, 5, 6]},
    }
    return Timeline.of(
        Span(stage, name, start, start + 1, {"microbatch": i})
        for stage, names in order.items()
        for name, starts in names.items()
        for i, start in enumerate(starts)
    )


# What a timeline says of itself


def test_busy_time_gaps_and_utilisation() -> None:
    timeline = two_stages().shifted(100)
    assert timeline.tracks == ("stage0", "stage1")
    assert (timeline.start_ms, timeline.end_ms, timeline.makespan_ms) == (100, 108, 8)
    assert timeline.busy_ms("stage0") == 6
    assert timeline.utilisation("stage1") == 0.75
    assert timeline.gaps("stage0") == [(103, 105)]
    assert timeline.gaps("stage1") == [(100, 101), (107, 108)]


def test_an_empty_timeline_has_no_extent() -> None:
    timeline = Timeline()
    assert (timeline.spans, timeline.tracks, timeline.makespan_ms) == ((), (), 0.0)
    assert timeline.draw() == "no spans"
    with pytest.raises(UsageError, match="no span on track 'x'; there are 0 tracks"):
        timeline.busy_ms("x")


def test_marks_alone_have_no_utilisation() -> None:
    timeline = Timeline.of([Span("a", "now", 5, 5)])
    assert timeline.utilisation("a") == 0.0
    assert "!" in timeline.draw()


@pytest.mark.parametrize("ask", [Timeline.busy_ms, Timeline.gaps, Timeline.utilisation])
def test_an_unknown_track_is_named_with_the_known_ones(ask: Any) -> None:
    with pytest.raises(UsageError, match=r"no span on track 'stage2'; there are 2.*works: stage0, stage1"):
        ask(two_stages(), "stage2")


def test_a_timeline_of_known_spans_can_be_recorded_on() -> None:
    timeline = Timeline.of([Span("a", "x", 0, 1)])
    timeline.record("a", "y", 2_000_000, 3_000_000)
    assert [s.name for s in timeline.spans] == ["x", "y"]
    assert repr(timeline) == "<Timeline: 2 spans on 1 tracks, 3 ms, 0 dropped>"


def test_no_torch_is_needed() -> None:
    code = "import sys, plait.timeline; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Merging


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(timelines(), milliseconds), max_size=4), st.randoms(use_true_random=False))
def test_merging_does_not_depend_on_the_order(parts: list[tuple[Timeline, float]], random: Any) -> None:
    def merged(order: Sequence[tuple[Timeline, float]]) -> Timeline:
        return Timeline.merge([t for t, _ in order], offsets_ms=[offset for _, offset in order])

    once = merged(parts)
    random.shuffle(parts)
    assert merged(parts) == once
    assert len(once.spans) == sum(len(t.spans) for t, _ in parts)
    assert once.dropped == sum(t.dropped for t, _ in parts)


def test_offsets_and_names_are_applied() -> None:
    merged = Timeline.merge([two_stages(), two_stages()], offsets_ms=[0, 0.5], names=["real", "sim"])
    assert merged.tracks == ("real/stage0", "real/stage1", "sim/stage0", "sim/stage1")
    assert merged.makespan_ms == 8.5
    assert merged.gaps("sim/stage0") == [(0, 0.5), (3.5, 5.5)]


@pytest.mark.parametrize("given_settings", [{"offsets_ms": [1.0]}, {"names": ["a", "b", "c"]}])
def test_each_timeline_needs_its_offset_and_name(given_settings: dict[str, Any]) -> None:
    (name,) = given_settings
    with pytest.raises(UsageError, match=f"2 timelines, but [13] {name}.*works: 2 of them"):
        Timeline.merge([Timeline(), Timeline()], **given_settings)


# Files


@settings(deadline=None, max_examples=50)
@given(timelines())
def test_what_is_saved_is_what_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, timeline: Timeline
) -> None:
    path = tmp_path_factory.getbasetemp() / "timeline.json"
    timeline.save(path)
    assert Timeline.load(path) == timeline


def test_what_json_cannot_say_is_saved_as_text(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record("a", "x", 0, 1, loss=math.nan, where=Path("/x"))  # type: ignore[arg-type]
    timeline.save(tmp_path / "t.json")
    assert Timeline.load(tmp_path / "t.json").spans[0].info == {"loss": "nan", "where": "/x"}


def changed(**fields: Any) -> dict[str, Any]:
    data = {
        "format": "plait.timeline/1",
        "dropped": 0,
        "spans": [{"track": "a", "name": "x", "start_ms": 0, "end_ms": 1, "info": {}}],
        "samples": [{"track": "a", "name": "n", "at_ms": 0, "value": 1}],
    }
    for place, value in fields.items():
        *way, last = place.split("__")
        target: Any = data
        for step in way:
            target = target[step][0]
        if value is KeyError:
            del target[last]
        else:
            target[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "the file is list, not an object"),
        (changed(format="plait.timeline/2"), "the format is 'plait.timeline/2'.*works: plait.timeline/1"),
        (changed(format=KeyError), "format is missing"),
        (changed(spans=KeyError), "spans is missing"),
        (changed(spans={}), "spans is {}, not a list"),
        (changed(dropped=-1), "dropped is -1"),
        (changed(dropped=1.5), "dropped is 1.5, not a whole number"),
        (changed(speed=3), "speed is not a field of plait.timeline/1"),
        (changed(spans__end_ms="1"), r"spans\[0\]\.end_ms is '1', not a number"),
        (changed(spans__end_ms=True), r"spans\[0\]\.end_ms is True, not a number"),
        (changed(spans__end_ms=-2), r"spans\[0\]: span 'x' on 'a' ends at -2 ms, before"),
        (changed(spans__end_ms=math.inf), r"spans\[0\]: span 'x' on 'a' is from 0 to inf ms"),
        (changed(spans__name=KeyError), r"spans\[0\]\.name is missing"),
        (changed(spans__colour="red"), r"spans\[0\]\.colour is not a field"),
        (changed(spans__info=[1]), r"spans\[0\]\.info is \[1\], not an object"),
        (changed(samples__value=None), r"samples\[0\]\.value is None, not a number"),
        (changed(samples=[7]), r"samples\[0\] is int, not an object"),
    ],
)
def test_a_wrong_file_is_named_with_the_field(tmp_path: Path, data: Any, told: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FileError, match=f"{re.escape(str(path))}: {told}"):
        Timeline.load(path)


def test_the_unchanged_example_loads() -> None:
    assert Timeline.from_json(changed()).spans == (Span("a", "x", 0, 1),)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    two_stages().save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(FileError, match=r"part\.json is not JSON, or only a part of it: .*char"):
        Timeline.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match=r"part\.json is not JSON"):
        Timeline.load(path)


def test_files_out_of_reach_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none\.json cannot be read: No such file"):
        Timeline.load(tmp_path / "none.json")
    with pytest.raises(FileError, match=r"t\.json cannot be written: No such file"):
        two_stages().save(tmp_path / "no" / "t.json")


# Pictures and traces


def test_the_drawing_is_the_one_in_the_source() -> None:
    from plait.timeline import drawing

    drawn = two_stages().draw(width=46)
    assert drawn == "\n".join(
        [
            "stage0 │FFFFFFFFFFFF........BBBBBBBBBBBB│  75%",
            "stage1 │....FFFFFFFFFFFFBBBBBBBBBBBB....│  75%",
            "        0                           8 ms",
            "B backward   F forward   . idle",
        ]
    )
    assert drawing.__doc__ is not None
    assert "\n".join("    " + line for line in drawn.splitlines()) in drawing.__doc__


@settings(deadline=None, max_examples=50)
@given(timelines(), st.integers(40, 120))
def test_a_drawing_fits_its_width(timeline: Timeline, width: int) -> None:
    lines = timeline.draw(width).splitlines()
    for line in lines[: len(timeline.tracks)]:
        assert len(line) == width
        assert line[-6] == "│"


def test_a_nested_span_is_drawn_over_its_parent_and_a_mark_over_both() -> None:
    timeline = Timeline.of(
        [Span("a", "step", 0, 10), Span("a", "forward", 0, 5), Span("a", "saved", 9.9, 9.9)]
    )
    line, _, legend = timeline.draw(width=49).splitlines()
    assert line == "a │" + "F" * 20 + "S" * 19 + "!│ 100%"
    assert legend == "F forward   S step   . idle   ! saved"


def test_names_with_the_same_first_letter_get_letters_of_their_own() -> None:
    timeline = Timeline.of([Span("a", name, i, i + 1) for i, name in enumerate(["send", "step", "s", "é"])])
    assert timeline.draw().splitlines()[-1] == "S s   E send   T step   A é   . idle"


def test_a_drawing_needs_room() -> None:
    with pytest.raises(UsageError, match=r"39 characters are too few.*width.*40 or more"):
        two_stages().draw(width=39)


def exported(timeline: Timeline, path: Path) -> str:
    timeline.export(path)
    return path.read_text(encoding="utf-8")


def test_a_perfetto_trace_has_every_span_in_microseconds(tmp_path: Path) -> None:
    timeline = Timeline.of(
        [
            Span("host0/device0", "step", 1000, 1002),
            Span("host0/device0", "forward", 1000, 1000.5, {"block": 3}),
            Span("host0/device0", "regrouped", 1001, 1001),
            Span("host1/link", "send", 1000.25, 1001.5),
            Span("host1/link", "send", 1000.5, 1002),
        ],
        [Sample("host1/link", "bytes", 1001, 12)],
    )
    trace = json.loads(exported(timeline, tmp_path / "trace.json"))
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["host0", "host1"]
    assert sorted(threads.values()) == ["device0", "link", "link (2)"]
    shown = [
        (processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"], e.get("dur"), e["args"])
        for e in events
        if e["ph"] in "Xi"
    ]
    assert sorted(shown, key=str) == sorted(
        [
            ("host0", "device0", "step", 0.0, 2000.0, {}),
            ("host0", "device0", "forward", 0.0, 500.0, {"block": 3}),
            ("host0", "device0", "regrouped", 1000.0, None, {}),
            ("host1", "link", "send", 250.0, 1250.0, {}),
            ("host1", "link (2)", "send", 500.0, 1500.0, {}),
        ],
        key=str,
    )
    (counter,) = [e for e in events if e["ph"] == "C"]
    assert (counter["name"], counter["ts"], counter["args"]) == ("link bytes", 1000.0, {"bytes": 12})


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 10)), max_size=8))
def test_spans_on_one_thread_of_a_trace_are_apart_or_nested(pairs: list[tuple[float, float]]) -> None:
    from plait.timeline.perfetto import trace

    spans = [Span("a", "x", start, start + length) for start, length in pairs]
    events = [e for e in trace(spans, [])["traceEvents"] if e["ph"] == "X"]
    edges = [(e["tid"], round(e["ts"] * 1e3), round(e["ts"] * 1e3) + round(e["dur"] * 1e3)) for e in events]
    for i, (thread, start, end) in enumerate(edges):
        for other, other_start, other_end in edges[:i]:
            apart = end <= other_start or other_end <= start
            nested = (other_start <= start and end <= other_end) or (
                start <= other_start and other_end <= end
            )
            assert thread != other or apart or nested


AWKWARD = Timeline.of(
    [
        Span("host<0>/a&b", 'f"<script>alert(1)</script>', 0, 1, {"k": "<&>\x00\n"}),
        Span("x" * 40, "tiny", 1, 1),
    ],
    [Sample("x", "bytes & more", 0.5, 3), Sample("x", "bytes & more", 0.7, -3)],
)


@pytest.mark.parametrize("timeline", [two_stages(), AWKWARD, Timeline()])
def test_the_picture_is_well_formed_and_shows_every_span(tmp_path: Path, timeline: Timeline) -> None:
    root = ElementTree.fromstring(exported(timeline, tmp_path / "t.svg"))
    name = "{http://www.w3.org/2000/svg}"
    shapes = [e for e in root.iter() if e.get("class", "").startswith(("span ", "mark "))]
    assert len(shapes) == len(timeline.spans)
    titles = [e.find(f"{name}title") for e in shapes]
    told = [title.text or "" for title in titles if title is not None]
    for span in timeline.spans:
        assert any(text.startswith(f"{span.name}: ") for text in told)


def test_widths_in_the_picture_are_in_proportion(tmp_path: Path) -> None:
    timeline = Timeline.of([Span("a", "x", 10, 11), Span("a", "y", 12, 20)])
    root = ElementTree.fromstring(exported(timeline, tmp_path / "t.svg"))
    plot = next(e for e in root.iter() if e.get("class") == "plot")
    drawn = [e for e in root.iter() if e.get("class", "").startswith("span ")]
    edges = sorted((float(e.get("x", "")), float(e.get("width", ""))) for e in drawn)
    unit = float(plot.get("width", "")) / 10
    assert edges == [pytest.approx((0, unit), abs=1e-3), pytest.approx((2 * unit, 8 * unit), abs=1e-3)]


def test_a_picture_of_very_many_spans_says_what_it_leaves_out(tmp_path: Path) -> None:
    spans = [Span("a", "x", i, i + (0.9 if i < 20_000 else 0.1)) for i in range(20_005)]
    text = exported(Timeline.of(spans), tmp_path / "t.svg")
    assert text.count('class="span ') == 20_000
    assert "5 shorter spans are not drawn" in text


@pytest.mark.parametrize("timeline", [two_stages(), AWKWARD, Timeline()])
def test_the_page_asks_nobody_for_anything(tmp_path: Path, timeline: Timeline) -> None:
    text = exported(timeline, tmp_path / "t.html")
    assert "default-src 'none'" in text
    assert text.count("<script") == 1
    outside = re.findall(r"https?://[^\"' ]+|\b(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttp", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}


def test_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"end in '\.png'.*works: .*\.svg, \.html or \.json"):
        two_stages().export(tmp_path / "t.png")


def test_the_page_in_the_docs_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "timeline.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
