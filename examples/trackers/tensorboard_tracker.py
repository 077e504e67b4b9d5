"""Write the numbers of every round as TensorBoard's events, into the run's folder.

    pip install tensorboard
    PYTHONPATH=examples/trackers fl-bn run --run-config "callbacks='tensorboard_tracker:TensorBoard'"
    tensorboard --logdir runs

A resumed run replaces the rounds after its checkpoint.
"""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from fl_bn import Callback


class TensorBoard(Callback):
    def __init__(self, config, folder: Path | None) -> None:
        self.folder, self.writer = (folder or Path("runs")) / "tensorboard", None

    def on_round(self, record, rounds: int) -> None:
        if self.writer is None:
            self.writer = SummaryWriter(str(self.folder), purge_step=record.round if self.folder.exists() else None)
        numbers = {"loss": record.loss, "clients": len(record.accepted), "seconds": record.seconds}
        if record.drift is not None:
            numbers["drift"] = record.drift.largest
        for name, value in {**numbers, **{f"test/{name}": value for name, value in record.evaluation.items()}}.items():
            self.writer.add_scalar(name, value, record.round)
        self.writer.flush()

    def on_end(self, error: BaseException | None) -> None:
        if self.writer is not None:
            self.writer.close()
