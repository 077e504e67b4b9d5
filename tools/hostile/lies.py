"""Run and judge one case of a server with a lying client, or of a client with a lying server."""

from __future__ import annotations

import numpy as np
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fl_bn.flower import RunFailed
from fl_bn.flower.in_process import InProcessGrid
from tests.hostile.liars import LIAR
from tests.hostile.recorded import CLIENTS, SCENARIOS, Liar, LivingGrid, PlayingGrid, app_of, cloned, recorded, served
from tools.hostile.mutations import TEXTS, Rng, in_bytes, pick
from tools.hostile.outcomes import BROKEN, GIVEN_UP, HONEST, REFUSED, Outcome, judged, listening
from tools.hostile.transport import ByteGrid

UNREADABLE = "the other side cannot open it"
ERRORS = (
    "WireError",
    "Insecure",
    "ValueError",
    "PermissionError",
    "ExchangeFailed",
    "ClientTooSmall",
    "Refused",
)  # kinds of errors by which a client says what is wrong


class Lies(Liar):
    """Simulate a client that changes some of its replies.

    Args:
        rng: Draws the changes.
        turns: Which replies it changes, counted from 1 in the order of the messages that it gets.
        others: Contents that it may send in place of its own: from other messages, other clients or other runs.
    """

    def __init__(self, rng: Rng, turns: set[int], others: list[RecordDict]) -> None:
        self.rng, self.turns, self.others = rng, turns, others
        self.what, self.reorder = "", False
        self._extra = list[Message]()
        self._spoilt = list[Message]()  # messages that ``delivered`` changes as bytes

    def answer(self, message: Message, turn: int, asked: str, content: RecordDict) -> Message:
        if turn not in self.turns:
            return Message(content, reply_to=message)
        self.what += f"{asked}: "
        kind = int(self.rng.integers(24))
        if kind == 0:
            return Message(Error(int(pick(self.rng, [0, 2, 3, 8, 999])), pick(self.rng, TEXTS).decode("latin1")), reply_to=message)
        if kind == 1:
            self.what += "another message "
            return Message(cloned(pick(self.rng, self.others)), reply_to=message)
        if kind == 2:
            self.what += "nothing "
            return Message(RecordDict(), reply_to=message)
        reply = Message(content, reply_to=message)
        if kind == 3:
            self.what += "order "
            self.reorder = True
        elif kind == 4:
            self.what += "twice "
            self._extra.append(Message(cloned(content), reply_to=message))
            self._spoilt.append(self._extra[-1])
        else:
            self._spoilt.append(reply)
        return reply

    def reordered(self, replies: list[Message]) -> list[Message]:
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        now = [extra for extra in self._extra if extra.metadata.reply_to_message_id in answered]
        self._extra = [extra for extra in self._extra if extra not in now]
        replies = replies + now
        return [replies[int(i)] for i in self.rng.permutation(len(replies))] if self.reorder else replies

    def delivered(self, reply: Message) -> Message:
        if not any(reply is one for one in self._spoilt):
            return reply
        before, self.what = self.what, f"{self.what}bytes "  # noted first, because the change may raise
        what, changed = in_bytes(reply, self.rng)
        self.what = f"{before}bytes of {what} "
        return changed


def replays(name: str) -> list[RecordDict]:
    """Return contents that a liar may send in place of its own.

    They are all replies of the recorded run ``name``, and ten of another method's run.
    """
    other = "fbn" if name != "fbn" else "hbn"
    return [content for _, content in recorded(name).canned.values()] + [content for _, content in recorded(other).canned.values()][:10]


