"""Which run a message belongs to. Which states of a client still count is in test_client_state.py."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_bn.flower.wire.codec import RunId
from fl_bn.flower.wire.messages import RUN
from tests.listed import listed

NONE = (
    *("../x/state-00000000", "../../etc/state-00000000", "a/../../b/state-00000000", "/etc/x/state-00000000", "./state-00000000"),
    *(".ssh/state-00000000", "a/b/state-00000000", "../state-00000000", "/state-00000000", "run", "run/authorized_keys"),
    *("run/state-0000000", "run/state-000000000", "run/state-ABCDEF00", "run/state-zzzzzzzz", "run\0/state-00000000"),
    *("run\n/state-00000000", "run/state-00000000\n", "run\\..\\x/state-00000000", "r" * 300 + "/state-00000000"),
    *("~/state-00000000", " /state-00000000", "-rf/state-00000000"),
)


@listed("name", NONE, ids=repr)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="state-"):
        RUN.read({"run": name})
    assert RunId.of(RUN.read({"run": "run/state-00000000"})).run == "run/state-00000000"  # control


@listed("config", [{"resumes": "1,x"}, {"resumes": "1.5"}, {"durable": "soon"}, {"durable": None}], ids=str)
def test_rounds_that_are_none_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="config/"):
        RUN.read({"run": "run/state-00000000", **config})


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
    assert RunId.of(RUN.read(made.to_config())) == made
    folder, _, state = made.run.partition("/")
    assert folder not in ("", ".", "..")
    assert "/" not in state
    assert not folder.startswith(".")


@listed("name", ["20250101-120000-fedbn-digits-seed0", "a (2)", "my run, 3+4=7 @home", "münchen", "ärzte", "Ω", "0"])
def test_a_plain_name_stays_as_it_is_and_every_run_of_it_is_another(name: str) -> None:
    """So that the states are in the run's own folder, where it clears them away at its end."""
    made = {RunId.new(name).run for _ in range(100)}
    assert len(made) == 100
    assert all(run.startswith(f"{name}/state-") for run in made)


def test_what_a_message_says_is_what_the_server_meant() -> None:
    gone_on = RunId.new("run").resumed(3).resumed(2)
    assert RunId.of(gone_on.to_config()) == gone_on
    assert RunId.of({**gone_on.to_config(), "phase": "train"}) == gone_on
