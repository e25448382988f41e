"""Data sets: splits, cards, files and augmentation."""

import json
import random
import time
import zipfile

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits, load_sample_image

from sigmaens import data
from sigmaens.corruptions import corrupt_small

SPEC = {"name": "digits", "train": 600, "validation": 400, "split_seed": 0, "ood_images": 40}


@pytest.fixture(autouse=True, scope="module")
def two_corruptions():
    """The 15 types take half a minute; two show what there is to show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "STANDARD", {"contrast": "digital", "impulse_noise": "noise"})
        yield


@pytest.fixture(scope="module")
def digits(two_corruptions):
    return data.build(SPEC)


def rows(*splits):
    """Return images and labels of the splits as sorted tuples of bytes."""
    pairs = (pair for split in splits for pair in zip(split.inputs, split.labels, strict=True))
    return sorted((image.tobytes(), int(label)) for image, label in pairs)


def test_digits_are_split_without_loss_or_overlap(digits):
    source = load_digits()
    levels = np.rint(source.images * 255 / 16).astype(np.uint8)
    everything = data.Split(levels, source.target)
    assert [len(s.labels) for s in (digits.train, digits.validation, digits.test)] == [600, 400, 797]
    assert rows(digits.train, digits.validation, digits.test) == rows(everything)
    assert digits.train.inputs.shape == (600, 8, 8, 1)
    assert digits.train.inputs.max() == 255
    assert digits.classes == tuple("0123456789")


def test_every_split_has_the_classes_in_proportion(digits):
    share = np.bincount(load_digits().target) / 1797
    for split in (digits.train, digits.validation, digits.test):
        assert (abs(np.bincount(split.labels) - share * len(split.labels)) <= 1.5).all()


def test_normalisation_comes_from_the_training_split_alone(digits):
    x = data.to_tensor(digits.train.inputs, digits.mean, digits.std).double()
    assert x.mean().item() == pytest.approx(0, abs=1e-6)
    assert x.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_spec_alone_decides_the_result(digits):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    before = np.random.get_state()[2], torch.get_rng_state()  # noqa: NPY002
    again = data.build(SPEC)
    assert again.card == digits.card
    assert np.random.get_state()[2] == before[0]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before[1])


def test_split_seed_moves_splits_patches_and_corruptions(digits):
    other = data.build({**SPEC, "split_seed": 1})
    assert rows(other.train) != rows(digits.train)
    assert not np.array_equal(other.ood["china"], digits.ood["china"])
    assert other.card["sha256"] != digits.card["sha256"]
    again = corrupt_small(other.test.inputs, "impulse_noise", 4, seed=1)
    np.testing.assert_array_equal(other.corrupted["impulse_noise", 4], again)


def test_corrupted_images_are_the_test_images(digits):
    assert digits.corrupted.keys() == {(n, s) for n in ("contrast", "impulse_noise") for s in range(1, 6)}
    np.testing.assert_array_equal(
        digits.corrupted["impulse_noise", 4], corrupt_small(digits.test.inputs, "impulse_noise", 4, seed=0)
    )


@pytest.mark.parametrize("name", ["china", "flower"])
def test_patches_are_reduced_pieces_of_the_photograph(digits, name):
    weights = np.array([0.299, 0.587, 0.114])
    grey = np.rint(load_sample_image(f"{name}.jpg") @ weights)
    means = np.lib.stride_tricks.sliding_window_view(grey, (4, 4)).mean(axis=(2, 3))
    places = np.lib.stride_tricks.sliding_window_view(means, (29, 29))[..., ::4, ::4]
    assert digits.ood[name].shape == (40, 8, 8, 1)
    assert len({patch.tobytes() for patch in digits.ood[name]}) > 30
    for patch in digits.ood[name][:3, ..., 0]:
        candidates = places[abs(places[..., 3, 5] - patch[3, 5]) < 2]
        assert (abs(candidates - patch) < 2).all(axis=(1, 2)).any()


def test_card_tells_the_story(digits):
    card = json.loads(json.dumps(digits.card))
    assert card["spec"] == SPEC
    assert card["sizes"] == {"train": 600, "validation": 400, "test": 797, "ood/china": 40, "ood/flower": 40}
    assert {"source", "licence", "normalisation", "sha256"} <= card.keys()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "digit"}, ValueError, r"'digit'.*\['digits', 'image_files', 'images', 'sst2'\]"),
        ({"size": 3}, ValueError, r"unknown \['size'\]"),
        ({"train": 1400}, ValueError, "leave -3 of 1797"),
        ({"train": 9}, ValueError, "train=9.*at least 10"),
        ({"train": 600.0}, TypeError, "train.*600.0"),
        ({"train": True}, TypeError, "train.*True"),
        ({"ood_images": 0}, ValueError, "ood_images must be at least 1"),
        ({"split_seed": -1}, ValueError, "split_seed must be at least 0"),
    ],
)
def test_bad_spec_is_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        data.build({**SPEC, **change})


def test_missing_options_are_named():
    with pytest.raises(ValueError, match=r"missing \['ood_images', 'split_seed', 'validation'\]"):
        data.build({"name": "digits", "train": 600})


def test_load_returns_what_was_saved(digits, tmp_path):
    data.save(digits, tmp_path / "new" / "digits")
    loaded = data.load(tmp_path / "new" / "digits")
    assert loaded.card == digits.card
    assert (loaded.mean, loaded.std, loaded.classes) == (digits.mean, digits.std, digits.classes)
    assert rows(loaded.train) == rows(digits.train)
    assert rows(loaded.validation) == rows(digits.validation)
    np.testing.assert_array_equal(loaded.test.inputs, digits.test.inputs)
    for field in ("ood", "corrupted"):
        assert getattr(loaded, field).keys() == getattr(digits, field).keys()
        for key, images in getattr(digits, field).items():
            np.testing.assert_array_equal(getattr(loaded, field)[key], images)
    assert sorted(path.name for path in (tmp_path / "new" / "digits").iterdir()) == ["arrays.npz", "card.json"]


def test_files_are_the_same_on_another_day(digits, tmp_path, monkeypatch):
    data.save(digits, tmp_path / "today")
    later = time.time() + 400 * 86400
    monkeypatch.setattr(time, "time", lambda: later)
    monkeypatch.setattr(time, "localtime", lambda *_: time.gmtime(later))
    data.save(digits, tmp_path / "later")
    for file in ("arrays.npz", "card.json"):
        assert (tmp_path / "today" / file).read_bytes() == (tmp_path / "later" / file).read_bytes()


def test_interrupted_save_leaves_the_old_files(digits, tmp_path, monkeypatch):
    data.save(digits, tmp_path)

    def interrupted(stream, **_):
        stream.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        data.save(digits, tmp_path)
    assert data.load(tmp_path).card == digits.card


def test_a_full_disk_is_named_and_nothing_stays(digits, tmp_path, full_disk):
    with pytest.raises(OSError, match=r"cannot write: File too large: '.*arrays\.npz'"), full_disk():
        data.save(digits, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_files_is_named(digits, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write: Not a directory: '.*file/digits/arrays\.npz'"):
        data.save(digits, tmp_path / "file" / "digits")


def damage(folder, how):
    archive, card = folder / "arrays.npz", folder / "card.json"
    if how == "truncated":
        archive.write_bytes(archive.read_bytes()[:-1000])
    elif how == "flipped":
        content = bytearray(archive.read_bytes())
        content[5000] ^= 255
        archive.write_bytes(content)
    elif how == "other arrays":
        np.savez(archive, **{"train/inputs": np.zeros(3)})
    elif how == "one array":
        with archive.open("wb") as stream:
            np.save(stream, np.zeros(3))
    elif how == "pickled":
        np.savez(archive, objects=np.array([{}], dtype=object))
    elif how == "zip":
        with zipfile.ZipFile(archive, "w") as stream:
            stream.writestr("readme.txt", "hello")
    elif how == "no JSON":
        card.write_text("{")
    elif how == "other JSON":
        card.write_text("[1]")
    elif how == "other format":
        card.write_text(json.dumps({**json.loads(card.read_text()), "format": 1}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", r"arrays\.npz is damaged"),
        ("flipped", r"arrays\.npz is damaged"),
        ("other arrays", "does not match the checksum"),
        ("one array", r"arrays\.npz is damaged"),
        ("pickled", r"arrays\.npz is damaged"),
        ("zip", r"arrays\.npz is damaged"),
        ("no JSON", r"card\.json is not the card"),
        ("other JSON", r"card\.json is not the card"),
        ("other format", "format 1; this version reads 2"),
    ],
)
def test_damaged_and_foreign_files_are_refused(digits, tmp_path, how, message):
    data.save(digits, tmp_path)
    damage(tmp_path, how)
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path)


@pytest.mark.parametrize("file", ["arrays.npz", "card.json"])
def test_missing_file_is_named(digits, tmp_path, file):
    data.save(digits, tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {file}"):
        data.load(tmp_path)


def test_to_tensor_normalises_each_channel():
    images = np.array([0, 51, 255], dtype=np.uint8).reshape(1, 1, 1, 3).repeat(2, axis=1)
    x = data.to_tensor(images, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 0.7))
    assert x.dtype == torch.float32
    assert x.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(x[0, :, 1, 0], torch.tensor([-0.2, 0.0, 1.0]))


@pytest.mark.parametrize(
    ("images", "mean", "error"),
    [
        (np.zeros((1, 2, 2, 1)), (0.0,), TypeError),
        (np.zeros((1, 2, 2), dtype=np.uint8), (0.0,), ValueError),
        (np.zeros((1, 2, 2, 3), dtype=np.uint8), (0.0,), ValueError),
    ],
)
def test_to_tensor_names_bad_images(images, mean, error):
    with pytest.raises(error, match="images must"):
        data.to_tensor(images, mean, (1.0,))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


FILL = torch.tensor([-1.0, -2.0])


@pytest.fixture
def batch():
    return torch.randn(5, 2, 6, 7, generator=generator(9))


def versions(image, crop, flip):
    """Return every shifted and mirrored version of an image (C, H, W), by offset and mirror."""
    _, h, w = image.shape
    padded = FILL.view(2, 1, 1).repeat(1, h + 2 * crop, w + 2 * crop)
    padded[:, crop : crop + h, crop : crop + w] = image
    shifted = {(y, x, False): padded[:, y : y + h, x : x + w] for y in range(2 * crop + 1) for x in range(2 * crop + 1)}
    return shifted | ({(y, x, True): v.flip(2) for (y, x, _), v in shifted.items()} if flip else {})


def test_augment_without_crop_and_flip_is_the_identity(batch):
    assert torch.equal(data.augment(batch, 0, False, generator(), FILL), batch)


@pytest.mark.parametrize(("crop", "flip"), [(0, True), (1, False), (2, True), (9, False)])
def test_augmented_images_are_shifted_or_mirrored_versions(batch, crop, flip):
    for image, result in zip(batch, data.augment(batch, crop, flip, generator(), FILL), strict=True):
        assert any(torch.equal(result, version) for version in versions(image, crop, flip).values())


def test_every_offset_is_drawn_equally_often():
    n = 18 * 400
    image = torch.randn(2, 4, 4, generator=generator(9))
    results = data.augment(image.expand(n, 2, 4, 4), 1, True, generator(), FILL)
    counts = torch.tensor([(results == v).all(dim=(1, 2, 3)).sum() for v in versions(image, 1, True).values()])
    assert counts.sum() == n
    # χ² with 17 degrees of freedom exceeds 40.8 once in a thousand seeds.
    assert ((counts - 400) ** 2 / 400).sum() < 40.8


def test_generator_decides_the_augmentation(batch):
    torch.manual_seed(0)
    first = data.augment(batch, 2, True, generator(1), FILL)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(data.augment(batch, 2, True, generator(1), FILL), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(data.augment(batch, 2, True, generator(2), FILL), first)


def test_images_of_a_batch_move_apart():
    results = data.augment(torch.arange(24.0).view(1, 1, 4, 6).expand(50, 1, 4, 6), 2, False, generator(), FILL[:1])
    assert len({result.numpy().tobytes() for result in results}) > 10


def test_padding_normalised_images_with_black_is_padding_raw_ones():
    mean, std = (0.3, 0.6), (0.2, 0.5)
    raw = np.random.default_rng(0).integers(256, size=(4, 5, 5, 2), dtype=np.uint8)
    after = data.augment(data.to_tensor(raw, mean, std), 2, True, generator(), data.black(mean, std))
    moved = data.augment(torch.from_numpy(raw).permute(0, 3, 1, 2), 2, True, generator(), torch.zeros(2))
    before = data.to_tensor(moved.permute(0, 2, 3, 1).numpy(), mean, std)
    assert torch.equal(after, before)


def test_negative_crop_is_refused(batch):
    with pytest.raises(ValueError, match=r"crop.*-1"):
        data.augment(batch, -1, False, generator(), FILL)


def test_a_class_that_cannot_be_split_is_named():
    labels = np.array([0, 1] * 10 + [2])
    with pytest.raises(ValueError, match="class 2 has 1 of 21 rows, too few for first=6, where each part needs one"):
        data.stratify(labels, labels, {"first": 6}, 0)
    labels = np.array([0, 1] * 10 + [2] * 2)
    with pytest.raises(ValueError, match="class owl has 2 of 22 rows, too few for first=11 and second=5, "):
        data.stratify(labels, labels, {"first": 11, "second": 5}, 0, ["ape", "bee", "owl"])


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_check_labels_names_the_first_bad_one(kind):
    data.check_labels(kind([0, 2, 1]), 3)
    with pytest.raises(ValueError, match=r"labels\[2\] is 3; 3 classes allow 0 … 2"):
        data.check_labels(kind([0, 2, 3, -1]), 3)
    with pytest.raises(ValueError, match=r"labels\[0\] is -1"):
        data.check_labels(kind([-1]), 3)
    with pytest.raises(TypeError, match="float32"):
        data.check_labels(kind([0.5]).astype(np.float32) if kind is np.array else kind([0.5]), 3)
