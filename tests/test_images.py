"""Folders of images: one order whatever holds them, clear errors, and data sets made of them."""

import io
import os
import struct
import tarfile
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from sigmaens import baselines, corruptions, data, images, training

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
        ({"channels": 2}, ValueError, "channels must be 1 or 3, got 2"),
        ({"train_folder": None}, TypeError, "train_folder must be a text or a list of texts.* got None"),
        ({"train_folder": []}, TypeError, r"train_folder must be a text or a list of texts.* got \[\]"),
        ({"corrupted": None}, TypeError, "corrupted must be a text or a list of texts.* got None"),
        ({"ood": ["far"]}, TypeError, r"ood must map names to values, got \['far'\]"),
        ({"ood": {"far": 3}}, TypeError, "ood/far must be a text or a list of texts.* got 3"),
        ({"ood": {"near/far": ["far"]}}, ValueError, "names of ood must be texts without a slash, got 'near/far'"),
        ({"ood": {3: ["far"]}}, ValueError, "names of ood must be texts without a slash, got 3"),
        ({"first": 5}, TypeError, "first must map names to values, got 5"),
        ({"first": {"train": 0}}, ValueError, "first/train must be at least 1, got 0"),
    ],
)
def test_impossible_specs_are_named(folder, change, error, message):
    with pytest.raises(error, match=message):
        data.build({**SPEC, **change})


def test_a_class_of_too_few_images_is_named(folder):
    for file in list((folder / "set/train/cat").iterdir())[1:]:
        file.unlink()
    with pytest.raises(ValueError, match="class cat has 1 of 9 rows, too few for train=4 and validation=2"):
        data.build({**SPEC, "train": 4, "validation": 2})


def test_images_are_resized_bilinearly_and_drawn_ones_keep_their_order(folder):
    every, _, _ = images.read("far", 32)
    with Image.open(folder / "far/0/3.png") as image:
        truth = image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(every[3], np.asarray(truth))
    for seed in range(4):
        drawn = data.build({**SPEC, "split_seed": seed}).ood["far"]
        rows = [next(i for i, image in enumerate(every) if np.array_equal(image, one)) for one in drawn]
        assert rows == sorted(set(rows))


def test_suffixes_may_be_in_capitals(folder):
    before = images.read("set/train")
    for i, file in enumerate(sorted((folder / "set/train").rglob("*.png"))):
        file.rename(file.with_suffix((".PNG", ".Png")[i % 2]))
    np.testing.assert_array_equal(images.read("set/train")[0], before[0])


def hide(folder):
    """Put hidden files and folders into a folder `<class>/<file>` with the class `classes[0]`."""
    one = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    (one / "._0.png").write_bytes(b"no image")
    for name in (".ipynb_checkpoints", ".empty"):
        (folder / name).mkdir()
    (one / ".ipynb_checkpoints").mkdir()
    for place in (folder / ".ipynb_checkpoints", one / ".ipynb_checkpoints", one):
        Image.new("RGB", (32, 32)).save(place / ".0.png" if place == one else place / "0-checkpoint.png")


def test_hidden_files_and_folders_are_no_images(folder):
    before = data.build(SPEC).card
    for part in ("set/train", "set/test", "far"):
        hide(folder / part)
    assert data.build(SPEC).card == before
    with tarfile.open(folder / "set.tar", "w") as tar:
        tar.add(folder / "set", "set")
    packed = data.build({**SPEC, "train_folder": ["set.tar/set/train"], "test_folder": "set.tar/set/test"})
    assert packed.card["sha256"] == before["sha256"]


