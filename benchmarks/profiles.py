"""Estimate how long every profile of `params.yaml` takes, here and on one GPU, and the memory of its largest step.

Counted are the trainings and evaluations of a profile's cells, as `dvc.yaml` has them: every method, the sweeps over τ,
λ and M, Deep Ensembles of the largest M, the variants, fine-tuning; all seeds. A training step counts as three forward
passes in training mode. Each network predicts the validation and test split once; those compared also predict the
corrupted test split, 15 types at 5 severities, and what is out of distribution. The networks are the real ones with
random weights, for which no data are needed. Not counted: norms and activations, the products inside the attention
(below 5 %), building the data, figures.

- This machine: the multiply-adds by how many of them a second go through a training step of Single (for networks that
  run each image once), or of σN-Ens (for the others), measured in this run on one thread, as many processes side by
  side as seeds have cores; and for each notebook the seconds it takes to start. A step that would take long is
  measured on a smaller batch, and what is not the optimiser's grows with the batch.
- One GPU: the multiply-adds by a rate that you state for your card. This is an estimate; no GPU was measured. Small
  networks, whose time goes into calls, do not reach the rate.
- Memory of a step: weights, gradients, the state of the optimiser, and the most that torch holds on the CPU beyond
  these. Of a step that would take long it is measured on two small batches and continued linearly. Of the three cells
  that compute most at once the largest is told; Deep Ensembles train one network after the other.

    python benchmarks/profiles.py [--profiles digits …] [--rounds 5] [--rate 20] [--markdown benchmarks/profiles.md]
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import CLOCKS, Contender, contend, count, options_of, prepare, publish, table
from torch import Tensor, nn

import sigmaens as sn
from sigmaens import backbones, baselines, paths, training
from sigmaens.corruptions import SEVERITIES, STANDARD
from sigmaens.cost import machine, paired_times, peak_memory
from sigmaens.results import multiply_adds, parameters

ONCE = ("single", "deep_ensembles", "mc_dropout", "mimo")  # networks that run an image once in training
LONG = 1e10  # multiply-adds of a step that takes less than a second
PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.bfloat16}  # CPUs have no fast fp16
# Of sets that are taken whole. Sources: GLUE; the files of Hutto and Gilbert 2014; Bitterwolf et al. 2023 (NINCO);
# Cimpoi et al. 2014 (Textures); Huang and Li 2021 (iNaturalist).
SST2 = {"train": 67_349, "test": 872, "amazon": 3_708, "nyt": 5_190, "rated": 10_605}
FOLDERS = {"ninco": 5_879, "textures": 5_640, "inaturalist": 10_000}
IMAGENET_CLASSES = 1000
ATTEMPTS = (OSError, ValueError, ImportError)  # of building what this machine lacks


@dataclass(frozen=True)
class Cell:
    """A cell of the pipeline that trains: its folder, its method, and the settings it has."""

    name: str
    method: str
    settings: dict[str, Any]

    @property
    def recipe(self) -> dict[str, Any]:
        """The block of settings it trains by."""
        if self.method == "finetune":
            return self.settings["finetune"]["train"]
        return {**self.settings["train"], **self.settings["peers"].get(self.method, {}).get("train", {})}

    @property
    def networks(self) -> int:
        """Networks that are trained for a seed."""
        return self.settings["members"] if self.method == "deep_ensembles" else 1

    @property
    def network(self) -> str:
        """What its network depends on, as text."""
        s = self.settings
        method = "sigma" if self.method in ("sigma_slim", "finetune") else self.method
        at_once = s["sigma"].get("at_once")
        return json.dumps([method, s["backbone"], s["members"], s["head"], s["peers"].get(method), at_once])


@dataclass(frozen=True)
class Sizes:
    """How many inputs a profile has in each part; `corrupted` is all types and severities."""

    train: int
    validation: int
    test: int
    corrupted: int
    ood: int
    rated: int = 0


def cells_of(settings: dict[str, Any]) -> list[Cell]:
    """Return the cells that `dvc.yaml` trains for a profile."""
    varied = functools.partial(training.varied, settings)
    cells = [Cell(f"train/{method}", method, settings) for method in settings["rows"]]
    cells += [Cell(f"sweep_tau/{tau}", "sigma", varied(tau=tau)) for tau in settings["taus"]]
    cells += [Cell(f"sweep_lambda/{weight}", "sigma", varied(weight=weight)) for weight in settings["lambdas"]]
    for method, folder in {"sigma": "sweep_members", "packed_ensembles": "sweep_members_packed"}.items():
        cells += [Cell(f"{folder}/{size}", method, varied(members=size)) for size in settings["sizes"]]
    for size in settings["sizes"][-1:]:
        cells.append(Cell("sweep_members_deep", "deep_ensembles", varied(members=size)))
    names = settings.get("variant_names", settings.get("variants", {}))
    return cells + [Cell(f"sweep_variants/{name}", "sigma", varied(variant=name)) for name in names]


def sizes_of(settings: dict[str, Any]) -> Sizes:
    """Return the sizes of a profile's data, which its settings, or the sets' own sizes, decide."""
    block = settings["data"]
    shifts = len(STANDARD) * len(SEVERITIES)
    if block["name"] == "digits":
        test = 1797 - block["train"] - block["validation"]
        return Sizes(block["train"], block["validation"], test, test * shifts, 2 * block["ood_images"])
    if block["name"] == "sst2":
        from sigmaens.text import NOISES

        train, test = block["train"] or SST2["train"] - block["validation"], block["test"] or SST2["test"]
        ood = sum(block["ood_sentences"] or SST2[name] for name in block["ood"])
        rated = (block["rated_sentences"] or SST2["rated"]) if block["rated"] else 0
        return Sizes(train, block["validation"], test, test * len(NOISES) * len(SEVERITIES), ood, rated)
    outside = block["ood"]
    ood = len(outside) * block["ood_images"] if "ood_images" in block else sum(FOLDERS[name] for name in outside)
    return Sizes(block["train"], block["validation"], block["test"], block["test"] * shifts, ood)


def shape_of(settings: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the shape of an input and the number of classes. Sentences are taken to fill half of their length."""
    block = settings["data"]
    if block["name"] == "sst2":
        return (block["max_length"] // 2,), 2
    if block["name"] == "image_files":
        return (3, block["size"], block["size"]), IMAGENET_CLASSES
    cost = settings.get("cost") or paths.settings(settings["scratch"])["cost"]
    return tuple(cost["image"]), cost["classes"]


@functools.lru_cache(maxsize=2)
def _backbone(block: str, channels: int, classes: int) -> nn.Module:
    options = json.loads(block)
    if options["name"] == "timm":
        options["weights"] = None
    if options["name"] == "transformer":
        if options["model"] == "google-bert/bert-base-uncased":  # what an empty configuration describes
            from transformers import AutoModelForSequenceClassification, BertConfig

            config = BertConfig(num_labels=classes)
            return backbones.Tokens(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))
        if not options["model"].startswith("package:") and not Path(options["model"]).is_dir():
            raise ValueError(f"the configuration of {options['model']} is on the hub")
        options["pretrained"] = False
    return backbones.build(classes=classes, in_channels=channels, **options)


