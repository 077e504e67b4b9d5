"""Assemble the server: read the run config, start one strategy, and write the run directory."""

import logging
from pathlib import Path

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from fl_bn.app.assembly import allow_modules, limit_threads, own_callbacks, source_model
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.console import shown
from fl_bn.app.device import device
from fl_bn.app.preflight import check
from fl_bn.app.run_directory import RunDirectory
from fl_bn.app.testing import test_metrics
from fl_bn.flower import BatchNormStrategy, RunFailed
from fl_bn.flower.compat import LOGGER


def make_app(folder: Path | None = None) -> ServerApp:
    """Make the ServerApp of the Flower app in ``folder``, whose functions a run config may name."""
    made = ServerApp()
    LOGGER.addFilter(in_a_sentence)

    @made.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            run(grid, context, folder)
        except RuntimeError as error:  # torch's, out of memory, say: see RunFailed
            raise RunFailed(f"{type(error).__name__}: {error}") from error

    return made


def in_a_sentence(record: logging.LogRecord) -> bool:
    """Replace a log record's traceback by one sentence, if the user can correct the error.

    Return True, so that every record is logged.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RunFailed | ConfigError):
        record.msg, record.args, record.exc_info = "the run ended: %s", (error,), None
    return True


def run(grid: Grid, context: Context, folder: Path | None) -> None:
    """Run the federation of ``context.run_config`` over ``grid``.

    If the run has a run directory, store its path in ``context.state``.
    """
    config = RunConfig.from_mapping(context.run_config)
    limit_threads(config.threads)
    allow_modules(folder, context.node_config)
    check(config)
    model, target = source_model(config), device(config)

    with shown(), RunDirectory.create(config) as directory:
        strategy = BatchNormStrategy(
            model,
            config.build_method(),
            config.round_policy(),
            optimizer=config.build_server_optimizer(),
            evaluate=lambda trained: test_metrics(config, trained, target),
            callbacks=[directory, *own_callbacks(config, directory.path)],
            save_clients=directory.name,
            defence=config.defence(),
            keep_checkpoint=directory.keep_checkpoint,
            secure=config.secure(),
            task=directory.task,
        )
        directory.start(strategy.transport)
        strategy.start(grid, num_rounds=config.rounds, resume=directory.resumed)
    if directory.path is not None:
        context.state["result"] = ConfigRecord({"directory": str(directory.path)})


app = make_app()
