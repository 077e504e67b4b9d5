"""Give the papers' experiments their data sets, feature shifts, networks and ablations: ``setup = "experiments.papers:Papers"``."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from experiments.data import cityscapes, connectomes, digits_five, image_folders, public
from experiments.data.shift import SHIFTS, Limit, limited, shifted
from experiments.diagnostics import DIAGNOSTICS, Diagnostics
from experiments.networks import STEMS, maker_of, with_projection, without_dropout
from experiments.standardise import STANDARDS, standardised
from fl_bn.app.assembly import shape
from fl_bn.app.config import SITES
from fl_bn.app.errors import ConfigError
from fl_bn.app.setup import Setup
from fl_bn.bn.roles import batch_norms
from fl_bn.data.record import SPLITS, TEST, TRAINING, Dataset
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.policy import RunSpec, ServerPolicy
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import Method, attacked
from fl_bn.methods.fbn import FBNOptions
from fl_bn.methods.fedtan import FedTANOptions
from fl_bn.methods.fixbn import FixBNOptions
from fl_bn.methods.hbn import HBNOptions
from fl_bn.objectives.scaffold import Scaffold
from fl_bn.options import Used, declared, option, refuse, used_with
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, ON
from fl_bn.support.names import names_of
from fl_bn.task import LABELS, MASKS, kind_of

if TYPE_CHECKING:
    from fl_bn.app.config import RunConfig


def _freezes_later(config: Any) -> bool:
    method = config.build_method()
    first, last = (method.freezes_statistics(method.phase(round, config["rounds"])) for round in (1, max(1, config["rounds"])))
    return last and not first


def all_of(known: Collection[str]) -> Callable[[str], bool]:
    """Return a function that checks whether a text is a list of names in ``known``, separated by commas."""
    return lambda text: all(name in known for name in names_of(text))


FREEZES_LATER = Used("statistics that freeze after some rounds (fixbn, fedtan2, freeze-after)", _freezes_later)
HAS_WHAT_IS_ATTACKED = Used(
    "a method whose BatchNorm statistics the server combines",
    lambda config: config["attack-on"] != "statistics" or config.build_method().has_statistics,
)
ATTACKED = Used("byzantine > 0", lambda config: config["byzantine"] > 0)
FALSIFIED = used_with("attack", *(name for name in ATTACKS if name != LABEL_FLIP)) & HAS_WHAT_IS_ATTACKED
STRONG = used_with("attack", "foe", "alie", "mimic")
DATASETS: dict[str, Callable[[str, int], Dataset]] = {
    **{kind.lower(): partial(public.load_public, kind) for kind in public.CLASSES},
    "mnist-m": digits_five.load_mnist_m,
    "synth-digits": digits_five.load_synth_digits,
    "digits-five": digits_five.load_digits_five,
    "digits-five-pooled": digits_five.load_digits_five_pooled,
    **{name: partial(image_folders.load_images, name) for name in image_folders.LAYOUTS},
    "cityscapes": cityscapes.load_cityscapes,
    "abide": connectomes.load_abide,
}


@dataclass(frozen=True)
class Papers(Setup):
    """Give a run the papers' data sets by name, and make feature shifts of its data or keep a part of them."""

    name: ClassVar[str] = "papers"

    shifts: str = option("", f"feature shifts, each of which makes a domain: {', '.join(SHIFTS)}", "names", all_of(SHIFTS), like=SHIFTS)
    samples_per_domain: int = option(0, "most training samples of each domain, or in all; 0: no limit", ">= 0")
    samples_share: float = option(1.0, "share of each domain's training samples that is kept, rounded down; 1: all", "(0, 1]")
    evaluate_on: str = option(TEST, "the samples of the evaluation: test samples, or training samples (for their loss)", SPLITS)
    diagnostics: str = option("", f"for diagnostics.csv: {', '.join(DIAGNOSTICS)}", "names", all_of(DIAGNOSTICS), like=DIAGNOSTICS)
    # the network
    model_stem: str = option("auto", "first layers of torchvision's networks; small: for images of about 32 pixels", STEMS)
    scale_start: str = option("one", "BatchNorm's scales before round 1, as in FedTAN's code", ("one", "uniform"))
    standardise: str = option("none", "data set whose mean and deviation standardise images", ("none", *STANDARDS))
    moon_projection: int = option(0, "output features of MOON's projection before the head; 0: no projection", ">= 0")
    dropout: bool = option(True, "whether the network's dropout layers are active in training")
    # attackers
    byzantine: int = option(0, "number of clients that attack: the last ones; the training data are split over the others", ">= 0")
    attack: str = option("none", "what the attackers send, knowing all honest replies", ("none", *ATTACKS), used=ATTACKED)
    attack_on: str = option("both", "what the attackers falsify", ON, used=FALSIFIED)
    attack_strength: float = option(0.0, "epsilon, z, deviation, or client; 0: the paper's", "finite", math.isfinite, used=STRONG)
    # arguments of methods, objectives and local training that have no key otherwise
    centre_gradients: str = option("auto", "whether gradients are centred; auto: as the method says", ("auto", "always", "never"))
    frozen_rate: float = option(0.0, "limit of the rate in frozen rounds; 0: the method's", "0 or (0, 1]", used=FREEZES_LATER)
    tracking: float = option(0.0, "fbn, hbn: weight of a round's moments in the statistics; 0: the method's", "0 or (0, 1]")
    unit_scale: bool = declared(RunSpec, "unit_scale")
    hbn_evaluate: str = declared(HBNOptions, "evaluate")
    hbn_lower_layers: str = declared(HBNOptions, "lower_layers")
    hbn_measured: str = declared(HBNOptions, "measured")
    hbn_evaluate_clients: str = declared(HBNOptions, "evaluate_clients")
    hbn_mixing: str = declared(HBNOptions, "mixing")
    hbn_merge: str = declared(HBNOptions, "merge")
    hbn_separate: bool = declared(HBNOptions, "separate")
    fbn_report: str = declared(FBNOptions, "report")
    recalibration: str = declared(ServerPolicy, "recalibration")
    fedtan_schedule: str = declared(FedTANOptions, "schedule")
    fedtan_momentum: str = declared(FedTANOptions, "momentum")
    freeze_what: str = declared(FixBNOptions, "freeze_what")
    scaffold_strength: float = declared(Scaffold, "strength")
    maintain_momentum: str = declared(LocalTraining, "maintain")
    drop_last: bool = declared(LocalTraining, "drop_last")

    def dataset(self, config: RunConfig) -> Dataset:
        """Return the data with the shifts and within the limits that the options describe."""
        made = DATASETS.get(config.dataset)
        data = _loaded(config.dataset, config.data_path, config.image_size) if made else super().dataset(config)
        if self.attack == LABEL_FLIP and kind_of(data.y_train) not in (LABELS, MASKS):
            raise ConfigError(f"attack={LABEL_FLIP!r} swaps classes, but the data have {kind_of(data.y_train)}: choose another attack")
        shifts, limit = names_of(self.shifts), Limit(self.samples_per_domain, self.samples_share)
        data = _changed(data, shifts, limit, config.seed) if shifts or limit.limits else data
        return _tested_on_training(data) if self.evaluate_on == TRAINING else data

    def network(self, config: RunConfig, make: Callable[..., nn.Module]) -> nn.Module:
        """Return the network with the first layers, the scales, the inputs and the projection that the options describe."""
        model = make(maker=maker_of(config.model, self.model_stem))
        if self.scale_start == "uniform" and not config.model_weights:
            with torch_seed(config.seed, torch.device("cpu")):
                for layer in batch_norms(model).values():
                    if layer.weight is not None:
                        nn.init.uniform_(layer.weight)
        standardised(model, self.standardise, shape(config)[1])
        if self.moon_projection:
            with torch_seed(config.seed, torch.device("cpu")):
                with_projection(model, self.moon_projection)
        if not self.dropout:
            without_dropout(model)
        return model

    @property
    def split(self) -> str:
        """Return the samples that the run is tested on."""
        return self.evaluate_on

    @property
    def attackers(self) -> int:
        """Return the number of Byzantine clients."""
        return self.byzantine

    def method(self, config: RunConfig, method: Method) -> Method:
        """Return the method with centred gradients, with another rate after a freeze, and under the attack, as the options say."""
        if self.centre_gradients != "auto":
            method = replace(method, centre=self.centre_gradients == "always")
        if self.frozen_rate:
            method = replace(method, frozen_rate=self.frozen_rate, bounded_frozen_rate=None)
        if not self.byzantine:
            return method
        self._check_attack(config)
        return method if self.attack == "none" else attacked(method, self.attack, self.byzantine, self.attack_on, self.attack_strength)

    def _check_attack(self, config: RunConfig) -> None:
        honest, strength = config.clients - self.byzantine, self.attack_strength
        refuse(
            (config.dataset == SITES, f"dataset={SITES!r} has real clients, and attacks are simulated: leave out byzantine"),
            (honest < 1, f"byzantine must be less than clients={config.clients}, so that one client is honest, but got {self.byzantine}"),
            (
                self.attack == "mimic" and not (strength.is_integer() and 0 <= strength < honest),
                f"attack='mimic' copies one honest client, whose number is attack-strength: expected a whole number 0..{honest - 1}, but "
                f"got {strength:g}",
            ),
        )

    def samples(self, config: RunConfig, client: int, train: Samples) -> Samples:
        """Return the training samples of a client. Under ``attack='label-flip'``, those of attackers have flipped labels."""
        flips = self.attack == LABEL_FLIP and client >= config.clients - self.byzantine
        return Samples(train.x, shape(config)[0] - 1 - train.y) if flips else train

    def measurements(self, config: RunConfig) -> Diagnostics | None:
        """Return the diagnostics that the options name; None: they name none."""
        names = names_of(self.diagnostics)
        return Diagnostics(config, names) if names else None


@lru_cache(maxsize=4)
def _loaded(name: str, path: str, image_size: int) -> Dataset:
    return DATASETS[name](path, image_size)


@lru_cache(maxsize=2)
def _changed(data: Dataset, shifts: tuple[str, ...], limit: Limit, seed: int) -> Dataset:
    return limited(shifted(data, shifts, seed) if shifts else data, limit, seed)


@lru_cache(maxsize=2)
def _tested_on_training(data: Dataset) -> Dataset:
    return data.tested_on_training()
