"""Run every method, one after the other, in one simulation on Ray, whose start takes longer than all the runs.

The ServerApp and the ClientApp are those of ``flwr run``. Flower fixes the run config when the simulation starts. So each method's run
config is passed to the clients in a file.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fl_bn.app.client import build_client
from fl_bn.flower import BatchNormClient, make_client_app
from fl_bn.methods import METHODS
from server_app.app import app as served
from tests.integration.runs import LIE, TINY, own

CONFIG = "FL_BN_TEST_CONFIG"


def build(context: Context) -> BatchNormClient:
    run_config = json.loads(Path(os.environ[CONFIG]).read_text())
    return build_client(Context(context.run_id, context.node_id, context.node_config, context.state, run_config), Path(__file__).parents[2])


def main(folder: Path) -> None:
    os.environ[CONFIG] = str(folder / "config.json")
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        runs = {method: own(method) for method in METHODS} | {"lied": {"method": "fbn", **LIE}}
        for name, keys in runs.items():
            context.run_config = {**TINY, **keys, "output": str(folder), "name": name}
            (folder / "config.json").write_text(json.dumps(context.run_config))
            served(grid, context)

    share = min(1.0, math.floor((os.cpu_count() or 1) * 33) / 100)  # all three at once, as FedTAN's exchange needs
    run_simulation(server, make_client_app(build), 3, backend_config={"client_resources": {"num_cpus": share, "num_gpus": 0.0}})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
