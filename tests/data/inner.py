"""The inner modules which the tests of data sets are about, imported in one place: a module that moves is renamed here."""

# ruff: noqa: F401

from __future__ import annotations

from experiments.data.cityscapes import Segmentation
from experiments.data.connectomes import SITES, WINDOW, connectome, windows
from experiments.data.image_folders import DOMAINNET_CLASSES, DOMAINNET_DOMAINS, OFFICE_CLASSES, OFFICE_DOMAINS, PACS_CLASSES, PACS_DOMAINS
from experiments.data.listing import Image, split
from experiments.data.shift import SHIFTS, Limit, limited, shifted
from fl_bn.data.augment import AUGMENTATIONS, augmenter
from fl_bn.data.batches import ClientTooSmall, distinct, draw_batches, epoch_batches
from fl_bn.data.columns import columns_of, read_columns
from fl_bn.data.csv_files import TableData, load_csv, place, read_rows
from fl_bn.data.csv_files import split as split_rows
from fl_bn.data.dataset import DATASETS, DataNotFound, load, to_input
from fl_bn.data.digits import SPLIT
from fl_bn.data.draft_columns import draft
from fl_bn.data.images import images_to_tensor, resize
from fl_bn.data.partition import classes_per_client, dirichlet, iid, label_counts, partition, similarity
from fl_bn.data.record import DataError, Dataset
from fl_bn.data.subsets import hold_out, only_domain, without_domain
from fl_bn.run.assembly import OwnData, client_samples, dataset, partitions
from fl_bn.run.config import RunConfig
from fl_bn.task import IGNORE
