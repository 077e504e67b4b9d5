"""A server that writes Flower's history to a file."""

import json
from pathlib import Path

from flwr.server import Server


class ResultsSaverServer(Server):
    def __init__(self, *, client_manager, strategy, results_saver_fn, run_config):
        super().__init__(client_manager=client_manager, strategy=strategy)
        self.results_saver_fn, self.run_config = results_saver_fn, run_config

    def fit(self, num_rounds, timeout):
        history, elapsed = super().fit(num_rounds, timeout)
        self.results_saver_fn(history, self.run_config)
        return history, elapsed


def save_results_and_config(history, run_config):
    folder = Path(run_config["results-save-dir"]) / run_config["algorithm-name"]
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        "losses_distributed": history.losses_distributed,
        "metrics_distributed_fit": history.metrics_distributed_fit,
        "metrics_distributed": history.metrics_distributed,
    }
    (folder / "history.json").write_text(json.dumps(found))
    (folder / "config.json").write_text(json.dumps(dict(run_config)))
