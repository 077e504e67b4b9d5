"""The ClientApp: a NumPyClient, and another one that keeps its BatchNorm layers."""

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import ArrayRecord, Context

from fedbn.dataset import get_data
from fedbn.model import CNNModel, test, train
from fedbn.utils import extract_weights
from fl_bn.flower import legacy_client_app
from fl_bn.methods import fedbn


class FlowerClient(NumPyClient):
    def __init__(self, net, trainloader, testloader, dataset_name, learning_rate, client_state):
        self.trainloader, self.testloader, self.dataset_name = trainloader, testloader, dataset_name
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.net, self.learning_rate, self.client_state = net.to(self.device), learning_rate, client_state

    def get_weights(self):
        return extract_weights(self.net, "FedAvg")

    def set_weights(self, parameters):
        state = {name: torch.tensor(value) for name, value in zip(self.net.state_dict(), parameters, strict=True)}
        self.net.load_state_dict(state, strict=True)

    def fit(self, parameters, config):
        self.set_weights(parameters)
        pre_train_loss, pre_train_acc = test(self.net, self.trainloader, device=self.device)
        loss, acc = train(self.net, self.trainloader, epochs=1, learning_rate=self.learning_rate, device=self.device)
        metrics = {
            "dataset_name": self.dataset_name,
            "round": config["round"],
            "accuracy": acc,
            "loss": loss,
            "pre_train_loss": pre_train_loss,
            "pre_train_acc": pre_train_acc,
        }
        return self.get_weights(), len(self.trainloader.dataset), metrics

    def evaluate(self, parameters, config):
        self.set_weights(parameters)
        loss, accuracy = test(self.net, self.testloader, device=self.device)
        return float(loss), len(self.testloader), {"loss": loss, "accuracy": accuracy, "dataset_name": self.dataset_name}


class FedBNFlowerClient(FlowerClient):
    """Keep the BatchNorm layers in the context's state, as Flower's baseline does."""

    def get_weights(self):
        bn_state = {name: value for name, value in self.net.state_dict().items() if "bn" in name}
        self.client_state["local_batch_norm"] = ArrayRecord(bn_state)
        return extract_weights(self.net, "FedBN")

    def set_weights(self, parameters):
        keys = [name for name in self.net.state_dict() if "bn" not in name]
        state = {name: torch.tensor(value) for name, value in zip(keys, parameters, strict=True)}
        self.net.load_state_dict(state, strict=False)
        if "local_batch_norm" in self.client_state:
            self.net.load_state_dict(self.client_state["local_batch_norm"].to_torch_state_dict(), strict=False)


def client_fn(context: Context):
    run_config = context.run_config
    net = CNNModel()
    trainloader, testloader, dataset_name = get_data(int(context.node_config["partition-id"]))
    client_type = FlowerClient
    return client_type(
        net=net,
        trainloader=trainloader,
        testloader=testloader,
        dataset_name=dataset_name,
        learning_rate=run_config["learning-rate"],
        client_state=context.state,
    ).to_client()


app = legacy_client_app(client_fn, fedbn())
