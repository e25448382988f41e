"""Public sets of small images by name: found where they lie or downloaded with a checksum, read in one order.

The order is canonical: by class, then by original file name, of sets without file names by their position. An image
folder of the same images, in the order of `images.walk`, therefore gives the same bytes as the official files.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import http.client
import io
import os
import pickletools
import socket
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .data import named_root

__all__ = ["CATALOGUE", "Known", "known", "lies_here", "official_rows", "root", "walk"]

_SYSTEM = {"fashion_mnist": Path("/usr/share/datasets/fashion-mnist")}  # Debian's package dataset-fashion-mnist
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOTDIR}
_TIMEOUT = 60.0  # seconds without a byte, after which a download has failed


@dataclass(frozen=True)
class Known:
    """A public set of images.

    Attributes:
        name: As in `set:NAME/train`.
        torchvision: Its class in torchvision.datasets, which knows addresses, checksums and where files lie.
        source, licence: What a card says of it.
        sizes: Images in each part.
        classes: Names in the order of the labels.
        folders: Names of the classes' folders where the set is an image folder, in that order; sorted.
    """

    name: str
    torchvision: str
    source: str
    licence: str
    sizes: dict[str, int]
    classes: tuple[str, ...]
    folders: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    """A file to download, where it or what it was unpacked to may lie below a root (the first is preferred)."""

    places: tuple[str, ...]
    urls: tuple[str, ...]
    md5: str


_DIGITS = tuple("0123456789")
_FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_CIFAR = {"train": 50_000, "test": 10_000}
_MNIST = {"train": 60_000, "test": 10_000}

CATALOGUE = {
    entry.name: entry
    for entry in (
        Known(
            "fashion_mnist",
            "FashionMNIST",
            "Fashion-MNIST, Xiao et al. 2017, arXiv 1708.07747",
            "MIT (Zalando SE)",
            _MNIST,
            tuple(_FASHION.split(", ")),
            _DIGITS,
        ),
        Known(
            "mnist",
            "MNIST",
            "MNIST, LeCun, Cortes and Burges 1998",
            "CC BY-SA 3.0 (LeCun, Cortes)",
            _MNIST,
            _DIGITS,
            _DIGITS,
        ),
        Known(
            "cifar10",
            "CIFAR10",
            "CIFAR-10, Krizhevsky 2009",
            "none stated; research use",
            _CIFAR,
            tuple(_CIFAR10.split()),
            tuple(_CIFAR10.split()),
        ),
        Known(
            "cifar100",
            "CIFAR100",
            "CIFAR-100, Krizhevsky 2009",
            "none stated; research use",
            _CIFAR,
            tuple(_CIFAR100.split()),
            tuple(_CIFAR100.split()),
        ),
        Known(
            "svhn",
            "SVHN",
            "SVHN, cropped digits, Netzer et al. 2011",
            "non-commercial use only",
            {"train": 73_257, "test": 26_032},
            _DIGITS,
            _DIGITS,
        ),
    )
}
"""The public sets by name."""


def known(source: str) -> tuple[Known, str]:
    """Return the entry and the part that a source `set:NAME/PART` names.

    Raises:
        ValueError: naming the source and the ones that exist.
    """
    name, _, part = source.removeprefix("set:").partition("/")
    if name not in CATALOGUE or part not in CATALOGUE[name].sizes:
        raise ValueError(
            f"no set {source!r}; there are set:NAME/train and set:NAME/test with NAME one of {sorted(CATALOGUE)}"
        )
    return CATALOGUE[name], part


def root() -> Path:
    """Return the folder of data sets: what SIGMAENS_DATA names, else `sigmaens` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return named_root() or Path(cache, "sigmaens")


def lies_here(entry: Known, part: str) -> bool:
    """Return whether the official files of a part need no download."""
    return all(_find(entry, file) for file in _files(entry, part))


def walk(entry: Known, part: str) -> Iterator[tuple[str, str, Image.Image]]:
    """Yield (class, file name, image) of a part, in the canonical order; what is missing is downloaded.

    Raises:
        FileNotFoundError: if the files are neither here nor to be had, with the ways to provide them.
        ValueError: if a file is damaged; it is named.
        OSError: if a download cannot be written; the file is named.
    """
    pixels, labels, files = _read(entry, part)
    for i in _order(labels, files):
        yield entry.classes[labels[i]], files[i], Image.fromarray(pixels[i])


