"""Define callbacks that compare a run's evaluations: one saves the best model, one ends a run that no longer improves."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from fl_bn.federation.callbacks import Callback, Running
from fl_bn.federation.record import RoundRecord
from fl_bn.support import durable
from fl_bn.task.metric_names import lower_is_better

LOGGER = logging.getLogger("flwr")
LOSS = "loss"


class Best(Callback):
    """Follow the best value of a metric over the evaluations of a run. Base of ``EarlyStop`` and ``KeepBest``.

    Args:
        metric: The metric. Default: the task's own, such as ``accuracy``.
        higher_is_better: Whether a higher value is better. Default: as the task declares for its own metric. For
            another one, lower is better if its name contains ``loss``, ``error`` or the like, as in ``eval_loss``.
        least: An evaluation counts as better only if it improves the best value by more than ``least``, a number >= 0.

    Attributes:
        best: The best finite value so far; NaN if there is none yet.
        round: The round of the best value; 0 if there is none yet.
        since: The number of evaluations since the best one.

    Raises:
        ValueError: ``least`` is negative or not finite.
    """

    def __init__(self, metric: str = "", higher_is_better: bool | None = None, least: float = 0.0) -> None:
        if not 0 <= least < math.inf:
            raise ValueError(f"least (by how much an evaluation must be better) must be finite and >= 0, but got {least}")
        self.metric, self._higher, self._least = metric, higher_is_better, least
        self.best, self.round, self.since = math.nan, 0, 0

    def on_start(self, running: Running) -> None:
        """Begin without a best result or, in a continued run, with the evaluations of its earlier rounds."""
        task = running.task
        self.running, self.name = running, self.metric or task.metric
        self.higher = self._higher
        if self.higher is None:
            self.higher = task.higher_is_better if self.name == task.metric else not lower_is_better(self.name)
            if self.name != task.metric and self.name != LOSS:
                LOGGER.info(
                    "%s: %s values of %s are better (for the contrary: higher_is_better=%s)",
                    type(self).__name__,
                    "higher" if self.higher else "lower",
                    self.name,
                    not self.higher,
                )
        self.best, self.round, self.since = math.nan, 0, 0
        for record in running.history:
            if record.evaluation:
                self._better(record)

    def on_evaluation(self, record: RoundRecord, rounds: int) -> None:
        """Compare an evaluation with the best one so far, and call ``improved`` or ``did_not``.

        Raises:
            ValueError: The evaluation does not have the metric.
        """
        if self._better(record):
            self.improved(record)
        else:
            self.did_not(record, rounds)

    def on_end(self, error: BaseException | None) -> None:
        """Warn if no round was evaluated."""
        if not self.round and not self.since:
            LOGGER.warning("%s had no effect, because no round was evaluated", type(self).__name__)

    def improved(self, record: RoundRecord) -> None:
        """Handle an evaluation that is the best so far. The base class does nothing; subclasses override this method."""

    def did_not(self, record: RoundRecord, rounds: int) -> None:
        """Handle an evaluation that is not better than the best one. The base class does nothing; subclasses override this method."""

    def _better(self, record: RoundRecord) -> bool:
        """Tell whether an evaluation is the best so far, and store it if so. NaN and infinite values are not better.

        An evaluation that lacks the metric, where an earlier one had it, is not judged: it does not count in ``since`` either.
        """
        if self.name not in record.evaluation and (self.round or self.since):
            mine = type(self).__name__
            LOGGER.warning("round %s: %s leaves out this evaluation, which lacks the metric %s", record.round, mine, self.name)
            return False
        if self.name not in record.evaluation:
            raise ValueError(
                f"{type(self).__name__} needs the metric {self.name!r}, but the metrics of round {record.round} are "
                f"{', '.join(record.evaluation)}: set metric to one of them"
            )
        value = record.evaluation[self.name]
        ahead = value - self.best if self.higher else self.best - value
        better = math.isfinite(value) and (self.round == 0 or ahead > self._least)
        if better:
            self.best, self.round, self.since = value, record.round, 0
        else:
            self.since += 1
        return better


class EarlyStop(Best):
    """End a run whose evaluations no longer improve.

    >>> from fl_bn import EarlyStop
    >>> stop = EarlyStop(patience=3, metric="loss")  # Federation(..., callbacks=[stop])

    Args:
        patience: The run ends after this number of evaluations in a row without a better value; at least 1.
        metric: The metric. Default: the task's own.
        higher_is_better: Whether a higher value is better. Default: as the task declares for its own
            metric. For another metric, its name decides, see ``Best``.
        least: An evaluation counts as better only if it improves the best value by more than ``least``, a number >= 0.

    Raises:
        ValueError: ``patience`` is below 1, or ``least`` is negative or not finite.
    """

    def __init__(self, patience: int, metric: str = "", higher_is_better: bool | None = None, least: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience, the evaluations without improvement after which a run ends, must be >= 1, but got {patience}")
        super().__init__(metric, higher_is_better, least)
        self.patience = patience

    def did_not(self, record: RoundRecord, rounds: int) -> None:
        """End the run after ``patience`` evaluations in a row that were not better."""
        if self.since >= self.patience and record.round < rounds:
            self.running.stop(
                f"{self.name} did not improve in {self.since} evaluation{'s' * (self.since > 1)}; the best was {self.best:.4g}, in round "
                f"{self.round}"
            )


class KeepBest(Best):
    """Keep the model of the best evaluation in a safetensors file. At any moment the file is complete or absent.

    The file has the tensors of ``Running.arrays``. If clients keep tensors and are in this process, each client's
    network is in a further file in the same folder: ``NAME-client-3.safetensors`` for client 3.

    >>> from fl_bn import KeepBest
    >>> keep = KeepBest("best.safetensors")  # Federation(..., callbacks=[keep])

    Args:
        path: The file.
        metric: The metric. Default: the task's own.
        higher_is_better: Whether a higher value is better. Default: as the task declares for its own
            metric. For another metric, its name decides, see ``Best``.
    """

    def __init__(self, path: str | Path, metric: str = "", higher_is_better: bool | None = None) -> None:
        super().__init__(metric, higher_is_better)
        self.path = Path(path)

    def on_start(self, running: Running) -> None:
        """Begin without a best result or, in a continued run, with the evaluations of its earlier rounds, as ``Best`` does.

        If the file does not exist, ignore those evaluations and log a warning, because the model of the best one was not saved.
        """
        super().on_start(running)
        if self.round and not self.path.exists():
            LOGGER.warning(
                "the best evaluation so far, of round %s, was made before models were kept: %s will have the best model of later rounds",
                self.round,
                self.path,
            )
            self.best, self.round, self.since = math.nan, 0, 0

    def improved(self, record: RoundRecord) -> None:
        """Write the model of this evaluation to the file, in place of an earlier one."""
        about = {"round": str(record.round), self.name: repr(self.best)}
        _write(self.path, self.running.arrays(), about)
        for client, arrays in self.running.clients().items():
            own = self.path.with_name(f"{self.path.stem}-client-{client}{self.path.suffix}")
            _write(own, arrays, {**about, "client": str(client)})

    def on_end(self, error: BaseException | None) -> None:
        """Log the best value, its round, and the file."""
        super().on_end(error)
        if self.round:
            LOGGER.info("best %s: %.4g in round %s, kept in %s", self.name, self.best, self.round, self.path)


def _write(path: Path, arrays: Mapping[str, Tensor], about: dict[str, str]) -> None:
    """Write tensors to a safetensors file, in row-major order, even if their memory format is another one."""
    rows = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in arrays.items()}
    durable.write(path, durable.in_order(save(rows, about)), mode=0o666)
