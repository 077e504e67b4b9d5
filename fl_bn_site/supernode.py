"""Run Flower 1.25's ``flower-supernode`` so that it asks for messages more often while a run goes on.

Usage: ``python -P supernode.py --poll-seconds S ARGUMENT...``. Flower's SuperNode asks the server for messages
every 3 s, looks for the answer of its app every 0.5 s, and waits 1 s for a tensor that has not arrived. Here it
asks every S seconds while messages come, and every 3 s again after a minute without any. The two other waits
are 0.1 s.

This file is run by its path, and runs ``compat`` by its path, since the package around them would import torch.
"""

import argparse
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ASKING = 3.0  # seconds that Flower sleeps between two questions to the server; it sleeps less only while its app works
IDLE = 60.0  # seconds without a message after which the pause is Flower's again
SHORTEST = 0.1  # seconds between two looks for the answer of the app, or for a tensor


class PollingTime:
    """Stand in for the module ``time`` in Flower's SuperNode, with a ``sleep`` that is shorter while there is work.

    All other functions are those of ``time``.

    Args:
        poll: The longest pause between two questions to the server while messages come, in seconds.
    """

    def __init__(self, poll: float) -> None:
        self.poll, self.worked = poll, -IDLE

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, or for less while messages come."""
        if seconds < ASKING:  # the app works on a message
            self.worked = time.monotonic()
            time.sleep(min(seconds, SHORTEST))
        else:
            time.sleep(seconds if time.monotonic() - self.worked > IDLE else min(seconds, self.poll))


def own_options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into the options of this program and the remaining words, which are for Flower's program."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--poll-seconds", type=float, default=ASKING)
    return parser.parse_known_args(words)


def main() -> None:
    """Run the SuperNode until it is stopped."""
    own, rest = own_options(sys.argv[1:])
    compat = runpy.run_path(str(Path(__file__).parents[1] / "fl_bn" / "flower" / "compat.py"))
    try:
        compat["check_deployed"]("fl-bn's SuperNode")
    except ValueError as error:
        sys.exit(str(error))
    names = compat["find"]("start_client_internal").__globals__  # the globals of the module with Flower's main loop
    names["time"] = PollingTime(own.poll_seconds)
    names["pull_objects"] = partial(names["pull_objects"], initial_backoff=SHORTEST)
    sys.argv = ["flower-supernode", *rest]
    compat["find"]("flower_supernode")()


if __name__ == "__main__":
    main()
