"""Data sets by name: arrays of images or tokens with a card that says where they come from, and the way to batches."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sigmaens.corruptions import SEVERITIES, STANDARD, block_mean, corrupt, corrupt_small

__all__ = [
    "Dataset",
    "Split",
    "assemble",
    "augment",
    "black",
    "build",
    "check_labels",
    "decode",
    "load",
    "locate",
    "named_root",
    "open_image",
    "save",
    "stratify",
    "to_tensor",
]

_FORMAT = 2
_SPLITS, _FIELDS = ("train", "validation", "test", "rated"), ("inputs", "labels")


@dataclass(frozen=True)
class Split:
    """Inputs, and their labels (N,): int64 classes, or float64 ratings.

    Inputs are images (N, H, W, C) uint8; or token ids (N, L) int32 padded at the end; or, of sets too large for
    memory, names of image files (N,) as `decode` takes them.
    """

    inputs: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class Dataset:
    """A data set with everything it is evaluated on.

    Attributes:
        train, validation, test: disjoint splits; validation comes out of the training data, and test selects nothing.
        ood: inputs of each out-of-distribution set.
        corrupted: the test inputs, in order, under each (corruption, severity).
        card: kind ("image" or "text"), source, licence, classes, sizes, spec of the build and SHA-256 of the arrays;
            of images the normalisation, of text the id of padding (`pad`); plain JSON.
        rated: inputs that people have rated, with the mean rating of each; None if there are none.
    """

    train: Split
    validation: Split
    test: Split
    ood: dict[str, np.ndarray]
    corrupted: dict[tuple[str, int], np.ndarray]
    card: dict[str, Any]
    rated: Split | None = None

    @property
    def is_text(self) -> bool:
        """Whether the inputs are tokens."""
        return self.card["kind"] == "text"

    @property
    def is_streamed(self) -> bool:
        """Whether the inputs are files of images, decoded when needed."""
        return bool(self.card.get("streamed"))

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

    def tensor(self, inputs: np.ndarray) -> Tensor:
        """Return inputs as a network takes them: images by `to_tensor`, tokens as int64 (N, L)."""
        if self.is_text:
            return torch.from_numpy(inputs.astype(np.int64))
        return to_tensor(self.pixels(inputs), self.mean, self.std)

    def pixels(self, inputs: np.ndarray) -> np.ndarray:
        """Return images (N, H, W, C) uint8, decoded as for evaluation if the inputs are files."""
        return np.stack([decode(entry, self.card["shape"][0]) for entry in inputs]) if self.is_streamed else inputs

    def stream(
        self, inputs: np.ndarray, batches: Sequence[Tensor], seed: int | None = None, workers: int | None = None
    ) -> Iterator[Tensor]:
        """Yield `tensor(inputs[batch])` for each batch of row numbers; files are decoded ahead by worker processes.

        Args:
            inputs: Of this data set.
            batches: Row numbers of each batch.
            seed: Of files: crop and flip at random as in training, each row as its number and the seed decide,
                whoever decodes it. None is evaluation.
            workers: Processes; None takes one for each core, 8 at most; 0 decodes in this one.
        """
        if not self.is_streamed:
            yield from (self.tensor(inputs[batch.numpy()]) for batch in batches)
            return
        if workers is None:
            workers = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        yield from torch.utils.data.DataLoader(
            _Files(inputs, self.card["shape"][0], seed),
            batch_sampler=[batch.tolist() for batch in batches],
            num_workers=workers,
            collate_fn=functools.partial(_collate, mean=self.mean, std=self.std),
            generator=torch.Generator(),  # else a seed for the workers is drawn from the global one
        )


def build(spec: dict[str, Any]) -> Dataset:
    """Build the data set that a `data` block of `params.yaml` describes.

    The spec alone decides the result, with the files it names; the global random states neither matter nor change.

    Args:
        spec: `name` and that builder's own options, all that have no default. For `digits` (8×8 grey, scikit-learn):
            `train` and `validation` sizes, the rest being the test split; `ood_images` for each of the two photographs;
            `split_seed` ≥ 0 for splits, patches and corruptions. For `images` see `images.folders`, for
            `image_files` `images.files`, for `sst2` `text.sst2`.

    Raises:
        TypeError: an option of another type than the builder's.
        ValueError: an unknown name; a missing, unknown or impossible option, by name.
        FileNotFoundError: a file or folder that is not there, by name, with the ways to provide it.
    """
    options = dict(spec)
    name = options.pop("name", None)
    if name not in _BUILDERS:
        raise ValueError(f"unknown data set {name!r}; there are {sorted(_BUILDERS)}")
    module, function = _BUILDERS[name]
    builder = getattr(importlib.import_module(f"sigmaens.{module}"), function)
    expected = inspect.signature(builder).parameters
    required = {option for option, parameter in expected.items() if parameter.default is parameter.empty}
    if not required <= options.keys() <= expected.keys():
        raise ValueError(
            f"options of data set {name!r} must be {sorted(expected)}: "
            f"missing {sorted(required - options.keys())}, unknown {sorted(options.keys() - expected)}"
        )
    for option, value in options.items():
        _check_option(option, value, expected[option].annotation)
    dataset = builder(**options)
    return replace(dataset, card={**dataset.card, "spec": dict(spec)})


def _check_option(option: str, value: Any, kind: str) -> None:
    """Compare an option with the annotation of the builder's parameter: numbers, texts, lists and mappings of them.

    A list may be one text instead. Names in mappings become names of arrays and folders. Other kinds builders check.
    """
    if kind == "int":
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option} must be an integer, got {value!r}")
        least = 0 if option.endswith("seed") else 1
        if value < least:
            raise ValueError(f"{option} must be at least {least}, got {value}")
    elif kind == "str" and not (isinstance(value, str) and value):
        raise TypeError(f"{option} must be a text that is not empty, got {value!r}")
    elif kind in ("list[str]", "Sequence[str]"):
        texts = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(text, str) and text for text in texts) or not (texts or kind == "Sequence[str]"):
            raise TypeError(f"{option} must be a text or a list of texts, none of them empty, got {value!r}")
    elif kind.startswith(("dict[str, ", "Mapping[str, ")):
        if not isinstance(value, Mapping):
            raise TypeError(f"{option} must map names to values, got {value!r}")
        for name, entry in value.items():
            if not isinstance(name, str) or not name or "/" in name:
                raise ValueError(f"names of {option} must be texts without a slash, got {name!r}")
            _check_option(f"{option}/{name}", entry, kind.partition(", ")[2][:-1])


def named_root() -> Path | None:
    """Return the folder that the environment variable SIGMAENS_DATA names, None if it is not set.

    A relative one is meant from where the process was when it was first asked for; a later `chdir` does not move it.
    """
    named = os.environ.get("SIGMAENS_DATA")
    return _absolute(named) if named else None


@functools.cache
def _absolute(folder: str) -> Path:
    return Path(folder).absolute()


def locate(source: str | list[str]) -> Path:
    """Return the file or folder of a source, below the folder that the environment variable SIGMAENS_DATA names.

    Args:
        source: Path relative to that folder, or several, of which the first that exists is taken. The inside of an
            archive is written as its path: `cifar10.tar/cifar10/train` is there if `cifar10.tar` is.

    Raises:
        FileNotFoundError: if there is none, or the variable is not set.
    """
    names = [source] if isinstance(source, str) else list(source)
    root = named_root()
    where = f"SIGMAENS_DATA={root} has none" if root else "the environment variable SIGMAENS_DATA is not set"
    for name in names if root else ():
        path = Path(root, name)
        if path.exists():
            return path
        file = next((parent for parent in path.parents if parent.is_file()), None)
        if file is not None and file.suffix == ".tar":
            return path
        if file is not None:
            where = f"{file} is a file, and archives are read if they are named .tar, compressed or not"
    raise FileNotFoundError(f"no data at {' or '.join(names)}: {where}; set it to the folder that holds your data sets")


def save(dataset: Dataset, folder: str | Path) -> None:
    """Write `arrays.npz` and `card.json`; equal data sets give equal bytes, whenever they are written.

    Each file appears whole or not at all, the card last: what an interrupted call leaves behind, `load` refuses.

    Raises:
        OSError: naming the file that a full or read-only disk does not take.
    """
    folder = Path(folder)
    for file, write in (
        ("arrays.npz", lambda stream: np.savez_compressed(stream, **_flatten(dataset))),
        ("card.json", lambda stream: stream.write((json.dumps(dataset.card, indent=2) + "\n").encode())),
    ):
        unfinished = folder / f".{file}.unfinished"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as stream:
                write(stream)
            os.replace(unfinished, folder / file)
        except OSError as error:
            raise OSError(error.errno, f"cannot write: {error.strerror}", str(folder / file)) from error
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()


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


def decode(entry: str, size: int, seed: int | None = None) -> np.ndarray:
    """Return the image (size, size, 3) uint8 of a file, by the usual transforms of ImageNet.

    Evaluation scales the shorter side to size · 256/224 and cuts out the centre; an image that has the size already,
    as those of ImageNet-C, is left. Training cuts out 8 … 100 % of the area, of aspect 3/4 … 4/3, and mirrors half.

    Args:
        entry: `<file>` below SIGMAENS_DATA, or `<corruption>/<severity>|<file>`, corrupted after the transform with
            noise that the file's name decides.
        size: Height and width, pixels.
        seed: Of a training transform; None is evaluation.

    Raises:
        FileNotFoundError: if the file is not there; it is named.
        ValueError: as for `open_image`.
    """
    cell, _, file = entry.rpartition("|")
    path = locate(file)
    image = open_image(path, path)
    if seed is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reseed the accelerators too
            image = _imagenet(size, train=True)(image)
    elif image.size != (size, size):
        image = _imagenet(size, train=False)(image)
    pixels = np.asarray(image)
    if cell:
        name, severity = cell.split("/")
        pixels = corrupt(pixels[np.newaxis], name, int(severity), zlib.crc32(file.encode()))[0]
    return pixels


def open_image(file: Any, name: Any) -> Any:
    """Return the PIL image of a file, by path or open, in colour; warnings, as of damaged EXIF data, are ignored.

    Raises:
        ValueError: naming it by `name`, if it is no image, a damaged one, or one of more than 8 bits a grey level.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"), Image.open(file) as opened:
            mode, image = opened.mode, opened.convert("RGB")
    except Exception as error:  # half a dozen types, from Pillow's readers of each format
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else error  # else it names the stream
        raise ValueError(f"{name} is no image, or a damaged one: {reason}") from None
    if mode.startswith(("I", "F")):
        raise ValueError(f"{name} has more than 8 bits a grey level ({mode}), which would be clipped: convert it to 8")
    return image


