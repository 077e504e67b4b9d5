"""The ClientApp. Each client keeps its classification head in the context's state, and uses it in the next round."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn import flower, methods
from pytorch_example.task import Net, load_data
from pytorch_example.task import test as test_fn
from pytorch_example.task import train as train_fn

app = ClientApp()
flower.answer(app, Net, methods.fbn(), lambda c: load_data(c.node_config["partition-id"], c.node_config["num-partitions"])[0])
LOCAL_LAYER = "classification-head"


@app.train()
def train(msg: Message, context: Context):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    trainloader, _ = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])

    with flower.training(msg, context, Net(), methods.fbn()) as round:
        model = round.model
        load_layer_from_state(model, context.state)
        train_loss = train_fn(model, trainloader, context.run_config["local-epochs"], lr=msg.content["config"]["lr"], device=device)
        save_layer_to_state(model, context.state)

    metrics = {"train_loss": train_loss, "num-examples": len(trainloader.dataset)}
    return round.message(len(trainloader.dataset), train_loss, metrics)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = flower.evaluating(msg, context, Net(), methods.fbn())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    _, valloader = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])

    load_layer_from_state(model, context.state)
    eval_loss, eval_acc = test_fn(model, valloader, device)

    metrics = {"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(valloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)


def save_layer_to_state(model, state: RecordDict):
    state[LOCAL_LAYER] = ArrayRecord(model.fc2.state_dict())


def load_layer_from_state(model, state: RecordDict):
    if LOCAL_LAYER in state.array_records:
        model.fc2.load_state_dict(state[LOCAL_LAYER].to_torch_state_dict())
