"""How good predicted probabilities are, and how well scores tell out-of-distribution samples (paper section 8).

Everything takes what `np.asarray` takes (CPU tensors too), computes in float64 and returns Python floats. Measures of
classification take `probs` (N, K), the probabilities of K classes for N samples, and `labels` (N,), integers in
0..K−1; shares and errors are fractions. Measures of detection take scores in-distribution (N,) and
out-of-distribution (N',): OOD is the positive class and a higher score means more OOD.

Raises, everywhere: TypeError for a wrong kind of number, ValueError for a wrong shape, value or number of bins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "accuracy",
    "aece",
    "aupr",
    "auroc",
    "brier",
    "classification",
    "detection",
    "ece",
    "fpr95",
    "nll",
]

# A float32 softmax that adds its K terms one by one is off by up to K/2 ulp: 6e-5 for the 1000 classes of ImageNet.
ROW_SUM_TOLERANCE = 1e-4


def accuracy(probs: ArrayLike, labels: ArrayLike) -> float:
    """Share of samples whose most probable class is the label; of equally probable classes the first counts.

    >>> accuracy([[0.9, 0.1], [0.6, 0.4]], [0, 1])
    0.5
    """
    _, hit = _top1(probs, labels)
    return float(hit.mean())


def nll(probs: ArrayLike, labels: ArrayLike) -> float:
    """Negative log-likelihood, the mean of −log p_y, in nats; infinite if a label has probability 0.

    >>> round(nll([[0.5, 0.5], [0.25, 0.75]], [0, 0]) / math.log(2), 12)
    1.5
    """
    probs, labels = _checked(probs, labels)
    with np.errstate(divide="ignore"):
        return float(-np.log(probs[np.arange(len(labels)), labels], dtype=np.float64).mean())


def brier(probs: ArrayLike, labels: ArrayLike) -> float:
    """Brier score Σ_k (p_k − [k = y])², summed over classes and averaged over samples: from 0 to 2.

    >>> brier([[0.5, 0.5], [0.0, 1.0]], [0, 0])
    1.25
    """
    probs, labels = _checked(probs, labels)
    error = probs.astype(np.float64)
    error[np.arange(len(labels)), labels] -= 1
    return float((error**2).sum(axis=1).mean())


def ece(probs: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error Σ_b |Σ_{i ∈ b} (hit_i − confidence_i)| / N over equal-width bins.

    A confidence is the largest probability of its row. Bin b is (b/bins, (b+1)/bins], b = 0..bins−1; the first
    holds 0 as well.

    >>> round(ece([[0.95, 0.05], [1.0, 0.0]], [0, 1]), 12)
    0.475
    """
    confidence, hit = _top1(probs, labels)
    # 3/15 in float32 is above 3/15 in float64, yet is the same edge: edges are rounded as the confidences were.
    edges = (np.arange(1, _counted(bins)) / bins).astype(confidence.dtype)
    index = np.searchsorted(edges, confidence, side="left")
    gap = np.bincount(index, weights=hit - confidence.astype(np.float64))
    return float(np.abs(gap).sum() / len(hit))


def aece(probs: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Adaptive calibration error: as `ece`, over bins that hold the same number of samples (within one).

    Samples of equal confidence share the mean of their hits, so that a bin's border between them, and with it
    the order of the samples, does not matter. With fewer samples than bins, each sample has a bin of its own.

    >>> aece([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5]], [0, 1, 0], bins=3)
    0.3333333333333333
    """
    confidence, hit = _top1(probs, labels)
    values, tie, count = np.unique(confidence, return_inverse=True, return_counts=True)
    gap = np.repeat(np.bincount(tie, weights=hit) / count - values.astype(np.float64), count)
    return float(sum(abs(part.sum()) for part in np.array_split(gap, _counted(bins))) / len(hit))


def classification(probs: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """Return `accuracy`, `nll`, `brier`, `ece` and `aece` by name, with 15 bins."""
    return {measure.__name__: measure(probs, labels) for measure in (accuracy, nll, brier, ece, aece)}


def auroc(in_scores: ArrayLike, out_scores: ArrayLike) -> float:
    """Area under the ROC curve: the chance that an OOD sample scores higher, ties counting half.

    NaN, with a UserWarning, if either side has no samples.

    >>> auroc([98.0, 98.25], [98.25, 98.5])
    0.875
    """
    from sklearn.metrics import roc_auc_score

    return _detected(roc_auc_score, "AUROC", in_scores, out_scores)


def aupr(in_scores: ArrayLike, out_scores: ArrayLike) -> float:
    """Area under the precision-recall curve, as average precision, with OOD as the positive class.

    NaN, with a UserWarning, if either side has no samples.

    >>> aupr([0.0, 2.0], [1.0, 3.0])
    0.8333333333333333
    """
    from sklearn.metrics import average_precision_score

    return _detected(average_precision_score, "AUPR", in_scores, out_scores)


def fpr95(in_scores: ArrayLike, out_scores: ArrayLike) -> float:
    """Share of in-distribution samples at or above the first (highest) threshold that finds ≥ 95 % of the OOD ones.

    NaN, with a UserWarning, if either side has no samples.

    >>> fpr95([0, 1, 2, 3], [1.5] * 19 + [0.5])
    0.5
    """
    return _detected(_false_positive_rate, "FPR95", in_scores, out_scores)


def detection(in_scores: ArrayLike, out_scores: ArrayLike) -> dict[str, float]:
    """Return `auroc`, `aupr` and `fpr95` by name."""
    return {measure.__name__: measure(in_scores, out_scores) for measure in (auroc, aupr, fpr95)}


def _top1(probs: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return confidence (N,), in the precision it came in, and hit (N,), whether the top class is the label."""
    probs, labels = _checked(probs, labels)
    return probs.max(axis=1), probs.argmax(axis=1) == labels


