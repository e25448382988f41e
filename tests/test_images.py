"""Folders of images: one order whatever holds them, clear errors, and data sets made of them."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from sigmaens import data, images

SPEC = {
    "name": "images",
    "train_folder": ["set/train"],
    "test_folder": ["set/test"],
    "size": 32,
    "train": 8,
    "validation": 4,
    "test": 4,
    "ood": {"far": ["far"]},
    "ood_images": 3,
    "split_seed": 0,
    "source": "made for this test",
    "licence": "none",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two classes of colour noise; `far` is grey and of another size."""
    rng = np.random.default_rng(0)
    for part, count in (("set/train", 8), ("set/test", 4)):
        for name in ("cat", "ape"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                    tmp_path / part / name / f"{i}.png"
                )
    (tmp_path / "far" / "0").mkdir(parents=True)
    for i in range(5):
        Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)).save(tmp_path / "far" / "0" / f"{i}.png")
    monkeypatch.setenv("SIGMAENS_DATA", str(tmp_path))
    monkeypatch.setattr(data, "STANDARD", ["brightness", "gaussian_noise"])
    return tmp_path


def test_order_is_by_class_then_file_name(folder):
    pixels, labels, classes = images.read("set/train")
    assert classes == ["ape", "cat"]
    assert labels.tolist() == [0] * 8 + [1] * 8
    for i, name in ((0, "ape/0.png"), (11, "cat/3.png")):
        np.testing.assert_array_equal(pixels[i], np.asarray(Image.open(folder / "set/train" / name)))


def test_an_archive_is_read_as_the_folder_it_holds(folder):
    plain = images.read("set/train")
    with tarfile.open(folder / "set.tar", "w") as tar:
        for file in sorted((folder / "set").rglob("*.png"), reverse=True):  # in another order
            tar.add(file, f"set/{file.relative_to(folder / 'set')}")
    packed = images.read(["nowhere/train", "set.tar/set/train"])
    np.testing.assert_array_equal(plain[0], packed[0])
    np.testing.assert_array_equal(plain[1], packed[1])
    assert plain[2] == packed[2]


def test_build_makes_disjoint_stratified_splits_of_one_size(folder):
    dataset = data.build(SPEC)
    assert dataset.card["sizes"] == {"train": 8, "validation": 4, "test": 4, "ood/far": 3}
    assert not dataset.is_text
    assert dataset.ood["far"].shape == (3, 32, 32, 3)
    for split in (dataset.train, dataset.validation, dataset.test):
        assert np.bincount(split.labels).tolist() == [len(split.labels) // 2] * 2
    rows = {image.tobytes() for split in (dataset.train, dataset.validation) for image in split.inputs}
    assert len(rows) == 12
    assert {cell for cell, inputs in dataset.corrupted.items() if inputs.shape == dataset.test.inputs.shape} == {
        (name, severity) for name in data.STANDARD for severity in range(1, 6)
    }
    assert data.build(SPEC).card["sha256"] == dataset.card["sha256"]
    assert data.build({**SPEC, "split_seed": 1}).card["sha256"] != dataset.card["sha256"]


def test_saved_and_loaded_again(folder, tmp_path):
    dataset = data.build(SPEC)
    data.save(dataset, tmp_path / "saved")
    again = data.load(tmp_path / "saved")
    assert again.card == dataset.card
    np.testing.assert_array_equal(again.ood["far"], dataset.ood["far"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"train_folder": ["elsewhere"]}, FileNotFoundError, "no data at elsewhere.*SIGMAENS_DATA="),
        ({"test_folder": ["far"]}, ValueError, r"far.* it lacks \['ape', 'cat'\] and has \['0'\] besides"),
        ({"train": 30}, ValueError, "train=30 and validation=4 leave -18 of 16"),
        ({"test": 20}, ValueError, "test=20 leave -12 of 8"),
        ({"ood_images": 9}, ValueError, "ood_images=9 is more than the 5 images of far"),
        ({"train": 2.5}, TypeError, "train must be an integer"),
        ({"source": ""}, TypeError, "source must be a text"),
    ],
)
def test_impossible_specs_are_named(folder, change, error, message):
    with pytest.raises(error, match=message):
        data.build({**SPEC, **change})


def test_no_folder_is_named_with_the_way_to_give_one(monkeypatch):
    monkeypatch.delenv("SIGMAENS_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="SIGMAENS_DATA is not set; set it to the folder"):
        data.build(SPEC)


def test_damaged_images_and_archives_are_named(folder):
    whole = (folder / "set/train/ape/3.png").read_bytes()
    (folder / "set/train/ape/3.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"ape/3\.png is no image, or a damaged one"):
        images.read("set/train")
    (folder / "set/train/ape/3.png").write_text("not an image")
    with pytest.raises(ValueError, match=r"ape/3\.png is no image"):
        images.read("set/train")
    (folder / "bad.tar").write_bytes(b"nothing" * 100)
    with pytest.raises(ValueError, match=r"bad\.tar is no tar archive"):
        images.read("bad.tar/set/train")
    with tarfile.open(folder / "empty.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("readme"), io.BytesIO())
    with pytest.raises(ValueError, match="holds no images in folders of classes"):
        images.read("empty.tar/set/train")
    with pytest.raises(ValueError, match="holds no images"):
        images.read("set/train/ape")


def test_another_size_is_refused_unless_one_is_asked_for(folder):
    Image.new("RGB", (40, 40)).save(folder / "set/train/cat/9.png")
    with pytest.raises(ValueError, match=r"cat/9\.png .* has \(40, 40\) pixels, not \(32, 32\)"):
        images.read("set/train")
    assert images.read("set/train", size=32)[0].shape == (17, 32, 32, 3)
