"""List the data sets in a catalogue, with their terms of use and their files. docs/data.md and ``fl-bn data`` show the catalogue.

The terms of use are summarised in a line, as far as they are generally known. Only the publishers' own texts are binding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

How = Literal["included", "downloaded", "by hand"]


@dataclass(frozen=True)
class CatalogueEntry:
    """Describe one data set.

    Attributes:
        title: title of the data set.
        terms: terms of use, in words.
        citation: authors and year of the publication.
        how: where the files come from: "included" in an installed package, "downloaded" by the first run, or "by hand".
        tree: the files that must lie in ``data-path``.
        source: the publisher's address.
        samples: number of training and test samples together. Several numbers if editions differ; empty if it is unknown.
        split: how many samples are for training and for testing, in words.
        size: shape of a sample.
        note: further remarks.
    """

    title: str
    terms: str
    citation: str
    how: How
    tree: str = ""
    source: str = ""
    samples: tuple[int, ...] = ()
    split: str = ""
    size: str = ""
    note: str = ""


CATALOGUE: dict[str, CatalogueEntry] = {
    "digits": CatalogueEntry(
        "8x8 handwritten digits blended into two photographs",
        "comes with scikit-learn (BSD); CC BY photographs",
        "Alpaydin and Kaynak 1998; the blend: Ganin et al. 2016",
        "included",
        samples=(1797,),
        split="1,437 + 360",
        size="3, 20, 20",
        note="Domains: the photographs, china and flower.",
    ),
    "digits-plain": CatalogueEntry(
        "the same digits, white on black",
        "comes with scikit-learn (BSD)",
        "Alpaydin and Kaynak 1998",
        "included",
        samples=(1797,),
        split="1,437 + 360",
        size="3, 20, 20",
    ),
    "cifar10": CatalogueEntry(
        "CIFAR-10",
        "academic use",
        "Krizhevsky 2009",
        "downloaded",
        "cifar-10-python.tar.gz",
        "www.cs.toronto.edu/~kriz/cifar.html",
        (60000,),
        "50,000 + 10,000",
        "3, 32, 32",
    ),
    "cifar100": CatalogueEntry(
        "CIFAR-100",
        "academic use",
        "Krizhevsky 2009",
        "downloaded",
        "cifar-100-python.tar.gz",
        "www.cs.toronto.edu/~kriz/cifar.html",
        (60000,),
        "50,000 + 10,000",
        "3, 32, 32",
    ),
    "mnist": CatalogueEntry(
        "MNIST",
        "CC BY-SA 3.0",
        "LeCun et al. 1998",
        "downloaded",
        "MNIST/raw/\n    train-images-idx3-ubyte.gz   train-labels-idx1-ubyte.gz\n"
        "    t10k-images-idx3-ubyte.gz    t10k-labels-idx1-ubyte.gz",
        "yann.lecun.com/exdb/mnist",
        (70000,),
        "60,000 + 10,000",
        "1, 28, 28",
    ),
    "svhn": CatalogueEntry(
        "Street View House Numbers, cropped digits",
        "non-commercial use",
        "Netzer et al. 2011",
        "downloaded",
        "train_32x32.mat\ntest_32x32.mat",
        "ufldl.stanford.edu/housenumbers",
        (99289,),
        "73,257 + 26,032",
        "3, 32, 32",
    ),
    "usps": CatalogueEntry(
        "USPS digits",
        "research use",
        "Hull 1994",
        "downloaded",
        "usps.bz2\nusps.t.bz2",
        "www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets (multiclass)",
        (9298,),
        "7,291 + 2,007",
        "1, 16, 16",
    ),
    "mnist-m": CatalogueEntry(
        "MNIST digits blended into photographs",
        "non-commercial research (BSDS500's photographs)",
        "Ganin et al. 2016",
        "by hand",
        "mnist_m_train/*.png       mnist_m_train_labels.txt   (lines: FILE DIGIT)\nmnist_m_test/*.png        mnist_m_test_labels.txt\n"
        "or mnist_m.npz            (x_train, y_train, x_test, y_test; uint8 images N, H, H, 3)",
        "yaroslav.ganin.net (mnist_m.tar.gz)",
        (68002, 70000),
        "59,001 + 9,001",
        "3, 32, 32",
        "Pickles (keras_mnistm.pkl) are not read: opening one runs what is in it. Save its arrays with np.savez.",
    ),
    "synth-digits": CatalogueEntry(
        "SynthDigits: digits rendered of Windows fonts",
        "research use",
        "Ganin and Lempitsky 2015",
        "by hand",
        "synth_train_32x32.mat\nsynth_test_32x32.mat",
        "yaroslav.ganin.net (SynthDigits.zip)",
        (488953,),
        "479,400 + 9,553",
        "3, 32, 32",
    ),
    "digits-five": CatalogueEntry(
        "the five-domain digits of FedBN: SVHN, USPS, SynthDigits, MNIST-M, MNIST",
        "those of the five",
        "Li et al. 2021 (FedBN); each set's own",
        "by hand",
        "SVHN/train_32x32.mat, test_32x32.mat                   or svhn.npz,         digits_chars74k_street.npz (stands in)\n"
        "USPS/usps.bz2, usps.t.bz2                              or usps.npz,         digits_usps.npz\n"
        "SynthDigits/synth_train_32x32.mat, synth_test_32x32.mat or synth_digits.npz, digits_chars74k_font.npz (stands in)\n"
        "MNIST-M/mnist_m_train/*.png, ... (see mnist-m)         or mnist_m.npz,      digits_mnist_m.npz\n"
        "MNIST/raw/*                                            or mnist.npz,        digits_mnist.npz",
        "see svhn, usps, synth-digits, mnist-m, mnist",
        (),
        "the published splits",
        "3, 28, 28",
        "The first that is there is taken; SVHN, USPS and MNIST are downloaded if nothing is. A stand-in is named: the domain is called "
        "chars74k-street-for-SVHN. The paper's 743 samples per client: samples-per-domain=743.",
    ),
    "digits-five-pooled": CatalogueEntry(
        "the same five domains, each set's samples pooled and divided anew, as FedBN has them",
        "those of the five",
        "Li et al. 2021 (FedBN); each set's own",
        "by hand",
        "SVHN/*, USPS/*, SynthDigits/*, MNIST-M/*, MNIST/raw/*, or archives, as for digits-five",
        "see svhn, usps, synth-digits, mnist-m, mnist",
        (),
        "4 : 1 at random, by domain, the same in every run",
        "3, 28, 28",
        "The paper's 7,438 training samples of the smallest domain, USPS, are four fifths of all that it has.",
    ),
    "office-caltech10": CatalogueEntry(
        "Office-Caltech10: ten office objects from four sources",
        "research use",
        "Gong et al. 2012",
        "by hand",
        "{amazon,caltech,dslr,webcam}/\n"
        "    {back_pack,bike,calculator,headphones,keyboard,laptop_computer,monitor,mouse,mug,projector}/*.jpg",
        "the page of Gong et al. (Geodesic Flow Kernel), or the archive that FedBN's README links",
        (2533,),
        "4 : 1 at random, by domain and class",
        "3, 256, 256",
        "Images are stretched to a square, as in FedBN. The paper's 62 samples per client: samples-per-domain=62. The lists that FedBN "
        "publishes are pickles and are not read.",
    ),
    "domainnet": CatalogueEntry(
        "DomainNet, the ten classes of FedBN, six domains",
        "non-commercial research",
        "Peng et al. 2019; the classes: Li et al. 2021",
        "by hand",
        "{clipart,infograph,painting,quickdraw,real,sketch}/\n"
        "    {bird,feather,headphones,ice_cream,teapot,tiger,whale,windmill,wine_glass,zebra}/*.jpg   (other classes are passed over)\n"
        "{clipart,...}_train.txt, {clipart,...}_test.txt        (the published splits, if wished: all or none)",
        "ai.bu.edu/M3SDA",
        (),
        "as the lists say; without them 4 : 1 at random",
        "3, 256, 256",
        "Images are stretched to a square, as in FedBN. The paper's 105 samples per client: samples-per-domain=105.",
    ),
    "pacs": CatalogueEntry(
        "PACS: seven classes as art painting, cartoon, photo and sketch",
        "research use",
        "Li et al. 2017",
        "by hand",
        "{art_painting,cartoon,photo,sketch}/\n    {dog,elephant,giraffe,guitar,horse,house,person}/*.jpg\n"
        "{art_painting,...}_train_kfold.txt, {art_painting,...}_crossval_kfold.txt   (the published splits, if wished: all or none)",
        "sketchx.eecs.qmul.ac.uk (Deeper, Broader and Artier Domain Generalization)",
        (9991,),
        "as the lists say (9 : 1); without them 4 : 1 at random",
        "3, 227, 227",
    ),
    "tiny-imagenet": CatalogueEntry(
        "Tiny-ImageNet, 200 classes",
        "non-commercial research (ImageNet's)",
        "Le and Yang 2015",
        "by hand",
        "wnids.txt\ntrain/WNID/images/*.JPEG\nval/images/*.JPEG\nval/val_annotations.txt",
        "cs231n.stanford.edu/tiny-imagenet-200.zip",
        (110000,),
        "100,000 + 10,000 (val; the labels of test are not published)",
        "3, 64, 64",
    ),
    "imagenet": CatalogueEntry(
        "ImageNet, ILSVRC 2012, 1,000 classes",
        "non-commercial research, after registration",
        "Russakovsky et al. 2015",
        "by hand",
        "train/WNID/*.JPEG\nval/WNID/*.JPEG       (the published archive is flat: sort it)",
        "image-net.org",
        (1331167,),
        "1,281,167 + 50,000 (val)",
        "3, 224, 224",
        "All of it is held in memory: 187 GiB at 224 pixels, 15 GiB at 64 (image-size=64), in every process. A warning says how much "
        "before anything is read. Fewer class folders make a smaller set.",
    ),
    "cityscapes": CatalogueEntry(
        "Cityscapes: street scenes with a class per pixel; a domain is a city",
        "non-commercial research, after registration",
        "Cordts et al. 2016",
        "by hand",
        "leftImg8bit/{train,val}/CITY/*_leftImg8bit.png\ngtFine/{train,val}/CITY/*_gtFine_labelIds.png",
        "www.cityscapes-dataset.com (leftImg8bit_trainvaltest.zip, gtFine_trainvaltest.zip)",
        (3475,),
        "2,975 of 18 cities + 500 of 3 others (val)",
        "3, 1024, 2048",
        "image-size is the height, the width is twice that. Images and masks take 75 GiB at full size, 4.7 GiB at image-size=256. The test "
        "cities are none that are trained on.",
    ),
    "abide": CatalogueEntry(
        "ABIDE I: connectomes of 110 brain regions, autism or not; a domain is a site",
        "non-commercial research (CC BY-NC-SA 3.0)",
        "Di Martino et al. 2014; Craddock et al. 2013",
        "by hand",
        "Phenotypic_V1_0b_preprocessed1.csv and */FILE_ID_rois_ho.1D  (anywhere below: NYU, USM, UM, UCLA are taken)\n"
        "or SITE.npz for each site   (y with series: n, T, R; or y with x: n, features; subject, if one has several rows or scans)\n"
        "or SITE.csv for each site   (lines: label, features)",
        "preprocessed-connectomes-project.org/abide (pipeline cpac, strategy filt_global, derivative rois_ho)",
        (),
        "4 : 1 of the subjects, by site and label",
        "5995",
        "Time series are cut into windows of 32 time points, one apart, as samples. Accuracy counts windows.",
    ),
}


def page() -> str:
    """Return the generated part of docs/data.md."""
    return "\n\n".join(_section(name, entry) for name, entry in CATALOGUE.items())


def _section(name: str, entry: CatalogueEntry) -> str:
    lines = [f"### `{name}`", "", f"{entry.title}. {entry.citation}. Terms: {entry.terms}."]
    got = {
        "included": "Nothing to do: it is installed.",
        "downloaded": f"Downloaded into `data-path`. By hand: {entry.source}.",
        "by hand": f"By hand: {entry.source}.",
    }[entry.how]
    lines += ["", f"Training + test: {entry.split}. A sample: {entry.size}. {got}{' ' + entry.note if entry.note else ''}"]
    if entry.tree:
        lines += ["", *("    " + line for line in entry.tree.splitlines())]
    return "\n".join(lines)
