"""Declare the general run-config keys, which do not belong to one method, objective or server optimiser.

For each option of the classes in ``VALUES``, which declare it, there is a line with
the attribute and its type. The lines have the order of docs/config.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from fl_bn.app import keys
from fl_bn.app import used as when
from fl_bn.bn.roles import BUFFER_ROLES, parse_buffer_roles
from fl_bn.data.dataset import DATASETS
from fl_bn.data.partition import KINDS
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import SHARES_WEIGHTS, Defence
from fl_bn.federation.arguments import FederationSpec
from fl_bn.federation.engines.workers import MOST_THREADS
from fl_bn.federation.network import AUTO, MEMORY_FORMATS
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.settings import LocalTraining, Schedule
from fl_bn.methods import METHODS
from fl_bn.models import MODELS
from fl_bn.objectives import OBJECTIVES
from fl_bn.options import Option, declared, option, options_by_key, own_options, same_key
from fl_bn.secure.privacy import Privacy
from fl_bn.secure.settings import SecureAggregation
from fl_bn.support.names import names_of
from fl_bn.task import AUTO as AUTO_TASK
from fl_bn.task import TASKS

_MADE = (LocalTraining, Schedule, ServerPolicy, ExchangeSettings, Defence, SecureAggregation, Privacy)
VALUES: dict[type[Any], type[Any]] = {kind: kind for kind in _MADE}
"""Class of settings -> the class that a run config uses in its place, whose options are run-config keys.

