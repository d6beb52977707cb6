"""Timelines as pictures: two on one axis, how busy they were, and the page tried in a browser."""

import json
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import WHY_NOT, Browser, contrast, installed
from plait.errors import UsageError
from plait.page import save
from plait.timeline import Sample, Span, Timeline
from plait.timeline.picture import Gantt
from plait.timeline.utilisation import busy_tracks, coarser

PREDICTED = Timeline.of(
    [
        Span("device0", "forward", 0, 40, {"step": 3}),
        Span("device0", "backward", 40, 100),
        Span("device1", "forward", 10, 50),
        Span("wire", "sync", 60, 100),
    ],
    [Sample("device0", "bytes held", 20, 7.0)],
)
MEASURED = Timeline.of(
    [
        Span("device0", "forward", 5000, 5050),
        Span("device0", "idle", 5050, 5060),
        Span("device0", "backward", 5060, 5110),
        Span("device1", "forward", 5000, 5080),
        Span("device1", "saved", 5120, 5120),
        Span("wire", "sync", 5080, 5125),
    ],
    dropped=3,
)
BOTH = Gantt(timelines={"predicted": PREDICTED, "measured": MEASURED}, counted=("device0", "device1"))


def parts(picture, kind):
    root = ElementTree.fromstring(picture)
    return [part for part in root.iter() if part.get("class", "").split(" ")[0] == kind]


def test_two_timelines_begin_at_zero_on_one_axis_the_first_above():
    drawn = BOTH.svg()
    titles = parts(drawn, "title")
    assert [title.text for title in titles] == [
        "predicted: 100 ms, 20.0% shorter than measured, 70% busy",
        "measured: 125 ms, 72% busy, 3 spans were not kept",
    ]
    spans = parts(drawn, "span")
    width = float(parts(drawn, "plot")[0].get("width"))
    first, second = (
        [span for span in spans if span.get("data-name") == "forward" and keep(float(span.get("y")))]
        for keep in (lambda y: y < float(titles[1].get("y")), lambda y: y > float(titles[1].get("y")))
    )
    assert min(float(span.get("x")) for span in first) == 0
    assert min(float(span.get("x")) for span in second) == 0
    assert float(first[0].get("width")) == pytest.approx(40 / 125 * width, abs=1e-4)
    assert float(second[0].get("width")) == pytest.approx(50 / 125 * width, abs=1e-4)
    assert first[0].get("class") == second[0].get("class")  # one colour a name


def test_lengths_are_compared_in_words_where_there_is_one_to_compare_with():
    def first(**shown):
        return parts(Gantt(timelines=shown).svg(), "title")[0].text

    assert ", 25.0% longer than predicted, " in first(measured=MEASURED, predicted=PREDICTED)
    assert ", as long as again, " in first(measured=MEASURED, again=MEASURED)
    three = Gantt(timelines={"planned": PREDICTED, "part1": MEASURED, "part2": PREDICTED})
    for shown in (three, Gantt(timelines=BOTH.timelines, compared=False)):
        assert not any("than" in title.text for title in parts(shown.svg(), "title"))


def test_many_names_share_colours_by_kind():
    few = Timeline.of([Span("a", f"F{i}", i, i + 1) for i in range(5)])
    many = Timeline.of([Span("a", f"{kind}{i}", i, i + 1) for i in range(20) for kind in "FB"])
    colours = {span.get("class") for span in parts(Gantt(timelines={"": few}).svg(), "span")}
    assert len(colours) == 5
    shown = Gantt(timelines={"": many}).svg()
    colour = {span.get("data-name"): span.get("class") for span in parts(shown, "span")}
    assert len(set(colour.values())) == 2
    assert colour["F3"] == colour["F17"] != colour["B3"]
    assert re.search(r">F 20 ms<", shown)


def test_some_names_have_the_first_colours_to_themselves():
    jobs = ("swept-1", "gpt", "absent", "swept-0")
    many = [Span("a", f"F{i}", i, i + 1) for i in range(20)] + [
        Span("a", "a", 5, 9),
        Span("a", "gpt2 saved", 2, 3),
    ]
    shown = Gantt(
        timelines={"": Timeline.of([Span("b", job, 0, 9) for job in jobs if job != "absent"] + many)},
        first=jobs,
    )
    colour = {span.get("data-name"): span.get("class") for span in parts(shown.svg(), "span")}
    assert [colour[job] for job in ("swept-1", "gpt", "swept-0")] == ["span f0", "span f1", "span f3"]
    assert colour["F3"] == colour["F17"]
    assert colour["gpt2 saved"] not in (colour["gpt"], colour["F3"])


