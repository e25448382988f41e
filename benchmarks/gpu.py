"""Train ResNet-18 σN-Ens on CIFAR-10 on a GPU, compare its outputs with the CPU's, and time it beside its backbone.

One command for when a GPU is at hand, with the settings of the profile `cifar10`, but fewer images and epochs:

1. σN-Ens is trained by `sigmaens.training.fit`, once in each precision. CIFAR-10 is read as the profile reads it: from
   below SIGMAENS_DATA, or downloaded. Of each class the first images by file name are taken.
2. What the first of these says of test images is compared between the CPU in float32 and the GPU, and so are gradients:
   of the full ensemble and of a slim one, all gates up to 0.5 of its regularised norms left out, since so short a
   training closes none. A difference is the largest of a value; "relative" divides it by the largest absolute value, of
   gradients parameter by parameter, the worst of which is named. The agreement is that of the class of the highest
   mean probability. Gradients are those of one step in training mode.
3. A training step and an evaluation pass are timed: of one backbone with the same B images and with M·B; of σN-Ens,
   all members at once and one at a time; of slim members; and of Deep Ensembles, whose M networks run and learn one
   after the other. The slim ones regularise the first norm of each block, and their gates are set as
   `benchmarks/slim.py` sets them: a share of 1/M + 0.03 is open. Those of one precision and format are timed in turn
   within every round, the GPU idle before and after. A ratio is the median over rounds of a time over the plain
   backbone's in the same round, with a 95 % bootstrap interval. Memory is the most a step or a pass holds beyond
   weights and the state of the optimiser; the gradients of a step are part of it.

float32 is that of IEEE 754: TF32 is off but in rows that name it. The table is written line by line, so that a run
which is killed leaves what it had. Exit status: 0, or 1 if there is no such device or no CIFAR-10.

    SIGMAENS_DATA=… python benchmarks/gpu.py [--device cuda] [--images 2000] [--epochs 2] [--batch 128] [--rounds 20]
        [--precision no bf16] [--markdown benchmarks/gpu.md]
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    FORMATS,
    PHASES,
    Contender,
    cells,
    contend,
    count,
    measure,
    options_of,
    precision_of,
    prepare,
    table,
    wait_for,
)
from slim import INNER, ownership
from torch import Tensor, nn

import sigmaens as sn
from sigmaens import backbones, data, images, metrics, paths, training
from sigmaens.baselines import DeepEnsemble, build
from sigmaens.cost import machine, peak_memory

PRECISIONS = {"no": ("float32", None), "bf16": ("bf16", torch.bfloat16), "fp16": ("fp16", torch.float16)}
PLAIN, PLAIN_ROWS = "plain", "plain, M·B images"
HALF = 0.5  # largest gate that is left out of the slim ensemble which is compared


class Report:
    """A report that grows line by line, on the terminal and in a file if there is a path."""

    def __init__(self, path: Path | None):
        self.path = path
        if path is not None:
            path.write_text("", encoding="utf-8")

    def tell(self, *lines: str) -> None:
        """Add lines at once."""
        print(*lines, sep="\n", flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)

    def row(self, *cells: object) -> None:
        """Add a row of a table."""
        self.tell(f"| {' | '.join(map(str, cells))} |")


class OneByOne(DeepEnsemble):
    """Deep Ensembles whose networks learn one after the other, as the training loop has them."""

    at_once = 1

    @property
    def members(self) -> int:
        return len(self.nets)

    def chunks(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the logits (B, 1, K) of one network after the other."""
        for net in self.nets:
            yield net(x)[:, None]


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let NVIDIA GPUs round the factors of float32 products to TF32, or not."""
    places = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = allowed
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


def subset(settings: dict[str, Any], train: int, test: int) -> data.Dataset:
    """Return the first images of each class of a profile's sets; as many as are asked for, or up to K − 1 more."""
    block, classes = settings["data"], settings["cost"]["classes"]
    each = math.ceil(train / classes)
    read = functools.partial(images.read, size=block["size"], channels=block.get("channels", 3))
    inputs, labels, names = read(block["train_folder"], first=each + 1)  # one of each class validates
    fit, select, _ = data.stratify(inputs, labels, {"train": each * classes, "validation": classes}, seed=0)
    held = data.Split(*read(block["test_folder"], first=math.ceil(test / classes))[:2])
    card = {"kind": "image", "classes": names}
    return data.assemble((fit, select, held), ood={}, corrupted={}, card=card)


