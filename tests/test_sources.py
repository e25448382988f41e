"""Public sets by name: one order wherever they lie, nothing unpickled, downloads whole or not at all, clear errors."""

import errno
import gzip
import hashlib
import http.client
import http.server
import io
import os
import pickle
import shutil
import socket
import struct
import tarfile
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torchvision
from PIL import Image
from scipy.io import savemat

from sigmaens import data, images, sources

CLASSES = sources.CATALOGUE["cifar10"].classes
PER_CLASS = {"train": 6, "test": 4}


def md5(content):
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def batch(pixels, labels, files, key="labels", fortran=False):
    """Write a batch as Python 2 did: protocol 2, byte strings, a memo."""

    def text(value):
        return b"U" + bytes([len(value)]) + value.encode()

    def listed(items):
        return b"]q\x05(" + b"".join(items) + b"e"

    kind = b"cnumpy\ndtype\n" + text("u1") + b"K\x00K\x01\x87R(K\x03" + text("|")
    kind += b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00tb"
    memory = pixels.tobytes(order="F" if fortran else "C")
    shape = b"".join(b"M" + struct.pack("<H", side) for side in pixels.shape) + b"\x86"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nK\x00\x85" + text("b") + b"\x87R(K\x01" + shape
    )
    array += kind + (b"\x88" if fortran else b"\x89") + b"T" + struct.pack("<i", len(memory)) + memory + b"tb"
    # A text that was written before is fetched from the memo.
    names = [text(file) + b"q" + bytes([100 + i]) for i, file in enumerate(files)]
    names = [b"h" + bytes([100 + files.index(file)]) if file in files[:i] else names[i] for i, file in enumerate(files)]
    return (
        b"\x80\x02}q\x01("
        + text("batch_label") + b"q\x02" + text("testing batch 1 of 1")
        + text(key) + listed([b"K" + bytes([label]) for label in labels])
        + text("data") + array
        + text("filenames") + listed(names)
        + b"u."
    )  # fmt: skip


def drawn(part):
    """Return images, labels and names in an order that is not the canonical one."""
    rng = np.random.default_rng(len(part))
    n = PER_CLASS[part] * len(CLASSES)
    labels = rng.permutation(np.arange(n) % len(CLASSES)).tolist()
    files = [f"{'zebra' if i % 2 else 'auk'}_s_{i:06d}.png" for i in rng.permutation(n)]
    return rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8), labels, files


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The data sets' folder, with nothing in it; CIFAR-10 has six and four images a class, two corruptions suffice."""
    monkeypatch.setenv("SIGMAENS_DATA", str(tmp_path / "sets"))
    monkeypatch.setattr(data, "STANDARD", ["brightness", "gaussian_noise"])
    monkeypatch.setattr(images, "STANDARD", ["brightness", "gaussian_noise"])
    monkeypatch.setattr(sources, "_SYSTEM", {})
    sizes = {part: count * len(CLASSES) for part, count in PER_CLASS.items()}
    monkeypatch.setitem(sources.CATALOGUE, "cifar10", replace(sources.CATALOGUE["cifar10"], sizes=sizes))
    (tmp_path / "sets").mkdir()
    return tmp_path / "sets"


@pytest.fixture
def server(tmp_path):
    """Serve `remote/cifar.tar.gz`, but break off after as many bytes as `sent` says."""
    remote = tmp_path / "remote" / "cifar.tar.gz"
    remote.parent.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        sent, silent = None, 0.0

        def do_GET(self):
            content = remote.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: self.sent])
            time.sleep(self.silent)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        Handler.address = f"http://127.0.0.1:{served.server_port}/cifar.tar.gz"
        yield Handler
        served.shutdown()
        thread.join()


