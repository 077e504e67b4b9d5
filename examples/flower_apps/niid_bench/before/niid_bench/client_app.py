"""The ClientApp: a NumPyClient."""

from collections import OrderedDict

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context

from niid_bench.dataset import load_datasets
from niid_bench.models import CNN, test, train_fedavg


class FlowerClientFedAvg(NumPyClient):
    def __init__(self, net, trainloader, valloader, device, num_epochs, momentum, weight_decay):
        self.net, self.trainloader, self.valloader, self.device = net, trainloader, valloader, device
        self.num_epochs, self.momentum, self.weight_decay = num_epochs, momentum, weight_decay

    def get_parameters(self, config):
        return [val.cpu().numpy() for _, val in self.net.state_dict().items()]

    def set_parameters(self, parameters):
        params_dict = zip(self.net.state_dict().keys(), parameters, strict=True)
        self.net.load_state_dict(OrderedDict({k: torch.tensor(v) for k, v in params_dict}), strict=True)

    def fit(self, parameters, config):
        self.set_parameters(parameters)
        lr = config["lr"]
        loss = train_fedavg(self.net, self.trainloader, self.device, self.num_epochs, lr, self.momentum, self.weight_decay)
        return self.get_parameters({}), len(self.trainloader.dataset), {"train_loss": loss, "lr": lr}

    def evaluate(self, parameters, config):
        self.set_parameters(parameters)
        loss, acc = test(self.net, self.valloader, self.device)
        return float(loss), len(self.valloader.dataset), {"accuracy": float(acc)}


def client_fn(context: Context):
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    run_config = context.run_config
    trainloader, valloader = load_datasets(int(context.node_config["partition-id"]), int(run_config["classes-per-client"]))
    return FlowerClientFedAvg(
        CNN().to(device),
        trainloader,
        valloader,
        device,
        run_config["num-epochs"],
        run_config["momentum"],
        run_config["weight-decay"],
    ).to_client()


app = ClientApp(client_fn)
