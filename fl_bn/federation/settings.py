"""Describe a client's training in one round, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import nn
from torch.optim import Optimizer

from fl_bn.data.augment import AUGMENTATIONS
from fl_bn.data.batches import Indices, cuts, distinct, draw_batches
from fl_bn.federation.auxiliary import BUFFERS, CONTROLS, MAINTAIN, Auxiliary
from fl_bn.federation.gradients import CLIPS, PATH, STEP, norm_in_round
from fl_bn.federation.optimizers import SGD, Adam
from fl_bn.objectives import PLAIN, Objective
from fl_bn.options import REQUIRED, Options, Used, option, refuse, used_with
from fl_bn.support.names import names_of

SCHEDULES = ("constant", "step", "exponential", "cosine", "milestones")
ALL_SAMPLES = "data"  # value of client-weights: a client's weight is the number of all its samples
LEARNING_RATE = 0.05
"""The default learning rate of round 1."""
CLIP_LIMITS = used_with("clip", "norm", "round", "value", "adaptive")
WEIGHTED = Used(
    "weighted averages, and not to robust rules, under which every client counts once (declared-byzantine, statistics-rule, update-rule)",
    lambda c: not c.defence().active,
)


@dataclass(frozen=True)
class LocalTraining(Options):
    """Describe how a client trains in one round.

    Most fields are options, with their keys in docs/config.md. Your own package can
    add options by a subclass, see docs/how-to/method.md. Exactly one of ``epochs``
    and ``steps`` is positive.

    Args:
        objective: The loss with its further terms, or a correction of the
            gradients. One with strength 0 is replaced by the plain loss.
        step_clip: The limit of ``clip="round"`` in a round of one local step,
            without momentum. 0: ``clip_limit``.
        weigh_all: Whether a client's weight in averages is the number of all its
            samples, not of those that it trained on in the round.
    """

    name: ClassVar[str] = "local training"
    prefix: ClassVar[str] = ""

    batch_size: int = option(REQUIRED, "samples per batch; a last batch of one is merged into the one before", ">= 2", run=16)
    epochs: int = option(0, "passes over the client's data per round; 0: local-steps decides", ">= 0", key="local-epochs")
    steps: int = option(0, "batches per client and round; 0: local-epochs decides", ">= 0", key="local-steps", run=5)
    optimizer: str = option("sgd", "the clients' optimiser", BUFFERS)
    momentum: float = option(0.0, "the optimiser's momentum (EMA form, kept over rounds, for update=gradients)", "[0, 1)", run=0.9)
    weight_decay: float = option(0.0, "L2 penalty", ">= 0", run=1e-4)
    update: str = option("weights", "clients send weights, or one batch's gradient (DSGD; needs local-steps=1)", ("weights", "gradients"))
    precision: str = option(
        "float32", "precision of local training; mixed: bfloat16 in the operations that autocast chooses", ("float32", "mixed")
    )
    augment: str = option("none", "random changes of training images, drawn once per batch", AUGMENTATIONS)
    objective: Objective = PLAIN
    maintain: str = option(
        "reset",
        "momentum buffers between rounds: reset to zeros, kept by each client (local), or averaged by the server (global: double payload)",
        MAINTAIN,
        key="maintain-momentum",
        hidden=True,
    )
    clip: str = option(
        "none",
        "how clients clip gradients; norm: all together; round: so that SGD moves weights by at most clip-limit in a round; value: each "
        "number; adaptive: each output unit, relative to its weights (FedWon); auto: round with limit "
        f"{PATH:g} for hbn, fbn and freeze-after=0 ({STEP:g} for fbn with one local step), else none",
        ("auto", *CLIPS),
        run="auto",
    )
    clip_limit: float = option(
        1.0,
        "limit of clip: of a norm (norm), the distance in a round (round), a number (value), or the share of the weights' norm (adaptive)",
        "> 0",
        used=CLIP_LIMITS,
    )
    step_clip: float = 0.0
    weigh_all: bool = option(
        False,
        "weight of a client in averages of weights; samples: those that it trained on in the round; data: all its samples; uniform: 1",
        ("samples", ALL_SAMPLES, "uniform"),
        key="client-weights",
        run="samples",
        read=ALL_SAMPLES.__eq__,
        used=WEIGHTED,
    )
    drop_last: bool = option(
        False,
        "a last batch smaller than batch-size is left out of each pass, and a client with fewer samples than one batch sits out the round",
        hidden=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.objective.on:
            object.__setattr__(self, "objective", PLAIN)
        objective, gradients, kept = self.objective, self.update == "gradients", self.maintain != "reset"
        refuse(
            (self.clip not in CLIPS, f"clip must be one of {', '.join(CLIPS)}, but got {self.clip!r}"),  # the method decides what auto is
            (not 0 <= self.step_clip < math.inf, f"step_clip must be >= 0 and finite, but got {self.step_clip}"),
            ((self.epochs > 0) == (self.steps > 0),
             f"give either local epochs or local steps, and 0 for the other, but got epochs={self.epochs} and steps={self.steps}"),
            (self.optimizer == "adam" and self.momentum > 0,
             f"optimizer='adam' has momentum parameters of its own (betas), so momentum must be 0, but got momentum={self.momentum}"),
            (gradients and (self.steps != 1 or self.optimizer != "sgd"),
             f"update='gradients' needs steps=1 and optimizer='sgd', but got steps={self.steps} and optimizer={self.optimizer!r}"),
            (self.clip == "round" and self.optimizer != "sgd",
             f"clip='round' needs optimizer='sgd', but got {self.optimizer!r}: set optimizer='sgd' or clip='norm'"),
            (gradients and kept,
             f"with update='gradients' clients keep their momentum: maintain-momentum must be 'reset', but got {self.maintain!r}"),
            (kept and self.optimizer == "sgd" and self.momentum == 0,
             f"maintain-momentum={self.maintain!r} needs momentum > 0: set momentum, or maintain-momentum='reset'"),
            (gradients and objective is not PLAIN,
             f"{objective.name} is for several local steps, but update='gradients' sends one gradient: set objective='none'"),
            (objective.travels and (self.optimizer != "sgd" or self.momentum > 0 or self.clip != "none"),
             f"{objective.name} needs plain SGD: optimizer='sgd', momentum=0 and clip='none', but got "
             f"{self.optimizer!r}, {self.momentum} and {self.clip!r}"),
        )  # fmt: skip

    @property
    def auxiliary(self) -> tuple[Auxiliary, ...]:
        """Return the kinds of tensors that are sent with the weights."""
        controls = (CONTROLS,) if self.objective.travels else ()
        return (*controls, *BUFFERS[self.optimizer].values()) if self.maintain == "global" else controls

    def norm_in_round(self, learning_rate: float, steps: int) -> float:
        """Return a gradient's largest norm under ``clip="round"``, in a round of ``steps`` steps.

        With it, SGD moves the weights by at most ``clip_limit``, or ``step_clip``,
        if set, in one step, for which momentum does not count: its buffers start
        from zero.
        """
        if steps == 1 and self.step_clip:
            return norm_in_round(self.step_clip, learning_rate, 1, 0.0)
        return norm_in_round(self.clip_limit, learning_rate, steps, self.momentum)

    def fewest(self, least: int) -> int:
        """Return a client's fewest samples, if a batch needs ``least`` (1 or 2)."""
        return max(least, self.batch_size) if self.drop_last else least

    def draw(self, samples: int, rng: np.random.Generator, least: int) -> list[Indices]:
        """Draw a round's batches in random order. Return an array of indices per batch.

        A batch needs ``least`` samples, 1 or 2.

        Raises:
            ClientTooSmall: The client has too few samples.
        """
        several = {"epochs": self.epochs, "steps": self.steps, "least": least}
        return draw_batches(samples, self.batch_size, rng, **several, drop_last=self.drop_last)

    def planned(self, samples: int) -> int:
        """Return a client's weight by its ``samples``, as known before its round."""
        if self.weigh_all:
            return samples
        return distinct(samples, self.batch_size, epochs=self.epochs, steps=self.steps, drop_last=self.drop_last)

    def most_steps(self, samples: int) -> int:
        """Return the most local steps of a client with ``samples`` in a round."""
        return self.steps or self.epochs * (1 + len(cuts(samples, self.batch_size)))

    def make_optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
        """Make the optimiser of ``parameters``, SGD or Adam."""
        if self.optimizer == "adam":
            return Adam(parameters, lr=learning_rate, weight_decay=self.weight_decay)
        return SGD(parameters, lr=learning_rate, momentum=self.momentum, weight_decay=self.weight_decay, foreach=True)