@pytest.fixture
def archive(server, home, tmp_path, monkeypatch):
    """The official archive of that CIFAR-10, at an address of its own."""
    batches = {}
    pixels, labels, files = drawn("train")
    flat = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    for i, half in enumerate((slice(30), slice(30, None))):
        batches[f"data_batch_{i}"] = batch(flat[half], labels[half], files[half])
    pixels, labels, files = drawn("test")
    batches["test_batch"] = batch(pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1), labels, files)
    path = tmp_path / "remote" / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"batches/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    lists = [[name, md5(content)] for name, content in batches.items()]
    for name, value in {
        "base_folder": "batches",
        "filename": "cifar.tar.gz",
        "url": server.address,
        "tgz_md5": md5(path.read_bytes()),
        "train_list": lists[:2],
        "test_list": lists[2:],
    }.items():
        monkeypatch.setattr(torchvision.datasets.CIFAR10, name, value)
    return path


def write_folder(folder, parts=("train", "test")):
    for part in parts:
        for pixels, label, file in zip(*drawn(part), strict=True):
            path = folder / part / CLASSES[label] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


def unpack(archive, folder):
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


def pack(folder, path, name):
    with tarfile.open(path, "w") as tar:
        tar.add(folder, name)


PLACES = {
    "archive": lambda archive, home: (home / "cifar.tar.gz").write_bytes(archive.read_bytes()),
    "archive in a folder": lambda archive, home: (
        (home / "cifar10").mkdir(),
        (home / "cifar10" / "cifar.tar.gz").write_bytes(archive.read_bytes()),
    ),
    "unpacked": lambda archive, home: unpack(archive, home),
    "folder": lambda archive, home: write_folder(home / "cifar10"),
    "tar of the folder": lambda archive, home: (
        write_folder(home.parent / "elsewhere"),
        pack(home.parent / "elsewhere", home / "cifar10.tar", "cifar10"),
    ),
    "download": lambda archive, home: None,
}
SPEC = {
    "name": "images",
    "train_folder": ["set:cifar10/train"],
    "test_folder": ["set:cifar10/test"],
    "size": 32,
    "train": 40,
    "validation": 20,
    "test": 20,
    "ood": {"same": ["set:cifar10/test"]},
    "ood_images": 10,
    "split_seed": 0,
}


def saved(folder):
    """Build and save the data set, and return the bytes that DVC hashes, with the card."""
    dataset = data.build(SPEC)
    data.save(dataset, folder)
    return [(folder / file).read_bytes() for file in ("arrays.npz", "card.json")], dataset.card


@pytest.mark.parametrize("place", PLACES)
def test_a_set_gives_the_same_bytes_wherever_it_lies(archive, home, tmp_path, monkeypatch, place):
    PLACES["archive"](archive, home)
    official, card = saved(tmp_path / "official")
    (home / "cifar.tar.gz").unlink()
    PLACES[place](archive, home)
    if place != "download":
        monkeypatch.setattr(sources, "_download", lambda *_: pytest.fail("it need not be downloaded"))
    assert saved(tmp_path / "saved")[0] == official
    assert card["sets"]["test"]["images"] == 40
    assert card["sets"]["test"]["sha256"] == card["sets"]["ood/same"]["sha256"] != card["sets"]["train"]["sha256"]
    assert card["licence"] == "cifar10: none stated; research use"


def test_the_order_is_by_class_then_original_file_name(archive, home):
    pixels, labels, files = drawn("test")
    order = sorted(range(len(files)), key=lambda i: (CLASSES[labels[i]], files[i]))
    assert order != sorted(range(len(files)), key=lambda i: labels[i])
    found = images.read("set:cifar10/test")
    np.testing.assert_array_equal(found[0], pixels[order])
    assert found[1].tolist() == [labels[i] for i in order]
    assert found[2] == list(CLASSES)


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("key", ["labels", "fine_labels"])
def test_a_batch_is_read_as_unpickling_would(key, fortran):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3072), dtype=np.uint8)
    content = batch(pixels, [3, 0, 9, 3], ["b.png", "a.png", "b.png", "c.png"], key, fortran)
    truth = pickle.loads(content, encoding="latin1")  # which this test wrote itself
    np.testing.assert_array_equal(truth["data"], pixels)
    found, labels, files = sources._batch(content, "a batch")
    np.testing.assert_array_equal(found.transpose(0, 3, 1, 2).reshape(4, 3072), truth["data"])
    assert labels.tolist() == truth[key]
    assert files == truth["filenames"]


