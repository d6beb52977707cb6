"""How to install what is missing, in words that hold wherever plait itself came from.

plait may be installed from a registry, from a file or from a clone of its sources, so that neither
``plait[hf]`` nor ``.[hf]`` is understood everywhere. The packages of an extra are, and plait's metadata has
them.
"""

from __future__ import annotations

import re
import shlex
from importlib import metadata

PLAIT = "pip install ., in a clone of plait's sources"
"""How to install plait itself."""


def requirements(extra: str | None = None) -> list[str]:
    """The requirements of plait itself, or of one of its extras, as they stand in its metadata."""
    found = []
    try:
        lines = metadata.requires("plait") or []
    except metadata.PackageNotFoundError:  # run from its sources without an installation
        lines = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        name = re.search(r"extra == ['\"]([^'\"]+)", marker)
        if (name and name.group(1)) == extra:
            found.append(requirement.strip())
    return found


def install(extra: str) -> str:
    """The command that brings an extra."""
    needed = requirements(extra)
    if not needed:
        return f"pip install '.[{extra}]', in a clone of plait's sources"
    return f"pip install {shlex.join(needed)}"
