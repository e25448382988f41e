"""The training loss: member cross-entropy plus the diversity regulariser."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from .ensemble import SigmaEnsemble

__all__ = ["diversity_loss", "member_cross_entropy"]


def member_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of every member against the labels, averaged over samples and members, in nats.

    Args:
        logits: Shape (B, M, K).
        labels: Class numbers 0..K−1, shape (B,), of any integer type.

    Raises:
        TypeError: if the labels are not integers.
        ValueError: if the shapes do not fit, or a label lies outside 0..K−1.

    Examples:
        >>> member_cross_entropy(torch.zeros(2, 4, 10), torch.tensor([3, 9])).item()  # log 10
        2.302585...
    """
    if logits.dim() != 3:
        raise ValueError(f"logits must have shape (B, M, K), not {tuple(logits.shape)}")
    if labels.shape != logits.shape[:1]:
        raise ValueError(f"labels must have shape ({logits.shape[0]},), not {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, not {labels.dtype}")
    # On other devices the check would wait for the device at every step; the training loop checks once.
    if labels.device.type == "cpu" and labels.numel() and not 0 <= labels.min() <= labels.max() < logits.shape[2]:
        raise ValueError(
            f"labels must lie in 0..{logits.shape[2] - 1}, found {labels.min().item()}..{labels.max().item()}"
        )
    return F.cross_entropy(logits.flatten(0, 1), labels.long().repeat_interleave(logits.shape[1]))


def diversity_loss(ensemble: SigmaEnsemble | Mapping[str, Tensor], tau: float, weight: float = 1.0) -> Tensor:
    r"""Return the diversity regulariser, to be added to the loss and minimised.

    .. math:: L_\mathrm{div} = \lambda \sum_{\ell \in R} \sum_i \sum_m
        \log \mathrm{softmax}_\tau(\sigma(\gamma_{\cdot, \ell, i}))_m

    A plain sum, so a large negative number: −λ M log M per feature where the members' gates agree, and lower the
    more they differ. Its force on a gate is (1 − M p) / τ: none between equal gates, ∝ 1/τ² for large τ. Computed
    in float64 where the device has it, since 1 − M p cancels for large τ.

    Args:
        ensemble: An ensemble, whose layers matched by `regularize` count, or gates {layer name: (M, C)}.
        tau: Temperature τ > 0.
        weight: λ ≥ 0.

    Returns:
        A scalar. Nats, times λ.

    Raises:
        ValueError: if `tau` is not a positive number or `weight` is negative.

    Source: paper, section 3, equation of the regulariser.

    Examples:
        >>> diversity_loss({"layer": torch.full((4, 1), 0.5)}, tau=0.1).item()  # −4 log 4
        -5.545177...
    """
    check_tau(tau)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
        raise ValueError(f"weight must be a number ≥ 0, not {weight!r}")
    if not isinstance(ensemble, (SigmaEnsemble, Mapping)):
        raise TypeError(f"expected a SigmaEnsemble or a mapping of gates, got {type(ensemble).__name__}")
    gates = ensemble.regularized_gates() if isinstance(ensemble, SigmaEnsemble) else ensemble
    if not gates:
        raise ValueError("no gates to regularise")
    stacked = torch.cat(list(gates.values()), dim=1)
    precise = stacked.float() if stacked.device.type == "mps" else stacked.double()
    return weight * F.log_softmax(precise / tau, dim=0).sum().to(torch.promote_types(stacked.dtype, torch.float32))


def check_tau(tau: float) -> None:
    """Raise ValueError unless the temperature is a finite number > 0."""
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 < tau < float("inf"):
        raise ValueError(f"tau must be a number > 0, not {tau!r}")