def test_what_has_no_length_shares_a_colour_and_a_line_of_the_legend():
    marks = [Span("events", name, 1, 1) for name in ("stopped", "failed")]
    drawn = Gantt(timelines={"": Timeline.of([*marks, Span("a", "step", 0, 5)])}).svg()
    assert {mark.get("class") for mark in parts(drawn, "mark")} == {"mark f1"}
    assert ">marks: failed, stopped</text>" in drawn


def test_how_busy_each_was_is_drawn_below_its_tracks():
    drawn = BOTH.svg()
    first, second = (float(title.get("y")) for title in parts(drawn, "title"))
    above, below = (float(line.get("data-top")) for line in parts(drawn, "busy"))
    lowest = max(float(span.get("y")) for span in parts(drawn, "span") if float(span.get("y")) < second)
    assert first < lowest < above < second < below


def test_a_narrower_picture_has_the_same_times():
    wide, narrow = (Gantt(timelines={"": PREDICTED}, width=width).svg() for width in (1200, 700))
    for one, other in zip(parts(wide, "span"), parts(narrow, "span"), strict=True):
        assert float(other.get("x")) == pytest.approx(float(one.get("x")) * 510 / 1010, abs=1e-4)
        assert float(other.get("width")) == pytest.approx(float(one.get("width")) * 510 / 1010, abs=1e-4)
    with pytest.raises(UsageError, match=r"399 is too narrow.*400 or more"):
        Gantt(timelines={"": PREDICTED}, width=399)


def test_the_prediction_stands_above_what_was_measured_wherever_it_is_exported(tmp_path):
    for name in ("both.svg", "both.html"):
        MEASURED.export(tmp_path / name, predicted=PREDICTED)
        drawn = (tmp_path / name).read_text()
        first, second = (">predicted: 100 ms, 20.0% shorter than measured", ">measured: 125 ms")
        assert 0 < drawn.index(first) < drawn.index(second)
        assert drawn.count("of 3 tracks") == 2
    apart = Timeline.of([Span("device1", "forward", 0, 10), Span("device9", "forward", 0, 5)])
    apart.export(tmp_path / "apart.svg", predicted=PREDICTED)
    assert (tmp_path / "apart.svg").read_text().count(">of 1 track<") == 2  # which both have
    MEASURED.export(tmp_path / "both.json", predicted=PREDICTED)
    trace = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in trace if event["name"] == "process_name"}
    assert set(processes) == {"predicted", "measured"}
    starts = {
        name: min(event["ts"] for event in trace if event["ph"] == "X" and event["pid"] == number)
        for name, number in processes.items()
    }
    assert starts == {"predicted": 0, "measured": 0}


def test_nothing_to_draw_is_refused():
    with pytest.raises(UsageError, match=r"no timeline to draw.*predicted"):
        Gantt(timelines={})


def test_utilisation_counts_busy_tracks_and_no_idle_ones():
    assert (
        busy_tracks(PREDICTED.spans, 100, ["device0", "device1"]) == [(0, 1), (10, 2), (50, 1), (100, 0)][:3]
    )
    assert busy_tracks(MEASURED.spans, 5125, ["device0"]) == [(5000, 1), (5050, 0), (5060, 1), (5110, 0)]
    assert busy_tracks(PREDICTED.spans, 100)[-1] == (60, 2)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100), st.floats(0, 20)), min_size=1, max_size=30),
    st.integers(1, 9),
)
def test_the_line_of_utilisation_has_the_area_of_busy_time(given, most):
    timeline = Timeline.of([Span(track, "x", start, start + length) for track, start, length in given])
    end = timeline.end_ms
    for steps in (
        (found := busy_tracks(timeline.spans, end)),
        coarser(found, timeline.start_ms, end, most),
    ):
        edges = [*(at for at, _ in steps), end]
        area = sum(
            value * (right - left) for (_, value), left, right in zip(steps, edges, edges[1:], strict=False)
        )
        assert area == pytest.approx(sum(map(timeline.busy_ms, timeline.tracks)), abs=1e-6)
    assert len(coarser(found, timeline.start_ms, end, most)) <= max(
        most, len(found) if end == timeline.start_ms else most
    )


# --- in a browser ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if installed() is None:
        pytest.skip(WHY_NOT)
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def shown(browser, tmp_path):
    """The page, and where its plot is on the screen."""
    save(tmp_path / "page.html", "Predicted and measured", [BOTH])
    browser.open(tmp_path / "page.html")
    yield browser, browser.box(".ground")
    assert browser.errors == []
    assert [url.split(":")[0] for url in browser.requests] == ["file"]  # itself, and nothing else