@functools.cache
def _imagenet(size: int, train: bool) -> Callable[[Any], Any]:
    from torchvision.transforms import v2

    if train:
        return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()])
    return v2.Compose([v2.Resize(size * 256 // 224), v2.CenterCrop(size)])


class _Files(torch.utils.data.Dataset):
    """Files as a DataLoader's workers take them."""

    def __init__(self, entries: np.ndarray, size: int, seed: int | None):
        self.entries, self.size, self.seed = entries, size, seed

    def __getitem__(self, row: int) -> np.ndarray:
        seed = None if self.seed is None else int(np.random.SeedSequence([self.seed, row]).generate_state(1)[0])
        return decode(str(self.entries[row]), self.size, seed)


def _collate(images: list[np.ndarray], mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    return to_tensor(np.stack(images), mean, std)


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
    sizes = {"train": train, "validation": validation}
    splits = stratify(images, digits.target.astype(np.int64), sizes, split_seed)
    if not len(splits[2].labels):
        raise ValueError(f"{sizes} leave nothing of {len(images)} images for the test")
    return assemble(
        splits,
        ood={name: _patches(name, ood_images, split_seed) for name in ("china", "flower")},
        corrupted=corrupt_all(splits[2].inputs, corrupt_small, split_seed),
        card={
            "kind": "image",
            "source": "UCI optical recognition of handwritten digits, test part, as in scikit-learn's load_digits; "
            "out of distribution: scikit-learn's photographs china.jpg and flower.jpg",
            "licence": "digits CC BY 4.0 (E. Alpaydin, C. Kaynak); photographs CC BY 2.0 (danielbuechele, vultilion)",
            "corruptions": "CIFAR-C-style: sigmaens.corruptions at 32×32 pixels, reduced to 8×8",
            "classes": [str(name) for name in digits.target_names],
        },
    )


_BUILDERS = {
    "digits": ("data", "_digits"),
    "images": ("images", "folders"),
    "image_files": ("images", "files"),
    "sst2": ("text", "sst2"),
}


def stratify(
    inputs: np.ndarray, labels: np.ndarray, sizes: dict[str, int], seed: int, names: Sequence[str] = ()
) -> list[Split]:
    """Split into parts of the given sizes and what is left, which may be nothing.

    Every part has the classes in the same proportions, and its rows in the original order.

    Args:
        inputs: (N, …).
        labels: (N,), int64.
        sizes: Of each part but the last.
        seed: Of the draws.
        names: Of the classes, for errors; else their labels are named.

    Raises:
        ValueError: if a part, or what is left, has fewer rows than there are classes, which names the sizes; if a
            class has too few rows to be split, which names the class.
    """
    from sklearn.model_selection import train_test_split

    classes, rest = len(np.unique(labels)), len(labels) - sum(sizes.values())
    asked = " and ".join(f"{name}={size}" for name, size in sizes.items())
    if min(*sizes.values(), rest or classes) < classes:
        raise ValueError(f"{asked} leave {rest} of {len(labels)}; each needs at least {classes}, one a class")
    left, parts = np.arange(len(labels)), []
    for size in sizes.values():
        part = left
        if size < len(left):
            found, counts = np.unique(labels[left], return_counts=True)
            if counts.min() < 2:
                rare = found[counts.argmin()]
                raise ValueError(
                    f"class {names[rare] if len(names) else rare} has {(labels == rare).sum()} of {len(labels)} rows, "
                    f"too few for {asked}, where each part needs one"
                )
            part, left = train_test_split(left, train_size=size, stratify=labels[left], random_state=seed)
        else:
            left = left[:0]
        parts.append(part)
    return [Split(inputs[index], labels[index]) for index in map(np.sort, (*parts, left))]


def _patches(photograph: str, count: int, seed: int) -> np.ndarray:
    """Cut grey patches (count, 8, 8, 1) out of one of scikit-learn's photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    grey = np.asarray(Image.fromarray(load_sample_image(f"{photograph}.jpg")).convert("L"))
    windows = np.lib.stride_tricks.sliding_window_view(grey, (32, 32))
    rng = np.random.default_rng([seed, zlib.crc32(photograph.encode())])
    rows, columns = (rng.integers(size, size=count) for size in windows.shape[:2])
    return block_mean(windows[rows, columns][..., np.newaxis], factor=4, channels=1)


def corrupt_all(
    images: np.ndarray, function: Callable[[np.ndarray, str, int, int], np.ndarray], seed: int
) -> dict[tuple[str, int], np.ndarray]:
    """Apply the 15 standard corruptions at every severity by `function`; a terminal sees the progress."""
    from tqdm import tqdm

    cells = [(name, severity) for name in STANDARD for severity in SEVERITIES]
    return {cell: function(images, *cell, seed) for cell in tqdm(cells, desc="corruptions", disable=None)}


def assemble(
    splits: tuple[Split, Split, Split],
    ood: dict[str, np.ndarray],
    corrupted: dict[tuple[str, int], np.ndarray],
    card: dict[str, Any],
    rated: Split | None = None,
) -> Dataset:
    """Return a data set whose card is completed with what follows from the arrays: sizes, shape, checksum.

    Of images, the normalisation too. A card that states shape and normalisation itself keeps them.
    """
    train, validation, test = splits
    for split in splits:
        check_labels(split.labels, len(card["classes"]))
    card = {
        "format": _FORMAT,
        **card,
        "sizes": {
            "train": len(train.labels),
            "validation": len(validation.labels),
            "test": len(test.labels),
            **{f"ood/{name}": len(inputs) for name, inputs in ood.items()},
            **({"rated": len(rated.labels)} if rated else {}),
        },
    }
    card.setdefault("shape", list(train.inputs.shape[1:]))
    if card["kind"] == "image" and "normalisation" not in card:
        pixels = train.inputs.astype(np.float64) / 255
        mean, std = pixels.mean(axis=(0, 1, 2)), pixels.std(axis=(0, 1, 2))
        card["normalisation"] = {"from": "train", "mean": mean.tolist(), "std": std.tolist()}
    dataset = Dataset(train, validation, test, ood, corrupted, card, rated)
    card["sha256"] = _checksum(_flatten(dataset))
    return dataset


def _flatten(dataset: Dataset) -> dict[str, np.ndarray]:
    """Name every array: `train/inputs`, `ood/china`, `corrupted/fog/3` …"""
    splits = {name: getattr(dataset, name) for name in _SPLITS}
    return {
        **{f"{name}/{field}": getattr(split, field) for name, split in splits.items() if split for field in _FIELDS},
        **{f"ood/{name}": inputs for name, inputs in dataset.ood.items()},
        **{f"corrupted/{name}/{severity}": inputs for (name, severity), inputs in dataset.corrupted.items()},
    }


def _unflatten(arrays: dict[str, np.ndarray], card: dict[str, Any]) -> Dataset:
    ood, corrupted = {}, {}
    for key, inputs in arrays.items():
        match key.split("/"):
            case ["ood", name]:
                ood[name] = inputs
            case ["corrupted", name, severity]:
                corrupted[name, int(severity)] = inputs
    split = {
        name: Split(*(arrays[f"{name}/{field}"] for field in _FIELDS)) for name in _SPLITS if f"{name}/inputs" in arrays
    }
    return Dataset(**split, ood=ood, corrupted=corrupted, card=card)


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    """Return the SHA-256 of names, types, shapes and contents, in the order of the names."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
