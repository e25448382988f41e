"""The training loss: member cross-entropy plus the diversity regulariser."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ensemble import SigmaEnsemble
from .uncertainty import row_sum_tolerance

__all__ = ["diversity_loss", "member_cross_entropy"]


def member_cross_entropy(logits: Tensor, labels: Tensor, link: str = "softmax") -> Tensor:
    """Return the cross-entropy of every member against the labels, averaged over samples and members, in nats.

    Dense logits have a label for every pixel, and the average is over pixels too. With `link="sigmoid"` it is over all
    logits of a sample. Logits of half precision are computed with in float32.

    Args:
        logits: Shape (B, M, K), or dense: (B, M, K, H, W) or (B, M, K, D, H, W). With `link="sigmoid"`, (B, M, …).
        labels: Class numbers 0..K−1 of any integer type, (B,) or (B, H, W); or probabilities q of any floating type,
            (B, K) or (B, K, H, W), as mixup and label smoothing give, for −Σ_k q_k log p_k. With `link="sigmoid"`,
            0..1 of any type for each logit, (B, …); where K = 1, that dimension may be missing. Their values are
            checked on the CPU only.
        link: "softmax" over the classes, or "sigmoid" for each logit by itself, as of an ensemble.

    Raises:
        TypeError: if class numbers are not integers, or probabilities are not of a floating type.
        ValueError: if the shapes do not fit, a label is outside 0..K−1, with a sigmoid outside 0..1, probabilities are
            negative or do not sum to 1, softmax has a single class, or `link` is none of the two.

    Examples:
        >>> member_cross_entropy(torch.zeros(2, 4, 10), torch.tensor([3, 9])).item()  # log 10
        2.302585...
        >>> logits = torch.tensor([0.8, 0.2]).log().expand(2, 4, 2)
        >>> mixed = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
        >>> member_cross_entropy(logits, mixed).item()  # −(log 0.8 + log 0.2) / 2
        0.916290...
        >>> member_cross_entropy(torch.zeros(2, 4, 1), torch.tensor([0, 1]), link="sigmoid").item()  # log 2
        0.693147...
    """
    if link == "sigmoid":
        return _binary_cross_entropy(logits, labels)
    if link != "softmax":
        raise ValueError(f'link must be "softmax" or "sigmoid", not {link!r}')
    if logits.dim() not in (3, 5, 6):
        raise ValueError(
            f"logits must have shape (B, M, K), (B, M, K, H, W) or (B, M, K, D, H, W), not {tuple(logits.shape)}"
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    batch, members, classes, *pixels = logits.shape
    if classes == 1:
        raise ValueError('logits have a single class, so the loss would always be 0: use link="sigmoid"')
    if labels.shape == (batch, *pixels):
        _check_classes(labels, classes)
        labels = labels.long()
    elif labels.shape == (batch, classes, *pixels):
        _check_probabilities(labels)
        labels = labels.to(logits.dtype)
    else:
        raise ValueError(
            f"labels must have shape {(batch, *pixels)}, or {(batch, classes, *pixels)} for probabilities, not "
            f"{tuple(labels.shape)}"
        )
    return F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(members, dim=0))


def _binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the sigmoids of logits (B, M, …) against labels (B, …)."""
    if logits.dim() < 2:
        raise ValueError(f"logits must have shape (B, M, …), not {tuple(logits.shape)}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shape = logits.shape[:1] + logits.shape[2:]
    if shape[1:2] == (1,) and labels.shape == shape[:1] + shape[2:]:
        labels = labels.unsqueeze(1)
    if labels.shape != shape:
        raise ValueError(f"labels must have shape {tuple(shape)}, not {tuple(labels.shape)}")
    # Written so that NaN is outside too.
    if labels.device.type == "cpu" and not ((labels >= 0) & (labels <= 1)).all():
        raise ValueError(f"labels must lie in 0..1, found {labels.min().item()}..{labels.max().item()}")
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype).unsqueeze(1).expand_as(logits))