def fitted(
    dataset: data.Dataset, settings: dict[str, Any], recipe: training.Recipe, device: torch.device
) -> tuple[sn.SigmaEnsemble, list[dict[str, float]], float]:
    """Return a trained σN-Ens with its history and the seconds of its training, which a few steps have warmed up."""
    from accelerate.utils import patch_environment

    sigma = settings["sigma"]
    penalty = functools.partial(sn.diversity_loss, tau=sigma["tau"], weight=sigma["weight"])
    few = slice(None, None, max(1, len(dataset.train.labels) // (2 * recipe.batch_size)))
    brief = replace(dataset, train=data.Split(dataset.train.inputs[few], dataset.train.labels[few]))
    for own in (brief, dataset):
        torch.manual_seed(0)
        ens = build("sigma", lambda: backbone(settings), settings)
        start = time.perf_counter()
        with patch_environment(**({"ACCELERATE_USE_CPU": "true"} if device.type == "cpu" else {})):
            history = training.fit(ens, own, recipe, seed=0, penalty=penalty)
        wait_for(device)
        seconds = time.perf_counter() - start
    return ens, history, seconds


def backbone(settings: dict[str, Any]) -> nn.Module:
    """Return a profile's backbone."""
    channels, *_ = settings["cost"]["image"]
    return backbones.build(classes=settings["cost"]["classes"], in_channels=channels, **settings["backbone"])


def train(
    report: Report, dataset: data.Dataset, settings: dict[str, Any], given: Any, device: torch.device
) -> sn.SigmaEnsemble:
    """Train in each precision, tell how it went, and return the first ensemble."""
    head = ["precision", "steps", "images a second", "last epoch's cross-entropy, nats", "test accuracy, %"]
    head += ["test NLL, nats", "regularised gates up to 0.01, %"]
    sizes = f"{len(dataset.train.labels):,} training and {len(dataset.test.labels)} test images"
    report.tell("", f"Training of σN-Ens, epochs: {given.epochs}, n = 1 run of each, {sizes}:", "", *table(head, []))
    first = None
    for precision in given.precision:
        block = {**settings["train"], "epochs": given.epochs, "batch_size": given.batch, "precision": precision}
        recipe = training.Recipe.parse(block)
        ens, history, seconds = fitted(dataset, settings, recipe, device)
        probs = torch.from_numpy(training.predict(ens, dataset.test.inputs, dataset)).double().softmax(-1)
        measures = metrics.classification(probs.mean(1), dataset.test.labels)
        closed = torch.cat(list(ens.regularized_gates().values()), dim=1) <= 0.01
        report.row(
            PRECISIONS[precision][0],
            given.epochs * math.ceil(len(dataset.train.labels) / given.batch),
            f"{given.epochs * len(dataset.train.labels) / seconds:.0f}",
            f"{history[-1]['cross_entropy']:.4f}",
            f"{100 * measures['accuracy']:.1f}",
            f"{measures['nll']:.4f}",
            f"{100 * closed.double().mean().item():.1f}",
        )
        first = ens if first is None else first
    return first


def difference(own: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the largest absolute difference, and that by the largest absolute value of the reference.

    >>> difference(torch.tensor([1.0, -4.0]), torch.tensor([1.5, -5.0]))
    (1.0, 0.2)
    """
    largest = (own.double() - reference.double()).abs().max().item()
    scale = reference.double().abs().max().item()
    return largest, largest / scale if scale else math.inf * largest if largest else 0.0


@torch.inference_mode()
def outputs(ens: sn.SigmaEnsemble, x: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return member logits (N, M, K) of images on the CPU, computed where the ensemble is, 100 images at a time."""
    device = next(ens.parameters()).device
    ens.eval()
    with precision_of(device, autocast):
        return torch.cat([ens(part.to(device)).float().cpu() for part in x.split(100)])


def gradients(
    ens: sn.SigmaEnsemble, x: Tensor, labels: Tensor, sigma: dict[str, Any], autocast: torch.dtype | None
) -> dict[str, Tensor]:
    """Return the gradients of one training step by parameter, on the CPU; the ensemble stays as it is."""
    ens = copy.deepcopy(ens).train()
    device = next(ens.parameters()).device
    ens.zero_grad()
    with precision_of(device, autocast):
        loss = sn.member_cross_entropy(ens(x.to(device)), labels.to(device))
    (loss + sn.diversity_loss(ens, sigma["tau"], sigma["weight"])).backward()
    return {name: p.grad.cpu() for name, p in ens.named_parameters() if p.grad is not None}


def compare(
    report: Report,
    ens: sn.SigmaEnsemble,
    dataset: data.Dataset,
    settings: dict[str, Any],
    given: Any,
    device: torch.device,
) -> None:
    """Tell how far outputs and gradients on a device are from those on the CPU."""
    x = dataset.tensor(dataset.test.inputs)
    # Of every class, and so few that the CPU has the memory and the time.
    rows = np.linspace(0, len(dataset.train.labels) - 1, min(given.batch, 32)).astype(int)
    step = dataset.tensor(dataset.train.inputs[rows]), torch.from_numpy(dataset.train.labels[rows]), settings["sigma"]
    here, there = copy.deepcopy(ens).cpu(), ens.to(device)
    pairs = {
        "σN-Ens": (here, there),
        "σN-Ens, slim": (here.slim(x[:2], threshold=HALF), there.slim(x[:2].to(device), threshold=HALF)),
    }
    kinds = [("float32", None, False)]
    if device.type == "cuda":
        kinds.append(("TF32", None, True))
    kinds += [(*PRECISIONS[name], False) for name in given.precision if name != "no"]
    head = ["network", "precision", "logits, difference", "relative", "mean probabilities, difference", "relative"]
    head += ["same class, %", "gradients, relative"]
    left_out = 1 - gates_kept(pairs["σN-Ens, slim"][1])
    report.tell(
        "",
        f"Outputs on {device.type} against the CPU's in float32, n = {len(x)} test images; gradients of {len(rows)} "
        f"training images; slim: {100 * left_out:.1f} % of the regularised gates left out:",
        "",
        *table(head, []),
    )
    for network, (reference, own) in pairs.items():
        known, slopes = outputs(reference, x, None), gradients(reference, *step, None)
        for name, autocast, allowed in kinds:
            with tf32(allowed):
                logits, found = outputs(own, x, autocast), gradients(own, *step, autocast)
            probs, expected = (part.double().softmax(-1).mean(1) for part in (logits, known))
            same = (probs.argmax(1) == expected.argmax(1)).double().mean().item()
            apart = {key: difference(found[key], slopes[key])[1] for key in slopes}
            worst = max(apart, key=apart.get)
            told = [f"{value:.1e}" for pair in ((logits, known), (probs, expected)) for value in difference(*pair)]
            slope = f"{apart[worst]:.1e} ({worst.removeprefix('backbone.')})"
            report.row(network, name, *told, f"{100 * same:.1f}", slope)


def gates_kept(ens: sn.SigmaEnsemble) -> float:
    """Return the share of the regularised gates that are above 0."""
    return (torch.cat(list(ens.regularized_gates().values()), dim=1) > 0).double().mean().item()


def contenders(
    settings: dict[str, Any],
    batch: int,
    device: torch.device,
    memory_format: torch.memory_format,
    autocast: torch.dtype | None,
) -> dict[str, Contender]:
    """Return the contenders by name: same images and labels, same optimiser."""
    torch.manual_seed(0)
    members, sigma, shape = settings["members"], settings["sigma"], settings["cost"]["image"]
    x = torch.randn(members * batch, *shape, device=device)
    labels = torch.randint(settings["cost"]["classes"], (members * batch,), device=device)

    def sigma_of(regularize: Any, at_once: int | None = None) -> sn.SigmaEnsemble:
        options = {"head": settings["head"], "regularize": regularize, "at_once": at_once}
        return sn.SigmaEnsemble(backbone(settings), members, **options)

    inner = sigma_of(INNER)
    ownership(inner, 1 / members + 0.03)
    networks = {
        PLAIN: DeepEnsemble([backbone(settings)]),
        PLAIN_ROWS: DeepEnsemble([backbone(settings)]),
        "σN-Ens": sigma_of(sigma["regularize"]),
        "σN-Ens, a member at a time": sigma_of(sigma["regularize"], at_once=1),
        "σN-Ens, slim": inner.to(device).slim(x[:2]),
        "Deep Ensembles": OneByOne(backbone(settings) for _ in range(members)),
    }
    made = {}
    for name, network in networks.items():
        own = slice(None if name == PLAIN_ROWS else batch)
        loss = functools.partial(sn.member_cross_entropy, labels=labels[own])
        made[name] = contender = contend(network.to(device), x[own], loss, memory_format)
        contender.autocast = autocast
        if isinstance(network, sn.SigmaEnsemble):
            contender.penalty = functools.partial(sn.diversity_loss, network, sigma["tau"], sigma["weight"])
    return made


def peak(job: Callable[[], object], device: torch.device) -> float:
    """Return the most MiB that torch holds on a device during a job beyond what it held before."""
    if device.type == "cpu":
        return peak_memory(job) / 2**20
    wait_for(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    job()
    wait_for(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def fits(contender: Contender) -> bool:
    """Take one step and one pass, and tell whether the device has the memory for them."""
    try:
        for phase in PHASES:
            getattr(contender, phase)()
            wait_for(contender.images.device)
    except torch.OutOfMemoryError:
        contender.optimizer.zero_grad()
        return False
    return True


def clock(report: Report, settings: dict[str, Any], given: Any, device: torch.device) -> None:
    """Time steps and passes in each precision and format, and tell them."""
    head = ["precision", "format", "network"]
    for what in ("training step", "evaluation"):
        head += [f"{what}, ms", "ratio to plain", "ratio to M·B images", "memory, MiB"]
    report.tell("", f"Steps and passes of {given.batch} images, n = {given.rounds} rounds:", "", *table(head, []))
    for precision, layout in itertools.product(given.precision, FORMATS):
        name, autocast = PRECISIONS[precision]
        every = contenders(settings, given.batch, device, FORMATS[layout], autocast)
        timed = {key: contender for key, contender in every.items() if fits(contender)}
        times = measure(timed, given.rounds, given.clock) if timed else {}
        for network in every:
            if network not in timed:
                report.row(name, layout, network, *["out of memory"] * 8)
                continue
            row = []
            for phase in PHASES:
                own = times[phase]
                row.append(cells(own[network], own[network])[0])
                row += [cells(own[network], own[base])[1] if base in own else "–" for base in (PLAIN, PLAIN_ROWS)]
                timed[network].optimizer.zero_grad()
                row.append(f"{peak(getattr(timed[network], phase), device):.1f}")
            report.row(name, layout, network, *row)
        del every, timed
        if device.type == "cuda":
            torch.cuda.empty_cache()


def about(device: torch.device) -> str:
    """Describe the device and the software, by what times and digits depend on."""
    known = machine()
    cpu = f"{known['cpu']}, {known['cores']} cores, {known['threads']} thread(s)"
    if device.type == "cpu":
        return f"{cpu}, torch {torch.__version__}"
    card, version = torch.cuda.get_device_properties(device), torch.backends.cudnn.version()
    gpu = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
    return f"{gpu}, CUDA {torch.version.cuda}, cuDNN {version}, torch {torch.__version__}; CPU {cpu}"


def main() -> int:
    """Train, compare and time; return the exit status."""
    parser = options_of(__doc__)
    parser.set_defaults(batch=128, rounds=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what is compared and timed")
    parser.add_argument("--images", type=count, default=2000, help="training images, rounded up to whole classes")
    parser.add_argument("--compared", type=count, default=300, help="test images, rounded up to whole classes")
    parser.add_argument("--epochs", type=count, default=2, help="passes over the training images")
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=["no", "bf16"], help="of the training")
    given = parser.parse_args()
    prepare(given.threads)
    if given.device == "cuda" and not torch.cuda.is_available():
        reason = "torch sees no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
        print(f"gpu.py: --device cuda: {reason}; --device cpu runs the same on the CPU", file=sys.stderr)
        return 1
    device = torch.device(given.device)
    settings = paths.settings("cifar10")
    channels, *_ = settings["cost"]["image"]
    shape = {"data": {"size": given.size}, "cost": {"image": [channels, given.size, given.size]}}
    settings = paths.merge(settings, {"backbone": {"width": given.width}, **shape})
    try:
        dataset = subset(settings, given.images, given.compared)
    except (OSError, ValueError) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 1
    report = Report(given.markdown)
    with tf32(False):
        sigma, what = settings["sigma"], f"ResNet-18 of width {given.width}, M = {settings['members']}"
        report.tell(
            f"{about(device)}; {what}, τ {sigma['tau']}, λ {sigma['weight']}, batch {given.batch}, {given.clock} time; "
            "TF32 off unless named."
        )
        ens = train(report, dataset, settings, given, device)
        compare(report, ens, dataset, settings, given, device)
        clock(report, settings, given, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
