"""README and docs: every Python block runs as printed, every command works, every link leads somewhere."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
SETS_UP = {"make", "pip", ".venv/bin/python"}
"""Commands that set up a machine or develop plait: `make test` runs this, `make run` runs ``plait demo``."""

TIMED = [["plait", "bench"], ["plait", "lab", "check"]]
"""Commands that end with 1 where a measurement falls short, as on a busy machine."""


def blocks(page, language):
    return [text for kind, text in FENCE.findall(page.read_text()) if kind == language]


def commands(page):
    for text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] not in SETS_UP:
                yield words


def environment(directory):
    scripts = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"], "COLUMNS": "120"}


@pytest.fixture
def workplace(tmp_path):
    """A folder with the examples, as a user in the source tree sees them."""
    for name in ("examples", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name
)
def test_the_python_of_a_page_runs_as_printed(page, workplace):
    script = workplace / "page.py"
    script.write_text("\n".join(blocks(page, "python")))
    done = subprocess.run(
        [sys.executable, "-W", "error:::plait", str(script)],
        cwd=workplace, env=environment(workplace), capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "words"), [(page.name, words) for page in PAGES for words in commands(page)], ids=str
)
def test_the_commands_of_a_page_work_as_printed(page, words, workplace):
    given = list(itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), words))  # VARIABLE=value first
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
