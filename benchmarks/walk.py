"""Follow one round of FedAvg on Flower through the code: the files and functions that run, and how often a reply is passed on.

    python benchmarks/walk.py
    PYTHONPATH=CHECKOUT python benchmarks/walk.py          # of another checkout of fl-bn, from version 0.1 on

Three clients with a small network run two rounds in this process. ``sys.setprofile`` observes the training of the second round, from
``Server.begin`` to the evaluation: instruction, messages, clients, replies, averages, the round's record. The program counts all
files of fl_bn that the round enters, the lines of the functions that it calls, and how often a function or generator of fl_bn
returns or yields the ``Reply`` of one client to its caller.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from flwr.app import Context
from torch import nn

import fl_bn
from fl_bn import convert
from fl_bn.federation.local import Samples
from fl_bn.federation.server import Server
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.values import Reply
from fl_bn.flower import BatchNormClient, BatchNormStrategy, InProcessGrid, Rounds, Site, make_client_app
from fl_bn.methods import METHODS

PACKAGE = Path(str(fl_bn.__file__)).parent
CLIENTS, ROUNDS = 3, 2
PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # parts of a function, not counted as functions


class Walk:
    """Record which functions of fl_bn run between ``begin`` and ``end``, and which of them return a reply.

    Attributes:
        entered: Function of fl_bn -> how often it was called.
        returns: The side ("client" or "server") and the function, for every return of a ``Reply``, in order, over all clients.
    """

    def __init__(self) -> None:
        self.entered = Counter[CodeType]()
        self.returns: list[tuple[str, str]] = []
        self._side = "server"

    def begin(self) -> None:
        sys.setprofile(self._seen)

    def end(self) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        if event == "call":
            self.entered[code] += 1
            if code.co_name == "_answer":  # the grid's method: here the next client starts to work
                self._side = "client"
            return
        values = value if isinstance(value, tuple | list) else [value]
        values = [one for entry in values for one in (entry if isinstance(entry, tuple) else (entry,))]
        if code.co_name not in PARTS and any(isinstance(one, Reply) for one in values):
            self.returns.append((self._side, name_of(code)))
        if code.co_name == "_answer":
            self._side = "server"

    def files(self) -> dict[str, tuple[int, int, int]]:
        """Return file -> number of functions that the round calls, their lines, and the lines of the whole file."""
        found: dict[str, set[CodeType]] = {}
        for code in self.entered:
            found.setdefault(code.co_filename, set()).add(code)
        names = {file: str(Path(file).relative_to(PACKAGE)) for file in found}
        return {names[file]: (len(codes), *lines(Path(file), codes)) for file, codes in sorted(found.items(), key=lambda entry: entry[0])}


def name_of(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_firstlineno} {code.co_qualname}"


def lines(file: Path, codes: set[CodeType]) -> tuple[int, int]:
    """Return how many lines these functions have together, and how many the file has. A line is counted once."""
    own: set[int] = set()
    for code in codes:
        numbers = [line for _, _, line in code.co_lines() if line is not None]
        own |= set(range(code.co_firstlineno, max(numbers, default=code.co_firstlineno) + 1))
    return len(own), len(file.read_text().splitlines())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def walked(method: str) -> Walk:
    """Run two rounds of ``method``, and record the second one."""
    walk, how, draw = Walk(), METHODS[method](), torch.Generator().manual_seed(1)
    clients = [Samples(torch.randn(24, 6, generator=draw), torch.randint(3, (24,), generator=draw)) for _ in range(CLIENTS)]
    converted, settings = convert(network(), how), LocalTraining(batch_size=8, steps=2)

    def build(context: Context) -> BatchNormClient:
        index = int(context.node_config["partition-id"])
        site = Site(index, CLIENTS, clients[index], clients[index], torch.device("cpu"))
        return BatchNormClient(converted, how, settings, site, context.state)

    class Watched(BatchNormStrategy):
        def configure_evaluate(self, server_round: int, *args: Any) -> Any:
            walk.end()
            return super().configure_evaluate(server_round, *args)

    def begin(self: Server, round: int) -> Any:
        if round == ROUNDS:
            walk.begin()
        return begins(self, round)

    rounds, begins = Rounds(clients=CLIENTS, wait=0.0, calibrate=0, unit_scale=False), Server.begin
    strategy = Watched(network(), how, rounds)
    with patch.object(Server, "begin", begin):
        result = strategy.start(InProcessGrid(make_client_app(build), CLIENTS, {}), num_rounds=ROUNDS)
    assert len(result.records[-1].accepted) == CLIENTS
    return walk


def main(
    method: Annotated[str, typer.Option(help="method of the round")] = "fedavg",
    detail: Annotated[bool, typer.Option(help="also print every return of one client's reply, in order")] = False,
) -> None:
    walk = walked(method)
    files = walk.files()
    print("| file | functions | their lines | lines of the file |\n|---|---:|---:|---:|")
    for file, numbers in sorted(files.items(), key=lambda entry: -entry[1][1]):
        print(f"| {file} | {' | '.join(map(str, numbers))} |")
    total = [sum(numbers[column] for numbers in files.values()) for column in range(3)]
    print(f"| {len(files)} files | {' | '.join(map(str, total))} |\n")
    print(f"a round of {method} with {CLIENTS} clients enters {len(files)} files, {total[0]} functions, {total[1]} lines of functions")
    counts = Counter(side for side, _ in walk.returns)
    print(f"returns of a reply: {counts['client'] / CLIENTS:.3g} at the client, {counts['server'] / CLIENTS:.3g} at the server")
    if detail:
        print("\n".join(f"{side} {function}" for side, function in walk.returns[: len(walk.returns) // CLIENTS + 1]))


if __name__ == "__main__":
    typer.run(main)
