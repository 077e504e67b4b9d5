"""Make domains from one data set: the images of each domain have one feature shift, as if from another camera or scanner.

Labels stay, and the look of the images changes. This is the setting of FedBN without its five data sets. This
file also limits the samples per domain, as FedBN does.

Legend: N samples, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from experiments.data import strokes
from fl_bn.data.record import Dataset, expect

Shift = Callable[[Tensor, np.random.Generator], Tensor]
"""A function that takes uint8 images (N, C, H, W) and a random generator, and returns changed images of the same dtype."""

NOISE = 40.0  # standard deviation of the noise, for pixels of 0..255
TINT = ((220, 30, 0), (40, 120, 40), (0, 30, 60))  # parts of red, green and blue in each new colour, in 256ths
_BINOMIAL = (1, 4, 6, 4, 1)
_CHUNK = 512  # images at a time, as integers take more memory than bytes
_STREAM, _SHARES, _LIMIT = 0x5417F, 0, 1  # set these draws apart from others that start from the same seed


def none(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Return the images (N, C, H, W) unchanged."""
    return x


def invert(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Compute the negative of uint8 images (N, C, H, W)."""
    return 255 - x


def contrast(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Reduce the contrast of uint8 images (N, C, H, W) as fog does: their values become 127..212."""
    return (170 + (x.int() - 128) // 3).to(torch.uint8)


def dark(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Reduce the brightness of uint8 images (N, C, H, W) to a quarter."""
    return x // 4


def noise(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Add Gaussian noise of standard deviation 40 to uint8 images (N, C, H, W), independent for each pixel and channel."""
    drawn = torch.from_numpy(np.rint(rng.normal(0.0, NOISE, tuple(x.shape))).astype(np.int32))
    return (x.int() + drawn).clamp_(0, 255).to(torch.uint8)


def blur(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Smooth uint8 images (N, C, H, W) twice by the binomial kernel 1-4-6-4-1 along both axes, with repeated edges."""
    kernel = torch.tensor(_BINOMIAL, dtype=torch.float64)
    kernel = torch.outer(kernel, kernel).expand(x.shape[1], 1, -1, -1)
    smooth = x.double()  # whole numbers, which float64 holds exactly, so the result is the same on every machine
    for _ in range(2):
        padded = functional.pad(smooth, (2, 2, 2, 2), mode="replicate")
        smooth = torch.floor((functional.conv2d(padded, kernel, groups=x.shape[1]) + 128) / 256)
    return smooth.to(torch.uint8)


def pixels(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Halve the resolution of images (N, C, H, W): repeat every second row and column in place of the next one."""
    rows, columns = (torch.arange(size) // 2 * 2 for size in x.shape[2:])
    return x[:, :, rows][:, :, :, columns]


def edges(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Draw the edges of uint8 images (N, C, H, W), dark on white. Pixels that differ from their right or lower neighbours are dark."""
    padded = functional.pad(x.double(), (0, 1, 0, 1), mode="replicate")
    here = padded[:, :, :-1, :-1]
    change = (padded[:, :, :-1, 1:] - here).abs() + (padded[:, :, 1:, :-1] - here).abs()
    return (255 - 2 * change).clamp_(0, 255).to(torch.uint8)


def colour(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Mix the colours of uint8 images (N, 3, H, W) by ``TINT``, as in a warm, reddish light."""
    mixed = torch.einsum("oc,nchw->nohw", torch.tensor(TINT, dtype=torch.int64), x.long())
    return (mixed // 256).clamp_(0, 255).to(torch.uint8)


def background(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Compute the absolute difference of each image from a random patch of a photograph, as MNIST-M was made.

    The two photographs come from scikit-learn's ``load_sample_images``.

    Args:
        x: uint8 images (N, 3, H, W).
        rng: the generator that draws a photograph and a patch for each image.

    Returns:
        uint8 images (N, 3, H, W).

    Raises:
        ValueError: images are larger than the photographs, which are 427 pixels high.
    """
    from sklearn.datasets import load_sample_images  # imported here because it takes a second, and other shifts do not need it

    photographs = load_sample_images().images
    height, width = x.shape[2:]
    limits = photographs[0].shape[:2]
    fits = height <= limits[0] and width <= limits[1]
    expect(fits, "background", "", f"images within {limits[0]} x {limits[1]} pixels, the photographs' size", f"{height} x {width}")
    which = rng.integers(len(photographs), size=len(x))
    tops, lefts = rng.integers(limits[0] - height + 1, size=len(x)), rng.integers(limits[1] - width + 1, size=len(x))
    patches = np.stack([photographs[w][t : t + height, s : s + width] for w, t, s in zip(which, tops, lefts, strict=True)])
    return (torch.from_numpy(patches.transpose(0, 3, 1, 2).astype(np.int32)) - x.int()).abs_().to(torch.uint8)


SHIFTS: dict[str, Shift] = {
    "none": none,
    "invert": invert,
    "contrast": contrast,
    "dark": dark,
    "noise": noise,
    "blur": blur,
    "pixels": pixels,
    "edges": edges,
    "colour": colour,
    "background": background,
    "thin": strokes.thin,
    "thick": strokes.thick,
    "swelling": strokes.swelling,
    "fracture": strokes.fracture,
}
IN_COLOUR = {"colour", "background"}  # with one of these, grey images get three channels under all shifts


def shifted(dataset: Dataset, names: Sequence[str], seed: int) -> Dataset:
    """Make a domain for each of ``names``: the images of domain i are changed by the i-th shift.

    The training samples are divided among the domains at random, equally and without overlap (the sizes
    differ by one at most). Every domain has the whole test split, under its own shift. These domains replace
    the data set's own domains. The same arguments give the same images on every machine. If a name is "colour" or
    "background", grey images get three channels in all domains. Otherwise a domain's test images do not depend on
    the other domains.

    Args:
        dataset: uint8 images.
        names: different names of ``SHIFTS``.
        seed: seed of the draws.

    Raises:
        ValueError: ``names`` is empty or has an unknown or repeated name, the data set has no images, or there are
            more domains than samples.
    """
    if not names or len(set(names)) < len(names) or (set(names) - set(SHIFTS)):
        raise ValueError(f"shifts must be at least one of {', '.join(SHIFTS)}, each only once, but got {', '.join(names) or 'nothing'}")
    expect(dataset.x_train.dtype == torch.uint8, dataset.name, "x_train", "images, which shifts change", dataset.x_train.dtype)
    samples = len(dataset.x_train)
    expect(len(names) <= samples, dataset.name, "x_train", f"at least as many samples as shifts, {len(names)}", samples)
    shares = np.array_split(_generator(seed, _SHARES).permutation(samples), len(names))
    parts = [torch.from_numpy(np.sort(share)) for share in shares]
    wide = bool(IN_COLOUR & set(names)) and dataset.channels == 1
    x_train, x_test = [], []
    for name, part in zip(names, parts, strict=True):
        place = list(SHIFTS).index(name) + 2  # a stream of its own for each shift
        x_train.append(_apply(name, dataset.x_train[part], wide, _generator(seed, place, 0)))
        x_test.append(_apply(name, dataset.x_test, wide, _generator(seed, place, 1)))
    order = torch.cat(parts)
    return replace(
        dataset,
        x_train=torch.cat(x_train),
        y_train=dataset.y_train[order],
        x_test=torch.cat(x_test),
        y_test=torch.cat([dataset.y_test] * len(names)),
        domain_train=torch.repeat_interleave(torch.arange(len(names)), torch.tensor([len(part) for part in parts])),
        domain_test=torch.arange(len(names)).repeat_interleave(len(dataset.x_test)),
        domains=tuple(names),
    )


@dataclass(frozen=True)
class Limit:
    """Hold the limit of training samples of each domain, or of the whole data set if it has no domains.

    Attributes:
        per_domain: the largest number of samples of a domain; 0 for no limit.
        share: the share of the samples to keep, in (0, 1]. If both limits are set, the smaller number counts.

    Raises:
        ValueError: ``per_domain`` is negative, or ``share`` is not in (0, 1].
    """

    per_domain: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.per_domain < 0:
            raise ValueError(f"samples per domain must not be negative (0: all), but got {self.per_domain}")
        if not 0 < self.share <= 1:
            raise ValueError(f"the share of samples must be in (0, 1], but got {self.share}")

    @property
    def limits(self) -> bool:
        """Return whether samples may be left out."""
        return self.per_domain > 0 or self.share < 1

    def of(self, samples: int) -> int:
        """Return how many of ``samples`` are kept. A share is rounded down, but at least one sample is kept.

        >>> Limit(share=0.1).of(7430)
        743
        """
        kept = max(1, int(Fraction(str(self.share)) * samples))
        return min(kept, self.per_domain) if self.per_domain else kept


def limited(dataset: Dataset, limit: Limit, seed: int) -> Dataset:
    """Keep as many training samples as ``limit`` allows: of each domain, or of the whole set if it has no domains.

    The samples are drawn at random, whatever their classes, and keep their order. The test split stays whole.
    """
    domains = dataset.domain_train
    if not limit.limits:
        return dataset
    groups = (
        [torch.arange(len(dataset.x_train))] if domains is None else [(domains == d).nonzero()[:, 0] for d in range(len(dataset.domains))]
    )
    kept = []
    for domain, group in enumerate(groups):
        chosen = _generator(seed, _LIMIT, domain).permutation(len(group))[: limit.of(len(group))]
        kept.append(group[torch.from_numpy(chosen)])
    order = torch.cat(kept).sort().values
    return replace(
        dataset,
        x_train=dataset.x_train[order],
        y_train=dataset.y_train[order],
        domain_train=None if domains is None else domains[order],
    )


def _apply(name: str, x: Tensor, wide: bool, rng: np.random.Generator) -> Tensor:
    images = x.expand(-1, 3, -1, -1) if wide else x
    return torch.cat([SHIFTS[name](chunk, rng) for chunk in torch.split(images, _CHUNK)])


def _generator(seed: int, *key: int) -> np.random.Generator:
    if seed < 0:
        raise ValueError(f"seed must not be negative, but got {seed}")
    return np.random.default_rng(np.random.SeedSequence([_STREAM, seed, *key]))
