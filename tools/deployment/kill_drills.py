"""Do every drill of ``drills`` and ``daily_drills`` many times, at random moments; print a table of outcomes.

Some failures can be repeated in one run (a client that raises, a full disk, ...): these are caused --times times in
one run. The other drills are done --times times with a run each. The random moments are drawn from the repetition's
number: --seed, --seed + 1, and so on. Drills that the record already has are left out, so the same command goes on
where it was stopped. Most of the time is spent waiting for Flower's timeouts.

python -m tools.deployment.kill_drills --times 20 --jobs 3 --output kill-drills
python -m tools.deployment.kill_drills --times 20 --only removed,expired --record deploy/drills.csv --page
deploy/drills.md
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing as mp
import os
import queue
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.deployment.federation import Federation
from tools.deployment.daily_drills import DAILY
from tools.deployment.drills import DRILLS, ONE_PER_RUN, perform
from tools.deployment.outcomes import Outcome

COLUMNS = (
    "name", "drill", "repetition", "times", "method", "moment", "what", "missing", "identical", "missed", "notes", "seconds", "load",
    "ended",
)  # fmt: skip
ALL = {**DRILLS, **DAILY}
BEGIN, END = "<!-- table of kill_drills -->\n", "<!-- end of the table -->\n"
Item = tuple[str, int, int]  # drill, repetition, times
Row = dict[str, str]


def worker(place: int, folder: Path, work: mp.Queue[Any], done: mp.Queue[Any]) -> None:
    """Do the drills in the queue ``work`` until it gives None. Put each name and outcome into ``done``, and None at the end.

    The drills share one federation until one of them fails. Then a new federation is started for the following drills. The
    folder of the former one stays, to look for the cause.

    Args:
        place: The number of this worker, which becomes part of its folders' names.
        folder: The folder for the federations.
        work: Gives the arguments of each drill.
        done: Takes the outcomes.
    """
    item, number = work.get(), 0
    while item is not None:
        number += 1
        own = folder / f"federation-{os.getpid()}-{place}-{number}"
        with Federation(own, ("east", "west"), small_disks=os.geteuid() == 0) as federation:
            federation.start_all()
            fine = True
            while item is not None and fine:
                outcome = perform(federation, own, ALL[item[0]], *item)
                fine = outcome.ok
                done.put((item[0], outcome))
                item = work.get()
    done.put(None)


def row_of(name: str, outcome: Outcome) -> Row:
    values: dict[str, Any] = asdict(outcome)
    values |= {"notes": "; ".join(outcome.notes), "missed": "; ".join(outcome.missed), "seconds": round(outcome.seconds, 1)}
    ended = datetime.now().astimezone().isoformat(timespec="minutes")
    return {k: str(v) for k, v in {**values, "name": name, "load": round(os.getloadavg()[0], 1), "ended": ended}.items()}


def rows_in(record: Path) -> list[Row]:
    if not record.exists():
        return []
    with record.open(newline="") as file:
        return list(csv.DictReader(file))


def as_it_should(row: Row) -> bool:
    return bool(row["identical"]) and not row["missed"]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with one line per drill: how often it was done, and its kinds of outcome."""
    lines = ["| drill | times | as it should be | what happened | seconds (median) | load |", "|---|---:|---:|---|---:|---|"]
    for name in dict.fromkeys(row["drill"] for row in rows):
        mine = [row for row in rows if row["drill"] == name]
        kinds: dict[str, int] = {}
        for row in mine:
            what = f"{generally(row['what'])}: {('identical ' + row['identical']) if row['identical'] else 'NOT identical'}"
            what += f", but not: {generally(row['missed'])}" if row["missed"] else ""
            kinds[what] = kinds.get(what, 0) + int(row["times"])
        said = "; ".join(f"{count} x {what}" for what, count in sorted(kinds.items(), key=lambda kind: -kind[1]))
        seconds = sorted(float(row["seconds"]) / int(row["times"]) for row in mine)[len(mine) // 2]
        loads = sorted(float(row["load"]) for row in mine)
        fine = sum(int(row["times"]) for row in mine if as_it_should(row))
        all_of = sum(int(row["times"]) for row in mine)
        lines.append(f"| {name} | {all_of} | {fine} | {said} | {seconds:.0f} | {loads[0]:.0f} to {loads[-1]:.0f} |")
    return "\n".join(lines) + "\n"


def generally(text: str) -> str:
    """Return ``text`` without the parts that differ between repetitions: texts in brackets, and names of sites."""
    for site in ("east", "west"):
        text = text.replace(f"site {site}", "a site")
    return re.sub(r"north-\d+", "north", text.partition(" (")[0])


def write_page(page: Path, rows: Sequence[Row]) -> None:
    text = page.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


def items_of(names: Sequence[str], times: int, seed: int, record: Sequence[Row]) -> list[Item]:
    """Return the drills that remain to be done: those of ``names`` that ``record`` does not have yet."""
    often = [name for name in names if name in DRILLS and name not in ONE_PER_RUN]
    items = [(name, seed, times) for name in often]
    items += [(name, n, 1) for n in range(seed, seed + times) for name in names if name not in often]
    done = {(row["name"], int(row["repetition"]), int(row["times"])) for row in record}
    return [item for item in items if item not in done]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first repetition")
    parser.add_argument("--jobs", type=int, default=1, help="federations at a time, each of some ten processes")
    parser.add_argument("--only", default=",".join(ALL), help="drills, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("kill-drills"), help="folder for federations")
    parser.add_argument("--record", type=Path, help="CSV file to which outcomes are added; default: outcomes.csv in --output")
    parser.add_argument("--page", type=Path, help="Markdown file that has the table, between two comments")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    record = chosen.record or chosen.output / "outcomes.csv"
    rows = rows_in(record)
    items = items_of(chosen.only.split(","), chosen.times, chosen.seed, rows)
    context = mp.get_context("spawn")
    work, done = context.Queue(), context.Queue()
    for item in [*items, *([None] * chosen.jobs)]:
        work.put(item)
    workers = [context.Process(target=worker, args=(n, chosen.output.absolute(), work, done)) for n in range(chosen.jobs)]
    for process in workers:
        process.start()
    fresh: list[Outcome] = []
    while len(fresh) < len(items) and any(process.is_alive() for process in workers):
        try:
            item = done.get(timeout=5)
        except queue.Empty:  # look whether the workers are alive
            continue
        if item is None:
            continue
        fresh.append(item[1])
        rows.append(row_of(*item))
        with record.open("w", newline="") as target:
            writer = csv.DictWriter(target, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        if chosen.page:
            write_page(chosen.page, rows)
        print(f"{len(fresh)}/{len(items)}", *item, flush=True)
    for process in workers:
        process.join(60)
    print(table(rows))
    return 0 if len(fresh) == len(items) and all(map(as_it_should, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
