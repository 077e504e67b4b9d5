"""Run a program, and kill it when standard input ends: ``python tether.py PROGRAM ARGUMENT...``.

Standard input is a pipe that only the supervisor holds open, so it ends when the supervisor does, even by
SIGKILL. All that the program has started is killed, too: this process leads a process group of its own. It is
run by its path, not as a module, and so costs milliseconds: the package around it would import torch.
"""

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # Linux


def main(argv: list[str]) -> int:
    """Run the program ``argv``. Return its exit code; 128 and the signal's number where a signal ended it."""
    program = os.fork()
    if program == 0:
        if sys.platform == "linux":  # for the case that this process is the one that gets killed
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]} cannot be run: {error.strerror}", flush=True)
            os._exit(127)
    signal.signal(signal.SIGTERM, lambda number, frame: ask(program, number))
    threading.Thread(target=watch, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    return code if code >= 0 else 128 - code


def ask(program: int, number: int) -> None:
    """Send the signal ``number`` to the process ``program``, if it still runs."""
    with suppress(ProcessLookupError):  # it has ended just now
        os.kill(program, number)


def watch() -> None:
    """Wait until standard input ends, then kill the process group."""
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
