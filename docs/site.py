"""What the site adds to the pages in this folder, as a hook of MkDocs.

- Pages link to files beside docs (examples, benchmarks), as they are found in the source tree. On the site
  those files are pages of their own, under ``source/``, and links lead there.
- A line ``::: plait.compress`` in the reference stands for the public names of that package, its
  ``__all__``; ``::: commands`` for the commands of ``plait``. Both are read when the site is built.
"""

import importlib
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SOURCE = "source/"
"""Where files from beside docs are on the site."""
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[#)])")
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(?:~[\w.]*\.)?([\w.]+)</code>")
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".sh": "bash", ".cpp": "cpp"}


def on_files(files, config):
    """Add what pages link to beside docs, and what that links to in turn."""
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for target in outside(page):
            uri = place(target)
            if files.get_file_from_path(uri) is None:
                files.append(added(target, uri, config))
                if target.suffix == ".md":
                    waiting.append(target)
    return files


def on_page_markdown(markdown, page, config, files):
    """Lead links to where files are on the site, and name what the reference documents."""
    uri = page.file.src_uri
    origin = ROOT / uri.removeprefix(SOURCE) if uri.startswith(SOURCE) else DOCS / uri
    if uri.startswith("reference/"):
        markdown = re.sub(r"^::: ([\w.]+)$", lambda found: named(found[1]), markdown, flags=re.MULTILINE)

    def moved(link):
        target = resolved(origin, link[1])
        beside = target is not None and (uri.startswith(SOURCE) or DOCS not in target.parents)
        return posixpath.relpath(place(target), posixpath.dirname(uri)) if beside else link[1]

    return LINK.sub(moved, markdown) if origin.suffix == ".md" and origin.exists() else markdown


def on_page_content(html, page, config, files):
    """Docstrings say ``:meth:`name``` and ``:class:`~long.Name```, of which the site shows the name."""
    return ROLE.sub(r"<code>\1</code>", html)


# --- files beside docs ----------------------------------------------------------------------------------


def outside(page):
    """The files beside docs that a page links to."""
    if page.suffix != ".md":
        return
    for link in LINK.findall(page.read_text()):
        target = resolved(page, link)
        if target is not None and DOCS not in target.parents:
            yield target


def resolved(page, link):
    """The file of the source tree that a page links to; None where there is none."""
    target = (page.parent / link).resolve()
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() and ROOT in target.parents else None


def place(target):
    """Where a file of the source tree is on the site, as its pages name each other."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    plain = target.suffix in LANGUAGES or not target.suffix
    return SOURCE + target.relative_to(ROOT).as_posix() + (".md" if plain else "")


def added(target, uri, config):
    """A file of the source tree as one of the site: Markdown and pictures as they are, code on a page."""
    name, beside = target.relative_to(ROOT).as_posix(), InclusionLevel.NOT_IN_NAV
    if uri == SOURCE + name:
        return File.generated(config, uri, abs_src_path=str(target), inclusion=beside)
    language = LANGUAGES.get(target.suffix, "text")
    code = f"````{language}\n{target.read_text().rstrip()}\n````"
    return File.generated(config, uri, content=f"# {name}\n\n{code}\n", inclusion=beside)


# --- what the reference documents -----------------------------------------------------------------------


def named(name):
    """A line of the reference, with all that it stands for."""
    if name == "commands":
        return commands()
    if not (ROOT / "src" / name.replace(".", "/") / "__init__.py").exists():  # a module, or a name in one
        return f"::: {name}"
    names = importlib.import_module(name).__all__
    return "\n\n".join(f"::: {name}.{member}" for member in sorted(names, key=str.lower))


def commands():
    """The commands of ``plait``, with their options."""
    from typer.main import get_command

    from plait.cli.app import app

    return "\n".join(described(get_command(app), "plait"))


def described(command, words):
    """A command in lines of Markdown, and below it those that it has."""
    below = getattr(command, "commands", {})
    if words != "plait":
        yield f"## {words}\n"
        yield f"{command.help or ''}\n"
        rows = [row for parameter in command.params for row in options(parameter)]
        if rows:
            yield "| | |\n| --- | --- |"
            yield from rows
            yield ""
    for name, each in below.items():
        yield from described(each, f"{words} {name}")


def options(parameter):
    """A row of the table for a parameter, unless it is not shown."""
    if not getattr(parameter, "hidden", False):
        names = [*parameter.opts, *parameter.secondary_opts]
        shown = ", ".join(f"`{name if name.startswith('-') else name.upper()}`" for name in names)
        help_text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
        default = parameter.default
        told = default not in (None, False, True, (), [], "", ...) and isinstance(default, (str, int, float))
        yield f"| {shown} | {help_text}{f' Default: `{default}`.' if told else ''} |"
