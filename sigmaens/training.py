"""One training loop for every method, on accelerate: seeded, deterministic, and resumable after a kill.

    torchrun --standalone --nproc-per-node N -m sigmaens.training PROFILE METHOD [RUN] [--seeds S …]
        [--tau τ] [--weight λ] [--members M] [--variant NAME]

trains one cell of the pipeline with the settings of `params.yaml`, in as many processes as `torchrun` or, on GPUs,
`accelerate launch` starts, and keeps what it reached. The cell's notebook, run next, takes the trained networks from
there and writes the results. Exit status: 0, or 1 for a call or a training that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import functools
import hashlib
import io
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import backbones, baselines, paths
from . import data as datasets
from .ensemble import SigmaEnsemble, load, parameter_groups
from .losses import diversity_loss, member_cross_entropy
from .slim import Settling, close
from .synchronized import SynchronizedBatchNorm
from .text import check_ids

__all__ = [
    "Recipe",
    "backbone",
    "conversion_error",
    "finetune",
    "fit",
    "forget",
    "main",
    "predict",
    "restore",
    "side_by_side",
    "together",
    "train",
    "varied",
]

SEED_STRIDE = 1000  # member m of seed s starts from s · 1000 + m


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. Source of the defaults: paper, section 5.

    Attributes:
        epochs: Passes over the training split.
        batch_size: Images or sentences a step, of all processes together; a last batch of one joins the one before it.
        optimizer: "sgd" or "adam".
        lr: Peak learning rate; the scale logits' is `gamma_multiplier` times that, without weight decay.
        momentum, nesterov: Of SGD.
        weight_decay: On everything but the scale logits and the vectors of BatchEnsemble.
        schedule: "constant", "step" (× `factor` after each epoch in `milestones`), "cosine" or "one_cycle".
        warmup: Steps in which the learning rate rises linearly, before the schedule takes the rest.
        crop: Padding of the random crop, pixels. flip: Mirror at random. Of images in memory; those that are streamed
            take the usual augmentation of ImageNet (`data.decode`).
        precision: "no", "bf16" or "fp16", as accelerate names them.
        accumulate: How many parts of a batch run one after the other, for memory. A step is the same but for rounding;
            only BatchNorm takes its statistics from one part at a time.
        sync_batch_norm: In several processes, take BatchNorm's statistics from the rows of all, as one process does.
            Else each takes its own rows', and the running statistics that are kept are those of the first.
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
    warmup: int = 0
    crop: int = 0
    flip: bool = False
    precision: str = "no"
    accumulate: int = 1
    sync_batch_norm: bool = False

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
        milestones = block.get("milestones", ())
        if not isinstance(milestones, (list, tuple)) or not all(_whole(m) and m > 0 for m in milestones):
            raise ValueError(f"milestones must be a list of epochs > 0, not {milestones!r}")
        recipe = cls(**{**block, "milestones": tuple(milestones)})

        def require(fits: bool, name: str, allowed: str) -> None:
            if not fits:
                raise ValueError(f"{name} must be {allowed}, not {getattr(recipe, name)!r}")

        choices = {
            "optimizer": ("sgd", "adam"),
            "schedule": ("constant", "step", "cosine", "one_cycle"),
            "precision": ("no", "bf16", "fp16"),
        }
        for name, allowed in choices.items():
            require(getattr(recipe, name) in allowed, name, f"one of {allowed}")
        for name, least in {"epochs": 1, "batch_size": 2, "warmup": 0, "crop": 0, "accumulate": 1}.items():
            value = getattr(recipe, name)
            require(_whole(value) and value >= least, name, f"an integer ≥ {least}")
        for name in ("lr", "gamma_multiplier", "factor"):
            value = getattr(recipe, name)
            require(_real(value) and 0 < value < math.inf, name, "a number > 0")
        for name, end in {"momentum": 1, "weight_decay": math.inf}.items():
            value = getattr(recipe, name)
            require(_real(value) and 0 <= value < end, name, "a number ≥ 0" + (" and < 1" if end == 1 else ""))
        for name in ("nesterov", "flip", "sync_batch_norm"):
            require(isinstance(getattr(recipe, name), bool), name, "true or false")
        require(not recipe.warmup or recipe.schedule != "one_cycle", "warmup", "0 with one_cycle, which has its own")
        require(2 * recipe.accumulate <= recipe.batch_size, "accumulate", f"at most half of {recipe.batch_size} rows")
        return recipe


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _real(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def fit(
    model: nn.Module,
    dataset: datasets.Dataset,
    recipe: Recipe,
    *,
    seed: int,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    slim: Settling | None = None,
    state: Path | None = None,
) -> list[dict[str, float]]:
    """Train a model in place on the training split, and return its history.

    Everything random is drawn afresh each epoch from `seed` and the epoch's number, so a run that was killed and
    continues from `state` ends with the same weights as one that was not.

    With `slim`, the regularised gates of a σN-Ens that are closed when the rule says so are closed for good, and the
    epochs that follow run without their channels, on the same weights and with the state the optimiser has. The
    gradients are those of the full pass with these gates at 0. Further gates that close and settle go later.

    An ensemble with `at_once` members runs and learns chunk by chunk, so that memory does not grow with M.

    In several processes, started by `accelerate launch` or `torchrun`, all call this alike. Each runs its rows of every
    batch for its part of the loss, and the gradients are summed: weights, history and predictions are those of one
    process, up to rounding, where BatchNorm is synchronised (see `Recipe`) and the network draws nothing at random.
    Dropout and MIMO's orders are drawn in each process. All end with the same model. The first process keeps the state;
    the others need not see its file.

    Args:
        model: Module from images (B, C, H, W) to member logits (B, M, K). Several processes start from the first's.
        dataset: Where the training split, its normalisation and the classes come from.
        recipe: Optimiser, schedule, batches and augmentation.
        seed: Of the order of the images and of their augmentation.
        penalty: Added to the cross-entropy, for example the diversity loss.
        slim: When training goes on slim; None for never, as in the paper.
        state: File for the training state, replaced after every epoch. One that was left by the same initial
            weights, data, recipe, seed and settings of the penalty (the keywords of a `functools.partial`) is
            continued; one left by others, or damaged, is ignored.

    Returns:
        For every epoch: `epoch`, `lr` at its start, `cross_entropy` (nats, mean over steps and members) and `penalty`;
        of a σN-Ens what `Settling.observe` says of the regularised gates, and `slim`, the share of these left out.

    Raises:
        ValueError: if a label is no class, the training split is smaller than 2, or the loss is not finite, in any
            process; the step is named. Also if accelerate is set up to shard the model.
        TypeError: if what is to become slim is no σN-Ens.
    """
    from accelerate.utils import set_seed

    if slim is not None and not isinstance(model, SigmaEnsemble):
        raise TypeError(f"only a SigmaEnsemble can become slim, not a {type(model).__name__}")
    split = dataset.train
    datasets.check_labels(split.labels, len(dataset.classes))
    if len(split.labels) < 2:
        raise ValueError(f"cannot train on {len(split.labels)} {'sentences' if dataset.is_text else 'images'}")
    accelerator = _accelerator(recipe.precision)
    rank, processes = accelerator.process_index, accelerator.num_processes
    inputs = None if dataset.is_streamed else dataset.tensor(split.inputs).to(accelerator.device)
    labels = torch.from_numpy(split.labels).to(accelerator.device)
    fill = None if dataset.is_text else datasets.black(dataset.mean, dataset.std).to(accelerator.device)
    lengths = _lengths(dataset, split.inputs) if dataset.is_text else None

    model.to(memory_format=torch.channels_last)
    optimizer = _optimizer(model, recipe)
    sizes = _batch_sizes(len(labels), recipe.batch_size)
    scheduler = _scheduler(optimizer, recipe, steps_per_epoch=len(sizes))
    # Several processes sum their gradients below: DistributedDataParallel would average them, and refuse slim members
    # and members in chunks. "Evaluation" stands for a model that is not wrapped in it.
    prepare = functools.partial(accelerator.prepare_model, evaluation_mode=True)
    prepared, optimizer = prepare(model), accelerator.prepare(optimizer)
    full = prepared
    parts = functools.partial(_parts, recipe=recipe, rank=rank, processes=processes)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    if processes > 1:
        _agree(model)
    identity = _identity(model, dataset, recipe, seed, penalty, slim)
    running = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if accelerator.scaler is not None:
        running["scaler"] = accelerator.scaler  # of fp16
    history = _resume(_from_first(accelerator, state), identity, running)
    watch = slim or Settling()
    out = history[-1]["slim"] if slim and history else 0.0  # share of the regularised gates that are left out
    left_out = 0.0
    with _deterministic():
        for epoch in range(len(history), recipe.epochs):
            if slim and slim.settled(history):
                out = close(model, slim.threshold)
            if out > left_out:
                narrow = model.slim(_example(dataset).to(accelerator.device), threshold=0.0, share=True)
                # It is on the device; `to` would copy buffers from "cpu" to "cpu:0", which then are not shared.
                prepared = prepare(narrow, device_placement=False)
                left_out = out
            prepared.train()
            set_seed(seed + (epoch + 1) * 1_000_003)
            drawn = torch.initial_seed()
            draw = torch.Generator().manual_seed(drawn)
            if rank:
                set_seed(drawn + rank)  # of what is not drawn for the whole batch
            lr = optimizer.param_groups[0]["lr"]
            before = watch.gates(model)
            losses = []
            batches = _batches(sizes, draw, lengths)
            if inputs is None:
                own = [batch[rows] for batch in batches for rows, _ in parts(len(batch))]
                decoded = dataset.stream(split.inputs, own, seed=drawn)
            for batch in batches:
                if inputs is not None:
                    whole = inputs[batch]
                    if fill is not None:
                        whole = datasets.augment(whole, recipe.crop, recipe.flip, draw, fill)
                optimizer.zero_grad()
                cross_entropy, extra = 0.0, torch.zeros(()) if penalty is None else penalty(model)
                extra = left = extra / processes
                for rows, weight in parts(len(batch)):
                    x = next(decoded).to(accelerator.device) if inputs is None else whole[rows]
                    passes = _passes(prepared, x)
                    synchronized = recipe.sync_batch_norm and processes > 1
                    while True:
                        with (
                            accelerator.autocast(),
                            SynchronizedBatchNorm(weight > 0) if synchronized else contextlib.nullcontext(),
                        ):
                            share, logits = next(passes, (0, None))
                            if logits is None:
                                break
                            part = weight * share * member_cross_entropy(logits, labels[batch[rows]])
                        accelerator.backward(part + left)
                        cross_entropy, left = cross_entropy + part.detach().float(), 0.0
                if processes > 1:
                    _sum_gradients(parameters)
                optimizer.step()
                scheduler.step()
                losses.append(torch.stack([cross_entropy, extra.detach().to(cross_entropy.device).float()]))
            losses = accelerator.reduce(torch.stack(losses), "sum").cpu()
            bad = (~losses.isfinite().all(dim=1)).nonzero()
            if len(bad):
                step = epoch * len(sizes) + int(bad[0])
                raise ValueError(
                    f"the loss became {losses[bad[0, 0]].sum():f} at step {step} (epoch {epoch}, seed {seed})"
                )
            cross_entropy, extra = losses.double().mean(dim=0).tolist()
            row = {"epoch": epoch, "lr": lr, "cross_entropy": cross_entropy, "penalty": extra}
            if before is not None:
                row |= {**watch.observe(before, watch.gates(model)), "slim": out}
            history.append(row)
            if accelerator.is_main_process:
                _keep(state, identity, running, history)
    # Mixed precision is put around the model's own forward; without this, predictions would be rounded too.
    accelerator.unwrap_model(full, keep_fp32_wrapper=False)
    if processes > 1:
        _agree(model)  # on the running statistics, where each process has its own
    return history


def _accelerator(precision: str) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import InitProcessGroupKwargs

    # accelerate keeps one state a process, and with it the precision of the first call.
    AcceleratorState._reset_state()
    launched = int(os.environ.get("WORLD_SIZE", 1))
    # Processes may wait long for the first one, which reads and writes files. Of CPUs accelerate has to be told.
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=2))
    cpu = launched > 1 and not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu, kwargs_handlers=[patient])
    if precision == "fp16" and accelerator.device.type == "cpu":
        raise ValueError("precision fp16 needs a GPU; on a CPU accelerate would train in float32 instead: take bf16")
    if accelerator.num_processes != launched:
        raise ValueError(f"{launched} processes were started, but accelerate has {accelerator.num_processes}")
    if launched > 1 and not accelerator.distributed_type.startswith("MULTI_"):
        raise ValueError(
            f"accelerate is set up for {accelerator.distributed_type.value}, but fit keeps the whole model in every "
            "process: choose several GPUs or CPUs in `accelerate config`, without FSDP or DeepSpeed"
        )
    return accelerator


def _passes(model: nn.Module, x: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Yield logits and the share of the members they are of: of all, or of `at_once` members after the other."""
    if getattr(model, "at_once", None) is None:
        yield 1.0, model(x)
    else:
        for logits in model.chunks(x):
            yield logits.shape[1] / model.members, logits


