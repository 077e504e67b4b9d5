"""Do every drill of ``drills`` many times, at random moments; print a table of outcomes.

    python -m tools.deployment.kill_drills --times 20 --output kill-drills
    python -m tools.deployment.kill_drills --times 20 --only skew --page deploy/drills.md

Troubles that come and go are caused --times times in one run; the other drills are done --times times with a run each. The
random moments are drawn from the repetition's number: --seed, --seed + 1, and so on. The table is of all outcomes in the folder, of each
version of Flower, and the same command goes on where it was stopped. Most of the time is spent waiting for Flower's timeouts.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median

from tests.deployment.federation import Federation
from tools.deployment.drills import DRILLS, IN_ONE_RUN
from tools.deployment.outcomes import Case, Outcome, run_folders

BEGIN, END = "<!-- table of kill_drills -->\n", "<!-- end of the table -->\n"
Item = tuple[str, int, int]  # drill, repetition, times
Row = dict[str, str]
FLOWER = version("flwr")


def perform(federation: Federation, folder: Path, item: Item) -> Outcome:
    """Do one drill on a running federation. An error in the drill itself becomes an outcome, too."""
    name, number, times = item
    begin, case = time.monotonic(), Case(federation, folder, name, number, random.Random(f"{name} {number}"), times)
    try:
        outcome = DRILLS[name](case)
    except Exception as error:
        outcome = Outcome(name, number, "", "", f"the drill itself failed: {type(error).__name__}: {error}"[:400], times=times)
    outcome.seconds = time.monotonic() - begin
    for left in run_folders(case):
        shutil.rmtree(left, ignore_errors=True)
    return outcome


def row_of(name: str, outcome: Outcome) -> Row:
    told = {"notes": "; ".join(outcome.notes), "missed": "; ".join(outcome.missed), "seconds": round(outcome.seconds, 1)}
    return {key: str(value) for key, value in {"name": name, "flower": FLOWER, **asdict(outcome), **told}.items()}


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with one line per drill and version of Flower: how often it was done, and its kinds of outcome."""
    lines = ["| drill | Flower | as it should be | seconds (median) | what happened |", "|---|---|---:|---:|---|"]
    for name, flower in sorted({(row["drill"], row["flower"]) for row in rows}):
        mine, kinds, fine = [row for row in rows if (row["drill"], row["flower"]) == (name, flower)], Counter[str](), 0
        for row in mine:
            what = f"{generally(row['what'])}: {('identical ' + row['identical']) if row['identical'] else 'NOT identical'}"
            kinds[what + (f", but not: {generally(row['missed'])}" if row["missed"] else "")] += int(row["times"])
            fine += int(row["times"]) if row["identical"] and not row["missed"] else 0
        said = "; ".join(f"{count} x {what}" for what, count in kinds.most_common())
        seconds = median(float(row["seconds"]) / int(row["times"]) for row in mine)
        lines.append(f"| {name} | {flower} | {fine} of {kinds.total()} | {seconds:.0f} | {said} |")
    return "\n".join(lines) + "\n"


def generally(text: str) -> str:
    """Return ``text`` without the parts that differ between repetitions: texts in brackets, and names of sites."""
    return re.sub(r"site (east|west)", "a site", text.partition(" (")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first repetition")
    parser.add_argument("--only", default=",".join(DRILLS), help="drills, separated by commas")
    parser.add_argument("--output", type=Path, default=Path("kill-drills"), help="folder for federations, and for outcomes.csv")
    parser.add_argument("--page", type=Path, help="Markdown file that has the table, between two comments")
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    record = chosen.output / "outcomes.csv"
    rows: list[Row] = list(csv.DictReader(record.read_text().splitlines(keepends=True))) if record.exists() else []
    done = {(row["name"], int(row["repetition"]), int(row["times"])) for row in rows if row["flower"] == FLOWER}
    names, seeds = chosen.only.split(","), range(chosen.seed, chosen.seed + chosen.times)
    items: list[Item] = [(name, chosen.seed, chosen.times) for name in names if name in IN_ONE_RUN]
    items += [(name, number, 1) for number in seeds for name in names if name not in IN_ONE_RUN]
    items = [item for item in items if item not in done]
    while items:  # the drills share a federation until one of them fails; its folder stays, to look for the cause
        folder = (chosen.output / f"federation-{os.getpid()}-{len(items)}").absolute()
        with Federation(folder, ("east", "west"), small_disks=os.geteuid() == 0) as federation:
            federation.start_all()
            fine = True
            while items and fine:
                item = items.pop(0)
                outcome = perform(federation, folder, item)
                fine = outcome.ok
                rows.append(row_of(item[0], outcome))
                with record.open("w", newline="") as target:
                    writer = csv.DictWriter(target, rows[-1], extrasaction="ignore", lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
                print(f"{len(items)} left", outcome, flush=True)
    if chosen.page:
        text = chosen.page.read_text()
        chosen.page.write_text(f"{text.partition(BEGIN)[0]}{BEGIN}\n{table(rows)}\n{END}{text.partition(END)[2]}")
    print(table(rows))
    return 0 if all(row["identical"] and not row["missed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
