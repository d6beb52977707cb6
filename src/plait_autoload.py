"""What ``import torch`` runs of plait: nothing, unless PLAIT_COMPRESS asks for compressed gradients.

torch loads the entry points of the group ``torch.backends`` at the end of its own import, which is a way
into a script that knows nothing of plait. So this module must be next to free where it is not wanted, and
must never break an import of torch; and it lies outside the package, whose modules may be importing torch
at this very moment.
"""

import os
import sys

VARIABLE = "PLAIT_COMPRESS"
OFF = frozenset({"", "off", "0", "no", "none", "false"})
"""Values of the variable, in lower case, with which nothing happens."""


def autoload() -> None:
    """Have DDP and FSDP2 models compressed as they are made, if PLAIT_COMPRESS asks for it."""
    if os.environ.get(VARIABLE, "").strip().lower() in OFF:
        return
    try:
        from plait.compress.script import install

        install()
    except Exception as error:
        what = f"plait: gradients are NOT compressed, {VARIABLE} could not be heeded: {error!r}\n"
        print(what, end="", file=sys.stderr, flush=True)