def test_nothing_in_a_pickle_is_called(tmp_path):
    harm = f"cbuiltins\nopen\n(U{chr(len(str(tmp_path / 'x')))}{tmp_path / 'x'}U\x01wtR.".encode()
    pickle.loads(harm).close()
    (tmp_path / "x").unlink()
    with pytest.raises(ValueError, match="a batch is no batch of CIFAR"):
        sources._batch(harm, "a batch")
    assert not (tmp_path / "x").exists()


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def fashion(home, monkeypatch):
    """Files of a Fashion-MNIST with three images a class, by name."""
    monkeypatch.setitem(
        sources.CATALOGUE, "fashion_mnist", replace(sources.CATALOGUE["fashion_mnist"], sizes={"test": 30})
    )
    rng = np.random.default_rng(0)
    arrays = {
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (30, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": rng.permutation(np.arange(30) % 10).astype(np.uint8),
    }
    files = {f"{name}.gz": gzip.compress(idx(array), mtime=0) for name, array in arrays.items()}
    monkeypatch.setattr(
        torchvision.datasets.FashionMNIST, "resources", [(name, md5(content)) for name, content in files.items()]
    )
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", ["http://127.0.0.1:1/"])
    return files, *arrays.values()


@pytest.mark.parametrize("place", ["FashionMNIST/raw", "fashion_mnist", "unzipped", "system"])
def test_idx_files_are_found_and_ordered(fashion, home, tmp_path, monkeypatch, place):
    files, pixels, labels = fashion
    folder = {"system": tmp_path / "usr", "unzipped": home / "FashionMNIST/raw"}.get(place, home / place)
    folder.mkdir(parents=True)
    for name, content in files.items():
        if place == "unzipped":
            (folder / name.removesuffix(".gz")).write_bytes(gzip.decompress(content))
        elif place == "system":  # compressed anew by those who packed it, so of another checksum
            (folder / name).write_bytes(gzip.compress(gzip.decompress(content), 1, mtime=1))
        else:
            (folder / name).write_bytes(content)
    monkeypatch.setattr(sources, "_SYSTEM", {"fashion_mnist": tmp_path / "usr"})
    found, ranks, classes = images.read("set:fashion_mnist/test", channels=1)
    order = np.argsort(labels, kind="stable")
    np.testing.assert_array_equal(found, pixels[order, ..., np.newaxis])
    assert ranks.tolist() == labels[order].tolist()
    assert classes[0] == "T-shirt/top"
    assert classes[9] == "Ankle boot"


def test_an_image_folder_of_fashion_mnist_has_the_numbers_of_its_classes(fashion, home):
    _, pixels, labels = fashion
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        path = home / "fashion_mnist/test" / str(label) / f"{i:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    found, ranks, classes = images.read("set:fashion_mnist/test", channels=1)
    order = np.argsort(labels, kind="stable")
    np.testing.assert_array_equal(found, pixels[order, ..., np.newaxis])
    assert ranks.tolist() == labels[order].tolist()
    assert classes == list(sources.CATALOGUE["fashion_mnist"].classes)


def test_svhn_calls_zero_zero(home, monkeypatch):
    monkeypatch.setitem(sources.CATALOGUE, "svhn", replace(sources.CATALOGUE["svhn"], sizes={"test": 20}))
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 20), dtype=np.uint8)
    labels = np.arange(20) % 10 + 1
    savemat(home / "test_32x32.mat", {"X": pixels, "y": labels[:, np.newaxis]})
    checksum = md5((home / "test_32x32.mat").read_bytes())
    monkeypatch.setitem(torchvision.datasets.SVHN.split_list, "test", ["file:///nowhere", "test_32x32.mat", checksum])
    found, ranks, classes = images.read("set:svhn/test")
    order = np.argsort(labels % 10, kind="stable")
    np.testing.assert_array_equal(found, pixels.transpose(3, 0, 1, 2)[order])
    assert ranks.tolist() == sorted((labels % 10).tolist())
    assert classes == list("0123456789")


