"""What the members of an ensemble disagree about, and how sure they are together (paper sections 3 and 8).

Everything takes `member_probs` (N, M, K), the probabilities of K classes by M members for N samples, as a tensor or
array, and computes in float64 without gradients; information is in nats. `labels` (N,) are integers in 0..K−1.
Rounding to float16 or bfloat16 moves the sums of rows away from 1, so rows of these types are divided by their sums.

Raises, everywhere: TypeError for a wrong kind of number, ValueError for a wrong shape or value.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = [
    "Decomposition",
    "decompose",
    "disagreement",
    "diversity_ratio",
    "jensen_gap",
    "ood_scores",
    "pairwise_kl",
]

# A float32 softmax that adds its K terms one by one is off by up to K/2 ulp: 6e-5 for the 1000 classes of ImageNet.
ROW_SUM_TOLERANCE = 1e-4
_HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# The smallest normal float32. A float32 softmax underflows below it, so a member's 0 means "less than this": between
# members it counts as this much, log = −87.3, where one underflow would make a whole average infinite.
FLOOR = torch.finfo(torch.float32).tiny


class Decomposition(NamedTuple):
    """Uncertainty of N predictions in nats: `total` = `aleatoric` + `modulation`, each (N,)."""

    total: Tensor
    aleatoric: Tensor
    modulation: Tensor


def decompose(member_probs: Tensor | ArrayLike) -> Decomposition:
    """Split the entropy of the mean prediction p̄ into what members share and what the modulation adds.

    H(p̄) = mean_m H(p_m) + U_mod with U_mod = mean_m KL(p_m ‖ p̄), the estimate of I[Y; φ | x, θ*] (paper
    section 3). U_mod is computed as that divergence: never negative, and exact however close the members are.

    >>> split = decompose([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.5, 0.5]]])
    >>> (split.aleatoric / math.log(2)).tolist(), (split.modulation / math.log(2)).tolist()
    ([0.0, 1.0], [1.0, 0.0])
    """
    probs = _checked(member_probs)
    mean = probs.mean(dim=1)
    return Decomposition(
        total=_entropy(mean),
        aleatoric=_entropy(probs).mean(dim=1),
        modulation=_divergence(probs, mean.unsqueeze(1)).mean(dim=1),
    )


def jensen_gap(member_probs: Tensor | ArrayLike, labels: Tensor | ArrayLike) -> float:
    """Mean member NLL minus the NLL of the mean probability, in nats, ≥ 0 (paper section 3).

    A probability of the label below the smallest normal float32 (1.2e-38) counts as that.

    >>> round(jensen_gap([[[0.2, 0.8], [0.8, 0.2]]], [0]), 12) == round(math.log(0.5 / 0.4), 12)
    True
    """
    probs = _checked(member_probs)
    index = _checked_labels(labels, probs)[:, None, None].expand(-1, probs.shape[1], 1)
    likelihood = probs.gather(2, index).squeeze(2).clamp(min=FLOOR)
    gap = likelihood.mean(dim=1).log() - likelihood.log().mean(dim=1)
    # Equal members may come out at −1e-16.
    return gap.clamp(min=0).mean().item()


def disagreement(member_probs: Tensor | ArrayLike) -> float:
    """Share of samples on which two members differ in their top class, averaged over pairs (paper section 8).

    0 for a single member, which has nobody to differ from. Of equally probable classes the first counts.

    >>> round(disagreement([[[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]]), 12)
    0.666666666667
    """
    probs = _checked(member_probs)
    _, members, classes = probs.shape
    if members == 1:
        return 0.0
    votes = torch.nn.functional.one_hot(probs.argmax(dim=2), classes).sum(dim=1)
    agreeing = (votes * (votes - 1)).sum(dim=1)
    return 1 - agreeing.double().mean().item() / (members * (members - 1))


def pairwise_kl(member_probs: Tensor | ArrayLike) -> float:
    """KL(p_i ‖ p_j) averaged over ordered pairs of different members and over samples, in nats (paper section 8).

    Always finite: probabilities below the smallest normal float32 (1.2e-38), zeros among them, count as that.
    0 for a single member.

    >>> round(pairwise_kl([[[0.2, 0.8], [0.8, 0.2]]]) / math.log(4), 12)
    0.6
    """
    probs = _checked(member_probs).clamp(min=FLOOR)
    members = probs.shape[1]
    if members == 1:
        return 0.0
    # Σ_ij p_i (log p_i − log p_j) = M Σ_i (p_i − p̄)(log p_i − mean log p): a covariance, linear in M and well centred.
    log = probs.log()
    product = (probs - probs.mean(dim=1, keepdim=True)) * (log - log.mean(dim=1, keepdim=True))
    return product.sum(dim=(1, 2)).clamp(min=0).mean().item() / (members - 1)


def diversity_ratio(member_probs: Tensor | ArrayLike, labels: Tensor | ArrayLike) -> float:
    """`disagreement` divided by the error rate of the mean prediction (paper section 8).

    NaN, with a UserWarning, if the mean prediction makes no error.

    >>> diversity_ratio([[[0.9, 0.1], [0.4, 0.6]], [[0.9, 0.1], [0.9, 0.1]]], [0, 1])
    1.0
    """
    probs = _checked(member_probs)
    error = (probs.mean(dim=1).argmax(dim=1) != _checked_labels(labels, probs)).double().mean().item()
    if error == 0:
        warnings.warn("the diversity ratio is NaN: the mean prediction makes no error", UserWarning, stacklevel=2)
        return math.nan
    return disagreement(probs) / error


def ood_scores(member_probs: Tensor | ArrayLike) -> dict[str, Tensor]:
    """Return the scores (N,) by which OOD samples are told, each higher for a stranger sample (paper section 8).

    `max_prob` is −max_k p̄_k, `entropy` is H(p̄), the entropy of the mean and not the members' mean entropy, and
    `modulation` is U_mod; the last two are in nats.

    >>> {name: score.tolist() for name, score in ood_scores([[[1.0, 0.0], [1.0, 0.0]]]).items()}
    {'max_prob': [-1.0], 'entropy': [0.0], 'modulation': [0.0]}
    """
    split = decompose(member_probs)
    confidence = _checked(member_probs).mean(dim=1).amax(dim=1)
    return {"max_prob": -confidence, "entropy": split.total, "modulation": split.modulation}


def row_sum_tolerance(dtype: torch.dtype) -> float:
    """Return how far from 1 a row of probabilities of a floating type may sum.

    When all terms are rounded, their sum moves by at most ε/2, however many there are. Softmax rounds once,
    e / e.sum() twice, and smoothing and mixup of labels four times: 2 ε.
    """
    return max(ROW_SUM_TOLERANCE, 2 * torch.finfo(dtype).eps)


def _entropy(probs: Tensor) -> Tensor:
    """H(p) = −Σ_k p_k log p_k over the last dimension."""
    return torch.special.entr(probs).sum(dim=-1)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) over the last dimension as Σ_k q_k φ(p_k / q_k − 1), φ(d) = (1 + d) log(1 + d) − d ≥ 0.

    Over distributions Σ_k q_k d_k = 0, so this is Σ_k p_k log(p_k / q_k), with no large terms that cancel.
    """
    p, q = p.clamp(min=FLOOR), q.clamp(min=FLOOR)
    excess = (p - q) / q
    # The last clamp guards against a log1p that is an ulp off.
    return (q * (torch.special.xlog1py(1 + excess, excess) - excess)).clamp(min=0).sum(dim=-1)


def _checked(member_probs: Tensor | ArrayLike) -> Tensor:
    """Return `member_probs` (N, M, K) in float64, or say what is wrong."""
    half = _HALF.get(str(getattr(member_probs, "dtype", "")).removeprefix("torch."))
    tolerance = ROW_SUM_TOLERANCE if half is None else row_sum_tolerance(half)
    # A copy, since torch warns when it shares memory with a read-only array, as pandas' are.
    probs = torch.asarray(member_probs, dtype=torch.float64, copy=True, requires_grad=False)
    if probs.ndim != 3 or probs.numel() == 0:
        raise ValueError(f"member_probs must be a non-empty array of shape (N, M, K), not {tuple(probs.shape)}")
    # Written so that NaN is outside too.
    inside = (probs >= 0) & (probs <= 1 + tolerance)
    if not inside.all():
        sample, member, label = (~inside).nonzero()[0].tolist()
        value = probs[sample, member, label].item()
        raise ValueError(
            f"member_probs must lie in [0, 1], but sample {sample}, member {member} has {value} for class {label}"
        )
    total = probs.sum(dim=2)
    wrong = (total - 1).abs() > tolerance
    if wrong.any():
        sample, member = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"member_probs must sum to 1 ± {tolerance} over classes, but sample {sample}, "
            f"member {member} has {total[sample, member].item()}"
        )
    return probs if half is None else probs / total.unsqueeze(2)


def _checked_labels(labels: Tensor | ArrayLike, probs: Tensor) -> Tensor:
    """Return `labels` (N,) as int64 beside `probs` (N, M, K), or say what is wrong."""
    samples, _, classes = probs.shape
    labels = torch.asarray(labels, device=probs.device, copy=True)
    if labels.shape != (samples,):
        raise ValueError(f"labels must have shape ({samples},), one for each sample, not {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, not {labels.dtype}")
    labels = labels.long()
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        sample = wrong.nonzero()[0].item()
        raise ValueError(f"labels must be in 0..{classes - 1}, but sample {sample} has {labels[sample].item()}")
    return labels
