"""The ServerApp."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from pytorch_example.strategy import CustomFedAvg
from pytorch_example.task import Net, create_run_dir, load_test, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    num_rounds = context.run_config["num-server-rounds"]
    fraction_train = context.run_config["fraction-train"]
    fraction_eval = context.run_config["fraction-evaluate"]
    device = context.run_config["server-device"]

    global_model = Net()
    arrays = ArrayRecord(global_model.state_dict())

    strategy = CustomFedAvg(Net(), fraction_train=fraction_train, fraction_evaluate=fraction_eval)

    save_path, run_dir = create_run_dir(config=context.run_config)
    strategy.set_save_path_and_run_dir(save_path, run_dir, context.run_config["use-wandb"])

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.05}),
        num_rounds=num_rounds,
        evaluate_fn=get_global_evaluate_fn(device=device),
    )

    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def get_global_evaluate_fn(device: str):
    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = Net()
        net.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(net, load_test(), device=device)
        return MetricRecord({"accuracy": accuracy, "loss": loss})

    return global_evaluate
