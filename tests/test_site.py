"""The documentation as a site: built strictly, complete, true in pictures and samples, all of it local."""

import ast
import fcntl
import html
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

import plait
from browser import WHY_NOT, Browser, installed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGES = [
    "plait",
    *(
        f"plait.{init.parent.name}"
        for init in sorted(Path(plait.__file__).parent.glob("*/__init__.py"))
        if "__all__" in init.read_text()
    ),
]
"""All that say what is public."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; of several processes with tests, the first that needs it builds it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder, log = shared / "site", shared / "site.log"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                cwd=ROOT,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            log.write_text(f"{done.returncode}\n{done.stdout}")
    code, _, said = log.read_text().partition("\n")
    assert code == "0", said
    return folder


def pages(site):
    return sorted(site.rglob("*.html"))


# --- the pages ------------------------------------------------------------------------------------------


def test_every_page_of_docs_is_on_the_site(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file(), page


def test_files_beside_docs_that_pages_link_to_are_on_the_site(site):
    page = (site / "architecture.html").read_text()
    assert 'href="source/tests/test_house.py.html"' in page
    shown = (site / "source" / "tests" / "test_house.py.html").read_text()
    assert "STRANDS" in shown
    assert 'href="source/CONTRIBUTING.html"' in page
    assert not list(site.rglob("site.py*")), "the hook itself is no page"


def test_links_between_docs_and_files_beside_them_lead_both_ways():
    hook = runpy.run_path(str(DOCS / "site.py"))["on_page_markdown"]

    def moved(uri, text):
        return hook(text, SimpleNamespace(file=SimpleNamespace(src_uri=uri)), None, None)

    text = "[a](../../docs/burst.md#plan), [b](../../examples/first.py), [c](https://docs.python.org/3/)"
    ours = "source/benchmarks/burst-planner/README.md"
    assert moved(ours, text) == (
        "[a](../../../burst.md#plan), [b](../../examples/first.py.md), [c](https://docs.python.org/3/)"
    )
    assert moved("howto/ddp.md", "[a](../burst.md), [b](../../benchmarks/burst-planner), [c](none.md)") == (
        "[a](../burst.md), [b](../source/benchmarks/burst-planner/README.md), [c](none.md)"
    )


class Assets(HTMLParser):
    """What a page has a browser load, without being asked by whoever reads it."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        names = {"link": ("href",), "object": ("data",), "video": ("poster", "src")}.get(
            tag, ("src", "srcset")
        )
        self.found += [value for name, value in attributes if name in names and value]


def assets(page):
    parser = Assets()
    parser.feed(page.read_text())
    return parser.found


def test_pages_load_nothing_from_elsewhere(site):
    known = [(page, asset) for page in pages(site) for asset in assets(page)]
    assert any(asset.endswith(".css") for _, asset in known)
    assert any(asset.endswith(".svg") for _, asset in known)
    away = [(page.name, asset) for page, asset in known if re.match(r"(\w+:)?//", asset)]
    assert not away
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        assert not re.search(r"""(@import|url\()\s*["']?(https?:)?//""", sheet.read_text()), sheet


@pytest.mark.skipif(installed() is None, reason=WHY_NOT)
def test_in_a_browser_no_request_leaves_and_pictures_are_there(site, tmp_path):
    browser = Browser(tmp_path)
    try:
        for name in ("architecture.html", "reference/compress.html"):
            browser.open(site / name)
            browser.frame()
            home = site.as_uri()
            own = (home, "data:", "blob:")
            assert browser.requests
            assert not [address for address in browser.requests if not address.startswith(own)]
        browser.open(site / "architecture.html")
        drawn = "[...document.querySelectorAll('article img')].map(image => image.naturalWidth)"
        assert len(browser.eval(drawn)) == 2
        assert all(width > 0 for width in browser.eval(drawn))
    finally:
        browser.close()


# --- the reference --------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_the_public_names_and_no_others(site, package):
    page = (site / "reference" / f"{package.rpartition('.')[2]}.html").read_text()
    shown = re.findall(rf'<h2 id="{re.escape(package)}\.(\w+)"', page)
    assert sorted(shown) == sorted(importlib.import_module(package).__all__)
    assert not re.search(r":(attr|class|data|exc|func|meth|mod):|<code>~", page)


def test_the_reference_has_signatures_and_docstrings(site):
    page = (site / "reference" / "compress.html").read_text()
    entry = page.partition('<h2 id="plait.compress.attach"')[2].partition("<h2 ")[0]
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", entry)).split())
    source = ast.parse((Path(plait.__file__).parent / "compress" / "hook.py").read_text())
    (attach,) = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "attach"]
    assert all(f"{argument.arg}: " in text for argument in [*attach.args.args, *attach.args.kwonlyargs])
    assert ast.get_docstring(attach).splitlines()[0].replace("``", "") in text


