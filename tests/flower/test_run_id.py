"""Which run a message belongs to, and which states of a client still count: against timelines that are played out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_bn.flower.wire.run_id import RunId
from tests.listed import listed

HOSTILE = {
    "outside": "../x/state-00000000",
    "above": "../../etc/state-00000000",
    "inside and out": "a/../../b/state-00000000",
    "absolute": "/etc/x/state-00000000",
    "this folder": "./state-00000000",
    "hidden": ".ssh/state-00000000",
    "deep": "a/b/state-00000000",
    "two dots": "../state-00000000",
    "no run": "/state-00000000",
    "no state": "run",
    "another state": "run/authorized_keys",
    "short": "run/state-0000000",
    "long": "run/state-000000000",
    "capitals": "run/state-ABCDEF00",
    "no digits": "run/state-zzzzzzzz",
    "nul": "run\0/state-00000000",
    "line break": "run\n/state-00000000",
    "a line after": "run/state-00000000\n",
    "backslash": "run\\..\\x/state-00000000",
    "too long": "r" * 300 + "/state-00000000",
    "a tilde": "~/state-00000000",
    "blank": " /state-00000000",
    "an option": "-rf/state-00000000",
}


@listed("case", HOSTILE)
def test_a_name_that_is_none_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match="expected a run NAME/state-XXXXXXXX, but the server's message names"):
        RunId.of({"run": HOSTILE[case]})
    assert RunId.of({"run": "run/state-00000000"}).run == "run/state-00000000"  # control


@pytest.mark.parametrize("config", [{"resumes": "1,x"}, {"resumes": "1.5"}, {"durable": "soon"}, {"durable": None}])
def test_rounds_that_are_none_are_refused(config: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        RunId.of({"run": "run/state-00000000", **config})


def test_a_message_that_names_no_run_has_none() -> None:
    assert RunId.of({}) == RunId("")


NAMES = st.one_of(
    st.text(max_size=300),
    st.sampled_from(
        ["", "..", "/", "../../x", "münchen", "ärzte", "Ω", "20250101-120000-fedbn-my.package:data-seed0", "a b (2)", "_x", "-x", "x" * 255]
    ),
)


@settings(max_examples=200)
@given(name=NAMES)
def test_every_name_of_a_run_makes_one_that_clients_take(name: str) -> None:
    made = RunId.new(name)
    assert RunId.of(made.to_config()) == made
    folder, _, state = made.run.partition("/")
    assert folder not in ("", ".", "..")
    assert "/" not in state
    assert not folder.startswith(".")


@listed(
    "name", ["fedbn", "20250101-120000-fedbn-digits-seed0", "a (2)", "my run, 3+4=7 @home", "münchen", "ärzte", "Ω", "0"]
)
def test_a_plain_name_stays_as_it_is(name: str) -> None:
    """So that the states are in the run's own folder, where it clears them away at its end."""
    assert RunId.new(name).run.startswith(f"{name}/state-")


def test_no_run_is_taken_for_another_of_its_name() -> None:
    assert len({RunId.new("run").run for _ in range(100)}) == 100


def test_what_a_message_says_is_what_the_server_meant() -> None:
    gone_on = RunId.new("run").resumed(3).resumed(2)
    assert RunId.of(gone_on.to_config()) == gone_on
    assert RunId.of({**gone_on.to_config(), "phase": "train"}) == gone_on


Step = tuple[str, int]
STEPS = st.lists(st.one_of(st.tuples(st.just("round"), st.just(0)), st.tuples(st.just("resume"), st.integers(0, 5))), max_size=24)


@settings(max_examples=250)
@given(steps=STEPS)
def test_what_counts_is_what_is_on_the_line_that_led_here(steps: list[Step]) -> None:
    """Every round leaves a state and a checkpoint, with the run_id of then; a resume goes back to any checkpoint that still counts, and
    what was after it never was. By hand: a state counts if its round is one of those that led here, as it was then."""
    run_id, written = RunId.new("run"), 0
    states: dict[tuple[int, int], int] = {}  # what a folder has: round and attempt name a file
    line: list[tuple[int, int, int]] = []  # what led here: round, attempt, what was written
    checkpoints: list[tuple[list[tuple[int, int, int]], RunId]] = []
    for step, back in steps:
        if step == "resume" and checkpoints:
            line, run_id = checkpoints[-1 - back % len(checkpoints)]
            line, run_id = list(line), run_id.resumed(len(line))
            checkpoints = [(old, then) for old, then in checkpoints if len(old) <= len(line)]
            continue
        written += 1
        line.append((len(line) + 1, run_id.attempt, written))
        states[line[-1][:2]] = written
        checkpoints.append((list(line), run_id))
        counted = sorted(value for (round, attempt), value in states.items() if run_id.counts(round, attempt))
        assert counted == [value for _, _, value in line]


def test_what_counts_by_hand() -> None:
    """Rounds 1 to 5, then again from 3 on to 6, then again from 5 on."""
    first = RunId.new("run")
    second = first.resumed(3)
    third = second.resumed(5)
    assert [round for round in range(1, 8) if first.counts(round, first.attempt)] == list(range(1, 8))
    assert [round for round in range(1, 8) if second.counts(round, first.attempt)] == [1, 2, 3]
    assert [round for round in range(1, 8) if third.counts(round, first.attempt)] == [1, 2, 3]
    assert [round for round in range(1, 8) if third.counts(round, second.attempt)] == [1, 2, 3, 4, 5]
    assert not any(first.counts(round, second.attempt) for round in range(1, 8))  # what is yet to come is nothing to those before
