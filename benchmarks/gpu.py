"""Check every method's numbers on the GPU, and compare ways to train there.

    python benchmarks/gpu.py                                # the first GPU
    python benchmarks/gpu.py --device cpu --quick           # the smallest sizes, to see that it runs

The data are random, with the shapes of the real data.

- Numbers: two rounds of ``Federation`` in float64 are compared with the same rounds on the CPU, one client after the
  other.
- Bits: two equal runs in float32 are compared bit by bit.
- Speed: only the clients' part of a round is timed: load the networks, make local steps, copy the replies to the CPU.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from common import RESULTS
from torch import Tensor, nn

from fl_bn import Federation, SeededBatches, convert
from fl_bn.bn.modules import copied
from fl_bn.federation.client_round import concluded
from fl_bn.federation.engines.vectorised import ENGINES, SEQUENTIAL, VECTORISED, client_rounds
from fl_bn.federation.local import Samples
from fl_bn.federation.network import MEMORY_FORMATS
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import SampleLoop, alone
from fl_bn.federation.values import Reply
from fl_bn.methods import METHODS, Method
from fl_bn.models import build

NETWORKS = {"digits-cnn-small": 16, "simple-cnn": 32, "resnet20": 32}  # network -> side of its images in pixels
COMPARED = ("fedavg", "gn", "hbn", "fbn")


class Size(NamedTuple):
    """Set how much is timed.

    Attributes:
        cohorts: The cohort sizes, in clients.
        steps: The number of local steps.
        batch: The batch size.
        timed: How often a round is timed; the fastest time counts.
    """

    cohorts: tuple[int, ...]
    steps: int
    batch: int
    timed: int


class Way(NamedTuple):
    """Describe one way of training a cohort.

    Attributes:
        engine: ``SEQUENTIAL``: one client after the other; ``VECTORISED``: all clients in one program.
        layout: The memory layout of the network, a key of ``MEMORY_FORMATS``.
        precision: The precision of the local steps, ``float32`` or ``mixed``.
        deterministic: Whether torch may use only deterministic kernels.
    """

    engine: str = SEQUENTIAL
    layout: str = "contiguous"
    precision: str = "float32"
    deterministic: bool = False


WAYS = {
    "one by one": Way(),
    "channels last": Way(layout="channels-last"),
    "bfloat16": Way(precision="mixed"),
    "bfloat16, channels last": Way(layout="channels-last", precision="mixed"),
    "deterministic": Way(deterministic=True),
    "vectorised": Way(VECTORISED),
    "vectorised, deterministic": Way(VECTORISED, deterministic=True),
}
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch needs it for deterministic sums; set it before the GPU's first use


FULL, QUICK = Size((10, 50), 5, 32, 2), Size((2,), 1, 4, 1)


# Numbers and bits


def two_rounds(name: str, device: torch.device, engine: str, dtype: torch.dtype) -> list[Tensor]:
    """Train two clients for two rounds with ResNet-20; return all tensors of both clients' models, in float64.

    Each client has two batches of 16 images.

    Args:
        name: The name of the method.
        device: The device of the training.
        engine: The engine, ``SEQUENTIAL`` or ``VECTORISED``.
        dtype: The floating-point type of the training.
    """
    model = build("resnet20", classes=10, image_size=16, seed=0).to(dtype)
    draw = torch.Generator().manual_seed(1)
    clients = [
        SeededBatches((torch.randn(32, 3, 16, 16, generator=draw) + i).to(dtype), torch.randint(0, 10, (32,), generator=draw), 16)
        for i in range(2)
    ]
    federation = Federation(model, METHODS[name](), clients, device=device, engine=engine)
    for _ in federation.run(2):
        pass
    return [tensor.double() for i in range(2) for _, tensor in sorted(federation.client_model(i).state_dict().items())]


def apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the relative difference of two lists of tensors: the norm of ``a - b``, divided by the norm of ``b``."""
    x, y = (torch.cat([tensor.double().cpu().flatten() for tensor in one]) for one in (a, b))
    return float((x - y).norm()) / float(y.norm())


def check_numbers(device: torch.device, names: Sequence[str]) -> list[str]:
    """Compare each method's numbers with the CPU's, and the bits of two runs with each other; return the lines of a Markdown table."""
    rows = ["| method | one by one | vectorised | same bits again, one by one | vectorised | deterministic: one by one | vectorised |"]
    rows.append("|---" * 7 + "|")
    for name in names:
        exact = two_rounds(name, torch.device("cpu"), SEQUENTIAL, torch.float64)
        row = [name, *(f"{apart(two_rounds(name, device, engine, torch.float64), exact):.0e}" for engine in ENGINES)]
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            row += ["yes" if again(name, device, engine) else "no" for engine in ENGINES]
        print(*row, flush=True)
        rows.append("| " + " | ".join(row) + " |")
    return rows


