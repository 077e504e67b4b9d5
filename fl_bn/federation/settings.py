"""One client's share of a round, as a value, and the learning rate's calendar."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from torch.optim import Optimizer

from fl_bn.data.augment import AUGMENTATIONS
from fl_bn.data.batches import Indices, cuts, distinct, draw_batches
from fl_bn.federation.clipping import CLIPS
from fl_bn.federation.eager import SGD, Adam
from fl_bn.federation.momentum import MAINTAIN
from fl_bn.objectives import PLAIN, Objective
from fl_bn.support.names import check_name, expected

OPTIMIZERS = ("sgd", "adam")
UPDATES = ("weights", "gradients")
PRECISIONS = ("float32", "mixed")
SCHEDULES = ("constant", "step", "exponential", "cosine", "milestones")
ALL_SAMPLES = "data"  # of client-weights: all that a client has


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round.

    Exactly one of ``epochs`` (passes over its own data) and ``steps`` (batches) is positive. ``momentum`` is the optimiser's.
    ``update``: send new ``weights``, or one batch's ``gradients`` that the server steps with (DSGD; then ``momentum`` is in EMA form
    and its buffer stays on the client between rounds). ``precision``: ``mixed`` computes in bfloat16 where torch's autocast does; weights,
    gradients, batch statistics and all that travels stay as they are. ``augment``: random changes of training images, of
    ``AUGMENTATIONS``. ``objective``: what is minimised, or how gradients are corrected; one that is off is the plain one. ``maintain``:
    what becomes of the optimiser's momentum between rounds (``training.momentum``). ``clip``, ``clip_limit``: see ``training.clipping``;
    ``frozen_clip``: in rounds with frozen statistics the gradients are clipped adaptively to this share of the weights instead, 0: as ever.
    ``weigh_all``: in averages a client weighs as many samples as it has, not as it trained on in the round.
    ``drop_last``: a last batch of a pass that is smaller than the others is left out.
    """

    batch_size: int
    epochs: int = 0
    steps: int = 0
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    update: str = "weights"
    precision: str = "float32"
    augment: str = "none"
    objective: Objective = PLAIN
    maintain: str = "reset"
    clip: str = "none"
    clip_limit: float = 1.0
    frozen_clip: float = 0.0
    weigh_all: bool = False
    drop_last: bool = False

    def __post_init__(self) -> None:
        if not self.objective.on:
            object.__setattr__(self, "objective", PLAIN)
        if self.batch_size < 2:
            raise ValueError(f"batch_size must be at least 2 (a batch of one has no variance), but got {self.batch_size}")
        if min(self.epochs, self.steps) < 0 or (self.epochs > 0) == (self.steps > 0):
            raise ValueError(f"give either local epochs or local steps, but got epochs={self.epochs} and steps={self.steps}")
        check_name("optimizer", self.optimizer, OPTIMIZERS)
        if self.optimizer == "adam" and self.momentum > 0:
            raise ValueError(f"adam has moments of its own: set the optimiser's momentum to 0, but got {self.momentum}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"the optimiser's momentum must be in [0, 1), but got {self.momentum}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, but got {self.weight_decay}")
        check_name("update", self.update, UPDATES)
        check_name("precision", self.precision, PRECISIONS)
        check_name("augment", self.augment, AUGMENTATIONS)
        if self.update == "gradients" and (self.steps != 1 or self.optimizer != "sgd"):
            raise ValueError(
                "update='gradients' is one batch, one gradient, one round (DSGD): set local steps to 1, local epochs to 0 and optimizer "
                f"to sgd, but got steps={self.steps}, epochs={self.epochs}, optimizer={self.optimizer!r}"
            )
        check_name("clip", self.clip, CLIPS)
        if not 0 < self.clip_limit < math.inf:
            raise ValueError(f"clip's limit must be > 0 and finite, but got {self.clip_limit}")
        if not 0 <= self.frozen_clip < math.inf:
            raise ValueError(f"the limit of frozen rounds must be >= 0 and finite, but got {self.frozen_clip}")
        if self.clip == "round" and self.optimizer != "sgd":
            raise ValueError(f"clip='round' bounds the path of SGD: set optimizer to sgd, or clip to norm, but got {self.optimizer!r}")
        self._check_maintain()
        self._check_objective()

    def _check_maintain(self) -> None:
        check_name("maintain-momentum", self.maintain, MAINTAIN)
        if self.maintain != "reset" and self.update == "gradients":
            raise ValueError("update='gradients' keeps its momentum at the client already: set maintain-momentum to reset")
        if self.maintain != "reset" and self.optimizer == "sgd" and self.momentum == 0:
            raise ValueError(f"maintain-momentum={self.maintain!r}, but there is no momentum: set momentum, or maintain-momentum to reset")

    def _check_objective(self) -> None:
        objective = self.objective
        if objective is not PLAIN and self.update == "gradients":
            raise ValueError(
                f"{objective.name} is for several local steps, but update='gradients' sends one gradient: set objective to none"
            )
        if objective.travels and (self.optimizer != "sgd" or self.momentum > 0 or self.clip != "none" or self.frozen_clip):
            raise ValueError(
                f"{objective.name}'s control variates are means of the gradients that plain SGD stepped along: set optimizer to sgd, "
                f"momentum to 0 and clip to none, but got {self.optimizer}, {self.momentum} and {self.clip}"
            )

    def clipping(self, frozen: bool) -> tuple[str, float]:
        """How gradients are clipped, and to what limit, in a round with or without ``frozen`` statistics."""
        return ("adaptive", self.frozen_clip) if frozen and self.frozen_clip else (self.clip, self.clip_limit)

    def weight(self, trained: int, samples: int) -> int:
        """Return how many samples a client counts for in averages that has so many, and trained on ``trained`` different ones."""
        return samples if self.weigh_all else trained

    def fewest(self, least: int) -> int:
        """Return how many samples a client must have, where a batch needs ``least``."""
        return max(least, self.batch_size) if self.drop_last else least

    def draw(self, samples: int, rng: np.random.Generator, least: int) -> list[Indices]:
        """Return the batches of a round on so many ``samples``, in random order by ``rng``; ``least``: what a batch needs.

        Raises:
            ClientTooSmall: the client has too few.
        """
        several = {"epochs": self.epochs, "steps": self.steps, "least": least}
        return list(draw_batches(samples, self.batch_size, rng, **several, drop_last=self.drop_last))

    def planned(self, samples: int) -> int:
        """Return how many samples a client that has so many counts for in averages, before its round."""
        if self.weigh_all:
            return samples
        return distinct(samples, self.batch_size, epochs=self.epochs, steps=self.steps, drop_last=self.drop_last)

    def most_steps(self, samples: int) -> int:
        """Return how many local steps a client of so many ``samples`` makes in a round."""
        return self.steps or self.epochs * (1 + len(cuts(samples, self.batch_size)))

    def make_optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
        if self.optimizer == "adam":
            return Adam(parameters, lr=learning_rate, weight_decay=self.weight_decay)
        return SGD(parameters, lr=learning_rate, momentum=self.momentum, weight_decay=self.weight_decay, foreach=True)


def learning_rate(
    schedule: str, base: float, decay: float, round: int, rounds: int, milestones: Sequence[tuple[float, float]] = ()
) -> float:
    """The rate of ``round`` (from 1): ``base``, times ``decay`` after 50 % and again after 75 % of the rounds (``step``), or times
    ``decay`` per round (``exponential``), or along half a cosine to 0 (``cosine``). ``milestones``: pairs of a share of the rounds and the
    factor of ``base`` after it."""
    if schedule == "constant":
        return base
    if schedule == "step":
        return base * decay ** ((round > rounds // 2) + (round > 3 * rounds // 4))
    if schedule == "exponential":
        return base * decay ** (round - 1)
    if schedule == "cosine":
        return base * (1 + math.cos(math.pi * (round - 1) / rounds)) / 2
    if schedule == "milestones":
        return base * next((factor for share, factor in reversed(milestones) if round > share * rounds), 1.0)
    raise ValueError(expected("learning-rate schedule", schedule, SCHEDULES))


def milestones_of(text: str) -> tuple[tuple[float, float], ...]:
    """``0.6:0.1, 0.8:0.01``: after 60 % of the rounds a tenth of the rate, after 80 % a hundredth.

    Raises:
        ValueError: it is not of this form, a share is not in (0, 1) or not above the one before, or a factor not above 0.
    """
    pairs = []
    for part in text.split(",") if text.strip() else ():
        share, _, factor = part.partition(":")
        try:
            pairs.append((float(share), float(factor)))
        except ValueError as error:
            raise ValueError(
                f"learning-rate-milestones must be like 0.6:0.1, 0.8:0.01 (share of the rounds:factor), but got {text[:100]!r}"
            ) from error
    shares = [share for share, _ in pairs]
    if shares != sorted(set(shares)) or not all(0 < share < 1 for share in shares) or not all(0 < f < math.inf for _, f in pairs):
        raise ValueError(f"learning-rate-milestones needs rising shares between 0 and 1, and factors > 0, but got {text[:100]!r}")
    return tuple(pairs)


def seeded(*key: int) -> np.random.Generator:
    """A generator that depends on ``key`` alone (seed, client, round, purpose): the same in every process and engine."""
    return np.random.default_rng(np.random.SeedSequence(key))
