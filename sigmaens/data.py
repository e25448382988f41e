"""Data sets by name: uint8 arrays with a card that says where they come from, and the way from arrays to batches."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigmaens.corruptions import SEVERITIES, STANDARD, block_mean, corrupt_small

__all__ = ["Dataset", "Split", "augment", "black", "build", "check_labels", "load", "save", "to_tensor"]

_FORMAT = 1


@dataclass(frozen=True)
class Split:
    """Images (N, H, W, C) uint8 and their labels (N,) int64."""

    images: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A data set with everything it is evaluated on.

    Attributes:
        train, validation, test: disjoint splits; validation comes out of the training data, and test selects nothing.
        ood: images (N, H, W, C) uint8 of each out-of-distribution set.
        corrupted: the test images, in order, under each (corruption, severity).
        card: source, licence, classes, sizes, normalisation, spec of the build and SHA-256 of the arrays; plain JSON.
    """

    train: Split
    validation: Split
    test: Split
    ood: dict[str, np.ndarray]
    corrupted: dict[tuple[str, int], np.ndarray]
    card: dict[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return tuple(self.card["classes"])

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of the training images for each channel, as a fraction of 255."""
        return tuple(self.card["normalisation"]["mean"])

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the training images for each channel, as a fraction of 255."""
        return tuple(self.card["normalisation"]["std"])


def build(spec: dict[str, Any]) -> Dataset:
    """Build the data set that a `data` block of `params.yaml` describes.

    The spec alone decides the result; the global random states neither matter nor change.

    Args:
        spec: `name` and that builder's own options, all of them. For `digits` (8×8 grey, scikit-learn): `train` and
            `validation` sizes, the rest being the test split; `ood_images` for each of the two photographs;
            `split_seed` ≥ 0 for splits, patches and corruptions.

    Raises:
        TypeError: an option that is not an integer.
        ValueError: an unknown name; a missing, unknown or impossible option, by name.
    """
    options = dict(spec)
    name = options.pop("name", None)
    if name not in _BUILDERS:
        raise ValueError(f"unknown data set {name!r}; there are {sorted(_BUILDERS)}")
    expected = set(inspect.signature(_BUILDERS[name]).parameters)
    if options.keys() != expected:
        raise ValueError(
            f"options of data set {name!r} must be {sorted(expected)}: "
            f"missing {sorted(expected - options.keys())}, unknown {sorted(options.keys() - expected)}"
        )
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option} must be an integer, got {value!r}")
        least = 0 if option.endswith("seed") else 1
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}")
    dataset = _BUILDERS[name](**options)
    return replace(dataset, card={**dataset.card, "spec": dict(spec)})


def save(dataset: Dataset, folder: str | Path) -> None:
    """Write `arrays.npz` and `card.json`; equal data sets give equal bytes, whenever they are written.

    Each file appears whole or not at all, the card last: what an interrupted call leaves behind, `load` refuses.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for file, write in (
        ("arrays.npz", lambda stream: np.savez_compressed(stream, **_flatten(dataset))),
        ("card.json", lambda stream: stream.write((json.dumps(dataset.card, indent=2) + "\n").encode())),
    ):
        unfinished = folder / f".{file}.unfinished"
        with unfinished.open("wb") as stream:
            write(stream)
        os.replace(unfinished, folder / file)


def load(folder: str | Path) -> Dataset:
    """Read what `save` wrote.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not what `save` writes, or the arrays do not match the card's checksum.
    """
    folder = Path(folder)
    for file in ("card.json", "arrays.npz"):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"no {file} in {folder}: build the data set first")
    try:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        known, checksum = card["format"], card["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'card.json'} is not the card of a data set") from error
    if known != _FORMAT:
        raise ValueError(f"{folder / 'card.json'} has format {known!r}; this version reads {_FORMAT}")
    try:
        # A stream of our own, since numpy leaves the file open when an archive is damaged.
        with (folder / "arrays.npz").open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = dict(archive)
        found = _checksum(arrays)
    except Exception as error:  # half a dozen types, from numpy, zipfile and zlib
        raise ValueError(f"{folder / 'arrays.npz'} is damaged or no archive of arrays") from error
    if found != checksum:
        raise ValueError(f"{folder / 'arrays.npz'} does not match the checksum in its card.json: build it again")
    return _unflatten(arrays, card)


def to_tensor(images: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return (images / 255 − mean) / std as float32 (N, C, H, W) in channels-last memory.

    Args:
        images: (N, H, W, C) uint8.
        mean, std: fractions of 255 for each of the C channels; std > 0.

    Raises:
        TypeError: images that are not a uint8 array.
        ValueError: another shape, or a mean or std of another length.
    """
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise TypeError(f"images must be a uint8 array, got {getattr(images, 'dtype', type(images).__name__)}")
    if images.ndim != 4 or not len(mean) == len(std) == images.shape[3]:
        raise ValueError(
            f"images must have shape (N, H, W, C) with C means and standard deviations, "
            f"got {images.shape}, {len(mean)} and {len(std)}"
        )
    scaled = (images / np.float32(255) - np.float32(mean)) / np.float32(std)
    return torch.from_numpy(scaled).permute(0, 3, 1, 2)


