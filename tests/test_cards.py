"""Method cards and how-to pages: cards open alike, pictures show what the code says, diffs apply."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from plait.burst import plan
from plait.pipeline import events, orders
from plait.pipeline.network import Network
from plait.profile import Profile

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CARDS = [DOCS / f"{strand}.md" for strand in ("compress", "pipeline", "spill", "burst")]
PAGES = sorted((DOCS / "howto").glob("*.md"))
OPENING = ["When to use it", "Settings", "How it works", "Where it comes from", "Measured", "Limits"]
PICTURES = sorted(
    file for card in CARDS for file in (DOCS / "assets").glob(f"{card.stem}-*.svg")
)  # others may lie beside them


def section(page, heading):
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)[1]


def diffs(page):
    return re.findall(r"^```diff\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_cards_open_alike(card):
    headings = re.findall(r"^## (.*)$", card.read_text(), re.MULTILINE)
    assert headings[: len(OPENING)] == OPENING
    assert f"](assets/{card.stem}-" in section(card, "How it works")
    assert re.search(r"https://arxiv\.org/abs/\d{4}\.\d{5}\)", section(card, "Where it comes from"))
    assert "Where we differ" in section(card, "Where it comes from")
    assert "GPU" in card.read_text()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_a_figure_comes_with_the_command_that_repeats_it(card):
    rows = [row.split("|") for row in section(card, "Measured").splitlines() if row.startswith("|")]
    commands = [row[-2].strip() for row in rows[2:]]
    assert commands[0] != "the same"
    for command in commands:
        if command != "the same":
            question = re.fullmatch(r"`plait bench ([a-z-]+)( --quick| --seed \d+)?`", command)[1]
            assert (ROOT / "benchmarks" / question / "bench.py").is_file(), command


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_stands_alone(picture):
    """It says what it shows, loads nothing, and its text is of a grey that can be read on dark and light."""
    root = ElementTree.parse(picture).getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert root.find(f"{name}title").text
    assert root.find(f"{name}desc").text
    assert not re.search(r"href|url\(|<style|<script", picture.read_text())
    written = {text.get("fill") for text in root.iter(f"{name}text")}
    assert written <= {"#777777", "#fff"}  # white: on a coloured box


def test_every_card_has_a_picture():
    assert {picture.stem.split("-")[0] for picture in PICTURES} == {card.stem for card in CARDS}


def test_the_picture_of_orders_is_what_the_event_model_predicts():
    shown = (DOCS / "assets" / "pipeline-orders.svg").read_text()
    load = events.Load(forward_ms=10, backward_ms=20, output_bytes=262_144, gradient_bytes=262_144)
    network = Network.uniform(3, latency_ms=0.2, bytes_per_s=12.5e6)
    for order in (orders.one_f_one_b(3, 8), orders.kfkb(3, 8, 2), orders.depth(3, 8, 2)):
        predicted = events.predict(order, [load] * 3, network)
        flying, most = 0, 0
        for span in sorted(predicted.timeline.spans, key=lambda span: span.start_ms):
            if span.track == "stage0":
                flying += 1 if span.name.startswith("F") else -1
                most = max(most, flying)
        assert f"{order.label}: {predicted.step_ms:.0f} ms a step, at most {most} micro-batches" in shown


def test_the_picture_of_widths_is_what_the_planner_finds():
    shown = (DOCS / "assets" / "burst-widths.svg").read_text()
    profile = Profile.load(ROOT / "examples" / "vgg-profile.json")
    found = plan(profile, devices=8, batch=32, bandwidth="1gbit", latency="40us").within(1.15)
    assert f"widths {', '.join(map(str, found.widths))}: {found.forecast.step_ms:.0f} ms a step" in shown


def applied(diff, text):
    """What a diff makes of a text; its context and what it takes away must be where it says."""
    lines, shift = text.splitlines(), 0
    for start, hunk in re.findall(r"^@@ -(\d+).*\n((?:[ +-].*\n)+)", diff, re.MULTILINE):
        at = int(start) - 1 + shift
        for line in hunk.splitlines():
            if line[0] == "+":
                lines.insert(at, line[1:])
                shift += 1
            else:
                assert lines[at] == line[1:], f"line {at + 1} is {lines[at]!r}, not {line[1:]!r}"
            if line[0] == "-":
                del lines[at]
                shift -= 1
            else:
                at += 1
    return "\n".join(lines) + "\n"


def as_a_worker(script):
    """What one worker of torchrun prints, in a process that has torch already."""
    sys.argv = [script, "--steps", "3"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(script, run_name="__main__")
    return text.getvalue()


def test_the_five_lines_of_a_ddp_script(ranks, tmp_path):
    (diff,) = diffs(DOCS / "howto" / "ddp.md")
    assert len(re.findall(r"^\+[^+]", diff, re.MULTILINE)) == 5
    script = tmp_path / "ddp.py"
    script.write_text(applied(diff, (ROOT / "examples" / "ddp.py").read_text()))
    environment = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "PLAIT_COMPRESS": "off"}
    first, second = ranks(2, as_a_worker, str(script), group=False, environment=environment)
    assert re.search(r"step 2: loss [\d.]+\n.*steps", first, re.DOTALL), first
    assert "loss" not in second


def test_the_one_line_of_a_pipeline_is_in_its_example():
    (diff,) = diffs(DOCS / "howto" / "shared-network.md")
    example = (ROOT / "examples" / "pipeline.py").read_text()
    lines = diff.splitlines()
    assert [line[0] for line in lines] == ["-", "+"]
    for line in lines:
        assert line[1:] in example.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_how_to_page_has_something_to_run(page):
    assert re.search(r"^```(sh|python)$", page.read_text(), re.MULTILINE)