To add options to local training, derive ``Mine`` from the present entry and set
``VALUES[LocalTraining] = Mine``.
"""


DIGEST = re.compile("([0-9a-f]{16})?")

own_data = partial(option, used=when.OWN_DATA)
of_sites = partial(option, used=when.SITES_DATA)


@dataclass(frozen=True)
class RunKeys:
    """Declare the keys as fields, in the order of docs/config.md, for ``RunConfig``."""

    method: str = option("fbn", "how normalisation is federated", METHODS)
    freeze_after: int = option(
        -1, "last round before the statistics freeze; -1: as the method says", "-1 or >= 0", used=when.FREEZES_EARLY_ENOUGH
    )
    # model and data
    model: str = option("digits-cnn-small", f"{', '.join(MODELS)}, torchvision's, or package.module:function", "see fl_bn.models")
    model_weights: str = option("", "file of weights (.pt, .pth, .safetensors); a head of another size stays new", "path")
    buffers: str = option("", f"roles ({', '.join(BUFFER_ROLES)}) of the network's own buffers", "NAME=ROLE,...", parse_buffer_roles)
    task: str = option(
        AUTO_TASK,
        "what the network learns, which decides loss and metrics; auto: classification, or segmentation where the labels are masks",
        f"{', '.join((AUTO_TASK, *TASKS))}, package.module:function",
        lambda name: name in (AUTO_TASK, *TASKS) or ":" in name,
    )
    dataset: str = option("digits", f"{', '.join(DATASETS)}; package.module:function; sites: each client's own", "see fl_bn.data")
    classes: int = of_sites(0, "dataset=sites: number of classes (of other tasks: values, or labels)", ">= 0")
    channels: int = of_sites(0, "dataset=sites: channels of the images", ">= 0")
    columns_digest: str = of_sites(
        "", "digest of the sites' columns.toml", "16 hexadecimal digits", lambda text: bool(DIGEST.fullmatch(text))
    )
    data_path: str = own_data("", "folder or files of the data, separated by commas (each is a client: see partition)", "path")
    image_size: int = option(0, "side in pixels to which images are resized; 0: the data set's own size", "0..4096")
    hold_out: str = option("", "a domain that the run is trained and tested without, for fl-bn adapt", "a domain's name")
    augment: str = declared(LocalTraining, "augment")
    partition: str = own_data(
        AUTO_TASK, "how data are split; auto: natural for several files or folders, else classes", (AUTO_TASK, *KINDS)
    )
    partition_parameter: float = option(1.0, "classes per client, concentration, or share drawn at random", ">= 0", used=when.PARAMETER)
    test_on: str = option("own", "test clients of domains on their own, or on all test data", ("own", "all"), used=when.OWN_DOMAINS)
    validation_share: float = option(0.0, "share of the training samples to test on in place of the test data; 0: none", "0..0.9")
    unseen_client: bool = declared(ServerPolicy, "unseen")
    calibrate: int = declared(ServerPolicy, "calibrate")
    # federation
    clients: int = declared(ServerPolicy, "clients")
    clients_at_start: int = declared(ServerPolicy, "at_start")
    client_nodes: str = declared(ServerPolicy, "nodes")
    client_names: str = declared(ServerPolicy, "names")
    fraction: float = declared(ServerPolicy, "fraction")
    rounds: int = option(100, "training rounds; 0, with calibrate: only measure the statistics of model-weights", ">= 0")
    client_weights: str = declared(LocalTraining, "weigh_all")
    min_replies: float = declared(ServerPolicy, "min_replies")
    min_cohort: int = declared(ServerPolicy, "min_cohort")
    checkpoint_every: int = declared(ServerPolicy, "checkpoint_every")
    resume: str = option("", "the run to continue: latest (the newest in output that is not finished), or its name", "latest or a name")
    run_signature: str = option("", "the signature that `fl-bn submit` makes", "made by `fl-bn submit`, or empty")
    # layer-wise exchange (fedtan, fedtan2, fedavg-alg2; recalibration)
    exchange: str = declared(ExchangeSettings, "carrier")
    # the defence against Byzantine clients
    declared_byzantine: int = declared(Defence, "f")
    # secure aggregation, and differential privacy
    secure_aggregation: bool = option(False, "the server sees only sums over clients (SecAgg+), save for FedTAN's exchange")
    secagg_shares: int = declared(SecureAggregation, "shares")
    dp_noise: float = declared(Privacy, "noise")
    dp_clip: float = declared(Privacy, "clip")
    # local training
    local_epochs: int = declared(LocalTraining, "epochs")
    local_steps: int = declared(LocalTraining, "steps")
    batch_size: int = declared(LocalTraining, "batch_size")
    update: str = declared(LocalTraining, "update")
    optimizer: str = declared(LocalTraining, "optimizer")
    learning_rate: float = declared(Schedule, "base")
    learning_rate_schedule: str = declared(Schedule, "kind")
    learning_rate_milestones: str = declared(Schedule, "milestones")
    momentum: float = declared(LocalTraining, "momentum")
    weight_decay: float = declared(LocalTraining, "weight_decay")
    clip: str = declared(LocalTraining, "clip")
    clip_limit: float = declared(LocalTraining, "clip_limit")
    # local objective
    objective: str = option("none", "what clients minimise beside the loss, or how they correct its gradient", OBJECTIVES)
    # server
    server_optimizer: str = option("fedavg", "the optimiser of all but statistics", SERVER_OPTIMIZERS, used=SHARES_WEIGHTS)
    # evaluation, machine and output
    evaluate_every: int = declared(ServerPolicy, "evaluate_every")
    evaluate_clients: int = declared(ServerPolicy, "evaluate_clients")
    seed: int = declared(ServerPolicy, "seed")
    device: str = option("auto", "where clients train; auto: a GPU if there is one", "auto, cpu, cuda or cuda:0 ...", keys.known_device)
    deterministic: bool = option(True, "on a GPU, use kernels whose order of sums is fixed")
    memory_format: str = option(AUTO, "layout of networks; auto: channels-last for 2-D convolutions on a CPU", (AUTO, *MEMORY_FORMATS))
    engine: str = declared(FederationSpec, "engine")
    threads: int = option(1, "CPU threads per process", f"1..{MOST_THREADS}")
    workers: int = declared(FederationSpec, "workers")
    output: str = option("runs", "folder in which each run makes a folder of its own; empty: write nothing", "path")
    name: str = option("", "the run folder's name; empty: time, method, data and seed", "a file name", used=when.WRITES)
    pictures: bool = option(True, "draw pictures at the end")
    early_stop: int = option(0, "evaluations in a row without a new best metric after which the run ends; 0: it never does", ">= 0")
    keep_best: bool = option(False, "keep the model of the best evaluation, as best.safetensors", used=when.WRITES & SHARES_WEIGHTS)
    setup: str = option(
        "",
        "class of your own (fl_bn.app.setup.Setup) that changes the run where no key does, and has keys of its own",
        "package.module:Class or empty",
        lambda name: not name or ":" in name,
    )
    callbacks: str = option(
        "",
        "callbacks (fl_bn.Callback), such as trackers: they are called after every round, after every evaluation and at the end; each name "
        "is a class or a function that is called with the run config and the run's folder",
        "package.module:Class, separated by commas",
        lambda names: all(":" in name for name in names_of(names)),
    )


def general_options() -> Mapping[str, Option]:
    """Return the options of ``RunKeys`` and of ``VALUES`` by key, in the order of docs/config.md.

    One without a line in ``RunKeys`` follows the one before it in its class.
    ``ValueError``: a class in ``VALUES`` does not derive from the one that it
    replaces, or two declarations of a key differ.
    """
    return _general_options(tuple(VALUES.items()))


@lru_cache(maxsize=8)
def _general_options(
    values: tuple[tuple[type[Any], type[Any]], ...],
) -> Mapping[str, Option]:  # cached, since it is needed for every run config
    options = {spec.name: spec for spec in own_options(RunKeys).values()}
    order = list(options)
    for base, kind in values:
        if not issubclass(kind, base):
            raise ValueError(f"VALUES[{base.__name__}] must be derived from {base.__name__}, but got {kind.__name__}")
        before = order[-1]
        for key, spec in options_by_key(kind).items():
            same_key(options.setdefault(key, spec), spec)
            if key not in order:
                order.insert(order.index(before) + 1, key)
            before = key
    return {key: options[key] for key in order}