def test_all_commands_are_in_the_reference(site):
    from typer.main import get_command

    from plait.cli.app import app

    def names(command, words):
        for name, each in getattr(command, "commands", {}).items():
            yield f"{words}-{name}"
            yield from names(each, f"{words}-{name}")

    page = (site / "reference" / "commands.html").read_text()
    shown = re.findall(r'<h2 id="(plait-[\w-]+)"', page)
    assert shown == list(names(get_command(app), "plait"))
    assert "<code>--dry-run</code>" in page


# --- pictures and samples -------------------------------------------------------------------------------


def rooms():
    """The rooms of the picture: left, right, top."""
    root = ElementTree.parse(DOCS / "assets" / "rooms.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    for group in root.iter(f"{svg}g"):
        x, y, width = (float(group.find(f"{svg}rect").get(name)) for name in ("x", "y", "width"))
        yield group.get("id"), (x, x + width, y)
    arrows = [path.get("id").split("-") for path in root.iter(f"{svg}path") if path.get("id")]
    assert arrows == [["demo", "cli"]]


def test_the_picture_of_the_rooms_is_what_the_rules_say():
    drawn = dict(rooms())
    floors = {"single", "base"}
    beneath = {
        room: {
            other
            for other, (begin, end, height) in drawn.items()
            if height > top and begin < right and left < end
        }
        for room, (left, right, top) in drawn.items()
        if room not in floors
    }
    assert all(floors <= others for others in beneath.values())
    beneath["demo"] |= {"cli"}  # the arrow
    rules = runpy.run_path(str(ROOT / "tests" / "test_house.py"))["ABOVE"]
    assert {room: others - floors for room, others in beneath.items()} == rules


SAMPLES = re.findall(r"^```json\n(.*?)^```", (DOCS / "formats.md").read_text(), re.MULTILINE | re.DOTALL)


def through_text(kind):
    return lambda data, folder: json.loads(kind.from_json(json.dumps(data)).to_json())


def through_data(kind):
    return lambda data, folder: kind.from_json(data).to_json()


def through_folder(kind, name):
    def again(data, folder):
        (folder / name).write_text(json.dumps(data))
        found = kind.load(folder)
        (folder / name).unlink()
        found.save(folder)
        return json.loads((folder / name).read_text())

    return again


def manifest(data, folder):
    from plait.spill.manifest import Manifest

    file = folder / f"{data['content']['group']}.manifest"
    file.write_text(json.dumps(data))
    return json.loads(Manifest.load(file).save(folder).read_text())


def readers():
    from plait.burst.burst_plan import BurstPlan
    from plait.compress.adapt import Log
    from plait.engine.result import JobResult
    from plait.engine.task import Task
    from plait.job import Job
    from plait.pipeline.plan import PipelinePlan
    from plait.profile import Profile
    from plait.sim.data_plan import DataPlan
    from plait.spill.plan import SpillPlan
    from plait.timeline import Timeline

    return {
        "plait.job/1": through_text(Job),
        "plait.profile/1": through_data(Profile),
        "plait.plan.data/1": through_data(DataPlan),
        "plait.plan.pipeline/1": through_data(PipelinePlan),
        "plait.plan.burst/1": through_data(BurstPlan),
        "plait.plan.spill/1": through_data(SpillPlan),
        "plait.compress.bits/1": through_data(Log),
        "plait.timeline/1": through_data(Timeline),
        "plait.result/1": through_folder(JobResult, "result.json"),
        "plait.task/1": through_folder(Task, "task.json"),
        "plait.spill.manifest/1": manifest,
    }


def test_samples_of_files_are_what_is_read_and_written(tmp_path):
    known, seen = readers(), set()
    for text in SAMPLES:
        data = json.loads(text)
        if data.get("format") in known:
            assert known[data["format"]](data, tmp_path) == data
            seen.add(data["format"])
    assert seen == set(known)


def test_the_sample_of_a_cluster_is_what_is_read_and_written(tmp_path):
    (sample,) = re.findall(
        r"^```toml\n(.*?)^```", (DOCS / "formats.md").read_text(), re.MULTILINE | re.DOTALL
    )
    file = tmp_path / "cluster.toml"
    file.write_text(sample)
    assert tomllib.loads(plait.Cluster.load(file).to_toml()) == tomllib.loads(sample)


def test_samples_of_lines_are_what_a_run_keeps(tmp_path):
    from plait.engine.record import KINDS, Record

    lines = [json.loads(text) for text in SAMPLES if '"time"' in text]
    row, event = lines
    with Record.create(tmp_path / "run", config={}, plan={}, jobs=[]) as record:
        assert record.step(row)
        record.event(**{name: value for name, value in event.items() if name != "time"})
    found = Record.read(tmp_path / "run")
    assert found.rows() == {row["job"]: [row]}
    assert event["kind"] in KINDS
    assert [{**each, "time": event["time"]} for each in found.events()] == [event]


def test_every_format_is_on_the_page():
    sources = "".join(file.read_text() for file in Path(plait.__file__).parent.rglob("*.py"))
    written = set(re.findall(r'"(plait\.[\w.]+/\d+)"', sources))
    assert len(written) > 20
    assert written == set(re.findall(r"\bplait\.[\w.]+/\d+", (DOCS / "formats.md").read_text()))