def backbone_of(settings: dict[str, Any]) -> nn.Module:
    """Return a profile's backbone with random weights, the same module for the same settings.

    Raises:
        OSError, ValueError, ImportError: if this machine has not what it is made from.
    """
    shape, classes = shape_of(settings)
    return _backbone(json.dumps(settings["backbone"]), shape[0], classes)


def inputs_of(settings: dict[str, Any], rows: int) -> Tensor:
    """Return random inputs, (rows, C, H, W) in channels-last memory or token ids (rows, L) without padding."""
    shape, _ = shape_of(settings)
    if len(shape) == 1:
        return torch.full((rows, *shape), backbone_of(settings).padding + 1)
    return torch.randn(rows, *shape).contiguous(memory_format=torch.channels_last)


def built(cell: Cell) -> nn.Module:
    """Return the network of a cell that is not Deep Ensembles, untrained; of slim members the full one."""
    method = "sigma" if cell.method in ("sigma_slim", "finetune") else cell.method
    return baselines.build(method, lambda: copy.deepcopy(backbone_of(cell.settings)), cell.settings)


def passes(cells: list[Cell]) -> dict[str, tuple[int, int]]:
    """Return the multiply-adds of an image by cell: in training, all networks together, and in a prediction."""
    from torch.utils.flop_counter import FlopCounterMode

    known: dict[str, tuple[int, int]] = {}
    counted = {}
    for cell in cells:
        one = Cell(cell.name, "single", cell.settings) if cell.method == "deep_ensembles" else cell
        if one.network not in known:
            model, x = built(one), inputs_of(cell.settings, 2)
            with torch.no_grad():
                model.train()(x)  # the first call of an ensemble proves folding, with passes of its own
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                model(x)
            known[one.network] = counter.get_total_flops() // 2 // len(x), multiply_adds(model, x[:1])
        counted[cell.name] = tuple(cell.networks * count for count in known[one.network])
    return counted