def test_the_first_of_each_class_are_the_same_of_a_part_and_of_all(archive, home):
    options = {"first": {"train": 4, "test": 2, "same": 2}, "train": 20, "validation": 20, "test": 20}
    (home / "cifar.tar.gz").write_bytes(archive.read_bytes())
    whole = data.build({**SPEC, **options})
    (home / "cifar.tar.gz").unlink()
    write_folder(home / "cifar10")
    for part, kept in (("train", 4), ("test", 2)):
        for folder in (home / "cifar10" / part).iterdir():
            for file in sorted(folder.iterdir())[kept:]:
                file.unlink()
    assert data.build({**SPEC, **options}).card == whole.card
    with pytest.raises(ValueError, match="first=5 is more than the 4 images of class airplane"):
        data.build({**SPEC, **options, "first": {"train": 5}})
    with pytest.raises(ValueError, match="first must give train, test or a set of `ood` a number > 0"):
        data.build({**SPEC, **options, "first": {"far": 5}})


def corrupted_files(folder, labels):
    """Write a CIFAR-10-C whose pixels tell image and severity."""
    folder.mkdir()
    n = len(labels)
    np.save(folder / "labels.npy", np.tile(labels, 5))
    for name in images.STANDARD:
        rows = np.empty((5 * n, 32, 32, 3), np.uint8)
        rows[..., 0], rows[..., 1] = (
            np.tile(np.arange(n), 5)[:, None, None],
            np.repeat(np.arange(1, 6), n)[:, None, None],
        )
        rows[..., 2] = len(name)
        np.save(folder / f"{name}.npy", rows)


@pytest.mark.parametrize("place", ["archive", "folder"])
def test_real_corrupted_images_are_those_of_the_test_images(archive, home, place):
    PLACES[place](archive, home)
    pixels, labels, _ = drawn("test")
    corrupted_files(home / "CIFAR-10-C", labels)
    dataset = data.build({**SPEC, "corrupted": ["CIFAR-10-C"]})
    assert data.build({**SPEC, "corrupted": "CIFAR-10-C"}).card["sha256"] == dataset.card["sha256"]
    for (name, severity), found in dataset.corrupted.items():
        np.testing.assert_array_equal(pixels[found[:, 0, 0, 0]], dataset.test.inputs)
        assert (found[..., 1] == severity).all()
        assert (found[..., 2] == len(name)).all()
    assert dataset.card["corruptions"].startswith("CIFAR-10-C: the files of Hendrycks")


def test_without_real_corrupted_images_the_card_says_so(archive, home):
    PLACES["archive"](archive, home)
    dataset = data.build({**SPEC, "corrupted": ["CIFAR-10-C"]})
    assert dataset.card["corruptions"] == "CIFAR-C-style: sigmaens.corruptions at 32×32 pixels"
    assert dataset.corrupted["brightness", 5].mean() > dataset.test.inputs.mean()


def save_zipped(path):
    with path.open("wb") as stream:
        np.savez(stream, np.zeros((200, 32, 32, 3), np.uint8))


def pack_away(folder):
    pack(folder, folder.with_suffix(".tar"), folder.name)
    folder.rename(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda c: (c / "brightness.npy").unlink(), FileNotFoundError, r"no .*brightness\.npy"),
        (lambda c: (c / "brightness.npy").write_bytes(b"x"), ValueError, r"brightness\.npy is no array"),
        (lambda c: os.truncate(c / "brightness.npy", 5000), ValueError, r"brightness\.npy is no array, or a truncated"),
        (
            lambda c: np.save(c / "brightness.npy", np.zeros((200, 32, 32), np.uint8)),
            ValueError,
            r"brightness\.npy has uint8 \(200, 32, 32\), not uint8 \(200, 32, 32, 3\)",
        ),
        (lambda c: np.save(c / "labels.npy", np.zeros(200, int)), ValueError, r"labels\.npy has other labels"),
        (
            lambda c: np.save(c / "labels.npy", np.r_[np.load(c / "labels.npy")[:160], np.zeros(40, int)]),
            ValueError,
            r"labels\.npy has other labels",
        ),
        (lambda c: save_zipped(c / "brightness.npy"), ValueError, r"brightness\.npy is no array"),
        (pack_away, ValueError, r"CIFAR-10-C\.tar is no folder; .*unpack it"),
        (
            lambda c: np.save(c / "labels.npy", np.array([{}]), allow_pickle=True),
            ValueError,
            r"labels\.npy is no array",
        ),
    ],
)
def test_spoiled_corrupted_images_are_named(archive, home, spoil, error, message):
    PLACES["archive"](archive, home)
    corrupted_files(home / "CIFAR-10-C", drawn("test")[1])
    spoil(home / "CIFAR-10-C")
    with pytest.raises(error, match=message):
        data.build({**SPEC, "corrupted": ["CIFAR-10-C"]})


