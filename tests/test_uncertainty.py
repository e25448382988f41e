"""Uncertainty and diversity of members: closed forms, bounds, and stability where members nearly agree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmaens import metrics, uncertainty

LOG2 = math.log(2)
EXACT = {"rtol": 0, "atol": 1e-12}

# No deadline: a first call also starts torch.
untimed = settings(deadline=None)


@st.composite
def ensembles(draw, min_members: int = 1) -> torch.Tensor:
    """Softmax outputs (N, M, K), from near uniform to one-hot with exact zeros, in float32 or float64."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(min_members, 5), st.integers(1, 5)))
    scale = draw(st.sampled_from([1e-9, 1e-3, 1.0, 30.0, 1000.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).softmax(dim=2).to(dtype)


def labels_for(probs: torch.Tensor) -> torch.Tensor:
    """One label (N,) a sample, each class in turn."""
    return torch.arange(len(probs)) % probs.shape[2]


def test_two_members_sure_of_different_classes():
    probs = [[[1.0, 0.0], [0.0, 1.0]]]
    split = uncertainty.decompose(probs)
    assert [part.item() for part in split] == pytest.approx([LOG2, 0, LOG2], abs=1e-15)
    assert uncertainty.disagreement(probs) == 1
    assert uncertainty.diversity_ratio(probs, [1]) == 1


def test_two_members_mirrored():
    probs = [[[0.2, 0.8], [0.8, 0.2]]]
    entropy = -0.2 * math.log(0.2) - 0.8 * math.log(0.8)
    split = uncertainty.decompose(probs)
    assert [part.item() for part in split] == pytest.approx([LOG2, entropy, LOG2 - entropy])
    assert uncertainty.jensen_gap(probs, [0]) == pytest.approx(math.log(0.5) - math.log(0.4))
    assert uncertainty.pairwise_kl(probs) == pytest.approx(0.6 * math.log(4))


def test_modulation_is_exact_where_members_nearly_agree():
    """p = ½ ± δ: U_mod = log 2 − H(½ + δ) = 2δ² + O(δ⁴), far below the rounding of the entropies."""
    delta = 2.0**-40
    probs = [[[0.5 + delta, 0.5 - delta], [0.5 - delta, 0.5 + delta]]]
    assert uncertainty.decompose(probs).modulation.item() == pytest.approx(2 * delta**2, rel=1e-3, abs=0)


def test_rounding_makes_nothing_negative():
    generator = torch.Generator().manual_seed(0)
    shared = torch.rand(500, 1, 4, generator=generator, dtype=torch.float64)
    probs = shared * (1 + 2.0**-52 * torch.randint(-2, 3, (500, 3, 4), generator=generator))
    probs /= probs.sum(dim=2, keepdim=True)
    assert (uncertainty.decompose(probs).modulation >= 0).all()
    for row in probs:
        assert uncertainty.pairwise_kl(row[None]) >= 0
        assert uncertainty.jensen_gap(row[None], [0]) >= 0


@untimed
@given(ensembles())
def test_decomposition_adds_up_within_its_bounds(probs):
    split = uncertainty.decompose(probs)
    _, members, classes = probs.shape
    torch.testing.assert_close(split.total, split.aleatoric + split.modulation, **EXACT)
    assert all((part >= 0).all() for part in split)
    slack = 1e-6 if probs.dtype == torch.float32 else 1e-12  # rows of float32 do not quite sum to 1
    assert (split.total <= math.log(classes) + slack).all()
    assert (split.modulation <= math.log(members) + slack).all()


@untimed
@given(ensembles())
def test_decomposition_follows_samples_and_ignores_names(probs):
    samples, members, classes = (torch.randperm(n) for n in probs.shape)
    renamed = uncertainty.decompose(probs[samples][:, members][:, :, classes])
    for part, expected in zip(renamed, uncertainty.decompose(probs), strict=True):
        torch.testing.assert_close(part, expected[samples], **EXACT)


@untimed
@given(ensembles(), st.integers(2, 5))
def test_equal_members_have_no_diversity(probs, members):
    equal = probs[:, :1].expand(-1, members, -1)
    labels = labels_for(probs)
    split = uncertainty.decompose(equal)
    torch.testing.assert_close(split.modulation, torch.zeros(len(probs), dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(split.total, split.aleatoric, **EXACT)
    assert uncertainty.disagreement(equal) == 0
    assert uncertainty.pairwise_kl(equal) == pytest.approx(0, abs=1e-12)
    assert uncertainty.jensen_gap(equal, labels) == pytest.approx(0, abs=1e-12)


@untimed
@given(ensembles())
def test_jensen_gap_is_what_the_mean_gains(probs):
    gap = uncertainty.jensen_gap(probs, labels := labels_for(probs))
    assert gap >= 0
    members = [metrics.nll(probs[:, m].double(), labels) for m in range(probs.shape[1])]
    if np.isfinite(members).all() and probs.amin() > 1e-30:
        assert gap == pytest.approx(np.mean(members) - metrics.nll(probs.double().mean(dim=1), labels), abs=1e-12)


@untimed
@given(ensembles(min_members=2))
def test_pairs_are_averaged(probs):
    p = probs.double().clamp(min=torch.finfo(torch.float32).tiny)
    top = probs.argmax(dim=2)
    pairs = [(i, j) for i in range(probs.shape[1]) for j in range(probs.shape[1]) if i != j]
    kl = [(p[:, i] * (p[:, i] / p[:, j]).log()).sum(dim=1).mean().item() for i, j in pairs]
    differ = [(top[:, i] != top[:, j]).double().mean().item() for i, j in pairs]
    assert uncertainty.pairwise_kl(probs) == pytest.approx(np.mean(kl), rel=1e-9, abs=1e-12)
    assert uncertainty.disagreement(probs) == pytest.approx(np.mean(differ), abs=1e-12)


def test_zeros_count_as_the_smallest_normal_float32():
    floor = math.log(2.0**-126)
    probs = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    assert uncertainty.pairwise_kl(probs) == pytest.approx((LOG2 - LOG2 - 0.5 * floor) / 2)
    assert uncertainty.jensen_gap(probs, [1]) == pytest.approx(math.log(0.25) - (floor - LOG2) / 2)
    assert uncertainty.jensen_gap([[[1.0, 0.0], [1.0, 0.0]]], [1]) == 0
    assert uncertainty.decompose([[[1.0, 0.0], [1.0, 0.0]]]) == (0, 0, 0)


def test_a_single_member_has_nobody_to_differ_from():
    probs = torch.tensor([[[0.7, 0.3]], [[0.4, 0.6]]])
    assert uncertainty.disagreement(probs) == 0
    assert uncertainty.pairwise_kl(probs) == 0
    assert uncertainty.jensen_gap(probs, [0, 0]) == 0
    assert uncertainty.diversity_ratio(probs, [0, 0]) == 0


def test_diversity_ratio_divides_by_the_error_of_the_mean():
    """Members differ on one of four samples, and their mean errs on two of four."""
    probs = [[[0.9, 0.1], [0.9, 0.1]]] * 3 + [[[0.4, 0.6], [0.9, 0.1]]]
    assert uncertainty.diversity_ratio(probs, [0, 0, 1, 1]) == pytest.approx(0.25 / 0.5)


def test_diversity_ratio_without_errors_is_nan_and_said():
    with pytest.warns(UserWarning, match="diversity ratio is NaN"):
        assert math.isnan(uncertainty.diversity_ratio([[[0.9, 0.1], [0.4, 0.6]]], [0]))


def test_ood_scores_come_from_the_mean():
    """Members sure of different classes: the mean is uniform, though no member has any entropy."""
    scores = uncertainty.ood_scores([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]]])
    expected = {"max_prob": [-0.5, -1.0], "entropy": [LOG2, 0.0], "modulation": [LOG2, 0.0]}
    assert {name: score.tolist() for name, score in scores.items()} == {
        name: pytest.approx(values, abs=1e-15) for name, values in expected.items()
    }


def test_ood_scores_do_not_depend_on_batching():
    probs = torch.randn(40, 4, 10, generator=torch.Generator().manual_seed(0)).softmax(dim=2)
    whole = uncertainty.ood_scores(probs)
    for batch, rows in zip(probs.split(7), range(0, 40, 7), strict=True):
        for name, score in uncertainty.ood_scores(batch).items():
            torch.testing.assert_close(score, whole[name][rows : rows + 7], rtol=0, atol=1e-15)


def test_inputs_are_computed_in_float64_without_gradients():
    """Read-only arrays, as pandas gives, are taken too, where torch would warn."""
    single = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0)).softmax(dim=2)
    probs, labels = single.double().numpy(), np.array([0, 1, 2, 0])
    probs.setflags(write=False)
    labels.setflags(write=False)
    expected = uncertainty.decompose(probs)
    for same in (single, single.clone().requires_grad_(), probs.tolist()):
        for part, exact in zip(uncertainty.decompose(same), expected, strict=True):
            assert part.dtype == torch.float64
            assert not part.requires_grad
            assert torch.equal(part, exact)
    assert uncertainty.jensen_gap(probs, labels) == uncertainty.jensen_gap(single, labels.tolist())


