"""The legacy app, with Flower's older API: ``client_fn``, ``server_fn`` and a strategy."""

from client import make_client, make_net
from flwr.client import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg


def client_fn(context):
    return make_client(context).to_client()


def accuracy(metrics):
    return {"accuracy": sum(n * m["accuracy"] for n, m in metrics) / sum(n for n, _ in metrics)}


def server_fn(context):
    strategy = FedAvg(
        initial_parameters=ndarrays_to_parameters([value.numpy() for value in make_net().state_dict().values()]),
        on_fit_config_fn=lambda server_round: {"lr": 0.1},
        evaluate_metrics_aggregation_fn=accuracy,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=context.run_config["num-server-rounds"]))


client_app = ClientApp(client_fn)
server_app = ServerApp(server_fn=server_fn)
