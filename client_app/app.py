"""Composition root of the client: picks the data, the device and the model, and hands them to a ``BatchNormClient``."""

from pathlib import Path

from flwr.app import Context

from fl_bn.flower import BatchNormClient, Site, make_client_app
from fl_bn.run.assembly import (
    OwnData,
    allow_modules,
    at_client,
    client_model,
    client_samples,
    device,
    limit_threads,
    partition_of,
    task,
)
from fl_bn.run.config import RunConfig


def build_client(context: Context) -> BatchNormClient:
    config = RunConfig.from_mapping(context.run_config)
    limit_threads(config.threads)
    node = context.node_config
    allow_modules(Path(__file__).parents[1], node)
    index = partition_of(node, config)
    train, test, counts = client_samples(config, index, OwnData.of(node, config))
    folder = Path(str(node["state-dir"])) if "state-dir" in node else Path(config.output) if config.output else None
    secure = config.secure_aggregation or bool(node.get("secure-aggregation", False))
    site = Site(
        client=index,
        clients=config.clients,
        train=train,
        test=test,
        device=device(config, node),
        folder=folder,
        label_counts=counts if config.share_label_counts and not secure else None,
        state=folder if "state-dir" in node or config.checkpoint_every else None,
    )
    model, method, training = client_model(at_client(config)), config.build_method(), config.local_training()
    tells, learns = (config.unseen_client, config.share_drift), task(config, train.y)
    return BatchNormClient(model, method, training, site, context.state, config.seed, *tells, learns)


app = make_client_app(build_client)
