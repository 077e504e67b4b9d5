"""The ClientApp."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower import answer, evaluating, training
from fl_bn.methods import fbn
from pytorchexample.task import Net, load_data
from pytorchexample.task import test as test_fn
from pytorchexample.task import train as train_fn

app = ClientApp()
answer(app, Net, fbn(), lambda c: load_data(c.node_config["partition-id"], c.node_config["num-partitions"], c.run_config["batch-size"])[0])


@app.train()
def train(msg: Message, context: Context):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    batch_size = context.run_config["batch-size"]
    trainloader, _ = load_data(partition_id, num_partitions, batch_size)

    with training(msg, context, Net(), fbn(), trainloader) as round:
        train_loss = train_fn(
            round.model,
            trainloader,
            context.run_config["local-epochs"],
            msg.content["config"]["lr"],
            device,
        )

    metrics = {"train_loss": train_loss, "num-examples": len(trainloader.dataset)}
    return round.message(len(trainloader.dataset), train_loss, metrics)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = evaluating(msg, context, Net(), fbn())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    batch_size = context.run_config["batch-size"]
    _, valloader = load_data(partition_id, num_partitions, batch_size)

    eval_loss, eval_acc = test_fn(model, valloader, device)

    metrics = {"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(valloader.dataset)}
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
