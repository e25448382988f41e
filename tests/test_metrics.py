"""Metrics: closed forms, invariances, edge cases, and agreement with libraries where those are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sklearn.metrics
import torch
import torchmetrics.functional.classification as tm
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmaens import metrics

CLASSES = 30
seeds = st.integers(0, 2**32 - 1)

# No deadline: a first call also imports and starts libraries.
untimed = settings(deadline=None)


def predictions(seed: int, samples: int = 40, classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Random probabilities (N, K) and labels (N,)."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(classes, 0.5), samples), rng.integers(classes, size=samples)


def topped(confidences: list[float]) -> np.ndarray:
    """Rows (N, K) whose top class is 0, with these probabilities, the rest being shared equally."""
    confidence = np.array(confidences, dtype=np.float64)[:, None]
    return np.hstack([confidence, np.repeat((1 - confidence) / (CLASSES - 1), CLASSES - 1, axis=1)])


def test_closed_forms():
    probs, labels = [[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]], [0, 1]
    assert metrics.classification(probs, labels) == pytest.approx(
        {
            "accuracy": 0.5,
            "nll": (math.log(2) + math.log(8)) / 2,
            "brier": (0.25 + 2 / 16 + 2 / 64 - 1 / 64 + (7 / 8) ** 2 + 9 / 16) / 2,
            "ece": (0.5 + 0.75) / 2,
            "aece": (0.5 + 0.75) / 2,
        },
        abs=1e-15,
    )
    assert metrics.detection([1, 2, 3, 4], [4, 5]) == {
        "auroc": 7.5 / 8,
        "aupr": pytest.approx(0.5 * 1 + 0.5 * 2 / 3),
        "fpr95": 0.25,
    }


@untimed
@given(seeds)
def test_sample_order_does_not_matter(seed):
    probs, labels = predictions(seed)
    probs[10:20] = probs[0]
    order = np.random.default_rng(seed).permutation(len(labels))
    shuffled = metrics.classification(probs[order], labels[order])
    assert shuffled == pytest.approx(metrics.classification(probs, labels), abs=1e-14)


@untimed
@given(seeds)
def test_class_names_do_not_matter(seed):
    probs, labels = predictions(seed)
    order = np.random.default_rng(seed).permutation(probs.shape[1])
    renamed = metrics.classification(probs[:, order], np.argsort(order)[labels])
    assert renamed == pytest.approx(metrics.classification(probs, labels), abs=1e-14)


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_agrees_with_scikit_learn(seed):
    probs, labels = predictions(seed, samples=200)
    inside, outside = probs[:150, 0].round(1), probs[150:, 1].round(1)
    is_ood, scores = np.repeat([0, 1], [150, 50]), np.concatenate([inside, outside])
    found = metrics.classification(probs, labels) | metrics.detection(inside, outside)
    assert found["accuracy"] == sklearn.metrics.accuracy_score(labels, probs.argmax(1))
    assert found["nll"] == pytest.approx(sklearn.metrics.log_loss(labels, probs, labels=range(4)), rel=1e-12)
    assert found["brier"] == pytest.approx(sklearn.metrics.brier_score_loss(labels, probs, labels=range(4)), rel=1e-12)
    assert found["auroc"] == sklearn.metrics.roc_auc_score(is_ood, scores)
    assert found["aupr"] == sklearn.metrics.average_precision_score(is_ood, scores)
    fpr, tpr, _ = sklearn.metrics.roc_curve(is_ood, scores, drop_intermediate=False)
    assert found["fpr95"] == fpr[np.argmax(tpr >= 0.95)]


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_ece_agrees_with_torchmetrics_below_confidence_one(seed):
    """To the float32 that torchmetrics rounds confidences to, whatever it is given."""
    probs, labels = predictions(seed, samples=200)
    probs = (0.9 * probs + 0.1 / 4).astype(np.float32)
    theirs = tm.multiclass_calibration_error(torch.tensor(probs), torch.tensor(labels), num_classes=4, n_bins=15)
    assert metrics.ece(probs, labels) == pytest.approx(theirs.item(), abs=1e-6)


def test_confidence_one_is_in_the_last_bin():
    probs, labels = [[0.95, 0.05], [1.0, 0.0]], [0, 1]
    assert metrics.ece(probs, labels) == pytest.approx(0.475, abs=1e-15)
    theirs = tm.multiclass_calibration_error(
        torch.tensor(probs, dtype=torch.float64), torch.tensor(labels), num_classes=2, n_bins=15
    )
    assert theirs.item() == pytest.approx(0.525)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("k", "bins"), [(k, bins) for bins in (7, 10, 15) for k in range(2, bins)])
def test_an_edge_belongs_to_the_bin_below(k, bins, dtype):
    """A hit on an edge and a miss below it cancel in one bin; a miss at the next number above is in another."""
    edge = dtype(k / bins)
    low, high = edge - 0.02, np.nextafter(edge, dtype(1))
    same = metrics.ece(topped([edge, low]).astype(dtype), [0, 1], bins)
    assert same == pytest.approx(abs(1 - edge - low) / 2, abs=1e-6)
    other = metrics.ece(topped([edge, high]).astype(dtype), [0, 1], bins)
    assert other == pytest.approx((1 - edge + high) / 2, abs=1e-6)


@untimed
@given(st.lists(st.integers(1, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(n // 2 + 1, n))), min_size=1))
def test_calibrated_predictions_have_no_calibration_error(groups):
    """Of n samples with confidence h/n, h are hits."""
    probs = np.repeat([[h / n, 1 - h / n] for n, h in groups], [n for n, _ in groups], axis=0)
    labels = np.concatenate([np.arange(n) >= h for n, h in groups]).astype(int)
    assert metrics.ece(probs, labels) == pytest.approx(0, abs=1e-14)
    assert metrics.aece(probs, labels) == pytest.approx(0, abs=1e-14)


def test_one_bin_compares_mean_confidence_with_accuracy():
    probs, labels = predictions(0)
    expected = abs(probs.max(axis=1).mean() - metrics.accuracy(probs, labels))
    assert metrics.ece(probs, labels, bins=1) == pytest.approx(expected, abs=1e-15)
    assert metrics.aece(probs, labels, bins=1) == pytest.approx(expected, abs=1e-15)


def test_aece_bins_hold_equal_mass():
    """Five samples in two bins: the three least confident, then the other two."""
    probs, labels = topped([0.9, 0.5, 0.6, 0.7, 0.8]), [1, 0, 0, 1, 0]
    assert metrics.aece(probs, labels, bins=2) == pytest.approx((abs(2 - 1.8) + abs(1 - 1.7)) / 5)


@untimed
@given(st.permutations([0, 0, 0, 1, 1, 1, 1]), st.integers(1, 10))
def test_aece_gives_tied_confidences_one_gap(labels, bins):
    assert metrics.aece(topped([0.75] * 7), labels, bins) == pytest.approx(0.75 - 3 / 7)


def test_aece_with_fewer_samples_than_bins_is_the_mean_gap():
    assert metrics.aece(topped([0.4, 0.6, 0.8]), [0, 1, 0]) == pytest.approx((0.6 + 0.6 + 0.2) / 3)


def test_nll_of_an_impossible_label_is_infinite():
    assert metrics.nll([[1.0, 0.0]], [1]) == math.inf


def test_float32_tensors_are_computed_in_float64():
    probs, labels = predictions(1, samples=1000)
    rounded = probs.astype(np.float32)
    expected = -np.log(rounded.astype(np.float64)[np.arange(1000), labels]).mean()
    assert metrics.nll(torch.tensor(rounded), torch.tensor(labels)) == pytest.approx(expected, rel=1e-15)


@untimed
@given(seeds)
def test_detection_depends_on_ranks_alone(seed):
    """Shifted to 98, where a sigmoid saturates, scores separate as well as at 0; swapped and negated too."""
    rng = np.random.default_rng(seed)
    inside, outside = rng.integers(0, 30, 60) / 8, rng.integers(10, 40, 30) / 8
    plain = metrics.detection(inside, outside)
    assert metrics.detection(inside + 98, outside + 98) == plain
    assert metrics.detection(rng.permutation(inside), rng.permutation(outside)) == plain
    assert metrics.auroc(-outside, -inside) == pytest.approx(plain["auroc"], abs=1e-12)
    assert metrics.auroc(outside, inside) == pytest.approx(1 - plain["auroc"], abs=1e-12)


def test_fpr95_counts_19_of_20_as_95_per_cent():
    assert metrics.fpr95([0, 1, 2, 3], [2.5] * 19 + [0.5]) == 0.25
    assert metrics.fpr95([0, 1, 2, 3], [2.5] * 18 + [0.5] * 2) == 0.75


@pytest.mark.parametrize("n", range(20, 2001, 60))
def test_fpr95_is_exact_at_every_multiple_of_20(n):
    """In-distribution scores lie just above each OOD one, so the rate tells how many OOD samples were needed."""
    ranks = np.arange(n)
    assert metrics.fpr95(ranks + 0.5, ranks) * n == pytest.approx(n * 19 // 20)


def test_fpr95_takes_ties_together():
    assert metrics.fpr95([0, 1, 1, 2], [1] * 10) == 0.75


@pytest.mark.parametrize("measure", [metrics.auroc, metrics.aupr, metrics.fpr95])
@pytest.mark.parametrize(
    ("inside", "outside", "named"),
    [([], [1.0], "in_scores$"), ([1.0], [], "out_scores$"), ([], [], "in_scores and out_scores$")],
)
def test_a_missing_class_is_nan_and_said(measure, inside, outside, named):
    with pytest.warns(UserWarning, match=rf"NaN: no samples in {named}"):
        assert math.isnan(measure(inside, outside))


@pytest.mark.parametrize(
    ("probs", "labels", "error", "message"),
    [
        ([0.5, 0.5], [0], ValueError, r"probs .*shape \(N, K\), not \(2,\)"),
        (np.empty((0, 3)), np.empty(0, int), ValueError, r"probs .*non-empty.*\(0, 3\)"),
        ([[0.5, 0.5]], [0, 1], ValueError, r"labels must have shape \(1,\).*not \(2,\)"),
        ([[0.5, 0.5]], [[0]], ValueError, r"labels must have shape \(1,\).*not \(1, 1\)"),
        ([[0.5, 0.5]], [0.0], TypeError, "labels must be integers, not float64"),
        ([["a", "b"]], [0], TypeError, "probs must be real numbers"),
        ([[0.5, 0.5], [0.5, math.nan]], [0, 0], ValueError, r"probs must be finite.*\(1, 1\) is nan"),
        ([[0.5, 0.5], [1.5, -0.5]], [0, 0], ValueError, r"probs must lie in \[0, 1\].*sample 1 has 1.5 for class 0"),
        ([[1.00001, -0.00001]], [0], ValueError, r"probs must lie in \[0, 1\].*sample 0 has -1e-05 for class 1"),
        ([[0.5, 0.5], [0.5, 0.25]], [0, 0], ValueError, r"probs .*sum to 1.*sample 1 has 0.75"),
        ([[0.5, 0.5]] * 3, [0, 2, -1], ValueError, r"labels must be in 0\.\.1, but sample 1 has 2"),
        ([[0.5, 0.5]] * 3, [0, 1, -1], ValueError, r"labels must be in 0\.\.1, but sample 2 has -1"),
    ],
)
@pytest.mark.parametrize("measure", [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece, metrics.aece])
def test_bad_predictions_are_refused(measure, probs, labels, error, message):
    with pytest.raises(error, match=message):
        measure(probs, labels)


@pytest.mark.parametrize(("bins", "error"), [(0, ValueError), (-3, ValueError), (2.0, TypeError), ("2", TypeError)])
@pytest.mark.parametrize("measure", [metrics.ece, metrics.aece])
def test_bad_bins_are_refused(measure, bins, error):
    with pytest.raises(error, match=rf"bins must be an integer ≥ 1, not '?{bins}"):
        measure([[0.5, 0.5]], [0], bins)


@pytest.mark.parametrize(
    ("inside", "outside", "error", "message"),
    [
        ([0.0, math.inf], [0.0], ValueError, r"in_scores must be finite.*\(1,\) is inf"),
        ([0.0], [[0.0]], ValueError, r"out_scores must have shape \(N,\), not \(1, 1\)"),
        ([0.0], ["high"], TypeError, "out_scores must be real numbers"),
    ],
)
@pytest.mark.parametrize("measure", [metrics.auroc, metrics.aupr, metrics.fpr95])
def test_bad_scores_are_refused(measure, inside, outside, error, message):
    with pytest.raises(error, match=message):
        measure(inside, outside)
