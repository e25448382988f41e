"""One training loop for every method, on accelerate: seeded, deterministic, and resumable after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import backbones, baselines
from . import data as datasets
from .ensemble import SigmaEnsemble, load, parameter_groups
from .losses import diversity_loss, member_cross_entropy

__all__ = ["Recipe", "finetune", "fit", "predict", "train"]

SEED_STRIDE = 1000  # member m of seed s starts from s · 1000 + m


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. Source of the defaults: paper, section 5.

    Attributes:
        epochs: Passes over the training split.
        batch_size: Images a step; a last batch of one image joins the one before it.
        optimizer: "sgd" or "adam".
        lr: Peak learning rate; the scale logits' is `gamma_multiplier` times that, without weight decay.
        momentum, nesterov: Of SGD.
        weight_decay: On everything but the scale logits.
        schedule: "constant", "step" (× `factor` after each epoch in `milestones`), "cosine" or "one_cycle".
        crop: Padding of the random crop, pixels. flip: Mirror at random.
        precision: "no", "bf16" or "fp16", as accelerate names them.
    """

    epochs: int
    batch_size: int = 128
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    gamma_multiplier: float = 100.0
    schedule: str = "step"
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    crop: int = 0
    flip: bool = False
    precision: str = "no"

    @classmethod
    def parse(cls, block: dict[str, Any]) -> Recipe:
        """Return the recipe of a block of `params.yaml`.

        Raises:
            ValueError: naming an unknown or missing setting, or one out of range.
        """
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(block.keys() - known.keys())
        if unknown or "epochs" not in block:
            raise ValueError(f"training settings: unknown {unknown}, known {sorted(known)}, `epochs` required")
        recipe = cls(**{**block, "milestones": tuple(block.get("milestones", ()))})
        choices = {
            "optimizer": ("sgd", "adam"),
            "schedule": ("constant", "step", "cosine", "one_cycle"),
            "precision": ("no", "bf16", "fp16"),
        }
        for name, allowed in choices.items():
            if getattr(recipe, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, not {getattr(recipe, name)!r}")
        for name, least in {"epochs": 1, "batch_size": 2, "crop": 0}.items():
            value = getattr(recipe, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer ≥ {least}, not {value!r}")
        for name in ("lr", "gamma_multiplier", "factor"):
            if not 0 < getattr(recipe, name) < float("inf"):
                raise ValueError(f"{name} must be a number > 0, not {getattr(recipe, name)!r}")
        for name in ("momentum", "weight_decay"):
            if not 0 <= getattr(recipe, name) < float("inf"):
                raise ValueError(f"{name} must be a number ≥ 0, not {getattr(recipe, name)!r}")
        return recipe


def fit(
    model: nn.Module,
    dataset: datasets.Dataset,
    recipe: Recipe,
    *,
    seed: int,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    state: Path | None = None,
) -> list[dict[str, float]]:
    """Train a model in place on the training split, and return its history.

    Everything random is drawn afresh each epoch from `seed` and the epoch's number, so a run that was killed and
    continues from `state` ends with the same weights as one that was not.

    Args:
        model: Module from images (B, C, H, W) to member logits (B, M, K).
        dataset: Where the training split, its normalisation and the classes come from.
        recipe: Optimiser, schedule, batches and augmentation.
        seed: Of the order of the images and of their augmentation.
        penalty: Added to the cross-entropy, for example the diversity loss.
        state: File for the training state, replaced after every epoch. One that was left by the same recipe, seed
            and data is continued; any other is ignored.

    Returns:
        For every epoch: `epoch`, `lr`, `cross_entropy` (nats, mean over steps and members) and `penalty`.

    Raises:
        ValueError: if a label is no class, the training split is smaller than 2, or the loss is not finite; the
            step is named.
    """
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    split, mean, std = dataset.train, dataset.mean, dataset.std
    datasets.check_labels(split.labels, len(dataset.classes))
    if len(split.labels) < 2:
        raise ValueError(f"cannot train on {len(split.labels)} images")
    accelerator = Accelerator(mixed_precision=recipe.precision)
    images = datasets.to_tensor(split.images, mean, std).to(accelerator.device)
    labels = torch.from_numpy(split.labels).to(accelerator.device)
    fill = datasets.black(mean, std).to(accelerator.device)

    model.to(memory_format=torch.channels_last)
    optimizer = _optimizer(model, recipe)
    sizes = _batch_sizes(len(labels), recipe.batch_size)
    scheduler = _scheduler(optimizer, recipe, steps_per_epoch=len(sizes))
    prepared, optimizer = accelerator.prepare(model, optimizer)

    identity = _identity(model, dataset, recipe, seed)
    history = _resume(state, identity, model, optimizer, scheduler)
    with _deterministic():
        for epoch in range(len(history), recipe.epochs):
            model.train()
            set_seed(seed + (epoch + 1) * 1_000_003)
            draw = torch.Generator().manual_seed(torch.initial_seed())
            losses = []
            for batch in torch.randperm(len(labels), generator=draw).split(sizes):
                x = datasets.augment(images[batch], recipe.crop, recipe.flip, draw, fill)
                optimizer.zero_grad()
                with accelerator.autocast():
                    cross_entropy = member_cross_entropy(prepared(x), labels[batch])
                extra = torch.zeros(()) if penalty is None else penalty(model)
                accelerator.backward(cross_entropy + extra)
                optimizer.step()
                scheduler.step()
                losses.append(
                    torch.stack([cross_entropy.detach().float(), extra.detach().to(cross_entropy.device).float()])
                )
            losses = torch.stack(losses).cpu()
            bad = (~losses.isfinite().all(dim=1)).nonzero()
            if len(bad):
                step = epoch * len(sizes) + int(bad[0])
                raise ValueError(
                    f"the loss became {losses[bad[0, 0]].sum():f} at step {step} (epoch {epoch}, seed {seed})"
                )
            cross_entropy, extra = losses.double().mean(dim=0).tolist()
            lr = optimizer.param_groups[0]["lr"]
            history.append({"epoch": epoch, "lr": lr, "cross_entropy": cross_entropy, "penalty": extra})
            _keep(state, identity, model, optimizer, scheduler, history)
    return history


def train(
    method: str, dataset: datasets.Dataset, settings: dict[str, Any], *, seed: int, state: Path | None = None
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Build a method, train it, and return it with its history.

    The members of Deep Ensembles are trained one after the other, each from its own seed, and Single is the first
    of them: comparisons over seeds are paired.

    Args:
        method: One of `baselines.METHODS`.
        dataset: The data of the profile.
        settings: The settings of the profile.
        seed: Number of the repetition.
        state: Folder for the training state, removed by the caller once the results are safe.
    """
    recipe = Recipe.parse(settings["train"])
    model = _seeded(seed * SEED_STRIDE, lambda: baselines.build(method, lambda: _backbone(dataset, settings), settings))
    if not isinstance(model, baselines.DeepEnsemble):
        history = fit(
            model,
            dataset,
            recipe,
            seed=seed * SEED_STRIDE,
            penalty=_penalty(settings["sigma"]),
            state=state and state / "fit.pt",
        )
        return model, history
    history = []
    for m in range(len(model.nets)):
        member_seed = seed * SEED_STRIDE + m
        member = baselines.DeepEnsemble([_seeded(member_seed, lambda: _backbone(dataset, settings))])
        rows = fit(member, dataset, recipe, seed=member_seed, state=state and state / f"fit{m}.pt")
        model.nets[m] = member.nets[0]
        history += [{"member": m, **row} for row in rows]
    return model, history


def finetune(
    checkpoint: Path, dataset: datasets.Dataset, settings: dict[str, Any], *, seed: int, state: Path | None = None
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Convert a trained Single checkpoint into an ensemble with fresh heads, and fine-tune it.

    Source: paper, sections "Conversion" and 5 (Adam, λ 1e-4). Arguments as for `train`.
    """
    block = settings["finetune"]
    single = baselines.DeepEnsemble([_backbone(dataset, settings)])
    load(single, checkpoint)
    model = _seeded(
        seed * SEED_STRIDE,
        lambda: SigmaEnsemble.from_pretrained(
            single.nets[0], settings["members"], head=settings["head"], regularize=settings["sigma"]["regularize"]
        ),
    )
    history = fit(
        model,
        dataset,
        Recipe.parse(block["train"]),
        seed=seed * SEED_STRIDE,
        penalty=_penalty(block),
        state=state and state / "fit.pt",
    )
    return model, history


@torch.inference_mode()
def predict(model: nn.Module, images: np.ndarray, dataset: datasets.Dataset, batch_size: int = 500) -> np.ndarray:
    """Return member logits, float32 (N, M, K), of images (N, H, W, C) uint8, in evaluation mode."""
    device = next(model.parameters()).device
    model.eval()
    x = datasets.to_tensor(images, dataset.mean, dataset.std)
    with _deterministic():
        return np.concatenate([model(part.to(device)).float().cpu().numpy() for part in x.split(batch_size)])


def _backbone(dataset: datasets.Dataset, settings: dict[str, Any]) -> nn.Module:
    channels = dataset.train.images.shape[3]
    return backbones.build(classes=len(dataset.classes), in_channels=channels, **settings["backbone"])


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def _penalty(block: dict[str, Any]) -> Callable[[nn.Module], Tensor]:
    return lambda model: diversity_loss(model, tau=block["tau"], weight=block["weight"])


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """One thread, deterministic kernels, and no denormals: gates near zero make them, and CPUs crawl on them."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The sum's order, and so the last digits of every result, depends on the number of threads.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    groups = parameter_groups(model, recipe.lr, recipe.weight_decay, recipe.gamma_multiplier)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)


def _scheduler(
    optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler:
    schedulers = torch.optim.lr_scheduler
    total = recipe.epochs * steps_per_epoch
    if recipe.schedule == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, total)
    if recipe.schedule == "one_cycle":
        peaks = [group["lr"] for group in optimizer.param_groups]
        return schedulers.OneCycleLR(optimizer, peaks, total_steps=total)
    milestones = [epoch * steps_per_epoch for epoch in recipe.milestones] if recipe.schedule == "step" else []
    return schedulers.MultiStepLR(optimizer, milestones, recipe.factor)


def _batch_sizes(images: int, batch_size: int) -> list[int]:
    """Sizes of an epoch's batches; BatchNorm cannot train on one image, so a last one joins its neighbour."""
    sizes = [min(batch_size, images - start) for start in range(0, images, batch_size)]
    if sizes[-1] == 1:
        sizes[-2:] = [sum(sizes[-2:])]
    return sizes


def _identity(model: nn.Module, dataset: datasets.Dataset, recipe: Recipe, seed: int) -> str:
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    about = [shapes, dataset.card["sha256"], asdict(recipe), seed]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _keep(state: Path | None, identity: str, model, optimizer, scheduler, history) -> None:
    if state is None:
        return
    state.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "identity": identity,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "history": history,
    }
    temporary = state.with_suffix(".writing")
    torch.save(content, temporary)
    os.replace(temporary, state)


def _resume(state: Path | None, identity: str, model, optimizer, scheduler) -> list[dict[str, float]]:
    if state is None or not state.is_file():
        return []
    content = torch.load(state, weights_only=True)
    if content["identity"] != identity:
        return []
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    scheduler.load_state_dict(content["scheduler"])
    return content["history"]


def forget(state: Path) -> None:
    """Remove the training state of a run whose results are safe."""
    shutil.rmtree(state, ignore_errors=True)
