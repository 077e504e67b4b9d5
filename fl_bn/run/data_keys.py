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

DIGEST = re.compile("([0-9a-f]{16})?")

own_data = partial(option, used=when.OWN_DATA)
of_sites = partial(option, used=when.SITES_DATA)


@dataclass(frozen=True)
class DataKeys:
    """Declare the run-config keys of the method, the network and the data as fields, in the order of docs/config.md."""

    method: str = option("fbn", "how normalisation is federated", METHODS)
    freeze_after: int = option(
        -1, "last round before the statistics freeze; -1: as the method says", "-1 or >= 0", used=when.FREEZES_EARLY_ENOUGH
    )
    # model and data
    model: str = option("digits-cnn-small", f"{', '.join(MODELS)}, torchvision's, or package.module:function", "see fl_bn.models")
    model_weights: str = option("", "file of weights (.pt, .pth, .safetensors); a head of another size stays new", "path")
    buffers: str = option("", f"roles ({', '.join(BUFFER_ROLES)}) of the network's own buffers", "NAME=ROLE,...", parse_buffer_roles)
    task: str = option(
        AUTO,
        "what the network learns, which decides loss and metrics; auto: classification, or segmentation where the labels are masks",
        f"{', '.join((AUTO, *TASKS))}, package.module:function",
        lambda name: name in (AUTO, *TASKS) or ":" in name,
    )
    dataset: str = option("digits", f"{', '.join(DATASETS)}; package.module:function; sites: each client's own", "see fl_bn.data")
    classes: int = of_sites(0, "dataset=sites: number of classes (of other tasks: values, or labels)", ">= 0")
    channels: int = of_sites(0, "dataset=sites: channels of the images", ">= 0")
    columns_digest: str = of_sites(
        "", "digest of the sites' columns.toml", "16 hexadecimal digits", lambda text: bool(DIGEST.fullmatch(text))
    )
    data_path: str = own_data("", "folder or files of the data, separated by commas (each is a client: see partition)", "path")
    image_size: int = option(0, "side in pixels to which images are resized; 0: the data set's own size", "0..4096")
    hold_out: str = option("", "a domain that the run is trained and tested without, for fl-bn adapt", "a domain's name")
    augment: str = declared(LocalTraining, "augment")
    partition: str = own_data(AUTO, "how data are split; auto: natural for several files or folders, else classes", (AUTO, *KINDS))
    partition_parameter: float = option(1.0, "classes per client, concentration, or share drawn at random", ">= 0", used=when.PARAMETER)
    test_on: str = option("own", "test clients of domains on their own, or on all test data", ("own", "all"), used=when.OWN_DOMAINS)
    sizes: str = own_data("natural", "equal: every client keeps only as many samples as the smallest client has", ("natural", "equal"))
    validation_share: float = option(0.0, "share of the training samples to test on in place of the test data; 0: none", "0..0.9")
    unseen_client: bool = declared(ServerPolicy, "unseen")
    calibrate: int = declared(ServerPolicy, "calibrate")
