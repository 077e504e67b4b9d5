"""A finished run's model for a client that the run did not have: its data, before and after, in numbers and as files.

See ``training.adaptation`` for what the ways of adapting are. The client's training samples serve without their labels, for statistics;
its test samples measure the metrics of the run's task.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fl_bn.data.dataset import DATASETS
from fl_bn.data.domains import only_domain
from fl_bn.derived import plain_names
from fl_bn.federation.adaptation import HOW, NEAREST, TEST_BATCH, Adaptation, Known, with_batch_statistics
from fl_bn.federation.local import Samples, evaluate
from fl_bn.roles import Role
from fl_bn.run import assembly
from fl_bn.run.assembly import OwnData
from fl_bn.run.checkpoints import CONFIG
from fl_bn.run.config import SITES, ConfigError, RunConfig
from fl_bn.run.pictures import draw_bars
from fl_bn.run.usage import Usage
from fl_bn.support import durable
from fl_bn.support.names import expected
from fl_bn.task import CLASSIFICATION, MetricState, Task

MODEL, CLIENTS, TOLD = "model.safetensors", "clients", "unseen-client.safetensors"


@dataclass(frozen=True)
class Newcomer:
    """The new client: ``x`` (N, ...) without labels, for statistics, and ``test``. ``seen``: the run was trained on its domain, too."""

    name: str
    x: Tensor
    test: Samples
    seen: bool = False

    def drawn(self, samples: int, seed: int) -> Newcomer:
        """With ``samples`` of ``x``, drawn at random (0, or more than there are: all), and the test samples in random order.

        The order is what a batch of test-batch is made of, and files of test samples are often sorted.
        """
        rng = np.random.default_rng(np.random.SeedSequence([0xADA97, seed]))
        order = torch.from_numpy(rng.permutation(len(self.test)))
        chosen = torch.from_numpy(np.sort(rng.permutation(len(self.x))[: samples or None]))
        return replace(self, x=self.x[chosen], test=Samples(self.test.x[order], self.test.y[order]))


@dataclass(frozen=True)
class Outcome:
    """One way of adapting, and the evaluations on the newcomer's test samples. ``before``: None where nobody can say."""

    how: str
    before: MetricState | None
    after: MetricState
    model: nn.Module
    note: str = ""


def read_config(folder: Path) -> RunConfig:
    """The run's config. Raises ConfigError where ``folder`` is no run's."""
    try:
        return Usage().config(tomllib.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} is no run's folder: it has no {CONFIG} (give the folder that the run's log calls 'results')"
        ) from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{folder / CONFIG} cannot be read: {error}") from error


def read_run(folder: Path) -> Adaptation:
    """What the run in ``folder`` can do for new clients.

    Raises:
        ConfigError: it is no run's folder, has no model, or its clients keep tensors that are not at hand.
        NotAdaptable: see ``Adaptation``.
    """
    config = read_config(folder)
    method, network = config.build_method(), assembly.source_model(config)
    files = sorted((folder / CLIENTS).glob("client-*.safetensors"), key=lambda file: (len(file.name), file.name)) if method.personal else []
    own = {plain: name for name, plain in plain_names(network).items()}  # files have no prefixes of wrappers

    def tensors(file: Path) -> dict[str, Tensor]:
        return {own.get(name, name): tensor for name, tensor in _tensors(file).items()}

    clients = {file.stem.replace("-", " "): tensors(file) for file in files}
    told = tensors(folder / TOLD) if method.personal and (folder / TOLD).exists() else {}
    made = Adaptation(network, method, Known(tensors(folder / MODEL), clients, told))
    if not (clients or told or method.shares(Role.AFFINE)):
        raise ConfigError(
            f"{folder}: with {config.method} the affine stays at the clients, and neither their models ({CLIENTS}/client-0.safetensors "
            f"..., which a simulation writes) nor their average ({TOLD}) is there: without either there is nothing to adapt from"
        )
    return made


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {file}: a run writes it when it ends") from error
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file} is no safetensors file, or not a whole one: {error}") from error