def test_a_relative_root_stays_where_it_was(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("SIGMAENS_DATA", folder.name)
    before = images.read("set/train")
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(images.read("set/train")[0], before[0])


@pytest.fixture
def packed(folder):
    """Pack a folder with its bytes, and return the archive's path and its members of class `cat`."""
    with tarfile.open(folder / "set.tar", "w") as tar:
        tar.add(folder / "set", "set")
    with tarfile.open(folder / "set.tar") as tar:
        members = [member for member in tar.getmembers() if "train/cat/" in member.name]
    return folder / "set.tar", members


@pytest.mark.parametrize("how", ["in a header", "at a header", "in an image", "bit", "zeros", "end"])
def test_an_archive_that_is_not_whole_is_named(packed, how):
    archive, members = packed
    content, at = bytearray(archive.read_bytes()), members[2].offset
    cuts = {"in a header": at + 200, "at a header": at, "in an image": members[2].offset_data + 100}
    if how == "bit":
        content[at + 10] ^= 1
    elif how == "zeros":
        content[at : at + 512] = bytes(512)
    elif how == "end":
        content[-1] = 1
    archive.write_bytes(content[: cuts.get(how)])
    with pytest.raises(ValueError, match=r"set\.tar is no tar archive, or a damaged one: ."):
        images.read("set.tar/set/train")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_compressed_archive_is_read_and_named_if_it_is_damaged(folder, kind):
    before = images.read("set/train")
    with tarfile.open(folder / "set.tar", f"w:{kind}") as tar:
        tar.add(folder / "set", "set")
    np.testing.assert_array_equal(images.read("set.tar/set/train")[0], before[0])
    whole = (folder / "set.tar").read_bytes()
    middle = len(whole) // 2
    for content in (whole[:middle], whole[:-3], whole[:middle] + bytes(200) + whole[middle + 200 :]):
        (folder / "set.tar").write_bytes(content)
        with pytest.raises(ValueError, match=r"set\.tar is no tar archive, or a damaged one"):
            images.read("set.tar/set/train")


def test_links_are_followed_in_folders_and_in_archives(folder):
    cat = folder / "set/train/cat"
    os.link(cat / "0.png", cat / "8.png")
    (cat / "9.png").symlink_to("../ape/1.png")
    pixels, _, _ = images.read("set/train")
    np.testing.assert_array_equal(pixels[[16, 17]], pixels[[8, 1]])
    with tarfile.open(folder / "set.tar", "w") as tar:
        tar.add(folder / "set", "set")
        kinds = {member.type for member in tar.getmembers()}
    assert {tarfile.LNKTYPE, tarfile.SYMTYPE} <= kinds
    np.testing.assert_array_equal(images.read("set.tar/set/train")[0], pixels)


def member(name, kind=tarfile.REGTYPE, target=""):
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (member("set/train/dog", tarfile.SYMTYPE, "cat"), r"set\.tar/set/train/dog is a link, not a folder"),
        (member("set", tarfile.SYMTYPE, "other"), r"set\.tar/set is a link, not a folder"),
        (member("set/train/cat/../../x.png"), r"set\.tar/set/train/cat/\.\./\.\./x\.png has \.\. in its name"),
        (member("set/train/cat/9.png", tarfile.DIRTYPE), r"set\.tar/set/train/cat/9\.png is no file"),
        (member("set/train/cat/9.png", tarfile.FIFOTYPE), r"set\.tar/set/train/cat/9\.png is no file"),
        (
            member("set/train/cat/9.png", tarfile.SYMTYPE, "/etc/passwd"),
            r"set\.tar is no .*/etc/passwd' not found",
        ),
        (member("set/train/cat/9.png", tarfile.SYMTYPE, "9.png"), r"set\.tar is no tar archive, or a damaged one"),
    ],
)
def test_members_that_cannot_be_read_are_named(packed, entry, message):
    with tarfile.open(packed[0], "a") as tar:
        tar.addfile(entry)
    with pytest.raises(ValueError, match=message):
        images.read("set.tar/set/train")


def test_which_archives_are_read_is_said(packed):
    packed[0].rename(packed[0].with_suffix(".tar.gz"))
    with pytest.raises(
        FileNotFoundError, match=r"set\.tar\.gz is a file, and archives are read if they are named \.tar"
    ):
        images.read("set.tar.gz/set/train")
    assert len(images.read(["set.tar.gz/set/train", "set/train"])[0]) == 16


def test_a_folder_with_the_name_of_an_image_is_named(folder):
    (folder / "set/train/ape/9.png").mkdir()
    with pytest.raises(ValueError, match=r"ape/9\.png is no image, or a damaged one: .*Is a directory"):
        images.read("set/train")


def test_images_of_more_than_eight_bits_are_refused(folder):
    levels = (np.arange(32 * 32, dtype=np.uint16) * 60).reshape(32, 32)
    Image.fromarray(levels).save(folder / "set/train/ape/3.png")
    with pytest.raises(ValueError, match=r"ape/3\.png has more than 8 bits a grey level \(I;16\)"):
        images.read("set/train")


def test_folders_that_nobody_knows_must_be_described(folder):
    with pytest.raises(ValueError, match=r"source and licence must be given, since \['train', 'test', 'ood/far'\]"):
        data.build({option: value for option, value in SPEC.items() if option != "licence"})


