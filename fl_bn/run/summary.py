"""Write ``summary.md``: the settings of a run, its results, and what happened to the normalisation layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fl_bn.federation.recalibration import Pass
from fl_bn.federation.record import RoundRecord, size
from fl_bn.run.config import RunConfig
from fl_bn.task import CLASSIFICATION, Task


def summary(
    config: RunConfig,
    records: Sequence[RoundRecord],
    error: BaseException | None = None,
    passes: Sequence[Pass] = (),
    disclosures: Sequence[str] = (),
    privacy: str = "",
    task: Task = CLASSIFICATION,
    absent: Sequence[str] = (),
    is_there: Callable[[str], bool] = lambda name: True,
    early: str = "",
    layers: Sequence[str] = (),
) -> str:
    """Return the summary of a run as Markdown.

    Args:
        config: The run config.
        records: The records of the rounds.
        error: The error that ended the run early; None: the run is complete.
        passes: The passes of ``calibrate``, which only measure statistics.
        disclosures: The lines of the table of disclosures.
        privacy: A sentence on the privacy budget that was spent; empty: no noise was added.
        task: The task of the run.
        absent: For each client that takes no part in the run, its name and the reason.
        is_there: Whether the folder of the run has the file with this name. Only such files are listed.
        early: The reason why a callback ended the run early; empty: no callback did.
        layers: What the method does with the tensors of the network, a line each.
    """
    if config.rounds == 0:
        return _of_recalibration(config, records, error, passes, disclosures, task, is_there)
    lines = [f"# {config.method} on {config.dataset}, seed {config.seed}", ""]
    if isinstance(error, KeyboardInterrupt):
        lines += [f"**The run was interrupted** after {len(records)} of {config.rounds} rounds.", ""]
    elif error is not None:
        lines += [f"**The run failed** after {len(records)} of {config.rounds} rounds: {type(error).__name__}: {error}", ""]
    elif early and len(records) < config.rounds:
        lines += [f"**The run ended early** after {len(records)} of {config.rounds} rounds: {early}", ""]
    evaluated = [r for r in records if task.metric in r.evaluation]
    if evaluated:
        lines += _metric(evaluated, task)
        lines += _chosen(config)
    lines += [
        f"- {config.clients} clients, partition `{config.partition}` ({config.partition_parameter:g}), model `{config.model}`",
        f"- {len(records)} rounds of {_local(config)}, batches of {config.batch_size}, {config.optimizer} at {config.learning_rate:g} "
        f"({config.learning_rate_schedule})",
        *_composition(config),
        *_validation(config),
        *(f"- took no part: {who}" for who in absent),
        *([f"- {privacy}"] if privacy else []),
    ]
    if records:
        lines += _traffic(records)
    tensors = ["## Layers and tensors", "", *(f"- {line}" for line in layers), ""] if layers else []
    return "\n".join([*lines, "", *tensors, *disclosures, _files(is_there, task), ""])


def _of_recalibration(
    config: RunConfig,
    records: Sequence[RoundRecord],
    error: BaseException | None,
    passes: Sequence[Pass],
    disclosures: Sequence[str],
    task: Task,
    is_there: Callable[[str], bool],
) -> str:
    lines = [f"# Re-calibration under {config.method} on {config.dataset}, seed {config.seed}", ""]
    if error is not None:
        lines += [f"**The run failed** after {len(passes)} passes: {type(error).__name__}: {error}", ""]
    evaluated = [task.format_metric(r.evaluation[task.metric]) for r in records if task.metric in r.evaluation]
    if evaluated:
        lines.append(f"- {task.metric} before: **{evaluated[0]}**" + (f", after: **{evaluated[-1]}**" if len(evaluated) > 1 else ""))
    lines += [f"- {line}" for line in passes_in_words(passes, config.clients)]
    lines += [
        f"- weights: `{config.model_weights or 'as initialised'}`, which stay as they are",
        f"- {config.clients} clients, partition `{config.partition}` ({config.partition_parameter:g}), model `{config.model}`",
    ]
    total = sum(c.bytes_down + c.bytes_up for r in records for c in r.clients)
    lines.append(f"- in all {size(total)} of arrays in {sum(r.seconds for r in records):.1f} s of passes")
    return "\n".join([*lines, "", *disclosures, _files(is_there, task), ""])


def passes_in_words(passes: Sequence[Pass], clients: int) -> list[str]:
    """Return sentences on how many passes were made, why they ended, and how far they moved the statistics.

    Args:
        passes: The passes.
        clients: The number of clients. If not all of them answered, the last sentence is a warning.
    """
    if not passes:
        return ["no pass was made"]
    last, layers = passes[-1], len(passes[-1].movements)
    if last.exchanges:
        end = f"layer by layer, with {last.exchanges} exchanges, which makes all of them exact"
    elif last.settled:
        end = f"stopped at pass {last.number}, which moved nothing"
    elif last.number == layers:
        end = "one per BatchNorm layer, which makes all of them exact"
    else:
        end = f"fewer than the {layers} layers, and the last pass still moved statistics: layers 1 to {last.number} are exact"
    lines = [f"{len(passes)} pass{'es' * (len(passes) != 1)} over {layers} BatchNorm layers: {end}"]
    for one in dict.fromkeys((passes[0], last)):
        layer, mean, variance = one.largest
        lines.append(
            f"pass {one.number} moved a mean by up to {mean:.3g} sd ({layer or 'model'}; its layer's variance by a factor {variance:.3g})"
        )
    if any(one.clients < clients for one in passes):
        fewest = min(one.clients for one in passes)
        lines.append(
            f"**not all clients were measured** (in one pass {fewest} of {clients}): the statistics lack the missing ones. Run it again"
        )
    return lines


FILES = (  # each text with the files that it names
    "`{picture}`, the course of the run",
    "`labels.png`, the clients' labels",
    "`recalibration.csv`, one line per statistics-only pass and layer",
    "`rounds.csv` (also `.jsonl`), one line per round, or per pass if there are no rounds",
    "`clients.csv`, one line per round and client",
    "`disclosure.csv`, what left each client",
    "`model.safetensors`, the model as evaluated last (`clients/` has one per client where clients keep layers of their own)",
    "`run.log`",
    "`config.toml`",
    "`environment.json`",
    "`tensorboard/`",
)


def _files(is_there: Callable[[str], bool], task: Task) -> str:
    """Return the line "Files: ...", which lists the files of a run with a few words on each. Missing files are left out.

    Args:
        is_there: Takes the name of a file in the folder of the run, and returns whether it exists.
        task: The task, whose metric names the picture.
    """
    about = [text.format(picture=f"{task.metric}.png") for text in FILES]
    return f"Files: {'; '.join(text for text in about if is_there(text.split('`')[1]))}."


def _local(config: RunConfig) -> str:
    return f"{config.local_epochs} local epochs" if config.local_epochs else f"{config.local_steps} local steps"


def _composition(config: RunConfig) -> list[str]:
    """Return a line on how the run differs from plain federated averaging, apart from its method; an empty list: it does not."""
    parts = [] if config.objective == "none" else [f"objective `{config.objective}`"]
    if (kept := config.local_training().maintain) != "reset":
        parts.append(f"momentum kept between rounds ({kept})")
    if (training := config.local_training()).clip != "none":
        limit = training.step_clip if training.steps == 1 and training.step_clip else training.clip_limit
        parts.append(f"gradients clipped ({training.clip}, {limit:g})")
    if config.server_optimizer != "fedavg":
        parts.append(f"server optimizer `{config.server_optimizer}` at {config['server-learning-rate']:g}")
    if config.secure_aggregation:
        parts.append("secure aggregation")
    return [f"- {', '.join(parts)}"] if parts else []


def _chosen(config: RunConfig) -> list[str]:
    """Return lines for ``keep-best`` and ``early-stop``: the file of the best model, and a remark if test data chose the round."""
    if not (config.keep_best or config.early_stop):
        return []
    kept = ["- the model of the best evaluation is in `best.safetensors`"] if config.keep_best and config.output else []
    if config.validation_share:
        return kept
    return [*kept, "- the best round was chosen on the test data, so its number is optimistic (`validation-share` chooses on others)"]


def _validation(config: RunConfig) -> list[str]:
    if not config.validation_share:
        return []
    return [f"- tested on validation samples, {config.validation_share:g} of every client's training data, and not on the test data"]


def _metric(evaluated: Sequence[RoundRecord], task: Task) -> list[str]:
    def value(record: RoundRecord, suffix: str = "") -> str:
        return task.format_metric(record.evaluation[f"{task.metric}{suffix}"])

    last, worst = evaluated[-1], task.worst()
    best = (max if task.higher_is_better else min)(evaluated, key=lambda r: r.evaluation[task.metric])
    line = f"- {task.metric} after round {last.round}: **{value(last)}**"
    if f"{task.metric}-std" in last.evaluation:
        spread = f"std {value(last, '-std')}, {worst} {value(last, f'-{worst}')}"
        line += f" (mean over clients with models of their own; {spread})"
    return [line + f"; best {value(best)} in round {best.round}"]


def _traffic(records: Sequence[RoundRecord]) -> list[str]:
    last = records[-1]
    lines = []
    for way, sections in (("down", last.bytes_down), ("up", last.bytes_up)):
        parts = ", ".join(f"{section} {size(count)}" for section, count in sections.items()) or "nothing"
        lines.append(f"- per client and round {way} (last round): {parts}")
    if last.exchanges:
        waited = max((c.waited for c in last.accepted), default=0.0)
        lines.append(
            f"- {last.exchanges} layer-wise exchanges by {last.carrier} in the last round; the client that waited longest "
            f"spent {waited:.2f} s in them"
        )
    total = sum(c.bytes_down + c.bytes_up for r in records for c in r.clients)
    lines.append(f"- in all {size(total)} of arrays in {sum(r.seconds for r in records):.1f} s of rounds")
    drifts = [r.drift for r in records if r.drift is not None and math.isfinite(r.drift.largest)]
    if drifts:
        worst = max(drifts[1:] or drifts, key=lambda d: d.largest)
        lines.append(
            f"- smallest running variance {min(d.min_var for d in drifts):.3g}; largest drift of a mean after round 1: "
            f"{worst.largest:.3g} sd ({worst.layer or 'model'})"
        )
    refused = sum(bool(c.refused) for r in records for c in r.clients)
    return [*lines, f"- {refused} replies could not be used (reasons in clients.csv)"] if refused else lines
