"""The unchanged ``FlowerClient`` under fl-bn: its ``net`` is replaced by the round's model, its ``fit`` is the
training loop.
"""

from client import make_client, make_net
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fl_bn.flower import FixBN, answer, evaluating, training
from fl_bn.methods import fixbn

client_app, server_app = ClientApp(), ServerApp()
answer(client_app, make_net, fixbn(), lambda context: make_client(context).trainloader)


@client_app.train()
def train(msg, context):
    client = make_client(context)
    with training(msg, context, client.net, fixbn(), client.trainloader) as round:
        client.net = round.model
        _, samples, metrics = client.fit(client.get_parameters({}), dict(msg.content["config"]))
    return round.message(samples, metrics["loss"])


@client_app.evaluate()
def evaluate(msg, context):
    client = make_client(context)
    client.net = evaluating(msg, context, client.net, fixbn())
    loss, samples, metrics = client.evaluate(client.get_parameters({}), {})
    return Message(RecordDict({"metrics": MetricRecord({"loss": loss, "num-examples": samples, **metrics})}), reply_to=msg)


@server_app.main()
def main(grid, context):
    strategy = FixBN(make_net())
    result = strategy.start(grid, num_rounds=context.run_config["num-server-rounds"], train_config=ConfigRecord({"lr": 0.1}))
    print(result.evaluate_metrics_clientapp)