def view(browser):
    """The zoom, and the time at the left edge in milliseconds."""
    transform = browser.eval("document.querySelector('.scaled').getAttribute('transform')")
    if transform is None:
        return 1.0, 0.0
    zoom, left = map(float, re.fullmatch(r"scale\((\S+) 1\) translate\((\S+) 0\)", transform).groups())
    width = browser.eval("+document.querySelector('.plot').getAttribute('width')")
    return zoom, -left / width * 125


def test_the_wheel_zooms_around_the_pointer_and_a_double_click_shows_all(shown):
    browser, (x, y, width, _) = shown
    browser.mouse("Wheel", x + width * 0.4, y + 100, deltaX=0, deltaY=-300)
    zoom, left = view(browser)
    assert zoom == pytest.approx(math.e)
    assert left + 0.4 * 125 / zoom == pytest.approx(0.4 * 125, abs=1e-6)  # what was there stays there
    labels = browser.eval("[...document.querySelectorAll('.time')].map(t => t.textContent)")
    assert all(re.fullmatch(r"\d+ ms", label) for label in labels)  # round times, also when zoomed
    assert 4 <= len(labels) <= 10
    for _ in range(2):
        browser.mouse("Wheel", x + width * 0.4, y + 100, deltaX=0, deltaY=900)
    assert view(browser) == (1, 0)
    browser.mouse("Wheel", x + width * 0.4, y + 100, deltaX=0, deltaY=-300)
    for clicks in (1, 2):
        for kind in ("Pressed", "Released"):
            browser.mouse(kind, x + 50, y + 100, clickCount=clicks)
    assert view(browser) == (1, 0)


def test_dragging_moves_and_dragging_with_shift_zooms_into_the_range(shown):
    browser, (x, y, width, _) = shown
    browser.drag((x + 0.2 * width, y + 100), (x + 0.6 * width, y + 100), modifiers=8)
    zoom, left = view(browser)
    assert zoom == pytest.approx(2.5)
    assert left == pytest.approx(25)
    browser.drag((x + 0.5 * width, y + 100), (x + 0.6 * width, y + 100))
    assert view(browser) == (pytest.approx(2.5), pytest.approx(20))
    browser.drag((x + 0.1 * width, y + 100), (x + 0.9 * width, y + 100))
    assert view(browser)[1] == 0  # nothing lies before the beginning
    names = browser.eval("[...document.querySelectorAll('.names text')].map(t => t.textContent)")
    assert set(names) == {"forward", "backward"}  # what is seen has its name


def test_the_pointer_tells_what_it_is_over(shown):
    browser, _ = shown
    x, y, width, height = browser.box(".span[data-name=backward]")
    browser.mouse("Moved", x + width / 2, y + height / 2)
    told = browser.eval("document.querySelector('.tip').innerText").split("\n")
    assert told[0] == "backward: 60 ms, from 40 ms"
    assert float(told[1].removesuffix(" ms")) == pytest.approx(70, abs=0.5)
    assert browser.eval("getComputedStyle(document.querySelector('.tip')).display") == "block"
    left, _, _, _ = browser.box(".cursor")
    assert left == pytest.approx(x + width / 2, abs=1)  # a line through both timelines
    x, y, width, height = browser.box(".busy")
    browser.mouse("Moved", x + width * 0.3, y + height / 2)
    assert browser.eval("document.querySelector('.tip').innerText").startswith("100% busy")
    browser.mouse("Moved", x + width * 0.7, y + height / 2)
    assert browser.eval("document.querySelector('.tip').innerText").startswith("50% busy")
    browser.mouse("Moved", 1, 1)
    assert browser.eval("getComputedStyle(document.querySelector('.tip')).display") == "none"


def test_keys_do_as_well(shown):
    browser, _ = shown
    browser.eval("document.querySelector('.plot').focus()")
    browser.key("+")
    assert view(browser) == (pytest.approx(1.5), pytest.approx(125 / 6))
    browser.key("ArrowRight")
    assert view(browser)[1] == pytest.approx(125 / 6 + 125 / 1.5 / 5)
    browser.key("Home")
    assert view(browser) == (1, 0)