def test_corrupted_images_without_a_known_order_are_refused(archive, home):
    write_folder(home / "mine")
    corrupted_files(home / "CIFAR-10-C", drawn("test")[1])
    spec = {**SPEC, "train_folder": "mine/train", "test_folder": "mine/test", "source": "mine", "licence": "none"}
    with pytest.raises(ValueError, match="CIFAR-10-C cannot be used"):
        data.build({**spec, "corrupted": ["CIFAR-10-C"]})


def test_corrupted_images_belong_to_the_test_part(archive, home):
    PLACES["archive"](archive, home)
    corrupted_files(home / "CIFAR-10-C", drawn("test")[1])
    with pytest.raises(ValueError, match=r"CIFAR-10-C cannot be used with set:cifar10/train: .* set:NAME/test"):
        data.build({**SPEC, "test_folder": "set:cifar10/train", "corrupted": ["CIFAR-10-C"]})


def test_an_image_that_the_official_files_lack_is_named(archive, home):
    write_folder(home / "cifar10")
    for file in (home / "cifar10/test/frog").iterdir():
        file.rename(file.with_name(f"new_{file.name}"))
    corrupted_files(home / "CIFAR-10-C", drawn("test")[1])
    with pytest.raises(ValueError, match=r"CIFAR-10-C cannot be used .*: cifar10/test has no image frog/new_\w+\.png"):
        data.build({**SPEC, "corrupted": ["CIFAR-10-C"]})


def fill_archive(home, archive, monkeypatch):
    (home / "cifar.tar.gz").write_bytes(archive.read_bytes()[:-100])


def damaged_in_a_folder(home, archive, monkeypatch):
    (home / "cifar10").mkdir()
    (home / "cifar10/cifar.tar.gz").write_bytes(archive.read_bytes()[:-100])


def no_archive(home, archive, monkeypatch):
    (home / "cifar.tar.gz").write_bytes(b"<html>moved</html>")
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", md5(b"<html>moved</html>"))


def other_archive(home, archive, monkeypatch):
    pack(home, home.parent / "x.tar", "nothing")
    (home / "cifar.tar.gz").write_bytes((home.parent / "x.tar").read_bytes())
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", md5((home / "cifar.tar.gz").read_bytes()))


def damaged_batch(home, archive, monkeypatch):
    unpack(archive, home)
    os.truncate(home / "batches/test_batch", 1000)


def missing_batch(home, archive, monkeypatch):
    unpack(archive, home)
    (home / "batches/test_batch").unlink()


def missing_class(home, archive, monkeypatch):
    write_folder(home / "cifar10")
    for file in (home / "cifar10/test/frog").iterdir():
        file.unlink()


def foreign_class(home, archive, monkeypatch):
    write_folder(home / "cifar10")
    (home / "cifar10/test/frog").rename(home / "cifar10/test/toad")


def too_many_images(home, archive, monkeypatch):
    write_folder(home / "cifar10")
    shutil.copy(next((home / "cifar10/test/frog").iterdir()), home / "cifar10/test/frog/another.png")


