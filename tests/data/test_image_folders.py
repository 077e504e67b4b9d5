"""Published image folders: made-up copies of each layout, splits, and every wrong file by its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Picture

from fl_bn.data import image_folders, listing
from fl_bn.data.dataset import DataNotFound, load
from fl_bn.data.image_folders import DOMAINNET_CLASSES, DOMAINNET_DOMAINS, OFFICE_CLASSES, OFFICE_DOMAINS, PACS_CLASSES, PACS_DOMAINS
from fl_bn.data.listing import Image, LargeData, split

DOMAINS = {
    "office-caltech10": (OFFICE_DOMAINS, OFFICE_CLASSES, "office_caltech_10"),
    "domainnet": (DOMAINNET_DOMAINS, DOMAINNET_CLASSES, "DomainNet"),
    "pacs": (PACS_DOMAINS, PACS_CLASSES, "PACS"),
}


def draw(file: Path, colour: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (12, 8)) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Picture.new("RGB", size, colour).save(file)
    return file


def domain_folders(root: Path, name: str, images: int = 2) -> Path:
    """Red counts domains, green classes, blue images."""
    domains, classes, _ = DOMAINS[name]
    for d, domain in enumerate(domains):
        for c, label in enumerate(classes):
            for i in range(images):
                draw(root / domain / label / f"{i}.png", (d, c, i))
    return root


@pytest.mark.parametrize("name", list(DOMAINS))
def test_domains_and_classes_are_what_the_folders_say(name: str, tmp_path: Path) -> None:
    domains, classes, top = DOMAINS[name]
    domain_folders(tmp_path / top, name)
    data = load(name, str(tmp_path), 8)
    assert (data.name, data.domains, data.classes) == (name, domains, len(classes))
    assert data.x_train.shape == (len(domains) * len(classes), 3, 8, 8)
    for x, y, domain in ((data.x_train, data.y_train, data.domain_train), (data.x_test, data.y_test, data.domain_test)):
        assert torch.equal(x[:, 0, 0, 0].long(), domain)
        assert torch.equal(x[:, 1, 0, 0].long(), y)
    inside = load(name, str(tmp_path / top), 8)
    assert torch.equal(inside.x_train, data.x_train)


def test_fedbns_sets_are_stretched_and_others_cropped(tmp_path: Path) -> None:
    for name in ("office-caltech10", "pacs"):
        domain_folders(tmp_path / name, name)
        file = next((tmp_path / name).glob("*/*/0.png"))
        image = Picture.new("RGB", (12, 8), (0, 0, 0))
        image.paste((255, 0, 0), (0, 0, 2, 8))  # a margin that the centred square of 8 does not have
        for other in file.parent.glob("*.png"):
            image.save(other)
    stretched = load("office-caltech10", str(tmp_path / "office-caltech10"), 8)
    cropped = load("pacs", str(tmp_path / "pacs"), 8)
    assert [int(data.x_train[:, 0].max()) for data in (stretched, cropped)] == [255, 3]


@pytest.mark.parametrize(("name", "lists"), [("domainnet", ("train", "test")), ("pacs", ("train_kfold", "crossval_kfold"))])
@pytest.mark.parametrize("below", ["", "splits"])
def test_published_lists_decide_the_split(name: str, lists: tuple[str, str], below: str, tmp_path: Path) -> None:
    domains, classes, _ = DOMAINS[name]
    domain_folders(tmp_path, name)
    (tmp_path / below).mkdir(exist_ok=True)
    for domain in domains:
        for i, kind in enumerate(lists):
            lines = [f"{domain}/{label}/{i}.png {number + 1}" for number, label in enumerate(classes)]
            (tmp_path / below / f"{domain}_{kind}.txt").write_text("\n".join([*lines, f"{domain}/another/x.png 99"]))
    data = load(name, str(tmp_path), 8)
    assert data.x_train[:, 2, 0, 0].unique().tolist() == [0]  # blue counts images: only the listed ones
    assert data.x_test[:, 2, 0, 0].unique().tolist() == [1]
    assert torch.equal(data.x_test[:, 1, 0, 0].long(), data.y_test)  # numbers from 1 are not taken for labels

    first = tmp_path / below / f"{domains[0]}_{lists[1]}.txt"
    text = first.read_text()
    for line, error, message in (
        (f"{domains[0]}/{classes[0]}/gone.png 0", DataNotFound, r"line 1 names .*gone\.png, which is not there"),
        (f"{domains[0]}/{classes[0]}/0.png", ValueError, r"line 1: expected 'DOMAIN/CLASS/FILE number'"),
        (f"../{domains[0]}/{classes[0]}/0.png 1", ValueError, r"line 1: expected"),
    ):
        first.write_text(line)
        with pytest.raises(error, match=message):
            image_folders.LAYOUTS[name].files(str(tmp_path))
    first.write_text(text)
    first.rename(tmp_path / "away")
    with pytest.raises(DataNotFound, match=f"{first.name} is missing .*remove all lists"):
        image_folders.LAYOUTS[name].files(str(tmp_path))


def test_missing_domains_and_classes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"lacks art_painting, cartoon, photo, sketch .*docs/data\.md"):
        load("pacs", str(tmp_path))
    domain_folders(tmp_path, "pacs")
    for file in (tmp_path / "photo" / "horse").iterdir():
        file.unlink()
    with pytest.raises(DataNotFound, match=r"no images in .*photo.horse"):
        load("pacs", str(tmp_path))


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_split_is_stratified_disjoint_and_complete(sizes: list[int]) -> None:
    images = [Image(Path(f"{label}/{i}"), label) for label, size in enumerate(sizes) for i in range(size)]
    train, test = split(images)
    assert sorted(train + test) == sorted(images)
    for label, size in enumerate(sizes):
        tested = sum(image.label == label for image in test)
        assert tested == (0 if size == 1 else min(max(1, round(0.2 * size)), size - 1))
    elsewhere = split([image._replace(file=Path("elsewhere") / image.file) for image in images])
    assert [image.file.name for image in elsewhere[1]] == [image.file.name for image in test]


def test_split_depends_on_the_seed() -> None:
    images = [Image(Path(str(i)), 0) for i in range(50)]
    assert split(images, 0) == split(images, 0)
    assert split(images, 0) != split(images, 1)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    root = tmp_path / "tiny-imagenet-200"
    for i, wnid in enumerate(("n02", "n01")):
        for n in range(2):
            draw(root / "train" / wnid / "images" / f"{wnid}_{n}.png", (i, n, 0), (64, 64))
        (root / "train" / wnid / f"{wnid}_boxes.txt").write_text("beside the images")
        draw(root / "val" / "images" / f"val_{i}.png", (i, 9, 0), (64, 64))
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val" / "val_annotations.txt").write_text("val_0.png\tn02\t0\t0\t62\t62\nval_1.png\tn01\t0\t0\t62\t62\n")
    return tmp_path


def test_tiny_imagenet(tiny: Path) -> None:
    data = load("tiny-imagenet", str(tiny))
    assert (data.classes, data.image_size, data.domains) == (2, 64, ())
    assert data.x_train[:, 0, 0, 0].tolist() == [1, 1, 0, 0]  # n01 is class 0
    assert data.y_train.tolist() == [0, 0, 1, 1]
    assert data.y_test.tolist() == [1, 0]  # by the annotations, not by the place in the folder
    assert data.x_test[:, 0, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("val_0.png\tn77\t0", ValueError, "line 1: expected 'FILE WNID ...' with a WNID of wnids.txt"),
        ("val_7.png\tn01\t0", DataNotFound, "line 1 names .*val_7.png, which is not there"),
        ("../val_0.png\tn01", ValueError, "line 1: expected"),
    ],
)
def test_wrong_annotations(tiny: Path, line: str, error: type[Exception], message: str) -> None:
    (tiny / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text(line)
    with pytest.raises(error, match=message):
        load("tiny-imagenet", str(tiny))


def test_imagenet_and_the_flat_validation_archive(tmp_path: Path) -> None:
    for n, wnid in enumerate(("n01", "n02", "n03")):
        draw(tmp_path / "train" / wnid / "a.png", (n, 0, 0))
        draw(tmp_path / "val" / wnid / "b.png", (n, 1, 0))
    data = load("imagenet", str(tmp_path))
    assert data.x_test.shape == (3, 3, 224, 224)
    assert data.y_test.tolist() == data.x_test[:, 0, 0, 0].tolist() == [0, 1, 2]
    (tmp_path / "flat" / "train").mkdir(parents=True)
    draw(tmp_path / "flat" / "val" / "ILSVRC2012_val_00000001.png")
    with pytest.raises(DataNotFound, match="no folder for each class; the published archive is flat"):
        load("imagenet", str(tmp_path / "flat"))


def test_the_memory_that_a_set_needs_is_said_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "val"):
        draw(tmp_path / part / "n01" / "a.png")
    expected = 2 * 3 * 512 * 512 / 2**30
    monkeypatch.setattr(listing, "LARGE", expected)

    def refuse(*_: object) -> None:
        raise AssertionError("read before the warning")

    monkeypatch.setattr(listing, "read_all", refuse)
    with pytest.warns(LargeData, match=re.escape(f"expect {expected:.1f} GiB")), pytest.raises(AssertionError):
        load("imagenet", str(tmp_path), 512)


def test_a_file_that_is_no_image_is_named_whatever_the_number_of_threads(tmp_path: Path) -> None:
    domain_folders(tmp_path, "pacs")
    bad = tmp_path / "photo" / "horse" / "1.png"
    bad.write_bytes(b"nothing")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with pytest.raises(ValueError, match=re.escape(str(bad)) + ": expected an image"):
            load("pacs", str(tmp_path), 8)
        bad.unlink()
        many = load("pacs", f"{tmp_path}/", 8)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(many.x_train, load("pacs", f"{tmp_path}//", 8).x_train)
