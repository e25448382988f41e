"""Sets of images by name or as folders `<class>/<file>`, plain or in a tar archive, and the data sets made of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import lzma
import math
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from . import corruptions, sources
from .corruptions import SEVERITIES, STANDARD
from .data import Dataset, Split, assemble, corrupt_all, locate, open_image, stratify

__all__ = ["files", "folders", "read", "walk"]

_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])  # mean and standard deviation, fractions of 255
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"}


def walk(source: str | list[str]) -> Iterator[tuple[str, str, Image.Image]]:
    """Yield (class, file name, image) of every image in a folder `<class>/<file>`, by class, then by file name.

    The order, and so everything made from it, is the same for a folder, for an archive of it and, if it is a public
    set, for the official files. Images are in colour, of whatever size they have. Names that begin with a dot
    are hidden. Links are followed, in an archive those to its files; one with links for folders is refused.

    Args:
        source: A folder below SIGMAENS_DATA, or one inside an archive there, as `data.locate` takes it; or
            `set:NAME/train` or `set:NAME/test` of `sources.CATALOGUE`. That one is read from the official files if they
            lie below the root of data sets, else from an image folder `NAME/train` or archive of it there, else
            downloaded. Of several sources the first that is there is taken.

    Raises:
        FileNotFoundError: if the source is not there, nor to be downloaded.
        ValueError: if it holds no image, one that cannot be read, or not the classes of its set, or is a damaged
            archive; the file is named.
    """
    for name in [source] if isinstance(source, str) else source:
        if name.startswith("set:"):
            return _walk_set(*sources.known(name))
        with contextlib.suppress(FileNotFoundError):
            return _walk_folder(locate(name))
    return _walk_folder(locate(source))


def read(
    source: str | list[str], size: int | None = None, *, channels: int = 3, first: int | None = None
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images (N, H, W, C) uint8, labels (N,) int64 and the names of the classes, in the order of `walk`.

    Args:
        source: As for `walk`.
        size: Height and width in pixels, to which other images are resized (bilinear); None takes the first image's.
        channels: 3, or 1 for grey levels (ITU-R 601 luma).
        first: How many of each class are taken; None for all.

    Raises:
        ValueError: besides those of `walk`, if `size` is None and an image has another size than the first; if a
            class has fewer than `first` images.
    """
    return _read(source, size, channels, first)[:3]


def _read(
    source: str | list[str], size: int | None, channels: int, first: int | None
) -> tuple[np.ndarray, np.ndarray, list[str], list[tuple[str, str]]]:
    """Return what `read` does, and (class, file name) of each image."""
    images, keys, counts = [], [], Counter()
    for name, file, image in walk(source):
        counts[name] += 1
        if first is not None and counts[name] > first:
            continue
        if channels == 1:
            image = image.convert("L")
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        images.append(np.asarray(image).reshape(*image.size[::-1], channels))
        keys.append((name, file))
        if images[-1].shape != images[0].shape:
            raise ValueError(f"{name}/{file} in {source} has {image.size} pixels, not {images[0].shape[1::-1]}")
    few = [name for name, count in counts.items() if first is not None and count < first]
    if few:
        raise ValueError(f"first={first} is more than the {counts[few[0]]} images of class {few[0]} in {source}")
    classes = list(counts)
    labels = [classes.index(name) for name, _ in keys]
    return np.stack(images), np.array(labels, np.int64), classes, keys