def black(mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return the value (C,) that `to_tensor` gives a black pixel."""
    return to_tensor(np.zeros((1, 1, 1, len(mean)), dtype=np.uint8), mean, std).flatten()


def augment(batch: Tensor, crop: int, flip: bool, generator: torch.Generator, fill: Tensor) -> Tensor:
    """Shift each image by up to `crop` pixels along both sides and mirror half of them.

    The standard protocol (paper section 5): pad by `crop`, cut out the original size anywhere, flip left-right with
    probability ½. Raw images are padded with black; on normalised ones that is `fill = black(mean, std)`, not zero.

    Args:
        batch: (B, C, H, W).
        crop: ≥ 0, padding in pixels.
        flip: whether to mirror.
        generator: decides every offset and flip.
        fill: (C,), the padding.

    Returns:
        (B, C, H, W) in channels-last memory.

    Raises:
        ValueError: a negative crop.
    """
    if crop < 0:
        raise ValueError(f"crop must be ≥ 0, got {crop}")
    b, c, h, w = batch.shape
    padded = fill.to(batch).view(1, c, 1, 1).repeat(b, 1, h + 2 * crop, w + 2 * crop)
    padded[:, :, crop : crop + h, crop : crop + w] = batch
    draw = {"generator": generator, "device": generator.device}
    top, left = torch.randint(2 * crop + 1, (2, b, 1), **draw).to(batch.device)
    rows = top + torch.arange(h, device=batch.device)
    columns = left + torch.arange(w, device=batch.device)
    if flip:
        mirrored = torch.randint(2, (b, 1), **draw).to(batch.device).bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    image = torch.arange(b, device=batch.device).view(b, 1, 1)
    return padded[image, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def check_labels(labels: np.ndarray | Tensor, classes: int) -> None:
    """Raise unless all labels are integers in 0 … classes − 1.

    Raises:
        TypeError: labels that are not integers.
        ValueError: naming the first label outside and its index.
    """
    values = np.asarray(labels)
    if not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"labels must be integers, got {values.dtype}")
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"labels[{i}] is {values.flat[i]}; {classes} classes allow 0 … {classes - 1}")


def _digits(train: int, validation: int, ood_images: int, split_seed: int) -> Dataset:
    """Digits of 8×8 pixels: grey levels 0 … 16 scaled to 0 … 255, rounded to nearest, ties to even.

    Out of distribution are patches of two photographs: 32×32 grey pixels anywhere, reduced to 8×8 by block means.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    splits = _stratify(images, digits.target.astype(np.int64), train, validation, split_seed)
    return _assemble(
        splits,
        ood={name: _patches(name, ood_images, split_seed) for name in ("china", "flower")},
        corrupted=_corrupt(splits[2].images, split_seed),
        card={
            "source": "UCI optical recognition of handwritten digits, test part, as in scikit-learn's load_digits; "
            "out of distribution: scikit-learn's photographs china.jpg and flower.jpg",
            "licence": "digits CC BY 4.0 (E. Alpaydin, C. Kaynak); photographs CC BY 2.0 (danielbuechele, vultilion)",
            "corruptions": "CIFAR-C-style: sigmaens.corruptions at 32×32 pixels, reduced to 8×8",
            "classes": [str(name) for name in digits.target_names],
        },
    )


_BUILDERS = {"digits": _digits}


def _stratify(
    images: np.ndarray, labels: np.ndarray, train: int, validation: int, seed: int
) -> tuple[Split, Split, Split]:
    """Split into train, validation and rest, each with the classes in the same proportions and the original order."""
    from sklearn.model_selection import train_test_split

    classes, rest = len(np.unique(labels)), len(labels) - train - validation
    if min(train, validation, rest) < classes:
        raise ValueError(
            f"train={train} and validation={validation} leave {rest} of {len(labels)} images for the test; "
            f"each needs at least {classes}, one a class"
        )
    fit, others = train_test_split(np.arange(len(labels)), train_size=train, stratify=labels, random_state=seed)
    select, test = train_test_split(others, train_size=validation, stratify=labels[others], random_state=seed)
    return tuple(Split(images[index], labels[index]) for index in map(np.sort, (fit, select, test)))


def _patches(photograph: str, count: int, seed: int) -> np.ndarray:
    """Cut grey patches (count, 8, 8, 1) out of one of scikit-learn's photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    grey = np.asarray(Image.fromarray(load_sample_image(f"{photograph}.jpg")).convert("L"))
    windows = np.lib.stride_tricks.sliding_window_view(grey, (32, 32))
    rng = np.random.default_rng([seed, zlib.crc32(photograph.encode())])
    rows, columns = (rng.integers(size, size=count) for size in windows.shape[:2])
    return block_mean(windows[rows, columns][..., np.newaxis], factor=4, channels=1)


def _corrupt(images: np.ndarray, seed: int) -> dict[tuple[str, int], np.ndarray]:
    """Apply the 15 standard corruptions at every severity; a terminal sees the progress."""
    from tqdm import tqdm

    cells = [(name, severity) for name in STANDARD for severity in SEVERITIES]
    return {cell: corrupt_small(images, *cell, seed) for cell in tqdm(cells, desc="corruptions", disable=None)}


def _assemble(
    splits: tuple[Split, Split, Split],
    ood: dict[str, np.ndarray],
    corrupted: dict[tuple[str, int], np.ndarray],
    card: dict[str, Any],
) -> Dataset:
    """Complete the card with what follows from the arrays."""
    train, validation, test = splits
    for split in splits:
        check_labels(split.labels, len(card["classes"]))
    pixels = train.images.astype(np.float64) / 255
    card = {
        "format": _FORMAT,
        **card,
        "sizes": {
            "train": len(train.labels),
            "validation": len(validation.labels),
            "test": len(test.labels),
            **{f"ood/{name}": len(images) for name, images in ood.items()},
        },
        "shape": list(train.images.shape[1:]),
        "normalisation": {
            "from": "train",
            "mean": pixels.mean(axis=(0, 1, 2)).tolist(),
            "std": pixels.std(axis=(0, 1, 2)).tolist(),
        },
    }
    dataset = Dataset(train, validation, test, ood, corrupted, card)
    card["sha256"] = _checksum(_flatten(dataset))
    return dataset


def _flatten(dataset: Dataset) -> dict[str, np.ndarray]:
    """Name every array: `train/images`, `ood/china`, `corrupted/fog/3` …"""
    return {
        **{
            f"{split}/{field}": getattr(getattr(dataset, split), field)
            for split in ("train", "validation", "test")
            for field in ("images", "labels")
        },
        **{f"ood/{name}": images for name, images in dataset.ood.items()},
        **{f"corrupted/{name}/{severity}": images for (name, severity), images in dataset.corrupted.items()},
    }


def _unflatten(arrays: dict[str, np.ndarray], card: dict[str, Any]) -> Dataset:
    ood, corrupted = {}, {}
    for key, images in arrays.items():
        match key.split("/"):
            case ["ood", name]:
                ood[name] = images
            case ["corrupted", name, severity]:
                corrupted[name, int(severity)] = images
    splits = (Split(arrays[f"{split}/images"], arrays[f"{split}/labels"]) for split in ("train", "validation", "test"))
    return Dataset(*splits, ood, corrupted, card)


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, types, shapes and contents, in the order of the names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
