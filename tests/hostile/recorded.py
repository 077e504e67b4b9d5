"""Record the messages of honest runs, and replay the replies to other servers, so that a run costs no training."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fl_bn.federation.aggregation import NO_DEFENCE
from fl_bn.flower import BatchNormStrategy, InProcessGrid
from fl_bn.methods import METHODS
from fl_bn.objectives import Scaffold
from tests.hostile.liars import LIAR, Defence, ExchangeSettings, LocalTraining, RoundRecord, SecureAggregation, people, to_numpy, what
from tests.in_process import TWO_STEPS, client_app, run

CLIENTS = 5
REPLAY = ExchangeSettings("replay", "shrink")
MEETING = ExchangeSettings("local", "shrink")


class Scenario(NamedTuple):
    """Describe one kind of run. ``meets``: the clients train at the same time, and exchange statistics layer by layer."""

    method: str
    defence: Defence = NO_DEFENCE
    settings: LocalTraining = TWO_STEPS
    secure: bool = False
    policy: dict[str, Any] = {}
    meets: bool = False

    @property
    def living(self) -> bool:
        """Return whether a client's replies depend on other clients' replies, so that recorded replies cannot be used."""
        return self.secure or self.meets


def robust(rule: str) -> Defence:
    return Defence(1, rule, rule)


GLOBAL = LocalTraining(batch_size=4, steps=2, momentum=0.9, maintain="global")
SCENARIOS: dict[str, Scenario] = {
    **{
        f"{name}": Scenario(name, policy={"exchange": REPLAY, "at_clients": True, "calibrate": int(name in ("fbn", "hbn"))})
        for name in METHODS
    },
    "fbn robust": Scenario("fbn", robust("nnm+median")),
    "hbn robust": Scenario("hbn", robust("trimmed-mean")),
    "fedavg robust": Scenario("fedavg", robust("geometric-median")),
    "fedbn robust": Scenario("fedbn", robust("median")),
    "fedtan robust": Scenario("fedtan", robust("nnm+median"), policy={"exchange": REPLAY}),
    "fedavg scaffold": Scenario("fedavg", settings=LocalTraining(batch_size=4, steps=2, objective=Scaffold())),
    "fbn maintained": Scenario("fbn", settings=GLOBAL),
    "fedbn unseen": Scenario("fedbn", policy={"unseen": True}),
    "fbn gradients": Scenario("fbn", settings=LocalTraining(batch_size=64, steps=1, update="gradients")),
    **{f"{name} secure": Scenario(name, secure=True) for name in ("fbn", "hbn", "fedavg", "gn", "fedbn", "silobn")},
    "fedtan meeting": Scenario("fedtan", policy={"exchange": MEETING, "at_clients": True}, meets=True),
    "fedtan2 meeting": Scenario("fedtan2", policy={"exchange": MEETING, "at_clients": True}, meets=True),
    "fedtan meeting robust": Scenario("fedtan", robust("median"), policy={"exchange": MEETING}, meets=True),
}
CANNED = [name for name, scenario in SCENARIOS.items() if not scenario.living]
SECURE = [name for name, scenario in SCENARIOS.items() if scenario.secure]


def cloned(content: RecordDict) -> RecordDict:
    """Copy all records of a message. Arrays and bytes are shared, because nothing changes them in place."""
    copies: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            copies[name] = ArrayRecord({key: copy(array) for key, array in record.items()})
        else:
            values = {key: list(value) if isinstance(value, list) else value for key, value in record.items()}
            copies[name] = (MetricRecord if isinstance(record, MetricRecord) else ConfigRecord)(values)
    return RecordDict(copies)


def app_of(scenario: Scenario) -> ClientApp:
    return client_app(METHODS[scenario.method](), people(CLIENTS), scenario.settings, tells=scenario.policy.get("unseen", False))


@dataclass
class Recording:
    """Hold the messages of an honest run.

    Attributes:
        exchanges: The type of each message, its content and the content of the reply.
        canned: (node, n) -> the type of the n-th message to that node, from 1, and the content of the reply.
    """

    exchanges: list[tuple[str, RecordDict, RecordDict]] = field(default_factory=list)
    canned: dict[tuple[int, int], tuple[str, RecordDict]] = field(default_factory=dict)


class RecordingGrid(InProcessGrid):
    def __init__(self, app: ClientApp, recording: Recording) -> None:
        super().__init__(app, CLIENTS, {})
        self.recording, self.turns = recording, dict[int, int]()

    def _answer(self, message: Message) -> Message:
        asked, instruction, node = what(message), cloned(message.content), message.metadata.dst_node_id
        answer = super()._answer(message)
        turn = self.turns[node] = self.turns.get(node, 0) + 1
        if answer.has_content():
            self.recording.exchanges.append((asked, instruction, cloned(answer.content)))
            self.recording.canned[node, turn] = (asked, cloned(answer.content))
        return answer


class LyingGrid(InProcessGrid):
    """Let the replies of the client ``LIAR`` pass through ``liar``."""

    def __init__(self, app: ClientApp, liar: Liar) -> None:
        super().__init__(app, CLIENTS, {})
        self.liar, self.turns = liar, dict[int, int]()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.liar.reordered(list(super().pull_messages(message_ids)))


class PlayingGrid(LyingGrid):
    """Reply to every message as recorded.

    After a lie in a statistics pass, the server may ask for one more pass than was recorded. Then every client, the liar too, repeats its
    reply to the last pass.
    """

    def __init__(self, recording: Recording, liar: Liar) -> None:
        super().__init__(ClientApp(), liar)
        self.recording = recording

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        turn = self.turns[node] = self.turns.get(node, 0) + 1
        asked, content = self.recording.canned.get((node, turn), ("", RecordDict()))
        last, again = self.recording.canned.get((node, turn - 1), ("", RecordDict()))
        if asked != last == what(message):
            self.turns[node] -= 1
            return Message(cloned(again), reply_to=message)
        if node == LIAR + 1:
            return self.liar.answer(message, turn, asked, cloned(content))
        return Message(cloned(content), reply_to=message)


class LivingGrid(LyingGrid):
    """Let real clients answer, because their replies depend on earlier ones."""

    def _answer(self, message: Message) -> Message:
        asked, node = what(message), message.metadata.dst_node_id
        answer = super()._answer(message)
        if node != LIAR + 1 or not answer.has_content():
            return answer
        turn = self.turns[node] = self.turns.get(node, 0) + 1
        return self.liar.answer(message, turn, asked, answer.content)


class Liar:
    """Return all replies unchanged. Subclasses lie."""

    def answer(self, message: Message, turn: int, asked: str, content: RecordDict) -> Message:
        return Message(content, reply_to=message)

    def reordered(self, replies: list[Message]) -> list[Message]:
        return replies

    def delivered(self, reply: Message) -> Message:
        """Return ``reply`` as Flower's transport delivers it; only ``transport.ByteGrid`` calls this."""
        return reply


@cache
def recorded(name: str) -> Recording:
    recording = Recording()
    served(name, RecordingGrid(app_of(SCENARIOS[name]), recording))
    return recording


class Served(NamedTuple):
    strategy: BatchNormStrategy
    record: RoundRecord
    tensors: dict[str, Any]


def served(name: str, grid: Grid, rounds: int = 1) -> Served:
    """Run ``rounds`` rounds of the scenario with a new server on ``grid``. The run can start without one of the clients."""
    scenario = SCENARIOS[name]
    # recorded replies cannot answer an exchange layer by layer, whose session is a target of its own
    rules = {"recalibration": "passes", "at_start": CLIENTS - 1, "auxiliary": scenario.settings.auxiliary}
    rules["nodes"] = tuple(range(1, CLIENTS + 1))  # as in a deployment, where each client's key is known
    how = {"grid": grid, "settings": scenario.settings, "policy": rules | scenario.policy, "defence": scenario.defence}
    ran = run(METHODS[scenario.method](), people(CLIENTS), rounds, secure=SecureAggregation() if scenario.secure else None, **how)
    return Served(ran.strategy, ran.records[-1], to_numpy(ran.strategy.transport.shared.tensors()))