def work(cells: list[Cell], counted: dict[str, tuple[int, int]], sizes: Sizes) -> dict[str, int]:
    """Return the multiply-adds of a seed by cell, its training and all that its network predicts."""
    total = {}
    for cell in cells:
        train, predict = counted[cell.name]
        inputs = sizes.validation + sizes.test
        if cell.name.startswith("train/"):  # which are the ones compared
            inputs += sizes.test + sizes.corrupted + sizes.ood + sizes.rated
        total[cell.name] = 3 * train * sizes.train * cell.recipe["epochs"] + predict * inputs
    return total


def contender_of(model: nn.Module, cell: Cell, rows: int) -> Contender:
    """Return a network with that many inputs, as the training loop has it, but for a learning rate near 0."""
    x = inputs_of(cell.settings, rows)
    labels = torch.randint(shape_of(cell.settings)[1], (rows,))
    memory_format = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    contender = contend(model, x, functools.partial(sn.member_cross_entropy, labels=labels), memory_format)
    if cell.recipe["optimizer"] == "adam":
        contender.optimizer = torch.optim.Adam(sn.parameter_groups(model, lr=1e-6))
    contender.autocast = PRECISIONS[cell.recipe.get("precision", "no")]
    if isinstance(model, sn.SigmaEnsemble):
        sigma = cell.settings["sigma"]
        contender.penalty = functools.partial(sn.diversity_loss, model, sigma["tau"], sigma["weight"])
    return contender


def least_rows(settings: dict[str, Any]) -> int:
    """Return the fewest inputs that a network trains on: BatchNorm needs two."""
    batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in backbone_of(settings).modules())
    return 2 if batch_norm else 1


def timed_rows(cell: Cell, per_image: int) -> int:
    """Return on how many inputs a step is timed, of which each takes so many multiply-adds in a forward pass."""
    return max(least_rows(cell.settings), min(cell.recipe["batch_size"], int(LONG / (3 * per_image))))


def time_steps(seed: int, cells: dict[str, Cell], rows: int, rounds: int, clock: str) -> dict[str, float]:
    """Return the median seconds of a training step of each cell, whatever the seed.

    Of a step on part of the batch, the optimiser's share does not grow to that of the whole; the rest does.
    """
    prepare(1)
    torch.manual_seed(seed)
    made = {name: contender_of(built(cell), cell, rows) for name, cell in cells.items()}
    steps = {(name, "step"): contender.train for name, contender in made.items()}
    updates = {(name, "update"): contender.optimizer.step for name, contender in made.items()}
    times = paired_times(steps | updates, rounds, warm_up=1, clock=CLOCKS[clock])
    return {
        name: grown(times[name, "step"], times[name, "update"], cell.recipe["batch_size"] / rows)
        for name, cell in cells.items()
    }


