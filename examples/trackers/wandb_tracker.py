"""Log every run to Weights & Biases: the run config, metrics after every round, and the pictures at the end.

    pip install wandb
    WANDB_MODE=offline PYTHONPATH=examples/trackers fl-bn run --run-config "callbacks='wandb_tracker:WandB'"

Offline, nothing leaves this machine; ``wandb sync`` sends a run later.
"""

from pathlib import Path

import wandb

from fl_bn import Callback


class WandB(Callback):
    def __init__(self, config, folder: Path | None) -> None:
        name = folder.name if folder else config.method
        self.run = wandb.init(project="fl-bn", name=name, dir=folder, config=config.to_mapping())
        self.folder, self.found = folder, {}

    def on_evaluation(self, record, rounds: int) -> None:
        self.found = {f"test/{name}": value for name, value in record.evaluation.items()}

    def on_round(self, record, rounds: int) -> None:
        drift = {} if record.drift is None else {"drift": record.drift.largest}
        values = {"loss": record.loss, "clients": len(record.accepted), "seconds": record.seconds, **drift, **self.found}
        self.run.log(values, step=record.round)
        self.found = {}

    def on_end(self, error: BaseException | None) -> None:
        if self.folder is not None:
            self.run.log({picture.stem: wandb.Image(str(picture)) for picture in self.folder.glob("*.png")})
        self.run.finish(exit_code=0 if error is None else 1)