def folders(
    *,
    train_folder: list[str],
    test_folder: list[str],
    size: int,
    train: int,
    validation: int,
    test: int,
    ood: dict[str, list[str]],
    ood_images: int,
    split_seed: int,
    source: str = "",
    licence: str = "",
    channels: int = 3,
    first: Mapping[str, int] = MappingProxyType({}),
    corrupted: Sequence[str] = (),
) -> Dataset:
    """Build a data set from sets of images.

    Args:
        train_folder, test_folder: Where the images are: sources as `walk` takes them.
        size: Height and width in pixels; other images are resized.
        train, validation: How many images of the training folder each split gets, stratified.
        test: How many of the test folder, stratified.
        ood: Sources of each out-of-distribution set; their classes do not matter.
        ood_images: How many of each, drawn at random.
        split_seed: Of the splits, the draws and the corruptions.
        source, licence: What the card says of them; may be left out where all are public sets by name.
        channels: 3 (colour) or 1 (grey).
        first: For train, test or the name in `ood`: only so many images of each class are there to choose from, the
            first in the order of `walk`. A part of a set is then the same whether all of it is there or not.
        corrupted: Folders of CIFAR-10-C or CIFAR-100-C, `<corruption>.npy` and `labels.npy`. If none is there, the
            test images are corrupted here. Their rows are known for a test folder that is `set:NAME/test`.

    Raises:
        FileNotFoundError: if a source is not there.
        ValueError: if a source has too few images or other classes than the training folder; it is named.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    unknown = first.keys() - {"train", "test", *ood}
    if unknown:
        raise ValueError(f"first must give train, test or a set of `ood` a number > 0, got {dict(first)}")
    used = {"train": train_folder, "test": test_folder, **{f"ood/{name}": value for name, value in ood.items()}}
    named = {part: _set_of(where)[0] for part, where in used.items()}
    undescribed = [part for part, entry in named.items() if entry is None]
    if undescribed and not (source and licence):
        raise ValueError(f"source and licence must be given, since {undescribed} are no public sets by name")

    images, labels, classes, _ = _read(train_folder, size, channels, first.get("train"))
    cards = {"train": _describe(named["train"], images, labels)}
    fit, select, _ = stratify(images, labels, {"train": train, "validation": validation}, split_seed, classes)
    images, labels, others, keys = _read(test_folder, size, channels, first.get("test"))
    _compare_classes(train_folder, classes, test_folder, others)
    cards["test"] = _describe(named["test"], images, labels)
    rows = stratify(np.arange(len(images)), labels, {"test": test}, split_seed, classes)[0].inputs
    held = Split(images[rows], labels[rows])

    outside = {}
    for name, folder in ood.items():
        found, labels, _, _ = _read(folder, size, channels, first.get(name))
        cards[f"ood/{name}"] = _describe(named[f"ood/{name}"], found, labels)
        if ood_images > len(found):
            raise ValueError(f"ood_images={ood_images} is more than the {len(found)} images of {name}")
        drawn = np.random.default_rng(split_seed).choice(len(found), ood_images, replace=False)
        outside[name] = found[np.sort(drawn)]

    real = _real(corrupted)
    if real is not None:
        entry, part = _set_of(test_folder)
        if entry is None or part != "test":
            raise ValueError(
                f"{real} cannot be used with {test_folder}: its images are those of set:NAME/test, in that order"
            )
        order = sources.official_rows(entry, part)
        strange = next(("/".join(keys[row]) for row in rows if keys[row] not in order), None)
        if strange is not None:
            raise ValueError(f"{real} cannot be used with {test_folder}: {entry.name}/{part} has no image {strange}")
        shifted = _official_corruptions(real, [order[keys[row]] for row in rows], held)
        made = f"{real.name}: the files of Hendrycks and Dietterich 2019, arXiv 1903.12261; CC BY 4.0"
    else:
        side = size if size >= 32 else size * math.ceil(32 / size)
        small = functools.partial(corruptions.corrupt_small, size=side)
        shifted = corrupt_all(held.inputs, corruptions.corrupt if (channels, side) == (3, size) else small, split_seed)
        reduced = "" if side == size else f", reduced to {size}×{size}"
        made = f"CIFAR-C-style: sigmaens.corruptions at {side}×{side} pixels{reduced}"

    entries = {entry.name: entry for entry in named.values() if entry is not None}.values()
    card: dict[str, Any] = {
        "kind": "image",
        "source": source or "; ".join(entry.source for entry in entries),
        "licence": licence or "; ".join(f"{entry.name}: {entry.licence}" for entry in entries),
        "corruptions": made,
        "classes": classes,
    }
    if entries:
        card["sets"] = {part: described for part, described in cards.items() if described}
    return assemble((fit, select, held), ood=outside, corrupted=shifted, card=card)


def files(
    *,
    train_folder: list[str],
    test_folder: list[str],
    size: int,
    train: int,
    validation: int,
    test: int,
    ood: dict[str, list[str]],
    split_seed: int,
    source: str,
    licence: str,
    corrupted: Sequence[str] = (),
) -> Dataset:
    """Build a data set of image files too large for memory: it names the files, and `Dataset.stream` decodes them.

    The folders hold `<class>/<file>` below SIGMAENS_DATA, and stay there. Normalisation is the usual one of ImageNet.

    Args:
        train_folder, test_folder: Folders of images.
        size: Height and width in pixels that the transforms give.
        train, validation: How many images of the training folder each split gets, stratified.
        test: How many of the test folder, stratified.
        ood: Folders of each out-of-distribution set; their classes do not matter, all their images are taken.
        split_seed: Of the splits.
        source, licence: What the card says of them.
        corrupted: Folders of ImageNet-C, `<corruption>/<severity>/<class>/<file>`; if none is there, the test images
            are corrupted here, when they are decoded.

    Raises:
        FileNotFoundError: if a folder is not there, or a corrupted image.
        ValueError: if a folder has too few images, no image in a class, or other classes than the training folder.
    """
    every: list[str] = []

    def listed(where: str | list[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
        names, labels, classes = _list(where)
        every.extend(names)
        return np.array(names), np.array(labels, np.int64), classes

    names, labels, classes = listed(train_folder)
    fit, select, _ = stratify(names, labels, {"train": train, "validation": validation}, split_seed, classes)
    names, labels, others = listed(test_folder)
    _compare_classes(train_folder, classes, test_folder, others)
    held, _ = stratify(names, labels, {"test": test}, split_seed, classes)
    outside = {name: listed(folder)[0] for name, folder in ood.items()}

    real = _real(corrupted)
    shifted = {}
    for cell in itertools.product(STANDARD, SEVERITIES):
        if real is None:
            shifted[cell] = np.array([f"{cell[0]}/{cell[1]}|{name}" for name in held.inputs])
        else:
            here = _below_root(real.joinpath(*map(str, cell)))
            shifted[cell] = np.array([f"{here}/{'/'.join(name.split('/')[-2:])}" for name in held.inputs])
            missing = next((name for name in shifted[cell] if not Path(sources.root(), name).is_file()), None)
            if missing is not None:
                raise FileNotFoundError(f"no {missing} below {sources.root()}: {real} lacks a test image")

    bytes_of = [(name, Path(sources.root(), name).stat().st_size) for name in sorted(set(every))]
    digest = hashlib.sha256("".join(f"{name} {count}\n" for name, count in bytes_of).encode())
    card = {
        "kind": "image",
        "streamed": True,
        "source": source,
        "licence": licence,
        "corruptions": "ImageNet-C: the files of Hendrycks and Dietterich 2019, arXiv 1903.12261; CC BY 4.0"
        if real is not None
        else f"ImageNet-C-style: sigmaens.corruptions at {size}×{size} pixels",
        "classes": classes,
        "shape": [size, size, 3],
        "normalisation": {"from": "stated: the usual of ImageNet", "mean": _IMAGENET[0], "std": _IMAGENET[1]},
        "files": {
            "count": len(bytes_of),
            "bytes": sum(count for _, count in bytes_of),
            "sha256 of names and sizes": digest.hexdigest(),
        },
    }
    return assemble((fit, select, held), ood=outside, corrupted=shifted, card=card)


def _list(source: str | list[str]) -> tuple[list[str], list[int], list[str]]:
    """List the images of a folder `<class>/<file>`, as torchvision does: names below SIGMAENS_DATA, labels, classes."""
    from torchvision.datasets.folder import find_classes, make_dataset

    path = locate(source)
    _below_root(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; images that are streamed are not read from archives, unpack it")
    try:
        classes = [name for name in find_classes(path)[0] if not name.startswith(".")]
        numbers = {name: number for number, name in enumerate(classes)}
        found = make_dataset(path, numbers, is_valid_file=lambda file: _is_image(Path(file).relative_to(path)))
    except (FileNotFoundError, ValueError) as error:  # a folder without classes, or a class without images
        raise ValueError(f"{path} is no folder of images <class>/<file>: {error}") from None
    return [_below_root(Path(name)) for name, _ in found], [n for _, n in found], classes


def _below_root(path: Path) -> str:
    """Return the name of a file or folder relative to SIGMAENS_DATA, which the names of streamed files are."""
    try:
        return path.relative_to(sources.root()).as_posix()
    except ValueError:
        raise ValueError(f"{path} must lie below SIGMAENS_DATA={sources.root()}, which names are relative to") from None


def _compare_classes(first: Any, classes: list[str], second: Any, others: list[str]) -> None:
    if others != classes:
        lacks, besides = sorted(set(classes) - set(others)), sorted(set(others) - set(classes))
        raise ValueError(f"{second} has not the classes of {first}: it lacks {lacks} and has {besides} besides")


def _set_of(source: str | list[str]) -> tuple[sources.Known | None, str]:
    """Return the public set and its part that are among the places of a source, (None, "") if there is none."""
    names = [source] if isinstance(source, str) else source
    return next((sources.known(name) for name in names if name.startswith("set:")), (None, ""))


def _describe(entry: sources.Known | None, images: np.ndarray, labels: np.ndarray) -> dict[str, Any] | None:
    """Return the card of one public set as it was read; the same wherever it lay."""
    if entry is None:
        return None
    digest = hashlib.sha256(np.ascontiguousarray(images).tobytes() + labels.tobytes()).hexdigest()
    return {
        "name": entry.name,
        "source": entry.source,
        "licence": entry.licence,
        "images": len(images),
        "shape": list(images.shape[1:]),
        "sha256": digest,
    }


def _locate_first(places: list[str]) -> Path | None:
    with contextlib.suppress(FileNotFoundError):
        return locate(places)
    return None


def _real(corrupted: str | Sequence[str]) -> Path | None:
    """Return the folder of corrupted files that is there, None if there is none; one that is packed is refused."""
    places = [corrupted] if isinstance(corrupted, str) else list(corrupted)
    found = _locate_first(places) or _locate_first([f"{place}.tar" for place in places])
    if found is not None and not found.is_dir():
        raise ValueError(f"{found} is no folder; corrupted images are not read from archives, unpack it")
    return found


def _official_corruptions(folder: Path, rows: list[int], held: Split) -> dict[tuple[str, int], np.ndarray]:
    """Read the rows of the test images from `<corruption>.npy`, (50000, 32, 32, 3): 10,000 for each severity.

    Source: paper, section on protocols; Hendrycks and Dietterich 2019.
    """
    labels = _array(folder / "labels.npy", (None,))
    total = len(labels) // len(SEVERITIES)
    every = {severity: (severity - 1) * total + np.array(rows) for severity in SEVERITIES}
    if max(rows) >= total or any((labels[at] != held.labels).any() for at in every.values()):
        raise ValueError(f"{folder / 'labels.npy'} has other labels than the test images: it is of another set")
    shifted = {}
    for name in STANDARD:
        images = _array(folder / f"{name}.npy", (len(labels), *held.inputs.shape[1:]))
        for severity, at in every.items():
            shifted[name, severity] = images[at]
    return shifted


def _array(path: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """Map an array of a file into memory, and compare its type and shape."""
    if not path.is_file():
        raise FileNotFoundError(f"no {path}")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no array, or a truncated one: {error}") from None
    fits = array.ndim == len(shape) and all(want in (None, got) for want, got in zip(shape, array.shape, strict=True))
    if not fits or (array.ndim > 1 and array.dtype != np.uint8):
        raise ValueError(f"{path} has {array.dtype} {array.shape}, not uint8 {shape}")
    return array


def _walk_set(entry: sources.Known, part: str) -> Iterator[tuple[str, str, Image.Image]]:
    """Walk a public set: its official files if they are here, else an image folder of it, else what is downloaded."""
    name = f"{entry.name}/{part}"
    folder = None
    if not sources.lies_here(entry, part):
        folder = _locate_first([name, f"{entry.name}.tar/{name}", f"{entry.name}-{part}.tar/{name}"])
    if folder is None:
        for label, file, image in sources.walk(entry, part):
            yield label, file, image.convert("RGB")
        return
    named, seen = dict(zip(entry.folders, entry.classes, strict=True)), set()
    for count, (label, file, image) in enumerate(_walk_folder(folder), 1):
        if count > entry.sizes[part]:
            raise ValueError(f"{folder} holds more images than {name}, which has {entry.sizes[part]:,}")
        if label not in named:
            raise ValueError(f"{folder} has a folder {label}, which is no class of {entry.name}: {list(named)}")
        seen.add(label)
        yield named[label], file, image
    if seen != named.keys():
        raise ValueError(f"{folder} lacks the classes {sorted(named.keys() - seen)} of {entry.name}")


def _walk_folder(path: Path) -> Iterator[tuple[str, str, Image.Image]]:
    archive = next((parent for parent in (path, *path.parents) if parent.suffix == ".tar" and parent.is_file()), None)
    if archive is None:
        files = {(file.parent.name, file.name): file for file in path.glob("*/*") if _is_image(file.relative_to(path))}
        opened = ((*key, open_image(file, file)) for key, file in sorted(files.items()))
    else:
        opened = _walk_archive(archive, path.relative_to(archive).as_posix())
    found = False
    for item in opened:
        found = True
        yield item
    if not found:
        raise ValueError(f"{path} holds no images in folders of classes, <class>/<file>{'|'.join(sorted(_SUFFIXES))}")


def _walk_archive(archive: Path, inside: str) -> Iterator[tuple[str, str, Image.Image]]:
    try:
        with tarfile.open(archive) as tar:
            members = _members(tar, PurePosixPath(inside))
            for key, member in sorted(members.items(), key=lambda item: item[0]):
                stream = tar.extractfile(member)
                if stream is None:
                    raise ValueError(f"{archive}/{member.name} is no file")
                yield (*key, open_image(io.BytesIO(stream.read()), f"{archive}/{member.name}"))
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, KeyError, RecursionError) as error:
        raise ValueError(f"{archive} is no tar archive, or a damaged one: {error}") from None


def _members(tar: tarfile.TarFile, inside: PurePosixPath) -> dict[tuple[str, str], tarfile.TarInfo]:
    """Return the members `<class>/<file>` of a folder in an archive that is whole."""
    members = {}
    for member in tar.getmembers():
        path = PurePosixPath(member.name)
        if ".." in path.parts:
            raise ValueError(f"{tar.name}/{member.name} has .. in its name")
        if member.issym() and (path.parent == inside or inside.is_relative_to(path)):
            raise ValueError(f"{tar.name}/{member.name} is a link, not a folder: pack with `tar --dereference`")
        if path.parent.parent == inside and _is_image(path.relative_to(inside)):
            members[path.parent.name, path.name] = member
    # Where a header is damaged or missing, tarfile stops without a word: only zeros, and some, may follow.
    tar.fileobj.seek(tar.offset)
    block, rest = tar.fileobj.read(tarfile.BLOCKSIZE), iter(functools.partial(tar.fileobj.read, 1 << 20), b"")
    if block != bytes(tarfile.BLOCKSIZE) or any(chunk.strip(b"\0") for chunk in rest):
        raise tarfile.TarError("it breaks off, or one of its headers is damaged")
    return members


def _is_image(path: PurePath) -> bool:
    """Whether a path `<class>/<file>` is that of an image, and not hidden."""
    return path.suffix.lower() in _SUFFIXES and not any(part.startswith(".") for part in path.parts)
