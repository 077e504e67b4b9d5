"""Mutated messages by the thousand, and what became of each. The honest ones are recorded from real runs (``recorded``).

    python -m tests.hostile.fuzz --mutations 100000        # prints counts per outcome, and the server's peak memory

Four targets (``lies``): a *server* in whole rounds of every method (plain, robust, layer-wise exchange by replay), of which one client
lies in one message; the same in *secure* rounds, with real clients, since there each reply depends on those before; an exchange's
*session*, request by request, in protobuf's bytes; and a *client* of a server that lies. ``mutations`` has what is changed in a message,
``outcomes`` what must hold.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from tests.hostile.lies import TARGETS, requests
from tests.hostile.mutations import pick
from tests.hostile.outcomes import BROKEN, GIVEN_UP, HONEST, REFUSED, SAME, Outcome, honest, listening
from tests.hostile.recorded import SCENARIOS


class Tally(NamedTuple):
    counts: Counter[tuple[str, str]]  # by target and kind of outcome
    broken: list[str]
    peak: float  # MB that the process grew by


class Case(NamedTuple):
    """``name``: of the scenario; ``what``: was changed."""

    target: str
    name: str
    what: str
    outcome: Outcome


def run_case(seed: int, number: int) -> Case:
    rng = np.random.default_rng([seed, number])
    target = str(rng.choice(list(TARGETS), p=[share for _, _, share in TARGETS.values()]))
    attack, names, _ = TARGETS[target]
    name = pick(rng, names)
    with listening():
        return Case(target, name, *attack(name, rng))


def fuzz(mutations: int, seed: int = 0, seconds: float = float("inf"), first: int = 0) -> Tally:
    """Cases ``first``, ``first`` + 1, ... of ``seed``, ``mutations`` of them, or as many as fit into ``seconds``."""
    with listening():
        for name in SCENARIOS:
            honest(name)  # recorded, and in memory, before memory is measured
        requests()
    before, end = peak_memory(), time.monotonic() + seconds
    counts, broken = Counter[tuple[str, str]](), list[str]()
    for number in range(first, first + mutations):
        case = run_case(seed, number)
        counts[case.target, case.outcome.kind] += 1
        if case.outcome.kind == BROKEN:
            broken.append(f"{seed}/{number} {case.target} {case.name}: {case.what}: {case.outcome.why}"[:1000])
        if time.monotonic() > end:
            break
    return Tally(counts, broken, peak_memory() - before)


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(tally: Tally) -> str:
    kinds = [kind for kind in (REFUSED, SAME, HONEST, GIVEN_UP, BROKEN) if any(k == kind for _, k in tally.counts)]
    lines = ["| target | mutations | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
    for target in TARGETS:
        row = [tally.counts[target, kind] for kind in kinds]
        lines.append(f"| {target} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    total = [sum(tally.counts[target, kind] for target in TARGETS) for kind in kinds]
    return "\n".join([*lines, f"| all | {sum(total)} | " + " | ".join(map(str, total)) + " |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case: processes may share a seed, or go on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    begin, cpu = time.monotonic(), time.process_time()
    tally = fuzz(asked.mutations, asked.seed, asked.seconds, asked.first)
    print(table(tally))
    print(f"\npeak memory: {peak_memory():.0f} MB, of which {tally.peak:.0f} MB since the first mutation")
    print(f"{time.monotonic() - begin:.0f} s, {time.process_time() - cpu:.0f} s of one core")
    for line in tally.broken[:50]:
        print(line)
    return 1 if tally.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
