"""A transport as a user of fl-bn may write it: clients train in threads of this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import nn

from fl_bn import convert
from fl_bn.federation.client_round import client_round
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.replies import checked
from fl_bn.federation.server import Server, Transport
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import SampleLoop
from fl_bn.federation.values import NOTHING, Instruction, Named, Reply, RoundReplies


class Threads(Transport):
    """Train all clients in every round, each in a thread."""

    def __init__(self, server: Server, net: nn.Module, data: list[Samples], settings: LocalTraining) -> None:
        self.server, self.net, self.data, self.settings = server, net, data, settings
        self.kept = [NOTHING for _ in data]

    def train(self, instruction: Instruction) -> RoundReplies:
        return self._all(instruction)

    def measure(self, instruction: Instruction) -> RoundReplies:
        return self._all(instruction)

    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        self.server.shared.load(tensors)
        return evaluate(self.server.model, self.data[0]).result()

    def _all(self, instruction: Instruction) -> RoundReplies:
        with ThreadPoolExecutor(len(self.data)) as pool:
            replies = list(pool.map(partial(self._one, instruction), range(len(self.data))))
        expected = self.server.expects(instruction.round, instruction.phase)
        return checked(replies, expected, len(self.data))

    def _one(self, instruction: Instruction, client: int) -> Reply:
        model = convert(self.net, self.server.method)
        loop = SampleLoop(self.data[client], 0, client)
        reply, self.kept[client] = client_round(model, self.server.method, instruction, self.kept[client], loop, self.settings)
        return reply