HALF = [torch.float16, torch.bfloat16]


def half(dtype, classes, scale=3.0):
    """A softmax in half precision, whose rows sum to 1 but for the rounding of each probability."""
    return (scale * torch.randn(200, 4, classes)).to(dtype).softmax(dim=2)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("classes", [2, 10, 1000])
@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0])
def test_rows_of_half_precision_are_renormalised(dtype, classes, scale):
    probs = half(dtype, classes, scale)
    split = uncertainty.decompose(probs)
    torch.testing.assert_close(split.total, split.aleatoric + split.modulation, **EXACT)
    assert all((part >= 0).all() for part in split)
    assert (split.total <= math.log(classes) + 1e-12).all()
    exact = probs.double() / probs.double().sum(dim=2, keepdim=True)
    for part, expected in zip(split, uncertainty.decompose(exact), strict=True):
        assert torch.equal(part, expected)
    labels = torch.arange(200) % classes
    assert uncertainty.jensen_gap(probs, labels) == uncertainty.jensen_gap(exact, labels)
    assert uncertainty.pairwise_kl(probs) == uncertainty.pairwise_kl(exact)


@pytest.mark.parametrize("dtype", HALF)
def test_the_tolerance_of_half_precision_is_needed_and_enough(dtype):
    """Of rows that are divided by their own sum in half precision, some are farther off than float32 may be."""
    logits = (3 * torch.randn(500, 4, 100)).to(dtype)
    exponents = (logits - logits.amax(dim=2, keepdim=True)).exp()
    probs = exponents / exponents.sum(dim=2, keepdim=True)
    off = (probs.double().sum(dim=2) - 1).abs().max()
    assert uncertainty.ROW_SUM_TOLERANCE < off < uncertainty.row_sum_tolerance(dtype) / 1.5
    uncertainty.decompose(probs)
    with pytest.raises(ValueError, match=r"sum to 1 ± 0\.0001"):
        uncertainty.decompose(probs.float())


