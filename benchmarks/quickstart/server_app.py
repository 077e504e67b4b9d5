"""Flower's quickstart server: FedAvg."""

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from task import accuracy, network

app = ServerApp()


@app.main()
def main(grid, context):
    torch.set_num_threads(1)
    config, net = context.run_config, network()
    strategy = FedAvg(fraction_train=config["fraction"], fraction_evaluate=0.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        train_config=ConfigRecord({"lr": config["lr"]}),
        num_rounds=config["rounds"],
    )
    net.load_state_dict(result.arrays.to_torch_state_dict())
    print(f"accuracy {accuracy(net):.3f}")
