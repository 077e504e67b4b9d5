"""Test the clients of SecAgg+ by a state machine, which is a server that sends any request in any order.

The clients must answer the stages in order, each once, and never for more than one sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.wire import gate
from tests.hostile.liars import what
from tests.hostile.recorded import CLIENTS, SCENARIOS, app_of, cloned, recorded
from tools.hostile.lies import ERRORS
from tools.hostile.mutations import in_bytes

NODES = (1, 2, 3)  # nodes that this server asks; it also knows others
STAGES = (Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK)
HONEST = {Key.SAMPLE_NUMBER: 3, Key.SHARE_NUMBER: 3, Key.THRESHOLD: 2, Key.CLIPPING_RANGE: 8.0}
HONEST |= {Key.TARGET_RANGE: 2**22, Key.MOD_RANGE: 2**32, Key.MAX_WEIGHT: 1.0, "cohort": list(NODES)}

@contextmanager
def hidden_errors() -> Iterator[list[str]]:
    """Collect the names of the errors that a client's gate logs, but hides from the server, during the ``with`` block.

    Yields:
        The list of names, to which each error is added.
    """
    found: list[str] = []

    def note(severity: int, text: str, *values: object) -> None:
        found.extend(type(value).__name__ for value in values if isinstance(value, Exception))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "log", note)
        yield found


class Clients(RuleBasedStateMachine):
    """Simulate the server of three clients whose node configs require secure aggregation."""

    CLEAR: tuple[str, ...] = ("train", "evaluate", "query.statistics", "query.kept")  # messages that such a client must not answer unmasked

    @initialize()
    def begin(self) -> None:
        self.grid = InProcessGrid(app_of(SCENARIOS["fbn secure"]), CLIENTS, {"secure-aggregation": True})
        training = [(kind, content) for kind, content, _ in recorded("fbn secure").exchanges if kind.startswith("train")]
        self.templates = {kind.split()[1]: content for kind, content in training if content["fl-bn/header"]["phase"] == "train"}  # type: ignore[call-overload,index]
        self.keys: dict[int, list[bytes]] = {}
        self.shares: dict[int, dict[int, bytes]] = {}  # source -> destination -> share
        self.answered: dict[int, list[str]] = {node: [] for node in NODES}  # node -> stages answered since its last set-up
        self.wrong = ""

    # what the server knows, and what it would ask if it were honest

    def request(self, stage: str, node: int) -> dict[str, Any]:
        if stage == Stage.SETUP:
            return {Key.STAGE: stage, **HONEST}
        if stage == Stage.SHARE_KEYS:
            return {Key.STAGE: stage, **{str(other): list(pair) for other, pair in self.keys.items()}}
        if stage == Stage.COLLECT_MASKED_VECTORS:
            sources = [source for source in NODES if source != node and node in self.shares.get(source, {})]
            return {Key.STAGE: stage, Key.SOURCE_LIST: sources, Key.CIPHERTEXT_LIST: [self.shares[source][node] for source in sources]}
        return {Key.STAGE: stage, Key.ACTIVE_NODE_ID_LIST: list(NODES), Key.DEAD_NODE_ID_LIST: []}

    def content(self, stage: str, record: dict[str, Any]) -> RecordDict:
        content = cloned(self.templates[stage])
        content[RECORD_KEY_CONFIGS] = ConfigRecord(record)
        return content

    def ask(self, node: int, content: RecordDict, kind: str = "train") -> None:
        sent = RecordDict(dict(content.items()))
        message = Message(sent, node, kind, ttl=600.0, group_id="1")
        try:
            stage = what(message).partition(" ")[2] if RECORD_KEY_CONFIGS in content.config_records else ""
        except (KeyError, TypeError):
            stage = ""
        asked = dict(content.config_records[RECORD_KEY_CONFIGS]) if RECORD_KEY_CONFIGS in content.config_records else {}
        with hidden_errors() as hidden:
            (answer,) = self.grid.send_and_receive([message])
        if others := [named for named in hidden if named not in ERRORS]:
            self.wrong = f"{kind} {stage} is answered by {others[0]}, which the gate hides"
            return
        if answer.has_error():
            if (named := str(answer.error.reason).partition(":")[0]) not in ERRORS:
                self.wrong = f"{kind} {stage} is answered by {named}: {answer.error.reason}"
            return
        if kind in self.CLEAR and not stage:
            self.wrong = f"a {kind} message was answered in the clear"
        if stage in STAGES:
            self.heard(node, stage, asked, answer.content)

    def heard(self, node: int, stage: str, asked: dict[str, Any], content: RecordDict) -> None:
        record = content.config_records.get(RECORD_KEY_CONFIGS, {})
        if "unreadable" in record:
            self.answered[node] = ["gone"]
            return
        before = self.answered[node]
        if stage == Stage.SETUP:
            self.answered[node] = before = []
            self.keys[node] = [bytes(record[Key.PUBLIC_KEY_1]), bytes(record[Key.PUBLIC_KEY_2])]  # type: ignore[arg-type]
            self.shares.pop(node, None)
        if tuple(before) != STAGES[: STAGES.index(stage)]:
            self.wrong = f"node {node} answered {stage} after {before}"
        before.append(stage)
        if stage == Stage.SHARE_KEYS:
            self.shares[node] = dict(zip(record[Key.DESTINATION_LIST], record[Key.CIPHERTEXT_LIST], strict=True))  # type: ignore[arg-type]
        if stage == Stage.UNMASK:
            told = Counter(record["nids"])  # type: ignore[arg-type]
            if max(told.values()) > 1 or len(asked[Key.ACTIVE_NODE_ID_LIST]) < HONEST[Key.THRESHOLD]:
                self.wrong = f"node {node} handed out the shares of {dict(told)}, asked for {asked}"

    # rules

    @rule(steps=st.integers(1, 4))
    def all_are_asked_as_is_right(self, steps: int) -> None:
        """Ask all clients for the next ``steps`` stages of SecAgg+, as an honest server does.

        The first of them is the stage that follows the last answer of the first client.
        """
        for _ in range(steps):
            done = self.answered[NODES[0]]
            stage = STAGES[len(done) % 4] if tuple(done) == STAGES[: len(done)] else Stage.SETUP
            for node in NODES:
                self.ask(node, self.content(stage, self.request(stage, node)))

    @rule(node=st.sampled_from(NODES), stage=st.sampled_from(STAGES))
    def one_is_asked_out_of_turn(self, node: int, stage: str) -> None:
        self.ask(node, self.content(stage, self.request(stage, node)))

    @rule(node=st.sampled_from(NODES), active=st.lists(st.integers(0, 4), max_size=5), dead=st.lists(st.integers(0, 4), max_size=4))
    def shares_are_asked_for(self, node: int, active: list[int], dead: list[int]) -> None:
        record = {Key.STAGE: Stage.UNMASK, Key.ACTIVE_NODE_ID_LIST: active, Key.DEAD_NODE_ID_LIST: dead}
        self.ask(node, self.content(Stage.UNMASK, record))

    @rule(node=st.sampled_from(NODES), kind=st.sampled_from(["train", "query.statistics", "query.kept", "evaluate", "query.hello"]))
    def one_is_asked_in_the_clear(self, node: int, kind: str) -> None:
        content = cloned(self.templates[Stage.COLLECT_MASKED_VECTORS])
        del content[RECORD_KEY_CONFIGS]
        self.ask(node, content, kind)

    @rule(node=st.sampled_from(NODES), stage=st.sampled_from(STAGES), kind=st.sampled_from(["query.statistics", "query.kept"]))
    def a_stage_comes_as_another_message(self, node: int, stage: str, kind: str) -> None:
        content = self.content(stage, self.request(stage, node))
        before = list(self.answered[node])
        self.ask(node, content, kind)
        if self.answered[node] != before:
            self.wrong = f"node {node} answered {stage} as {kind}, which Flower's mod does not mask"

    @rule(node=st.sampled_from(NODES), stage=st.sampled_from(STAGES), seed=st.integers(0, 2**32))
    def bytes_are_others(self, node: int, stage: str, seed: int) -> None:
        message = Message(self.content(stage, self.request(stage, node)), node, "train", ttl=600.0, group_id="1")
        try:
            _, message = in_bytes(message, np.random.default_rng(seed))
        except Exception:  # noqa: BLE001  (Flower cannot open it)
            return
        if isinstance(message, Message) and message.has_content():
            self.ask(node, message.content)

    @invariant()
    def nothing_is_shown(self) -> None:
        assert not getattr(self, "wrong", ""), self.wrong
