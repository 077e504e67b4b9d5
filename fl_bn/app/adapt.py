"""Adapt the model of a finished run to a client that the run did not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_bn.app import assembly
from fl_bn.app.assembly import OwnData
from fl_bn.app.config import SITES, ConfigError, RunConfig
from fl_bn.app.former import values_of
from fl_bn.app.usage import Usage
from fl_bn.bn.derived import plain_names
from fl_bn.bn.roles import Role
from fl_bn.data.dataset import named
from fl_bn.data.record import TEST
from fl_bn.data.subsets import only_domain
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.recalibration import HOW, TEST_BATCH, Adaptation, Known, with_batch_statistics
from fl_bn.support import durable
from fl_bn.support.names import expected
from fl_bn.task import CLASSIFICATION, MetricState, Task

# files and a folder in the folder of a run
MODEL, CLIENTS, AVERAGE = "model.safetensors", "clients", "unseen-client.safetensors"
TABLE = "adaptation.csv"  # of an adaptation


@dataclass(frozen=True)
class Newcomer:
    """Hold the data of the new client.

    Attributes:
        x: The training inputs, of shape (N, ...), without labels. They give the
            statistics.
        seen: Whether the run was trained on the domain of the client.
    """

    name: str
    x: Tensor
    test: Samples
    seen: bool = False

    def drawn(self, samples: int, seed: int) -> Newcomer:
        """Return the client with ``samples`` random training inputs, and shuffled test samples.

        0, or more than there are: all. Files of test samples are often sorted, and
        their order makes the batches of the way ``test-batch``.
        """
        rng = np.random.default_rng(np.random.SeedSequence([0xADA97, seed]))
        order = torch.from_numpy(rng.permutation(len(self.test)))
        chosen = torch.from_numpy(np.sort(rng.permutation(len(self.x))[: samples or None]))
        return replace(self, x=self.x[chosen], test=Samples(self.test.x[order], self.test.y[order]))


@dataclass(frozen=True)
class Outcome:
    """Hold the result of one way of adapting (``how``).

    Attributes:
        before: The metrics before, on the new client's test samples; None: the run
            has no such model.
        after: The metrics of the adapted model, on the same samples.
        note: A remark for the table; empty: none.
    """

    how: str
    before: MetricState | None
    after: MetricState
    model: nn.Module
    note: str = ""


def read_run(folder: Path) -> Adaptation:
    """Read the model of a finished run, and the models of its clients if there are any.

    Raises:
        ConfigError: ``folder`` is not the folder of a run, has no model, or has a
            damaged file.
        NotAdaptable: The model cannot be adapted, as ``Adaptation`` says.
    """
    config = Usage().config(values_of(folder))
    method, network = config.build_method(), assembly.source_model(config)
    files = sorted((folder / CLIENTS).glob("client-*.safetensors"), key=lambda file: (len(file.name), file.name)) if method.personal else []
    own = {plain: name for name, plain in plain_names(network).items()}  # names in files lack the prefixes of wrappers (torch.compile)

    def tensors(file: Path) -> dict[str, Tensor]:
        try:
            return {own.get(name, name): tensor for name, tensor in load_file(file).items()}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read ({error}): expected the folder of a finished run, with whole files") from error

    clients = {file.stem.replace("-", " "): tensors(file) for file in files}
    average = tensors(folder / AVERAGE) if method.personal and (folder / AVERAGE).exists() else {}
    made = Adaptation(network, method, Known(tensors(folder / MODEL), clients, average))
    if not (clients or average or method.shares(Role.AFFINE)):
        raise ConfigError(
            f"{folder} has neither {CLIENTS}/ nor {AVERAGE}, and with {config.method} scale and shift of BatchNorm stay at the clients: "
            "set unseen-client=true in the run"
        )
    return made


def newcomer(config: RunConfig, domain: str = "", data: str = "") -> Newcomer:
    """Load the data of the new client: a ``domain`` of the run's data, or other ``data``.

    Without both, it is the domain that the run held out.

    Raises:
        ConfigError: There are two sources of data or none, or the data do not suit
            the model.
        DataNotFound: A file of the data is missing.
    """
    name = domain or config.hold_out
    if (data and domain) or not (data or name):
        raise ConfigError("expected one source of the client's data: --domain, a domain of the run's data, or --data, data of its own")
    as_tested = replace(config, validation_share=0.0)  # the client's own test samples, whatever the run was tested on
    if data:
        own = OwnData(*named(data))
        brought = assembly.site_dataset(as_tested, own)
        return Newcomer(Path(own.path).stem or data, brought.x_train, Samples(brought.x_test, brought.y_test))
    if config.dataset == SITES or config.changes.split != TEST:
        raise ConfigError(f"the run's data have no test samples of {name!r} on this machine: give --data")
    part = only_domain(assembly.dataset(replace(as_tested, hold_out="")), name)
    return Newcomer(name, part.x_train, Samples(part.x_test, part.y_test), seen=name != config.hold_out)


def ways(run: Adaptation, text: str) -> list[str]:
    """Return the ways of adapting in ``text``, separated by commas; ``all`` names all that fit.

    If a way is unknown, or the run does not allow it, ``ConfigError`` is raised.
    """
    if text.strip() == "all":
        return [how for how in HOW if not run.refusal(how)]
    chosen = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for how in chosen:
        if reason := expected("--how", how, ("all", *HOW)) if how not in HOW else run.refusal(how):
            raise ConfigError(reason)
    return chosen


def adapt(
    run: Adaptation, client: Newcomer, how: Sequence[str], batch_size: int, device: torch.device, task: Task = CLASSIFICATION
) -> list[Outcome]:
    """Adapt the model of a run to a new client in each way, and evaluate it before and after.

    The way ``test-batch`` has batches of ``batch_size`` test samples, at least 2.
    ``NotAdaptable``: the model cannot be adapted in one of the ways.
    """
    plain = run.before()
    before = None if plain is None else evaluate(plain.to(device), client.test, task=task)
    outcomes = []
    for name in how:
        model, note = run.adapt(name, client.x), ""
        if name == TEST_BATCH:
            after, note = evaluate(with_batch_statistics(model).to(device), client.test, batch_size, task), f"batches of {batch_size}"
        else:
            after = evaluate(model.to(device), client.test, task=task)
        outcomes.append(Outcome(name, before, after, model.cpu(), note))
    return outcomes


def write(outcomes: Sequence[Outcome], client: Newcomer, config: RunConfig, folder: Path) -> None:
    """Write ``adaptation.csv``, and ``model-HOW.safetensors`` for each way of adapting."""
    metric = assembly.task(config, client.test.y).metric
    name = metric.replace("-", "_")
    rows: list[list[object]] = [["how", f"{name}_before", name, "loss_before", "loss", "statistics_samples", "test_samples", "note"]]
    for outcome in outcomes:
        before, after = outcome.before, outcome.after
        figures = ("" if before is None else before[metric], after[metric], "" if before is None else before.loss, after.loss)
        used = 0 if outcome.how == TEST_BATCH else len(client.x)
        rows.append([outcome.how, *figures, used, len(client.test), outcome.note])
    for outcome in outcomes:
        metadata = {"method": config.method, "model": config.model, "how": outcome.how, "client": client.name}
        names = plain_names(outcome.model)
        state = {names[name]: tensor for name, tensor in outcome.model.state_dict().items()}
        durable.save_network(folder / f"model-{outcome.how}.safetensors", state, metadata)
    durable.write(folder / TABLE, durable.as_csv(rows).encode(), mode=0o666)
