"""Define the command ``fl-bn advise``. It imports torch only when it runs, since the import takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fl_bn.cli.progress import rounds_bar
from fl_bn.cli.refusal import refused

if TYPE_CHECKING:
    from fl_bn.advise.report import Advice, Rows
    from fl_bn.run.usage import Usage
    from fl_bn.sweep.cells import Cell

CHECKPOINT_EVERY = 5  # rounds between checkpoints of the chosen run; after an interruption, the same command continues from there
console = Console()


def advise(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="folders, npz or CSV files (of several, each is a client), a data set's name, NAME:PATH, or package.module:function. "
            "Default: the data of the run config"
        ),
    ] = None,
    pilot: Annotated[
        bool, typer.Option("--pilot", help="try the candidates in short runs on validation samples, and run the best one to its end")
    ] = False,
    methods: Annotated[
        str,
        typer.Option(
            help="candidates for --pilot in place of the recommended ones, separated by commas; as for `compare`: fbn:learning-rate=0.01"
        ),
    ] = "",
    jobs: Annotated[int, typer.Option(min=0, max=1024, help="runs of the pilot at a time, each in its own process; 0: one per core")] = 0,
    output: Annotated[str, typer.Option(help="folder; finished runs in it are not repeated. Default: runs/advise-<time>")] = "",
    run_config: Annotated[
        str, typer.Option("--run-config", help="the keys of the run you have in mind, as for `fl-bn run`: \"partition='domain' clients=5\"")
    ] = "",
) -> None:
    """Advise which method suits your clients.

    It measures how your clients differ, and names the two or three methods that did best on the most similar clients
    we know. With --pilot, these candidates are run for a few rounds, and the best one is run to its end. Test data take
    no part in the choice.
    """
    from fl_bn.advise import regimes
    from fl_bn.advise.measure import measure
    from fl_bn.advise.report import CLIENTS, METHODS, PILOT, Advice, write
    from fl_bn.run.assembly import limit_threads
    from fl_bn.run.config import ConfigError
    from fl_bn.run.pictures import partition_in_words
    from fl_bn.run.usage import Usage
    from fl_bn.support.names import names_of

    sys.path.insert(0, str(Path.cwd()))  # the user's own data functions, as `fl-bn run` finds them
    folder = Path(output or f"runs/advise-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        if methods and not pilot:
            raise ConfigError("--methods names candidates for --pilot: add --pilot, or leave out --methods")
        base = _keys(",".join(data or ()), run_config)
        use = Usage()
        config = use.config(base)
        limit_threads(config.threads)
        measured = measure(config)
        near = regimes.nearest(measured, regimes.load())
        left_out = _left_out(base, near.regime.methods, use)
        use.check(base)
        allowed = [name for name in near.regime.methods if name not in left_out]
        chosen = list(names_of(methods)) or regimes.candidates(near.regime, allowed)
        title = f"{config.dataset}, {config.clients} clients, {measured.skew} ({partition_in_words(config)})"
        advice = Advice(title, measured, near, chosen, left_out)
        _print(CLIENTS, advice.clients(), title)
        for line in advice.sentences():
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        _print(METHODS, advice.methods(), "candidates" if methods else "worth trying")
        write(advice, folder)
        if pilot:
            advice = _piloted(advice, base, folder, jobs)
            write(advice, folder)
            _print(PILOT, advice.pilot(), f"pilot: {advice.metric} on validation samples")
            console.print(f"{advice.chosen}, {config.rounds} rounds, test {advice.metric}: {advice.final:.4g}", highlight=False)
    except (ConfigError, FileNotFoundError, ImportError) as error:
        raise refused(error) from error
    except KeyboardInterrupt:
        console.print(f"interrupted; with --output {folder} the same command continues")
        raise typer.Exit(130) from None
    console.print(f"advice.md and advice.json: {folder}", highlight=False, soft_wrap=True)


def _keys(data: str, run_config: str) -> dict[str, Any]:
    """Return the run-config keys of the user's run, with the data that the argument names.

    Args:
        data: The arguments of the command, separated by commas; empty: the data of the run config.
        run_config: The text of ``--run-config``.

    Raises:
        ConfigError: The argument and the run config both name data, or the run config names a method.
    """
    from fl_bn.data.dataset import DATASETS
    from fl_bn.run.config import ConfigError
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.support.names import names_of

    base = parse_overrides(run_config)
    if "method" in base:
        raise ConfigError(f"advise chooses the method, but got method={base['method']!r}: leave it out, or give --pilot --methods")
    if not data:
        return base
    if twice := [key for key in ("dataset", "data-path") if key in base]:
        raise ConfigError(f"the data are named twice, as {data!r} and with {twice[0]}={base[twice[0]]!r}: leave one of them out")
    kind, colon, path = data.partition(":")
    kinds = {_kind(Path(part)) for part in names_of(data)} - {""}
    if len(kinds) == 1 and not (colon and kind in DATASETS):
        kind, path = kinds.pop(), data
    return {**base, "dataset": kind, "data-path": path} if kind in DATASETS else {**base, "dataset": data}


def _kind(path: Path) -> str:
    """Return the data set that reads a file or folder; empty: the path is neither."""
    from fl_bn.data.columns import FILE

    if path.is_dir():
        return "csv" if (path / FILE).is_file() else "folder"
    return path.suffix[1:] if path.suffix in (".csv", ".npz") else ""


def _left_out(base: Mapping[str, Any], names: Sequence[str], use: Usage) -> dict[str, str]:
    """Return method -> the reason why it cannot run with the run config, for methods that cannot run.

    Args:
        base: The run-config keys of the user's run.
        names: The methods to check.
        use: The object that records which keys have an effect for the methods that can run.
    """
    from fl_bn.run.config import ConfigError

    refused = {}
    for name in names:
        try:
            use.config({**base, "method": name})
        except ConfigError as error:
            refused[name] = str(error)
    return refused


def _piloted(advice: Advice, base: Mapping[str, Any], folder: Path, jobs: int) -> Advice:
    """Run the pilot, then run the best candidate to its end.

    Args:
        advice: The advice with its candidates.
        base: The run-config keys of the user's run.
        folder: The folder of the runs.
        jobs: The number of pilot runs at a time.

    Returns:
        The advice with the results of the pilot and of the final run.

    Raises:
        ConfigError: All pilot runs failed, or the final run failed.
    """
    from fl_bn.advise.pilot import final_cell, pilot_cells, result, successive_halving
    from fl_bn.run.assembly import dataset, task
    from fl_bn.run.config import ConfigError
    from fl_bn.run.usage import Usage

    config = Usage().config(base)
    if config.early_stop:
        raise ConfigError("--pilot compares runs of one length, and runs the chosen method for all rounds: leave out early-stop")
    of = task(config, dataset(config).y_train)

    def score(candidates: Sequence[str], rounds: int) -> dict[str, float]:
        cells = pilot_cells(candidates, rounds, base, folder / "pilot")
        _run(cells, jobs, f"pilot, {rounds} rounds each")
        return {label: result(cell, of) for label, cell in zip(candidates, cells, strict=True)}

    rungs = successive_halving(advice.candidates, config.rounds, score, higher_is_better=of.higher_is_better)
    best = rungs[-1].kept[0] if rungs else advice.candidates[0]
    cell = final_cell(best, base, folder, CHECKPOINT_EVERY)
    if errors := _run([cell], 1, best):
        raise ConfigError(f"the run of {best}, which the pilot chose, failed: {errors[cell.config.name]}")
    return replace(advice, rungs=rungs, metric=of.metric + (" (%)" if of.scale() == 100 else ""), final=result(cell, of))


def _run(cells: Sequence[Cell], jobs: int, name: str) -> dict[str, str]:
    """Run the cells that are not finished, under a progress bar with the title ``name``. Print and return their errors."""
    from fl_bn.sweep.cells import run_cells

    for cell in cells:
        cell.remove_failed()
    with rounds_bar(console) as bar:
        task = bar.add_task(name, total=None)
        errors = run_cells(cells, jobs, lambda done, total: bar.update(task, completed=done, total=total))
    for failed, problem in errors.items():
        console.print(f"[red]failed[/red] {escape(failed)}: {escape(problem)}", highlight=False)
    return errors


def _print(heading: Sequence[str], rows: Rows, title: str) -> None:
    table = Table(*heading, title=title)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
