"""Give the papers' experiments their data sets, feature shifts, networks and ablations: ``setup = "experiments.papers:Papers"``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from experiments.data import cityscapes, connectomes, digits_five, image_folders
from experiments.data.shift import SHIFTS, Limit, limited, shifted
from experiments.diagnostics import DIAGNOSTICS, Diagnostics
from experiments.networks import STEMS, maker_of, with_projection
from experiments.standardise import STANDARDS, standardised
from fl_bn.bn.roles import batch_norms
from fl_bn.data.record import Dataset
from fl_bn.federation.local import torch_seed
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods.fbn import FBNOptions
from fl_bn.methods.fedtan import FedTANOptions
from fl_bn.methods.fixbn import FixBNOptions
from fl_bn.methods.hbn import HBNOptions
from fl_bn.objectives.scaffold import Scaffold
from fl_bn.options import declared, option
from fl_bn.run.assembly import shape
from fl_bn.run.keys import all_of
from fl_bn.run.setup import Setup
from fl_bn.support.names import names_of

if TYPE_CHECKING:
    from fl_bn.run.config import RunConfig

DATASETS: dict[str, Callable[[str, int], Dataset]] = {
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

    shifts: str = option(
        "",
        "feature shifts: each makes a domain from a part of the data; empty: the data keep their own domains",
        f"{', '.join(SHIFTS)}, separated by commas",
        all_of(SHIFTS),
        like=SHIFTS,
    )
    samples_per_domain: int = option(
        0, "the most training samples that are kept of each domain, or in all if there are no domains; 0: no limit", ">= 0"
    )
    samples_share: float = option(1.0, "share of each domain's training samples that is kept, rounded down; 1: all", "(0, 1]")
    diagnostics: str = option(
        "",
        "quantities to measure at every evaluation, in simulation; they are in diagnostics.csv",
        f"{', '.join(DIAGNOSTICS)}, separated by commas",
        all_of(DIAGNOSTICS),
        like=DIAGNOSTICS,
    )
    # the network
    model_stem: str = option("auto", "first layers of torchvision's networks; small: for images of about 32 pixels", STEMS)
    scale_start: str = option(
        "one", "BatchNorm's scales before round 1: one, or uniform in (0, 1), as in FedTAN's published code", ("one", "uniform")
    )
    standardise: str = option(
        "none",
        "standardise images by the published mean and standard deviation of this data set; none: 0..255 becomes -1..1",
        ("none", *STANDARDS),
    )
    moon_projection: int = option(
        0, "number of output features of a projection (two layers) before the head, as in MOON's paper; 0: no projection", ">= 0"
    )
    # arguments of methods, objectives and local training that have no key otherwise
    hbn_lower_layers: str = declared(HBNOptions, "lower_layers")
    hbn_measured: str = declared(HBNOptions, "measured")
    hbn_evaluate_clients: str = declared(HBNOptions, "evaluate_clients")
    hbn_mixing: str = declared(HBNOptions, "mixing")
    hbn_merge: str = declared(HBNOptions, "merge")
    hbn_separate: bool = declared(HBNOptions, "separate")
    fbn_report: str = declared(FBNOptions, "report")
    fedtan_momentum: str = declared(FedTANOptions, "momentum")
    freeze_what: str = declared(FixBNOptions, "freeze_what")
    scaffold_option: int = declared(Scaffold, "option")
    maintain_momentum: str = declared(LocalTraining, "maintain")
    local_evaluation: bool = declared(LocalTraining, "local_evaluation")

    def dataset(self, config: RunConfig) -> Dataset:
        """Return the data with the shifts and within the limits that the options describe."""
        made = DATASETS.get(config.dataset)
        data = _loaded(config.dataset, config.data_path, config.image_size) if made else super().dataset(config)
        shifts, limit = names_of(self.shifts), Limit(self.samples_per_domain, self.samples_share)
        return _changed(data, shifts, limit, config.seed) if shifts or limit.limits else data

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
        return model

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
