"""Write summary.md, which says in a page what a run did and found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fl_bn.app.config import SITES, RunConfig
from fl_bn.federation.recalibration import Pass
from fl_bn.federation.record import RoundRecord, size
from fl_bn.task import CLASSIFICATION, Task

STOPPED, FAILED = "**The run was stopped**", "**The run failed**"


def ended(file: Path) -> bool:
    """Tell whether ``file`` is the summary of a run that ended as it should."""
    return file.exists() and not any(line.startswith((STOPPED, FAILED)) for line in file.read_text("utf-8").splitlines())


def summary(
    config: RunConfig,
    records: Sequence[RoundRecord],
    error: BaseException | None = None,
    passes: Sequence[Pass] = (),
    disclosures: Sequence[str] = (),
    privacy: str = "",
    task: Task = CLASSIFICATION,
    absent: Sequence[str] = (),
    early: str = "",
    layers: Sequence[str] = (),
    centralised: bool = False,
) -> str:
    """Return the summary of a run as Markdown.

    Args:
        config: The run config.
        records: The records of the rounds.
        error: The error that ended the run, if any.
        passes: The results of the passes that measured statistics without training.
        disclosures: Lines on what left the clients.
        privacy: A statement of the privacy that the noise gives.
        task: The task.
        absent: Each client that took no part, with the reason.
        early: Why the run ended before its last round; empty: it did not.
        layers: What became of each normalisation layer.
        centralised: Whether one network was trained on all clients' data.
    """
    measures = config.rounds == 0
    what = "Re-calibration under " if measures else "Centralised training: " if centralised else ""
    lines = [f"# {what}{config.method} on {config.dataset}, seed {config.seed}", ""]
    done = f"after {len(passes)} passes" if measures else f"after {len(records)} of {config.rounds} rounds"
    if error is not None and not isinstance(error, Exception):  # Ctrl-C, or Flower's sign that the run was aborted
        lines += [f"{STOPPED} {done}.", ""]
    elif error is not None:
        lines += [f"{FAILED} {done}: {type(error).__name__}: {error}", ""]
    elif early and len(records) < config.rounds:
        lines += [f"**The run ended early** {done}: {early}", ""]
    facts = [] if measures and not records else _metric(records, task, config)
    facts += passes_in_words(passes, config.clients) if measures else _training(config)
    facts.append(f"{'the data of ' * centralised}{config.clients} clients, {config.partition_in_words()}, model `{config.model}`")
    facts += [f"took no part: {who}" for who in absent] + [privacy]
    facts += _traffic(records) if records else []
    lines += [f"- {fact}" for fact in facts if fact]
    if layers and not measures:
        lines += ["", "## Layers and tensors", "", *(f"- {line}" for line in layers)]
    return "\n".join([*lines, "", *disclosures])


def _metric(records: Sequence[RoundRecord], task: Task, config: RunConfig) -> list[str]:
    """Return a sentence with the metric before and after a re-calibration, or the last and the best one."""
    evaluated = [r for r in records if task.metric in r.evaluation]
    if not evaluated:
        return []

    def value(record: RoundRecord, suffix: str = "") -> str:
        return task.format_metric(record.evaluation[f"{task.metric}{suffix}"])

    last, worst = evaluated[-1], task.worst()
    if config.rounds == 0:
        return [f"{task.metric} before: **{value(evaluated[0])}**, after: **{value(last)}**"]
    line = f"{task.metric} after round {last.round}: **{value(last)}**"
    if f"{task.metric}-std" in last.evaluation:
        spread = f"std {value(last, '-std')}, {worst} {value(last, f'-{worst}')}"
        own = "on test data" if config.dataset == SITES else "with models"
        line += f" (mean over clients {own} of their own; {spread})"
    best = (max if task.higher_is_better else min)(evaluated, key=lambda r: r.evaluation[task.metric])
    return [f"{line}; best {value(best)} in round {best.round}"]


def _training(config: RunConfig) -> list[str]:
    """Return sentences on the samples of the evaluation and on the local training."""
    training = config.local_training()
    local = f"{config.local_epochs} local epochs" if config.local_epochs else f"{config.local_steps} local steps"
    limit = training.step_clip if training.steps == 1 and training.step_clip else training.clip_limit
    clipped = "" if training.clip == "none" else f", gradients clipped ({training.clip}, {limit:g})"
    chosen = (config.keep_best or config.early_stop) and not config.validation_share
    return [
        "the best round was chosen on the test data, so its number is optimistic (see `validation-share`)" if chosen else "",
        f"tested on validation samples, {config.validation_share:g} of the training data" if config.validation_share else "",
        f"rounds of {local}, batches of {config.batch_size}, {config.optimizer} at {config.learning_rate:g}{clipped}",
    ]


def passes_in_words(passes: Sequence[Pass], clients: int) -> list[str]:
    """Return sentences on the passes, why they ended, and how far they moved the statistics."""
    if not passes:
        return ["no pass was made"]
    last, layers = passes[-1], len(passes[-1].movements)
    end = f"layer by layer, with {last.exchanges} exchanges" if last.exchanges else f"the last moved {last.largest[1]:.3g} sd"
    exact = "all of them exact" if last.exchanges or last.settled or last.number == layers else f"layers 1 to {last.number} exact"
    layer, mean, _ = passes[0].largest
    fewest = min(one.clients for one in passes)
    return [
        f"{len(passes)} pass{'es' * (len(passes) != 1)} over {layers} BatchNorm layers: {end}, which makes {exact}",
        f"pass {passes[0].number} moved a mean by up to {mean:.3g} sd ({layer or 'model'})",
        f"**not all clients were measured** ({fewest} of {clients}): run it again" if fewest < clients else "",
    ]


def _traffic(records: Sequence[RoundRecord]) -> list[str]:
    last = records[-1]
    lines = []
    for way, sections in (("down", last.bytes_down), ("up", last.bytes_up)):
        parts = ", ".join(f"{section} {size(count)}" for section, count in sections.items()) or "nothing"
        lines.append(f"per client and round {way} (last round): {parts}")
    if last.exchanges:
        waited = max((c.waited for c in last.accepted), default=0.0)
        lines.append(f"{last.exchanges} layer-wise exchanges by {last.carrier} in the last round; the longest wait was {waited:.2f} s")
    total = sum(c.bytes_down + c.bytes_up for r in records for c in r.clients)
    lines.append(f"in all {size(total)} of arrays in {sum(r.seconds for r in records):.1f} s of rounds")
    drifts = [r.drift for r in records if r.drift is not None and math.isfinite(r.drift.largest)]
    if drifts:
        worst = max(drifts[1:] or drifts, key=lambda d: d.largest)
        lines.append(
            f"smallest running variance {min(d.min_var for d in drifts):.3g}; largest drift of a mean after round 1: "
            f"{worst.largest:.3g} sd ({worst.layer or 'model'})"
        )
    refused = sum(bool(c.refused) for r in records for c in r.clients)
    return [*lines, f"{refused} replies could not be used (reasons in clients.csv)" if refused else ""]
