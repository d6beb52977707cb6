"""The command line: one file a command, each importing what it needs only when it runs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from plait.errors import PlaitError

EXIT_FAILED = 1
"""The work ran and did not succeed: a failing check, a case that falls short."""
EXIT_USAGE = 2
"""The request cannot be carried out: a wrong option, file or machine."""
_ENDS = (signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the command line; an error of plait's own ends it with one line and no traceback."""
    from plait.cli.app import app
    from plait.cli.output import OutputError, checked_output

    try:
        with checked_output(), _signals_as_exits():
            app()
    except PlaitError as error:
        _end(str(error), EXIT_USAGE)
    except OutputError as error:
        _end(f"standard output cannot be written: {error.strerror}", EXIT_FAILED)
    except BrokenPipeError:  # whoever read has enough, and does not want to be told
        raise SystemExit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        _end("interrupted", 130)


def _end(why: str, code: int) -> None:
    print(f"plait: {why}", file=sys.stderr)
    raise SystemExit(code) from None


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Let SIGTERM and SIGHUP leave blocks as Ctrl-C does, so that whatever runs ends in order.

    One that is ignored stays so: ``nohup`` means it.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for other in _ENDS:
            signal.signal(other, signal.SIG_IGN)  # once is enough; more would disturb the cleaning up
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in _ENDS}
    heard = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])
