"""The ServerApp: FedAvg with a learning rate for each round, an evaluation at the server, and the best model."""

from collections import OrderedDict

import torch
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from fl_bn.flower import legacy_server_app
from fl_bn.methods import hbn
from niid_bench.dataset import load_test
from niid_bench.models import CNN, test


def gen_evaluate_fn(device):
    best = {"accuracy": -1.0}

    def evaluate(server_round, parameters_ndarrays, config):
        net = CNN()
        params_dict = zip(net.state_dict().keys(), parameters_ndarrays, strict=True)
        net.load_state_dict(OrderedDict({k: torch.tensor(v) for k, v in params_dict}), strict=True)
        net.to(device)
        loss, accuracy = test(net, load_test(), device)
        if accuracy > best["accuracy"]:
            best["accuracy"] = accuracy
            torch.save({"round": server_round, "accuracy": accuracy, "model": net.state_dict()}, "best_model.pt")
        return loss, {"accuracy": accuracy}

    return evaluate


def gen_on_fit_config(learning_rate):
    def on_fit_config(server_round):
        return {"lr": learning_rate if server_round <= 2 else learning_rate / 2}

    return on_fit_config


def weighted_average(metrics):
    total = sum(num_examples for num_examples, _ in metrics)
    names = [name for name in metrics[0][1] if name != "server-round"]
    return {name: sum(num_examples * m[name] for num_examples, m in metrics) / total for name in names}


def server_fn(context: Context):
    run_config = context.run_config
    parameters = ndarrays_to_parameters([val.cpu().numpy() for _, val in CNN().state_dict().items()])
    strategy = FedAvg(
        fraction_fit=run_config["fraction-fit"],
        evaluate_fn=gen_evaluate_fn(torch.device("cpu")),
        on_fit_config_fn=gen_on_fit_config(run_config["learning-rate"]),
        initial_parameters=parameters,
        fit_metrics_aggregation_fn=weighted_average,
        evaluate_metrics_aggregation_fn=weighted_average,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=run_config["num-server-rounds"]))


app = legacy_server_app(server_fn, CNN, hbn())
