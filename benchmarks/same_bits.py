"""Compare the bits of short runs through every door with those of a known commit.

    python benchmarks/same_bits.py                  # prints the cases that differ, and a count; exit status 1 if any does
    python benchmarks/same_bits.py --only resume    # the cases in whose names this pattern is found
    python benchmarks/same_bits.py --self-test      # a control: with another learning rate, every case must differ

The known bits are in ``results/same_bits.json``, for each kind of CPU and version of torch. To make those of this machine:

    git worktree add ../base f85ff43a
    PYTHONPATH=../base python benchmarks/same_bits.py --store

In f85ff43a the server's mean is divided once, by the sum of the weights; before, each weight was. So 135 of the 262 cases that
ed712ff has differ from it in last places. All 262 have its bits in 175bd7df, the last commit before that change.

41 of the 261 cases of f85ff43a differ from it today. In 14 the tensors are the same, and a figure differs: under a robust rule the
loss that is shown is the clients' median, and in "own Flower app: fbn fraction_train=0.5" a client's weight in the means of its metrics
is not lowered any more. In 3, all "vectorised" with FedTAN's exchange, clients are computed one by one. In the other 24, statistics
passes of ``Federation`` go through ``SeededBatches`` in the round's order, or tracking has no limit of scale (cf53f2e8).

This file and ``same_bits_doors.py`` use public names and run-config keys alone, so they run on other versions unchanged.
Seconds and sizes of messages are not compared. A loop of one's own has no cases with FedTAN's exchange, since what carries
the exchange has no public name.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flwr
import numpy as np
import torch
from same_bits_doors import application, federation, older_api, own_app, own_client, own_loop

import fl_bn
from fl_bn.methods import METHODS

BASE, STORED, RATE = "f85ff43a", Path(__file__).resolve().parent / "results" / "same_bits.json", 0.05
ON_CUDA = ("federation", "vectorised", "application", "exchange", "secure sum", "robust", "resume")  # the doors of --device cuda
Case = tuple[str, dict[str, Any]]


def c(method: str, **options: Any) -> Case:
    """Return a case: a method, and the options of its door's function (of ``application``: run-config keys, with _ for -)."""
    return method, options


def attacked(attack: str, rule: str, **keys: Any) -> Case:
    """Return a case with two attackers, and one rule for statistics and updates."""
    return c("fbn", attack=attack, statistics_rule=rule, update_rule=rule, byzantine=2, clients=7, **keys)


