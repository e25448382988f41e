"""Sentences to tokens: reading, character noise, tokenising, and the SST-2 builder."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sigmaens import data
from sigmaens.corruptions import SEVERITIES
from sigmaens.data import Dataset, Split

__all__ = ["NOISES", "SHARES", "check_ids", "corrupt", "decode", "pad_id", "read", "sst2", "tokenize"]

NOISES = ("typo", "swap", "drop")
"""Kinds of character noise: a neighbour on the keyboard, two neighbouring letters exchanged, a letter left out."""

SHARES = dict(zip(SEVERITIES, (0.02, 0.05, 0.10, 0.15, 0.25), strict=True))
"""Share of a sentence's letters that each severity hits."""

Size = int
"""A number of sentences, of which 0 means all there are."""

_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_SHORTEST = 20


def read(path: str | Path) -> tuple[list[str], np.ndarray | None]:
    """Read sentences, and their labels if there are any.

    The name decides the format:

    - `.tsv`: text<TAB>label on each line, with GLUE's header `sentence<TAB>label` or none;
    - `.jsonl`: an object with "text" on each line, and "label" on all of them or none;
    - `_GroundTruth.txt`: id<TAB>rating<TAB>text, where HTML entities are resolved (Hutto & Gilbert, ICWSM 2014).

    Quotes are text. Files are UTF-8, or else Windows-1252; white space around a sentence is dropped.

    Returns:
        N sentences, and labels (N,): int64 if all are whole numbers, else float64, as ratings always are.

    Raises:
        ValueError: another name or encoding; a folder; no sentences at all; naming file and line, a wrong number of
            columns, no JSON object with a text, an empty sentence, a NUL byte, a label that is missing or no finite
            number.
    """
    path = Path(path)
    ending = next((ending for ending in _FORMATS if path.name.endswith(ending)), None)
    if ending is None:
        raise ValueError(f"{path}: the name must end in one of {', '.join(_FORMATS)}")
    if path.is_dir():
        raise ValueError(f"{path} is a folder, where a file of sentences is expected")
    # Not splitlines, which breaks lines at eight more characters that sentences may hold.
    lines = _text(path).removesuffix("\n").split("\n")
    header = int(ending == ".tsv" and lines[0].rstrip("\r") == "sentence\tlabel")
    sentences, labels = [], []
    for number, line in enumerate(lines[header:], start=1 + header):
        try:
            sentence, label = _FORMATS[ending](line.rstrip("\r"))
            if "\0" in line or "\0" in sentence:
                raise ValueError("there is a NUL byte")
            if not sentence.strip():
                raise ValueError("the sentence is empty")
            if label is not None and not math.isfinite(label):
                raise ValueError(f"the label is {label}")
            if labels and (label is None) != (labels[0] is None):
                raise ValueError("either all lines have a label or none")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        sentences.append(sentence.strip())
        labels.append(label)
    if not sentences:
        raise ValueError(f"{path} holds no sentences")
    if labels[0] is None:
        return sentences, None
    values = np.array(labels, dtype=np.float64)
    whole = ending != "_GroundTruth.txt" and (values == np.rint(values)).all()
    return sentences, values.astype(np.int64) if whole else values


