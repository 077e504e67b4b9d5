"""Every engine on the device at hand: equal numbers, equal bits, rounds per second; and the hours that the papers' experiments take.

    python benchmarks/gpu.py                                # the first GPU, or without one the CPU, where it runs small
    python benchmarks/gpu.py --device cpu --quick           # smaller still: to see that it runs

A round is the clients' half: networks loaded, local steps, replies on the CPU. Made data of the real shapes; float64 for the difference
between engines, float32 for all else. The hours are those of the local steps alone, a few of which are timed and multiplied. On a GPU they
are written to experiments/results/gpu.json, too, for the column of `fl-bn experiments evidence`.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.training import alone, client_round
from fl_bn.federation.values import Reply
from fl_bn.federation.vectorised import ENGINES, SEQUENTIAL, CannotVectorise, vectorised_round
from fl_bn.methods import METHODS, Method
from fl_bn.models import build
from fl_bn.run.config import RunConfig
from fl_bn.sweep.evidence import HOURS, RESULTS
from fl_bn.sweep.file import PAPER, read

T = TypeVar("T")
HERE = Path(__file__).parent
NETWORKS = {"digits-cnn-small": 16, "simple-cnn": 32, "resnet20": 32}  # and the side of their images
COMPARED = ("fedavg", "gn", "hbn", "fbn")
DATA = {  # classes, channels, side and samples of the papers' data; masks where classes are of pixels
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
    """How much is done. ``steps``: local steps; ``timed``: rounds; ``most``: clients of a paper's cohort that are timed."""

    cohorts: tuple[int, ...]
    steps: int
    batch: int
    timed: int
    most: int


class Hours(NamedTuple):
    """Of the local steps of one experiment, all runs that ``runs`` counts, by engine."""

    runs: int = 0
    one_by_one: float = 0.0
    vectorised: float = 0.0


SIZES = {"cuda": Size((10, 50), 10, 32, 3, 100), "cpu": Size((4,), 3, 8, 2, 3), "quick": Size((2,), 1, 4, 1, 1)}


def made(clients: int, n: int, shape: Sequence[int], classes: int, masks: bool = False) -> list[Samples]:
    draw = torch.Generator().manual_seed(0)
    targets = (n, *shape[1:]) if masks else (n,)
    return [
        Samples(torch.randint(0, 256, (n, *shape), generator=draw, dtype=torch.uint8), torch.randint(0, classes, targets, generator=draw))
        for _ in range(clients)
    ]


def one_round(
    engine: str, model: nn.Module, method: Method, settings: LocalTraining, samples: Sequence[Samples], device: torch.device
) -> list[Reply]:
    """``model``: converted, on the CPU."""
    clients = range(len(samples))
    if engine == SEQUENTIAL:
        rounds = [alone(copy.deepcopy(model).to(device), method, settings, 0.01) for _ in clients]  # copies cost either engine the same
        return [client_round(round, samples[i], 0, i)[0] for i, round in zip(clients, rounds, strict=True)]
    rounds = [alone(copy.deepcopy(model), method, settings, 0.01) for _ in clients]
    return [reply for reply, _ in vectorised_round(rounds, samples, 0, clients, device=device)]


