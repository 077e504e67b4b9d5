"""Measure what sites cost: the memory of one that is idle, and the seconds of a round of fl-bn's app and of an app of one's own.

    python -m tools.deployment.pace        # with the Flower that is installed: 1.25 or 1.42

Two sites run on this machine with TLS and node authentication. fl-bn's app trains an MLP for two steps a round, and a CNN for
an epoch; the app of ``fl-bn new`` trains a CNN for an epoch, too. All evaluate in each round.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median

from fl_bn_site.runs import rows_of
from tests.deployment.federation import FL_BN, SMALL, Federation, ended

ROUNDS = 12
BASE = "import torch, torch._dynamo, time; print(flush=True); time.sleep(3600)"


def memory(processes: list[int]) -> float:
    """Return the megabytes that processes would take on a machine of their own.

    A page of a file counts once, and so does a page that forked processes share.
    """
    private, files = 0.0, dict[str, int]()
    for process in processes:
        rolled = dict(line.split(":") for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:])
        private += int(rolled["Pss_Anon"].split()[0])
        name = ""
        for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                name = f"{rest[-1]} {rest[1]}" if len(rest) == 5 else ""
            elif name.startswith("/") and first == "Rss:":
                files[name] = max(files.get(name, 0), int(rest[0]))
    return (private + sum(files.values())) / 1024


def of_site(folder: Path) -> list[int]:
    """Return the processes of a site: ``fl-bn start`` of its folder, and those that it has started."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(folder).encode() in (place / "cmdline").read_bytes() + (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def pace(federation: Federation, name: str, process: subprocess.Popen[str]) -> float:
    """Return the median of the seconds between two rounds of a run, while it goes on."""
    moments = list[float]()
    while process.poll() is None:
        while len(rows_of(federation.result(name))) > len(moments):
            moments.append(time.monotonic())
        time.sleep(0.02)
    ended(process)
    return median(later - earlier for earlier, later in pairwise(moments))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Federation(Path(folder), "ab") as federation:
        with subprocess.Popen([sys.executable, "-c", BASE], stdout=subprocess.PIPE) as alone:
            assert alone.stdout is not None
            alone.stdout.readline()
            base = memory([alone.pid])
            alone.kill()
        federation.start_all()
        time.sleep(20)
        idle = memory(of_site(federation.kit / "sites/a"))
        config = {**SMALL, "clients": 2, "method": "fbn", "rounds": ROUNDS, "evaluate-every": 1, "name": "ours"}
        ours = pace(federation, "ours", federation.submit(config))
        config |= {"name": "epochs", "model": "digits-cnn-small", "local-steps": 0, "local-epochs": 1}
        epochs = pace(federation, "epochs", federation.submit(config))
        subprocess.run([*FL_BN, "new", "myapp"], cwd=folder, check=True, capture_output=True)
        words = f"num-server-rounds={ROUNDS} local-epochs=1 name='own'"
        own = pace(federation, "own", federation.submit(words, "--app", f"{folder}/myapp"))
    print(f"Flower {version('flwr')}: an idle site takes {idle:.0f} MB, {idle - base:.0f} more than a process with torch and torch._dynamo")
    print(f"a round takes {ours:.2f} s, with a CNN for an epoch {epochs:.2f} s, with such a CNN in an own app {own:.2f} s")


if __name__ == "__main__":
    main()
