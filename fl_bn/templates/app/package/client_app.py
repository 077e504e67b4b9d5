"""Define the client's part of a round."""

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.flower import Gate, answer, evaluating, training
from fl_bn.methods import fbn

from .task import Net, load_data, test, train


def data(context: Context):
    """Load this client's training and test batches."""
    node = context.node_config
    return load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"], node.get("data-path", ""))


app = ClientApp(mods=[Gate()])  # every message that leaves the client passes it
answer(app, Net, fbn(), lambda context: data(context)[0])  # the server may ask for statistics


@app.train()
def train_round(msg: Message, context: Context):
    """Train for one round, and send the weights and statistics."""
    batches, _ = data(context)
    with training(msg, context, Net(), fbn(), batches) as round:
        loss = train(round.model, batches, context.run_config["local-epochs"], msg.content["config"]["lr"])
    return round.message(len(batches.dataset), loss)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    """Evaluate the model on this client's test data."""
    _, batches = data(context)
    loss, accuracy = test(evaluating(msg, context, Net(), fbn()), batches)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": len(batches.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