def timed(call: Callable[[], T], times: int, device: torch.device) -> tuple[float, list[T]]:
    """Seconds of the shortest of ``times`` calls, after one that warms up; and what all of them returned.

    On the CPU of processor time, which other programs do not change much.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    found, results = [], []
    for _ in range(times + 1):
        begin = clock()
        results.append(call())
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - begin)
    return min(found[1:]), results


def numbers(replies: Sequence[Reply]) -> Iterator[Tensor]:
    for reply in replies:
        for _, section in sorted(reply.sections.items()):
            yield from (tensor for _, tensor in sorted(section.items()))


def difference(a: Sequence[Reply], b: Sequence[Reply]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(numbers(a), numbers(b), strict=True))


def compare(device: torch.device, size: Size) -> list[str]:
    """Rows of the first table."""
    rows = []
    for network, side in NETWORKS.items():
        for cohort in size.cohorts:
            samples = made(cohort, size.steps * size.batch, (3, side, side), 10)
            for name in COMPARED:
                method, settings = METHODS[name](), LocalTraining(size.batch, steps=size.steps, momentum=0.9)
                model = convert(build(network, classes=10, image_size=side, seed=0), method)
                wide = copy.deepcopy(model).double()
                exact = [one_round(engine, wide, method, settings, samples, device) for engine in ENGINES]
                calls = [
                    timed(partial(one_round, engine, model, method, settings, samples, device), size.timed, device) for engine in ENGINES
                ]
                same = ["yes" if all(difference(results[0], other) == 0 for other in results[1:]) else "no" for _, results in calls]
                spent, plain = [spent for spent, _ in calls], [results[0] for _, results in calls]
                rates = [f"{1 / s:.2f}" for s in spent]
                apart = [f"{difference(*pair):.0e}" for pair in (exact, plain)]
                rows.append([network, name, f"{cohort} x {size.batch}", *rates, f"{spent[0] / spent[1]:.2f}", *apart, *same])
                console.print(*rows[-1])
    return ["| " + " | ".join(row) + " |" for row in rows]


def steps_of(config: RunConfig, samples: int) -> int:
    """Local steps of a client with as many samples as the mean client."""
    return config.local_steps or config.local_epochs * max(1, -(-samples // config.batch_size))


def papers(device: torch.device, size: Size, only: Callable[[RunConfig], bool]) -> dict[str, Hours]:
    """By experiment: every distinct round of ``--variant paper``, timed once per engine and multiplied."""
    spent: dict[tuple[object, ...], list[float]] = {}
    hours: dict[str, Hours] = defaultdict(Hours)
    for file in sorted((HERE.parent / "fl_bn" / "experiments").glob("0*.toml")):
        if "program" in file.read_text().split("[run]")[0]:
            continue
        for cell in read(file, PAPER).cells(Path("none")):
            config = cell.config
            if cell.centralised or config.dataset not in DATA or not only(config):
                continue
            cohort = max(1, round(config.clients * config.fraction))
            steps = steps_of(config, DATA[config.dataset][3] // config.clients)
            key = (config.dataset, config.model, config.method, config.batch_size, cohort)
            if key not in spent:
                spent[key] = timed_steps(config, min(cohort, size.most), device, size)
                console.print(*key, *(f"{value:.3f}" for value in spent[key]))
            scale = steps * config.rounds * (cohort / min(cohort, size.most)) / 3600
            total, (one, together) = hours[file.stem], spent[key]
            hours[file.stem] = Hours(total.runs + 1, total.one_by_one + one * scale, total.vectorised + together * scale)
    return hours


def timed_steps(config: RunConfig, cohort: int, device: torch.device, size: Size) -> list[float]:
    """Seconds of one local step of ``cohort`` clients, by engine; where it cannot be one program, those of one by one.

    What a round costs beside its steps is taken off: the time of one step is subtracted.
    """
    classes, channels, side, _ = DATA[config.dataset]
    side = config.image_size or side
    method = config.build_method()
    model = convert(build(config.model, classes=classes, channels=channels, image_size=side, seed=0, stem=config.model_stem), method)
    steps = min(size.steps, 5)
    samples = made(cohort, config.batch_size, (channels, side, side), classes, masks=config.dataset == "cityscapes")
    settings = replace(config.local_training(), steps=1, epochs=0, augment="none", maintain="reset", update="weights")

    def spent(engine: str, steps: int) -> float:
        call = partial(one_round, engine, model, method, replace(settings, steps=steps), samples, device)
        return timed(call, size.timed, device)[0]

    found: list[float] = []
    for engine in ENGINES:
        try:
            found.append(max(spent(engine, 1 + steps) - spent(engine, 1), 0.0) / steps)
        except CannotVectorise as reason:
            console.print(f"  {config.model}, {config.method}: {reason}")
            found.append(found[0])
    return found


def main(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="as small as it gets, without the papers' experiments")] = False,
    results: Annotated[Path, typer.Option(help="where the tables are written")] = HERE / "results" / "gpu.md",
    hours: Annotated[Path, typer.Option(help="where the hours are written, on a GPU")] = HERE.parent / "experiments" / RESULTS / HOURS,
) -> None:
    on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    size = SIZES["quick" if quick else on.type]
    if on.type == "cpu":
        torch.set_num_threads(1)
    name = (
        torch.cuda.get_device_name(on)
        if on.type == "cuda"
        else f"{os.cpu_count()} cores of {platform.machine()}, processor time of one thread"
    )
    lines = [f"{name}, torch {torch.__version__}; {size.steps} local steps, {size.timed} rounds timed, the best counts.", ""]
    if on.type == "cpu":
        lines += ["**No GPU was at hand.** Everything is shrunk for a CPU, where the engine saves little: no figure here is a GPU's.", ""]
    lines += [
        "| network | method | clients x batch | one by one (rounds/s) | vectorised (rounds/s) | ratio | difference, float64 | float32 "
        "| same bits again, one by one | vectorised |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *compare(on, size),
    ]
    write(results, lines)  # the second table takes longer
    if not quick:
        small = on.type == "cpu"
        lines += ["", "Hours of the local steps of the papers' experiments, all seeds:", ""]
        if small:
            lines += [f"Only those on CIFAR-10 with Simple-CNN; {size.most} clients timed and multiplied, since there is no GPU.", ""]
        lines += ["| experiment | runs | one by one | vectorised |", "|---|---|---|---|"]
        found = papers(on, size, lambda config: not small or (config.dataset, config.model) == ("cifar10", "simple-cnn"))
        lines += [f"| {name} | {of.runs} | {of.one_by_one:.1f} | {of.vectorised:.1f} |" for name, of in found.items()]
        write(results, lines)
        if not small:  # those of a CPU are no GPU's
            write_hours(hours, name, found)


def write_hours(file: Path, device: str, found: Mapping[str, Hours]) -> None:
    """The faster engine's, for ``fl-bn experiments evidence``."""
    said = {"device": device, "hours": {name: round(min(of.one_by_one, of.vectorised), 2) for name, of in found.items()}}
    file.write_text(json.dumps(said, indent=1) + "\n")
    console.print(f"written: {file}")


def write(results: Path, lines: Sequence[str]) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("\n".join(lines) + "\n")
    console.print(f"written: {results}")


if __name__ == "__main__":
    typer.run(main)
