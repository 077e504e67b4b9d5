"""Define classification that is judged by the area under the ROC curve.

Legend: B samples of a batch, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_bn.task.classification import CLASS, Classification, labels_of
from fl_bn.task.task import SHARE, Range


class ClassificationAUC(Classification):
    """Define a task with one of C classes per sample, whose metric is ``auc``, the area under the ROC curve.

    The AUC is the mean over the classes of the area for this class against all others. It is scikit-learn's
    ``multi_class="ovr"``, for log odds rounded to ``BINS`` bins. A class without samples, or with all samples, is left
    out. If no class remains, the AUC is NaN. The accuracies of ``Classification`` are further metrics.

    >>> from fl_bn.task import ClassificationAUC
    >>> state = ClassificationAUC().state()
    >>> state.update(torch.tensor([[0.0, -3.0], [0.0, -1.0], [0.0, -2.0]]), torch.tensor([0, 1, 1]))
    >>> state["auc"], round(state["accuracy"], 3)
    (1.0, 0.333)

    Attributes:
        target_key: key of the targets, if batches are dicts. Empty: see ``Task.read``.
        input_keys: keys of the inputs, if batches are dicts. Empty: see ``Task.read``.
        output_key: key or index of the scores in a network's output. None: see ``Task.output``.
    """

    name, metric = "classification-auc", "auc"
    ranges: ClassVar[Mapping[str, Range]] = {"auc": SHARE, "accuracy": SHARE, CLASS: SHARE}
    # The exact area needs the order of all scores, which no sum of fixed size holds. So the log odds of a class are counted in bins,
    # and samples of one bin count as equal. A bin is 1/51 wide near 0, and 2 % of the log odds where these are large, up to 11,000.
    BINS: ClassVar[int] = 1024
    LARGEST: ClassVar[float] = 10.0  # the bins end where the inverse hyperbolic sine of the log odds is -10 and 10

    def sums(self, output: Tensor, targets: Tensor) -> dict[str, Tensor | float]:
        """Count the confusion matrix (C, C), and make histograms (C, 2, BINS) of the log odds of each class.

        On the axis of length 2, index 0 has the samples of other classes, and index 1 the samples of the class.
        """
        counted = super().sums(output, targets)
        targets, classes = labels_of(output, targets), output.shape[1]
        known = targets >= 0  # torch's losses leave out -100
        height = log_odds(output.double()).asinh() + self.LARGEST
        binned = (height * (self.BINS / (2 * self.LARGEST))).nan_to_num().long().clamp(0, self.BINS - 1)
        own = F.one_hot(targets.clamp(min=0), classes)
        place = (torch.arange(classes, device=targets.device) * 2 + own) * self.BINS + binned
        scores = torch.bincount(place[known].flatten(), minlength=classes * 2 * self.BINS).view(classes, 2, self.BINS)
        return counted | {"scores": scores}

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Compute the area under the ROC curve, the accuracy over all samples, and the accuracy over each class."""
        others, own = sums["scores"].double().unbind(1)
        below = others.cumsum(1) - others / 2  # samples of other classes that score less; those of the same bin count half
        area = (own * below).sum(1) / (own.sum(1) * others.sum(1))  # NaN where either has no sample
        return {"auc": float(area.nanmean())} | super().metrics(sums)


def log_odds(scores: Tensor) -> Tensor:
    """Compute the log odds of every class (B, C), ``log(p / (1 - p))`` with its softmax probability ``p``.

    The log odds are exact even where ``p`` rounds to 1.

    Args:
        scores: (B, C), at least two classes.
    """
    whole, best = scores.logsumexp(1, keepdim=True), scores.argmax(1, keepdim=True)
    others = whole + torch.log1p(-(scores - whole).exp())  # exact for p up to 1/2; the best class, whose p may be larger, follows
    second = scores.scatter(1, best, -torch.inf).logsumexp(1, keepdim=True)
    return scores - others.scatter(1, best, second)
