"""Run a program, and kill it when standard input ends: ``python tether.py PROGRAM ARGUMENT...``.

Standard input is a pipe that only the supervisor holds open. It ends when the supervisor ends, even by SIGKILL.
Processes that the program has started are killed, too, since they belong to the same process group.
This file is run by its path, not as a module, since the package around it would import torch, which takes
seconds.
"""

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends


def main(argv: list[str]) -> int:
    """Run a program and wait for its end.

    Args:
        argv: The program and its arguments.

    Returns:
        The exit code of the program; 128 + the number of the signal where a signal ended it; 127 where it cannot
        be run.
    """
    program = os.fork()
    if program == 0:
        if sys.platform == "linux":  # in case this process itself is killed
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"the program {argv[0]} cannot be run: {error.strerror}", flush=True)
            os._exit(127)
    signal.signal(signal.SIGTERM, lambda number, frame: ask(program, number))
    threading.Thread(target=watch, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    return code if code >= 0 else 128 - code


def ask(program: int, number: int) -> None:
    """Send a signal to a process, if it still runs.

    Args:
        program: The id of the process.
        number: The number of the signal.
    """
    with suppress(ProcessLookupError):  # it has ended just now
        os.kill(program, number)


def watch() -> None:
    """Wait until standard input ends, then kill this process and all others of its group."""
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
