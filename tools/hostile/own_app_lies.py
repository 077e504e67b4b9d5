"""Attack a user's own Flower app, which has a strategy of its own, by one lying client."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fl_bn.federation.record import RoundRecord
from fl_bn.flower import InProcessGrid, OwnAppStrategy, RunFailed
from fl_bn.methods import METHODS
from tests.hostile.liars import what
from tests.hostile.own_app import CLIENTS, net, own_app
from tests.kept import Kept
from tools.hostile.lies import Lies
from tools.hostile.mutations import Rng, pick
from tools.hostile.outcomes import BROKEN, FEW, HONEST, REFUSED, Outcome, listening
from tools.hostile.transport import ByteGrid

METHODS_OF = ["fbn", "fedbn", "fedavg"]
TURNS = 6  # more messages than a client gets in one round


class OwnGrid(InProcessGrid):
    """Run the app's clients in this process, and let ``liar`` change the replies of the client on ``node``."""

    def __init__(self, app: ClientApp, node: int, liar: Lies) -> None:
        super().__init__(app, CLIENTS, {})
        self.node, self.liar, self.turn = node, liar, 0

    def _answer(self, message: Message) -> Message:
        asked = what(message)
        reply = super()._answer(message)
        if message.metadata.dst_node_id != self.node or not reply.has_content():
            return reply
        self.turn += 1
        return self.liar.answer(message, self.turn, asked, reply.content)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self.liar.reordered(list(super().pull_messages(message_ids)))


def lie_to_own_app(name: str, rng: Rng) -> tuple[str, Outcome]:
    node, in_bytes = int(rng.integers(1, CLIENTS + 1)), bool(rng.integers(2))
    liar = Lies(rng, {int(rng.integers(1, TURNS))}, [RecordDict()], in_bytes)
    inner = OwnGrid(own_app(name), node, liar)
    grid: Grid = ByteGrid(inner, liar) if in_bytes else inner
    records = list[RoundRecord]()
    strategy = OwnAppStrategy(net(), METHODS[name](), callbacks=[Kept(records)], calibrate=int(pick(rng, [0, 1])))
    with listening() as said:
        try:
            result = strategy.start(grid, num_rounds=1, timeout=30)
        except RunFailed as error:
            return liar.what, Outcome(BROKEN, f"node {node} ended the run: {error}")
        except Exception as error:  # the server must survive every reply
            return liar.what, Outcome(BROKEN, f"the server ended: {error!r}")
    others = [c for c in records[-1].clients if c.client != node - 1 and c.refused]
    if others or not records[-1].aggregated:
        return liar.what, Outcome(BROKEN, f"honest client {others[0].client} refused: {others[0].refused}" if others else "nothing changed")
    if len(records[-1].accepted) < CLIENTS - 1:
        return liar.what, Outcome(BROKEN, f"only {[c.client for c in records[-1].accepted]} took part")
    for key, value in (result.evaluate_metrics_clientapp.get(1) or {}).items():
        if not key.isprintable() or not isinstance(value, int | float) or not math.isfinite(value):
            return liar.what, Outcome(BROKEN, f"an impossible metric was accepted: {key[:80]!r}: {value}")
    if any(len(line) > 4000 or "\x1b" in line or "\n" in line for line in said.lines):
        return liar.what, Outcome(BROKEN, "a line of the log is overlong or has control characters from a client")
    named = [line for line in said.lines if (f"client {node - 1}" in line or f"node {node} " in line) and FEW not in line]
    return liar.what, Outcome(REFUSED, named[0]) if named else Outcome(HONEST, "")
