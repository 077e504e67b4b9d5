"""Make up a map for `fl-bn advise`, and measurements of clients, with numbers that tests choose."""

from __future__ import annotations

from dataclasses import replace

from fl_bn.advise.measure import Measured
from fl_bn.advise.regimes import Regime

ALIKE = Measured(10, 100, 100, 100, 10.0, 0.0, 0.004, 0.004, 32, 1.0, 5)


def clients(**changes: float) -> Measured:
    """Return the measurements of clients that do not differ from each other; ``changes`` replaces fields."""
    return replace(ALIKE, **changes)  # type: ignore[arg-type]


def regime(name: str, accuracies: dict[str, list[float]], **changes: float) -> Regime:
    """Make a regime. ``accuracies`` has, for each method, the accuracies (%) of the seeds 0, 1, ...; ``changes`` is as in ``clients``."""
    runs = {method: dict(enumerate(values)) for method, values in accuracies.items()}
    return Regime(name, f"Problem {name}", clients(**changes), runs, dict.fromkeys(accuracies, 0.1), 5.0)


MAP = [
    regime("alike", {"fedavg": [90.0, 91.0], "gn": [85.0, 86.0], "fbn": [90.2, 90.9]}),
    regime("one class", {"fedavg": [20.0, 22.0], "gn": [80.0, 81.0], "fbn": [90.0, 92.0]}, label_skew=1.0, classes=1.0),
    regime("domains", {"fedavg": [70.0, 71.0], "fedbn": [88.0, 89.0], "gn": [75.0, 76.0]}, distance=2.0),
    regime("small batches", {"fedavg": [70.0, 71.0], "hbn": [88.0, 89.0], "gn": [75.0, 76.0]}, batch_size=4),
    regime("few take part", {"fedavg": [70.0, 71.0], "fbn": [88.0, 89.0], "gn": [75.0, 76.0]}, participation=0.1),
    regime("many steps", {"fedavg": [70.0, 71.0], "fixbn": [88.0, 89.0], "gn": [75.0, 76.0], "fedtan": [95.0, 96.0]}, local_steps=20),
]
