"""Folders of images, `<class>/<file>`, plain or inside a tar archive: reading them, and the data sets made of them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from . import corruptions
from .data import Dataset, assemble, corrupt_all, locate, stratify

__all__ = ["folders", "read", "walk"]

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"}


def walk(source: str | list[str]) -> Iterator[tuple[str, str, Image.Image]]:
    """Yield (class, file name, image) of every image in a folder `<class>/<file>`, by class, then by file name.

    The order, and so everything made from it, is the same for a folder and for an archive of it. Images are in
    colour, of whatever size they have.

    Args:
        source: A folder below SIGMAENS_DATA, or one inside an archive there, as `data.locate` takes it.

    Raises:
        FileNotFoundError: if the source is not there.
        ValueError: if it holds no image, or one that cannot be read; the file is named.
    """
    path = locate(source)
    archive = next((parent for parent in (path, *path.parents) if parent.suffix == ".tar" and parent.is_file()), None)
    if archive is None:
        files = {(file.parent.name, file.name): file for file in path.glob("*/*") if file.suffix.lower() in _SUFFIXES}
        opened = ((*key, _open(file.read_bytes(), file)) for key, file in sorted(files.items()))
    else:
        opened = _walk_archive(archive, path.relative_to(archive).as_posix())
    found = False
    for item in opened:
        found = True
        yield item
    if not found:
        raise ValueError(f"{path} holds no images in folders of classes, <class>/<file>{'|'.join(sorted(_SUFFIXES))}")


def read(source: str | list[str], size: int | None = None) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images (N, H, W, 3) uint8, labels (N,) int64 and the names of the classes, in the order of `walk`.

    Args:
        source: As for `walk`.
        size: Height and width in pixels, to which other images are resized (bilinear); None takes the first image's.

    Raises:
        ValueError: besides those of `walk`, if `size` is None and an image has another size than the first.
    """
    images, names = [], []
    for name, file, image in walk(source):
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        images.append(np.asarray(image))
        names.append(name)
        if images[-1].shape != images[0].shape:
            raise ValueError(f"{name}/{file} in {source} has {image.size} pixels, not {images[0].shape[1::-1]}")
    classes, labels = np.unique(names, return_inverse=True)
    return np.stack(images), labels.astype(np.int64), [str(name) for name in classes]


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
    source: str,
    licence: str,
) -> Dataset:
    """Build a data set from folders of images.

    Args:
        train_folder, test_folder: Where the images are, `<class>/<file>`: sources as `data.locate` takes them.
        size: Height and width, at least 32 pixels; other images are resized.
        train, validation: How many images of the training folder each split gets, stratified.
        test: How many of the test folder, stratified.
        ood: Folders of each out-of-distribution set; their classes do not matter.
        ood_images: How many of each, drawn at random.
        split_seed: Of the splits, the draws and the corruptions.
        source, licence: What the card says of them.

    Raises:
        FileNotFoundError: if a folder is not there.
        ValueError: if a folder has too few images or other classes than the training folder; it is named.
    """
    images, labels, classes = read(train_folder, size)
    fit, select, _ = stratify(images, labels, {"train": train, "validation": validation}, split_seed)
    images, labels, others = read(test_folder, size)
    if others != classes:
        raise ValueError(f"{test_folder} has the classes {others}, not those of {train_folder}, {classes}")
    held, _ = stratify(images, labels, {"test": test}, split_seed)

    outside = {}
    for name, folder in ood.items():
        found, _, _ = read(folder, size)
        if ood_images > len(found):
            raise ValueError(f"ood_images={ood_images} is more than the {len(found)} images of {name}")
        drawn = np.random.default_rng(split_seed).choice(len(found), ood_images, replace=False)
        outside[name] = found[np.sort(drawn)]
    card: dict[str, Any] = {
        "kind": "image",
        "source": source,
        "licence": licence,
        "corruptions": f"CIFAR-C-style: sigmaens.corruptions at {size}×{size} pixels",
        "classes": classes,
    }
    corrupted = corrupt_all(held.inputs, corruptions.corrupt, split_seed)
    return assemble((fit, select, held), ood=outside, corrupted=corrupted, card=card)


def _walk_archive(archive: Path, inside: str) -> Iterator[tuple[str, str, Image.Image]]:
    try:
        with tarfile.open(archive) as tar:
            members = {}
            for member in tar.getmembers():
                path = PurePosixPath(member.name)
                if member.isfile() and path.suffix.lower() in _SUFFIXES and str(path.parent.parent) == inside:
                    members[path.parent.name, path.name] = member
            for key, member in sorted(members.items(), key=lambda item: item[0]):
                yield (*key, _open(tar.extractfile(member).read(), f"{archive}/{member.name}"))
    except tarfile.TarError as error:
        raise ValueError(f"{archive} is no tar archive, or a damaged one: {error}") from None


def _open(content: bytes, name: Any) -> Image.Image:
    try:
        return Image.open(io.BytesIO(content)).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{name} is no image, or a damaged one: {error}") from None
