"""The command line: one file a command, each importing what it needs only when it runs."""

from __future__ import annotations

import sys

from plait.errors import PlaitError

EXIT_FAILED = 1
"""The work ran and did not succeed: a failing check, a case that falls short."""
EXIT_USAGE = 2
"""The request cannot be carried out: a wrong option, file or machine."""


def main() -> None:
    """Run the command line; an error of plait's own ends it with one line and no traceback."""
    from plait.cli.app import app

    try:
        app()
    except PlaitError as error:
        print(f"plait: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from None
    except KeyboardInterrupt:
        print("plait: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
