"""ABIDE: correlations against numpy, windows, splits by subject, and the three forms of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_bn.data.connectomes import SITES, WINDOW, connectome, held_out, read_series, windows
from fl_bn.data.dataset import DataNotFound, load
from tests.listed import listed

REGIONS = 5


def series(seed: int, length: int = WINDOW + 3, regions: int = REGIONS) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=(length, regions))


@given(seed=st.integers(0, 999), length=st.integers(3, 40), regions=st.integers(2, 8), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_connectome_is_the_upper_triangle_of_numpys_correlations(seed: int, length: int, regions: int, scale: float) -> None:
    x = series(seed, length, regions) * scale + scale
    matrix = np.corrcoef(x.T)
    expected = [matrix[i, j] for i in range(regions) for j in range(i + 1, regions)]
    np.testing.assert_allclose(connectome(x), expected, atol=1e-5)
    assert connectome(x).dtype == np.float32


def test_110_regions_are_5995_numbers_and_a_constant_one_correlates_with_nothing() -> None:
    assert connectome(series(0, 32, 110)).shape == (5995,)
    x = series(0)
    x[:, 0] = 0.1  # whose mean is not 0.1 in floats
    found = connectome(x)
    assert found[: REGIONS - 1].tolist() == [0] * (REGIONS - 1)
    assert (found[REGIONS - 1 :] != 0).all()


def test_windows() -> None:
    x = series(0, WINDOW + 3)
    found = windows(x)
    assert [len(window) for window in found] == [WINDOW] * 4
    assert np.array_equal(found[3], x[3:])
    assert [len(window) for window in windows(x[:10])] == [10]


@given(labels=st.lists(st.integers(0, 1), min_size=4, max_size=60))
def test_a_fifth_of_either_label_is_held_out(labels: list[int]) -> None:
    tested = held_out(labels, 0)
    for label in (0, 1):
        size = labels.count(label)
        expected = min(max(1, round(0.2 * size)), size - 1) if size > 1 else 0
        assert sum(labels[i] == label for i in tested) == expected


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Ten subjects in each of FedBN's sites and in one other; UM in two parts, as published; region #3455 is empty."""
    rows = ["SUB_ID,FILE_ID,SITE_ID,DX_GROUP"]
    (tmp_path / "cpac" / "filt_global").mkdir(parents=True)
    for s, site in enumerate((*SITES, "PITT")):
        for i in range(10):
            part = f"_{1 + i % 2}" if site in ("UM", "UCLA") else ""
            name = f"{site}{part}_{s}{i:04}"
            rows.append(f"{s}{i},{name},{site}{part},{1 + i % 2}")
            x = np.insert(series(100 * s + i), 2, 0.0, axis=1)
            header = "#1\t#2\t#3455\t#4\t#5\t#6"
            np.savetxt(tmp_path / "cpac" / "filt_global" / f"{name}_rois_ho.1D", x, header=header, comments="")
    rows.append("999,no_filename,NYU,1")
    (tmp_path / "Phenotypic_V1_0b_preprocessed1.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_published_files(published: Path) -> None:
    data = load("abide", str(published))
    assert (data.domains, data.classes, data.channels, data.image_size) == (SITES, 2, REGIONS * (REGIONS - 1) // 2, 1)
    assert data.domain_train is not None
    assert data.domain_train.bincount().tolist() == [8 * 4] * 4  # 8 subjects of 4 windows; two are tested on
    assert data.y_train.bincount().tolist() == data.y_train.bincount().flip(0).tolist()
    rows = {tuple(row) for row in data.x_train.tolist()}
    autism = connectome(windows(series(0))[0])  # the first subject of NYU has DX_GROUP 1
    place = (data.x_train if tuple(autism.tolist()) in rows else data.x_test) == torch.from_numpy(autism)
    labels = data.y_train if tuple(autism.tolist()) in rows else data.y_test
    assert labels[place.all(1)].tolist() == [1]


def test_a_subjects_windows_are_on_one_side(published: Path) -> None:
    data = load("abide", str(published))
    tested = {tuple(row) for row in data.x_test.tolist()}
    for i in range(10):
        vectors = [tuple(connectome(window).tolist()) for window in windows(series(i))]
        assert len({vector in tested for vector in vectors}) == 1
    assert not tested & {tuple(row) for row in data.x_train.tolist()}


def test_the_empty_region_is_left_out_by_its_name(tmp_path: Path) -> None:
    x = series(0)
    for header, kept in (("#1\t#2\t#3455\t#4\t#5", 4), ("#1\t#2\t#3\t#4\t#5", 5)):
        np.savetxt(tmp_path / "a.1D", x, header=header, comments="")
        assert read_series(tmp_path / "a.1D").shape == (len(x), kept)


def test_published_files_wrong(published: Path) -> None:
    sheet = published / "Phenotypic_V1_0b_preprocessed1.csv"
    text = sheet.read_text()
    for change, error, message in (
        (text.replace("SITE_ID", "SITE"), ValueError, "expected the columns FILE_ID, SITE_ID and DX_GROUP, but SITE_ID are missing"),
        (text.replace("NYU,2", "NYU,3"), ValueError, "DX_GROUP must be 1 or 2, but is '3' for NYU_00001"),
        (text.replace("USM,", "ELSEWHERE,"), DataNotFound, "belongs to USM"),
    ):
        sheet.write_text(change)
        with pytest.raises(error, match=message):
            load("abide", str(published))
    sheet.write_text(text)
    file = next(published.rglob("NYU_00001_rois_ho.1D"))
    file.write_text("#1 #2\n1 2\n3\n")
    with pytest.raises(ValueError, match=r"NYU_00001_rois_ho\.1D: expected a header and a line of numbers"):
        load("abide", str(published))
    file.write_text("#1 #2\n1 2\n3 nan\n")
    with pytest.raises(ValueError, match="expected finite numbers, but some are not"):
        load("abide", str(published))
    np.savetxt(file, series(0, regions=4))
    with pytest.raises(ValueError, match="must have one length of at least 1, but got NYU: 6 and 10"):
        load("abide", str(published))


Y = np.arange(10) % 2


def site(folder: Path, name: str, **arrays: Any) -> None:
    np.savez(folder / f"{name}.npz", **arrays)


def test_archives_of_series_and_of_vectors_agree(tmp_path: Path) -> None:
    all_series = np.stack([series(i, WINDOW) for i in range(10)])
    (tmp_path / "series").mkdir()
    (tmp_path / "ready").mkdir()
    for name in ("here", "there"):
        site(tmp_path / "series", name, series=all_series, y=Y)
        site(tmp_path / "ready", name, x=np.stack([connectome(x) for x in all_series]), y=Y)
    one, other = (load("abide", str(tmp_path / kind)) for kind in ("series", "ready"))
    assert one.domains == ("here", "there")
    assert torch.equal(one.x_train, other.x_train)
    assert torch.equal(one.y_test, other.y_test)


def test_rows_of_one_subject_stay_together(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    site(tmp_path, "here", x=x, y=np.repeat(Y, 4), subject=np.repeat(np.arange(10), 4))
    data = load("abide", str(tmp_path))
    assert len(data.x_test) == 8
    places = {int((torch.from_numpy(x) == row).all(1).nonzero()) // 4 for row in data.x_test}
    assert len(places) == 2


def test_two_scans_of_one_person_are_on_one_side(tmp_path: Path) -> None:
    """No window that is tested on has a near-twin in training. Control: without ``subject`` many have one."""
    scans = np.stack([series(i // 2) + 1e-6 * series(100 + i) for i in range(40)])
    arrays = {"series": scans, "y": np.repeat(np.arange(20) % 2, 2), "subject": np.repeat(np.arange(20), 2)}
    site(tmp_path, "here", **arrays)
    data = load("abide", str(tmp_path))
    assert (len(data.x_train), len(data.x_test)) == (16 * 2 * 4, 4 * 2 * 4)
    assert float(torch.cdist(data.x_test.flatten(1), data.x_train.flatten(1)).min()) > 0.02
    assert data.y_test.bincount().tolist() == [16, 16]
    del arrays["subject"]
    (tmp_path / "control").mkdir()
    site(tmp_path / "control", "here", **arrays)
    data = load("abide", str(tmp_path / "control"))
    assert float(torch.cdist(data.x_test.flatten(1), data.x_train.flatten(1)).min()) < 0.002


def test_csv(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(10, 6))
    np.savetxt(tmp_path / "here.csv", np.column_stack([Y, x]), delimiter=",")
    data = load("abide", str(tmp_path))
    assert (len(data.x_train), len(data.x_test)) == (8, 2)
    assert sorted(data.y_test.tolist()) == [0, 1]


@listed(
    ("arrays", "message"),
    [
        ({"x": np.zeros((10, 6))}, "expected y and either series or x, but the file holds x"),
        ({"x": np.zeros((10, 6), dtype=int), "y": Y}, "expected x as floats .* but got int64"),
        ({"series": np.zeros((10, 6)), "y": Y}, r"expected series as floats \(n, T, R\)"),
        ({"x": np.zeros((10, 6)), "y": Y[:9]}, r"but got float64 \(10, 6\) and \(9,\)"),
        ({"x": np.zeros((10, 6)), "y": Y + 1}, "labels must be 0 .control. or 1 .autism., but one is 2"),
        ({"x": np.full((10, 6), np.inf), "y": Y}, "expected finite numbers"),
        ({"x": np.zeros((10, 6)), "y": Y, "subject": np.arange(3)}, "subject must have an entry for each of the 10 rows"),
        ({"x": np.zeros((10, 6)), "y": Y, "subject": np.arange(10) // 2}, "the rows of one subject must have one label"),
        ({"series": np.ones((10, 9, 4)), "y": Y, "subject": np.arange(10) // 2}, "the rows of one subject must have one label"),
        ({"x": np.zeros((10, 6)), "y": np.array([0, None] * 5, dtype=object)}, "expected a .npz archive of numbers"),
        ({"x": np.zeros((1, 6)), "y": Y[:1]}, "site here needs two subjects with the same label, .* among its 1"),
        ({"series": np.zeros((10, 9, 1)), "y": Y}, "must have one length of at least 1, but got here: 0"),
    ],
)
def test_wrong_archives(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    site(tmp_path, "here", **arrays)
    with pytest.raises(ValueError, match=message):
        load("abide", str(tmp_path))


def test_no_files_and_image_size(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match="there is no folder"):
        load("abide", str(tmp_path / "gone"))
    with pytest.raises(DataNotFound, match="holds neither"):
        load("abide", str(tmp_path))
    (tmp_path / "here.csv").write_text("label,a\n0,1\n")
    with pytest.raises(ValueError, match=r"here\.csv: expected a label and numbers per line"):
        load("abide", str(tmp_path))
    site(tmp_path, "here", x=np.zeros((10, 6)), y=Y)
    with pytest.raises(ValueError, match="names without .npz or .csv must differ, but got here.csv, here.npz"):
        load("abide", str(tmp_path))
    with pytest.raises(ValueError, match="image-size must be 0 or 1, but is 32"):
        load("abide", str(tmp_path), 32)