def grown(step: np.ndarray, update: np.ndarray, factor: float) -> float:
    """Return the median seconds of a step on so many times the inputs, which the update knows nothing of.

    >>> grown(np.array([3.0]), np.array([1.0]), 4)
    9.0
    """
    return float(np.median((step - update) * factor + update))


def rates_of(cells: list[Cell], counted: dict[str, tuple[int, int]], rounds: int, clock: str) -> dict[str, float]:
    """Return the multiply-adds a second in a training step of Single and σN-Ens, on a whole batch."""
    pair = {cell.method: cell for cell in cells if cell.name in ("train/single", "train/sigma")}
    amounts = {m: 3 * cell.recipe["batch_size"] * counted[cell.name][0] for m, cell in pair.items()}
    rows = timed_rows(pair["sigma"], counted["train/sigma"][0])
    job = functools.partial(time_steps, cells=pair, rows=rows, rounds=rounds, clock=clock)
    found = training.side_by_side(job, range(side_by_side(pair["single"].settings))).values()
    return {method: amounts[method] / np.mean([times[method] for times in found]) for method in pair}


def side_by_side(settings: dict[str, Any]) -> int:
    """Return how many seeds run at the same time here."""
    return min(len(settings["seeds"]), os.cpu_count() or 1)


def hours_here(
    cells: list[Cell], amounts: dict[str, int], rates: dict[str, float], settings: dict[str, Any], start: float
) -> float:
    """Return the hours of all seeds on this machine."""
    seconds = sum(amounts[cell.name] / rates["single" if cell.method in ONCE else "sigma"] for cell in cells)
    notebooks = len(cells) + len(settings["rows"])
    return (seconds * len(settings["seeds"]) / side_by_side(settings) + start * notebooks) / 3600


def step_memory(cell: Cell, per_image: int) -> float:
    """Return the bytes of a training step: weights, gradients, the state of the optimiser, and the most beyond them.

    Of a step that would take long it follows from two on fewer inputs, of which each takes so many multiply-adds.
    """
    one = Cell(cell.name, "single", cell.settings) if cell.method == "deep_ensembles" else cell
    model, batch = built(one), one.recipe["batch_size"]
    kept = 4 * parameters(model) * (4 if one.recipe["optimizer"] == "adam" else 3)
    rows = timed_rows(one, per_image)
    few, more = contender_of(model, one, rows), contender_of(model, one, 2 * rows)
    # Gradients stay where they are: new ones would hide the activations of a few inputs.
    few.optimizer.zero_grad = functools.partial(few.optimizer.zero_grad, set_to_none=False)
    more.optimizer = few.optimizer
    few.train()  # makes gradients and the state of the optimiser
    low = peak_memory(few.train)
    return kept + low + (0 if rows == batch else (peak_memory(more.train) - low) * (batch - rows) / rows)


def largest(cells: list[Cell], counted: dict[str, tuple[int, int]]) -> list[Cell]:
    """Return up to three cells, of different networks, whose training steps compute most at once."""

    def at_once(cell: Cell) -> float:
        share = 1 / cell.networks
        if cell.method in ("sigma", "sigma_slim", "finetune"):
            share = min(1, (cell.settings["sigma"].get("at_once") or math.inf) / cell.settings["members"])
        return counted[cell.name][0] * cell.recipe["batch_size"] * share

    different = {cell.network: cell for cell in sorted(cells, key=at_once)}
    return sorted(different.values(), key=at_once, reverse=True)[:3]


def short(value: float) -> str:
    """Return a number with two significant digits or none after the point.

    >>> [short(value) for value in (0.01234, 5.678, 56.78, 5678.9)]
    ['0.012', '5.7', '57', '5,679']
    """
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def measured(profile: str) -> str:
    """Return what `benchmarks/stages.md` says of a profile: it is a run of all the listed ones."""
    stages = paths.root() / "benchmarks" / "stages.md"
    if paths.load_params().get("profiles", {}).get("all") != [profile] or not stages.is_file():
        return ""
    found = re.search(r"one run: ([\d.]+) minutes", stages.read_text(encoding="utf-8"))
    return f"measured: {float(found[1]) / 60:.2f} hours (benchmarks/stages.md)" if found else ""


