"""Check on every architecture of timm, and on transformers' classifiers, that an ensemble is what its members are.

Of every module of timm the smallest model that has norm layers is taken, and of transformers every class that
classifies sequences, images, videos or sounds, from a tiny configuration. Weights are random: nothing is downloaded.
Inputs are small, and whatever drops out is turned off. In evaluation mode and in training mode, on batches of 2 and 3:

- conversion: each member of a converted network gives the outputs that the network gave, with norm scales of any sign,
  zero and above 1 among them;
- members: the ensemble gives what its members give one after the other as ordinary networks, running statistics are
  equal after a training pass too, and the members differ from each other.

Computed in float64 where the network runs in it. Differences are relative to the largest absolute value. They may be
1e-9, or 1e-4 where the network runs in float32 only or turns to float32 by itself. A network that SigmaEnsemble refuses
with the name of a layer is tried again with that layer left as it is. The exit status is 1 if anything is wrong.

    python benchmarks/architectures.py [--kind timm|transformers|all] [--only PATTERN] [--markdown PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import inspect
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from common import publish, target
from common import table as markdown
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sigmaens as sn
from sigmaens.cost import machine

MEMBERS = 3
BATCHES = (2, 3)
CLASSES = 10
# At 32 pixels the last stages of most convolutional networks see single pixels, whose batch statistics tell little.
SIZES = (64, 32, 96, 128, 160, 192, 224, 256, 288, 384)
LARGEST = 90e6
TOLERANCES = {"float64": 1e-9, "float64, float32 inside": 1e-4, "float32": 1e-4}
# How far weights are moved to see what becomes of rounding: an ensemble's gates make it worse than its backbone.
JITTERS = {"float64": 1e-14, "float64, float32 inside": 1e-7, "float32": 1e-7}
KINDS = ("exact", "exact with skip", "refused", "no norm layers", "not run", "WRONG")

# What makes the smallest model of a family smaller, where that takes gigabytes or minutes.
SMALLER: dict[str, dict[str, Any]] = {
    "beit": {"embed_dim": 96, "depth": 2, "num_heads": 3},
    "davit": {"embed_dims": (32, 64, 96, 128), "num_heads": (2, 4, 6, 8)},
    "deepseek_vit": {"embed_dim": 96, "depth": 2, "num_heads": 3, "out_features": 96},
    "focalnet": {"embed_dim": 32},
    "gemma4_vit": {"embed_dim": 96, "depth": 2, "num_heads": 3, "head_dim": 32, "intermediate_size": 128},
    "hiera": {"embed_dim": 32},
    "hieradet_sam2": {"embed_dim": 32},
    "mobilenetv5": {"channel_multiplier": 0.25},
    "naflexvit": {"embed_dim": 96, "depth": 2, "num_heads": 3},
    "nasnet": {"stem_size": 32, "num_features": 1344},
    "nextvit": {"stem_chs": (16, 16, 16), "depths": (1, 1, 5, 1)},
    "qwen3_vit": {"embed_dim": 96, "depth": 2, "num_heads": 3, "out_features": 96},
    "sequencer": {"layers": (1, 1, 2, 1)},
    "swin_transformer": {"embed_dim": 48, "depths": (2, 2, 2, 2)},
    "swin_transformer_v2": {"embed_dim": 48, "depths": (2, 2, 2, 2)},
    "swin_transformer_v2_cr": {"embed_dim": 48, "depths": (2, 2, 2, 2)},
    "tnt": {"depth": 3},
    "twins": {"depths": (1, 1, 2, 1)},
    "vgg": {"mlp_ratio": 0.125},
    "vision_transformer_sam": {"embed_dim": 96, "depth": 2, "num_heads": 3},
    "volo": {"layers": [1, 1, 2, 1]},
}

# A tiny configuration by the names that most configurations of transformers know …
TINY: dict[str, Any] = {
    "num_labels": CLASSES,
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_size": 32,
    "patch_size": 8,
    # Masks drawn at random in training mode.
    "apply_spec_augment": False,
}


class NotRun(Exception):
    """Why a plain network gives nothing to compare with."""


class Refused(Exception):
    """What SigmaEnsemble says when it does not take a network."""


@dataclass
class Architecture:
    """A network to examine: its name, and the ways to build it with inputs for a batch size, tried in turn."""

    name: str
    ways: Callable[[], Iterator[tuple[nn.Module, Callable[[int], Any]]]]


@dataclass
class Plain:
    """A network as it runs by itself: its inputs, its precision and, if it has no training pass to compare, why."""

    network: nn.Module
    draw: Callable[[int], Any]
    precision: str
    untrained: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """What it is computed in, where it does not turn to another precision."""
        return getattr(torch, self.precision.partition(",")[0])


@dataclass
class Row:
    """What was found about an architecture."""

    name: str
    result: str = ""
    norms: str = "-"
    passes: str = "-"
    precision: str = "-"
    differences: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def kind(self) -> str:
        """Which of the kinds the result is of."""
        return next(kind for kind in reversed(KINDS) if self.result.startswith(kind))


def main() -> int:
    """Examine all architectures asked for, print the table, and write it to a file if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--kind", choices=("timm", "transformers", "all"), default="all", help="which library's")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="only timm modules or classes that match")
    parser.add_argument("--markdown", type=target, metavar="PATH", help="write the table here too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    start = time.monotonic()
    rows = []
    for architecture in architectures(given.kind, given.only):
        rows.append(examine(architecture))
        print(f"{rows[-1].seconds:6.1f} s  {rows[-1].name}: {rows[-1].result}", file=sys.stderr, flush=True)
    if not rows:
        parser.error(f"nothing matches --only {given.only}")
    publish([*report(rows), "", f"It took {(time.monotonic() - start) / 60:.0f} minutes."], given.markdown)
    return int(any(row.kind == "WRONG" for row in rows))


def report(rows: list[Row]) -> list[str]:
    """Return the lines of the table and of what it sums up to."""
    import timm
    import transformers

    head = ["architecture", "norm layers", "passes", "precision", *COMPARISONS, "result"]
    cells = []
    for row in rows:
        differences = [shown(row.differences.get(comparison)) for comparison in COMPARISONS]
        cells.append([row.name, row.norms, row.passes, row.precision, *differences, row.result])
    cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    versions = f"torch {torch.__version__}, timm {timm.__version__}, transformers {transformers.__version__}"
    return [
        f"{machine()['cpu']}, {versions}; {MEMBERS} members, batches of {' and '.join(map(str, BATCHES))}; largest "
        "relative differences:",
        "",
        *markdown(head, cells),
        "",
        *summary(rows),
    ]


def summary(rows: list[Row]) -> list[str]:
    """Count the results, and tell how many of the networks that run and have norm layers are refused."""
    counts = Counter(row.kind for row in rows)
    told = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    able = len(rows) - counts["not run"] - counts["no norm layers"]
    refused = f"{counts['refused']} of {able}" + (f" ({counts['refused'] / able:.1%})" if able else "")
    lines = [f"{len(rows)} architectures: {told}. Refused: {refused} that run by themselves and have norm layers."]
    ways = Counter(how(row.passes) for row in rows if row.kind.startswith("exact"))
    if ways:
        lines.append(f"Passes of the exact ones: {', '.join(f'{n} {way}' for way, n in ways.most_common())}.")
    return lines


def how(passes: str) -> str:
    """Tell in short how members run: folded, one by one, or each in one mode."""
    told = [way for way in ("folded", "one by one") if way in passes]
    return " or ".join(told) or passes


def shown(difference: float | None) -> str:
    """Write a difference, or that there is none."""
    return "-" if difference is None else f"{difference:.0e}" if difference else "0"


# Which networks there are.


def architectures(kind: str, only: str) -> Iterator[Architecture]:
    """Yield all architectures of a kind whose module or class matches a pattern."""
    import timm

    if kind in ("timm", "all"):
        for family in timm.list_modules():
            if fnmatchcase(family, only):
                yield timm_architecture(family)
    if kind in ("transformers", "all"):
        for model_type, name in classifiers():
            if fnmatchcase(name, only):
                yield transformers_architecture(model_type, name)


def timm_architecture(family: str, model: str | None = None) -> Architecture:
    """Return the smallest model of a timm module, or another of its models."""
    import timm

    chosen = smallest(family) if model is None else model

    def build(**options: Any) -> nn.Module:
        try:
            return timm.create_model(chosen, num_classes=CLASSES, **SMALLER.get(family, {}), **options)
        except TypeError as error:
            if "multiple values" not in str(error):
                raise
            return timm.create_model(chosen, num_classes=CLASSES, **options)  # of a size that timm fixes

    def ways() -> Iterator[tuple[nn.Module, Callable[[int], Tensor]]]:
        with torch.device("meta"):
            check_size(build())
        sizes = SIZES
        for size in SIZES:
            try:
                yield build(img_size=size), images(size)
            except TypeError:
                break
            except (AssertionError, RuntimeError, ValueError):
                continue
            # A network told its size needs no other one if it is built as it comes.
            sizes = ()
        net = build()
        for size in (*sizes, net.pretrained_cfg.get("input_size", (3, 224, 224))[-1]):
            yield net, images(size)

    return Architecture(f"timm: {family}: {chosen}", ways)


@functools.cache
def smallest(family: str) -> str:
    """Name the smallest model of a timm module that has norm layers, or else its smallest."""
    import timm

    sizes = []
    for name in timm.list_models(module=family):
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            net = timm.create_model(name)
        sizes.append((not norms(net), parameters(net), name))
    return min(sizes)[-1]


def images(size: int) -> Callable[[int], Tensor]:
    """Return what draws a batch of images."""
    return lambda batch: torch.randn(batch, 3, size, size)


def parameters(network: nn.Module) -> int:
    """Count the parameters of a network."""
    return sum(p.numel() for p in network.parameters())


def check_size(network: nn.Module) -> None:
    """Raise NotRun for a network that is too large."""
    if parameters(network) > LARGEST:
        raise NotRun(f"too large ({parameters(network) / 1e6:.0f} M parameters)")


def norms(network: nn.Module) -> list[str]:
    """Name the modules that are norm layers, for SigmaEnsemble or not: by class name, with tensors of their own."""
    return [
        name
        for name, module in network.named_modules()
        if re.search("Norm(?!Free)", type(module).__name__)
        and any(True for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    ]


def classifiers() -> list[tuple[str, str]]:
    """List the classes of transformers that classify sequences, images, videos and sounds, with their model types."""
    from transformers.models.auto import modeling_auto as auto

    found = {}
    for what in ("SEQUENCE", "IMAGE", "VIDEO", "AUDIO"):
        for model_type, names in getattr(auto, f"MODEL_FOR_{what}_CLASSIFICATION_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, model_type)
    return [(model_type, name) for name, model_type in found.items()]


def transformers_architecture(model_type: str, name: str) -> Architecture:
    """Return a class of transformers, in a tiny configuration."""

    def ways() -> Iterator[tuple[nn.Module, Callable[[int], Any]]]:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        given = {**TINY, **OWN.get(model_type, {})}
        config = CONFIG_MAPPING[model_type](**{key: value for key, value in given.items() if value is not None})
        network = getattr(transformers, name)
        with torch.device("meta"):
            check_size(network(copy.deepcopy(config)))
        net = network(config)
        if network.main_input_name == "input_ids":
            yield net, INPUTS.get(model_type, sentences)
            return
        draw = INPUTS.get(name) or INPUTS.get(model_type)
        if draw is None:
            draw = images(config.image_size if isinstance(getattr(config, "image_size", None), int) else 32)
        yield net, lambda batch: named(draw(batch), network.main_input_name)

    return Architecture(f"transformers: {name}", ways)


def named(inputs: Any, name: str) -> Any:
    """Give a tensor its name; a mapping has names already."""
    return {name: inputs} if isinstance(inputs, Tensor) else inputs


def sentences(batch: int, length: int = 12) -> dict[str, Tensor]:
    """Draw a batch of sentences, the second of them padded; each has its end token."""
    ids = torch.randint(3, TINY["vocab_size"], (batch, length))
    mask = torch.ones_like(ids)
    ids[:, -1] = TINY["eos_token_id"]
    ids[1, -4], ids[1, -3:], mask[1, -3:] = TINY["eos_token_id"], TINY["pad_token_id"], 0
    return {"input_ids": ids, "attention_mask": mask}


def captions(batch: int) -> dict[str, Tensor]:
    """Draw a batch of images with sentences in which four tokens stand for the image."""
    inputs = sentences(batch)
    inputs["input_ids"].clamp_(max=TINY["vocab_size"] - 4)[:, 1:5] = TINY["vocab_size"] - 1
    return inputs | {"pixel_values": images(32)(batch)}


def tensors(*shape: int) -> Callable[[int], Tensor]:
    """Return what draws a batch of tensors: videos, waves or spectra."""
    return lambda batch: torch.randn(batch, *shape)


# Which of them run.


def prepare(architecture: Architecture) -> Plain:
    """Build a network that runs by itself, quiet and with weights drawn anew.

    Raises:
        NotRun: if there is none; with the reason of the last way tried, or of the first one for a network that runs
            in no precision.
    """
    fallback, why, ways = None, "there is no way to build it", architecture.ways()
    while True:
        try:
            network, draw = next(ways)
        except StopIteration:
            break
        except NotRun:
            raise
        except Exception as error:
            raise NotRun(f"it cannot be built: {first_sentence(error)}") from error
        for dtype in (torch.float64, torch.float32):
            try:
                plain = prepared(network, draw, dtype)
            except NotRun:
                raise
            except Exception as error:
                why = first_sentence(error)
                continue
            if not plain.untrained:
                return plain
            fallback = fallback or plain
    if fallback is None:
        raise NotRun(why)
    return fallback


def prepared(network: nn.Module, draw: Callable[[int], Any], dtype: torch.dtype) -> Plain:
    """Return a network as it runs in a precision; whatever it raises comes through."""
    network = silence(copy.deepcopy(network).to(dtype))
    redraw(network)

    def inputs(batch: int) -> Any:
        return to(draw(batch), dtype)

    with precision_of(dtype):
        narrow = Narrow()
        few, many = (inputs(batch) for batch in BATCHES)
        with narrow:
            logits = evaluate(network, few)
        if not torch.isfinite(logits).all():
            raise ValueError("its outputs are not finite")
        if logits.shape[0] != BATCHES[0]:
            raise ValueError(f"it gives {tuple(logits.shape)} for a batch of {BATCHES[0]}")
        if not torch.equal(logits, evaluate(network, few)):
            raise NotRun("its evaluation passes are random")
        precision = str(dtype).removeprefix("torch.")
        if dtype == torch.float64 and narrow.seen:
            precision += ", float32 inside"
        plain = Plain(network, inputs, precision)
        try:
            for batch in (few, many):
                twice = [train(copy.deepcopy(network), batch) for _ in range(2)]
                if not torch.equal(*twice):
                    plain.untrained = "its training passes are random"
                elif not torch.isfinite(twice[0]).all():
                    plain.untrained = "its outputs in training are not finite"
                else:
                    moved = jittered(network, JITTERS[precision])
                    if relative(train(moved, batch), twice[0]) > TOLERANCES[precision]:
                        plain.untrained = "its training passes magnify rounding"
        except Exception as error:
            plain.untrained = f"its training pass raises {type(error).__name__}: {first_sentence(error)}"
        if not plain.untrained:
            settle(network, inputs)
        logits = evaluate(network, few)
        if not relative(logits[:1], logits[1:2]) > 10 * TOLERANCES[precision]:
            raise ValueError("its outputs do not depend on its inputs")
    return plain


class Narrow(TorchDispatchMode):
    """Notice whether anything is computed in float32 or less while this is on."""

    seen = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for t in output if isinstance(output, (tuple, list)) else (output,):
            self.seen |= isinstance(t, Tensor) and t.is_floating_point() and t.dtype.itemsize < 8
        return output


@contextlib.contextmanager
def precision_of(dtype: torch.dtype) -> Iterator[None]:
    """Make a precision the default, in which networks build what they add to their inputs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def to(inputs: Any, dtype: torch.dtype) -> Any:
    """Bring a tensor, or those of a mapping, into a precision if they are not integers."""
    if isinstance(inputs, Mapping):
        return {key: to(value, dtype) for key, value in inputs.items()}
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


def silence(network: nn.Module) -> nn.Module:
    """Turn off all that drops out, wherever modules and their configurations keep how much of it."""
    for module in network.modules():
        holders = [vars(module)]
        if hasattr(module, "config"):
            holders.append(vars(module.config))
        for holder in holders:
            for name, value in holder.items():
                off = re.search("drop|jitter", name) or (name == "p" and "Drop" in type(module).__name__)
                if off and isinstance(value, float):
                    holder[name] = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
            # A few passes then bring the running statistics to what they are of.
            module.momentum = 0.5
    return network


@torch.no_grad()
def redraw(network: nn.Module) -> None:
    """Draw weights so that every layer shows in the outputs: no zeros, no tiny factors, norms of any scale."""
    scales = {id(p) for name in norms(network) for p in network.get_submodule(name).parameters(recurse=False)}
    for p in network.parameters():
        if not p.is_floating_point():
            continue
        if id(p) in scales:
            p.normal_()
            p.view(-1)[: min(3, len(p) - 1)] = torch.tensor([0.0, -1.5, 2.5])[: min(3, len(p) - 1)].to(p)
        elif p.dim() > 1 and p.numel() > len(p):
            p.normal_(std=(p.numel() / len(p)) ** -0.5)
        elif (p == p.view(-1)[0]).all():
            # A constant is a start: a bias or a layer scale near zero, or a factor.
            p.normal_(std=0.3) if abs(p.view(-1)[0]) < 1e-2 else p.mul_(1 + 0.1 * torch.randn_like(p))
    for module in network.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)


@torch.no_grad()
def jittered(network: nn.Module, size: float) -> nn.Module:
    """Return a copy of a network with every weight off by that share of it, on average."""
    network = copy.deepcopy(network)
    for p in network.parameters():
        if p.is_floating_point():
            p.mul_(1 + size * torch.randn_like(p))
    return network


def settle(network: nn.Module, inputs: Callable[[int], Any]) -> None:
    """Bring running statistics near those of the inputs, so that the layers behind still see them, but off by chance.

    Each member's of an ensemble are drawn on their own.
    """
    known = [m for m in network.modules() if isinstance(getattr(m, "running_var", None), Tensor)]
    if not known:
        return
    for _ in range(3):
        train(network, inputs(BATCHES[-1]))
    with torch.no_grad():
        for module in known:
            module.running_mean += 0.2 * module.running_var.sqrt() * torch.randn_like(module.running_mean)
            module.running_var *= torch.empty_like(module.running_var).uniform_(0.6, 1.6)


def run(network: nn.Module, inputs: Any) -> Tensor:
    """Return a network's logits, detached: its output, what that calls logits, or else its first tensor."""
    output = network(**inputs) if isinstance(inputs, Mapping) else network(inputs)
    if isinstance(output, Mapping):
        output = output["logits"] if "logits" in output else next(iter(output.values()))
    while isinstance(output, (tuple, list)):
        output = output[0]
    return output.detach()


@torch.no_grad()
def evaluate(network: nn.Module, inputs: Any) -> Tensor:
    """Return logits in evaluation mode."""
    return run(network.eval(), inputs)


def train(network: nn.Module, inputs: Any) -> Tensor:
    """Return logits in training mode."""
    return run(network.train(), inputs)


# What they are compared in.

COMPARISONS = ("conversion", "evaluation", "training", "statistics")


def examine(architecture: Architecture) -> Row:
    """Examine an architecture: whatever goes wrong is told in the row."""
    start = time.monotonic()
    row = Row(architecture.name)
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"), quiet():
        try:
            plain = prepare(architecture)
            row.precision = plain.precision
            row.result = judge(plain, row)
        except NotRun as why:
            row.result = f"not run: {why}"
        except Refused as why:
            row.result = f"refused: {why}"
        except Exception as error:
            # A network that cannot be built has been dealt with: this is about the ensemble.
            row.result = f"WRONG: raises {type(error).__name__}: {first_sentence(error)}"
    gc.collect()
    row.seconds = time.monotonic() - start
    return row


def judge(plain: Plain, row: Row) -> str:
    """Return the result for a network that runs, and fill in the row's other cells."""
    found = norms(plain.network)
    try:
        ens, skip = build(sn.SigmaEnsemble, plain.network)
        converted, _ = build(sn.SigmaEnsemble.from_pretrained, plain.network)
    except Refused:
        if not found:
            return "no norm layers"
        raise
    row.norms = f"{len(ens.gates())}" + (f" of {len(found)}" if len(found) > len(ens.gates()) else "")
    with precision_of(plain.dtype):
        wrong = compare(plain, ens, converted, row.differences)
    row.passes = passes(ens)
    if wrong:
        return f"WRONG: {'; '.join(wrong)}"
    result = f"exact with skip={skip}" if skip else "exact"
    return f"{result}, evaluation only: {plain.untrained}" if plain.untrained else result


def compare(
    plain: Plain, ens: sn.SigmaEnsemble, converted: sn.SigmaEnsemble, differences: dict[str, float]
) -> list[str]:
    """Note the largest differences, and return what is wrong."""
    tolerance = TOLERANCES[plain.precision]
    wrong = {}

    def note(what: str, difference: float) -> None:
        differences[what] = max(differences.get(what, 0.0), difference)
        if differences[what] > tolerance:
            wrong[what] = f"{what} off by {differences[what]:.0e}"

    for batch in BATCHES:
        inputs = plain.draw(batch)
        expected = evaluate(plain.network, inputs)
        logits = evaluate(converted, inputs)
        for m in range(MEMBERS):
            note("conversion", relative(logits[:, m], expected))
    if not plain.untrained:
        settle(ens, plain.draw)
    for batch in BATCHES:
        inputs = plain.draw(batch)
        logits = evaluate(ens, inputs)
        for m in range(MEMBERS):
            note("evaluation", relative(logits[:, m], evaluate(ens.member(m), inputs)))
        alike = min(relative(logits[:, m], logits[:, n]) for m in range(MEMBERS) for n in range(m))
        if alike < 10 * tolerance:
            wrong["members"] = f"two members differ by {alike:.0e} only"
        if plain.untrained:
            continue
        members = [ens.member(m) for m in range(MEMBERS)]
        logits = train(ens, inputs)
        for m, member in enumerate(members):
            note("training", relative(logits[:, m], train(member, inputs)))
            for difference in statistics(ens.member(m), member, ens.gates()):
                note("statistics", difference)
    return list(wrong.values())


def build(kind: Callable[..., sn.SigmaEnsemble], network: nn.Module) -> tuple[sn.SigmaEnsemble, list[str]]:
    """Build an ensemble, and return it with the patterns of layers that had to be left as they are.

    Raises:
        Refused: if it is refused for something else, or nothing would be left to gate; with the first refusal.
    """
    skip: list[str] = []
    first = None
    while True:
        try:
            return kind(network, MEMBERS, **({"skip": skip} if skip else {})), skip
        except (TypeError, ValueError) as error:
            first = first or error
            named = re.search(r"layer '([^']+)'", str(error))
            can = "skip" in inspect.signature(sn.SigmaEnsemble).parameters
            pattern = None if named is None else re.sub(r"(?<![^.])\d+(?![^.])", "*", named[1])
            if not can or pattern is None or pattern in skip:
                raise Refused(first_sentence(first)) from error
            skip.append(pattern)


def passes(ens: sn.SigmaEnsemble) -> str:
    """Tell how the members run in either mode, and why, as the ensemble itself describes it."""
    told: dict[str, list[str]] = {}
    for mode, way in re.findall(r"^\s*passes in (\w+): (.+)$", repr(ens), flags=re.MULTILINE):
        way = way.replace("folded into one batch", "folded")
        if way not in told.setdefault(mode, []):
            told[mode].append(way)
    both = [" or ".join(ways) for ways in told.values()]
    if len(set(both)) == 1:
        return both[0]
    return "; ".join(f"{mode}: {way}" for mode, way in sorted(zip(told, both, strict=True))) or "not told"


def statistics(network: nn.Module, other: nn.Module, names: Any) -> Iterator[float]:
    """Yield by how much running statistics of two networks differ in the layers with given names."""
    for name in names:
        one, two = network.get_submodule(name), other.get_submodule(name)
        if isinstance(getattr(two, "running_var", None), Tensor):
            # A mean may be next to nothing beside what it is of.
            deviation = two.running_var.sqrt().max()
            yield relative(one.running_mean / deviation, two.running_mean / deviation, least=1.0)
            yield relative(one.running_var, two.running_var)
            yield float((one.num_batches_tracked != two.num_batches_tracked).any())


def relative(one: Tensor, two: Tensor, least: float = 0.0) -> float:
    """Return the largest difference by the largest absolute value of the second, or infinity if it is not one.

    A largest value below `least` counts as that.
    """
    if one.shape != two.shape or not (torch.isfinite(one).all() and torch.isfinite(two).all()):
        return float("inf")
    difference, largest = (one - two).abs().max().item(), max(two.abs().max().item(), least)
    return difference / largest if largest else float(difference > 0)


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message on one line, or its kind if it has none."""
    text = " ".join(str(error).split())
    return re.split(r"(?<=[.;:]) ", text, maxsplit=1)[0].rstrip(".;:")[:160] or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from telling of every odd value in a configuration."""
    from transformers import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


# … and what some model types want otherwise; None leaves out what they do not know.
BARE = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim"))
STAGES = BARE | {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
WINDOWS = BARE | {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "patch_size": 4, "window_size": 4}
PYRAMID = STAGES | {"num_attention_heads": [1, 2, 2, 4], "num_encoder_blocks": 4, "image_size": 64, "patch_size": 4}
CONVOLUTIONS = {
    "conv_dim": [32] * 3,
    "conv_stride": [5, 4, 4],
    "conv_kernel": [10, 8, 4],
    "num_conv_pos_embeddings": 16,
}
CONVOLUTIONS |= {"num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3, "layerdrop": 0.0}
BART = {"d_model": 32, "hidden_size": None, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
EXPERTS |= {"topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"head_dim": 8, "num_key_value_heads": 4}
LATENTS = {"d_latents": 32, "d_model": 32, "num_latents": 8, "num_self_attends_per_block": 2}
LATENTS |= {"num_self_attention_heads": 4, "num_cross_attention_heads": 1}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
READ = {name: value for name, value in TINY.items() if "_size" not in name} | {"hidden_size": 32, "vocab_size": 60}
READ |= {"intermediate_size": 48, "cls_token_id": 1, "sep_token_id": 2}
SEEN = {name: TINY[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
SEEN |= {"image_size": 32, "patch_size": 8}
BOTH = {"text_config": READ, "vision_config": SEEN, "projection_dim": 32, "image_token_id": 59}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GEMMA = {"image_token_index": 59, "boi_token_index": 58, "eoi_token_index": 57, "mm_tokens_per_image": 4}
OWN: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8},
    "axk1": EXPERTS | LATENT,
    "axk2": EXPERTS | LATENT,
    "bart": BART,
    "beit": {"use_relative_position_bias": True},
    "bigbird_pegasus": BART,
    "bit": STAGES | {"embedding_size": 8, "num_groups": 4},
    "canine": {"num_hash_buckets": 64},
    "clip": BOTH,
    "cohere_compass_text": {"rope_parameters": {name: ROPE for name in ("full_attention", "sliding_attention")}},
    "convnext": STAGES | {"patch_size": 4, "image_size": 64},
    "convnextv2": STAGES | {"patch_size": 4, "image_size": 64},
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4},
    "cvt": BARE | {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 1, 2], "image_size": 64},
    "data2vec-audio": CONVOLUTIONS | {"conv_pos_kernel_size": 5, "num_conv_pos_embeddings": 2},
    "deepseek_v2": EXPERTS | LATENT,
    "deepseek_v3": EXPERTS | LATENT,
    "dinat": BARE | {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "dilations": [[1], [1]]},
    "distilbert": {"dim": 32, "hidden_dim": 48},
    "donut-swin": WINDOWS,
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640, "image_size": 64},
    "esmc": {"num_key_value_heads": None},
    "falcon": {"head_dim": None},
    "focalnet": BARE | {"embed_dim": 16, "depths": [1, 1, 1, 1], "patch_size": 4, "image_size": 64},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "d_model": 32, "d_inner": 48, "n_head": 4},
    "gemma3": BOTH | GEMMA,
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "hgnet_v2": STAGES
    | {
        "image_size": 64,
        "embedding_size": 8,
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 24, 32],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 24, 32, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [2, 2, 2, 2],
    },
    "hiera": BARE | {"embed_dim": 16, "depths": [1, 1, 1, 1], "image_size": [64, 64], "patch_size": [7, 7]},
    "hubert": CONVOLUTIONS,
    "imagegpt": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "jamba": EXPERTS | {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2, "mamba_d_state": 4},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 6, "shape_size": 4, "patch_size": 8},
    "levit": BARE
    | {
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "image_size": 128,
        "patch_size": 16,
    },
    "lilt": {"hidden_size": 48},
    "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
    "markuplm": {"max_depth": 4, "xpath_unit_hidden_size": 8},
    "mbart": BART,
    "metaclip_2": BOTH,
    "minicpm3": LATENT,
    "mistral4": EXPERTS | LATENT | {"head_dim": 16},
    "mobilenet_v1": {"depth_multiplier": 0.25, "image_size": 64},
    "mobilenet_v2": {"depth_multiplier": 0.25, "image_size": 64},
    "mobilevit": BARE
    | {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 2,
    },
    "mobilevitv2": BARE | {"width_multiplier": 0.25, "image_size": 64, "patch_size": 2},
    "modernvbert": BOTH | {"pixel_shuffle_factor": 2},
    "mt5": T5,
    "mvp": BART,
    "perceiver": LATENTS,
    "plbart": BART,
    "poolformer": STAGES | {"num_encoder_blocks": 4, "image_size": 64, "patch_size": 7},
    "pvt": PYRAMID,
    "pvt_v2": PYRAMID,
    "qwen2_moe": EXPERTS,
    "qwen3_5": {"text_config": READ | LINEAR, "vision_config": SEEN},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | LINEAR,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4]},
    "regnet": STAGES | {"embedding_size": 8, "groups_width": 4, "image_size": 64},
    "resnet": STAGES | {"embedding_size": 8, "image_size": 64},
    "roc_bert": {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "segformer": PYRAMID,
    "sew": CONVOLUTIONS,
    "sew-d": CONVOLUTIONS,
    "shieldgemma2": BOTH | GEMMA,
    "siglip": BOTH,
    "siglip2": {"vision_config": SEEN | {"num_patches": 16}, "text_config": READ},
    "squeezebert": {"embedding_size": 32},
    "swiftformer": {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "image_size": 64},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "t5": T5,
    "t5gemma": {"encoder": READ, "decoder": READ},
    "t5gemma2": {"encoder": BOTH | GEMMA, "decoder": READ},
    "textnet": {"image_size": 64},
    "timesformer": {"num_frames": 2},
    "timm_wrapper": {"architecture": "test_resnet", "image_size": 64},
    "ultravbert": BOTH | {"pixel_shuffle_factor": 2},
    "umt5": T5,
    "unispeech": CONVOLUTIONS,
    "unispeech-sat": CONVOLUTIONS,
    "videomae": {"num_frames": 4},
    "videoprism_vision_model": {"num_frames": 4, "num_spatial_layers": 2, "num_temporal_layers": 1}
    | {"tubelet_size": [1, 8, 8], "num_hidden_layers": None, "patch_size": None, "num_auxiliary_layers": 1},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "vjepa2": {"frames_per_clip": 4, "crop_size": 32, "num_pooler_layers": 1, "pred_hidden_size": 32}
    | {"pred_num_attention_heads": 4, "pred_num_hidden_layers": 1},
    "wav2vec2": CONVOLUTIONS,
    "wav2vec2-bert": {"feature_projection_input_dim": 16, "conv_depthwise_kernel_size": 3, "output_hidden_size": 32},
    "wav2vec2-conformer": CONVOLUTIONS | {"conv_depthwise_kernel_size": 3},
    "wavlm": CONVOLUTIONS,
    "whisper": BART | {"num_mel_bins": 8, "max_source_positions": 16},
    "xlnet": {"max_position_embeddings": None, "head_dim": None, "d_head": 8},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 16, "head_dim": None}
    | {"num_hidden_layers": 4, "use_mamba_kernels": False, "num_key_value_heads": 4, "attention_hidden_size": 64},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "head_dim": None, "num_key_value_heads": 4}
    | {"use_mamba_kernels": False, "mamba_d_state": 4},
}
# Inputs that are neither sentences nor images of the configured size.
INPUTS: dict[str, Callable[[int], Any]] = {
    "audio-spectrogram-transformer": tensors(32, 16),
    "hiera": images(64),
    "imagegpt": lambda batch: torch.randint(TINY["vocab_size"], (batch, 12)),
    "PerceiverForSequenceClassification": lambda batch: sentences(batch)["input_ids"],
    "reformer": functools.partial(sentences, length=16),
    "shieldgemma2": captions,
    "siglip2": lambda batch: {
        "pixel_values": torch.randn(batch, 16, 3 * 8 * 8),
        "pixel_attention_mask": torch.ones(batch, 16, dtype=torch.long),
        "spatial_shapes": torch.full((batch, 2), 4),
    },
    "timesformer": tensors(2, 3, 32, 32),
    "videomae": tensors(4, 3, 32, 32),
    "videoprism_vision_model": tensors(4, 3, 32, 32),
    "vivit": tensors(4, 3, 32, 32),
    "vjepa2": tensors(4, 3, 32, 32),
    "wav2vec2-bert": tensors(24, 16),
    "whisper": tensors(8, 32),
    **{name: tensors(1600) for name, given in OWN.items() if "conv_dim" in given},
}


if __name__ == "__main__":
    sys.exit(main())
