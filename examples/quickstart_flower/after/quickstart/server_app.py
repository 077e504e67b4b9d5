"""The ServerApp of Flower's PyTorch quickstart, with FixBN."""

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fl_bn.flower import FixBN
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_train: float = context.run_config["fraction-train"]
    num_rounds: int = context.run_config["num-server-rounds"]
    lr: float = context.run_config["lr"]

    arrays = ArrayRecord(Net().state_dict())
    strategy = FixBN(Net(), fraction_train=fraction_train)

    result = strategy.start(grid=grid, initial_arrays=arrays, train_config=ConfigRecord({"lr": lr}), num_rounds=num_rounds)
    print(result.evaluate_metrics_clientapp)