def row_of(profile: str, given: argparse.Namespace) -> list[str]:
    """Return the row of a profile."""
    settings = paths.settings(profile)
    backbone = settings["backbone"]
    what = str(backbone.get("model", backbone["name"])).removeprefix("package:")
    if "width" in backbone:
        what += f", width {backbone['width']}"
    cells, sizes, recipe = cells_of(settings), sizes_of(settings), settings["train"]
    networks = len(settings["seeds"]) * sum(cell.networks for cell in cells)
    row = [profile, what, str(networks), f"{sizes.train:,} × {recipe['epochs']}"]
    try:
        counted = passes(cells)
        amounts = work(cells, counted, sizes)
        rates = rates_of(cells, counted, given.rounds, given.clock)
        memory = {c.name: step_memory(c, counted[c.name][0] // c.networks) for c in largest(cells, counted)}
    except ATTEMPTS as error:
        return [*row, *["not counted"] * 4, str(error).partition("\n")[0]]
    total = len(settings["seeds"]) * sum(amounts.values())
    most = max(memory, key=memory.get)
    notes = [measured(profile), f"memory of {most}"]
    rows = timed_rows(next(cell for cell in cells if cell.name == "train/sigma"), counted["train/sigma"][0])
    if rows < recipe["batch_size"]:
        notes.append(f"steps timed with {rows} of {recipe['batch_size']}")
    if recipe.get("precision", "no") != "no":
        notes.append(recipe["precision"])
    if settings["data"]["name"] == "sst2":
        notes.append(f"sentences of {shape_of(settings)[0][0]} tokens")
    if any(cell.method == "sigma_slim" for cell in cells):
        notes.append("slim members counted as full ones")
    row += [short(total / 1e15), short(hours_here(cells, amounts, rates, settings, given.start))]
    row += [short(total / given.rate / 1e12 / 3600), short(memory[most] / 2**30)]
    return [*row, "; ".join(filter(None, notes))]


def rate(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number > 0, not {text}")
    return value


def main() -> int:
    """Count, measure, print a table, and write it to a file if asked to; return the exit status."""
    options = {action.dest: action for action in options_of(__doc__)._actions}
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    known = list(paths.load_params()["settings"])
    parser.add_argument("--profiles", choices=known, nargs="+", default=known, help="which")
    parser.add_argument("--rounds", type=count, default=5, help="timed rounds")
    parser.add_argument("--rate", type=rate, default=20.0, help="what your GPU sustains, 10¹² multiply-adds a second")
    parser.add_argument("--start", type=rate, default=6.0, help="seconds a notebook takes to start")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help=options["clock"].help)
    parser.add_argument("--markdown", type=Path, metavar="PATH", help=options["markdown"].help)
    given = parser.parse_args()
    prepare(1)
    rows = []
    for profile in given.profiles:
        rows.append(row_of(profile, given))
        print(*rows[-1], sep=" | ", flush=True)
    head = ["profile", "backbone", "networks trained", "training inputs × epochs", "multiply-adds, 10¹⁵"]
    head += ["this machine, hours", f"one GPU at {given.rate:g}·10¹²/s, hours", "memory of a step, GiB", "note"]
    where = machine()
    about = (
        f"Estimates. {where['cpu']}, {where['cores']} cores, one thread a seed, torch {where['torch']}, {given.clock} "
        f"time of training steps, n = {given.rounds} rounds; {given.start:g} s for a notebook to start. No GPU was "
        f"measured: its hours are the multiply-adds at a sustained {given.rate:g}·10¹² a second, which small networks, "
        "whose time goes into calls, do not reach."
    )
    publish([about, "", *table(head, rows)], given.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
