"""Declare the run-config keys of the method, the network and the data. They come first in ``RunKeys``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from fl_bn.bn.roles import BUFFER_ROLES, parse_buffer_roles
from fl_bn.data.dataset import DATASETS
from fl_bn.data.partition import KINDS
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.models import MODELS
from fl_bn.options import declared, option
from fl_bn.run import used as when
from fl_bn.task import AUTO, TASKS

own_data = partial(option, used=when.OWN_DATA)
of_sites = partial(option, used=when.SITES_DATA)


@dataclass(frozen=True)
class DataKeys:
    """Declare the run-config keys of the method, the network and the data as fields, in the order of docs/config.md."""

    method: str = option("fbn", "how normalisation is federated", METHODS)
    freeze_after: int = option(
        -1,
        "last round before the statistics freeze, under any method; -1: they never freeze (under fixbn and fedtan2: after half of the "
        "rounds)",
        "-1 or >= 0",
        used=when.FREEZES_EARLY_ENOUGH,
    )
    # model and data
    model: str = option(
        "digits-cnn-small",
        f"{', '.join(MODELS)}, a torchvision classifier, or package.module:function",
        "see fl_bn.models",
    )
    model_weights: str = option(
        "", "file of weights to start from (.pt, .pth, .safetensors); a head of another size keeps its initial weights", "path"
    )
    buffers: str = option(
        "",
        f"role of each of the network's own buffers ({', '.join(BUFFER_ROLES)}), such as '*.codebook=shared, site_*=kept'; empty: buffers "
        "of known layers have the role of their kind, all others are shared",
        "NAME=ROLE,...",
        parse_buffer_roles,
    )
    task: str = option(
        AUTO,
        "what the network learns, which decides loss and metrics; auto: classification, or segmentation where the labels are masks",
        f"{', '.join((AUTO, *TASKS))}, package.module:function",
        lambda name: name in (AUTO, *TASKS) or ":" in name,
    )
    dataset: str = option(
        "digits",
        f"{', '.join(DATASETS)} (npz, folder and csv: give data-path); package.module:function; sites: every "
        "client has its own, named in its node config, and the server none (give classes, channels, image-size)",
        "see fl_bn.data",
    )
    classes: int = of_sites(0, "dataset=sites: number of classes (of other tasks: values, or labels)", ">= 0")
    channels: int = of_sites(0, "dataset=sites: channels of the images", ">= 0")
    columns_digest: str = of_sites(
        "",
        "dataset=sites: digest of the columns.toml that all sites with dataset='csv' must have (`fl-bn doctor` prints it)",
        "16 hexadecimal digits",
        lambda digest: not digest or re.fullmatch("[0-9a-f]{16}", digest) is not None,
    )
    data_path: str = own_data(
        "",
        "where the data are: a folder of a public data set, of images or of CSV files; npz files, image folders or CSV files of several "
        "sites, separated by commas (each is a domain, and a client: see partition); or the argument of package.module:function",
        "path",
    )
    image_size: int = option(0, "side in pixels to which images are resized; 0: the data set's own size", "0..4096")
    hold_out: str = option(
        "", "a domain that the run is trained and tested without, to adapt to afterwards (fl-bn adapt)", "a domain's name"
    )
    augment: str = declared(LocalTraining, "augment")
    partition: str = own_data(
        AUTO,
        "how the training data are split over the clients; auto: natural, where data-path names several files or folders, so that each is "
        "a client; else classes",
        (AUTO, *KINDS),
    )
    partition_parameter: float = option(
        1.0,
        "classes, table: number of classes per client; dirichlet, domain-dirichlet: concentration; similarity: share of each client's "
        "data that is drawn at random; other partitions: unused",
        ">= 0",
        used=when.PARAMETER,
    )
    test_on: str = option(
        "own",
        "partition=domain, domain-dirichlet, natural: test each client on its own domain (own), or on all test data (all), as other "
        "partitions do",
        ("own", "all"),
        used=when.OWN_DOMAINS,
    )
    sizes: str = own_data("natural", "equal: every client keeps only as many samples as the smallest client has", ("natural", "equal"))
    validation_share: float = option(
        0.0,
        "share of each client's training samples that is not trained on, but used for testing in place of the test data: to choose a "
        "method or a learning rate; 0: none, so the run is tested on the test data",
        "0..0.9",
    )
    unseen_client: bool = declared(ServerPolicy, "unseen")
    calibrate: int = declared(ServerPolicy, "calibrate")