def newcomer(config: RunConfig, domain: str = "", data: str = "") -> Newcomer:
    """The client that ``data`` names (npz:PATH, folder:PATH, another data set, or package.module:function), or a ``domain`` of the run's
    data; without either, the domain that the run held out.

    Raises:
        ConfigError: there is none, or its data do not suit the run's model.
    """
    if data and domain:
        raise ConfigError(f"the client is a domain of the run's data ({domain}) or has data of its own ({data}): give one of them")
    if data:
        kind, _, path = data.partition(":")
        own = OwnData(kind, path) if kind in DATASETS else OwnData(data)
        found = assembly.site_dataset(config, own)
        return Newcomer(Path(path).stem if kind in DATASETS and path else data, found.x_train, Samples(found.x_test, found.y_test))
    name = domain or config.hold_out
    if not name:
        raise ConfigError("which client? The run held no domain out: give --domain, of its data, or --data, with data of its own")
    if config.dataset == SITES:
        raise ConfigError(f"the run's data were the sites' own, so {name!r} names none here: give --data")
    try:
        found = only_domain(assembly.dataset(replace(config, hold_out="", validation_share=0.0)), name)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Newcomer(name, found.x_train, Samples(found.x_test, found.y_test), seen=name != config.hold_out)


def ways(run: Adaptation, text: str) -> list[str]:
    """The ways that ``text`` names, separated by commas; ``all``: those that the run allows.

    Raises:
        ConfigError: one is unknown, or cannot be taken here.
    """
    if text.strip() == "all":
        return [how for how in HOW if not run.refusal(how)]
    chosen = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for how in chosen:
        if how not in HOW:
            raise ConfigError(expected("--how", how, ("all", *HOW), ", or several separated by commas"))
        if reason := run.refusal(how):
            raise ConfigError(reason)
    return chosen


def adapt(
    run: Adaptation, client: Newcomer, how: Sequence[str], batch_size: int, device: torch.device, task: Task = CLASSIFICATION
) -> list[Outcome]:
    """Adapt in each of these ways, and evaluate before and after. ``batch_size``: of test-batch.

    Raises:
        NotAdaptable: see ``Adaptation.adapt``.
    """
    if TEST_BATCH in how and batch_size < 2:
        raise ConfigError(f"batch-size must be at least 2 (a batch of one has no variance), but got {batch_size}")
    plain = run.before()
    before = None if plain is None else evaluate(plain.to(device), client.test, task=task)
    outcomes = []
    for name in how:
        made = run.adapt(name, client.x)
        if name == TEST_BATCH:
            after = evaluate(with_batch_statistics(made.model).to(device), client.test, batch_size, task)
        else:
            after = evaluate(made.model.to(device), client.test, task=task)
        distances = sorted(made.distances.items(), key=lambda item: item[1])
        shown = ", ".join(f"{client} ({distance:.3g})" for client, distance in distances[:3])
        note = {NEAREST: f"nearest first: {shown}", TEST_BATCH: f"batches of {batch_size}"}.get(name, "")
        outcomes.append(Outcome(name, before, after, made.model.cpu(), note))
    return outcomes


def write(outcomes: Sequence[Outcome], client: Newcomer, config: RunConfig, folder: Path) -> None:
    """``adaptation.csv`` (a share as 0..1), ``adaptation.png``, and every model as ``model-HOW.safetensors``, in ``folder``."""
    task = assembly.task(config, client.test.y)
    metric, scale = task.metric, task.scale()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "adaptation.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        named = (f"{metric.replace('-', '_')}_before", metric.replace("-", "_"))
        writer.writerow(["how", *named, "loss_before", "loss", "statistics_samples", "test_samples", "note"])
        for outcome in outcomes:
            before, after = outcome.before, outcome.after
            figures = ("" if before is None else before[metric], after[metric], "" if before is None else before.loss, after.loss)
            used = 0 if outcome.how == TEST_BATCH else len(client.x)
            writer.writerow([outcome.how, *figures, used, len(client.test), outcome.note])
    for outcome in outcomes:
        metadata = {"method": config.method, "model": config.model, "how": outcome.how, "client": client.name}
        names = plain_names(outcome.model)
        state = {names[name]: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in outcome.model.state_dict().items()}
        durable.write(folder / f"model-{outcome.how}.safetensors", save(state, metadata), mode=0o666)
    bars = {outcome.how: {} if outcome.before is None else {"before": [scale * outcome.before[metric]]} for outcome in outcomes}
    for outcome in outcomes:
        bars[outcome.how]["after"] = [scale * outcome.after[metric]]
    draw_bars({f"{config.method}: {client.name}, {len(client.test)} test samples": bars}, folder / "adaptation.png", task)
