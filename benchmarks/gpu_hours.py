"""Estimate the GPU hours of the papers' experiments, as a part of ``gpu.py``.

A few local steps are timed for each combination of data set, network, method, batch size and cohort size. The seconds
per step are multiplied by the number of steps in the runs.
"""

from __future__ import annotations

import copy
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

from fl_bn import convert
from fl_bn.federation.client_round import client_round, client_rounds
from fl_bn.federation.engines.vectorised import ENGINES, SEQUENTIAL, AsOneProgram, CannotVectorise
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.source import Member
from fl_bn.federation.sources import SampleSource, alone
from fl_bn.federation.values import Reply
from fl_bn.methods import Method
from fl_bn.models import build
from fl_bn.run.config import RunConfig
from fl_bn.sweep.file import PAPER, read

EXPERIMENTS = Path(__file__).parent.parent / "experiments" / "definitions"
DATA = {  # data set -> classes, channels, side in pixels and samples
    "cifar10": (10, 3, 32, 50_000),
    "cifar100": (100, 3, 32, 50_000),
    "tiny-imagenet": (200, 3, 64, 100_000),
    "mnist": (10, 1, 28, 60_000),
    "digits": (10, 1, 8, 1_437),
    "digits-five": (10, 3, 28, 37_190),
    "office-caltech10": (10, 3, 256, 2_026),
    "domainnet": (10, 3, 256, 16_000),
    "abide": (2, 5_995, 1, 870),
    "cityscapes": (19, 3, 512, 2_975),
}
console = Console()


@dataclass(frozen=True)
class Size:
    """Set how much is timed.

    Attributes:
        cohorts: The cohort sizes, in clients, for the comparison of ways to train.
        steps: The number of local steps.
        batch: The batch size.
        timed: How often a round is timed; the fastest time counts.
        most: The largest cohort that is timed. The time of larger cohorts is taken to grow in proportion to their size.
    """

    cohorts: tuple[int, ...]
    steps: int
    batch: int
    timed: int
    most: int


class Hours(NamedTuple):
    """Hold how many hours the local steps of one experiment take.

    Attributes:
        runs: The number of runs whose steps were timed.
        one_by_one: The hours of these runs if clients are trained one after the other.
        vectorised: The hours of these runs if all clients of a round are trained in one program.
        missing: The number of runs whose steps were not timed.
    """

    runs: int = 0
    one_by_one: float = 0.0
    vectorised: float = 0.0
    missing: int = 0


def made(clients: int, n: int, shape: Sequence[int], classes: int, masks: bool = False) -> list[Samples]:
    """Make ``n`` random samples for each client: uint8 images of shape (n, ``*shape``) with labels.

    If ``masks`` is True, every pixel of an image has a label of its own.
    """
    draw = torch.Generator().manual_seed(0)
    targets = (n, *shape[1:]) if masks else (n,)
    return [
        Samples(torch.randint(0, 256, (n, *shape), generator=draw, dtype=torch.uint8), torch.randint(0, classes, targets, generator=draw))
        for _ in range(clients)
    ]


def one_round(
    engine: str, model: nn.Module, method: Method, settings: LocalTraining, samples: Sequence[Samples], device: torch.device
) -> list[Reply]:
    """Train all clients for one round with ``model``, a converted model on the CPU; return their replies."""
    return prepared(engine, model, method, settings, samples, device)()


def prepared(
    engine: str, model: nn.Module, method: Method, settings: LocalTraining, samples: Sequence[Samples], device: torch.device
) -> Callable[[], list[Reply]]:
    """Build the network of every client; return a function that trains all clients for one round and returns their replies.

    So the time to build the networks can be left out of a measurement.
    """
    clients = range(len(samples))
    home = device if engine == SEQUENTIAL else torch.device("cpu")
    rounds = [alone(copy.deepcopy(model).to(home), method, settings, 0.01) for _ in clients]
    if engine == SEQUENTIAL:
        return lambda: [client_round(round, SampleSource(samples[i], 0, i))[0] for i, round in zip(clients, rounds, strict=True)]
    members = [Member(round, SampleSource(own, 0, i)) for i, round, own in zip(clients, rounds, samples, strict=True)]
    return lambda: [reply for reply, _ in client_rounds(members, AsOneProgram(device))]