def official_rows(entry: Known, part: str) -> dict[tuple[str, str], int]:
    """Return the position of each image, (class, file name), in the official files. Errors as for `walk`."""
    _, labels, files = _read(entry, part)
    return {(entry.classes[label], file): row for row, (label, file) in enumerate(zip(labels, files, strict=True))}


def _order(labels: np.ndarray, files: list[str]) -> list[int]:
    return sorted(range(len(files)), key=lambda i: (labels[i], files[i]))


def _files(entry: Known, part: str) -> list[_File]:
    """Return what a part is read from, as torchvision lays it."""
    import torchvision

    home = getattr(torchvision.datasets, entry.torchvision)
    if hasattr(home, "tgz_md5"):
        return [_File((home.filename, home.base_folder), (home.url,), home.tgz_md5)]
    if hasattr(home, "split_list"):
        url, name, md5 = home.split_list[part][:3]
        return [_File((name,), (url,), md5)]
    wanted = "train" if part == "train" else "t10k"
    return [
        _File(
            (f"{entry.torchvision}/raw/{name}", f"{entry.torchvision}/raw/{name.removesuffix('.gz')}"),
            tuple(f"{mirror}{name}" for mirror in home.mirrors),
            md5,
        )
        for name, md5 in home.resources
        if name.startswith(wanted)
    ]


def _find(entry: Known, file: _File) -> Path | None:
    """Return where a file, or what it was unpacked to, lies: below the root, or in the system's folder.

    The folder of the set's own name is another root, and may hold the file itself.
    """
    own, name = root() / entry.name, Path(file.places[0]).name
    places = [folder / place for folder in (root(), own) for place in file.places] + [own / name]
    if entry.name in _SYSTEM:
        places.append(_SYSTEM[entry.name] / name)
    return next((place for place in places if place.exists()), None)


def _fetch(entry: Known, file: _File) -> Path:
    """Return where a file lies, downloaded if need be, its checksum compared where it is the one to download."""
    path = _find(entry, file) or _download(entry, file)
    if path.name == Path(file.places[0]).name and path.parent != _SYSTEM.get(entry.name):
        _compare(path, path.read_bytes(), file.md5)
    return path


def _compare(path: Any, content: bytes, md5: str) -> None:
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
        raise ValueError(f"{path} has another checksum than the official file, {md5}: delete it to download it again")


def _download(entry: Known, file: _File) -> Path:
    """Download a file below the root: it appears whole, with the right checksum, or not at all."""
    from torchvision.datasets.utils import download_url

    target = root() / file.places[0]
    problems = []
    try:
        root().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root()) as folder, _quiet():
            for url in file.urls:
                try:
                    download_url(url, folder, target.name, file.md5)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(Path(folder, target.name), target)
                    return target
                except RuntimeError:  # how torchvision says that the checksum is another
                    problems.append(f"{url} came incomplete or damaged (its MD5 is not {file.md5})")
                except (OSError, http.client.HTTPException) as error:
                    if getattr(error, "errno", None) in _DISK:
                        raise
                    problems.append(f"{url}: {error}")
    except OSError as error:
        raise OSError(
            error.errno, f"cannot write the download of {entry.name}: {error.strerror}", str(target)
        ) from error
    ways = [
        f"put {' or '.join(file.places)} or an image folder {entry.name}/train/<class>/… below the folder that the "
        "environment variable SIGMAENS_DATA names",
        *(["install Debian's package dataset-fashion-mnist"] if entry.name == "fashion_mnist" else []),
        f"let the download reach its address (tried: {'; '.join(problems)})",
    ]
    raise FileNotFoundError(f"no {entry.name} in {root()}: {', or '.join(ways)}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Show a download's progress to terminals alone, not in notebooks; give up on a connection that says nothing."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _read(entry: Known, part: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images (N, H, W) or (N, H, W, 3) uint8, labels (N,) int64 and file names, in the official order."""
    paths = [_fetch(entry, file) for file in _files(entry, part)]
    if entry.torchvision.startswith("CIFAR"):
        images, labels, files = _cifar(paths[0], entry, part)
    else:
        if entry.torchvision == "SVHN":
            images, labels = _svhn(paths[0])
        else:
            pixels, ranks = sorted(paths, key=lambda path: "labels" in path.name)
            images, labels = _idx(pixels, 3), _idx(ranks, 1).astype(np.int64)
        files = [f"{i:05d}.png" for i in range(len(labels))]
    if not len(images) == len(labels) == entry.sizes[part]:
        raise ValueError(
            f"{paths[0]} holds {len(images)} images and {len(labels)} labels; {entry.name}/{part} has "
            f"{entry.sizes[part]}"
        )
    if not 0 <= labels.min() <= labels.max() < len(entry.classes):
        raise ValueError(f"{paths[-1]} has labels outside 0 … {len(entry.classes) - 1}")
    return images, labels, files


def _idx(path: Path, dimensions: int) -> np.ndarray:
    """Read bytes in the IDX format: two zeros, type 8, number of dimensions, big-endian sizes, values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no gzip file, or a damaged one: {error}") from None
    start = 4 + 4 * dimensions
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist()) if len(content) >= start else ()
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) != start + np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} is no IDX file of {dimensions} dimensions, or a truncated one")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def _svhn(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read a file of SVHN, where the digit 0 has the label 10."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, variable_names=["X", "y"])
        return content["X"].transpose(3, 0, 1, 2), content["y"].ravel().astype(np.int64) % 10
    except Exception as error:  # half a dozen types, from scipy and zlib
        raise ValueError(f"{path} is no file of SVHN, or a damaged one: {error}") from None


