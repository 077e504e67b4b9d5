"""Give the papers' experiments their data sets, feature shifts and sizes: ``setup = "experiments.papers:Papers"``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, ClassVar

from experiments.data import cityscapes, connectomes, digits_five, image_folders
from experiments.data.shift import SHIFTS, Limit, limited, shifted
from fl_bn.data.record import Dataset
from fl_bn.options import option
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

    def dataset(self, config: RunConfig) -> Dataset:
        """Return the data with the shifts and within the limits that the options describe."""
        made = DATASETS.get(config.dataset)
        data = _loaded(config.dataset, config.data_path, config.image_size) if made else super().dataset(config)
        shifts, limit = names_of(self.shifts), Limit(self.samples_per_domain, self.samples_share)
        return _changed(data, shifts, limit, config.seed) if shifts or limit.limits else data


@lru_cache(maxsize=4)
def _loaded(name: str, path: str, image_size: int) -> Dataset:
    return DATASETS[name](path, image_size)


@lru_cache(maxsize=2)
def _changed(data: Dataset, shifts: tuple[str, ...], limit: Limit, seed: int) -> Dataset:
    return limited(shifted(data, shifts, seed) if shifts else data, limit, seed)
