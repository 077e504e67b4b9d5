"""Run Flower's ``flower-superexec`` for ClientApps, so that it asks for work five times a second and not once.

Usage: ``python -P superexec.py ARGUMENT... HOST:PORT``. No name of Flower is used but that of its program.
"""

import sys
import time
from importlib.metadata import entry_points

PAUSE, SHORTER = 1.0, 0.2  # seconds that Flower sleeps between two questions, and that it sleeps here


def main() -> None:
    """Run the program until it is stopped."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(SHORTER if seconds == PAUSE else seconds)
    sys.argv[0] = "flower-superexec"
    next(one for one in entry_points(group="console_scripts") if one.name == "flower-superexec").load()()


if __name__ == "__main__":
    main()