def corrupt(sentences: Sequence[str], name: str, severity: int, seed: int = 0) -> list[str]:
    """Hit a share of each sentence's letters, A … Z and a … z, with character noise.

    Sentence i is a function of its text and of (seed, name, severity, i) alone. With n letters, `SHARES[severity]`·n
    of them are hit, rounded up or down at random so that the share is right on average; what a severity hits, all
    stronger ones hit too, in the same way.

    - `typo`: a letter becomes one that touches it on a QWERTY keyboard;
    - `swap`: two different letters side by side, hence of one word, change places; each letter moves once;
    - `drop`: a letter is left out, but never a sentence's last.

    Upper and lower case stay with the places.

    Args:
        sentences: N texts.
        name: one of `NOISES`.
        severity: 1 (weakest) to 5.
        seed: ≥ 0.

    Returns:
        N texts.

    Raises:
        TypeError: sentences that are no texts; a severity or seed that is not an integer.
        ValueError: an unknown name, a severity outside 1 … 5, a negative seed.

    >>> corrupt(["A gripping, funny film."], "swap", severity=5, seed=2)
    ['A grpiping, funny iflm.']
    """
    _check_texts(sentences)
    if name not in NOISES:
        raise ValueError(f"unknown noise {name!r}; there are {NOISES}")
    for argument, value in (("severity", severity), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{argument} must be an integer, got {value!r}")
    if severity not in SHARES:
        raise ValueError(f"severity must be one of {SEVERITIES}, got {severity}")
    if seed < 0:
        raise ValueError(f"seed must be ≥ 0, got {seed}")
    stream = [seed, zlib.crc32(name.encode())]
    return [
        _noise(sentence, name, SHARES[severity], np.random.default_rng([*stream, i]))
        for i, sentence in enumerate(sentences)
    ]


def tokenize(sentences: Sequence[str], model: str, max_length: int) -> np.ndarray:
    """Return token ids, special tokens included, as a network of this name expects them.

    Args:
        sentences: N ≥ 1 texts. What looks like a special token in them is text.
        model: whose tokeniser: a folder, `package:NAME/FOLDER` for a folder inside an installed package, or a name on
            the Hugging Face hub.
        max_length: most tokens of a sentence, special ones included; longer ones are cut at the end.

    Returns:
        (N, L) int32, padded at the end with `pad_id(model)`; L is the length of the longest.

    Raises:
        TypeError: sentences that are no texts; a length that is not an integer.
        ValueError: no sentences; a length without room for a token; no such tokeniser, or one without padding.
    """
    _check_texts(sentences)
    if isinstance(max_length, bool) or not isinstance(max_length, int):
        raise TypeError(f"max_length must be an integer, got {max_length!r}")
    if not len(sentences):
        raise ValueError("there are no sentences to tokenise")
    tokenizer, pad = _tokenizer(model), pad_id(model)
    special = tokenizer.num_special_tokens_to_add()
    if max_length <= special:
        raise ValueError(f"max_length must be more than the {special} special tokens, got {max_length}")
    rows = tokenizer(list(sentences), truncation=True, max_length=max_length, split_special_tokens=True)["input_ids"]
    ids = np.full((len(rows), max(map(len, rows))), pad, dtype=np.int32)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids


def pad_id(model: str) -> int:
    """Return the token id that `tokenize` pads with.

    Raises:
        ValueError: no such tokeniser, or one without padding.
    """
    pad = _tokenizer(model).pad_token_id
    if pad is None:
        raise ValueError(f"the tokeniser of {model!r} has no token for padding")
    return pad


def check_ids(dataset: Dataset, model: str, *, padding: int, vocabulary: int) -> None:
    """Check that a data set's token ids are ids of a network's own, as far as numbers tell.

    Args:
        dataset: Of token ids.
        model: Name of the network.
        padding: Id that the network takes for padding.
        vocabulary: Number of ids that the network knows.

    Raises:
        ValueError: the ids are padded with another id, or there are larger ones; tokeniser and network are named.
    """
    names = f"tokenizer {dataset.card.get('tokenizer')!r} and network {model!r} do not belong together"
    pad = dataset.card["pad"]
    if pad != padding:
        raise ValueError(f"{names}: the sentences are padded with {pad}, and the network takes {padding} for padding")
    splits = (dataset.train, dataset.validation, dataset.test, *([dataset.rated] if dataset.rated else []))
    arrays = [*(split.inputs for split in splits), *dataset.ood.values(), *dataset.corrupted.values()]
    largest = max(int(ids.max(initial=0)) for ids in arrays)
    if largest >= vocabulary:
        raise ValueError(f"{names}: there are ids up to {largest}, and the network knows 0 … {vocabulary - 1}")


def decode(dataset: Dataset, rows: np.ndarray) -> list[str]:
    """Return the text of token ids (N, L), such as `dataset.test.inputs[:5]`, by the data set's tokeniser.

    What the tokeniser dropped stays lost: case, for uncased models, and the end of long sentences.
    """
    return _tokenizer(dataset.card["tokenizer"]).batch_decode(np.asarray(rows), skip_special_tokens=True)


def sst2(
    *,
    train_file: str | list[str],
    test_file: str | list[str],
    tokenizer: str,
    max_length: int,
    train: Size,
    validation: int,
    test: Size,
    ood: dict[str, str | list[str]],
    ood_sentences: Size,
    rated: str | list[str] | None,
    rated_sentences: Size,
    split_seed: int,
) -> Dataset:
    """Build SST-2 with sets of other sentences, character noise, and sentences that people have rated.

    A source is a file below the folder that the environment variable SIGMAENS_DATA names, or `hub:OWNER/NAME/FILE`
    of a data set on the Hugging Face hub, or several of these, of which the first that is found is taken. Formats are
    those of `read`. Sizes may be 0, which means all.

    Args:
        train_file: source of the training and validation sentences, label 1 = positive.
        test_file: source of the test sentences (paper section 8: GLUE's dev split).
        tokenizer, max_length: as in `tokenize`.
        train, validation: sizes, with the classes in proportion; train = 0 takes what validation leaves.
        test: size.
        ood: source of each out-of-distribution set, by name; what is word for word in train or validation is left out.
        ood_sentences: size of each of them.
        rated: source of rated sentences, or None. Those that are in train or validation by their letters and digits,
            or begin or end with one that is, are left out; how many, and how many of those taken are test sentences,
            is in the card's `overlap`.
        rated_sentences: size.
        split_seed: ≥ 0, for splits, choices and noise.

    Raises:
        TypeError: an option of another type.
        ValueError: an option that the files do not allow, by name; a file that `read` refuses.
        FileNotFoundError: a source that is not found.
    """
    sizes = {"train": train, "test": test, "ood_sentences": ood_sentences, "rated_sentences": rated_sentences}
    _check_options({**sizes, "validation": validation, "split_seed": split_seed}, ood)
    if rated is None and rated_sentences:
        raise ValueError(f"rated_sentences={rated_sentences} needs files in rated, which is None")
    files = {}

    sentences, labels = _classes("train_file", train_file, files)
    taken = train or len(sentences) - validation
    if taken < 1 or taken + validation > len(sentences):
        raise ValueError(f"train={train} and validation={validation} are too many for {len(sentences)} sentences")
    parts = data.stratify(np.arange(len(labels)), labels, {"train": taken, "validation": validation}, split_seed)
    fit, select = ([sentences[i] for i in part.inputs] for part in parts[:2])

    sentences, test_labels = _classes("test_file", test_file, files)
    rows = _draw("test", test, len(sentences), split_seed)
    held_out, test_labels = [sentences[i] for i in rows], test_labels[rows]

    known, overlap, others = {*fit, *select}, {}, {}
    for name, source in ood.items():
        found, _ = _fetch(f"ood/{name}", source, files)
        new = [sentence for sentence in found if sentence not in known]
        overlap[f"ood/{name}"] = {"left_out": len(found) - len(new)}
        others[name] = [new[i] for i in _draw("ood_sentences", ood_sentences, len(new), split_seed, name)]

    def ids(texts: list[str]) -> np.ndarray:
        return tokenize(texts, tokenizer, max_length)

    opinions = None
    if rated is not None:
        found, ratings = _fetch("rated", rated, files)
        if ratings is None:
            raise ValueError(f"rated: {files['rated']} has no ratings")
        keys, known, tested = [_key(sentence) for sentence in found], set(map(_key, known)), set(map(_key, held_out))
        new = [i for i, key in enumerate(keys) if key not in known and not _begins_or_ends(key, known)]
        rows = [new[i] for i in _draw("rated_sentences", rated_sentences, len(new), split_seed)]
        opinions = Split(ids([found[i] for i in rows]), ratings[rows].astype(np.float64))
        overlap["rated"] = {
            "left_out": len(found) - len(new),
            "test": sum(keys[i] in tested for i in rows),
        }

    cells = [(name, severity) for name in NOISES for severity in SEVERITIES]
    corrupted = {cell: corrupt(held_out, *cell, split_seed) for cell in cells}
    return data.assemble(
        (
            Split(ids(fit), parts[0].labels),
            Split(ids(select), parts[1].labels),
            Split(ids(held_out), test_labels),
        ),
        ood={name: ids(texts) for name, texts in others.items()},
        corrupted={cell: ids(texts) for cell, texts in corrupted.items()},
        card={
            "kind": "text",
            "source": "SST-2: Socher et al., EMNLP 2013, whole sentences; rated sentences and the Amazon and New York "
            "Times sets: Hutto & Gilbert, ICWSM 2014; other sets as named in files",
            "licence": "SST-2 for research; Hutto & Gilbert MIT",
            "corruptions": "character noise: "
            + ", ".join(NOISES)
            + f" of {', '.join(f'{share:.0%}' for share in SHARES.values())} of the letters",
            "classes": ["negative", "positive"],
            "files": files,
            "tokenizer": tokenizer,
            "pad": pad_id(tokenizer),
            "overlap": overlap,
            "examples": {
                "clean": held_out[:2],
                **{f"{name}/{severity}": texts[:2] for (name, severity), texts in corrupted.items()},
            },
        },
        rated=opinions,
    )


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
    try:
        # Accents, dashes and quotes in UTF-8, which Windows-1252 would turn into two or three letters each.
        if not re.search(rb"[\xc2\xc3][\x80-\xbf]|\xe2\x80[\x80-\xbf]", raw):
            return raw.decode("cp1252")
    except UnicodeDecodeError:
        pass
    raise ValueError(f"{path}, line {line}: not UTF-8, and the file as a whole is not Windows-1252 either")


def _tab_separated(line: str) -> tuple[str, float]:
    sentence, label = _columns(line, "text, label")
    return sentence, _number(label)


def _ground_truth(line: str) -> tuple[str, float]:
    _, rating, sentence = _columns(line, "id, rating, text")
    return html.unescape(sentence), _number(rating)


def _json(line: str) -> tuple[str, float | None]:
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError('expected an object with "text"')
    label = row.get("label")
    if label is not None and (isinstance(label, bool) or not isinstance(label, int | float)):
        raise ValueError(f"the label is {label!r}, not a number")
    return row["text"], label


_FORMATS = {".tsv": _tab_separated, ".jsonl": _json, "_GroundTruth.txt": _ground_truth}


def _columns(line: str, names: str) -> list[str]:
    fields = line.split("\t")
    if len(fields) != len(names.split(", ")):
        raise ValueError(f"expected the columns {names} between tabs, got {len(fields)}")
    return fields


def _number(field: str) -> float:
    try:
        return float(field)
    except ValueError:
        raise ValueError(f"the label is {field!r}, not a number") from None


def _neighbours() -> dict[str, str]:
    """Return the letters that touch each one: beside it, and two in the rows above and below, which are set off."""
    touching = {}
    for r, row in enumerate(_ROWS):
        for j, letter in enumerate(row):
            places = ((r, j - 1), (r, j + 1), (r - 1, j), (r - 1, j + 1), (r + 1, j - 1), (r + 1, j))
            touching[letter] = "".join(_ROWS[a][b] for a, b in places if 0 <= a < 3 and 0 <= b < len(_ROWS[a]))
    return touching


_NEIGHBOURS = _neighbours()


def _noise(sentence: str, name: str, share: float, rng: np.random.Generator) -> str:
    """Hit the first places of one random order, so that a larger share hits more of the same."""
    letters = [i for i, c in enumerate(sentence) if c.isascii() and c.isalpha()]
    order, rounding = rng.permutation(letters).tolist(), rng.random()
    hits = int(share * len(letters) / (2 if name == "swap" else 1) + rounding)
    result = list(sentence)
    if name == "typo":
        for i, which in list(zip(order, rng.random(len(order)), strict=True))[:hits]:
            touching = _NEIGHBOURS[sentence[i].lower()]
            result[i] = _cased(touching[int(which * len(touching))], sentence[i])
    elif name == "drop":
        for i in order[:-1][:hits]:
            result[i] = ""
    else:
        for i in _pairs(sentence, order)[:hits]:
            first, second = sentence[i : i + 2]
            result[i : i + 2] = _cased(second, first), _cased(first, second)
    return "".join(result)


def _pairs(sentence: str, order: list[int]) -> list[int]:
    """Return the first places of pairs of different letters side by side, in this order, no letter in two of them."""
    letters, used, pairs = set(order), set(), []
    for i in order:
        if i + 1 in letters and used.isdisjoint((i, i + 1)) and sentence[i].lower() != sentence[i + 1].lower():
            used.update((i, i + 1))
            pairs.append(i)
    return pairs


def _cased(letter: str, like: str) -> str:
    return letter.upper() if like.isupper() else letter.lower()


@lru_cache(maxsize=4)
def _tokenizer(model: str) -> Any:
    # Threads of the tokeniser's own would not survive the forks of loaders.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(_located(model))
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokeniser {model!r}, neither as a folder nor on the hub: {error}") from error


def _located(model: str) -> str:
    """Return the folder that `package:NAME/FOLDER` names; other names as they are."""
    if not model.startswith("package:"):
        return model
    package, _, folder = model.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    for root in (spec and spec.submodule_search_locations) or ():
        if Path(root, folder).is_dir():
            return str(Path(root, folder))
    raise ValueError(f"{model!r} names no folder of an installed package: expected package:NAME/FOLDER")


def _find(role: str, source: str | list[str]) -> tuple[str, Path]:
    """Return the first alternative that is found, and where it lies."""
    names = [source] if isinstance(source, str) else source
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"{role} must be the name of a file or a list of such names, got {source!r}")
    reasons = []
    for name in names:
        try:
            return name, _download(name) if name.startswith("hub:") else data.locate(name)
        except FileNotFoundError as error:
            reasons.append(str(error))
    raise FileNotFoundError(
        f"{role} is not there: put a file {' or '.join(names)} into the folder that the environment variable "
        f"SIGMAENS_DATA names, or name a source hub:OWNER/NAME/FILE and let the Hugging Face hub be reached. Tried: "
        + "; ".join(reasons)
    )


