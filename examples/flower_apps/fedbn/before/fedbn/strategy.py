"""The config of each round, and the metric function, which averages over the clients of each data set."""


def get_metrics_aggregation_fn():
    def per_dataset(metrics):
        totals, found = {}, {}
        for num_examples, client in metrics:
            name = client["dataset_name"]
            totals[name] = totals.get(name, 0) + num_examples
            for key in ("accuracy", "loss", "pre_train_acc", "pre_train_loss"):
                if key in client:
                    sums = found.setdefault(key, {})
                    sums[name] = sums.get(name, 0.0) + num_examples * client[key]
        return {key: {name: value / totals[name] for name, value in sums.items()} for key, sums in found.items()}

    return per_dataset


def get_on_fit_config():
    def fit_config_fn(server_round):
        return {"round": server_round}

    return fit_config_fn
