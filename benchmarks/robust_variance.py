"""Compare several ways to make the variance of FBN's line 10 robust, without attackers and under attack.

The paper names no such way. Line 10 adds the mean of the variances within clients, and the variance between the clients'
means. Here the clients' means are Gaussian, and the variance within each client is 1. The table has the variance between
the means as each way estimates it, divided by the true one. 1 is unbiased. 0 is naive BN, which leaves this variance out.

    python benchmarks/robust_variance.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from fl_bn.robust import Rule, mean, median, nnm, trimmed_mean
from fl_bn.robust.attacks import Attack, alie, foe, mimic, sign_flip

CLIENTS, BYZANTINE, CHANNELS, TRIALS = 10, 3, 64, 200
Order = Callable[[np.ndarray, np.ndarray, int], np.ndarray]


def value(rule: Rule, rows: np.ndarray, f: int) -> np.ndarray:
    """Aggregate ``rows`` (clients, channels) by a robust rule against ``f`` Byzantine clients; return one value per channel."""
    result: np.ndarray = rule(rows, f).value
    return result


def of_deviations(rule: Rule, means: np.ndarray, variances: np.ndarray, f: int) -> np.ndarray:
    """Aggregate the variances by ``rule``, and add the aggregate of the squared deviations from the robust mean."""
    found: np.ndarray = value(rule, variances, f) + value(rule, (means - value(rule, means, f)) ** 2, f)
    return found


def of_sums(rule: Rule, means: np.ndarray, variances: np.ndarray, f: int) -> np.ndarray:
    """Add every client's variance and squared deviation from the robust mean; aggregate the sums, as fl_bn.bn.moments.pool does."""
    return value(rule, variances + (means - value(rule, means, f)) ** 2, f)


def mixed(rows: np.ndarray, f: int) -> np.ndarray:
    """Replace every row by the mean of its n - f nearest rows, as NNM does."""

    def keep(view: object, f: int = 0) -> object:
        mixes.append(np.stack(list(view)))  # type: ignore[call-overload]
        return mean(view, f)  # type: ignore[arg-type]

    mixes: list[np.ndarray] = []
    nnm(rows, f, then=keep)  # type: ignore[arg-type]
    return mixes[0]


def of_mixed_means(rule: Rule, means: np.ndarray, variances: np.ndarray, f: int) -> np.ndarray:
    """Mix the means and the variances by NNM, and aggregate the mixed ones as ``of_deviations`` does.

    The estimate is too small, because the mixed means lie closer together than the clients' means.
    """
    return of_deviations(rule, mixed(means, f), mixed(variances, f), f)


def of_means_neighbours(rule: Rule, means: np.ndarray, variances: np.ndarray, f: int) -> np.ndarray:
    """Choose NNM's neighbours by the means only, and mix variances and deviations over these neighbours.

    So this way does not notice a client that lies only about its variance.
    """
    squares = ((means[:, None] - means[None]) ** 2).sum(-1)
    weights = np.zeros_like(squares)
    np.put_along_axis(weights, np.argsort(squares, axis=1, kind="stable")[:, : len(means) - f], 1 / (len(means) - f), axis=1)
    return value(rule, weights @ (variances + (means - value(rule, weights @ means, f)) ** 2), f)


ORDERS: dict[str, Order] = {
    "median of the deviations": partial(of_deviations, median),
    "trimmed mean of the deviations": partial(of_deviations, trimmed_mean),
    "deviations of NNM-mixed means, median": partial(of_mixed_means, median),
    "deviations of NNM-mixed means, trimmed mean": partial(of_mixed_means, trimmed_mean),
    "NNM by the means alone + median": partial(of_means_neighbours, median),
    "NNM + median of variance + deviation (ours)": partial(of_sums, partial(nnm, then=median)),
    "NNM + trimmed mean of variance + deviation (ours)": partial(of_sums, partial(nnm, then=trimmed_mean)),
}


def in_variance(honest: np.ndarray, f: int) -> np.ndarray:
    """Return Byzantine means equal to the first honest client's; ``share`` gives these clients a false variance."""
    return mimic()(honest, f)


ATTACKS: dict[str, Attack | None] = {
    "no attack": None, "sign flip": sign_flip, "FOE(0.5)": foe(0.5), "ALIE(z_max)": alie(), "variance x 1e6": in_variance,
}  # fmt: skip


def share(order: Order, attack: Attack | None, rng: np.random.Generator) -> float:
    """Return the variance between clients' means as ``order`` estimates it, divided by that of the honest clients' means.

    Both variances are means over trials and channels.

    Args:
        order: The function that estimates the variance, one of ``ORDERS``.
        attack: The attack of the Byzantine clients; None: all clients are honest.
        rng: The generator of the clients' means.
    """
    found, true = 0.0, 0.0
    for _ in range(TRIALS):
        means = rng.normal(size=(CLIENTS if attack is None else CLIENTS - BYZANTINE, CHANNELS)) + 1.0
        true += float(((means - means.mean(0)) ** 2).mean())
        variances = np.ones((CLIENTS, CHANNELS))
        if attack is not None:
            means = np.concatenate([means, attack(means, BYZANTINE)])
        if attack is in_variance:
            variances[-BYZANTINE:] = 1e6
        found += float((order(means, variances, BYZANTINE) - 1.0).mean())
    return found / true


def main() -> None:
    """Measure every way of estimating under every attack; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "robust-variance.md")
    output = parser.parse_args().output
    lines = [f"| order | {' | '.join(ATTACKS)} |", "|---|" + "---|" * len(ATTACKS)]
    for name, order in ORDERS.items():
        shares = [share(order, attack, np.random.default_rng(0)) for attack in ATTACKS.values()]
        lines.append(f"| {name} | {' | '.join(f'{s:.2f}' if s < 100 else f'{s:.0e}' for s in shares)} |")
        print(lines[-1], flush=True)
    setting = f"{CLIENTS} clients, f = {BYZANTINE}, {CHANNELS} channels, means N(1, 1), variances 1, {TRIALS} trials"
    output.write_text(f"Estimated variance between the clients' means / the true one: {setting}." + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
