"""Evidence: results that are committed, and what the repository's own say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from experiments.catalogue import Experiment, find, study
from experiments.claims import VARIANT
from experiments.definitions.programs.own_statistics import measure
from experiments.evidence import RESULTS, compact, definition, gather, known_cells, results_of
from experiments.evidence_page import markdown
from experiments.kept import ANY_DATA, cells_of, keep, load, measured, own_config
from tests.refusals import naming
from tests.sweeps.evidence_runs import ALL, CLAIMS, DEFINITION, kept, register
from tests.sweeps.inner import ConfigError, carry_out, read, run

ROOT = Path(__file__).parents[2]


def test_finished_cells_are_kept_without_the_machine_s_paths(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    text = (folder / RESULTS / "X-1.jsonl").read_text()
    assert str(tmp_path) not in text
    assert "/somewhere" not in text
    defined = cells_of(read(experiment.file, VARIANT, ANY_DATA))
    found = load(folder / RESULTS / "X-1.jsonl", defined)
    assert [one.name for one in found] == [cell.config.name for cell in defined]
    assert found[0].config == own_config(defined[0].config)
    assert found[0].config["data-path"] == "{data}/x.npz"
    assert (found[0].commit, found[0].seconds) == ("abc1234", 40.0)  # rounds took longer than the last part of a resumed cell
    assert found[0].curve == ({"round": 4, "loss": 0.25, "accuracy": 0.5},)


def test_cells_come_bit_by_bit(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, {"FedAvg-seed0": 0.5, "FedBN-seed0": 0.6})
    page = markdown(gather(folder, experiment.file.parent))
    assert "FedBN is ahead of FedAvg | undecided | FedBN > FedAvg (accuracy): +10.5 | +10.0, n = 1 |" in page
    kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed0" not in name}, "more")
    assert compact(experiment, VARIANT, tmp_path / "runs-more-evidence", "/somewhere", folder)[1:] == (6, 6)
    page = markdown(gather(folder, experiment.file.parent))
    assert "FedBN is ahead of FedAvg | **reproduced** | FedBN > FedAvg (accuracy): +10.5 | +10.3 (+8.9 to +11.8), n = 3 |" in page
    assert "| FedBN > FedAvg (accuracy) | 70.5, 60: +10.50 | 61.3, 51.0 | +10.3 (+8.9 to +11.8) | 1.9 | 3 | held |" in page
    assert "Cells run: 6 of 6 (6 on abc1234)" in page


def test_cells_with_a_result_are_not_run_again(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "check", lambda cells: None)  # reads the data, which are not there

    def perform(results: Path | None) -> str:
        known = known_cells(experiment, VARIANT, results) if results else {}
        carry_out(read(experiment.file, VARIANT, "/somewhere"), tmp_path / "again", 0, False, known=known, dry_run=True)
        return " ".join(capsys.readouterr().out.split())

    folder = kept(experiment, tmp_path, {name: value for name, value in ALL.items() if "seed2" not in name})
    said = perform(folder)
    assert "2 runs, 0 of them finished before, 2 to do" in said
    assert f"4 more are not run, since their results are in {folder / RESULTS / 'X-1.jsonl'}" in said
    assert "seed0" not in said
    assert "6 runs, 0 of them finished before, 6 to do" in perform(None)


def test_results_of_another_definition_are_refused(experiment: Experiment, tmp_path: Path) -> None:
    folder = kept(experiment, tmp_path, ALL)
    gather(folder, experiment.file.parent)
    experiment.file.write_text(DEFINITION.replace("rounds = 4", "rounds = 4\nlearning-rate = 0.2", 1))
    with naming("learning-rate", ConfigError):
        gather(folder, experiment.file.parent)
    experiment.file.write_text(DEFINITION.replace("FedBN = {", "Local = {"))
    with naming("FedBN-seed0", ConfigError):
        gather(folder, experiment.file.parent)


def test_a_key_that_a_run_ignored_is_no_other_setting(experiment: Experiment, tmp_path: Path) -> None:
    """Lines of runs under a cosine have a decay. Control: where the schedule reads it, it decides."""
    folder, experiments = kept(experiment, tmp_path, ALL), experiment.file.parent
    file = results_of(experiment, VARIANT, folder)
    plain = file.read_text()
    file.write_text(plain.replace('"config": {', '"config": {"learning-rate-decay": 0.1, "groups": 4, '))
    assert "learning-rate-decay" in file.read_text()
    gather(folder, experiments)
    step = 'rounds = 4\nlearning-rate-schedule = "step"\nlearning-rate-decay = 0.1'
    experiment.file.write_text(DEFINITION.replace("rounds = 4", step, 1))
    file.write_text(plain.replace('"config": {', '"config": {"learning-rate-schedule": "step", "learning-rate-decay": 0.5, '))
    with naming("learning-rate-decay", ConfigError):
        gather(folder, experiments)


def test_a_program_s_runs_are_kept_in_every_way_of_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (experiment,) = find(["own-unseen-domain"])
    of, (defined, _) = study(experiment), definition(experiment, VARIANT)
    planned = of.plan(tmp_path, VARIANT, "/somewhere")
    assert len(defined) == len(planned) * len(of.ways) == len({cell.config.name for cell in defined})
    monkeypatch.setattr(type(planned[0]), "finished", lambda cell: cell is planned[1])
    planned[1].path.mkdir(parents=True)
    (planned[1].path / "environment.json").write_text('{"commit": "abc1234"}')
    planned[1].write_outcome("finished", 12.0)
    found = list(measured(planned, defined, of.ways, lambda cell: {way: n / 10 for n, way in enumerate(of.ways)}))
    assert [one.name for one in found] == [cell.config.name for cell in defined[len(of.ways) : 2 * len(of.ways)]]
    assert [one.curve[0]["accuracy"] for one in found] == [n / 10 for n in range(len(of.ways))]
    assert all("/somewhere" not in str(one.config) and str(tmp_path) not in str(one.config) for one in found)
    assert keep(found, defined, tmp_path / "kept.jsonl") == len(of.ways)
    there = load(tmp_path / "kept.jsonl", defined)
    assert [one.axes for one in there] == [one.axes for one in found]


def test_a_place_that_the_table_does_not_have_is_refused(experiment: Experiment, tmp_path: Path) -> None:
    """Whether there are runs or not. Controls: the places that it has; another round of one of them."""
    folder = register(experiment, CLAIMS)
    gather(tmp_path, folder)
    gather(tmp_path, register(experiment, CLAIMS.replace('["FedBN", "accuracy"]', '["FedBN", "accuracy", 4]')))
    for wrong in ('["FedBN", "nowhere"]', '["HBN", "accuracy"]'):
        register(experiment, CLAIMS.replace('["FedBN", "accuracy"]', wrong))
        with naming("X-1", ConfigError):
            gather(tmp_path, folder)
    register(experiment, CLAIMS.replace("place =", 'variant = "nothing"\nplace ='))
    with naming("'nothing'", ConfigError):
        gather(tmp_path, folder)
    register(experiment, CLAIMS.replace("place =", 'experiment = "X-2"\nplace ='))
    with naming("'X-2'", ConfigError):
        gather(tmp_path, folder)


def test_exact_statistics_are_those_of_all_samples_in_every_layer() -> None:
    """Beside float64 by hand. Control: those of the first layer alone do not fit the second."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2), nn.BatchNorm1d(2)).double()
    x = torch.randn(50, 3, dtype=torch.float64)
    measure(net, x)
    first, second = net[1], net[4]
    assert isinstance(first, nn.BatchNorm1d)
    assert isinstance(second, nn.BatchNorm1d)
    hidden = net[0](x)
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + first.eps).sqrt()
    inputs = net[3](normal.relu())
    assert second.running_mean is not None
    assert torch.allclose(second.running_mean, inputs.mean(0))
    assert not torch.allclose(second.running_mean, net[3](hidden.relu()).mean(0))
    assert (first.momentum, second.momentum) == (0.1, 0.1)


@pytest.mark.slow
def test_every_committed_result_is_found_though_its_run_ignored_keys() -> None:
    """Lines keep the keys that they were run with; those without effect are no part of what a line is. Those of HBN do not leave
    clipping to ``auto``, which did not clip when they ran."""
    ignoring = 0
    for file in sorted((ROOT / "experiments" / RESULTS).glob("*.jsonl")):
        name, variant, program, *_ = (*file.stem.split("."), "", "")
        defined, _ = definition(find([name])[0], variant or VARIANT, f"programs/{program}.py:measured" if program else "")
        results = load(file, defined)
        assert len(results) == len(file.read_text(encoding="utf-8").splitlines()), file.name
        assert [kept.name for kept in results if kept.config.get("method") == "hbn" and "clip" not in kept.config] == [], file.name
        configs = {cell.config.name: cell.config for cell in defined}
        ignoring += sum(not configs[kept.name].without_effect.isdisjoint(kept.config) for kept in results)
    assert ignoring > 100  # control: decays under cosine, and others
