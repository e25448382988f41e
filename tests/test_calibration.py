"""Temperature scaling: what it keeps, what it finds, and that the two orders are two."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sigmaens import metrics
from sigmaens.calibration import ORDERS, fit_temperature, scale


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(scale=3, size=(200, 4, 5))


@pytest.mark.parametrize("order", ORDERS)
def test_temperature_one_changes_nothing(logits, order):
    np.testing.assert_allclose(scale(logits, 1.0, order), softmax(logits).mean(1), rtol=1e-12)


@given(st.floats(0.1, 10))
def test_one_member_has_one_order(temperature):
    logits = np.random.default_rng(1).normal(scale=3, size=(20, 1, 5))
    expected = softmax(logits[:, 0] / temperature)
    for order in ORDERS:
        np.testing.assert_allclose(scale(logits, temperature, order), expected, rtol=1e-9)


def test_formulas(logits):
    np.testing.assert_allclose(scale(logits, 2.5, ORDERS[0]), softmax(logits / 2.5).mean(1), rtol=1e-12)
    powered = softmax(logits).mean(1) ** (1 / 2.5)
    np.testing.assert_allclose(scale(logits, 2.5, ORDERS[1]), powered / powered.sum(1, keepdims=True), rtol=1e-9)
    assert np.abs(scale(logits, 2.5, ORDERS[0]) - scale(logits, 2.5, ORDERS[1])).max() > 0.01


@given(st.floats(0.1, 10))
def test_scaling_the_mean_keeps_its_decisions(temperature):
    logits = np.random.default_rng(2).normal(scale=3, size=(50, 4, 5))
    kept = scale(logits, temperature, ORDERS[1]).argmax(1)
    np.testing.assert_array_equal(kept, softmax(logits).mean(1).argmax(1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("truth", [0.4, 1.0, 2.5])
def test_fit_finds_the_temperature_that_made_the_labels(order, truth):
    rng = np.random.default_rng(3)
    logits = rng.normal(scale=2, size=(20_000, 3, 4))
    probs = scale(logits, truth, order)
    labels = (probs.cumsum(1) > rng.random((len(probs), 1))).argmax(1)
    assert fit_temperature(logits, labels, order) == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize("order", ORDERS)
def test_fit_is_never_worse_than_one_on_its_own_data(logits, order):
    rng = np.random.default_rng(4)
    labels = np.where(rng.random(len(logits)) < 0.6, logits.mean(1).argmax(1), rng.integers(0, 5, len(logits)))
    best = fit_temperature(logits, labels, order)
    fitted = metrics.nll(scale(logits, best, order), labels)
    for temperature in (1.0, best * 0.98, best * 1.02):
        assert fitted <= metrics.nll(scale(logits, temperature, order), labels) + 1e-9


def test_far_logits_do_not_overflow():
    for order in ORDERS:
        assert np.isfinite(scale([[[1e4, -1e4]], [[0.0, 1e4]]], 0.05, order)).all()


def test_bad_input_is_named(logits):
    with pytest.raises(ValueError, match=r"shape \(N, M, K\), got \(200, 5\)"):
        scale(logits[:, 0], 1.0, ORDERS[0])
    for temperature in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature must be a number > 0"):
            scale(logits, temperature, ORDERS[0])
    with pytest.raises(ValueError, match="order must be one of"):
        scale(logits, 1.0, "both")