def test_a_class_that_the_test_folder_lacks_is_named(folder):
    for file in (folder / "set/test/cat").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"it lacks \['cat'\] and has \[\] besides"):
        data.build(SPEC)


def test_small_and_grey_images_are_corrupted_large(folder):
    dataset = data.build({**SPEC, "size": 28, "channels": 1})
    colour = data.build({**SPEC, "size": 28})
    luma = colour.train.inputs @ np.array([0.299, 0.587, 0.114])
    # Grey is made before the size, each with a rounding of its own.
    assert abs(dataset.train.inputs[..., 0] - luma).max() < 2
    assert dataset.card["corruptions"] == "CIFAR-C-style: sigmaens.corruptions at 56×56 pixels, reduced to 28×28"
    for name, severity in (("brightness", 2), ("gaussian_noise", 4)):
        truth = corruptions.corrupt_small(dataset.test.inputs, name, severity, seed=0, size=56)
        np.testing.assert_array_equal(dataset.corrupted[name, severity], truth)


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


def damaged(kind):
    """Return contents of image files that are none: with huge sizes, wrong headers, cut."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(stream, kind)
    whole, rng = stream.getvalue(), np.random.default_rng(0)
    yield whole[: len(whole) // 2]
    if kind == "BMP":
        yield whole[:18] + struct.pack("<ii", 1 << 20, 1 << 20) + whole[26:]
    for _ in range(60):
        content = bytearray(whole)
        content[rng.integers(min(len(whole), 60))] = rng.integers(256)
        yield bytes(content)


@pytest.mark.parametrize("kind", ["BMP", "GIF", "PNG", "PPM", "WEBP"])
def test_whatever_is_wrong_with_an_image_its_file_is_named(kind):
    errors = []
    for content in damaged(kind):
        try:
            data.open_image(io.BytesIO(content), "NAME")
        except ValueError as error:
            errors.append(str(error))
    assert errors
    assert all(error.startswith("NAME is no image, or a damaged one: ") for error in errors)
    assert not any("BytesIO" in error for error in errors)


def test_what_pillow_warns_of_is_not_shown(large):
    palette = Image.fromarray(np.random.default_rng(0).integers(0, 10, (60, 60), dtype=np.uint8))
    palette.putpalette(list(range(30)))
    palette.save(large / "large/train/n01/clear.png", transparency=bytes(range(10)))
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI", 5, 0x0112, 3, 1)  # five entries, cut in the first
    stream = io.BytesIO()
    Image.new("RGB", (60, 60)).save(stream, "JPEG")
    content = stream.getvalue()  # without its first segment, which gives the resolution that EXIF data else gives
    start = 4 + int.from_bytes(content[4:6], "big")
    segment = b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif
    (large / "large/train/n01/exif.jpg").write_bytes(content[:2] + segment + content[start:])
    for name, warning in (("clear.png", "Transparency"), ("exif.jpg", "EXIF")):
        with pytest.warns(UserWarning, match=warning), Image.open(large / "large/train/n01" / name) as image:
            image.convert("RGB")
        assert data.decode(f"large/train/n01/{name}", 56).shape == (56, 56, 3)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        images.read("large/train", 56)
    assert not shown


FILES = {
    "name": "image_files",
    "train_folder": ["large/train"],
    "test_folder": ["large/val"],
    "size": 56,
    "train": 8,
    "validation": 4,
    "test": 6,
    "ood": {"far": ["large/far"]},
    "split_seed": 0,
    "source": "made for this test",
    "licence": "none",
}


@pytest.fixture
def large(tmp_path, monkeypatch):
    """Two classes of photographs of several sizes, in colour, grey and with a palette."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3), ("far", 2)):
        for name in ("n02", "n01"):
            folder = tmp_path / "large" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                height, width = rng.integers(60, 90, 2)
                coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
                coarse.convert(("RGB", "L", "P")[i % 3]).save(folder / f"{i}.png")
    monkeypatch.setenv("SIGMAENS_DATA", str(tmp_path))
    monkeypatch.setattr(images, "STANDARD", ["brightness", "gaussian_noise"])
    return tmp_path


def shown(dataset, inputs, **options):
    """Return what `stream` gives for all inputs, in batches of three."""
    return torch.cat(list(dataset.stream(inputs, torch.arange(len(inputs)).split(3), **options)))


