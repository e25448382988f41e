"""Analysis: closed forms of the measures over gates and of the regulariser's landscape."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import nn
from torch.testing import assert_close

from sigmaens import (
    SigmaEnsemble,
    corner_energy,
    diversity_loss,
    k_star,
    largest_share,
    sigma_norm_cos,
    soft_k,
    soft_k_histogram,
)


def energy(k, members, tau):
    """f(k) for real k, with e^{−1/τ} taken out of the logarithm."""
    return (k - members) / tau - members * np.log(k + (members - k) * np.exp(-1 / tau))


def test_k_star_keeps_its_digits_for_any_temperature():
    for tau in (9e3, 1.1e4, 1e8, 1e16):
        assert k_star(4, tau) == pytest.approx(2 - 1 / (3 * tau), rel=1e-9)


@pytest.mark.parametrize("members", [1, 2, 4, 5])
@pytest.mark.parametrize("tau", [1e-9, 1e-3, 0.1, 1.0, 1e3, 1e9])
def test_corner_energy_is_its_formula(members, tau):
    energies = corner_energy(members, tau).numpy()
    np.testing.assert_allclose(energies, energy(np.arange(1, members + 1), members, tau), rtol=1e-12)
    assert energies[-1] == pytest.approx(-members * math.log(members), abs=1e-12)
    assert (energies <= energies[-1] + 1e-12).all()
    if 0.1 <= tau <= 1:
        k = np.arange(1, members + 1)
        plain = k / tau - members * np.log(k * np.exp(1 / tau) + members - k)
        np.testing.assert_allclose(energies, plain, rtol=1e-9)


@pytest.mark.parametrize("members", [2, 4, 16])
@pytest.mark.parametrize("tau", [0.05, 0.1, 0.5, 1.0, 5.0, 50.0])
def test_k_star_is_where_the_energy_is_lowest(members, tau):
    found = minimize_scalar(
        energy, bounds=(1e-9, members), args=(members, tau), method="bounded", options={"xatol": 1e-10}
    )
    assert k_star(members, tau) == pytest.approx(found.x, rel=1e-4)


@pytest.mark.parametrize("tau", [0.03, 0.3, 3.0])
def test_the_lowest_corner_is_next_to_k_star(tau):
    lowest = corner_energy(8, tau).argmin().item() + 1
    assert abs(lowest - max(k_star(8, tau), 1)) < 1


@pytest.mark.parametrize("members", [1, 4])
def test_k_star_runs_from_nothing_to_half_the_members(members):
    taus = np.logspace(-4, 5, 50)
    ks = [k_star(members, tau) for tau in taus]
    assert (np.diff(ks) > 0).all()
    assert ks[0] == pytest.approx(members * 1e-4)  # k* → M τ
    assert ks[-1] == pytest.approx(members / 2, rel=1e-5)
    assert k_star(members, 1e9) == pytest.approx(members / 2, rel=1e-6)


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("tau", [1e-4, 0.1, 1.0, 1e6])
def test_largest_share_is_that_of_a_single_owner(members, tau):
    owner = torch.zeros(members, dtype=torch.float64)
    owner[0] = 1
    share = largest_share(members, tau)
    assert share == pytest.approx(torch.softmax(owner / tau, 0)[0].item())
    assert 1 / members <= share <= 1


def test_largest_share_bounds_every_state():
    gates = torch.rand(3, 1000, dtype=torch.float64)
    assert torch.softmax(gates / 0.2, 0).max() < largest_share(3, 0.2)
    lowest = corner_energy(3, 0.2).min()
    losses = torch.stack([diversity_loss({"layer": g[:, None]}, tau=0.2) for g in gates.T])
    assert losses.min() > lowest


def test_soft_k_counts_gates_above_one_half():
    gates = torch.tensor([[0.9, 0.5, 0.1, 0.51], [0.8, 0.5, 0.4, 0.2], [0.7, 0.5, 0.6, 0.3]])
    assert soft_k(gates).tolist() == [3, 0, 1, 1]
    other = torch.tensor([[0.9], [0.9], [0.1]])
    assert soft_k_histogram({"a": gates, "b": other}).tolist() == pytest.approx([0.2, 0.4, 0.2, 0.2])


def test_cos_of_known_angles():
    gates = {
        "60°": torch.tensor([[1.0, 0.0], [0.5, 3**0.5 / 2]]),
        "parallel": torch.tensor([[0.2, 0.4], [0.1, 0.2]]),
        "orthogonal": torch.tensor([[1.0, 0.0], [0.0, 0.3]]),
    }
    for name, cosine in {"60°": 0.5, "parallel": 1.0, "orthogonal": 0.0}.items():
        assert sigma_norm_cos({name: gates[name]}) == pytest.approx(cosine, abs=1e-6)
    assert sigma_norm_cos(gates) == pytest.approx(0.5, abs=1e-6)


def test_cos_is_the_mean_over_pairs_then_over_layers():
    gates = {"wide": torch.rand(5, 40), "narrow": torch.rand(5, 3)}
    layers = []
    for g in gates.values():
        pairs = [torch.cosine_similarity(g[i], g[j], dim=0) for i in range(5) for j in range(i)]
        layers.append(torch.stack(pairs).mean())
    assert sigma_norm_cos(gates) == pytest.approx(torch.stack(layers).mean().item(), rel=1e-6)


def test_cos_of_scaled_gates_and_of_one_member():
    gates = torch.rand(3, 6, dtype=torch.float64)
    assert sigma_norm_cos({"a": gates * 1e-30}) == pytest.approx(sigma_norm_cos({"a": gates}))
    assert math.isnan(sigma_norm_cos({"a": gates[:1]}))


def test_cos_reads_an_ensemble_without_touching_its_graph():
    ens = SigmaEnsemble(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), members=2)
    gate = torch.sigmoid(ens.backbone[1].gamma)
    assert sigma_norm_cos(ens.gates()) == pytest.approx(torch.cosine_similarity(*gate, dim=0).item())
    assert_close(ens.gates()["1"], gate)


@pytest.mark.parametrize("measure", [corner_energy, k_star, largest_share])
def test_bad_arguments_are_refused_by_name(measure):
    for members in (0, True, 2.0):
        with pytest.raises(ValueError, match=f"members must be an integer ≥ 1, not {members!r}"):
            measure(members, 0.1)
    for tau in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"tau must be a number > 0, not {tau}"):
            measure(4, tau)
