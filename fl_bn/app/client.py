"""Assemble the client: load data, choose the device, and make a ``BatchNormClient``."""

from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.clientapp import ClientApp

from fl_bn.app.assembly import OwnData, allow_modules, client_samples, known, limit_threads, network, partition_of, task, training
from fl_bn.app.device import device
from fl_bn.flower import BatchNormClient, Site, make_client_app


def make_app(folder: Path | None = None) -> ClientApp:
    """Make the ClientApp of the Flower app in ``folder``, whose functions a run config may name."""
    return make_client_app(partial(build_client, folder=folder))


def build_client(context: Context, folder: Path | None = None) -> BatchNormClient:
    """Make the client that answers one message, by the node config and the run config."""
    node = context.node_config
    allow_modules(folder, node)
    config = known(context.run_config)
    limit_threads(config.threads)
    index, where = partition_of(node, config, context.node_id), device(config, node)
    train, test, counts = client_samples(config, index, OwnData.of(node, config))
    kept = Path(str(node["state-dir"])) if "state-dir" in node else Path(config.output) if config.output else None
    secure = config.secure_aggregation or bool(node.get("secure-aggregation", False))
    site = Site(
        client=index,
        clients=config.clients,
        train=train,
        test=test,
        device=where,
        folder=kept,
        label_counts=counts if bool(node.get("share-label-counts", True)) and not secure else None,
        node_config=node,
        state=kept if "state-dir" in node or config.checkpoint_every else None,
    )
    lent = network(config, where)
    learns = task(config, train.y)
    return BatchNormClient(lent, lent.method, training(config), site, context.state, config.seed, config.unseen_client, learns)


app = make_app()