EVERY = [c(name) for name in METHODS]
EXCHANGE = ("fedtan", "fedtan2", "fedavg-alg2")  # the methods with a layer-wise exchange in rounds
AIMS = [c("hbn", objective="fedprox"), c("fedbn", objective="scaffold"), c("fbn", objective="fedsam")]
TABLE: list[tuple[str, Callable[..., str], list[Case]]] = [
    ("federation", federation, [
        *EVERY, *AIMS, c("silobn", objective="moon"), c("fbn", robust=True), c("fedtan", robust=True),
        c("hbn", of={"lam": 1.0}), c("hbn", of={"mixing": "half"}), c("fedtan", of={"schedule": "paper"}), c("fbn", of={"momentum": 0.1}),
        c("fbn", of={"report": "all"}), c("fixbn", of={"freeze_what": "both"}), c("fedavg", adam=True), c("fedavg", fraction=0.5),
        c("fixbn", calibrate=-1), c("fbn", clip="none"), c("hbn", local_epochs=2),
        c("hbn", unit_scale=False),
    ]),
    ("processes", federation, [c("hbn", workers=2), c("fedbn", workers=2)]),
    ("processes", application, [c("fbn", workers=2)]),
    ("vectorised", federation, [c(name, engine="vectorised", dropout=0.0) for name in METHODS]),
    ("vectorised", application, [c("hbn", engine="vectorised"), c("fedavg", engine="vectorised")]),
    ("own loop", own_loop, [*(c(name) for name in METHODS if name not in EXCHANGE), *AIMS, c("fbn", robust=True)]),
    ("own Flower app", own_app, [
        *EVERY, *AIMS, c("fbn", robust=True), c("fbn", fraction_train=0.5),
        *(c(name, carrier="replay") for name in EXCHANGE),
    ]),
    ("NumPyClient", older_api, EVERY),
    ("BatchNormClient", own_client, [*EVERY, c("fbn", strategy="RobustFBN", f=1)]),
    ("application", application, [
        *EVERY, c("hbn", objective="fedprox"), c("silobn", objective="moon"), c("fbn", objective="fedsam"),
        c("fedbn", objective="scaffold", momentum=0.0),
        *(c("fbn", server_optimizer=name, server_momentum=0.5) for name in ("fedavgm", "fedacg")),
        *(c("fbn", server_optimizer=name, server_learning_rate=0.01) for name in ("fedadagrad", "fedadam", "fedyogi")),
        c("silobn", maintain_momentum="local"), c("fixbn", maintain_momentum="global"),
        c("hbn", optimizer="adam", momentum=0.0, maintain_momentum="global"),
        c("fbn", update="gradients", local_steps=1), c("fedavg", update="gradients", local_steps=1),
        c("hbn", hbn_lam=1.0, hbn_lower_layers="shared"), c("hbn", hbn_mixing="half", hbn_merge="average"),
        c("hbn", hbn_separate=False, hbn_evaluate_clients="cohort"), c("hbn", hbn_evaluate="exact"),
        c("hbn", hbn_measured="normalisers", hbn_stat_samples=16), c("hbn", freeze_after=1), c("hbn", fraction=0.5),
        c("fbn", fbn_momentum=0.1), c("fbn", fbn_report="all"), c("fbn", fbn_report="pass"), c("fbn", tracking=0.2),
        c("fbn", unit_scale=False, centre_gradients="never"), c("gn", centre_gradients="always", groups=4),
        c("fixbn", freeze_after=1, freeze_what="both"), c("fedtan2", freeze_after=0), c("fixbn", calibrate=2),
        *(c("fedavg", clip=how, clip_limit=0.01) for how in ("norm", "round", "value", "adaptive")),
        c("fedavg", precision="mixed"), c("fedavg", memory_format="contiguous"),
        c("fedavg", clients=5, fraction=0.5, client_weights="uniform"), c("fedbn", clients=4),
        c("fedavg", local_epochs=1, local_steps=0, client_weights="data", drop_last=True), c("fedavg", moon_projection=8),
        c("fedbn", unseen_client=True), c("fedavg", partition="dirichlet", augment="crop-flip"),
        c("fedavg", validation_share=0.2, keep_best=True, early_stop=1),
        c("fbn", model="resnet20", samples_share=0.1), c("fbn", model="mlp", dataset="digits-plain"),
    ]),
    ("exchange", application, [
        *(c(name, exchange=carrier) for name in EXCHANGE for carrier in ("local", "replay")),
        c("fedtan", fedtan_schedule="paper", fedtan_momentum="restarted"), c("hbn", recalibration="exchange"),
    ]),
    ("secure sum", application, [c(name, secure_aggregation=True) for name in ("fedavg", "fedbn", "hbn", "fbn")]),
    ("robust", application, [
        attacked("alie", "nnm+median"), attacked("foe", "krum"), attacked("gaussian", "trimmed-mean"), attacked("inf", "median"),
        attacked("mimic", "geometric-median"), attacked("sign-flip", "centered-clipping"), attacked("label-flip", "multi-krum"),
        attacked("alie-optimised", "nnm+trimmed-mean"),
        attacked("alie", "median", update="gradients", local_steps=1),
    ]),
    ("resume", federation, [
        *(c(name, stops=True) for name in METHODS), c("fedbn", stops=True, objective="scaffold"), c("silobn", stops=True, objective="moon"),
    ]),
    ("resume", application, [
        *(c(name, stops=True) for name in ("fedavg", "fedbn", "silobn", "hbn", "fbn", "fedtan", "single")),
        c("fedbn", stops=True, server_optimizer="fedadam", server_learning_rate=0.01),
    ]),
]  # fmt: skip


