"""The keys of the run config that are no option of one method, objective or server optimiser.

Those stand with what they belong to, and are collected from ``METHODS``, ``OBJECTIVES`` and ``SERVER_OPTIMIZERS``. All keys, in kebab-case,
stand in ``[tool.flwr.app.config]`` of pyproject.toml and can be overridden with
``flwr run . --run-config "rounds=10 method='hbn'"``; ``fl-bn run`` and ``fl-bn compare`` take them as options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from fl_bn.data.record import SPLITS, TEST
from fl_bn.exchange.session import POLICIES
from fl_bn.exchange.settings import CARRIERS
from fl_bn.federation.clipping import CLIPS, FROZEN, PATH
from fl_bn.federation.engines.vectorised import ENGINES
from fl_bn.federation.engines.workers import MOST_THREADS, MOST_WORKERS
from fl_bn.federation.momentum import MAINTAIN
from fl_bn.federation.narrow import AS_THE_MODEL, PAYLOADS
from fl_bn.federation.network import MEMORY_FORMATS
from fl_bn.federation.optimizers import SERVER_OPTIMIZERS
from fl_bn.federation.settings import ALL_SAMPLES, OPTIMIZERS, PRECISIONS, SCHEDULES, UPDATES
from fl_bn.objectives import OBJECTIVES
from fl_bn.options import option
from fl_bn.robust.attacks import ATTACKS, ON
from fl_bn.run import keys
from fl_bn.run import used as when
from fl_bn.run.data_keys import DataKeys
from fl_bn.secure.settings import FINEST, WIDEST
from fl_bn.support.names import names_of

exchanging = partial(option, used=when.EXCHANGES)
over_grpc = partial(option, used=when.OVER_GRPC)
secured = partial(option, used=when.SECURE)
noisy = partial(option, used=when.NOISE)


@dataclass(frozen=True)
class RunKeys(DataKeys):
    """The keys as fields, after those of ``DataKeys``; ``RunConfig`` checks them, adds the options, and says what they make together."""

    # federation
    clients: int = option(10, "clients in the population; in simulation equal to options.num-supernodes", "1..100000")
    clients_at_start: int = option(
        0, "clients that suffice for the run to start; the others join before whatever round they come; 0: all", ">= 0"
    )
    join_rounds: str = option(
        "", "clients that take part only from a later round, '4:10,5:20': client 4 from round 10", "CLIENT:ROUND,...", keys.known_joins
    )
    client_nodes: str = option(
        "",
        "Flower's node ids of clients 0, 1, ..., so that no other node is taken for them (fl-bn submit gives them); empty: a client is who "
        "it says it is",
        "NODE,NODE,...",
        keys.known_nodes,
    )
    client_names: str = option(
        "",
        "names of the sites of clients 0, 1, ..., for logs, errors, records and pictures (fl-bn submit gives them); empty: a client is its "
        "number",
        "NAME,NAME,...",
        keys.known_sites,
    )
    fraction: float = option(1.0, "fraction of the clients that train in a round", "(0, 1]")
    rounds: int = option(100, "training rounds; 0, with calibrate: the statistics of model-weights are measured, and no more", ">= 0")
    client_weights: str = option(
        "samples",
        "weight of a client in the average of the weights: the different samples it trained on this round (samples), all that it has "
        "(data), or equal (uniform); with uniform, its running statistics weigh by samples",
        ("samples", ALL_SAMPLES, "uniform"),
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
    exchange: str = exchanging(
        "auto",
        "how the layer-wise exchange is carried: grpc, replay (Flower messages, any cohort size, slow), local (fl-bn run); auto: local, "
        "else grpc if the cohort can run at once, else replay",
        CARRIERS,
    )
    exchange_policy: str = option(
        "abort",
        "for a client that dies or is late: abort fails the round for all, shrink goes on with weights over the others",
        POLICIES,
        used=when.FEDTAN,
    )
    exchange_timeout: float = exchanging(30.0, "how long one exchange waits for the others once half of them wait", "> 0", unit="seconds")
    exchange_join_timeout: float = exchanging(30.0, "how long the others wait for another client to join a round", "> 0", unit="seconds")
    exchange_host: str = over_grpc("127.0.0.1", "grpc: the name by which clients reach the ServerApp's machine", "host name or address")
    exchange_bind: str = over_grpc("", "grpc: address to listen on; empty: loopback if exchange-host is, else all", "address")
    exchange_port: int = over_grpc(0, "grpc: port to listen on; 0: any free one", "0..65535")
    exchange_certificate: str = over_grpc("", "grpc: the service's certificate, PEM, valid for exchange-host; empty: plaintext", "path")
    exchange_key: str = over_grpc("", "grpc: its private key, PEM", "path")
    exchange_authority: str = over_grpc(
        "", "grpc: the certificate authority's certificate, PEM; clients get it with their train message", "path"
    )
    exchange_insecure: bool = over_grpc(False, "grpc: plaintext beyond this machine (where Flower is insecure, too)")
    # Byzantine clients, and the defence against them
    byzantine: int = option(0, "clients that attack: the last ones; the training data are split over the others", ">= 0")
    attack: str = option(
        "none",
        "what they do, knowing all honest replies (label-flip: to their own data); -optimised: the strength that harms most",
        ("none", *ATTACKS),
        used=when.ATTACKERS,
    )
    attack_on: str = option("both", "what they lie about: their BN statistics, their updates, or both", ON, used=when.LIES)
    attack_strength: float = option(
        0.0,
        "foe: epsilon; alie: z; gaussian: standard deviation; mimic: whom; 0: 0.5, the textbook's z, 1, the first",
        "finite",
        math.isfinite,
        used=when.STRENGTH,
    )
    statistics_rule: str = option(
        "mean", "how the server combines the clients' BN statistics", keys.RULE_NAMES, keys.known_rule, like=keys.LIKE_RULES
    )
    update_rule: str = option("mean", "how it combines their updates", keys.RULE_NAMES, keys.known_rule, like=keys.LIKE_RULES)
    declared_byzantine: int = option(
        -1,
        "Byzantine clients that the rules withstand; -1: byzantine",
        ">= -1",
    )
    # secure aggregation, and differential privacy
    secure_aggregation: bool = option(
        False, "the server sees sums of the clients' updates, statistics and evaluations alone (SecAgg+; not FedTAN's exchange)"
    )
    secagg_shares: int = secured(0, "parts of each client's secrets, an odd number; 0: one per client of the cohort", "0 or >= 3")
    secagg_threshold: int = secured(0, "parts that recover a secret, more than half; 0: the fewest allowed", ">= 0")
    secagg_clipping_range: float = secured(
        8.0, "values beyond are cut off: standard deviations of statistics, units of the update of weights", f"{FINEST}..{WIDEST:.0f}"
    )
    secagg_quantization_range: int = secured(22, "bits per value within that range", "4..30")
    dp_noise: float = secured(
        0.0, "multiplier of the noise that clients add before they are summed (needs client-weights=uniform); 0: none", ">= 0"
    )
    dp_clip: float = noisy(1.0, "with dp-noise: largest L2 norm of a client's update", "> 0")
    dp_statistics_clip: float = noisy(1.0, "with dp-noise: largest L2 norm of its standardised statistics", "> 0")
    dp_delta: float = noisy(1e-5, "with dp-noise: delta at which epsilon is stated", "(0, 1)")
    # local training
    local_epochs: int = option(0, "passes over the client's data per round; 0: local-steps count", ">= 0")
    local_steps: int = option(5, "batches per client and round; 0: local-epochs count", ">= 0")
    batch_size: int = option(16, "samples per batch; a last batch of one is merged into the one before", ">= 2")
    drop_last: bool = option(
        False,
        "a last batch smaller than batch-size is left out of each pass, and a client with fewer samples than one batch sits out the round",
    )
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
    learning_rate_decay: float = option(0.3, "the factor of step and exponential", "(0, 1]", used=when.DECAYS)
    learning_rate_milestones: str = option(
        "",
        "milestones: share of the rounds:factor of the rate after it, separated by commas",
        "like 0.6:0.1, 0.8:0.01",
        used=when.MILESTONES,
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
    clip_limit: float = option(
        1.0, "clip: largest norm, path or value; adaptive: share of the weights' norm; auto: has its own", "> 0", used=when.CLIPS
    )
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
    evaluate_on: str = option(
        TEST,
        "what is evaluated: the test samples, or the training samples, for their loss after the averaging",
        SPLITS,
        used=when.TESTED_AS_GIVEN,
    )
    diagnostics: str = option(
        "",
        "measured at every evaluation, in simulation; in diagnostics.csv",
        f"{', '.join(keys.DIAGNOSTICS)}, separated by commas",
        keys.all_of(keys.DIAGNOSTICS),
        like=keys.DIAGNOSTICS,
    )
    seed: int = option(0, "decides partition, initial weights, cohorts, batches and dropout", ">= 0")
    device: str = option(
        "auto",
        "where clients train: auto (a GPU if there is one), cpu, cuda, cuda:0 ...; a client's node config may say otherwise",
        "torch device",
        keys.known_device,
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
    name: str = option("", "the run folder's name; empty: time, method, data and seed", "a file name", used=when.WRITES)
    pictures: bool = option(True, "draw pictures at the end, and write TensorBoard events after every round")
    callbacks: str = option(
        "",
        "called after every round, evaluation and at the end (fl_bn.Callback): trackers, say; each is made by its class, or a function, of "
        "the config and the run's folder",
        "package.module:Class, separated by commas",
        lambda names: all(":" in name for name in names_of(names)),
    )
