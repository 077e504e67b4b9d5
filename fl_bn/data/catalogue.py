"""List the published data sets that fl-bn loads by name, with their terms of use. ``fl-bn data list`` shows the catalogue.

The terms of use are summarised in a line, as far as they are generally known. Only the publishers' own texts are binding.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CatalogueEntry:
    """Describe one data set.

    Attributes:
        title: title of the data set.
        terms: terms of use, in words.
        samples: number of training samples, and of test samples.
        files: the files that must lie in ``data-path``; a run downloads them if it can. Empty: they come with scikit-learn.
        source: the publisher's address.
    """

    title: str
    terms: str
    samples: tuple[int, int]
    files: str = ""
    source: str = ""


_CIFAR = "www.cs.toronto.edu/~kriz/cifar.html"
CATALOGUE: dict[str, CatalogueEntry] = {
    "digits": CatalogueEntry(
        "8x8 handwritten digits, blended into two photographs, which are the domains china and flower",
        "comes with scikit-learn (BSD); CC BY photographs",
        (1437, 360),
    ),
    "digits-plain": CatalogueEntry("the same digits, white on black", "comes with scikit-learn (BSD)", (1437, 360)),
    "cifar10": CatalogueEntry("CIFAR-10", "academic use", (50000, 10000), "cifar-10-python.tar.gz", _CIFAR),
    "cifar100": CatalogueEntry("CIFAR-100", "academic use", (50000, 10000), "cifar-100-python.tar.gz", _CIFAR),
    "mnist": CatalogueEntry(
        "MNIST",
        "CC BY-SA 3.0",
        (60000, 10000),
        "MNIST/raw/train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz",
        "yann.lecun.com/exdb/mnist",
    ),
    "svhn": CatalogueEntry(
        "Street View House Numbers, cropped digits",
        "non-commercial use",
        (73257, 26032),
        "train_32x32.mat, test_32x32.mat",
        "ufldl.stanford.edu/housenumbers",
    ),
    "usps": CatalogueEntry(
        "USPS digits", "research use", (7291, 2007), "usps.bz2, usps.t.bz2", "www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets (multiclass)"
    ),
}
