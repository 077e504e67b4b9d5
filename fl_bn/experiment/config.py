"""The run config: one frozen value, with every key's meaning, unit and range beside it.

The same keys, in kebab-case, stand in ``[tool.flwr.app.config]`` of pyproject.toml and can be overridden with
``flwr run . --run-config "rounds=10 method='hbn'"``; ``fl-bn run`` and ``fl-bn compare`` take them as options.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from fl_bn.data.partition import KINDS
from fl_bn.exchange.grpc.service import Certificates
from fl_bn.exchange.session import POLICIES
from fl_bn.exchange.settings import CARRIERS, ExchangeSettings
from fl_bn.experiment.keys import RULE_NAMES, Value, above, at_least, between, kebab, key, known_rule
from fl_bn.flower.population import round_half_up
from fl_bn.flower.rounds import Rounds
from fl_bn.methods import METHODS, Method, attacked, freeze
from fl_bn.methods.fedtan import SCHEDULES as FEDTAN_SCHEDULES
from fl_bn.robust.attacks import ATTACKS, ON
from fl_bn.training.aggregation import SERVER_OPTIMIZERS
from fl_bn.training.defence import Defence
from fl_bn.training.settings import OPTIMIZERS, SCHEDULES, UPDATES, LocalTraining, learning_rate

FREEZING = ("fixbn", "fedtan2")  # by default after half of the rounds
FEDTAN = ("fedtan", "fedtan2", "fedavg-alg2")


class ConfigError(ValueError):
    """A key of the run config is unknown, of the wrong type, or out of range."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run. Raises ConfigError for a value out of range."""

    # method
    method: str = key("fixbn", "how normalisation is federated", tuple(METHODS))
    freeze_after: int = key(
        -1, "last round before the statistics freeze, any method; -1: never (fixbn, fedtan2: half of the rounds)", ">= -1", at_least(-1)
    )
    groups: int = key(2, "gn: groups per layer", ">= 1", at_least(1))
    fbn_momentum: float = key(0.0, "fbn: weight of one batch in the running statistics; 0: each layer's own", "0..1", between(0, 1))
    hbn_lam: float = key(
        0.0, "hbn: weight of a round's pooled moments in the global statistics; 0: 1 if fraction is 1, else 0.01", "0..1", between(0, 1)
    )
    hbn_stat_samples: int = key(0, "hbn: samples of the statistics pass; 0: all of the client's", "0 or >= 2", lambda v: v == 0 or v >= 2)
    hbn_lower_layers: str = key("hybrid", "hbn: what lower layers normalise with in the statistics pass", ("shared", "hybrid"))
    fedtan_schedule: str = key(
        "merged", "fedtan and its kin: layer-wise exchanges per round of L layers: merged 2L, paper 3L; equal results", FEDTAN_SCHEDULES
    )
    # model and data
    model: str = key(
        "digits-cnn",
        "digits-cnn, simple-cnn, mlp, resnet20, a torchvision classifier, or package.module:function",
        "see fl_bn.models",
    )
    dataset: str = key("digits", "digits, digits-plain, cifar10, cifar100, mnist, svhn, usps, or npz (give data-path)", "see fl_bn.data")
    data_path: str = key("", "folder of a public data set, or npz files separated by commas (each a domain)", "path")
    image_size: int = key(0, "side of the images in pixels; 0: as they are", "0..4096", between(0, 4096))
    partition: str = key("classes", "how the training data are split over the clients", KINDS)
    partition_parameter: float = key(
        1.0, "classes: classes per client; dirichlet: concentration; similarity: fraction; else unused", ">= 0", at_least(0)
    )
    share_label_counts: bool = key(
        True, "clients tell the server their number of samples per class, for the picture labels.png", "true, false"
    )
    calibrate: int = key(0, "statistics-only exchanges before round 1", ">= 0", at_least(0))
    # federation
    clients: int = key(10, "clients in the population; in simulation equal to options.num-supernodes", ">= 1", at_least(1))
    fraction: float = key(1.0, "fraction of the clients that train in a round", "(0, 1]", lambda v: 0 < v <= 1)
    rounds: int = key(100, "training rounds", ">= 1", at_least(1))
    client_weights: str = key(
        "samples", "weight of a client in the average: the different samples it trained on this round, or equal", ("samples", "uniform")
    )
    min_replies: float = key(
        0.5, "fraction of a cohort's replies that must be usable, else the round changes nothing", "0..1", between(0, 1)
    )
    max_failed_rounds: int = key(3, "failed rounds in a row that stop the run", ">= 1", at_least(1))
    round_timeout: float = key(600.0, "deadline and time to live of every message, seconds", "> 0", above(0))
    wait_timeout: float = key(120.0, "how long the server waits for all clients before round 1, seconds", ">= 0", at_least(0))
    # layer-wise exchange (fedtan, fedtan2, fedavg-alg2)
    exchange: str = key(
        "auto",
        "how the layer-wise exchange is carried: grpc, replay (Flower messages, any cohort size, slow), local (fl-bn run); auto: local, "
        "else grpc if the cohort can run at once, else replay",
        CARRIERS,
    )
    exchange_policy: str = key(
        "abort", "for a client that dies or is late: abort fails the round for all, shrink goes on with weights over the others", POLICIES
    )
    exchange_timeout: float = key(30.0, "how long one exchange waits for the last client, seconds", "> 0", above(0))
    exchange_join_timeout: float = key(30.0, "how long the others wait for another client to join a round, seconds", "> 0", above(0))
    exchange_host: str = key("127.0.0.1", "grpc: the name by which clients reach the ServerApp's machine", "host name or address")
    exchange_bind: str = key("", "grpc: address to listen on; empty: loopback if exchange-host is, else all", "address")
    exchange_port: int = key(0, "grpc: port to listen on; 0: any free one", "0..65535", between(0, 65535))
    exchange_certificate: str = key("", "grpc: the service's certificate, PEM, valid for exchange-host; empty: plaintext", "path")
    exchange_key: str = key("", "grpc: its private key, PEM", "path")
    exchange_authority: str = key("", "grpc: the certificate authority's certificate, PEM; clients get it with their train message", "path")
    exchange_insecure: bool = key(False, "grpc: plaintext beyond this machine (where Flower is insecure, too)", "true, false")
    # Byzantine clients, and the defence against them
    byzantine: int = key(0, "clients that attack: the last ones; the training data are split over the others", ">= 0", at_least(0))
    attack: str = key(
        "none",
        "what they do, knowing all honest replies (label-flip: to their own data); -optimised: the strength that harms most",
        ("none", *ATTACKS),
    )
    attack_on: str = key("both", "what they lie about: their BN statistics, their updates, or both", ON)
    attack_strength: float = key(
        0.0,
        "foe: epsilon; alie: z; gaussian: standard deviation; mimic: whom; 0: 0.5, the textbook's z, 1, the first",
        "finite",
        math.isfinite,
    )
    statistics_rule: str = key("mean", "how the server combines the clients' BN statistics", RULE_NAMES, known_rule)
    update_rule: str = key("mean", "how it combines their updates", RULE_NAMES, known_rule)
    declared_byzantine: int = key(
        -1,
        "Byzantine clients that the rules withstand; -1: byzantine",
        ">= -1",
        at_least(-1),
    )
    # local training
    local_epochs: int = key(0, "passes over the client's data per round; 0: local-steps count", ">= 0", at_least(0))
    local_steps: int = key(5, "batches per client and round; 0: local-epochs count", ">= 0", at_least(0))
    batch_size: int = key(16, "samples per batch; a last batch of one is merged into the one before", ">= 2", at_least(2))
    update: str = key(
        "weights", "clients send weights, or one batch's gradient that the server steps with (DSGD; needs local-steps=1)", UPDATES
    )
    optimizer: str = key("sgd", "the clients' optimiser", OPTIMIZERS)
    learning_rate: float = key(0.05, "the optimiser's step size in round 1", "> 0", above(0))
    learning_rate_schedule: str = key(
        "step", "constant; step: times decay after 50 % and 75 % of the rounds; exponential: times decay per round", SCHEDULES
    )
    learning_rate_decay: float = key(0.3, "the schedule's factor", "(0, 1]", lambda v: 0 < v <= 1)
    momentum: float = key(
        0.9,
        "the optimiser's momentum, fresh every round (EMA form, kept over rounds, for update=gradients)",
        "0..1, below 1",
        lambda v: 0 <= v < 1,
    )
    weight_decay: float = key(1e-4, "L2 penalty", ">= 0", at_least(0))
    # server
    server_optimizer: str = key("sgd", "steps on the pseudo-gradient of the weights; sgd with rate 1 is FedAvg", tuple(SERVER_OPTIMIZERS))
    server_learning_rate: float = key(
        1.0, "the server optimiser's step size (times the clients' rate for update=gradients)", "> 0", above(0)
    )
    server_momentum: float = key(0.0, "the server optimiser's momentum (sgd only)", "0..1, below 1", lambda v: 0 <= v < 1)
    # evaluation, machine and output
    evaluate_every: int = key(5, "rounds between evaluations; the last round is always evaluated", ">= 1", at_least(1))
    seed: int = key(0, "decides partition, initial weights, cohorts, batches and dropout", ">= 0", at_least(0))
    device: str = key(
        "auto",
        "where clients train: auto (a GPU if there is one), cpu, cuda, cuda:0 ...",
        "torch device",
        lambda v: v in ("auto", "cpu") or v.startswith("cuda"),
    )
    threads: int = key(1, "CPU threads per process", ">= 1", at_least(1))
    output: str = key("runs", "folder in which each run makes a folder of its own; empty: write nothing", "path")
    name: str = key("", "the run folder's name; empty: time, method, data and seed", "a file name")
    pictures: bool = key(True, "draw pictures and write TensorBoard events at the end", "true, false")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, wanted = getattr(self, spec.name), type(spec.default)
            if wanted is float and type(value) is int:
                object.__setattr__(self, spec.name, value := float(value))
            if type(value) is not wanted:
                raise ConfigError(f"{kebab(spec.name)} must be of type {wanted.__name__}, but got {value!r}")
            if not spec.metadata["check"](value):
                raise ConfigError(f"{kebab(spec.name)} must be {spec.metadata['allowed']}, but got {value!r}")
        if self.name != self.name.strip() or "/" in self.name or self.name in (".", ".."):
            raise ConfigError(f"name must be a plain file name, but got {self.name!r}")
        if self.method in FREEZING and self.freeze_after > self.rounds:
            raise ConfigError(f"freeze-after must not exceed rounds={self.rounds}, but got {self.freeze_after}")
        if self.method in FEDTAN and self.client_weights != "samples":
            raise ConfigError(
                f"{self.method} weighs clients by the batches they drew, or its first step would not be the centralised one: "
                f"client-weights must be samples, but got {self.client_weights!r}"
            )
        try:
            self._check_byzantine()
            self.local_training(), self.build_method(), self.schedule()
            if self.method in FEDTAN:
                self.exchange_settings()
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """From kebab-case keys; absent ones take their default. Raises ConfigError for an unknown key, with the nearest one."""
        known = {kebab(spec.name): spec.name for spec in fields(cls)}
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise ConfigError(
                    f"unknown config key {name!r}" + (f": did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})")
                )
        return cls(**{known[name]: value for name, value in values.items()})

    def to_mapping(self) -> dict[str, Value]:
        return {kebab(spec.name): getattr(self, spec.name) for spec in fields(self)}

    def build_method(self) -> Method:
        frozen = None if self.freeze_after < 0 else self.freeze_after
        if self.method == "fixbn":
            return self._attacked(METHODS["fixbn"](freeze_after=frozen))
        if self.method == "fedtan2":
            return self._attacked(METHODS["fedtan2"](freeze_after=frozen, schedule=self.fedtan_schedule))
        options: dict[str, dict[str, Any]] = {
            "fedtan": {"schedule": self.fedtan_schedule},
            "fedavg-alg2": {"schedule": self.fedtan_schedule},
            "gn": {"groups": self.groups},
            "fbn": {"momentum": self.fbn_momentum or None},
            "hbn": {
                "lam": self.hbn_lam or (1.0 if self.fraction == 1 else 0.01),
                "stat_samples": self.hbn_stat_samples,
                "lower_layers": self.hbn_lower_layers,
            },
        }
        method = METHODS[self.method](**options.get(self.method, {}))
        return self._attacked(method if frozen is None else freeze(method, frozen))

    def _attacked(self, method: Method) -> Method:
        if self.attack == "none":
            return method
        return attacked(method, self.attack, self.byzantine, self.attack_on, self.attack_strength)

    def defence(self) -> Defence:
        """The rules on the server, and the f that they are told."""
        declared = self.byzantine if self.declared_byzantine < 0 else self.declared_byzantine
        return Defence(declared, self.statistics_rule, self.update_rule)

    def _check_byzantine(self) -> None:
        if self.attack != "none" and self.byzantine == 0:
            raise ConfigError(f"attack={self.attack!r} needs attackers: set byzantine")
        if self.byzantine >= self.clients:
            raise ConfigError(f"byzantine must leave an honest client of clients={self.clients}, but got {self.byzantine}")
        self.defence().check(max(1, round_half_up(self.fraction * self.clients)))

    def local_training(self) -> LocalTraining:
        return LocalTraining(
            self.batch_size, self.local_epochs, self.local_steps, self.optimizer, self.momentum, self.weight_decay, self.update
        )

    def exchange_settings(self) -> ExchangeSettings:
        """Raises ConfigError where some of the certificate's files are named, but not all."""
        files = (self.exchange_certificate, self.exchange_key, self.exchange_authority)
        if any(files) and not all(files):
            raise ConfigError("exchange-certificate, exchange-key and exchange-authority belong together: give all three, or none")
        return ExchangeSettings(
            carrier=self.exchange,
            policy=self.exchange_policy,
            deadline=self.exchange_timeout,
            join_deadline=self.exchange_join_timeout,
            host=self.exchange_host,
            bind=self.exchange_bind,
            port=self.exchange_port,
            certificates=Certificates(*map(Path, files)) if all(files) else None,
            insecure=self.exchange_insecure,
        )

    def schedule(self) -> Callable[[int, int], float]:
        """``(round, rounds) -> learning rate``."""
        return partial(learning_rate, self.learning_rate_schedule, self.learning_rate, self.learning_rate_decay)

    def round_policy(self) -> Rounds:
        """The server's part. Raises ConfigError where the exchange's certificate files, which only the server has, are missing or wrong."""
        exchange = self.exchange_settings() if self.method in FEDTAN else ExchangeSettings()
        try:
            if exchange.certificates is not None:
                exchange.certificates.check()
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(str(error)) from error
        return Rounds(
            clients=self.clients,
            fraction=self.fraction,
            min_replies=self.min_replies,
            max_failed=self.max_failed_rounds,
            timeout=self.round_timeout,
            wait=self.wait_timeout,
            evaluate_every=self.evaluate_every,
            client_weights=self.client_weights,
            update=self.update,
            max_steps=self.local_steps,
            seed=self.seed,
            calibrate=self.calibrate,
            rate=self.schedule(),
            exchange=exchange,
        )