def _check_classes(labels: Tensor, classes: int) -> None:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, not {labels.dtype}")
    # On other devices the check would wait for the device at every step; the training loop checks once.
    if labels.device.type == "cpu" and labels.numel() and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"labels must lie in 0..{classes - 1}, found {labels.min().item()}..{labels.max().item()}")


def _check_probabilities(labels: Tensor) -> None:
    if not labels.is_floating_point():
        raise TypeError(f"labels of shape {tuple(labels.shape)} must be of a floating type, not {labels.dtype}")
    if labels.device.type != "cpu" or not labels.numel():
        return
    if not labels.min() >= 0:
        raise ValueError(f"labels must be probabilities ≥ 0, found {labels.min().item()}")
    tolerance, total = row_sum_tolerance(labels.dtype), labels.sum(1, dtype=torch.float64)
    wrong = (total - 1).abs() > tolerance
    if wrong.any():
        raise ValueError(f"labels must sum to 1 ± {tolerance} over classes, found {total[wrong][0].item()}")


def diversity_loss(ensemble: nn.Module | Mapping[str, Tensor], tau: float, weight: float = 1.0) -> Tensor:
    r"""Return the diversity regulariser, to be added to the loss and minimised.

    .. math:: L_\mathrm{div} = \lambda \sum_{\ell \in R} \sum_i \sum_m
        \log \mathrm{softmax}_\tau(\sigma(\gamma_{\cdot, \ell, i}))_m

    A plain sum, so a large negative number: −λ M log M per feature where the members' gates agree, and lower the
    more they differ. Its force on a gate is (1 − M p) / τ: none between equal gates, ∝ 1/τ² for large τ. Computed
    in float64 where the device has it, since 1 − M p cancels for large τ.

    Args:
        ensemble: An ensemble, whose layers matched by `regularize` count; a module with one ensemble inside, as
            `torch.compile`, `DistributedDataParallel` or `AveragedModel` makes; or gates {layer name: (M, C)}.
        tau: Temperature τ > 0.
        weight: λ ≥ 0.

    Returns:
        A scalar. Nats, times λ.

    Raises:
        TypeError: if `ensemble` is none of those, or a module without an ensemble.
        ValueError: if `tau` is not a positive number, `weight` is negative, or a module holds several ensembles.

    Source: paper, section 3, equation of the regulariser.

    Examples:
        >>> diversity_loss({"layer": torch.full((4, 1), 0.5)}, tau=0.1).item()  # −4 log 4
        -5.545177...
    """
    check_tau(tau)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < float("inf"):
        raise ValueError(f"weight must be a number ≥ 0, not {weight!r}")
    gates = _gates_of(ensemble)
    if not gates:
        raise ValueError("no gates to regularise")
    stacked = torch.cat(list(gates.values()), dim=1)
    precise = stacked.float() if stacked.device.type == "mps" else stacked.double()
    return weight * F.log_softmax(precise / tau, dim=0).sum().to(torch.promote_types(stacked.dtype, torch.float32))


def _gates_of(ensemble: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the gates that count in the one ensemble inside a module, or those given."""
    if isinstance(ensemble, Mapping):
        return ensemble
    inside = ensemble.modules() if isinstance(ensemble, nn.Module) else ()
    found = [module for module in inside if isinstance(module, SigmaEnsemble)]
    kind = type(ensemble).__name__
    if not found:
        raise TypeError(f"expected a SigmaEnsemble or a mapping of gates, got {kind}, with no SigmaEnsemble inside")
    if len(found) > 1:
        raise ValueError(f"expected a module with one SigmaEnsemble inside, got {kind} with {len(found)}")
    return found[0].regularized_gates()


def check_tau(tau: float) -> None:
    """Raise ValueError unless the temperature is a finite number > 0."""
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 < tau < float("inf"):
        raise ValueError(f"tau must be a number > 0, not {tau!r}")
