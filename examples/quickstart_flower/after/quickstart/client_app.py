"""The ClientApp of Flower's PyTorch quickstart, with FixBN."""

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower import answer, evaluating, training
from fl_bn.methods import fixbn
from quickstart.task import Net, load_data
from quickstart.task import test as test_fn
from quickstart.task import train as train_fn

app = ClientApp()
answer(app, Net, fixbn(), lambda context: load_data(context.node_config["partition-id"], context.node_config["num-partitions"])[0])


@app.train()
def train(msg: Message, context: Context):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    trainloader, _ = load_data(partition_id, num_partitions)

    with training(msg, context, Net(), fixbn(), trainloader) as round:
        train_loss = train_fn(round.model, trainloader, context.run_config["local-epochs"], msg.content["config"]["lr"], device)

    return round.message(len(trainloader.dataset), train_loss)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = evaluating(msg, context, Net(), fixbn())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, testloader = load_data(partition_id, num_partitions)

    eval_loss, eval_acc = test_fn(model, testloader, device)

    metrics = {"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(testloader.dataset)}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
