"""Run the app in this process, without Ray: ``python run.py``."""

import tomllib
from pathlib import Path

from fl_bn.flower import run_in_process

flower = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["tool"]["flwr"]
config = {**flower["app"]["config"], "clients": 5}

if __name__ == "__main__":
    run_in_process(config, server_app="server_app:app", client_app="client_app:app")
