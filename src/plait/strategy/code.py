"""A digest of the code that a job's functions are defined in.

It is that of their files, as Python reads them: blanks and comments do not count. Nor does, in a jobs file,
what only says which jobs there are: ``job = Job(...)`` and ``jobs = [Job(...), ...]`` at the top, whose
values are in the jobs themselves, and what stands under ``if __name__ == "__main__"``. Where such a statement
calls something else, which may change what the rest of the file does, or other code reads its name, it does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path

from plait.factory import Factory

_LISTS = ("job", "jobs")
"""The names under which a file offers its jobs."""
_DESCRIBE = ("Evaluation", "Factory", "Job", "partial", "replace")
"""What may be called to describe a job, and changes nothing."""


def code_digest(function: Factory) -> str | None:
    """That of the file in which a function is defined; None where there is none."""
    name = function.target.rpartition(":")[0]
    try:
        if name.endswith(".py"):  # a function of a jobs file
            return _digest(Path(name))
        module = sys.modules.get(name)
        origin = module.__file__ if module is not None else None
        if origin is None:
            found = importlib.util.find_spec(name)
            origin = found.origin if found is not None else None
        return None if origin is None else _digest(Path(origin))
    except (ImportError, OSError, ValueError, AttributeError):
        return None


def _digest(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix == ".py":
        with suppress(SyntaxError, ValueError, RecursionError):  # whoever imports it says what is wrong
            content = _defining(ast.parse(content)).encode()
    return hashlib.sha256(content).hexdigest()


def _defining(tree: ast.Module) -> str:
    """What a file does when it is imported, without the statements that only list its jobs."""
    imported = [part for part in tree.body if not _is_main(part)]
    defining = [part for part in imported if not _lists_jobs(part)]
    read = {node.id for part in defining for node in ast.walk(part) if isinstance(node, ast.Name)}
    return "\n".join(map(ast.dump, imported if read.intersection(_LISTS) else defining))


def _is_main(statement: ast.stmt) -> bool:
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    return test is not None and ast.unparse(test) == "__name__ == '__main__'"


def _lists_jobs(statement: ast.stmt) -> bool:
    if not isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if not all(isinstance(target, ast.Name) and target.id in _LISTS for target in targets):
        return False
    parts = list(ast.walk(statement))
    called = [ast.unparse(part.func).rpartition(".")[2] for part in parts if isinstance(part, ast.Call)]
    return set(called) <= set(_DESCRIBE) and not any(isinstance(part, ast.NamedExpr) for part in parts)
