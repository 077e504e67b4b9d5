"""Run Flower 1.25's ``flower-supernode``, asking more often while there is work.

``python -P supernode.py --poll-seconds S ARGUMENT...``. Flower's SuperNode asks for messages every 3 s, looks
for its app's answer every 0.5 s, and waits a second for a tensor that is still on its way. Here it asks every S
seconds while messages come, and every 3 s again when none came for a minute.

This file is run by its path, and runs ``compat`` by its path, since the package around them would import torch.
"""

import argparse
import runpy
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ASKING = 3.0  # seconds, in Flower: between questions for a message; shorter waits are for its own app
IDLE = 60.0  # seconds without a message after which it asks as rarely as Flower
SHORTEST = 0.1  # seconds between looks for the app's answer


class PollingTime:
    """Replace the module ``time`` in Flower's SuperNode, so that it sleeps less while there is work.

    All but ``sleep`` is as in ``time``.

    Args:
        poll: The longest wait between two questions for messages, in seconds, while there is work.
    """

    def __init__(self, poll: float) -> None:
        self.poll, self.worked = poll, -IDLE

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep as long as Flower wants, or less while there is work."""
        if seconds < ASKING:  # an app is at work
            self.worked = time.monotonic()
            time.sleep(min(seconds, SHORTEST))
        else:
            time.sleep(seconds if time.monotonic() - self.worked > IDLE else min(seconds, self.poll))


def own_options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this program's options in a command line, and the words that remain for Flower's."""
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
    names = compat["find"]("start_client_internal").__globals__  # of Flower's loop
    names["time"] = PollingTime(own.poll_seconds)
    names["pull_objects"] = partial(names["pull_objects"], initial_backoff=SHORTEST)
    sys.argv = ["flower-supernode", *rest]
    compat["find"]("flower_supernode")()


if __name__ == "__main__":
    main()
