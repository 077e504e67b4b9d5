"""Define tasks, one file per kind: how a batch is read, the loss, and the metrics.

Metrics are computed from sums. The sums of two sets of data add up to those of their
union (torchmetrics' merge rule). So an evaluation in batches, at clients, by domain, or
under secure aggregation gives the result of one pass over all data.

A task of your own is about ten lines. Here the network has one output per sample, and
labels are grades:

>>> import torch
>>> from torch.nn import functional as F
>>> from fl_bn import Task
>>> class Grades(Task):
...     name, metric, higher_is_better = "grades", "mae", False
...
...     def loss(self, output, targets):
...         return F.smooth_l1_loss(output.squeeze(1), targets.float())
...
...     def sums(self, output, targets):
...         return {"error": (output.squeeze(1) - targets).abs().sum(), "samples": len(targets)}
...
...     def metrics(self, sums):
...         return {"mae": float(sums["error"] / sums["samples"])}
>>> state = Grades().state()
>>> state.update(torch.tensor([[1.0], [2.5]]), torch.tensor([1, 3]))
>>> state.result()
{'loss': 0.0625, 'mae': 0.25}
"""

from fl_bn.task.classification import CLASS, IGNORE, Classification, ClassificationAUC, Segmentation
from fl_bn.task.dice import Dice
from fl_bn.task.find import AUTO, CLASSIFICATION, TASKS, find_task
from fl_bn.task.metrics import MetricObject, MetricState, extended, lower_is_better, weighted_mean
from fl_bn.task.multi_label import MultiLabel
from fl_bn.task.regression import Regression
from fl_bn.task.targets import LABEL_SETS, LABELS, MASKS, VALUES, batch_size, kind_of, one_number, tensors_in, to_device
from fl_bn.task.task import ANY, SHARE, Range, Task

__all__ = [
    "ANY",
    "AUTO",
    "CLASS",
    "CLASSIFICATION",
    "IGNORE",
    "LABELS",
    "LABEL_SETS",
    "MASKS",
    "SHARE",
    "TASKS",
    "VALUES",
    "Classification",
    "ClassificationAUC",
    "Dice",
    "MetricObject",
    "MetricState",
    "MultiLabel",
    "Range",
    "Regression",
    "Segmentation",
    "Task",
    "batch_size",
    "extended",
    "find_task",
    "kind_of",
    "lower_is_better",
    "one_number",
    "tensors_in",
    "to_device",
    "weighted_mean",
]
