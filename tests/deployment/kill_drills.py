"""Every drill of ``drills``, many times, at random moments; a table of outcomes. More waiting for Flower's own timeouts than work.

What can be done again in the same run (a client that raises, a full disk, ...) is done --repetitions times in one; of the kills each has
a run of its own.

python -m tests.deployment.kill_drills --repetitions 20 --jobs 3 --output kill-drills
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing as mp
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tests.deployment.drills import DRILLS, ONE_PER_RUN, perform
from tests.deployment.federation import Federation
from tests.deployment.outcomes import Outcome

COLUMNS = [spec.name for spec in fields(Outcome)]


def worker(place: int, folder: Path, work: mp.Queue[Any], done: mp.Queue[Any]) -> None:
    """Takes (drill, repetition, times) from ``work`` until there is None, all on one federation."""
    with Federation(folder / f"federation-{place}", ("a", "b"), small_disks=os.geteuid() == 0) as federation:
        federation.start_all()
        while (item := work.get()) is not None:
            done.put((item[0], perform(federation, folder / f"federation-{place}", *item)))
    done.put(None)


def table(outcomes: list[Outcome]) -> str:
    """Markdown: one line per drill, and one per kind of outcome below it."""
    lines = ["| drill | repetitions | as it should be | what happened | seconds (median) |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(o.drill for o in outcomes):
        mine = [o for o in outcomes if o.drill == name]
        kinds: dict[str, int] = {}
        for o in mine:
            what = f"{o.what.partition(' (')[0]}: {('identical ' + o.identical) if o.identical else 'NOT identical'}"
            kinds[what] = kinds.get(what, 0) + o.times
        said = "; ".join(f"{count} x {what}" for what, count in sorted(kinds.items(), key=lambda kind: -kind[1]))
        seconds = sorted(o.seconds / o.times for o in mine)[len(mine) // 2]
        lines.append(f"| {name} | {sum(o.times for o in mine)} | {sum(o.times for o in mine if o.ok)} | {said} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first repetition; it decides the random moment")
    parser.add_argument("--jobs", type=int, default=3, help="federations at a time, each of some ten processes")
    parser.add_argument("--only", default=",".join(DRILLS), help="drills, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("kill-drills"))
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    work, done = context.Queue(), context.Queue()
    once, often = range(chosen.first, chosen.first + chosen.repetitions), [(chosen.first, chosen.repetitions)]
    names = chosen.only.split(",")
    items = [(name, n, times) for name in names if name not in ONE_PER_RUN for n, times in often]
    items += [(name, n, 1) for n in once for name in names if name in ONE_PER_RUN]
    for item in [*items, *([None] * chosen.jobs)]:
        work.put(item)
    workers = [context.Process(target=worker, args=(n, chosen.output.absolute(), work, done)) for n in range(chosen.jobs)]
    for process in workers:
        process.start()
    outcomes: list[Outcome] = []
    file = chosen.output / "outcomes.csv"
    new = not file.exists()
    with file.open("a", newline="") as target:
        writer = csv.DictWriter(target, ["name", *COLUMNS])
        if new:
            writer.writeheader()
        while len(outcomes) < len(items) and any(process.is_alive() for process in workers):
            try:
                item = done.get(timeout=5)
            except Exception:  # queue.Empty: look whether the workers are alive
                continue
            if item is None:
                continue
            name, outcome = item
            outcomes.append(outcome)
            writer.writerow({"name": name, **asdict(outcome), "seconds": round(outcome.seconds, 1), "notes": "; ".join(outcome.notes)})
            target.flush()
            print(f"{len(outcomes)}/{len(items)}", name, outcome, flush=True)
    for process in workers:
        process.join(60)
    (chosen.output / "table.md").write_text(table(outcomes) + "\n")
    print(table(outcomes))
    return 0 if len(outcomes) == len(items) and all(o.ok for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