def again(name: str, device: torch.device, engine: str) -> bool:
    """Return whether two equal runs of ``two_rounds`` in float32 give the same bits."""
    one, other = (two_rounds(name, device, engine, torch.float32) for _ in range(2))
    return all(map(torch.equal, one, other))


# Speed


def made(clients: int, n: int, shape: Sequence[int]) -> list[Samples]:
    """Make ``n`` random samples of ten classes for each client: uint8 images of shape (n, ``*shape``) with labels."""
    draw = torch.Generator().manual_seed(0)
    return [
        Samples(torch.randint(0, 256, (n, *shape), generator=draw, dtype=torch.uint8), torch.randint(0, 10, (n,), generator=draw))
        for _ in range(clients)
    ]


def one_round(
    engine: str, model: nn.Module, method: Method, settings: LocalTraining, samples: Sequence[Samples], device: torch.device
) -> list[Reply]:
    """Train all clients for one round with ``model``, a converted model on the CPU; return their replies."""
    clients = range(len(samples))
    home = device if engine == SEQUENTIAL else torch.device("cpu")
    rounds = [alone(copied(model).to(home), method, settings, 0.01) for _ in clients]
    loops = [SampleLoop(own, 0, i) for i, own in enumerate(samples)]
    if engine == SEQUENTIAL:
        return [concluded(round, loop(round))[0] for round, loop in zip(rounds, loops, strict=True)]
    return [reply for reply, _ in client_rounds(rounds, loops, device)]


def timed(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the seconds of the fastest of ``times`` calls, after one call to warm up."""
    found = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def compare_ways(device: torch.device, size: Size, ways: Mapping[str, Way]) -> list[str]:
    """Return how many rounds per second each of ``ways`` trains: a Markdown table with a row per network, cohort size and method."""
    rows = ["| network | method | clients x batch | " + " | ".join(ways) + " |"]
    rows.append("|---" * (len(ways) + 3) + "|")
    for network, side in NETWORKS.items():
        for cohort in size.cohorts:
            if cohort > 10 and network == "resnet20":  # it takes a minute per row and shows nothing new
                continue
            samples = made(cohort, size.steps * size.batch, (3, side, side))
            for name in COMPARED:
                method = METHODS[name]()
                plain = convert(build(network, classes=10, image_size=side, seed=0), method)
                found = list[str]()
                for way in ways.values():
                    if cohort > 10 and way != Way(way.engine):
                        found.append("")
                        continue
                    settings = LocalTraining(size.batch, steps=size.steps, momentum=0.9, precision=way.precision)
                    model = copied(plain).to(memory_format=MEMORY_FORMATS[way.layout])
                    call = partial(one_round, way.engine, model, method, settings, samples, device)
                    torch.use_deterministic_algorithms(way.deterministic)
                    spent = timed(call, size.timed, device)
                    found.append(f"{1 / spent:.2f}")
                rows.append("| " + " | ".join([network, name, f"{cohort} x {size.batch}", *found]) + " |")
                print(rows[-1], flush=True)
    return rows


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="use the smallest sizes")] = False,
    results: Annotated[Path, typer.Option(help="file for the tables")] = RESULTS / "gpu.md",
) -> None:
    """Measure everything, and write the tables."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    on, size = torch.device(device), QUICK if quick else FULL
    name = torch.cuda.get_device_name(on) if on.type == "cuda" else f"{os.cpu_count()} cores of {platform.machine()}"
    lines = [f"{name}, torch {torch.__version__}.", ""]

    def add(title: str, rows: Sequence[str]) -> None:
        lines.extend([title, "", *rows, ""])
        results.write_text("\n".join(lines).rstrip() + "\n")  # written now, because the next part takes longer

    names = [name for name in METHODS if name != "fedavg-alg2"]  # left out: an ablation of the FedTAN paper
    add(
        "Two rounds, two clients, ResNet-20: difference in float64 from the CPU; and whether float32 has the same bits again.",
        check_numbers(on, names[:2] if quick else names),
    )
    ways = {name: way for name, way in WAYS.items() if way == Way(way.engine)} if quick else WAYS
    add(f"Rounds per second, {size.steps} local steps; the best of {size.timed}.", compare_ways(on, size, ways))


if __name__ == "__main__":
    typer.run(main)
