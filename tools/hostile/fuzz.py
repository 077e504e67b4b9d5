"""Send hostile messages by the thousand and hostile sequences of calls, and judge what became of each.

    python -m tools.hostile.fuzz --mutations 100000 --sequences 10000 --seed 0 --summary fuzz.md

A mutation is one hostile case against one of these targets:

- *server*: whole rounds of every method, in which one client lies in one message or more;
- *secure*: the same in rounds with secure aggregation;
- *client*: a client whose server lies.

Honest messages are recorded from real runs (``recorded``), and their bytes are changed (``mutations``). ``outcomes`` defines
what must hold.

A sequence is one run of a state machine of hypothesis: clients of an exchange, one of which does anything
(``exchange_machine``). A sequence that breaks something is shrunk to the shortest one that still does.

The same seed gives the same cases.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis.stateful import run_state_machine_as_test

from tests.hostile.recorded import CANNED, SECURE, recorded
from tools.hostile.exchange_machine import Exchange
from tools.hostile.lies import lie_to_client, lie_to_server
from tools.hostile.mutations import Rng, pick
from tools.hostile.outcomes import BROKEN, GIVEN_UP, HONEST, REFUSED, SAME, Outcome, honest, listening

LONGEST = 60  # seconds; a case that takes longer counts as hanging
HUGE = 1024.0  # MB that one case may take: the largest message has some 200, and the liar is in this process, too
CHUNK = 200  # sequences that hypothesis draws from one seed
STEPS = 30  # calls of a sequence
CLIENTS_OF = ["fedavg", "fbn", "hbn", "fedbn unseen", "fedtan", "fbn maintained", "fbn secure"]

Attack = Callable[[str, Rng], tuple[str, Outcome]]
TARGETS: dict[str, tuple[Attack, list[str], float]] = {  # the attack, its scenarios, and its share of all mutations
    "server": (lie_to_server, CANNED, 0.6),
    "client": (lie_to_client, CLIENTS_OF, 0.395),
    "secure": (lie_to_server, SECURE, 0.005),
}


class Tally(NamedTuple):
    counts: Counter[tuple[str, str]]  # (target, kind of outcome) -> number of cases
    broken: list[str]
    peak: float  # MB by which the process's peak memory grew


class Hangs(BaseException):
    """Signal that a case takes too long. It is a BaseException, because a server may catch every Exception."""


@contextmanager
def bounded(seconds: int) -> Iterator[None]:
    """Raise Hangs if the block takes longer than ``seconds``."""

    def end(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(seed: int, number: int, names: Sequence[str]) -> tuple[str, str, Outcome]:
    """Run one mutation; return its target, what was changed in which scenario, and the outcome."""
    rng = np.random.default_rng([seed, number])
    shares = np.array([TARGETS[name][2] for name in names])
    target = str(rng.choice(names, p=shares / shares.sum()))
    attack, scenarios, _ = TARGETS[target]
    name = pick(rng, scenarios)
    before = peak_memory()
    try:
        with listening(), bounded(LONGEST):
            what, outcome = attack(name, rng)
    except Hangs:
        what, outcome = "", Outcome(BROKEN, f"it took longer than {LONGEST} s")
    if (more := peak_memory() - before) > HUGE:
        outcome = Outcome(BROKEN, f"it took {more:.0f} MB")
    return target, f"{name}: {what}", outcome


def fuzz(mutations: int, seed: int = 0, only: Sequence[str] = ()) -> Tally:
    """Run mutations, each with random numbers drawn from ``seed`` and from its number.

    Args:
        mutations: How many mutations to run.
        seed: The seed.
        only: The names of the targets to attack; empty: all.

    Returns:
        The numbers of outcomes, a line for each mutation that broke something, and the growth of peak memory.
    """
    names = list(only or TARGETS)
    with listening():  # honest runs are recorded now, so that their memory does not count as that of the first mutation
        for name in {name for target in names for name in TARGETS[target][1]}:
            recorded(name)
            honest(name)
    before, counts, broken = peak_memory(), Counter[tuple[str, str]](), list[str]()
    for number in range(mutations):
        target, what, outcome = run_case(seed, number, names)
        counts[target, outcome.kind] += 1
        if outcome.kind == BROKEN:
            broken.append(f"{seed}/{number} {target} {what}: {outcome.why}"[:1000])
        if number % 1000 == 999:
            print(f"{number + 1} of {mutations} mutations, {len(broken)} broken", file=sys.stderr, flush=True)
    return Tally(counts, broken, peak_memory() - before)


def sequences(number: int, seed: int = 0, shrinks: bool = True) -> tuple[int, list[str]]:
    """Run sequences of calls by the state machine, until 20 of them broke something.

    Args:
        number: How many sequences to run.
        seed: The seed.
        shrinks: Whether to look for the shortest sequence that still breaks something.

    Returns:
        The number of sequences, and a text for each chunk of them that broke something: the error and the calls.
    """
    done, broken = 0, list[str]()
    phases = (Phase.generate, Phase.shrink) if shrinks else (Phase.generate,)
    options: dict[str, Any] = {"stateful_step_count": STEPS, "deadline": None, "derandomize": False, "database": None, "phases": phases}
    options["suppress_health_check"] = list(HealthCheck)
    with listening():
        while done < number and len(broken) < 20:
            size = min(CHUNK, number - done)
            machine = seeded(1_000_000 * seed + done)(type("Exchange", (Exchange,), {}))
            try:
                with bounded(LONGEST * 10):
                    run_state_machine_as_test(machine, settings=settings(max_examples=size, **options))
            except Hangs:
                broken.append(f"seed {seed}, from {done}: it took longer than {LONGEST * 10} s")
            except Exception as error:  # every exception is a finding
                broken.append(f"seed {seed}, from {done}: {error!r}\n" + "\n".join(getattr(error, "__notes__", [])))
            done += size
    return done, broken


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(tally: Tally) -> str:
    kinds = [kind for kind in (REFUSED, SAME, HONEST, GIVEN_UP) if any(k == kind for _, k in tally.counts)] + [BROKEN]
    lines = ["| target | mutations | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
    for target in TARGETS:
        row = [tally.counts[target, kind] for kind in kinds]
        if sum(row):
            lines.append(f"| {target} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], choices=list(TARGETS), help="these targets")
    parser.add_argument("--summary", type=Path, help="a file for the table and for what broke")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.process_time()
    tally = fuzz(chosen.mutations, chosen.seed, chosen.only)
    number, odd = sequences(chosen.sequences, chosen.seed)
    lines = [table(tally), "", f"{number} sequences, {len(odd)} broken"]
    lines += [f"peak memory: {peak_memory():.0f} MB, of which {tally.peak:.0f} MB since the first mutation"]
    lines += [f"{time.process_time() - begin:.0f} s of one core", *tally.broken[:50], *odd]
    print("\n".join(lines))
    if chosen.summary:
        chosen.summary.write_text("\n".join(lines) + "\n")
    return 1 if tally.broken or odd else 0


if __name__ == "__main__":
    raise SystemExit(main())
