"""What the Python of a page runs in: a process that has torch already, and is else as fresh as a script's."""

import os
import runpy
import sys
import warnings


def main(script, log):
    os.chdir(os.path.dirname(script))
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    warnings.filterwarnings("error", module="plait")
    sys.argv = [script]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "page":
    main(script, log)  # noqa: F821  (given by runpy)
