"""Results of the pipeline: what a run leaves behind, tidy tables over seeds, and the statistics of comparisons."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from . import metrics, paths, uncertainty
from .analysis import sigma_norm_cos
from .checkpoint import save, write_tensors
from .ensemble import SigmaEnsemble

__all__ = ["Run", "interval", "multiply_adds", "parameters", "per_cent", "plus_minus", "summary", "sweep", "write_json"]


@dataclass(frozen=True)
class Run:
    """One cell of the pipeline: a method with its settings, trained once for every seed.

    Attributes:
        profile: Profile of `params.yaml`.
        name: Folder below the profile's results, for example `train/sigma` or `sweep_tau/0.1`.
        seeds: Seeds that were trained.
    """

    profile: str
    name: str
    seeds: tuple[int, ...]

    @property
    def folder(self) -> Path:
        return paths.results(self.profile, *self.name.split("/"))

    def checkpoint(self, seed: int) -> Path:
        """Weights of a seed."""
        return self.folder / f"seed{seed}.safetensors"

    def save(self, seed: int, model: nn.Module, logits: Mapping[str, np.ndarray]) -> None:
        """Write a seed's weights, its member logits {split: (N, M, K)} and, of a σN-Ens, its gates."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"logits/{split}": torch.from_numpy(array) for split, array in logits.items()}
        if isinstance(model, SigmaEnsemble):
            tensors |= {f"gates/{name}": gate.detach().cpu().contiguous() for name, gate in model.gates().items()}
        write_tensors(tensors, self._outputs(seed))
        save(model, self.checkpoint(seed))

    def logits(self, split: str) -> list[np.ndarray]:
        """Return the members' logits on a split, float32 (N, M, K), for each seed."""
        return [self._read(seed, "logits/")[split].numpy() for seed in self.seeds]

    def history(self) -> pd.DataFrame:
        """Return the training history of all seeds, as the training notebooks keep it."""
        return pd.read_csv(self.folder / "history.csv")

    def final_cross_entropy(self) -> np.ndarray:
        """Return the mean training cross-entropy of the last epoch, nats, for each seed: how far training got."""
        history = self.history()
        last = history[history["epoch"] == history["epoch"].max()]
        return last.groupby("seed")["cross_entropy"].mean().loc[list(self.seeds)].to_numpy()

    def probs(self, split: str) -> list[np.ndarray]:
        """Return the members' probabilities on a split, float64 (N, M, K), for each seed."""
        return [self._read(seed, "logits/")[split].double().softmax(-1).numpy() for seed in self.seeds]

    def gates(self) -> list[dict[str, Tensor]]:
        """Return the gates {layer name: (M, C)} for each seed; empty for methods without any."""
        return [self._read(seed, "gates/") for seed in self.seeds]

    def table(self, split: str, labels: np.ndarray, members: int | None = None) -> pd.DataFrame:
        """Return every measure of the run on a split, a row for each seed; columns are the metrics' names.

        `members` takes the first ones only, which makes sense for members that were trained on their own.
        """
        rows = []
        for seed, probs, gates in zip(self.seeds, self.probs(split), self.gates(), strict=True):
            probs = probs[:, :members]
            row = {"seed": seed, **metrics.classification(probs.mean(axis=1), labels)}
            row["jensen_gap"] = uncertainty.jensen_gap(probs, labels)
            row["disagreement"] = uncertainty.disagreement(probs)
            row["member_nll"] = row["nll"] + row["jensen_gap"]
            if gates:
                row["cos"] = sigma_norm_cos(gates)
            rows.append(row)
        return pd.DataFrame(rows).set_index("seed")

    def _outputs(self, seed: int) -> Path:
        return self.folder / f"seed{seed}.outputs.safetensors"

    def _read(self, seed: int, prefix: str) -> dict[str, Tensor]:
        from safetensors import safe_open

        path = self._outputs(seed)
        if not path.is_file():
            raise FileNotFoundError(f"{self.name} has no results for seed {seed}: run `dvc repro` or `dvc pull`")
        with safe_open(path, framework="pt") as file:
            names = sorted(name for name in file.keys() if name.startswith(prefix))  # noqa: SIM118
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def summary(values: Iterable[float]) -> dict[str, float]:
    """Return mean, sample standard deviation and n of a value over seeds.

    Examples:
        >>> summary([1, 2, 3])
        {'mean': 2.0, 'sd': 1.0, 'n': 3}
    """
    array = np.asarray(list(values), dtype=float)
    sd = float(array.std(ddof=1)) if len(array) > 1 else math.nan
    return {"mean": float(array.mean()), "sd": sd, "n": len(array)}


