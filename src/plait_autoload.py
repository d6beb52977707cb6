"""What ``import torch`` runs of plait: nothing, unless a variable asks for it.

PLAIT_COMPRESS has gradients compressed; PLAIT_PUBLISH, which ``plait launch`` sets, has the process say its
steps to background work on the same host.

torch loads the entry points of the group ``torch.backends`` at the end of its own import, which is a way
into a script that knows nothing of plait. So this module must be next to free where it is not wanted, and
must never break an import of torch; and it lies outside the package, whose modules may be importing torch
at this very moment.
"""

import os
import sys

VARIABLE = "PLAIT_COMPRESS"
PUBLISH_VARIABLE = "PLAIT_PUBLISH"
OFF = frozenset({"", "off", "0", "no", "none", "false"})
"""Values of the variables, in lower case, with which nothing happens."""


def autoload() -> None:
    """Have DDP and FSDP2 models compressed as they are made, and steps published, as far as asked for."""
    if _asks(VARIABLE):
        try:
            from plait.compress.script import install

            install()
        except Exception as error:
            _say(f"gradients are NOT compressed, {VARIABLE} could not be heeded: {error!r}")
    if _asks(PUBLISH_VARIABLE):
        try:
            from plait.burst.script import install as install_publishing

            install_publishing()
        except Exception as error:
            _say(f"background work is not told of steps, {PUBLISH_VARIABLE} could not be heeded: {error!r}")


def _asks(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() not in OFF


def _say(what: str) -> None:
    print(f"plait: {what}", file=sys.stderr, flush=True)
