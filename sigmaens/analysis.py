"""What the gates say: who owns which feature, how alike the members are, and where the regulariser pulls them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from .layers import check_members
from .losses import check_tau

__all__ = ["corner_energy", "k_star", "largest_share", "sigma_norm_cos", "soft_k", "soft_k_histogram"]


def soft_k(gates: Tensor) -> Tensor:
    """Return how many members use each feature: the count of gates above 0.5.

    Args:
        gates: Shape (M, C).

    Returns:
        Counts 0..M, shape (C,). Source: paper, section 4 ("soft M-choose-k").

    Examples:
        >>> soft_k(torch.tensor([[0.9, 0.1], [0.8, 0.2]]))
        tensor([2, 0])
    """
    return (gates > 0.5).sum(dim=0)


def soft_k_histogram(gates: Mapping[str, Tensor]) -> Tensor:
    """Return the share of features used by k = 0..M members, over all layers: shape (M+1,), summing to 1."""
    counts = torch.cat([soft_k(g) for g in gates.values()])
    members = next(iter(gates.values())).shape[0]
    return torch.bincount(counts, minlength=members + 1).double() / counts.numel()


def sigma_norm_cos(gates: Mapping[str, Tensor]) -> float:
    """Return σNorm-cos: the cosine of two members' gate vectors, averaged over member pairs, then over layers.

    It needs no data. 1 means that all members use the same features; NaN for a single member, which has no pair.

    Args:
        gates: {layer name: σ(γ) of shape (M, C)}, as from `SigmaEnsemble.gates`.

    Source: paper, section 4.

    Examples:
        >>> sigma_norm_cos({"a": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "b": torch.ones(2, 4)})
        0.5
    """
    layers = []
    for gate in gates.values():
        unit = F.normalize(gate.detach().double(), dim=1, eps=torch.finfo(torch.double).tiny)
        i, j = torch.triu_indices(len(unit), len(unit), offset=1)
        layers.append((unit[i] * unit[j]).sum(dim=1).mean())
    return torch.stack(layers).mean().item()


def corner_energy(members: int, tau: float) -> Tensor:
    r"""Return the bare penalty of one feature at the corners "k owners at 1, the others at 0".

    .. math:: f(k) = k / \tau - M \log(k\, e^{1/\tau} + M - k)

    Args:
        members: M ≥ 1.
        tau: Temperature τ > 0.

    Returns:
        f(1), …, f(M) in nats, float64, shape (M,). f(M) = −M log M is the maximum; every k < M attracts.

    Examples:
        >>> corner_energy(4, 1e9)[-1].item()  # −4 log 4
        -5.545177...
    """
    check_members(members)
    check_tau(tau)
    k = torch.arange(1, members + 1, dtype=torch.double)
    return (k - members) / tau - members * torch.log(k + (members - k) * math.exp(-1 / tau))


def k_star(members: int, tau: float) -> float:
    r"""Return the real k at which `corner_energy` is lowest, from 0⁺ at τ → 0 to M/2 at τ → ∞.

    .. math:: k^* = M \left(\tau - \frac{1}{e^{1/\tau} - 1}\right)

    Examples:
        >>> round(k_star(4, 1e3), 3), round(k_star(4, 0.1), 3)
        (2.0, 0.4)
    """
    check_members(members)
    check_tau(tau)
    if tau > 1e4:  # the difference of two large numbers; its series instead
        return members * (0.5 - 1 / (12 * tau))
    return members * (tau + math.exp(-1 / tau) / math.expm1(-1 / tau))


def largest_share(members: int, tau: float) -> float:
    r"""Return the largest share one member can have of a feature: e^{1/τ} / (e^{1/τ} + M − 1).

    Gates are bounded by 0 and 1, so the share is too; this is what bounds the regulariser from below.

    Examples:
        >>> round(largest_share(4, 1.0), 4)
        0.4754
    """
    check_members(members)
    check_tau(tau)
    return 1 / (1 + (members - 1) * math.exp(-1 / tau))
