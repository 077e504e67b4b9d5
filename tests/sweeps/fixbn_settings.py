"""The settings of FixBN's tables and figures, as its text gives them. "l." is a line number that is printed in the paper."""

from __future__ import annotations

from tests.sweeps.paper_setting import DEFAULTS, Keys, Setting

CIFAR: Keys = {
    "model": "resnet20",  # l. 214-215, Table F
    "dataset": "cifar10",  # l. 214
    "data-path": "data",
    "standardise": "cifar10",  # l. 408: "normalizes the images"
    "augment": "crop-flip-2",  # l. 409-410: padded 2 pixels, flipped, cropped back
    "clients": 5,  # l. 215
    "client-weights": "data",  # equation 2: |D_m| / |D|
    "local-steps": 100,  # l. 218: E = 100
    "rounds": 640,  # l. 218: 128 epochs of 50,000 = 20 x 100 x 5 x 640
    "batch-size": 20,  # l. 217
    "learning-rate": 0.02,  # l. 216
    "learning-rate-schedule": "step",  # l. 217: "decay by 0.1 at 50% and 75% of the total rounds"
    "learning-rate-decay": 0.1,
    "momentum": 0.9,  # l. 216
    "weight-decay": 1e-4,  # l. 403
    "clip": "none",  # not in the text
    "partition": "classes",  # l. 220: Shards, each client has 20 % of the classes
    "partition-parameter": 2.0,
}
SHARDS = {"Shards": {"partition": "classes", "partition-parameter": 2.0}}
SPLITS = {  # l. 219-220
    **SHARDS,
    **{f"Dirichlet {c}": {"partition": "dirichlet", "partition-parameter": float(c)} for c in ("0.1", "0.3", "0.6")},
    "IID": {"partition": "iid", "partition-parameter": 1.0},
}
BN, GN = {"method": "fedavg"}, {"method": "gn", "groups": 2}  # l. 495: two groups
FIXBN = {
    "method": "fixbn",
    "frozen-rate": 1.0,
    "centre-gradients": "never",
}  # l. 211: from half of the rounds on, at whatever rate the calendar has
THREE = {"BN": BN, "GN": GN, "FixBN": FIXBN}
STEPS = {str(e): {"local-steps": e, "rounds": rounds} for e, rounds in ((1, 64000), (20, 3200), (100, 640), (500, 128), (2500, 26))}
ONE_STEP = {"local-steps": 1, "rounds": 64000}  # l. 218: 128 epochs of single steps
NO_MOMENTUM = {**ONE_STEP, "momentum": 0.0}  # caption of Table 1
CENTRALISED = {
    "clients": 1,
    "batch-size": 100,
    "partition": "iid",
    "partition-parameter": 1.0,
}  # l. 114-116: one step on all clients' batches
FEDTAN = {  # l. 240; FedTAN, section 6.1, with momentum
    "augment": "crop-flip", "client-weights": "samples", "local-steps": 5, "rounds": 10000, "batch-size": 128, "learning-rate": 0.5,
    "learning-rate-schedule": "milestones", "learning-rate-milestones": "0.6:0.1, 0.8:0.01",
    "learning-rate-decay": DEFAULTS["learning-rate-decay"],
}  # fmt: skip
TINY = {  # Tables F and G, l. 214-218, l. 411: 128 epochs of 100,000 = 20 x 100 x 5 x 1,280
    "model": "resnet18", "dataset": "tiny-imagenet", "data-path": "data/tiny-imagenet", "standardise": "imagenet",
    "augment": "resized-crop", "clients": 10, "fraction": 0.5, "rounds": 1280,
}  # fmt: skip
IMAGENET = {  # l. 223-229, Tables F and G: 64 epochs = 0.1 x 2 x 320
    "model": "resnet18", "dataset": "imagenet", "data-path": "data/imagenet", "standardise": "imagenet", "augment": "resized-crop",
    "image-size": 224, "clients": 100, "fraction": 0.1, "local-steps": 0, "local-epochs": 2, "rounds": 320, "learning-rate": 0.1,
    "learning-rate-schedule": "milestones", "learning-rate-milestones": "0.3:0.1, 0.6:0.01, 0.9:0.001",
    "learning-rate-decay": DEFAULTS["learning-rate-decay"], "partition": "dirichlet", "partition-parameter": 0.1,
}  # fmt: skip
CITYSCAPES = {  # l. 231-236, l. 406-407, l. 412-413, Tables F and G
    "dataset": "cityscapes", "data-path": "data/cityscapes", "standardise": "imagenet", "augment": "segmentation", "image-size": 1024,
    "partition": "natural", "partition-parameter": 1.0, "clients": 18, "fraction": 0.5, "rounds": 100, "local-steps": 0, "local-epochs": 5,
    "batch-size": 8, "optimizer": "adam", "learning-rate": 0.001, "momentum": 0.0,
}  # fmt: skip


