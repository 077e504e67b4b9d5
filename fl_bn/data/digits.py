"""Make digits without a download: scikit-learn's, plain or blended into photographs.

The blend is that of MNIST-M (Ganin et al., "Domain-adversarial training of neural
networks", JMLR 2016): the absolute difference between a random patch of a
photograph and the digit, in each colour channel. A linear model is right for 96 %
of the plain digits, and for 66 % of the blended ones. The photograph is the domain.

Digits are enlarged in integers and draws are numpy's, so all machines get the same
digits. The photographs are JPEGs, whose pixels may differ by one between decoders.
"""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fl_bn.data.images import images_to_tensor, resize
from fl_bn.data.record import Dataset, expect

DOMAINS = ("china", "flower")
SIZE = 20  # pixels: small enough for a CPU, large enough for two poolings
_SEED = 20
SPLIT = Path(__file__).with_name("digits_split.toml")
"""Training and test indices: scikit-learn's stratified split, without its import of two seconds."""
_LEVELS = 16  # scikit-learn's digits count the inked pixels of a 4x4 cell


def load_digits(path: str, image_size: int) -> Dataset:
    """Load ``digits``: 1,437 + 360 digits (3, 20, 20), half of them in each photograph.

    Args:
        path: empty, as scikit-learn has the digits.
        image_size: pixels along each side. 0: 20.

    Raises:
        DataError: there is a path.
        ImportError: scikit-learn is not installed.
    """
    expect(not path, "digits", "data-path", "none, as the digits come with scikit-learn", path)
    digits_NHW, labels_N, train, test = _enlarged_digits()
    photographs = [np.asarray(Image.open(_scikit_file("images", f"{name}.jpg"))) for name in DOMAINS]
    rng = np.random.default_rng(_SEED)
    domain_N = np.empty(len(digits_NHW), dtype=np.int64)
    for split in (train, test):
        domain_N[split] = rng.permutation(np.arange(len(split)) % len(DOMAINS))
    blended = np.empty((*digits_NHW.shape, 3), dtype=np.uint8)
    for i, (digit_HW, domain) in enumerate(zip(digits_NHW, domain_N.tolist(), strict=True)):
        photograph = photographs[domain]
        top = int(rng.integers(photograph.shape[0] - SIZE + 1))
        left = int(rng.integers(photograph.shape[1] - SIZE + 1))
        patch_HWC = photograph[top : top + SIZE, left : left + SIZE].astype(np.int64)
        blended[i] = np.abs(patch_HWC - digit_HW[..., None])
    images = resize(images_to_tensor(blended), image_size)
    domains = torch.from_numpy(domain_N)
    return Dataset(
        "digits",
        images[train],
        labels_N[train],
        images[test],
        labels_N[test],
        classes=10,
        domain_train=domains[train],
        domain_test=domains[test],
        domains=DOMAINS,
    )


def load_digits_plain(path: str, image_size: int) -> Dataset:
    """Load ``digits-plain``: the digits of ``digits``, white on black."""
    expect(not path, "digits-plain", "data-path", "none, as the digits come with scikit-learn", path)
    digits_NHW, labels_N, train, test = _enlarged_digits()
    grey = images_to_tensor(digits_NHW.astype(np.uint8)).expand(-1, 3, -1, -1).contiguous()
    images = resize(grey, image_size)
    return Dataset("digits-plain", images[train], labels_N[train], images[test], labels_N[test], classes=10)


def _enlarged_digits() -> tuple[NDArray[np.int64], Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """Return digits (N, 20, 20) in 0..255, labels (N,), and the indices of both splits."""
    table = np.loadtxt(_scikit_file("data", "digits.csv.gz"), delimiter=",", dtype=np.int64)  # 64 pixels and the label
    images, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    train, test = (np.array(indices) for indices in tomllib.loads(SPLIT.read_text()).values())
    tenths = _bilinear_tenths(images.shape[1], SIZE)
    enlarged = np.einsum("hi,nij,wj->nhw", tenths, images, tenths)  # hundredths of a level
    scale = 100 * _LEVELS
    digits = (enlarged * 255 + scale // 2) // scale
    return digits, torch.from_numpy(labels.copy()), train, test


def _scikit_file(*parts: str) -> Path:
    """Return the path of a file of ``sklearn.datasets``, without importing scikit-learn."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ImportError("dataset 'digits' comes with scikit-learn, which is not installed: pip install scikit-learn")
    return Path(spec.origin).parent.joinpath("datasets", *parts)


def _bilinear_tenths(before: int, after: int) -> NDArray[np.int64]:
    """Return the weights of bilinear enlargement (after, before), in tenths.

    8 pixels become 20, so every centre is on a multiple of a tenth.
    """
    weights = np.zeros((after, before), dtype=np.int64)
    for i in range(after):
        centre = (2 * i + 1) * before * 10 // (2 * after) - 5  # pixel centres lie at halves
        low, fraction = divmod(centre, 10)
        weights[i, max(low, 0)] += 10 - fraction
        weights[i, min(low + 1, before - 1)] += fraction
    return weights