def test_files_are_named_not_read(large):
    dataset = data.build(FILES)
    names = [f"large/val/{label}/{i}.png" for label in ("n01", "n02") for i in range(3)]
    assert dataset.test.inputs.tolist() == names
    assert dataset.test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.classes == ("n01", "n02")
    assert not {*dataset.train.inputs} & {*dataset.validation.inputs}
    assert dataset.is_streamed
    assert dataset.card["shape"] == [56, 56, 3]
    assert dataset.mean == (0.485, 0.456, 0.406)
    files = [path for path in (large / "large").rglob("*.png")]
    assert dataset.card["files"]["count"] == len(files) == 22
    assert dataset.card["files"]["bytes"] == sum(path.stat().st_size for path in files)


def test_named_files_are_saved_and_loaded(large):
    dataset = data.build(FILES)
    data.save(dataset, large / "saved")
    again = data.load(large / "saved")
    assert again.card == dataset.card
    assert torch.equal(
        again.tensor(again.corrupted["gaussian_noise", 3]), dataset.tensor(dataset.corrupted["gaussian_noise", 3])
    )


def test_the_card_knows_every_name_and_size(large):
    key = "sha256 of names and sizes"
    before = data.build(FILES).card["files"][key]
    assert data.build(FILES).card["files"][key] == before
    path = large / "large/far/n01/0.png"
    path.write_bytes(path.read_bytes() + b"0")
    longer = data.build(FILES).card["files"][key]
    path.rename(path.with_name("renamed.png"))
    assert len({before, longer, data.build(FILES).card["files"][key]}) == 3


