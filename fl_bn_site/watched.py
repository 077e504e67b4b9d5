"""Run a SuperNode, and end it when its output shows that it hangs: ``python watched.py PROGRAM ARGUMENT...``.

If a ServerApp is killed while it sends a message, Flower 1.25's SuperNode may receive half a message. The SuperNode
then prints ``Failed to receive message``, stays online and never answers again. This program copies the
SuperNode's output, and ends the SuperNode at that line. It then exits with 1, so that the supervisor starts it
again.

This file is run by its path, not as a module, since the package around it would import torch, which takes
seconds.
"""

import os
import signal
import subprocess
import sys
import threading

HANGS = b"Failed to receive message"  # the SuperNode prints this before it hangs
GRACE = 10.0  # seconds to wait for the end of the program before it is killed


def main(argv: list[str]) -> int:
    """Run a program and wait for its end.

    Args:
        argv: The program and its arguments.

    Returns:
        The exit code of the program; 1 where ``copy`` ended it; 128 + the number of the signal where another signal
        ended it.
    """
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    hung = threading.Event()
    reader = threading.Thread(target=copy, args=(process, os.path.basename(argv[0]), hung), daemon=True)
    reader.start()
    code = process.wait()
    reader.join(1)  # wait at most 1 s, since a child of the program may keep the output open
    return 1 if hung.is_set() else code if code >= 0 else 128 - code


def copy(process: "subprocess.Popen[bytes]", name: str, hung: threading.Event) -> None:
    """Copy the output of a process to standard output. End the process if it prints ``HANGS``, since it would then hang.

    Args:
        process: The process.
        name: The name of the process, for the message.
        hung: An event. This function sets it when it ends the process.
    """
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if HANGS in line and not hung.is_set():
            hung.set()
            print(f"{name} received half a message and would wait for ever, so it is ended here and has to be started again", flush=True)
            process.terminate()
            threading.Timer(GRACE, process.kill).start()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # exits without waiting for the timer that kills the program
