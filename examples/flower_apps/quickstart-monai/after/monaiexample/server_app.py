"""The ServerApp."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fl_bn.flower import FixBN
from monaiexample.task import load_model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    fraction_train: float = context.run_config["fraction-train"]
    num_rounds: int = context.run_config["num-server-rounds"]

    model = load_model()
    arrays = ArrayRecord(model.state_dict())

    strategy = FixBN(load_model(), fraction_train=fraction_train)

    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        num_rounds=num_rounds,
    )

    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
