"""Composition root of the client: picks the data, the device and the model, and hands them to a ``BatchNormClient``."""

from pathlib import Path

from flwr.app import Context

from fl_bn.experiment.assembly import client_model, client_samples, device, limit_threads, partition_of
from fl_bn.experiment.config import RunConfig
from fl_bn.flower import BatchNormClient, Site, make_client_app


def build_client(context: Context) -> BatchNormClient:
    config = RunConfig.from_mapping(context.run_config)
    limit_threads(config.threads)
    index = partition_of(context.node_config, config)
    train, test, counts = client_samples(config, index)
    site = Site(
        client=index,
        clients=config.clients,
        train=train,
        test=test,
        device=device(config),
        folder=Path(config.output) if config.output else None,
        label_counts=counts if config.share_label_counts else None,
    )
    return BatchNormClient(client_model(config), config.build_method(), config.local_training(), site, context.state, config.seed)


app = make_client_app(build_client)
