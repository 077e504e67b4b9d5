"""Measure the server's part of a round, from the bytes of the replies to those of the new model, next to Flower's own
FedAvg.

    python benchmarks/server.py                         # on a quiet machine
    python benchmarks/server.py --before CHECKOUT       # measures an older version of fl-bn, too

Every line of the table is measured in a process of its own with one thread. ``aggregate_train`` of
``BatchNormStrategy`` and of Flower's ``FedAvg`` get the same replies (FedAvg with BatchNorm: weights and running
statistics, float32). The replies are a list in memory, or are streamed: each is made when it is asked for, and the
time to make it is not counted. The floor is the time to read the replies' bytes once.

Memory is the peak resident set, minus that before the call. Of streamed replies, the bytes of two are also
subtracted, because one is added while the next is made; a list is in memory before the call. The unit is the size of
one float32 model.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).parent
LIST, STREAM = "list", "stream"
FLOOR, OURS, BEFORE, FLOWER = "floor", "fl-bn", "before", "Flower's FedAvg"
CASES = ((10, "resnet18", LIST), (10, "resnet18", STREAM), (100, "resnet50", STREAM))
STAGES = ("read", "average, step", "encode")
REPEAT = 3
MB = 1e-6


def network(name: str) -> Any:
    """Build a network of torchvision with reproducible initial weights."""
    import torch
    from torchvision import models

    torch.manual_seed(0)
    return getattr(models, name)(num_classes=10)


PLACES = ("federation.values", "federation.payload", *(f"flower.wire.{name}" for name in ("codec", "fields", "messaging", "replies")))


def found(name: str) -> Any:
    """Return a function or value of fl-bn from the module that has it, which is another in older versions."""
    for place in PLACES:
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(f"fl_bn.{place}")
            if hasattr(module, name):
                return getattr(module, name)
    raise LookupError(f"no module of fl-bn has {name!r}")


class Replies:
    """Iterate over the replies of clients 0 to ``n`` - 1; client i has 100 + i samples. A reply is made when it is asked for.

    Args:
        n: The number of clients.
        sections: Section -> named arrays. Every reply has copies of them.
        header: The header of every reply.
        whole: Put all arrays of a reply into one ArrayRecord, the form that Flower's FedAvg needs.
    """

    def __init__(self, n: int, sections: dict[str, dict[str, Any]], header: Any, whole: bool) -> None:
        from flwr.app import Array

        self.n, self.header, self.seconds = n, header, 0.0
        self.prefix = "" if whole else found("OURS")
        sections = {"arrays": {k: a for part in sections.values() for k, a in part.items()}} if whole else sections
        self.sections = {section: {k: Array(a) for k, a in arrays.items()} for section, arrays in sections.items()}

    def make(self, client: int) -> Any:
        """Make the reply of one client."""
        from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

        metrics = MetricRecord({"samples": 100 + client, "steps": 5, "loss": 1.0})
        content = RecordDict({f"{self.prefix}header": self.header, f"{self.prefix}metrics": metrics})
        for section, arrays in self.sections.items():
            copies = {k: Array(a.dtype, a.shape, a.stype, bytes(memoryview(a.data))) for k, a in arrays.items()}
            content[f"{self.prefix}{section}"] = ArrayRecord(copies)
        asked = Message(RecordDict(), client + 1, "train", ttl=3600.0, group_id="1")
        asked.metadata.__dict__.update(_run_id=1, _src_node_id=1, _message_id=f"{client:032x}")
        return Message(content, reply_to=asked)

    def __iter__(self) -> Iterator[Any]:
        for client in range(self.n):
            begin = time.perf_counter()
            reply = self.make(client)
            self.seconds += time.perf_counter() - begin
            yield reply
            del reply


def cell(which: str, n: int, name: str, how: str) -> dict[str, float]:
    """Measure one line of the table in this process.

    Args:
        which: The code that is measured: ``FLOOR``, ``OURS``, ``BEFORE`` or ``FLOWER``.
        n: The number of clients.
        name: The network.
        how: The form of the replies: ``LIST`` (all in memory) or ``STREAM`` (each is made when it is asked for).

    Returns:
        Name of a figure -> its value.
    """
    import numpy as np
    import torch
    from common import peak
    from flwr.app import ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from fl_bn.flower import BatchNormStrategy, Rounds
    from fl_bn.flower.population import Client
    from fl_bn.methods import METHODS, Phase

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    strategy = BatchNormStrategy(network(name), METHODS["fedavg"](), Rounds(clients=n))
    server: Any = getattr(strategy, "transport", strategy)  # the strategy itself, in a checkout of before
    combine = getattr(server, "combine", None) or strategy.aggregate_train
    server.cohort = [Client(i, i + 1, 100 + i) for i in range(n)]
    sections = {k: found("to_numpy")(part) for k, part in server.shared.sections().items()}
    header = ConfigRecord(vars(found("header_for")(server.shared, 1, Phase.TRAIN)))
    replies = Replies(n, sections, header, which == FLOWER)
    own = sum(a.nbytes for part in sections.values() for a in part.values())
    given = list(replies) if how == LIST else replies
    runs, stages = list[dict[str, float]](), Stages()
    encode = stages.timed("encode", encoded)
    for _ in range(REPEAT if n == 10 else 1):
        replies.seconds = 0.0
        stages.clear()
        server.server.begin(1)
        call: Callable[[], Any]
        if which == FLOOR:
            call = lambda: [np.frombuffer(a.data, np.uint8, len(a.data) // 8 * 8).view(np.uint64).max() for a in bytes_of(given)]  # noqa: E731
        elif which == FLOWER:
            call = lambda: encoded(FedAvg(weighted_by_key="samples").aggregate_train(1, given))  # noqa: E731
        else:
            call = lambda: encode(combine(1, given))  # noqa: E731
        memory, taken, value = peak(call)
        del value
        taken -= replies.seconds
        run = {"seconds": taken, "extra": memory - (2 * own if how == STREAM else 0), **stages}
        if stages:
            run["average, step"] = taken - sum(stages.values())
        runs.append(run)
    best, extra = min(runs, key=lambda run: run["seconds"]), max(run["extra"] for run in runs)
    return {**best, "models": extra / own, "MB": MB * extra, "own": MB * own}


def bytes_of(replies: Any) -> Iterator[Any]:
    """Yield all arrays of the replies."""
    for reply in replies:
        for record in reply.content.array_records.values():
            yield from record.values()


def encoded(result: Any) -> list[bytes]:
    """Return the bytes of each array of the new model.

    Args:
        result: The result of ``aggregate_train``: the arrays of the new model, and the metrics.
    """
    arrays, _ = result
    assert arrays is not None
    return [array.data for array in arrays.values()]


class Stages(dict[str, float]):
    """Measure the seconds of two parts of ``aggregate_train``: reading the replies, and encoding the new model.

    The object maps the name of each part to its seconds. The rest of the call is averaging and the server's step.
    """

    def __init__(self) -> None:
        strategy: Any = importlib.import_module("fl_bn.flower.strategy")
        if not hasattr(strategy, "arrays_of"):  # the transport combines the replies
            strategy = importlib.import_module("fl_bn.flower.grid_transport")
        super().__init__()
        reading = found("Reading")
        reading.read = self.timed("read", reading.read)
        strategy.arrays_of = self.timed("encode", strategy.arrays_of)

    def timed(self, stage: str, function: Any) -> Any:
        """Return a function that calls ``function`` and adds its seconds to the part ``stage``."""

        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self[stage] = self.get(stage, 0.0) + time.perf_counter() - begin

        return call


def measured(which: str, n: int, name: str, how: str, before: Path | None) -> dict[str, float]:
    """Measure one line of the table in a process of its own; the arguments are as in ``cell``.

    ``before`` is the folder of the older version.

    Raises:
        RuntimeError: The process failed.
    """
    root = before if which == BEFORE else HERE.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__)), "--cell", json.dumps([which, n, name, how])]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(
    before: Annotated[Path | None, typer.Option(help="checkout of an older fl-bn, to be measured beside this one")] = None,
    output: Annotated[Path, typer.Option(help="folder for server.md")] = HERE / "results",
    quick: Annotated[bool, typer.Option(help="measure only the first case")] = False,
    one: Annotated[str, typer.Option("--cell", hidden=True)] = "",
) -> None:
    """Measure all cases, and write the table."""
    if one:
        print(json.dumps(cell(*json.loads(one))))
        return
    from common import machine

    titles = ("replies", "model", "given as", "by", "seconds", "above the floor", *STAGES, "peak (models)", "peak (MB)")
    lines = [machine(), "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for n, name, how in CASES[: 1 if quick else None]:
        floor = measured(FLOOR, n, name, how, before)["seconds"]
        for which in (FLOOR, OURS, *([BEFORE] if before else []), FLOWER):
            if which in (BEFORE, FLOWER) and n > 10:
                continue  # they keep all replies in memory, which takes too many gigabytes
            m = measured(which, n, name, how, before)
            row = [str(n), f"{name}, {m['own'] / 4:.1f} M", how, which, f"{m['seconds']:.3f}", f"{m['seconds'] - floor:.3f}"]
            row += [f"{m[stage]:.3f}" if stage in m else "" for stage in STAGES]
            lines.append(f"| {' | '.join(row)} | {m['models']:.2f} | {m['MB']:.0f} |")
            print(lines[-1], flush=True)
    output.mkdir(parents=True, exist_ok=True)
    (output / "server.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
