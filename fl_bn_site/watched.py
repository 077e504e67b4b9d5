"""Run a program and end it when it says that it will hang: ``python watched.py PROGRAM ARGUMENT...``.

Flower 1.25's SuperNode may get half a message, from a ServerApp that is killed while it sends one. It then says
``Failed to receive message``, stays online and never answers again. This program passes its output on, and ends
it with exit code 1. Whoever keeps it running starts it again.

Run by its path, not as a module, so that it costs little: the package around it would import torch.
"""

import os
import signal
import subprocess
import sys
import threading

HANGS = b"Failed to receive message"
GRACE = 10.0  # seconds to end in


def main(argv: list[str]) -> int:
    """Run the program ``argv``. Return its exit code; 1: it was ended."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    deaf = threading.Event()
    reader = threading.Thread(target=copy, args=(process, os.path.basename(argv[0]), deaf), daemon=True)
    reader.start()
    code = process.wait()
    reader.join(1)  # not longer: what it started may hold its output open
    return 1 if deaf.is_set() else code if code >= 0 else 128 - code


def copy(process: "subprocess.Popen[bytes]", name: str, deaf: threading.Event) -> None:
    """Copy the output of ``process``, and end the process where it says that it will hang. ``deaf`` is set then."""
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if HANGS in line and not deaf.is_set():
            deaf.set()
            print(f"{name} got half a message and would wait for ever: it is ended here, and has to be started again", flush=True)
            process.terminate()
            threading.Timer(GRACE, process.kill).start()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # not waiting for the timer