def _download(source: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        owner, name, file = source.removeprefix("hub:").split("/", 2)
    except ValueError:
        raise ValueError(f"a source on the hub is hub:OWNER/NAME/FILE, got {source!r}") from None
    try:
        return Path(hf_hub_download(f"{owner}/{name}", file, repo_type="dataset"))
    except Exception as error:  # of huggingface_hub, its HTTP library and the system
        raise FileNotFoundError(f"{source} could not be downloaded ({type(error).__name__}: {error})") from error


def _fetch(role: str, source: str | list[str], files: dict[str, str]) -> tuple[list[str], np.ndarray | None]:
    """Find and read a source, and note in `files` which one it was."""
    files[role], path = _find(role, source)
    return read(path)


def _classes(role: str, source: str | list[str], files: dict[str, str]) -> tuple[list[str], np.ndarray]:
    sentences, labels = _fetch(role, source, files)
    if labels is None or set(labels.tolist()) != {0, 1}:
        found = "none" if labels is None else sorted(set(labels.tolist()))[:5]
        raise ValueError(f"{role}: the labels of {files[role]} must be 0 and 1, got {found}")
    return sentences, labels.astype(np.int64)


def _draw(option: str, size: int, available: int, seed: int, name: str = "") -> np.ndarray:
    """Return `size` of the rows 0 … available − 1, all if 0, in their order."""
    if size > available or not available:
        raise ValueError(f"{option}={size} of {available} sentences{f' of {name!r}' if name else ''}")
    rng = np.random.default_rng([seed, zlib.crc32(f"{option}/{name}".encode())])
    return np.sort(rng.choice(available, size or available, replace=False))


def _key(sentence: str) -> str:
    """Return what is left of a sentence in any spelling: letters and digits, without the treebank's brackets.

    A sentence that has none is its own key.
    """
    plain = re.sub(r"\b[lr][rs]b\b", "", html.unescape(sentence).lower())
    return re.sub("[^a-z0-9]", "", plain) or sentence


def _begins_or_ends(key: str, known: set[str]) -> bool:
    """Return whether a known key of some length is the beginning or the end of this one."""
    return any(key[:i] in known or key[-i:] in known for i in range(_SHORTEST, len(key)))


def _check_texts(sentences: Sequence[str]) -> None:
    if isinstance(sentences, str):
        raise TypeError("sentences must be a sequence of texts, got a single text")
    for i, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise TypeError(f"sentences[{i}] must be a text, got {sentence!r}")


def _check_options(integers: dict[str, int], ood: dict[str, str | list[str]]) -> None:
    for option, value in integers.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{option} must be an integer, got {value!r}")
        if value < (least := int(option == "validation")):
            raise ValueError(f"{option} must be at least {least}, got {value}")
    if not isinstance(ood, dict):
        raise TypeError(f"ood must map names to sources, got {ood!r}")
    for name in ood:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f"names of ood must be texts without a slash, got {name!r}")
