"""Run the app in this process, without Ray: ``python run.py``."""

import tomllib
from pathlib import Path

from fl_bn.flower import run_in_process

app = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["tool"]["flwr"]["app"]
config, components = {**app["config"], "clients": 5}, app["components"]

if __name__ == "__main__":
    run_in_process(config, server_app=components["serverapp"], client_app=components["clientapp"])
