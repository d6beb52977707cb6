"""What one rank of the `ranks` fixture runs in its own process; not a test, and never imported by one."""

import ctypes
import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from pathlib import Path


def function_of(file, module, name):
    """A function by name, from a test file by its path (no package holds it) or from an installed module."""
    if file is None:
        found = importlib.import_module(module)
    else:
        spec = importlib.util.spec_from_file_location(f"rank_{Path(file).stem}", file)
        found = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = found
        spec.loader.exec_module(found)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def outcome(task):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        function, args = function_of(**task["function"]), pickle.loads(task["args"])
        if task["group"]:
            dist.init_process_group("gloo")
            dist.barrier()  # or who is quick is gone before others have found it
        return "done", pickle.dumps(function(*args))
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        return "failed", pickle.dumps((what, traceback.format_exc()))


def main(task, connection):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the tests
    os.environ.update(task["environment"])
    with open(task["log"], "w") as log:
        faulthandler.register(signal.SIGUSR1, file=log)
        connection.send(outcome(task))
        sys.stdout.flush()
        sys.stderr.flush()
        log.flush()
        os._exit(0)  # after a failure, gloo's destructors may wait for a peer that is gone


if __name__ == "rank":
    main(task, connection)  # noqa: F821  (given by runpy)
