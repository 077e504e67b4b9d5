"""Flower's quickstart client."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import network, partition, train

app = ClientApp()


@app.train()
def fit(message, context):
    torch.set_num_threads(1)
    net, config = network(), context.run_config
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = partition(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train(net, x, y, config["steps"], config["batch-size"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
