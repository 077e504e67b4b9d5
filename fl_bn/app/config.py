"""Define the run config, a frozen and checked value, and make the objects that its keys describe.

General keys are declared in ``run_keys``. The others are options of the methods,
objectives and server optimisers in their registries, and of the classes in
``VALUES``. They are looked up each time, so that those of other packages count,
too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from fl_bn.app.errors import ConfigError as ConfigError
from fl_bn.app.errors import as_config_error
from fl_bn.app.keys import LONGEST
from fl_bn.app.run_keys import VALUES, RunKeys, general_options
from fl_bn.app.setup import Setup, setup_class
from fl_bn.app.used import HasNoEffect, unused
from fl_bn.data.dataset import PER_SITE
from fl_bn.exchange.settings import ExchangeSettings
from fl_bn.federation.aggregation import Defence
from fl_bn.federation.composition import check_composition, check_weights
from fl_bn.federation.engines.vectorised import VECTORISED
from fl_bn.federation.gradients import STEP, chosen
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from fl_bn.federation.policy import AS_METHOD, MUCH, UNTIL_STILL, ServerPolicy, measures_in_the_clear, start_left
from fl_bn.federation.settings import LocalTraining, Schedule
from fl_bn.flower.wire.codec import FOLDER
from fl_bn.methods import METHODS, Method, freeze
from fl_bn.objectives import OBJECTIVES, Objective
from fl_bn.options import Option, Value, build, kebab, keys_of, options_by_key, own_options, refuse, same_key
from fl_bn.secure.privacy import Privacy
from fl_bn.secure.settings import SecureAggregation
from fl_bn.support.client_names import ClientNames, nodes_of, sites_of
from fl_bn.support.flower_config import registered_nodes
from fl_bn.support.names import short, unknown
from fl_bn.support.user_code import import_extensions
from fl_bn.task import AUTO

T = TypeVar("T")
CLIENTS = 10  # the number of clients where nothing says otherwise
SITES = "sites"  # the value of ``dataset`` for which every client brings its own data
REGISTRIES: dict[str, Mapping[str, object]] = {"method": METHODS, "objective": OBJECTIVES, "server-optimizer": SERVER_OPTIMIZERS}
"""For each run-config key that chooses an entry by name, the registry of the entries."""
FIELDS = {kebab(name): name for name in own_options(RunKeys)}


@dataclass(frozen=True)
class RunConfig(RunKeys):
    """Hold all settings of a run.

    ``config[KEY]`` is the value of a key, for example ``config["hbn-lam"]``.
    General keys are attributes, too.

    Attributes:
        options: The keys that are not fields of ``RunKeys``, as pairs of key and
            value, unless they have their default.

    Raises:
        ConfigError: A value is out of range, or two keys do not fit together.
    """

    options: tuple[tuple[str, Value], ...] = ()

    def __post_init__(self) -> None:
        keys, options = self.keys(self.setup), dict(self.options)
        for name in options:
            if name not in keys or name in FIELDS:
                raise ConfigError(unknown("option", name, [key for key in keys if key not in FIELDS]))
        with as_config_error():
            values = {
                name: key.check(getattr(self, FIELDS[name]) if name in FIELDS else options.get(name, key.default))
                for name, key in keys.items()
            }
            for name, field in FIELDS.items():
                object.__setattr__(self, field, values.pop(name))
            object.__setattr__(self, "options", tuple(values.items()))
            given = [name for name, key in keys.items() if self[name] != key.default]
            self._decide_clients()
            self._check_keys()
            self._check_parts()
            if refused := {key: why for key, why in unused(self, REGISTRIES, self._general()).items() if key in given}:
                raise HasNoEffect(refused)

    def _general(self) -> dict[str, Option]:
        return {**general_options(), **options_by_key(setup_class(self.setup))}

    @cached_property
    def changes(self) -> Setup:
        """Return the object of the class ``setup``, which changes the parts of this run."""
        return build(setup_class(self.setup), self.__getitem__)

    def _decide_clients(self) -> None:
        """Decide ``partition`` and ``clients`` where the user left them open. Each site is a client."""
        sites = PER_SITE[self.dataset](self.data_path) if self.dataset in PER_SITE else []
        per_site = len(sites) - bool(self.hold_out) + self.changes.attackers if len(sites) > 1 else 0
        if self.partition == AUTO and self.dataset != SITES:
            if per_site and self.clients not in (0, per_site):
                raise ConfigError(f"data-path names {per_site} clients, but clients={self.clients}: leave it out, or name a partition")
            object.__setattr__(self, "partition", "natural" if per_site else "classes")
        if not self.clients:
            object.__setattr__(self, "clients", per_site if per_site and self.partition == "natural" else CLIENTS)

    @cached_property
    def without_effect(self) -> frozenset[str]:
        """Return the keys without effect: run configs that differ in them alone are the same run."""
        return frozenset(unused(self, REGISTRIES, self._general()))

    @classmethod
    def keys(cls, setup: str = "") -> dict[str, Option]:
        """Return every key of the run config, in the order of docs/config.md, those of ``setup`` last.

        Raises:
            ConfigError: There is no such setup, or a package that extends fl-bn
                cannot be imported, or declares an existing key with another
                default.
        """
        with as_config_error():
            import_extensions()
            general = general_options()
            keys: dict[str, Option] = {}
            for name, key in general.items():
                keys[name] = key
                for of, addition in keys_of(REGISTRIES.get(name, {})).items():
                    same_key(general.get(of) or keys.setdefault(of, addition), addition)
            for name, spec in options_by_key(setup_class(setup)).items():
                same_key(keys.setdefault(name, spec), spec)
        return keys

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> RunConfig:
        """Make a run config from values by kebab-case key. Missing keys have their defaults.

        A wrong value, or an unknown key, raises ``ConfigError``, which names a
        similar one.
        """
        known = cls.keys(str(values.get("setup", "")))
        for name in values:
            if name not in known:
                raise ConfigError(unknown("config key", name, known))
        options = tuple((name, value) for name, value in values.items() if name not in FIELDS)
        return cls(options=options, **{FIELDS[name]: value for name, value in values.items() if name in FIELDS})

    def to_mapping(self) -> dict[str, Value]:
        """Return every key with its value, including defaults."""
        return {name: self[name] for name in self.keys(self.setup)}

    def __getitem__(self, name: str) -> Any:
        """Return the value of the key ``name``, in kebab-case."""
        if name in FIELDS:
            return getattr(self, FIELDS[name])
        for key, value in self.options:
            if key == name:
                return value
        if name not in (keys := self.keys(self.setup)):
            raise KeyError(unknown("config key", name, keys))
        return keys[name].default  # the key's owner was added to a registry after this run config was made

    def name_at(self, time: datetime) -> str:
        """Return the name that a run without the key ``name`` gets when it begins at ``time``."""
        data = self.dataset.replace("/", "-").replace(":", "-")[:80]
        return f"{time:%Y%m%d-%H%M%S}-{self.method}-{data}-seed{self.seed}"

    def partition_in_words(self) -> str:
        """Return how the data are divided, such as ``partition dirichlet (0.1)``."""
        return "each site's own data" if self.dataset == SITES else f"partition {self.partition} ({self.partition_parameter:g})"

    def build_method(self) -> Method:
        """Make the method from its own options and from general keys, such as ``freeze-after``."""
        constructor = METHODS[self.method]
        method = self._entry(constructor)
        freezes_itself = "freeze-after" in options_by_key(constructor)
        if self.freeze_after >= 0 and not freezes_itself:
            method = freeze(method, self.freeze_after)
        method = self.changes.method(self, method)
        return method.bounded() if self._bounds_paths() else method

    def _bounds_paths(self) -> bool:
        """Return whether gradients are clipped, which bounds the path of several local steps."""
        corrects = (objective := self.build_objective()).on and objective.travels
        return self.clip != "none" and (self.clip != "auto" or (self.optimizer == "sgd" and not corrects))

    def defence(self) -> Defence:
        """Make the robust rules by which the server combines replies."""
        return self._value(Defence, f=self.changes.attackers if self.declared_byzantine < 0 else self.declared_byzantine)

    def _check_keys(self) -> None:
        """Raise ``ValueError`` unless keys fit together."""
        odd = [name for name in (self.name, self.resume) if name and not (re.fullmatch(FOLDER, name) and name == name.strip())]
        length = len(self.name.encode())
        home = [key for key in ("output", "data-path", "model-weights") if str(self[key]).startswith("~")]
        sites, unknown_shape = self.dataset == SITES, [name for name in ("classes", "channels", "image-size") if not self[name]]
        freezes_itself = "freeze-after" in options_by_key(METHODS[self.method])
        unmeasured = self.rounds == 0 and self.calibrate in (0, AS_METHOD)
        refuse(
            (odd, f"name must be a plain file name that starts with no '.', '-' or '~', but got {short(odd)}"),
            (length > LONGEST, f"name must be at most {LONGEST} bytes long, but got {length}: {short(self.name)}"),
            (unmeasured, "rounds must be >= 1, but got 0, which only measures statistics: for this set calibrate=-1, and model-weights"),
            (freezes_itself and self.freeze_after > self.rounds > 0, f"freeze-after must not exceed rounds={self.rounds}"),
            (self.engine == VECTORISED and self.workers > 1, "engine='vectorised' is one process: set workers to 0 or 1"),
            (self.resume and not (self.checkpoint_every and self.output), "resume needs output and checkpoint-every, as they were"),
            (self.checkpoint_every and not self.output, "checkpoint-every needs a folder for the run's checkpoints: set output"),
            (home, f"{' and '.join(home)} must not begin with ~, which no shell replaces within quotes: give the full path"),
            (sites and unknown_shape, f"dataset={SITES!r}: the server has no data to look at: give {', '.join(unknown_shape)}"),
            (sites and self.hold_out, f"dataset={SITES!r} has no domains: leave out hold-out, and start the run without that site"),
            (self.secure_aggregation and self.client_weights == "data", "secure-aggregation needs client-weights samples or uniform"),
            (self.secure_aggregation and self.unseen_client, "unseen-client sends layers without encryption: leave out secure-aggregation"),
        )

    def _check_parts(self) -> None:
        """Raise ``ValueError`` unless the parts of the run can be made, and fit together."""
        method, policy = self.build_method(), self.round_policy()
        check_composition(method, self.local_training(), self.changes.attackers > 0 or self.defence().active, self.server_optimizer)
        check_weights(method, self.client_weights)
        self.defence().among(size := policy.least_cohort, refused=0)
        refuse((self.min_cohort > size, f"min-cohort must be 1..{size}, the clients in the cohort of round 1, but got {self.min_cohort}"))
        self.build_server_optimizer()
        if (secure := self.secure()) is not None:
            from fl_bn.flower.secagg.rounds import check_secure  # imported here, since a run without secure aggregation does not need it

            check_secure(secure, method, policy, self.defence())

    def secure(self) -> SecureAggregation | None:
        """Make the settings of secure aggregation, if the run uses it."""
        if not self.secure_aggregation:
            return None
        privacy = self._value(Privacy) if self.dp_noise else None
        return self._value(SecureAggregation, privacy=privacy)

    @property
    def called(self) -> ClientNames:
        """Return the names of the run's clients, for logs and tables."""
        return ClientNames(sites_of(self.client_names), nodes_of(self.client_nodes))

    def local_training(self) -> LocalTraining:
        """Make the settings of local training, which all clients share."""
        method, objective = self.build_method(), self.build_objective()
        bounds = self._bounds_paths() and not method.exchanges and not objective.travels and self.update == "weights"
        drifts = method.uses_shared(self.rounds) if self.local_steps != 1 else method.starts_small
        clip, limit = chosen(self.clip, self.clip_limit, drifts=bounds and drifts)
        step = STEP if self.clip == "auto" and clip == "round" and method.starts_small else 0.0
        return self._value(LocalTraining, objective=objective, clip=clip, clip_limit=limit, step_clip=step)

    def build_objective(self) -> Objective:
        """Make the local objective, with its options."""
        objective: Objective = self._entry(OBJECTIVES[self.objective])
        return objective

    def build_server_optimizer(self) -> ServerOptimizer:
        """Make the optimiser with which the server updates the shared weights, with its options."""
        optimizer: ServerOptimizer = self._entry(SERVER_OPTIMIZERS[self.server_optimizer])
        return optimizer

    def schedule(self) -> Schedule:
        """Make the learning-rate schedule."""
        return self._value(Schedule)

    def round_policy(self) -> ServerPolicy:
        """Make the settings of the server's rounds."""
        training = self.local_training()
        early = start_left(self.build_method(), self) > MUCH and not self.dp_noise
        return self._value(
            ServerPolicy,
            **({"calibrate": UNTIL_STILL} if early and self.calibrate == AS_METHOD else {}),
            rate=self.schedule(),
            exchange=self._value(ExchangeSettings),
            auxiliary=training.auxiliary,
            objective=training.objective.described,
            planned_steps=training.most_steps,
            at_clients=self.dataset == SITES,
            registered=registered_nodes,
        )

    def _value(self, kind: type[T], **computed: Any) -> T:
        """Make an object of ``VALUES[kind]`` from its keys and the ``computed`` fields."""
        value: T = self._entry(VALUES[kind], **computed)
        return value

    def _entry(self, constructor: Callable[..., Any], **computed: Any) -> Any:
        """Call a constructor with the values of its keys, and the setup's arguments."""
        return build(constructor, self.__getitem__, **{**self.changes.arguments(constructor), **computed})

    def exchanges(self) -> bool:
        """Return whether clients may exchange statistics layer by layer, in training or to make them exact."""
        method = self.build_method()
        return method.exchanges or measures_in_the_clear(method, self)
