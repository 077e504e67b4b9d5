"""Find tasks by name: those in ``TASKS``, and your own as "package.module:function"."""

from __future__ import annotations

from fl_bn.support.user_code import Modules, function
from fl_bn.task.classification import Classification, ClassificationAUC, Segmentation
from fl_bn.task.dice import Dice
from fl_bn.task.multi_label import MultiLabel
from fl_bn.task.regression import Regression
from fl_bn.task.targets import LABELS, MASKS, VALUES
from fl_bn.task.task import Task

AUTO, OWN = "auto", "package.module:function"
CLASSIFICATION = Classification()
TASKS: dict[str, type[Task]] = {task.name: task for task in (Classification, ClassificationAUC, Segmentation, Dice, Regression, MultiLabel)}


def find_task(name: str, kind: str | None = None, modules: Modules | None = None) -> Task:
    """Return the task of a name in a run config.

    Args:
        name: one of ``TASKS``, or "auto" for one class per sample or pixel. Or your own
            function or class as "package.module:function", which is called without
            arguments.
        kind: of the data's targets (``kind_of``). None: unknown; "auto" is then
            classification, with the same metrics as segmentation.
        modules: those that may hold your own task. None: any.

    Raises:
        ValueError: there is no such task, it does not learn from such targets, or your
            own function fails or returns no Task.
    """
    if name == AUTO:
        if kind in (None, LABELS, MASKS):
            return Segmentation() if kind == MASKS else Classification()
        wanted = Regression.name if kind == VALUES else MultiLabel.name
        raise ValueError(f"the data have {kind}, but task='auto' needs one class per sample or pixel: set task='{wanted}' for them")
    if name in TASKS:
        task: Task = TASKS[name]()
    elif ":" in name:
        try:
            task = function("your own task", name, modules)()
        except ValueError:
            raise
        except Exception as error:  # a user's module may raise anything
            raise ValueError(f"task {name!r} raised {type(error).__name__}: {error}") from error
        if not isinstance(task, Task):
            raise ValueError(f"task {name!r} must return a Task (fl_bn.task), but returned {type(task).__name__}")
    else:
        raise ValueError(f"task must be {AUTO}, one of {', '.join(TASKS)}, or your own as {OWN}, but got {name!r}")
    if task.takes and kind is not None and kind not in task.takes:
        raise ValueError(f"task {task.name!r} learns from {' or '.join(task.takes)}, but the data have {kind}")
    return task