def fewer_images(home, archive, monkeypatch):
    (home / "cifar.tar.gz").write_bytes(archive.read_bytes())
    entry = sources.CATALOGUE["cifar10"]
    monkeypatch.setitem(sources.CATALOGUE, "cifar10", replace(entry, sizes={"train": 60, "test": 41}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (fill_archive, r"cifar\.tar\.gz has another checksum than the official file, \w+: delete it"),
        (damaged_in_a_folder, r"cifar10/cifar\.tar\.gz has another checksum than the official file"),
        (no_archive, r"cifar\.tar\.gz is no archive of cifar10"),
        (other_archive, r"cifar\.tar\.gz is no archive of cifar10, or a damaged one: .*batches/test_batch"),
        (damaged_batch, r"test_batch has another checksum"),
        (missing_batch, r"batches lacks test_batch: delete the folder"),
        (missing_class, r"cifar10/test lacks the classes \['frog'\] of cifar10"),
        (foreign_class, r"cifar10/test has a folder toad, which is no class of cifar10"),
        (too_many_images, r"cifar10/test holds more images than cifar10/test, which has 40"),
        (fewer_images, r"cifar\.tar\.gz holds 40 images and 40 labels; cifar10/test has 41"),
    ],
)
def test_spoiled_sets_are_named(archive, home, monkeypatch, spoil, message):
    spoil(home, archive, monkeypatch)
    with pytest.raises(ValueError, match=message):
        images.read("set:cifar10/test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "no gzip file"),
        (gzip.compress(idx(np.zeros((30, 28, 28), np.uint8)))[:-20], "no gzip file, or a damaged one"),
        (gzip.compress(idx(np.zeros((30, 28, 28), np.uint8))[:-1]), "no IDX file of 3 dimensions, or a truncated one"),
        (gzip.compress(idx(np.zeros(30, np.uint8))), "no IDX file of 3 dimensions"),
        (gzip.compress(b""), "no IDX file of 3 dimensions"),
        (
            gzip.compress(idx(np.zeros((29, 28, 28), np.uint8))),
            "holds 29 images and 30 labels; fashion_mnist/test has 30",
        ),
    ],
)
def test_damaged_idx_files_are_named(fashion, home, tmp_path, monkeypatch, content, message):
    (tmp_path / "usr").mkdir()
    for name, whole in fashion[0].items():
        (tmp_path / "usr" / name).write_bytes(content if "images" in name else whole)
    monkeypatch.setattr(sources, "_SYSTEM", {"fashion_mnist": tmp_path / "usr"})
    with pytest.raises(ValueError, match=rf"t10k-images-idx3-ubyte\.gz.* {message}"):
        images.read("set:fashion_mnist/test")


def test_an_idx_file_of_another_checksum_is_named(fashion, home):
    (home / "FashionMNIST/raw").mkdir(parents=True)
    for name, content in fashion[0].items():
        other = gzip.compress(gzip.decompress(content), 1, mtime=1)
        (home / "FashionMNIST/raw" / name).write_bytes(other if "images" in name else content)
    with pytest.raises(ValueError, match=r"FashionMNIST/raw/t10k-images-idx3-ubyte\.gz has another checksum"):
        images.read("set:fashion_mnist/test")


def test_one_of_two_files_is_not_the_set(fashion, home):
    entry = sources.CATALOGUE["fashion_mnist"]
    (home / "FashionMNIST/raw").mkdir(parents=True)
    for count, (name, content) in enumerate(fashion[0].items()):
        assert not sources.lies_here(entry, "test"), count
        (home / "FashionMNIST/raw" / name).write_bytes(content)
    assert sources.lies_here(entry, "test")


def test_labels_outside_the_classes_are_named(fashion, home, tmp_path, monkeypatch):
    (tmp_path / "usr").mkdir()
    for name, whole in fashion[0].items():
        wrong = gzip.compress(idx(np.full(30, 10, np.uint8)))
        (tmp_path / "usr" / name).write_bytes(wrong if "labels" in name else whole)
    monkeypatch.setattr(sources, "_SYSTEM", {"fashion_mnist": tmp_path / "usr"})
    with pytest.raises(ValueError, match=r"labels-idx1-ubyte\.gz has labels outside 0 … 9"):
        images.read("set:fashion_mnist/test")


def test_unknown_sets_are_named():
    for name in ("set:cifar11/train", "set:cifar10/validation", "set:cifar10"):
        with pytest.raises(ValueError, match=rf"no set '{name}'; there are set:NAME/train"):
            images.read(name)


