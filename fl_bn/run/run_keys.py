"""The keys of the run config that are no option of one method, objective or server optimiser: nothing else.

Those stand with what they belong to, and are collected from ``METHODS``, ``OBJECTIVES`` and ``SERVER_OPTIMIZERS``. All keys, in kebab-case,
stand in ``[tool.flwr.app.config]`` of pyproject.toml and can be overridden with
``flwr run . --run-config "rounds=10 method='hbn'"``; ``fl-bn run`` and ``fl-bn compare`` take them as options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_bn.data.augment import AUGMENTATIONS
from fl_bn.data.dataset import DATASETS
from fl_bn.data.partition import KINDS
from fl_bn.data.shift import SHIFTS
from fl_bn.exchange.session import POLICIES
from fl_bn.exchange.settings import CARRIERS
from fl_bn.federation.clipping import CLIPS, FROZEN, PATH
from fl_bn.federation.momentum import MAINTAIN
from fl_bn.federation.narrow import AS_THE_MODEL, PAYLOADS
from fl_bn.federation.network import MEMORY_FORMATS
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS
from fl_bn.federation.rounds import RECALIBRATIONS
from fl_bn.federation.settings import OPTIMIZERS, PRECISIONS, SCHEDULES, UPDATES
from fl_bn.federation.vectorised import ENGINES
from fl_bn.federation.workers import MOST_THREADS, MOST_WORKERS
from fl_bn.methods import METHODS
from fl_bn.methods.fbn import BOUNDED_SCALE
from fl_bn.methods.fedtan import FROZEN_RATE as FEDTAN2_RATE
from fl_bn.methods.hbn import SCALE
from fl_bn.methods.method import BOUNDED_FROZEN_RATE, FROZEN_RATE
from fl_bn.models import MODELS
from fl_bn.models.standardise import STANDARDS
from fl_bn.names import names_of
from fl_bn.objectives import OBJECTIVES
from fl_bn.options import option
from fl_bn.robust.attacks import ATTACKS, ON
from fl_bn.roles import BUFFER_ROLES, parse_buffer_roles
from fl_bn.run.keys import (
    DIAGNOSTICS,
    LIKE_RULES,
    RULE_NAMES,
    all_of,
    known_device,
    known_joins,
    known_nodes,
    known_rule,
    known_sites,
    parses,
)
from fl_bn.secure.settings import FINEST, WIDEST
from fl_bn.task import AUTO, TASKS


@dataclass(frozen=True)
class RunKeys:
    """The keys as fields; ``RunConfig`` checks them, adds the options, and says what they make together."""

    method: str = option("fbn", "how normalisation is federated", METHODS)
    freeze_after: int = option(
        -1, "last round before the statistics freeze, any method; -1: never (fixbn, fedtan2: half of the rounds)", "-1 or >= 0"
    )
    frozen_rate: float = option(
        0.0,
        "most that rounds with frozen statistics run at, as a share of the highest learning rate before; 1: the schedule alone decides; 0: "
        f"{BOUNDED_FROZEN_RATE:g} where gradients are clipped and centred, else {FROZEN_RATE:g} (fedtan2: {FEDTAN2_RATE:g})",
        "0 or (0, 1]",
    )
    # model and data
    model: str = option(
        "digits-cnn-small",
        f"{', '.join(MODELS)}, deeplabv3plus-ENCODER, a torchvision classifier, or package.module:function",
        "see fl_bn.models",
    )
    model_stem: str = option(
        "auto",
        "torchvision's networks: imagenet, as they are there (auto, too), or small: for images of 32 pixels",
        ("auto", "imagenet", "small"),
    )
    model_weights: str = option("", "file of weights to start from (.pt, .pth, .safetensors); a head of another size stays fresh", "path")
    buffers: str = option(
        "",
        f"what becomes of the network's own buffers, '*.codebook=shared, site_*=kept': {', '.join(BUFFER_ROLES)}; empty: known kinds by "
        "their type, all others shared",
        "NAME=ROLE,...",
        parses(parse_buffer_roles),
    )
    task: str = option(
        AUTO,
        "what the network learns, and so loss and metrics; auto: classification, of pixels (segmentation) where labels are masks",
        f"{', '.join((AUTO, *TASKS))}, package.module:function",
        lambda name: name in (AUTO, *TASKS) or ":" in name,
    )
    dataset: str = option(
        "digits",
        f"{', '.join(DATASETS)} (npz and folder: give data-path); package.module:function; sites: every "
        "client has its own, named in its node config, and the server none (give classes, channels, image-size)",
        "see fl_bn.data",
    )
    classes: int = option(0, "dataset=sites: number of classes (of other tasks: values, or labels)", ">= 0")
    channels: int = option(0, "dataset=sites: channels of the images", ">= 0")
    data_path: str = option(
        "",
        "folder of a public data set or of images, npz files separated by commas (each a domain), or what package.module:function takes",
        "path",
    )
    image_size: int = option(0, "side of the images in pixels; 0: as they are", "0..4096")
    shifts: str = option(
        "",
        "feature shifts, each makes a domain of a share of the data; empty: the data's own",
        f"{', '.join(SHIFTS)}, separated by commas",
        all_of(SHIFTS),
        like=SHIFTS,
    )
    samples_per_domain: int = option(0, "training samples kept of each domain (of all, where there are no domains); 0: all", ">= 0")
    hold_out: str = option(
        "", "a domain that the run is trained and tested without, to adapt to afterwards (fl-bn adapt)", "a domain's name"
    )
    augment: str = option("none", "random changes of training images, drawn once per batch", AUGMENTATIONS)
    standardise: str = option(
        "none", "images by the published mean and deviation of a data set; none: 0..255 becomes -1..1", ("none", *STANDARDS)
    )
    partition: str = option("classes", "how the training data are split over the clients", KINDS)
    partition_parameter: float = option(
        1.0, "classes: classes per client; dirichlet, domain-dirichlet: concentration; similarity: fraction; else unused", ">= 0"
    )
    sizes: str = option("natural", "equal: every client keeps as many samples as the smallest has", ("natural", "equal"))
    validation_share: float = option(
        0.0,
        "share of each client's training samples that it does not train on, and that the run is tested with in the place of the test data: "
        "to choose a method or a learning rate; 0: none, the test data count",
        "0..0.9",
    )
    share_label_counts: bool = option(
        True, "clients tell the server their samples per class, for labels.png (never with secure-aggregation)"
    )
    share_drift: bool = option(
        False,
        "fedbn, silobn, single: clients tell how far their own statistics moved (largest drift, least variance, growth), for the log",
    )
    unseen_client: bool = option(
        False, "fedbn, silobn: after the last round clients tell what they keep of BatchNorm; the average is for fl-bn adapt"
    )
    calibrate: int = option(
        -2,
        "statistics-only exchanges before round 1; -1: as many as make all layers exact; -2: so for hbn, fbn and "
        "freeze-after=0, else none (and none with dp-noise)",
        ">= -2",
    )
    recalibration: str = option(
        "auto",
        "how the statistics of all layers are made exact (recalibrate, calibrate, hbn-evaluate=exact): passes, a message and a forward "
        "pass per layer; exchange, one of each and an exchange per layer, if all clients can be there at once, else passes; auto: "
        "exchange, but passes in a simulation",
        RECALIBRATIONS,
    )
    recalibration_memory: float = option(
        1.0,
        "with exchange: activations that a process may keep from layer to layer, in GiB; where they are more, every layer takes a forward "
        "pass",
        ">= 0",
    )
    unit_scale: bool = option(
        True,
        "hbn, fbn, freeze-after=0: after the calibration, the weights before BatchNorm are rescaled so that its inputs have deviation 1 "
        f"(hbn: {SCALE:g}; fbn: {BOUNDED_SCALE:g}, but 1 with fbn-momentum or clip='none')",
    )
    centre_gradients: str = option(
        "auto",
        "the gradients of weights before the head lose their mean over the inputs, as BatchNorm's do by themselves; auto: with fbn "
        "and hbn, but not with fbn-momentum or hbn-lam; with every other method while the statistics are frozen",
        ("auto", "always", "never"),
    )
    # federation
    clients: int = option(10, "clients in the population; in simulation equal to options.num-supernodes", "1..100000")
    clients_at_start: int = option(
        0, "clients that suffice for the run to start; the others join before whatever round they come; 0: all", ">= 0"
    )
    join_rounds: str = option(
        "", "clients that take part only from a later round, '4:10,5:20': client 4 from round 10", "CLIENT:ROUND,...", known_joins
    )
    client_nodes: str = option(
        "",
        "Flower's node ids of clients 0, 1, ..., so that no other node is taken for them (fl-bn submit gives them); empty: a client is who "
        "it says it is",
        "NODE,NODE,...",
        known_nodes,
    )
    client_names: str = option(
        "",
        "names of the sites of clients 0, 1, ..., for logs, errors, records and pictures (fl-bn submit gives them); empty: a client is its "
        "number",
        "NAME,NAME,...",
        known_sites,
    )
    fraction: float = option(1.0, "fraction of the clients that train in a round", "(0, 1]")
    rounds: int = option(100, "training rounds; 0, with calibrate: the statistics of model-weights are measured, and no more", ">= 0")
    client_weights: str = option(
        "samples",
        "weight of a client in the average of the weights: the different samples it trained on this round, or equal; its running "
        "statistics weigh by samples",
        ("samples", "uniform"),
    )
    payload_dtype: str = option(
        AS_THE_MODEL,
        "in which weights and gradients travel while clients train: float32, as the model has them; in half the bytes bfloat16, rounded by "
        "up to 2^-8 of a number, or float16, by up to 2^-11 (numbers up to 65504). Statistics, buffers and what accompanies weights stay "
        "exact (not fedtan, not secure-aggregation)",
        PAYLOADS,
    )
    min_replies: float = option(0.5, "fraction of a cohort's replies that must be usable, else the round changes nothing", "0..1")
    min_cohort: int = option(
        1, "clients that must be there for a round to start, and whose replies must be usable, else it changes nothing", ">= 1"
    )
    max_failed_rounds: int = option(3, "failed rounds in a row that stop the run", ">= 1")
    round_timeout: float = option(600.0, "deadline and time to live of every message", "> 0", unit="seconds")
    wait_timeout: float = option(
        120.0, "how long the server waits for all clients before round 1, and for min-cohort of them later", ">= 0", unit="seconds"
    )
    retry_timeout: float = option(
        120.0,
        "how long a round waits for a client whose node or process died to come back and do it again, seconds; 0: goes on without it",
        ">= 0",
    )
    checkpoint_every: int = option(0, "rounds between the server's checkpoints, from which resume goes on; 0: none", ">= 0")
    resume: str = option(
        "",
        "go on from the last checkpoint: latest (the newest run in output that is not finished), or a run's folder name",
        "latest or a name",
    )
    # layer-wise exchange (fedtan, fedtan2, fedavg-alg2; recalibration)
    exchange: str = option(
        "auto",
        "how the layer-wise exchange is carried: grpc, replay (Flower messages, any cohort size, slow), local (fl-bn run); auto: local, "
        "else grpc if the cohort can run at once, else replay",
        CARRIERS,
    )
    exchange_policy: str = option(
        "abort", "for a client that dies or is late: abort fails the round for all, shrink goes on with weights over the others", POLICIES
    )
    exchange_timeout: float = option(30.0, "how long one exchange waits for the others once half of them wait", "> 0", unit="seconds")
    exchange_join_timeout: float = option(30.0, "how long the others wait for another client to join a round", "> 0", unit="seconds")
    exchange_host: str = option("127.0.0.1", "grpc: the name by which clients reach the ServerApp's machine", "host name or address")
    exchange_bind: str = option("", "grpc: address to listen on; empty: loopback if exchange-host is, else all", "address")
    exchange_port: int = option(0, "grpc: port to listen on; 0: any free one", "0..65535")
    exchange_certificate: str = option("", "grpc: the service's certificate, PEM, valid for exchange-host; empty: plaintext", "path")
    exchange_key: str = option("", "grpc: its private key, PEM", "path")
    exchange_authority: str = option(
        "", "grpc: the certificate authority's certificate, PEM; clients get it with their train message", "path"
    )
    exchange_insecure: bool = option(False, "grpc: plaintext beyond this machine (where Flower is insecure, too)")
    # Byzantine clients, and the defence against them
    byzantine: int = option(0, "clients that attack: the last ones; the training data are split over the others", ">= 0")
    attack: str = option(
        "none",
        "what they do, knowing all honest replies (label-flip: to their own data); -optimised: the strength that harms most",
        ("none", *ATTACKS),
    )
    attack_on: str = option("both", "what they lie about: their BN statistics, their updates, or both", ON)
    attack_strength: float = option(
        0.0,
        "foe: epsilon; alie: z; gaussian: standard deviation; mimic: whom; 0: 0.5, the textbook's z, 1, the first",
        "finite",
        math.isfinite,
    )
    statistics_rule: str = option("mean", "how the server combines the clients' BN statistics", RULE_NAMES, known_rule, like=LIKE_RULES)
    update_rule: str = option("mean", "how it combines their updates", RULE_NAMES, known_rule, like=LIKE_RULES)
    declared_byzantine: int = option(
        -1,
        "Byzantine clients that the rules withstand; -1: byzantine",
        ">= -1",
    )
    # secure aggregation, and differential privacy
    secure_aggregation: bool = option(
        False, "the server sees sums of the clients' updates, statistics and evaluations alone (SecAgg+; not FedTAN's exchange)"
    )
    secagg_shares: int = option(0, "parts of each client's secrets, an odd number; 0: one per client of the cohort", "0 or >= 3")
    secagg_threshold: int = option(0, "parts that recover a secret, more than half; 0: the fewest allowed", ">= 0")
    secagg_clipping_range: float = option(
        8.0, "values beyond are cut off: standard deviations of statistics, units of the update of weights", f"{FINEST}..{WIDEST:.0f}"
    )
    secagg_quantization_range: int = option(22, "bits per value within that range", "4..30")
    dp_noise: float = option(
        0.0, "multiplier of the noise that clients add before they are summed (needs client-weights=uniform); 0: none", ">= 0"
    )
    dp_clip: float = option(1.0, "with dp-noise: largest L2 norm of a client's update", "> 0")
    dp_statistics_clip: float = option(1.0, "with dp-noise: largest L2 norm of its standardised statistics", "> 0")
    dp_delta: float = option(1e-5, "with dp-noise: delta at which epsilon is stated", "(0, 1)")
    # local training
    local_epochs: int = option(0, "passes over the client's data per round; 0: local-steps count", ">= 0")
    local_steps: int = option(5, "batches per client and round; 0: local-epochs count", ">= 0")
    batch_size: int = option(16, "samples per batch; a last batch of one is merged into the one before", ">= 2")
    update: str = option(
        "weights", "clients send weights, or one batch's gradient that the server steps with (DSGD; needs local-steps=1)", UPDATES
    )
    optimizer: str = option("sgd", "the clients' optimiser", OPTIMIZERS)
    learning_rate: float = option(0.05, "the optimiser's step size in round 1", "> 0")
    learning_rate_schedule: str = option(
        "cosine",
        "constant; step: times decay after 50 % and 75 % of the rounds; exponential: times decay per round; cosine: to 0; milestones",
        SCHEDULES,
    )
    learning_rate_decay: float = option(0.3, "the factor of step and exponential", "(0, 1]")
    learning_rate_milestones: str = option(
        "", "milestones: share of the rounds:factor of the rate after it, separated by commas", "like 0.6:0.1, 0.8:0.01"
    )
    momentum: float = option(0.9, "the optimiser's momentum (EMA form, kept over rounds, for update=gradients)", "[0, 1)")
    maintain_momentum: str = option(
        "reset", "between rounds: reset, kept by each client (local), or averaged by the server (global: double payload)", MAINTAIN
    )
    weight_decay: float = option(1e-4, "L2 penalty", ">= 0")
    clip: str = option(
        "auto",
        "of gradients: their norm over all parameters, the same so that a round's SGD moves weights by at most clip-limit (round), each "
        "value, or per output unit by its weights' norm (adaptive: FedWon); auto: round with "
        f"{PATH:g} for hbn, fbn and freeze-after=0 with several local steps, else none, but adaptive with {FROZEN:g} once statistics are "
        "frozen",
        ("auto", *CLIPS),
    )
    clip_limit: float = option(1.0, "clip: largest norm, path or value; adaptive: share of the weights' norm; auto: has its own", "> 0")
    # local objective
    objective: str = option("none", "what clients minimise beside the loss, or how they correct its gradient", OBJECTIVES)
    moon_projection: int = option(
        0, "features of a projection of two layers before the head, as in MOON's paper, with any objective; 0: none", ">= 0"
    )
    # server
    server_optimizer: str = option(
        "fedavg", "steps on the pseudo-gradient of weights and affine parameters, never on statistics", SERVER_OPTIMIZERS
    )
    # evaluation, machine and output
    evaluate_every: int = option(5, "rounds between evaluations; the last round is always evaluated", ">= 1")
    diagnostics: str = option(
        "",
        "measured at every evaluation, in simulation; in diagnostics.csv",
        f"{', '.join(DIAGNOSTICS)}, separated by commas",
        all_of(DIAGNOSTICS),
        like=DIAGNOSTICS,
    )
    seed: int = option(0, "decides partition, initial weights, cohorts, batches and dropout", ">= 0")
    device: str = option(
        "auto",
        "where clients train: auto (a GPU if there is one), cpu, cuda, cuda:0 ...; a client's node config may say otherwise",
        "torch device",
        known_device,
    )
    precision: str = option(
        "float32",
        "of local training; mixed: bfloat16 where torch's autocast sees fit, batch statistics and all that travels float32",
        PRECISIONS,
    )
    deterministic: bool = option(
        True,
        "on a GPU, kernels whose sums have one order, so that the same seed has the same bits; torch warns of layers for which it has none",
    )
    memory_format: str = option(
        "contiguous",
        "of the clients' networks; channels-last: torch's faster convolutions on many machines, equal up to the order of sums",
        MEMORY_FORMATS,
    )
    engine: str = option(
        "sequential",
        "fl-bn run and sweeps: sequential, or vectorised: the clients of a cohort as one batched program (for a GPU; equal up to "
        "the order of sums)",
        ENGINES,
    )
    threads: int = option(1, "CPU threads per process", f"1..{MOST_THREADS}")
    workers: int = option(
        1,
        "fl-bn run and sweeps: processes of this machine that compute clients at the same time; 0: as many as there are cores. The results "
        "have the same bits",
        f"0..{MOST_WORKERS}",
    )
    output: str = option("runs", "folder in which each run makes a folder of its own; empty: write nothing", "path")
    name: str = option("", "the run folder's name; empty: time, method, data and seed", "a file name")
    pictures: bool = option(True, "draw pictures at the end, and write TensorBoard events after every round")
    callbacks: str = option(
        "",
        "called after every round, evaluation and at the end (fl_bn.Callback): trackers, say; each is made by its class, or a function, of "
        "the config and the run's folder",
        "package.module:Class, separated by commas",
        lambda names: all(":" in name for name in names_of(names)),
    )
