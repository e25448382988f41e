"""Post-hoc temperature scaling, in both orders: scale the members then average, or average then scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import metrics

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["ORDERS", "fit_temperature", "scale"]

ORDERS = ("scale then average", "average then scale")
# Beyond these a prediction is uniform, or its most likely class alone, in all but name.
BOUNDS = (0.05, 20.0)


def scale(logits: ArrayLike, temperature: float, order: str) -> np.ndarray:
    r"""Return the ensemble's probabilities at a temperature T.

    .. math:: \frac1M \sum_m \mathrm{softmax}(z_m / T) \quad\text{or}\quad
        \mathrm{softmax}\Bigl(\frac1T \log \frac1M \sum_m \mathrm{softmax}(z_m)\Bigr)

    At T = 1 both are the plain mean of the members' probabilities; for one member they are the same at any T.

    Args:
        logits: Member logits (N, M, K).
        temperature: T > 0; above 1 it makes predictions less confident.
        order: One of `ORDERS`, the first formula or the second.

    Returns:
        (N, K), float64.

    Raises:
        ValueError: for a temperature that is no number > 0, an unknown order, or logits of another shape.

    Source: Guo et al., 2017, arXiv 1706.04599; the two orders: Rahaman and Thiery, 2021, arXiv 2007.08792.

    Examples:
        >>> scale([[[0.0, 0.0], [0.0, 4.0]]], 2.0, "scale then average").round(3).tolist()
        [[0.31, 0.69]]
    """
    z = np.asarray(logits, dtype=np.float64)
    if z.ndim != 3:
        raise ValueError(f"logits must have shape (N, M, K), got {z.shape}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a number > 0, got {temperature!r}")
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
    if order == ORDERS[0]:
        return np.exp(_log_softmax(z / temperature)).mean(axis=1)
    log_mean = np.logaddexp.reduce(_log_softmax(z), axis=1) - np.log(z.shape[1])
    return np.exp(_log_softmax(log_mean / temperature))


def fit_temperature(logits: ArrayLike, labels: ArrayLike, order: str) -> float:
    """Return the temperature of least NLL on held-out data; never fit it on the test split.

    Args:
        logits: Member logits (N, M, K) of validation data.
        labels: Class numbers (N,).
        order: One of `ORDERS`.

    Returns:
        T within 0.05 … 20. At an end of that range the data ask for more, as they do where every prediction is right.

    Raises:
        ValueError: as `scale` and `metrics.nll`.
    """
    from scipy.optimize import minimize_scalar

    def loss(log_temperature: float) -> float:
        return metrics.nll(scale(logits, float(np.exp(log_temperature)), order), labels)

    found = minimize_scalar(loss, bounds=tuple(np.log(BOUNDS)), method="bounded", options={"xatol": 1e-6})
    return float(np.exp(found.x))


def _log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.logaddexp.reduce(z, axis=-1, keepdims=True)