def _cifar(path: Path, entry: Known, part: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Read the batches of CIFAR's Python version, from the archive or from the folder it was unpacked to.

    Only that version has the file names, and with them the canonical order.
    """
    import torchvision

    home = getattr(torchvision.datasets, entry.torchvision)
    batches = home.train_list if part == "train" else home.test_list
    if path.is_dir():
        contents = []
        for name, md5 in batches:
            if not (path / name).is_file():
                raise ValueError(f"{path} lacks {name}: delete the folder to download the archive")
            contents.append((path / name).read_bytes())
            _compare(path / name, contents[-1], md5)
    else:
        try:
            with tarfile.open(path) as tar:
                contents = [tar.extractfile(f"{home.base_folder}/{name}").read() for name, _ in batches]
        except (tarfile.TarError, KeyError, EOFError, zlib.error, OSError) as error:
            raise ValueError(f"{path} is no archive of {entry.name}, or a damaged one: {error}") from None
    images, labels, files = zip(
        *(_batch(content, f"{path}/{name}") for content, (name, _) in zip(contents, batches, strict=True)), strict=True
    )
    return np.concatenate(images), np.concatenate(labels), [file for batch in files for file in batch]


_KEYS = {"batch_label", "labels", "fine_labels", "coarse_labels", "data", "filenames"}


def _batch(content: bytes, path: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Read a pickled batch of CIFAR without unpickling it: no name in it is looked up and nothing is called.

    A batch is a dictionary. The values that its opcodes push lie behind each key in the order of writing: numbers and
    texts of a list one by one; of the array, at its end, the order of its memory (C or Fortran) and its bytes.
    """
    fields: dict[str, list[Any]] = {}
    memo: dict[Any, Any] = {}
    current: list[Any] = []
    value: Any = None
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if "PUT" in opcode.name:
                memo[argument] = value
                continue
            value = memo.get(argument) if "GET" in opcode.name else argument
            if opcode.name in ("NEWTRUE", "NEWFALSE"):
                value = opcode.name == "NEWTRUE"
            if isinstance(value, str) and value in _KEYS:
                current = fields.setdefault(value, [])
            elif value is not None:
                current.append(value)
        labels = np.array(fields["fine_labels" if "fine_labels" in fields else "labels"], np.int64)
        fortran, values = fields["data"][-2:]
        pixels = np.frombuffer(values.encode("latin-1"), np.uint8).reshape(
            (len(labels), 3 * 32 * 32), order="F" if fortran else "C"
        )
        files = fields["filenames"]
        if len(files) != len(labels) or not all(isinstance(file, str) for file in files):
            raise ValueError(f"{len(labels)} labels and {len(files)} file names")
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeError) as error:
        raise ValueError(f"{path} is no batch of CIFAR, or a damaged one: {error!r}") from None
    return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels, files