def test_the_catalogue_agrees_with_torchvision():
    assert sources.CATALOGUE["fashion_mnist"].classes == tuple(torchvision.datasets.FashionMNIST.classes)
    for entry in sources.CATALOGUE.values():
        assert len(entry.classes) == len(entry.folders) == (100 if entry.name == "cifar100" else 10)
        assert list(entry.folders) == sorted(entry.folders)
        for part in ("train", "test"):
            files = sources._files(entry, part)
            assert len(files) == (2 if "mnist" in entry.name else 1)
            assert all(len(file.md5) == 32 and file.urls[0].startswith("http") for file in files)


def leftovers(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_download_is_kept_and_not_repeated(archive, home):
    first = images.read("set:cifar10/test")
    assert leftovers(home) == ["cifar.tar.gz"]
    archive.unlink()
    np.testing.assert_array_equal(images.read("set:cifar10/test")[0], first[0])


def test_without_a_named_folder_downloads_go_to_the_cache(archive, home, tmp_path, monkeypatch):
    monkeypatch.delenv("SIGMAENS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    images.read("set:cifar10/test")
    assert leftovers(tmp_path / "cache") == ["sigmaens", "sigmaens/cifar.tar.gz"]


def test_an_interrupted_download_leaves_nothing_and_can_be_repeated(archive, server, home):
    server.sent = 1000
    with pytest.raises(
        FileNotFoundError, match=r"no cifar10 in .*put cifar\.tar\.gz .*SIGMAENS_DATA.*\(tried: http://"
    ):
        images.read("set:cifar10/test")
    assert leftovers(home) == []
    server.sent = None
    assert len(images.read("set:cifar10/test")[0]) == 40


def test_a_download_that_says_nothing_any_more_is_given_up(archive, server, home, monkeypatch):
    monkeypatch.setattr(sources, "_TIMEOUT", 0.1)
    server.sent, server.silent = 1000, 1.0
    with pytest.raises(FileNotFoundError, match=r"no cifar10 in .*tried: .*timed out"):
        images.read("set:cifar10/test")
    assert leftovers(home) == []
    assert socket.getdefaulttimeout() is None


def test_a_download_of_another_checksum_leaves_nothing(archive, home):
    archive.write_bytes(archive.read_bytes() + b"more")
    with pytest.raises(FileNotFoundError, match=r"came incomplete or damaged \(its MD5 is not"):
        images.read("set:cifar10/test")
    assert leftovers(home) == []


def test_what_can_be_done_without_a_network_is_said(fashion, home):
    with pytest.raises(FileNotFoundError) as caught:
        images.read("set:fashion_mnist/test")
    for way in ("FashionMNIST/raw/t10k-images", "SIGMAENS_DATA", "Debian's package", "let the download reach"):
        assert way in str(caught.value)
    assert leftovers(home) == []


def test_a_full_disk_is_named_and_nothing_stays(archive, home, full_disk):
    too_large = r"cannot write the download of cifar10: File too large: '.*cifar\.tar\.gz'"
    with pytest.raises(OSError, match=too_large), full_disk():
        images.read("set:cifar10/test")
    assert leftovers(home) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_is_not_taken_for_a_missing_network(archive, home, monkeypatch, number):
    def full(url, folder, *_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", full)
    with pytest.raises(OSError, match=rf"cannot write the download of cifar10: {os.strerror(number)}") as caught:
        images.read("set:cifar10/test")
    assert caught.value.errno == number
    assert leftovers(home) == []


def test_an_answer_that_is_no_http_is_told(archive, home, monkeypatch):
    def broken(*_):
        raise http.client.IncompleteRead(b"", 10)

    monkeypatch.setattr(torchvision.datasets.utils, "download_url", broken)
    with pytest.raises(FileNotFoundError, match=r"no cifar10 in .*tried: http.*IncompleteRead"):
        images.read("set:cifar10/test")
    assert leftovers(home) == []


def test_a_folder_that_takes_no_files_is_named(archive, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SIGMAENS_DATA", str(tmp_path / "file" / "sets"))
    with pytest.raises(OSError, match=r"cannot write the download of cifar10: Not a directory: '.*cifar\.tar\.gz'"):
        images.read("set:cifar10/test")