def cases(only: str, device: str) -> dict[str, Callable[..., str]]:
    """Return name -> function of ``rate``, for the cases in whose names the pattern ``only`` is found."""
    found: dict[str, Callable[..., str]] = {}
    for door, function, rows in TABLE:
        through = f"{door}, application" if function is application and door in ("processes", "vectorised", "resume") else door
        for method, options in rows:
            name = f"{through}: {method}" + "".join(f" {key}={value}" for key, value in options.items())
            if re.search(only, name) and (device == "cpu" or door in ON_CUDA):
                found[name] = partial(function, method, **options, **({} if device == "cpu" else {"device": device}))
    return found


def computed(only: str, device: str, rate: float) -> dict[str, str]:
    """Return name -> bits of the cases. A case that fails has its error instead."""
    found = dict[str, str]()
    for name, case in cases(only, device).items():
        try:
            found[name] = case(rate=rate)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def processor() -> str:
    """Return the processor's maker, family and model: kernels differ from one to the next, though torch names the same instruction set."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    known = dict(line.partition(":")[::2] for line in text.partition("\n\n")[0].replace("\t", "").splitlines())
    parts = [known.get(key, "").strip() for key in ("vendor_id", "cpu family", "model")]
    return "-".join(parts) if all(parts) else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def main() -> int:
    """Compute the cases, and compare or store their bits; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the bits of short runs with those of a known commit.")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only the cases in whose names this regular expression is found")
    parser.add_argument("--store", action="store_true", help="store the bits of all cases")
    parser.add_argument("--self-test", action="store_true", help="compute with another learning rate: every case must differ")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: Federation and the application on a GPU")
    given = parser.parse_args()
    if given.store and (given.only or given.self_test):
        parser.error("--store takes neither --only nor --self-test")
    chip = processor() if given.device == "cpu" else torch.cuda.get_device_name()
    kind, stored = f"{chip}, torch {torch.__version__}", json.loads(STORED.read_text()) if STORED.exists() else {}
    if kind not in stored and not given.store:
        print(f"no bits are stored for {kind}. Make them from {BASE}, and compare then:\n  git worktree add ../base {BASE}")
        print(f"  PYTHONPATH=../base python {sys.argv[0]} --store --device {given.device}")
        return 2

    product = Path(fl_bn.__file__).resolve().parents[1]
    os.environ["PYTHONPATH"] = f"{product}{os.pathsep}{STORED.parents[1]}"  # of worker processes
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # torch asks for it, on a GPU
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(given.device == "cuda", warn_only=True)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    begin, here = time.monotonic(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # checkpoints go here, and nothing is imported from where the user is
        found = computed(given.only, given.device, RATE * 1.001 if given.self_test else RATE)
        os.chdir(here)
    seconds = time.monotonic() - begin

    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    commit = subprocess.run(describe, cwd=product, capture_output=True, text=True).stdout.strip() or str(product)
    versions = {"python": platform.python_version(), "numpy": np.__version__, "flwr": flwr.__version__}
    failed = [name for name, value in found.items() if not value.startswith("tensors ")]
    if given.store:
        for name in failed:
            print(f"{name}: {found[name]}")
        stored[kind] = {"commit": commit, **versions, "bits": {name: found[name] for name in found.keys() - failed}}
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        print(f"{len(found) - len(failed)} cases of {commit} stored for {kind}, {len(failed)} not; {seconds:.0f} s")
        return int(bool(failed))
    known = {name: value for name, value in stored[kind]["bits"].items() if re.search(given.only, name)}
    if given.self_test:
        wrong = [name for name, value in found.items() if name in failed or {*value.split()[1::2]} & {*known.get(name, "").split()}]
    else:
        wrong = [name for name in {**known, **found} if known.get(name) != found.get(name) and (name in known or name in failed)]
    for name in wrong:
        print(f"{name}:\n  stored {known.get(name, 'nothing')}\n  found  {found.get(name, 'no such case')}")
    if wrong and (others := {name: version for name, version in versions.items() if stored[kind][name] != version}):
        print(f"versions here that differ from those of the stored bits: {others}")
    if new := sorted(found.keys() - known.keys()):
        print(f"{len(new)} cases are of methods or doors that {BASE} does not have: {', '.join(new)}")
    right, what = len(({**known, **found}.keys() - new) | {*wrong}) - len(wrong), "differ from" if given.self_test else "have"
    base = stored[kind]["commit"]
    print(f"{right} of {right + len(wrong)} cases of {commit} {what} the bits of {base} ({kind}); {seconds:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