def test_both_timelines_have_one_time_axis_also_when_zoomed(shown):
    browser, (x, y, width, _) = shown
    browser.mouse("Wheel", x + width * 0.4, y + 100, deltaX=0, deltaY=-300)
    begins = browser.eval(
        "[...document.querySelectorAll('.span[data-name=backward]')].map(s => s.getBoundingClientRect().left)"
    )
    assert begins[1] - begins[0] == pytest.approx(20 / 125 * width * math.e, abs=0.5)  # at 40 and at 60 ms
    ticks = browser.eval("document.querySelectorAll('.axis').length")
    assert ticks == 1


def test_buttons_zoom_and_show_all(shown):
    browser, _ = shown
    browser.click(".zoom button[title='zoom in']")
    assert view(browser) == (pytest.approx(1.5), pytest.approx(125 / 6))
    browser.click(".zoom button[title='zoom in']")
    browser.click(".zoom button[title='zoom out']")
    assert view(browser)[0] == pytest.approx(1.5)
    browser.click(".zoom button[title='show all']")
    assert view(browser) == (1, 0)


def test_spans_are_reached_by_keyboard_and_told(shown):
    browser, _ = shown

    def told():
        visible = browser.eval("getComputedStyle(document.querySelector('.tip')).display") == "block"
        return browser.eval("document.querySelector('.tip').innerText") if visible else None

    for _ in range(4):  # the buttons come first
        browser.key("Tab")
    assert browser.eval("document.activeElement.getAttribute('class')") == "plot"
    browser.key("n")
    assert told() == "forward: 40 ms, from 0 s, step=3"
    browser.key("n")
    assert told() == "backward: 60 ms, from 40 ms"
    assert browser.eval("document.querySelectorAll('.span.chosen').length") == 1
    browser.key("n")  # there is none after it
    assert told().startswith("backward")
    browser.key("p")
    assert told().startswith("forward")
    browser.key("ArrowDown")
    assert told() == "forward: 40 ms, from 10 ms"
    browser.key("ArrowUp")
    assert told() == "forward: 40 ms, from 0 s, step=3"
    for _ in range(5):
        browser.key("+")
    browser.key("n")
    browser.key("p")  # out of sight: what is chosen is brought into view
    zoom, left = view(browser)
    assert left <= 20 <= left + 125 / zoom < 60
    browser.key("Escape")
    assert told() is None
    assert browser.eval("document.querySelector('.tip').getAttribute('role')") == "status"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_can_be_read_on_light_and_on_dark(shown, scheme):
    browser, _ = shown
    browser.prefer(scheme)

    def colour(selector, what="fill"):
        return browser.eval(f"getComputedStyle(document.querySelector({json.dumps(selector)})).{what}")

    back = colour(".timeline .back")
    assert (contrast(back, "rgb(255, 255, 255)") < 1.1) == (scheme == "light")
    assert contrast(colour("body", "backgroundColor"), back) == 1
    for selector in (".title", ".small", ".timeline > text"):
        assert contrast(colour(selector), back) >= 4.5
    names = browser.eval(
        "[...document.querySelectorAll('.span:not([data-name=idle])')].map(s => s.getAttribute('class'))"
    )
    for name in set(names):
        fill = colour(f".{name.replace(' ', '.')}")
        assert contrast(fill, colour(".name")) >= 4.5
        assert contrast(fill, back) >= 1.25
    browser.prefer("")


def test_pictures_of_one_page_zoom_by_themselves(browser, tmp_path):
    save(
        tmp_path / "page.html",
        "Two",
        [BOTH, Gantt(timelines={"": PREDICTED}), Gantt(timelines={"": Timeline()})],
    )
    browser.open(tmp_path / "page.html")
    x, y, width, _ = browser.box(".ground")
    browser.mouse("Wheel", x + width / 2, y + 100, deltaX=0, deltaY=-300)
    scaled = browser.eval("[...document.querySelectorAll('.scaled')].map(g => g.getAttribute('transform'))")
    assert scaled[0] is not None
    assert scaled[1:] == [None, None]
    assert browser.errors == []


def test_names_within_data_do_not_become_code(browser, tmp_path):
    bad = '<img src=x onerror="window.bad=1"></script><script>window.bad=1</script>'
    timeline = Timeline.of([Span(bad, bad, 0, 1, {"key": bad})], [Sample(bad, bad, 0.5, 1.0)])
    save(tmp_path / "page.html", bad, [Gantt(timelines={bad: timeline})])
    browser.open(tmp_path / "page.html")
    x, y, width, height = browser.box(".span")
    browser.mouse("Moved", x + width / 2, y + height / 2)
    assert "onerror" in browser.eval("document.querySelector('.tip').innerText")
    assert browser.eval("window.bad") is None
    assert browser.errors == []
