"""The ServerApp."""

from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg

from fedbn.model import CNNModel
from fedbn.server import ResultsSaverServer, save_results_and_config
from fedbn.strategy import get_metrics_aggregation_fn, get_on_fit_config
from fedbn.utils import extract_weights
from fl_bn.flower import legacy_server_app
from fl_bn.methods import fedbn


def server_fn(context: Context):
    run_config = context.run_config
    ndarrays = extract_weights(CNNModel(), "FedAvg")
    parameters = ndarrays_to_parameters(ndarrays)
    strategy = FedAvg(
        fraction_fit=float(run_config["fraction-fit"]),
        fraction_evaluate=float(run_config["fraction-evaluate"]),
        min_available_clients=int(run_config["num-clients"]),
        on_fit_config_fn=get_on_fit_config(),
        initial_parameters=parameters,
        fit_metrics_aggregation_fn=get_metrics_aggregation_fn(),
        evaluate_metrics_aggregation_fn=get_metrics_aggregation_fn(),
    )
    server = ResultsSaverServer(
        client_manager=SimpleClientManager(),
        strategy=strategy,
        results_saver_fn=save_results_and_config,
        run_config=run_config,
    )
    return ServerAppComponents(server=server, config=ServerConfig(num_rounds=int(run_config["num-server-rounds"])))


app = legacy_server_app(server_fn, CNNModel, fedbn())
