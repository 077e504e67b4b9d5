"""The ClientApp."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower import answer, evaluating, training
from fl_bn.methods import fixbn
from monaiexample.task import load_data, load_model, test_func, train_func

app = ClientApp()
answer(app, load_model, fixbn(), lambda c: load_data(c.node_config["num-partitions"], c.node_config["partition-id"])[0])


@app.train()
def train(msg: Message, context: Context):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    trainloader, _ = load_data(num_partitions, partition_id)
    with training(msg, context, load_model(), fixbn(), trainloader) as round:
        train_loss = train_func(round.model, trainloader, epoch_num=1, device=device)

    metrics = {"train_loss": train_loss, "num-examples": len(trainloader)}
    return round.message(len(trainloader.dataset), train_loss, metrics)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = evaluating(msg, context, load_model(), fixbn())
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    _, valloader = load_data(num_partitions, partition_id)

    eval_loss, eval_acc = test_func(model, valloader, device)

    metrics = {"eval_loss": eval_loss, "eval_acc": eval_acc, "num-examples": len(valloader)}
    content = RecordDict({"metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
