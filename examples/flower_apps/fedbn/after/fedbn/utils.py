"""The choice of the arrays that a client sends, which depends on the algorithm."""


def extract_weights(net, algorithm_name):
    """Return the network's arrays, without those of BatchNorm under FedBN."""
    state = net.state_dict()
    return [value.cpu().numpy() for name, value in state.items() if algorithm_name == "FedAvg" or "bn" not in name]