def _checked(probs: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return `probs` (N, K) as floats of their own precision and `labels` (N,) as indices, or say what is wrong."""
    probs, labels = _numbers("probs", probs), np.asarray(labels)
    if probs.ndim != 2 or probs.size == 0:
        raise ValueError(f"probs must be a non-empty array of shape (N, K), not {probs.shape}")
    if labels.shape != probs.shape[:1]:
        raise ValueError(f"labels must have shape {probs.shape[:1]}, one for each row of probs, not {labels.shape}")
    if labels.dtype.kind not in "iu":
        raise TypeError(f"labels must be integers, not {labels.dtype}")

    classes = probs.shape[1]
    outside = (probs < 0) | (probs > 1 + ROW_SUM_TOLERANCE)
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise ValueError(f"probs must lie in [0, 1], but sample {row} has {probs[row, column]} for class {column}")
    total = probs.sum(axis=1, dtype=np.float64)
    wrong = np.abs(total - 1) > ROW_SUM_TOLERANCE
    if wrong.any():
        row = wrong.argmax()
        raise ValueError(f"probs of a sample must sum to 1 ± {ROW_SUM_TOLERANCE}, but sample {row} has {total[row]}")
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        row = wrong.argmax()
        raise ValueError(f"labels must be in 0..{classes - 1}, but sample {row} has {labels[row]}")
    return probs, labels.astype(np.intp)


def _numbers(name: str, values: ArrayLike) -> np.ndarray:
    """Return `values` as finite floats of their own precision (float64 for integers)."""
    values = np.asarray(values)
    if values.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be real numbers, not {values.dtype}")
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    if not np.isfinite(values).all():
        first = tuple(np.argwhere(~np.isfinite(values))[0].tolist())
        raise ValueError(f"{name} must be finite, but the value at {first} is {values[first]}")
    return values


def _counted(bins: int) -> int:
    """Return `bins` if it is a positive integer."""
    if not isinstance(bins, (int, np.integer)):
        raise TypeError(f"bins must be an integer ≥ 1, not {bins!r}")
    if bins < 1:
        raise ValueError(f"bins must be an integer ≥ 1, not {bins}")
    return bins


def _detected(
    measure: Callable[[np.ndarray, np.ndarray], float],
    title: str,
    in_scores: ArrayLike,
    out_scores: ArrayLike,
) -> float:
    """Return `measure(is_ood, scores)` over both sides together, or NaN with a warning if one has no samples."""
    sides = {
        "in_scores": _numbers("in_scores", in_scores).astype(np.float64),
        "out_scores": _numbers("out_scores", out_scores).astype(np.float64),
    }
    for name, scores in sides.items():
        if scores.ndim != 1:
            raise ValueError(f"{name} must have shape (N,), not {scores.shape}")
    empty = [name for name, scores in sides.items() if scores.size == 0]
    if empty:
        warnings.warn(f"{title} is NaN: no samples in {' and '.join(empty)}", UserWarning, stacklevel=3)
        return math.nan
    is_ood = np.repeat([0, 1], [scores.size for scores in sides.values()])
    return float(measure(is_ood, np.concatenate(list(sides.values()))))


def _false_positive_rate(is_ood: np.ndarray, scores: np.ndarray) -> float:
    """Return the false positive rate where the true positive rate first reaches 95 %."""
    inside, outside = scores[is_ood == 0], scores[is_ood == 1]
    # Counted in integers, because 0.95 is no float: exactly 19 of 20 are 95 %.
    found = -(-19 * outside.size // 20)
    threshold = np.sort(outside)[-found]
    return np.mean(inside >= threshold)