def lie_to_server(name: str, rng: Rng) -> tuple[str, Outcome]:
    """Run a round in which one client lies in one message or more. Return what it changed, and the outcome."""
    recording, scenario = recorded(name), SCENARIOS[name]
    last = max(turn for node, turn in recording.canned if node == LIAR + 1)
    turns = {int(turn) for turn in rng.integers(1, last + 1, size=1 if rng.integers(4) else 3)}
    liar = Lies(rng, turns, replays(name))
    inner: InProcessGrid = LivingGrid(app_of(scenario), liar) if scenario.secure else PlayingGrid(recording, liar)
    with listening() as said:
        try:
            ran = served(name, ByteGrid(inner, liar))
        except RunFailed as error:
            gave_up = scenario.secure and any("nothing changes, since the masks did not cancel" in line for line in said.lines)
            return liar.what, Outcome(GIVEN_UP if gave_up else BROKEN, f"the run of one round ended: {error}")
        except Exception as error:  # the server must survive every reply
            return liar.what, Outcome(BROKEN, f"the server ended: {error!r}")
        return liar.what, judged(name, ran, said.lines)


# a client whose server lies


def rendezvous() -> RecordDict:
    """Return the instruction that asks a client to join a layer-wise exchange. No program listens at the address in it."""
    told = {"exchange": "grpc", "exchange-token": "0" * 64, "exchange-address": "127.0.0.1:1", "exchange-authority": b""}
    return RecordDict({"fl-bn/config": ConfigRecord({**told, "exchange-timeout": 2.0, "exchange-patience": 1.0})})


def lie_to_client(name: str, rng: Rng) -> tuple[str, Outcome]:
    """Send a client one changed instruction, and judge its answer.

    The client must answer as usual, or with an error that says what is wrong. In one of four cases of training without
    secure aggregation, the unchanged instruction follows. The client must answer it without an error.

    Returns:
        What was changed, and the outcome.
    """
    exchanges = [one for one in recorded(name).exchanges if one[0] != "query.rendezvous"]
    asked, instruction, _ = pick(rng, exchanges)
    if rng.integers(20) == 0:
        asked, instruction = "query.rendezvous", rendezvous()
    grid, kind = InProcessGrid(app_of(SCENARIOS[name]), CLIENTS, {}), asked.split()[0]
    if rng.integers(12) == 0:
        what, content = f"{asked}: another message", cloned(pick(rng, exchanges)[1])
    else:
        what, message = f"{asked}: bytes of ", Message(cloned(instruction), LIAR + 1, kind, ttl=600.0, group_id="1")
        try:
            part, message = in_bytes(message, rng)
        except Exception as error:  # noqa: BLE001  (in a deployment, only Flower's process for this message ends)
            return what, Outcome(REFUSED, f"{UNREADABLE}: {type(error).__name__}")
        what += part
        if not isinstance(message, Message) or not message.has_content() or message.metadata.message_type != kind:
            return what, Outcome(REFUSED, UNREADABLE)
        content = message.content
    if kind == "query.rendezvous" and elsewhere(content):
        return what, Outcome(REFUSED, "not sent: it names an address beyond this machine")
    with listening():
        (answer,) = grid.send_and_receive([Message(content, LIAR + 1, kind, ttl=600.0, group_id="1")])
        if "secure" not in name and kind == "train" and rng.integers(4) == 0:
            (again,) = grid.send_and_receive([Message(cloned(instruction), LIAR + 1, kind, ttl=600.0, group_id="1")])
            if again.has_error():
                return what, Outcome(BROKEN, f"afterwards the client refuses an honest message: {again.error.reason}")
    if not answer.has_error():
        sent = [array for record in answer.content.array_records.values() for array in record.values()]
        finite = all(np.isfinite(array.numpy()).all() for array in sent if array.dtype == "float32")
        return what, Outcome(HONEST, "") if finite else Outcome(REFUSED, "diverged")
    reason = str(answer.error.reason)
    if reason.partition(":")[0] not in ERRORS:
        return what, Outcome(BROKEN, f"no error that says what is wrong: {reason}")
    return what, Outcome(REFUSED, reason)


def elsewhere(content: RecordDict) -> bool:
    """Return whether the instruction names an address other than ``127.0.0.1:1``.

    Such an instruction is not sent, because a test must not connect to another machine.
    """
    config = content.config_records.get("fl-bn/config")
    return config is not None and not str(config.get("exchange-address", "127.0.0.1:1")).startswith("127.0.0.1:1")