@dataclass(frozen=True)
class Schedule(Options):
    """Compute a round's learning rate: call it with a round (from 1) and the number of rounds.

    ``constant``: it stays ``base``. ``step``: ``decay`` multiplies it after 50 %
    and 75 % of the rounds. ``exponential``: after every round. ``cosine``: it falls
    along half a cosine towards 0. ``milestones``: it is ``base`` times the factor
    of the last milestone.
    """

    name: ClassVar[str] = "the schedule"
    prefix: ClassVar[str] = "learning-rate"

    base: float = option(LEARNING_RATE, "the optimiser's step size in round 1", "> 0", key="learning-rate")
    kind: str = option(
        "cosine",
        "constant; step: times decay after 50 % and 75 % of the rounds; exponential: times decay per round; cosine: to 0; milestones",
        SCHEDULES,
        key="learning-rate-schedule",
    )
    decay: float = option(
        0.3, "the factor of step and exponential", "(0, 1]", used=used_with("learning-rate-schedule", "step", "exponential")
    )
    milestones: tuple[tuple[float, float], ...] = option(
        (),
        "milestones: share of the rounds:factor of the rate after it, separated by commas",
        "like 0.6:0.1, 0.8:0.01",
        run="",
        read=lambda text: milestones_of(text),
        used=used_with("learning-rate-schedule", "milestones"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "milestones" and not self.milestones:
            raise ValueError("learning-rate-schedule='milestones' needs milestones: set learning-rate-milestones, for example to '0.5:0.1'")

    def __call__(self, round: int, rounds: int) -> float:
        """Return the learning rate of ``round`` (from 1) in a run of ``rounds`` rounds."""
        if self.kind == "step":
            return self.base * self.decay ** ((round > rounds // 2) + (round > 3 * rounds // 4))
        if self.kind == "exponential":
            return self.base * self.decay ** (round - 1)
        if self.kind == "cosine":
            return self.base * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2
        passed = [factor for share, factor in self.milestones if self.kind == "milestones" and round - share * rounds > 1e-9]
        return self.base * (passed[-1] if passed else 1.0)


def milestones_of(text: str) -> tuple[tuple[float, float], ...]:
    """Read pairs of a share of the rounds, and the rate's later factor, from a text.

    ``0.6:0.1, 0.8:0.01`` means a tenth of the rate of round 1 after 60 % of the
    rounds, and a hundredth after 80 %.

    Raises:
        ValueError: The form is wrong, shares do not rise between 0 and 1, or a
            factor is not above 0.
    """
    try:
        pairs = tuple((float(share), float(factor)) for share, factor in (part.split(":") for part in names_of(text)))
        shares = [share for share, _ in pairs]
        refuse((shares != sorted(set(shares)) or not all(0 < share < 1 and 0 < factor < math.inf for share, factor in pairs), ""))
    except ValueError as error:
        raise ValueError(
            "learning-rate-milestones must be like 0.6:0.1, 0.8:0.01 (share of the rounds:factor), with rising shares between 0 and 1, and "
            f"finite factors > 0, but got {text[:100]!r}"
        ) from error
    return pairs


def seeded(*key: int) -> np.random.Generator:
    """Return a NumPy generator that depends only on ``key``, in every process and engine.

    ``key`` has, for example, the seed, the client, the round, and the purpose.
    """
    return np.random.default_rng(np.random.SeedSequence(key))
