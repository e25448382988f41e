"""The look of every figure, and the plots that recur. Files are the same bytes whenever they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

__all__ = [
    "COLORS",
    "LABELS",
    "MARKERS",
    "PALETTE",
    "gate_matrix",
    "history",
    "reliability",
    "save",
    "spread",
    "style",
    "use_style",
]

PALETTE = [*sns.color_palette("colorblind"), (0.0, 0.0, 0.0)]
# Name, colour and marker of a method are the same in every figure.
_METHODS = {
    "single": ("Single", 7, "s"),
    "deep_ensembles": ("Deep Ensembles", 0, "D"),
    "mc_dropout": ("MC-Dropout", 9, "^"),
    "batch_ensemble": ("BatchEnsemble", 4, "P"),
    "mimo": ("MIMO", 5, "X"),
    "masksembles": ("Masksembles", 6, "<"),
    "film_ensemble": ("FiLM-Ensemble", 8, ">"),
    "packed_ensembles": ("Packed-Ensembles", 1, "h"),
    "packed_ensembles_gamma2": ("Packed-Ensembles γ=2", 1, "p"),
    "lora_ensemble": ("LoRA-Ensemble", 6, ">"),
    "sigma": ("σN-Ens", 3, "o"),
    "sigma_slim": ("σN-Ens slim", 10, "*"),
    "finetune": ("σN-Ens FineTune", 2, "v"),
}
LABELS = {method: name for method, (name, _, _) in _METHODS.items()}
COLORS = {method: PALETTE[color] for method, (_, color, _) in _METHODS.items()}
MARKERS = {method: marker for method, (_, _, marker) in _METHODS.items()}


def style(method: str) -> dict[str, object]:
    """Return colour, marker and label of a method, for `spread`, `plot` and `errorbar`."""
    return {"color": COLORS[method], "marker": MARKERS[method], "label": LABELS[method]}


def use_style() -> None:
    """Set the style of all figures that follow."""
    sns.set_theme(context="paper", style="ticks", palette="colorblind")
    plt.rcParams.update(
        {
            "figure.constrained_layout.use": True,
            "figure.dpi": 110,
            "savefig.dpi": 200,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.labelsize": 10,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "svg.hashsalt": "sigmaens",
        }
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as `path`.png and `path`.svg, without dates or versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), metadata={"Software": None})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})


def spread(axes: Axes, x: Sequence[float], values: np.ndarray, **style) -> None:
    """Draw the mean over seeds with bars of one sample standard deviation.

    Args:
        axes: Where to draw.
        x: Positions, (P,).
        values: (P, S), a column for each seed.
        style: Passed to `errorbar`.
    """
    values = np.asarray(values, dtype=float)
    style = {"capsize": 2.5, "markersize": 4.5, "linewidth": 1.4, "marker": "o", **style}
    axes.errorbar(x, values.mean(axis=1), yerr=values.std(axis=1, ddof=1), **style)


def history(table: pd.DataFrame) -> None:
    """Draw cross-entropy and penalty over epochs, a line for each seed (mean over the members trained on their own).

    Args:
        table: Columns `seed`, `epoch`, `cross_entropy` and `penalty`, as `training.fit` keeps them; where there are,
            the shares of the gates too.
    """
    gated = "closed" in table
    _, axes = plt.subplots(1, 2 + gated, figsize=(7.5 + 3 * gated, 2.6))
    for axis, part in zip(axes, ("cross_entropy", "penalty"), strict=False):
        for seed, rows in table.groupby("seed"):
            axis.plot(rows.groupby("epoch")[part].mean(), label=f"seed {seed}")
        axis.set(xlabel="epoch", ylabel="nats", title=part.replace("_", "-"))
    axes[0].legend()
    if gated:
        names = {"closed": "closed", "between": "in between", "slim": "left out"}
        for (name, label), line in zip(names.items(), ("-", "--", ":"), strict=True):
            for color, (_, rows) in zip(PALETTE, table.groupby("seed"), strict=False):
                axes[2].plot(rows["epoch"], rows[name], line, color=color, label=label if color == PALETTE[0] else None)
        axes[2].set(xlabel="epoch", ylabel="share of the gates", title="regularised gates", ylim=(-0.03, 1.03))
        axes[2].legend()


def gate_matrix(axes: Axes, gates: Tensor) -> None:
    """Show the gates (M, C) of a layer as an image, features sorted by their members' pattern, strongest first."""
    g = gates.detach().cpu().numpy()
    order = np.lexsort([*(-g[::-1]), *(-(g[::-1] > 0.5).astype(int))])
    axes.imshow(g[:, order], vmin=0, vmax=1, cmap="cividis", aspect="auto", interpolation="nearest")
    axes.set_yticks(range(len(g)), [str(m + 1) for m in range(len(g))])
    axes.grid(False)


def reliability(axes: Axes, probs: np.ndarray, labels: np.ndarray, bins: int = 15, least: int = 10, **style) -> None:
    """Draw accuracy minus mean confidence in equal-width bins of the top-1 confidence.

    Args:
        axes: Where to draw.
        probs: (N, K) mean probabilities.
        labels: (N,) class numbers.
        bins: Number of bins.
        least: Samples that a bin must hold to be drawn.
        style: Passed to `plot`.
    """
    confidence, correct = probs.max(axis=1), probs.argmax(axis=1) == labels
    bin_of = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    shown = np.flatnonzero(np.bincount(bin_of, minlength=bins) >= least)
    mean = np.array([confidence[bin_of == b].mean() for b in shown])
    gap = np.array([correct[bin_of == b].mean() for b in shown]) - mean
    axes.plot(mean, gap, **{"marker": "o", "markersize": 4, "linewidth": 1.2, **style})