def _federations() -> dict[str, Keys]:
    """Return the settings of lines 462 to 465: 128 epochs, divided among the clients of a round."""
    made: dict[str, Keys] = {f"{n} clients": {"clients": n, "rounds": 3200 // n} for n in (5, 10, 20, 50, 100)}
    for share, rounds in ((10, 320), (20, 160), (50, 64)):
        made[f"100 clients, {share} %"] = {"clients": 100, "fraction": share / 100, "rounds": rounds}
    return made


TWO = {"BN": BN, "GN": GN}
MOMENTUM = {how: {"maintain-momentum": how} for how in ("reset", "local", "global")}
BATCHES = {str(b): {"batch-size": b, "rounds": rounds} for b, rounds in ((20, 64000), (50, 25600), (100, 12800), (200, 6400))}
LARGE = {"clients": 1, "batch-size": 640}
SCHEMES = {  # l. 239-242
    "FedTAN": {"method": "fedtan"},
    "FedAvg + BN": BN,
    "FedAvg + GN": GN,
    "HeteroFL": {"method": "static-bn"},
    "FedDNA": {"method": "fedavg-alg2"},
    "FixBN": FIXBN,
    "centralised + BN": {**BN, **LARGE},
    "centralised + FixBN": {**FIXBN, **LARGE},
}
NORMALISERS = {"GN + WN": {"method": "gn-ws", "groups": 2}, "LN": {"method": "ln"}, "IN": {"method": "in"}, "FixUp": {"method": "fixup"}}
FROZEN = {
    "statistics": {**FIXBN, "freeze-what": "statistics"},
    "statistics and affine": {**FIXBN, "freeze-what": "both"},
    "affine": {"method": "fixbn", "freeze-what": "affine"},
    "nothing (BN)": BN,
}
FREEZE = {
    "never (BN)": BN,
    **{
        name: {**FIXBN, "freeze-after": after}
        for name, after in (("0.1 of the rounds", 64), ("0.25", 160), ("0.5", 320), ("0.75", 480), ("0.9", 576))
    },
}
KEPT = {  # caption of Figure 1, l. 501-536
    "centralised BN": {**BN, **CENTRALISED, "maintain-momentum": "local"},
    "BN": BN,
    "FixBN": FIXBN,
    "FixBN*": {**FIXBN, "maintain-momentum": "local"},
}
DECOUPLED = {"method": "fixbn", "freeze-after": 0, "calibrate": 0, "centre-gradients": "never"}
BACKBONES = {"MobileNet-v2": {"model": "deeplabv3plus-mobilenetv2"}, "ResNet18": {"model": "deeplabv3plus-resnet18"}}
FORTY = {"Shards": {"partition": "classes", "partition-parameter": 40.0}}
TABLE_SPLIT = {"IID": SPLITS["IID"], "non-IID": {"partition": "table", "partition-parameter": 2.0}}
FIXBN_PAPER = {
    "000-T1": Setting(
        "l. 110-121", {**CIFAR, **NO_MOMENTUM}, {"method": TWO, "training": {"centralised": CENTRALISED, "FL": {}}}, seeds=5
    ),
    "000-T2": Setting("l. 223-230", {**CIFAR, **IMAGENET}, {"method": THREE}),
    "000-T3": Setting(  # Table G
        "l. 231-238", {**CIFAR, **CITYSCAPES}, {"method": {**THREE, "FixBN": {**FIXBN, "freeze-after": 90}}, "backbone": BACKBONES}
    ),
    "000-T4": Setting(
        "l. 239-242",
        {**CIFAR, **FEDTAN},
        {"split": TABLE_SPLIT, "method": SCHEMES},
        without=lambda at: str(at["method"]).startswith("centralised") and at["split"] == "non-IID",
        seeds=5,
    ),
    "000-T5": Setting("l. 243-246", CIFAR, {"method": {**THREE, **NORMALISERS}, "split": SHARDS}),
    "000-TH": Setting("l. 480-493", CIFAR, {"method": FROZEN, "split": SHARDS}),
    "000-TI": Setting("l. 494-496", {**CIFAR, **GN}, {"groups": {n: {"groups": int(n)} for n in "248"}, "split": SHARDS}, seeds=5),
    "000-F1": Setting("l. 501-536", {**CIFAR, **ONE_STEP}, {"method": KEPT}),
    "000-F2": Setting(
        "l. 172-180", {**CIFAR, **NO_MOMENTUM, "diagnostics": "drift", "evaluate-every": 200}, {"method": {"BN": BN}, "split": SHARDS}
    ),
    "000-F2c": Setting("l. 185-187", {**CIFAR, "diagnostics": "training-loss"}, {"freeze": FREEZE, "split": SHARDS}),
    "000-F3": Setting("l. 214-222", CIFAR, {"method": THREE, "split": SPLITS}),
    "000-F3-TinyImageNet": Setting("l. 214-222", {**CIFAR, **TINY}, {"method": THREE, "split": {**SPLITS, **FORTY}}),
    "000-FD": Setting("l. 420-426", CIFAR, {"method": THREE, "split": SPLITS, "local-steps": STEPS}),
    "000-FE": Setting("l. 466-478", CIFAR, {"method": TWO, "local-steps": STEPS, "split": SHARDS}, seeds=5),
    "000-FG": Setting("l. 462-465", CIFAR, {"method": TWO, "federation": _federations(), "split": SHARDS}),
    "000-FH": Setting("l. 497-499", {**CIFAR, "local-steps": 1}, {"method": {"BN": BN, "FixBN": FIXBN}, "batch": BATCHES, "split": SHARDS}),
    "000-FI": Setting("l. 501-527", CIFAR, {"method": THREE, "momentum": MOMENTUM, "local-steps": STEPS, "split": SHARDS}),
    "000-FJ": Setting("l. 537-557", CIFAR, {"method": THREE, "local-steps": {e: STEPS[e] for e in list(STEPS)[:4]}, "split": SHARDS}),
    "000-FK": Setting("l. 537-557", CIFAR, {"method": THREE, "local-steps": {"1": STEPS["1"]}, "split": SPLITS}),
    "000-FL": Setting("l. 537-557", CIFAR, {"method": THREE, "local-steps": {"20": STEPS["20"]}, "split": SPLITS}),
    "000-FM": Setting("l. 537-557", CIFAR, {"method": THREE, "local-steps": {"100": STEPS["100"]}, "split": SPLITS}),
    "000-S33": Setting("l. 125-132", {**CIFAR, **NO_MOMENTUM}, {"method": {"BN": BN, "decoupled": DECOUPLED}}),
}
