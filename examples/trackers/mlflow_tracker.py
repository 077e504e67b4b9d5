"""Log every run to MLflow: the run config, metrics after every round, and the model and the pictures at the end.

    pip install mlflow
    PYTHONPATH=examples/trackers fl-bn run --run-config "callbacks='mlflow_tracker:MLflow'"

MLflow writes where MLFLOW_TRACKING_URI says: a database (the default), a server, or, with
MLFLOW_ALLOW_FILE_STORE=true, a folder.
"""

from pathlib import Path

from mlflow import MlflowClient

from fl_bn import Callback


class MLflow(Callback):
    def __init__(self, config, folder: Path | None) -> None:
        self.client, self.folder = MlflowClient(), folder
        name = f"fl-bn {config.dataset}"
        known = self.client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self.client.create_experiment(name)
        self.run = self.client.create_run(experiment, run_name=folder.name if folder else config.method).info.run_id
        for key, value in config.to_mapping().items():
            self.client.log_param(self.run, key, value)

    def on_evaluation(self, record, rounds: int) -> None:
        for name, value in record.evaluation.items():
            self.client.log_metric(self.run, f"test/{name}", value, step=record.round)

    def on_round(self, record, rounds: int) -> None:
        self.client.log_metric(self.run, "loss", record.loss, step=record.round)
        self.client.log_metric(self.run, "clients", len(record.accepted), step=record.round)
        self.client.log_metric(self.run, "seconds", record.seconds, step=record.round)
        if record.drift is not None:
            self.client.log_metric(self.run, "drift", record.drift.largest, step=record.round)

    def on_end(self, error: BaseException | None) -> None:
        if self.folder is not None:
            for file in [*self.folder.glob("*.png"), *self.folder.glob("*.safetensors"), self.folder / "summary.md"]:
                self.client.log_artifact(self.run, str(file))
        interrupted = isinstance(error, KeyboardInterrupt)
        self.client.set_terminated(self.run, "KILLED" if interrupted else "FAILED" if error else "FINISHED")