def timed(prepare: Callable[[], Callable[[], object]], times: int, device: torch.device) -> float:
    """Return the seconds of the fastest of ``times`` calls of a function, after one call to warm up.

    On the CPU the seconds are processor time, which other programs hardly change.

    Args:
        prepare: Returns the function to time. It is called before each of the calls, and is not timed itself.
        times: The number of calls.
        device: The device on which the function computes.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    found = []
    for _ in range(times + 1):
        call = prepare()
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - begin)
    return min(found[1:])


def steps_of(config: RunConfig, samples: int) -> int:
    """Return the number of local steps of a client per round.

    Args:
        config: The run.
        samples: The number of training samples of a client, as a mean over the clients.
    """
    return config.local_steps or config.local_epochs * max(1, -(-samples // config.batch_size))


def paper_hours(device: torch.device, size: Size, only: Callable[[RunConfig], bool], until: float) -> dict[str, Hours]:
    """Estimate the hours of the local steps of every experiment in its variant ``paper``.

    Steps are timed once for each combination of data set, network, method, batch size and cohort size, and multiplied by
    the number of steps in the runs.

    Args:
        device: The device of the training.
        size: How much is timed.
        only: Returns whether a run is counted.
        until: The value of ``time.monotonic()`` after which no further combination is timed. Runs with a combination that
            was not timed are counted as missing.

    Returns:
        Experiment -> its hours.
    """
    spent: dict[tuple[object, ...], list[float]] = {}
    hours: dict[str, Hours] = defaultdict(Hours)
    for file in sorted(EXPERIMENTS.glob("0*.toml")):
        if "program" in file.read_text().split("[run]")[0]:
            continue
        for cell in read(file, PAPER).cells(Path("none")):
            config = cell.config
            if cell.centralised or config.dataset not in DATA or not only(config):
                continue
            cohort = max(1, round(config.clients * config.fraction))
            steps = steps_of(config, DATA[config.dataset][3] // config.clients)
            key = (config.dataset, config.model, config.method, config.batch_size, cohort)
            total = hours[file.stem]
            if key not in spent and time.monotonic() > until:
                hours[file.stem] = total._replace(missing=total.missing + 1)
                continue
            if key not in spent:
                spent[key] = timed_steps(config, min(cohort, size.most), device, size)
                console.print(*key, *(f"{value:.3f}" for value in spent[key]))
            scale = steps * config.rounds * (cohort / min(cohort, size.most)) / 3600
            one, together = spent[key]
            hours[file.stem] = Hours(total.runs + 1, total.one_by_one + one * scale, total.vectorised + together * scale, total.missing)
    return hours


def timed_steps(
    config: RunConfig,
    cohort: int,
    device: torch.device,
    size: Size,
    data: tuple[int, int, int, int] | None = None,
    engines: Sequence[str] = ENGINES,
) -> list[float]:
    """Return the seconds of one local step of ``cohort`` clients, one number for each of ``engines``.

    The fixed cost of a round is not counted: the time of a round with one step is subtracted from that of a round
    with more. If the clients cannot be trained in one vectorised program, the time of training one by one stands for
    both.

    Args:
        config: The run.
        cohort: The number of clients.
        device: The device of the training.
        size: How much is timed.
        data: The numbers of classes, channels, pixels per side and samples of the data set; None: those in ``DATA``.
        engines: The engines that are timed.
    """
    classes, channels, side, _ = data or DATA[config.dataset]
    side = config.image_size or side
    method = config.build_method()
    model = convert(build(config.model, classes=classes, channels=channels, image_size=side, seed=0, stem=config.model_stem), method)
    samples = made(cohort, config.batch_size, (channels, side, side), classes, masks=config.dataset == "cityscapes")
    settings = replace(config.local_training(), steps=1, epochs=0, augment="none", maintain="reset", update="weights")

    def spent(engine: str, steps: int) -> float:
        return timed(partial(prepared, engine, model, method, replace(settings, steps=steps), samples, device), size.timed, device)

    found: list[float] = []
    for engine in engines:
        try:
            found.append(max(spent(engine, 1 + size.steps) - spent(engine, 1), 0.0) / size.steps)
        except CannotVectorise as reason:
            console.print(f"  {config.model}, {config.method}: {reason}")
            found.append(found[0])
    return found


def write_hours(file: Path, device: str, found: Mapping[str, Hours]) -> None:
    """Write the hours of each experiment with the faster engine to a JSON file, which ``fl-bn experiments evidence`` reads.

    Args:
        file: The file.
        device: The name of the GPU.
        found: Experiment -> its hours.
    """
    said = {"device": device, "hours": {name: round(min(of.one_by_one, of.vectorised), 2) for name, of in found.items()}}
    file.write_text(json.dumps(said, indent=1) + "\n")
    console.print(f"written: {file}")