def test_evaluation_is_the_usual_transform(large):
    dataset = data.build(FILES)
    usual = transforms.Compose(
        [
            transforms.Resize(64),
            transforms.CenterCrop(56),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    truth = torch.stack([usual(Image.open(large / name).convert("RGB")) for name in dataset.test.inputs])
    torch.testing.assert_close(dataset.tensor(dataset.test.inputs), truth)
    for workers in (0, 2):
        assert torch.equal(shown(dataset, dataset.test.inputs, workers=workers), dataset.tensor(dataset.test.inputs))


def test_training_draws_by_seed_and_row_alone(large):
    dataset = data.build(FILES)
    inputs = np.repeat(dataset.train.inputs[:1], 6)
    state = torch.get_rng_state()
    first = shown(dataset, inputs, seed=1, workers=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(shown(dataset, inputs, seed=1, workers=2), first)
    single = torch.cat(list(dataset.stream(inputs, [torch.tensor([4]), torch.tensor([2])], seed=1, workers=0)))
    assert torch.equal(single, first[[4, 2]])
    assert not torch.equal(shown(dataset, inputs, seed=2, workers=0), first)
    assert len({view.numpy().tobytes() for view in first}) == 6


def test_half_of_the_training_images_are_mirrored(large):
    image = np.zeros((60, 60, 3), np.uint8)
    image[:] = np.arange(0, 240, 4, dtype=np.uint8)[:, np.newaxis]
    Image.fromarray(image).save(large / "large/train/n01/ramp.png")
    views = [data.decode("large/train/n01/ramp.png", 56, seed=seed)[28, :, 0].astype(int) for seed in range(100)]
    mirrored = sum(view[0] > view[-1] for view in views)
    assert 35 <= mirrored <= 65
    assert len({(min(view), max(view)) for view in views}) > 20


def test_images_in_memory_are_streamed_as_they_are(folder):
    dataset = data.build(SPEC)
    assert torch.equal(shown(dataset, dataset.test.inputs), dataset.tensor(dataset.test.inputs))
    assert dataset.pixels(dataset.test.inputs) is dataset.test.inputs


def test_files_are_corrupted_when_decoded(large):
    dataset = data.build(FILES)
    assert dataset.card["corruptions"] == "ImageNet-C-style: sigmaens.corruptions at 56×56 pixels"
    assert dataset.corrupted.keys() == {(n, s) for n in images.STANDARD for s in range(1, 6)}
    clean = dataset.pixels(dataset.test.inputs)
    for cell, inputs in dataset.corrupted.items():
        for i, name in enumerate(dataset.test.inputs):
            truth = corruptions.corrupt(clean[i : i + 1], *cell, zlib.crc32(name.encode()))
            np.testing.assert_array_equal(dataset.pixels(inputs[i : i + 1]), truth)


@pytest.fixture
def imagenet_c(large):
    """An ImageNet-C of the test images, each of one colour that tells the severity."""
    for name in images.STANDARD:
        for severity in range(1, 6):
            for file in (large / "large/val").glob("*/*"):
                path = large / "ImageNet-C" / name / str(severity) / file.parent.name / file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = np.random.default_rng(severity).integers(0, 256, (56, 56, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
    return large / "ImageNet-C"


def test_real_corrupted_files_are_taken_as_they_are(imagenet_c):
    dataset = data.build({**FILES, "corrupted": ["ImageNet-C"]})
    assert dataset.card["corruptions"].startswith("ImageNet-C: the files of Hendrycks")
    for (name, severity), inputs in dataset.corrupted.items():
        assert inputs[0] == f"ImageNet-C/{name}/{severity}/n01/0.png"
        truth = np.random.default_rng(severity).integers(0, 256, (56, 56, 3), dtype=np.uint8)
        assert (dataset.pixels(inputs) == truth).all()


def test_real_corrupted_files_must_lie_below_the_root_and_be_unpacked(imagenet_c):
    elsewhere = imagenet_c.rename(imagenet_c.parent.parent / f"{imagenet_c.parent.name}-C")
    with pytest.raises(ValueError, match="-C/brightness/1 must lie below SIGMAENS_DATA="):
        data.build({**FILES, "corrupted": str(elsewhere)})
    (imagenet_c.parent / "ImageNet-C.tar").write_bytes(bytes(10240))
    with pytest.raises(ValueError, match=r"ImageNet-C\.tar is no folder; .*unpack it"):
        data.build({**FILES, "corrupted": ["ImageNet-C"]})


def test_hidden_files_are_not_streamed(large):
    before = data.build(FILES).card
    for part in ("train", "val", "far"):
        hide(large / "large" / part)
    assert data.build(FILES).card == before


def test_a_class_of_too_few_files_is_named(large):
    for file in list((large / "large/train/n02").iterdir())[1:]:
        file.unlink()
    with pytest.raises(ValueError, match="class n02 has 1 of 7 rows, too few for train=3 and validation=2"):
        data.build({**FILES, "train": 3, "validation": 2})


def test_a_missing_corrupted_file_is_named(imagenet_c):
    (imagenet_c / "brightness/4/n02/1.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"no ImageNet-C/brightness/4/n02/1\.png below .*lacks a test image"):
        data.build({**FILES, "corrupted": ["ImageNet-C"]})


def test_a_truncated_file_is_named_by_whoever_decodes_it(large):
    dataset = data.build(FILES)
    name = str(dataset.test.inputs[4])
    whole = (large / name).read_bytes()
    (large / name).write_bytes(whole[: len(whole) // 2])
    for workers in (0, 1):
        with pytest.raises(ValueError, match=rf"{name} is no image, or a damaged one"):
            shown(dataset, dataset.test.inputs, workers=workers)
    (large / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"no data at {name}"):
        dataset.tensor(dataset.test.inputs)


def test_impossible_folders_of_files_are_named(large):
    (large / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIGMAENS_DATA", str(large / "elsewhere"))
        with pytest.raises(ValueError, match=r"large/train must lie below SIGMAENS_DATA="):
            data.build({**FILES, "train_folder": [str(large / "large/train")]})
    for file in (large / "large/val/n02").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"large/val is no folder of images <class>/<file>: .*n02"):
        data.build(FILES)
    (large / "large/val/n02").rmdir()
    with pytest.raises(
        ValueError, match=r"large/val'\] has not the classes of .* it lacks \['n02'\] and has \[\] besides"
    ):
        data.build(FILES)
    with tarfile.open(large / "large.tar", "w") as tar:
        tar.add(large / "large", "large")
    with pytest.raises(ValueError, match=r"large\.tar/large/train is no folder; .*unpack it"):
        data.build({**FILES, "train_folder": ["large.tar/large/train"]})


def test_streamed_files_train_and_predict(large, one_thread):
    dataset = data.build(FILES)
    recipe = training.Recipe(epochs=2, batch_size=3, lr=0.01, schedule="constant")

    def trained():
        torch.manual_seed(0)
        model = baselines.DeepEnsemble([torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 56 * 56, 2))])
        history = training.fit(model, dataset, recipe, seed=1)
        return model, history

    model, history = trained()
    again, repeated = trained()
    assert history == repeated
    assert history[0]["cross_entropy"] != history[1]["cross_entropy"]
    logits = training.predict(model, dataset.test.inputs, dataset, batch_size=4)
    with torch.no_grad():
        truth = again.eval()(dataset.tensor(dataset.test.inputs))
    torch.testing.assert_close(torch.from_numpy(logits), truth)
    shifted = dataset.corrupted["brightness", 5]
    assert not np.allclose(training.predict(model, shifted, dataset), logits)
