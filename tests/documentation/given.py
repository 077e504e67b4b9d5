"""Prepare what the code on a page needs.

A page names what it needs in a comment ``<!-- given: NAME -->`` before its first code block; NAME is a key of ``GIVEN``. Each function
here returns the names that the code can use, and a function to call after the code, which checks the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from safetensors.torch import save_file
from torch import nn

from fl_bn.flower import InProcessGrid
from fl_bn.models import build
from tests.documentation.pages import ROOT
from tests.scripts import script

Names = dict[str, Any]
After = Callable[[Names], None]


def flower_quickstart() -> tuple[Names, After]:
    """Prepare Flower's PyTorch quickstart: both apps, the network, the data and the training loop. Afterwards run the apps."""
    task = script("examples/quickstart_flower/after/quickstart/task.py")

    def data(context: Context) -> Any:
        return task.load_data(context.node_config["partition-id"], context.node_config["num-partitions"])

    def evaluation(model: nn.Module, msg: Message, context: Context) -> Message:
        loss, accuracy = task.test(model, data(context)[1], "cpu")
        metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": 360})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    trained: list[float] = []

    def loop(model: nn.Module, loader: Any) -> float:
        trained.append(task.train(model, loader, 1, 0.05, "cpu"))
        return trained[-1]

    names = {
        "app": ClientApp(),
        "server_app": ServerApp(),
        "Net": task.Net,
        "my_batches": lambda context: data(context)[0],
        "my_training_loop": loop,
        "my_evaluation": evaluation,
    }

    def run(names: Names) -> None:
        config: Any = {}
        names["server_app"](InProcessGrid(names["app"], 5, config), Context(1, 0, {}, RecordDict(), config))
        assert len(trained) >= 5 * 5, "expected five clients to train in each of five rounds"
        assert sum(trained[-5:]) < sum(trained[:5]), "expected a lower loss in the last round than in the first"

    return names, run


def finished_run() -> tuple[Names, After]:
    """Write the model of a finished run to ``runs/first``, and prepare its network."""
    folder = Path("runs") / "first"
    folder.mkdir(parents=True)
    save_file(build("digits-cnn-small", classes=10, channels=3, image_size=20).state_dict(), str(folder / "model.safetensors"))
    return {"net": build("digits-cnn-small", classes=10, channels=3, image_size=20)}, lambda names: None


def numpy_client() -> tuple[Names, After]:
    """Prepare an app of Flower's older API, with a ``client_fn`` and a ``server_fn``. Afterwards run the app."""
    folder = str(ROOT / "examples" / "numpy_client")
    sys.path.insert(0, folder)
    try:
        before, client = script("examples/numpy_client/before.py"), script("examples/numpy_client/client.py")
    finally:
        sys.path.remove(folder)
        sys.modules.pop("client", None)

    def run(names: Names) -> None:
        config: Any = {"num-server-rounds": 1}
        names["server_app"](InProcessGrid(names["client_app"], 3, config), Context(1, 0, {}, RecordDict(), config))

    return {"client_fn": before.client_fn, "server_fn": before.server_fn, "Net": client.make_net}, run


GIVEN: dict[str, Callable[[], tuple[Names, After]]] = {
    "Flower's quickstart": flower_quickstart,
    "a finished run": finished_run,
    "a legacy NumPyClient": numpy_client,
}
