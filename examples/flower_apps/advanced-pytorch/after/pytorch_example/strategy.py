"""FedAvg with a learning-rate schedule, results in a file, the best model on disk, and Weights & Biases."""

import json
from collections.abc import Callable, Iterable
from logging import INFO
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fl_bn.flower import FBN
from pytorch_example.task import Net

PROJECT_NAME = "FLOWER-advanced-pytorch"


class CustomFedAvg(FBN):
    def set_save_path_and_run_dir(self, path: Path, run_dir: str, use_wandb: bool):
        self.save_path, self.run_dir, self.use_wandb = path, run_dir, use_wandb

    def _update_best_acc(self, current_round: int, accuracy: float, arrays: ArrayRecord) -> None:
        if accuracy > self.best_acc_so_far:
            self.best_acc_so_far = accuracy
            log(INFO, "New best global model found: %f", accuracy)
            model = Net()
            model.load_state_dict(arrays.to_torch_state_dict())
            torch.save(model.state_dict(), self.save_path / f"model_state_acc_{accuracy}_round_{current_round}.pth")

    def _track(self, metrics: MetricRecord, current_round: int) -> None:
        if self.use_wandb:
            import wandb

            wandb.log(dict(metrics), step=current_round)

    def save_metrics_as_json(self, current_round: int, result: Result) -> None:
        file = self.save_path / "results.json"
        results = json.loads(file.read_text()) if file.exists() else []
        results.append(
            {
                "round": current_round,
                "train_metrics": dict(result.train_metrics_clientapp.get(current_round, {})),
                "evaluate_metrics_clientapp": dict(result.evaluate_metrics_clientapp.get(current_round, {})),
                "evaluate_metrics_serverapp": dict(result.evaluate_metrics_serverapp.get(current_round, {})),
            }
        )
        file.write_text(json.dumps(results))

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        if server_round == 3:
            config["lr"] = config["lr"] * 0.5
            log(INFO, "Adjusted learning rate to %f", config["lr"])
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            self.result.train_metrics_clientapp[server_round] = metrics
            self._track(metrics, server_round)
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        metrics = super().aggregate_evaluate(server_round, replies)
        if metrics is not None:
            self.result.evaluate_metrics_clientapp[server_round] = metrics
            self._track(metrics, server_round)
        return metrics

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        if self.use_wandb:
            import wandb

            wandb.init(project=PROJECT_NAME, name=f"{self.run_dir}-ServerApp")
        self.best_acc_so_far, self.result = 0.0, Result()

        def evaluate(current_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            res = evaluate_fn(current_round, arrays) if evaluate_fn else None
            if res is not None:
                self.result.evaluate_metrics_serverapp[current_round] = res
            if current_round > 0:
                if res is not None:
                    self._update_best_acc(current_round, res["accuracy"], arrays)
                    self._track(res, current_round)
                self.save_metrics_as_json(current_round, self.result)
            return res

        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate)
