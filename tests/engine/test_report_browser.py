"""A run's page in a real browser."""

import pytest
from made_runs import BEGIN, full_run, job, row

from browser import WHY_NOT, Browser, contrast, installed
from plait.engine.record import Record
from plait.engine.report import report


@pytest.fixture
def full(tmp_path):
    return full_run(tmp_path / "first")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if installed() is None:
        pytest.skip(WHY_NOT)
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


def test_the_page_in_a_browser(full, browser, tmp_path):
    browser.open(report(full))
    assert browser.errors == []
    assert [url.split(":")[0] for url in browser.requests] == ["file"]
    titles = browser.eval("[...document.querySelectorAll('svg.plotted .head')].map(t => t.textContent)")
    assert titles == ["Loss", "Throughput", "Sent a step"]
    curves = browser.eval(
        "[...document.querySelectorAll('svg.plotted')].map(p => p.querySelectorAll('.series[d^=M]').length)"
    )
    assert curves == [4, 2, 2]  # each, and its name below
    _, _, width, height = browser.box("svg.plotted .series")
    assert width > 100
    assert height > 20
    told = browser.eval("[...document.querySelectorAll('svg.plotted title')].map(t => t.textContent)")
    assert "gpt: 4 at 0" in told
    assert "gpt, evaluated: 0.3 at 9" in told
    assert browser.eval("document.querySelector('caption').textContent") == "Evaluations"
    panels = browser.eval("[...document.querySelectorAll('.timeline .title')].map(t => t.textContent)")
    assert [panel.split(":")[0] for panel in panels] == ["planned", "measured"]


def test_zoom_and_hover_in_a_browser(full, browser):
    browser.open(report(full))
    browser.eval("document.querySelector('svg.timeline').scrollIntoView()")
    x, y, width, height = browser.box(".span")
    browser.mouse("Moved", x + width / 2, y + height / 2)
    tip = browser.eval("document.querySelector('.tip').innerText")
    assert tip.startswith(("gpt: ", "small: "))
    assert browser.eval("getComputedStyle(document.querySelector('.tip')).display") == "block"
    browser.mouse("Wheel", x + width / 2, y + height / 2, deltaX=0, deltaY=-300)
    assert browser.eval("document.querySelector('.scaled').getAttribute('transform')").startswith("scale(2.7")
    for clicks in (1, 2):
        for kind in ("Pressed", "Released"):
            browser.mouse(kind, x + width / 2, y + height / 2, clickCount=clicks)
    assert browser.eval("document.querySelector('.scaled').getAttribute('transform')").startswith("scale(1 ")
    assert browser.errors == []
    assert [url.split(":")[0] for url in browser.requests] == ["file"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_can_be_read_on_light_and_on_dark(full, browser, scheme):
    browser.prefer(scheme)
    browser.open(report(full))

    def colour(selector, what):
        return browser.eval(f"getComputedStyle(document.querySelector({selector!r})).{what}")

    ground = colour("body", "backgroundColor")
    assert (contrast(ground, "rgb(255, 255, 255)") < 1.1) == (scheme == "light")
    for selector in ("p", "td", "th", "pre", "caption"):
        assert contrast(ground, colour(selector, "color")) >= 7
    assert contrast(ground, colour("svg.plotted .back", "fill")) == 1
    assert contrast(ground, colour("svg.plotted text", "fill")) >= 7
    assert contrast(ground, colour("svg.plotted .series", "stroke")) >= 3
    browser.prefer("")


def test_odd_names_are_words_not_code(browser, tmp_path):
    bad = '<img src=x onerror="window.bad=1"></script><script>window.bad=1</script>\x01 ∞'
    with Record.create(
        tmp_path / "run",
        config={"command": [bad], bad: bad},
        plan={"why": bad, "remarks": [bad]},
        jobs=[job("gpt")],
    ) as made:
        for step in range(3):
            made.step(row(bad, step, device=bad))
        made.event("decision", bad, job=bad, fact=bad, time=BEGIN)
        made.event(bad, bad, time=BEGIN)
    browser.open(report(tmp_path / "run"))
    assert browser.errors == []
    assert browser.eval("window.bad") is None
    assert browser.eval("document.images.length") == 0
    assert browser.eval("document.body.innerText.includes('onerror')")
    assert browser.eval("[...document.querySelectorAll('svg.plotted')].length") == 2