def sweep(profile: str, over: str, seeds: tuple[int, ...]) -> dict[float, Run]:
    """Return the runs of a sweep by value, in order; none where the profile has no such sweep.

    The lists of a profile hold the values beside its own. That one is not trained again: it is the comparison's run.

    Args:
        profile: Profile of `params.yaml`.
        over: `tau`, `lambda` or `members` of σN-Ens, or `members_packed` of Packed-Ensembles.
        seeds: Seeds that were trained.

    Raises:
        ValueError: for another `over`.
    """
    settings = paths.settings(profile)
    sweeps = {
        "tau": ("taus", settings["sigma"]["tau"], "sigma"),
        "lambda": ("lambdas", settings["sigma"]["weight"], "sigma"),
        "members": ("sizes", settings["members"], "sigma"),
        "members_packed": ("sizes", settings["members"], "packed_ensembles"),
    }
    if over not in sweeps:
        raise ValueError(f"a sweep is over one of {list(sweeps)}, not {over!r}")
    values, own, method = sweeps[over]
    runs = {value: Run(profile, f"sweep_{over}/{value}", seeds) for value in settings[values]}
    if runs:
        runs[own] = Run(profile, f"train/{method}", seeds)
    return dict(sorted(runs.items()))


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return Student's confidence interval of the mean of independent values.

    Of paired differences over seeds it is the interval of the paired t-test.

    Raises:
        ValueError: for fewer than two values, which have no spread.

    Examples:
        >>> low, high = interval([1.0, 2.0, 3.0])
        >>> round(low, 3), round(high, 3)
        (-0.484, 4.484)
    """
    from scipy import stats

    array = np.asarray(values, dtype=float)
    if len(array) < 2:
        raise ValueError(f"an interval needs at least two values, got {len(array)}")
    half = stats.t.ppf(0.5 + level / 2, len(array) - 1) * array.std(ddof=1) / math.sqrt(len(array))
    return float(array.mean() - half), float(array.mean() + half)


def plus_minus(values: Iterable[float], digits: int = 3) -> str:
    """Return values as "mean ± sd" with fixed decimals.

    Examples:
        >>> plus_minus([0.1, 0.2, 0.3])
        '0.200 ± 0.100'
    """
    s = summary(values)
    return f"{s['mean']:.{digits}f} ± {s['sd']:.{digits}f}"


def per_cent(values: Iterable[float], digits: int = 1) -> str:
    """Return fractions as "mean ± sd" in per cent."""
    s = summary(values)
    return f"{100 * s['mean']:.{digits}f} ± {100 * s['sd']:.{digits}f}"


def parameters(model: nn.Module) -> int:
    """Return the number of parameters, trainable or not; buffers do not count."""
    return sum(p.numel() for p in model.parameters())


def multiply_adds(model: nn.Module, image: Tensor) -> int:
    """Return the multiply-adds of one prediction, all members together; norms and activations do not count.

    Args:
        image: One input with its batch dimension, (1, …).
    """
    from torch.utils.flop_counter import FlopCounterMode

    model.eval()
    with torch.inference_mode():
        model(image)  # the first call of an ensemble proves folding, with passes of its own
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(image)
    return counter.get_total_flops() // 2


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write numbers as JSON with six significant digits, not-a-number as null, whole or not at all."""
    text = json.dumps(_plain(content), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _plain(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {str(key): _plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(value) for value in item]
    if isinstance(item, (bool, str)) or item is None:
        return item
    if isinstance(item, (int, np.integer)):
        return int(item)
    number = float(item)
    return float(f"{number:.6g}") if math.isfinite(number) else None