def test_arrays_of_half_precision_are_taken_as_tensors_are():
    probs = half(torch.float16, 10)
    array = probs.numpy()
    array.setflags(write=False)
    for part, expected in zip(uncertainty.decompose(array), uncertainty.decompose(probs), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_a_probability_that_rounds_above_1_is_certain(dtype):
    above = 1 + torch.finfo(dtype).eps
    probs = torch.tensor([[[above, 0.0], [1.0, 0.0]]], dtype=dtype)
    assert probs.max() > 1
    assert uncertainty.decompose(probs) == (0, 0, 0)
    assert uncertainty.ood_scores(probs)["max_prob"].item() == -1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2**-9), (torch.bfloat16, 2**-6)])
def test_rows_of_half_precision_that_rounding_cannot_explain_are_refused(dtype, tolerance):
    probs = torch.tensor([[[0.5, 0.5], [0.5, 0.5 - 1.5 * tolerance]]], dtype=dtype)
    with pytest.raises(ValueError, match=rf"sum to 1 ± {tolerance} .*sample 0, member 1 has 0\.9"):
        uncertainty.decompose(probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_full_precision_stay_as_they_are(dtype):
    """Entropies are those of the very numbers given, though their sum is a little off."""
    probs = torch.tensor([[[0.25, 0.75 + 2**-14]]], dtype=dtype)
    given = probs.double()
    assert torch.equal(uncertainty.decompose(probs).total, -(given * given.log()).sum(dim=2)[:, 0])
    assert torch.equal(uncertainty._checked(probs), given)
    assert torch.equal(uncertainty._checked(probs.tolist()), given)


@pytest.mark.parametrize(
    ("probs", "message"),
    [
        ([[0.5, 0.5]], r"shape \(N, M, K\), not \(1, 2\)"),
        (torch.empty(0, 2, 3), r"non-empty.*\(0, 2, 3\)"),
        ([[[0.5, 0.5], [0.5, math.nan]]], r"\[0, 1\].*sample 0, member 1 has nan for class 1"),
        ([[[0.5, 0.5]], [[1.5, -0.5]]], r"\[0, 1\].*sample 1, member 0 has 1.5 for class 0"),
        ([[[1.00001, -0.00001]]], r"\[0, 1\].*sample 0, member 0 has -1e-05 for class 1"),
        ([[[0.5, 0.5], [0.5, 0.25]]], r"sum to 1.*sample 0, member 1 has 0.75"),
    ],
)
@pytest.mark.parametrize(
    "measure",
    [
        uncertainty.decompose,
        uncertainty.disagreement,
        uncertainty.pairwise_kl,
        uncertainty.ood_scores,
        lambda probs: uncertainty.jensen_gap(probs, [0]),
        lambda probs: uncertainty.diversity_ratio(probs, [0]),
    ],
)
def test_bad_member_probabilities_are_refused(measure, probs, message):
    with pytest.raises(ValueError, match="member_probs .*" + message):
        measure(probs)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([0], ValueError, r"shape \(2,\).*not \(1,\)"),
        ([0.0, 1.0], TypeError, "integers, not torch.float32"),
        ([True, False], TypeError, "integers, not torch.bool"),
        ([0, 2], ValueError, r"0\.\.1, but sample 1 has 2"),
        ([-1, 2], ValueError, r"0\.\.1, but sample 0 has -1"),
    ],
)
@pytest.mark.parametrize("measure", [uncertainty.jensen_gap, uncertainty.diversity_ratio])
def test_bad_labels_are_refused(measure, labels, error, message):
    with pytest.raises(error, match="labels must .*" + message):
        measure([[[0.9, 0.1]], [[0.9, 0.1]]], labels)
