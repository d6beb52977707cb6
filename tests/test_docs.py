"""README and docs: every Python block runs as printed, every command works, every link leads somewhere."""

import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
SETS_UP = {"make", "pip", ".venv/bin/python"}
"""Commands that set up a machine or develop plait: `make test` runs this, `make run` ``plait demo run``."""

TIMED = [["plait", "bench"], ["plait", "lab", "check"]]
"""Commands that end with 1 where a measurement falls short, as on a busy machine."""


def name(page):
    """From the root, so that no two pages have the same."""
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def commands(page):
    """The commands, one by one; one that resumes what the one before it began runs after that."""
    found = []
    for text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] not in SETS_UP:
                if "--resume" in words and found and found[-1][0][:2] == words[:2]:
                    found[-1].append(words)
                else:
                    found.append([words])
    return found


def every_command():
    """Page by page; what stands on several pages runs once."""
    seen = []
    for page in PAGES:
        for lines in commands(page):
            if lines not in seen:
                seen.append(lines)
                yield pytest.param(lines, id=f"{name(page)}-{lines[0]}")


def environment(directory):
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"], "COLUMNS": "120"}


@pytest.fixture
def workplace(tmp_path):
    """A folder with the examples, as a user in the source tree sees them."""
    for name in ("examples", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_the_python_of_a_page_runs_as_printed(page, workplace, forkserver):
    script, log = workplace / "page.py", workplace / "page.log"
    script.write_text("\n".join(blocks(page, "python")))
    given = {"script": str(script), "log": str(log)}
    runner = str(ROOT / "tests" / "page.py")
    process = forkserver.Process(target=runpy.run_path, args=(runner, given, "page"))
    process.start()
    process.join(240)
    process.kill()
    process.join()
    assert process.exitcode == 0, log.read_text()


@pytest.mark.parametrize("lines", list(every_command()))
def test_the_commands_of_a_page_work_as_printed(lines, workplace):
    for words in lines:
        given = list(itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), words))  # VARIABLE=value
        done = subprocess.run(
            words[len(given) :],
            cwd=workplace,
            env=environment(workplace) | dict(word.split("=", 1) for word in given),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        fine = {0, 1} if words[:2] in TIMED or words[:3] in TIMED else {0}
        assert done.returncode in fine, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"
