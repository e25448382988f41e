"""The loss: closed forms of the regulariser and of its force."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import SigmaEnsemble, corner_energy, diversity_loss, member_cross_entropy

TAUS = [1e-3, 1e-2, 0.1, 1.0, 10.0, 1e3]


def shares(gates, tau):
    """softmax_τ over the members, float64 (M, C), by its definition."""
    e = np.exp((gates - gates.max(0)) / tau)
    return e / e.sum(0)


@pytest.mark.parametrize("members", [1, 2, 4, 5])
@pytest.mark.parametrize("tau", TAUS)
def test_equal_gates_give_minus_m_log_m_a_feature(members, tau):
    gates = {"a": torch.rand(7).expand(members, -1), "b": torch.rand(3).expand(members, -1)}
    loss = diversity_loss(gates, tau=tau, weight=0.5)
    assert loss.item() == pytest.approx(-0.5 * members * math.log(members) * 10)


@pytest.mark.parametrize("members", [1, 2, 4, 5])
@pytest.mark.parametrize("tau", TAUS)
def test_corners_have_the_corner_energy(members, tau):
    energies = corner_energy(members, tau)
    for k in range(1, members + 1):
        gates = (torch.arange(members) < k).float()[torch.randperm(members), None]
        assert diversity_loss({"layer": gates}, tau=tau).item() == pytest.approx(energies[k - 1].item())


@pytest.mark.parametrize("tau", TAUS)
def test_it_is_the_sum_over_layers_features_and_members(tau):
    gates = {"a": torch.rand(4, 6), "b": torch.rand(4, 2)}
    stacked = np.concatenate([g.double().numpy() for g in gates.values()], axis=1)
    log_shares = stacked / tau - np.logaddexp.reduce(stacked / tau, axis=0)
    assert diversity_loss(gates, tau=tau, weight=3).item() == pytest.approx(3 * log_shares.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("members", [2, 4, 5])
@pytest.mark.parametrize("tau", TAUS)
def test_the_force_on_a_gate_is_one_minus_m_p_over_tau(members, tau, dtype):
    gates = torch.rand(members, 9, dtype=dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(diversity_loss({"layer": gates}, tau=tau), gates)
    expected = (1 - members * shares(gates.detach().double().numpy(), tau)) / tau
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-9)


def test_the_force_vanishes_between_equal_gates_and_as_one_over_tau_squared():
    def largest_force(gates, tau):
        gates = gates.clone().requires_grad_()
        return torch.autograd.grad(diversity_loss({"layer": gates}, tau=tau), gates)[0].abs().max().item()

    assert largest_force(torch.full((4, 3), 0.3), 0.01) == pytest.approx(0, abs=1e-12)
    gates = torch.rand(4, 3)
    assert largest_force(gates, 200) / largest_force(gates, 400) == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("tau", [0.02, 0.1, 0.5, 2.0, 20.0])
@pytest.mark.parametrize("members", [2, 4, 5])
def test_equal_gates_are_the_maximum_and_every_other_corner_attracts(members, tau):
    equal = torch.full((members, 1), 0.5, dtype=torch.float64)
    top = diversity_loss({"layer": equal}, tau=tau)
    for k in range(1, members + 1):
        corner = (torch.arange(members) < k).double()[:, None]
        bottom = diversity_loss({"layer": corner}, tau=tau)
        inward = 0.02 * min(tau, 1) * (0.5 - corner).sign()
        for m in range(members):
            nudged = corner.clone()
            nudged[m] += inward[m]
            if k < members:
                assert diversity_loss({"layer": nudged}, tau=tau) > bottom
            else:  # all members own the feature: as high as equal gates anywhere, and left by any step
                assert_close(bottom, top)
                assert diversity_loss({"layer": nudged}, tau=tau) < bottom


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_descent_on_the_logits_ends_near_corners_with_the_force_of_all_signs(tau):
    gamma = torch.randn(4, 50, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([gamma], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        diversity_loss({"layer": gamma.sigmoid()}, tau=tau).backward()
        optimizer.step()
    gates = gamma.detach().sigmoid()
    owners = (gates > 0.5).sum(0)
    assert torch.minimum(gates, 1 - gates).median() < 0.02
    assert ((owners >= 1) & (owners < 4)).all()


def test_one_member_has_no_penalty_and_no_force():
    gates = torch.rand(1, 5, requires_grad=True)
    loss = diversity_loss({"layer": gates}, tau=0.1)
    loss.backward()
    assert loss.item() == 0
    assert (gates.grad == 0).all()


def test_only_regularised_layers_count():
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    ens = SigmaEnsemble(net, members=3, regularize="3")
    loss = diversity_loss(ens, tau=0.3, weight=0.1)
    assert_close(loss, diversity_loss({"3": ens.gates()["3"]}, tau=0.3, weight=0.1))
    loss.backward()
    assert ens.backbone[1].gamma.grad is None
    assert ens.backbone[3].gamma.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_loss_is_never_coarser_than_float32(dtype):
    gates = torch.rand(4, 1000).to(dtype)
    loss = diversity_loss({"layer": gates}, tau=0.1)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(diversity_loss({"layer": gates.double()}, tau=0.1).item(), rel=1e-6)


@pytest.mark.parametrize("tau", [0, -1.0, float("nan"), float("inf")])
def test_tau_must_be_positive_and_finite(tau):
    with pytest.raises(ValueError, match=f"tau must be a number > 0, not {tau}"):
        diversity_loss({"layer": torch.rand(2, 2)}, tau=tau)


@pytest.mark.parametrize("weight", [-1e-3, float("nan"), float("inf")])
def test_weight_must_not_be_negative(weight):
    with pytest.raises(ValueError, match=f"weight must be a number ≥ 0, not {weight}"):
        diversity_loss({"layer": torch.rand(2, 2)}, tau=1, weight=weight)


def test_no_gates_are_refused():
    with pytest.raises(ValueError, match="no gates to regularise"):
        diversity_loss({}, tau=1)


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 3])
def test_cross_entropy_is_the_mean_over_samples_and_members(members, batch):
    logits, labels = torch.randn(batch, members, 4, requires_grad=True), torch.randint(4, (batch,))
    loss = member_cross_entropy(logits, labels)
    p = logits.softmax(2)
    assert_close(loss, torch.stack([-p[b, :, labels[b]].log().mean() for b in range(batch)]).mean())
    each = [F.cross_entropy(logits[:, m], labels) for m in range(members)]
    expected = torch.autograd.grad(sum(each) / members, logits)
    assert_close(torch.autograd.grad(loss, logits), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8])
def test_labels_may_be_integers_of_any_kind(dtype):
    logits, labels = torch.randn(3, 2, 4), torch.tensor([0, 3, 1])
    assert_close(member_cross_entropy(logits, labels.to(dtype)), member_cross_entropy(logits, labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_labels_must_be_integers(dtype):
    with pytest.raises(TypeError, match=f"labels must be integers, not {dtype}"):
        member_cross_entropy(torch.zeros(3, 2, 4), torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("labels", [[0, 4], [-1, 0], [-100, 3]])
def test_labels_outside_the_classes_are_refused(labels):
    with pytest.raises(ValueError, match=rf"labels must lie in 0\.\.3, found {min(labels)}\.\.{max(labels)}"):
        member_cross_entropy(torch.zeros(2, 3, 4), torch.tensor(labels))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"logits must have shape \(B, M, K\), not \(2, 4\)"):
        member_cross_entropy(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\), not \(3,\)"):
        member_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(3, dtype=torch.long))