def _parts(rows: int, recipe: Recipe, rank: int, processes: int) -> list[tuple[slice, float]]:
    """Return which rows of a batch this process runs, part after part, and the weight of each in the batch's mean loss.

    A small last batch has fewer parts than `accumulate`. The processes share a part evenly, but none takes fewer than 2
    rows, since BatchNorm cannot train on one: where there are too few, the later processes run the first one's along,
    at weight 0.

    >>> recipe = Recipe(epochs=1, batch_size=8, accumulate=2)
    >>> _parts(8, recipe, rank=1, processes=2)
    [(slice(2, 4, None), 0.25), (slice(6, 8, None), 0.25)]
    >>> _parts(3, recipe, rank=1, processes=2)
    [(slice(0, 3, None), 0.0)]
    """
    size = math.ceil(recipe.batch_size / recipe.accumulate)
    parts = []
    for part in _evenly(range(rows), min(recipe.accumulate, math.ceil(rows / size), rows // 2)):
        shares = _evenly(part, min(processes, len(part) // 2))
        counted = rank < len(shares)
        own = shares[rank if counted else 0]
        parts.append((slice(own.start, own.stop), counted * len(own) / rows))
    return parts


def _evenly(rows: range, parts: int) -> list[range]:
    return [rows[len(rows) * i // parts : len(rows) * (i + 1) // parts] for i in range(parts)]


def _sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Put the sum over all processes in the place of each gradient, in one exchange; None where all have none."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    used = gradients[0].new_tensor([p.grad is not None for p in parameters])
    flat = torch.cat([used, *(gradient.flatten() for gradient in gradients)])
    torch.distributed.all_reduce(flat)
    used, *sums = flat.split([len(used), *(p.numel() for p in parameters)])
    for parameter, gradient, total, somewhere in zip(parameters, gradients, sums, used, strict=True):
        if parameter.grad is not None or somewhere:  # which is seldom asked: it waits for the device
            parameter.grad = gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def _agree(model: nn.Module) -> None:
    """Give every process the first one's parameters and buffers."""
    for tensor in model.state_dict().values():
        sent = tensor.contiguous()
        torch.distributed.broadcast(sent, 0)
        tensor.copy_(sent)


def _from_first(accelerator: Any, state: Path | None) -> bytes:
    """Return the file of the training state as the first process reads it, in all of them; empty if there is none."""
    from accelerate.utils import broadcast_object_list

    content = state.read_bytes() if state and accelerator.is_main_process and state.is_file() else b""
    return broadcast_object_list([content])[0]


def train(
    method: str, dataset: datasets.Dataset, settings: dict[str, Any], *, seed: int, state: Path | None = None
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Build a method, train it, and return it with its history.

    The members of Deep Ensembles are trained one after the other, each from its own seed, and Single is the first
    of them: comparisons over seeds are paired.

    Args:
        method: One of `baselines.METHODS` but `finetune`, which starts from a checkpoint.
        dataset: The data of the profile.
        settings: The settings of the profile; `peers[method]["train"]` replaces some of `train` for a method.
        seed: Number of the repetition.
        state: Folder for the training state, removed by the caller once the results are safe.
    """
    if method == "finetune":
        raise ValueError("method 'finetune' starts from a checkpoint: call finetune")
    own = settings.get("peers", {}).get(method, {}).get("train", {})
    recipe = Recipe.parse({**settings["train"], **own})
    model = _seeded(seed * SEED_STRIDE, lambda: baselines.build(method, lambda: _backbone(dataset, settings), settings))
    if not isinstance(model, baselines.DeepEnsemble):
        sigma = baselines.sigma_settings(method, settings) if isinstance(model, SigmaEnsemble) else None
        history = fit(
            model,
            dataset,
            recipe,
            seed=seed * SEED_STRIDE,
            penalty=sigma and _penalty(sigma),
            slim=Settling(sigma["threshold"], sigma["patience"]) if method == "sigma_slim" else None,
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
) -> tuple[nn.Module, list[dict[str, float]], float]:
    """Convert a trained Single checkpoint into an ensemble with fresh heads, and fine-tune it.

    Returns:
        The ensemble, its history, and how exact the conversion was: with the old head kept, the largest difference
        from the checkpoint's outputs on the validation images, relative to the largest output.

    Source: paper, sections "Conversion" and 5 (Adam, λ 1e-4). Arguments as for `train`.
    """
    block = settings["finetune"]
    single = restore("single", checkpoint, dataset, settings)
    exact = conversion_error(single.nets[0], dataset, settings["members"])

    model = _seeded(seed * SEED_STRIDE, lambda: baselines.build("finetune", lambda: single.nets[0], settings))
    history = fit(
        model,
        dataset,
        Recipe.parse(block["train"]),
        seed=seed * SEED_STRIDE,
        penalty=_penalty(block),
        state=state and state / "fit.pt",
    )
    return model, history, exact


def conversion_error(net: nn.Module, dataset: datasets.Dataset, members: int) -> float:
    """Return how exact a conversion is that keeps the head.

    It is the largest difference between the members' outputs and the network's on the validation inputs, relative
    to the largest output.
    """
    kept = SigmaEnsemble.from_pretrained(net, members)
    single = baselines.DeepEnsemble([net])
    before, after = (predict(model, dataset.validation.inputs, dataset) for model in (single, kept))
    return float(np.abs(after - before).max() / np.abs(before).max())


def restore(method: str, checkpoint: Path, dataset: datasets.Dataset, settings: dict[str, Any]) -> nn.Module:
    """Return the trained module of a method from its checkpoint; of `sigma_slim` the slim ensemble."""
    model = load(baselines.build(method, lambda: _backbone(dataset, settings), settings), checkpoint)
    if method == "sigma_slim":
        return model.slim(_example(dataset), threshold=0.0)
    return model


def predict(
    model: nn.Module, inputs: np.ndarray, dataset: datasets.Dataset, batch_size: int | None = None
) -> np.ndarray:
    """Return member logits, float32 (N, M, K), in evaluation mode, computed on the GPU where there is one.

    Args:
        model: Module from the data set's inputs to member logits. It stays where it is; a GPU works on a copy.
        inputs: Images (N, H, W, C) uint8, or token ids (N, L) int32, which run by length, so that little is padding.
        dataset: Where the normalisation, or the id of padding, comes from.
        batch_size: Rows at once; None takes 500 images or 50 sentences.
    """
    model.eval()
    device = next(model.parameters()).device
    if device.type == "cpu" and _gpu() is not None:
        device = _gpu()
        model = copy.deepcopy(model).to(device)
    order = _lengths(dataset, inputs).argsort(stable=True) if dataset.is_text else torch.arange(len(inputs))
    parts = order.split(batch_size or (50 if dataset.is_text else 500))
    with _deterministic(), torch.inference_mode():
        logits = [model(x.to(device)).float().cpu() for x in dataset.stream(inputs, parts)]
    return torch.cat(logits)[order.argsort()].contiguous().numpy()


def side_by_side(function: Callable[[int], Any], seeds: Sequence[int]) -> dict[int, Any]:
    """Call `function` with every seed, on Linux without a GPU each in a process of its own, and return {seed: result}.

    Every run is single-threaded and seeded, so the results do not depend on the number of cores.
    """
    if len(seeds) == 1 or _gpu() is not None or sys.platform != "linux":
        return {seed: function(seed) for seed in seeds}
    # Forked, a process starts with everything imported and loaded, a function of the notebook included.
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(seeds), mp_context=fork, initializer=_die_with_parent) as pool:
        return dict(zip(seeds, pool.map(function, seeds), strict=True))


def _gpu() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    # Read when cuBLAS is first used, which must not be before: its results would vary.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return torch.device("cuda", torch.cuda.current_device())


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens: no worker writes on alone."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of Linux' prctl
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def varied(
    settings: dict[str, Any],
    *,
    tau: float | None = None,
    weight: float | None = None,
    members: int | None = None,
    variant: str | None = None,
) -> dict[str, Any]:
    """Return a profile's settings as a cell of the pipeline changes them; None keeps the profile's value.

    Args:
        tau, weight: Temperature and λ of σN-Ens.
        members: Number of members M.
        variant: One of the profile's `variants`, with the norms of `slim` regularised.

    Raises:
        ValueError: if the profile has no such variant.
    """
    sigma = {key: value for key, value in {"tau": tau, "weight": weight}.items() if value is not None}
    settings = paths.merge(settings, {"sigma": sigma, **({} if members is None else {"members": members})})
    if variant is None:
        return settings
    if variant not in settings.get("variants", {}):
        raise ValueError(f"no variant {variant!r}; the profile has {sorted(settings.get('variants', {}))}")
    settings["sigma"]["regularize"] = settings["slim"]["regularize"]
    return paths.merge(settings, settings["variants"][variant])


def together(processes: int, profile: str, method: str, *, run: str, **changes: Any) -> None:
    """Train a cell in several processes of this machine, up to its training state; with one process, do nothing.

    `train`, called with that state, then finds the networks trained. See `main` for the command line that is run.

    Args:
        processes: How many, each with its own GPU where there are any.
        profile, method, run: Of the cell.
        changes: As `varied` takes them.

    Raises:
        ValueError: if `processes` is no integer ≥ 1, or more than there are GPUs.
        ChildProcessError: if training fails; the message is that of the process that failed.
    """
    if not _whole(processes) or processes < 1:
        raise ValueError(f"processes must be an integer ≥ 1, not {processes!r}")
    if processes == 1:
        return
    if 0 < torch.cuda.device_count() < processes:
        raise ValueError(f"processes must be at most the number of GPUs, {torch.cuda.device_count()}, not {processes}")
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    options = [f"--{key}={value}" for key, value in changes.items() if value is not None]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "sigmaens.training", profile, method, run, *options],
        cwd=paths.root(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    if done.returncode:
        lines = dict.fromkeys(line for line in done.stderr.splitlines() if line.startswith(_COMPLAINT))
        raise ChildProcessError("\n".join(lines) or f"training in {processes} processes failed:\n{done.stderr}")


_COMPLAINT = "sigmaens.training: "


def main(argv: list[str] | None = None) -> int:
    """Run the command line in this module's docstring and return its exit status."""
    parser = argparse.ArgumentParser(prog="sigmaens.training", description="Train one cell, up to its training state.")
    parser.add_argument("profile")
    parser.add_argument("method", help=f"one of {', '.join(baselines.METHODS)}")
    parser.add_argument("run", nargs="?", help="folder of the results below the profile's (default: train/METHOD)")
    parser.add_argument("--seeds", type=int, nargs="+", help="some of the profile's (default: all)")
    for name, kind in {"tau": float, "weight": float, "members": int, "variant": str}.items():
        parser.add_argument(f"--{name}", type=kind, help="instead of the profile's")
    options = parser.parse_args(argv)
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        _die_with_parent()
    try:
        changes = {name: getattr(options, name) for name in ("tau", "weight", "members", "variant")}
        changed = [f"--{name}" for name, value in changes.items() if value is not None]
        if changed and options.run is None:
            raise ValueError(f"{' and '.join(changed)}: name the folder of this run, for example sweep_tau/0.3")
        settings = varied(paths.settings(options.profile), **changes)
        if unknown := sorted(set(options.seeds or ()) - set(settings["seeds"])):
            raise ValueError(f"--seeds: {unknown} are none of the profile's, {settings['seeds']}")
        dataset = datasets.load(paths.data(options.profile))
        run = options.run or ("finetune" if options.method == "finetune" else f"train/{options.method}")
        for seed in options.seeds or settings["seeds"]:
            state = paths.state(options.profile, *run.split("/"), str(seed))
            if options.method == "finetune":
                single = paths.results(options.profile, "train", "single", f"seed{seed}.safetensors")
                history = finetune(single, dataset, settings, seed=seed, state=state)[1]
            else:
                history = train(options.method, dataset, settings, seed=seed, state=state)[1]
            if os.environ.get("RANK", "0") == "0":
                reached = f"{len(history)} epochs, cross-entropy {history[-1]['cross_entropy']:.4g}"
                print(f"{options.profile} {run} seed {seed}: {reached}", flush=True)
    except (KeyError, OSError, TypeError, ValueError) as error:
        print(f"{_COMPLAINT}{error}", file=sys.stderr, flush=True)
        return 1
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def backbone(dataset: datasets.Dataset, settings: dict[str, Any], seed: int) -> nn.Module:
    """Return the backbone of a profile as it is before training, the first one of a seed."""
    return _seeded(seed * SEED_STRIDE, lambda: _backbone(dataset, settings))


def _example(dataset: datasets.Dataset) -> Tensor:
    """Two inputs, for reading a backbone's graph."""
    return next(iter(dataset.stream(dataset.validation.inputs, [torch.arange(2)])))


def _backbone(dataset: datasets.Dataset, settings: dict[str, Any]) -> nn.Module:
    channels = None if dataset.is_text else 3 if dataset.is_streamed else dataset.train.inputs.shape[3]
    net = backbones.build(classes=len(dataset.classes), in_channels=channels, **settings["backbone"])
    if dataset.is_text and isinstance(net, backbones.Tokens):
        check_ids(dataset, settings["backbone"]["model"], padding=net.padding, vocabulary=net.vocabulary)
    return net


def _seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # networks are made on the CPU
        return make()


def _penalty(block: dict[str, Any]) -> Callable[[nn.Module], Tensor]:
    return functools.partial(diversity_loss, tau=block["tau"], weight=block["weight"])


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """One thread, deterministic kernels, and no denormals: gates near zero make them, and CPUs crawl on them.

    Afterwards these settings, and all random states, are as they were.
    """
    threads = torch.get_num_threads()
    strict = torch.are_deterministic_algorithms_enabled()
    lenient = torch.is_deterministic_algorithms_warn_only_enabled()
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    # Every process would otherwise wake all GPUs, for their random states.
    devices = [gpu] if (gpu := _gpu()) else []
    # The sum's order, and so the last digits of every result, depends on the number of threads.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(strict, warn_only=lenient)


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    groups = parameter_groups(model, recipe.lr, recipe.weight_decay, recipe.gamma_multiplier)
    if recipe.optimizer == "adam":
        return torch.optim.Adam(groups, lr=recipe.lr)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov)


def _scheduler(
    optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int
) -> torch.optim.lr_scheduler.LRScheduler:
    schedulers = torch.optim.lr_scheduler
    warmup, total = recipe.warmup, recipe.epochs * steps_per_epoch
    if warmup >= total:
        raise ValueError(f"warmup must be less than the {total} steps of training, not {warmup}")
    if recipe.schedule == "cosine":
        main = schedulers.CosineAnnealingLR(optimizer, total - warmup)
    elif recipe.schedule == "one_cycle":
        peaks = [group["lr"] for group in optimizer.param_groups]
        main = schedulers.OneCycleLR(optimizer, peaks, total_steps=total, cycle_momentum=False)
    else:
        milestones = [epoch * steps_per_epoch - warmup for epoch in recipe.milestones if recipe.schedule == "step"]
        main = schedulers.MultiStepLR(optimizer, milestones, recipe.factor)
    if not warmup:
        return main
    rise = schedulers.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return schedulers.SequentialLR(optimizer, [rise, main], [warmup])


def _batch_sizes(rows: int, batch_size: int) -> list[int]:
    """Sizes of an epoch's batches; BatchNorm cannot train on one row, so a last one joins its neighbour."""
    sizes = [min(batch_size, rows - start) for start in range(0, rows, batch_size)]
    if sizes[-1] == 1:
        sizes[-2:] = [sum(sizes[-2:])]
    return sizes


def _batches(sizes: list[int], draw: torch.Generator, lengths: Tensor | None) -> Sequence[Tensor]:
    """Draw the batches of an epoch, each of row numbers.

    Sentences are drawn for 16 batches at a time, which get them by length and are then shuffled: a batch is cut to
    its longest sentence, so that this halves the arithmetic, and every epoch still mixes anew.
    """
    order = torch.randperm(sum(sizes), generator=draw)
    batches = order.split(sizes)
    if lengths is None:
        return batches
    mixed = []
    for start in range(0, len(sizes), 16):
        rows = torch.cat(batches[start : start + 16])
        mixed += rows[lengths[rows].argsort(stable=True)].split(sizes[start : start + 16])
    return [mixed[i] for i in torch.randperm(len(mixed), generator=draw)]


def _lengths(dataset: datasets.Dataset, inputs: np.ndarray) -> Tensor:
    return torch.from_numpy((inputs != dataset.card["pad"]).sum(axis=1))


def _identity(
    model: nn.Module, dataset: datasets.Dataset, recipe: Recipe, seed: int, penalty: Any, slim: Settling | None
) -> str:
    about = [dataset.card["sha256"], asdict(recipe), seed, getattr(penalty, "keywords", None), slim and asdict(slim)]
    # Whatever is no tensor, such as rates of dropout and sizes.
    about += [nn.Module.__repr__(model), getattr(model, "regularized", None)]
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _keep(state: Path | None, identity: str, running: dict[str, Any], history: list[dict[str, float]]) -> None:
    if state is None:
        return
    state.parent.mkdir(parents=True, exist_ok=True)
    content = {"identity": identity, "history": history, **{name: part.state_dict() for name, part in running.items()}}
    temporary, buffer = state.with_suffix(f".{os.getpid()}.writing"), io.BytesIO()
    torch.save(content, buffer)  # to a full disk, torch raises a RuntimeError that names neither file nor reason
    try:
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, state)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the training state: {error.strerror}", str(state)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _resume(kept: bytes, identity: str, running: dict[str, Any]) -> list[dict[str, float]]:
    try:
        with zipfile.ZipFile(io.BytesIO(kept)) as archive:
            if archive.testzip() is not None:  # torch.load compares no checksum
                return []
        content = torch.load(io.BytesIO(kept), weights_only=True, map_location="cpu")
    except Exception:  # torch raises half a dozen types for a damaged file
        return []
    if not isinstance(content, dict) or content.get("identity") != identity:
        return []
    for name, part in running.items():
        part.load_state_dict(content[name])
    return content["history"]


def forget(state: Path) -> None:
    """Remove the training state of a run whose results are safe."""
    shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
