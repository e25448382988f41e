"""The loss: closed forms of the regulariser, of its force and of the cross-entropies; and whose gates are taken."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import SigmaEnsemble, corner_energy, diversity_loss, member_cross_entropy
from sigmaens.trainer import ForTrainer

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


# Whose gates


def ensemble():
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    return SigmaEnsemble(net, members=3, regularize="3")


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "torch.compile": lambda ens: torch.compile(ens, backend="eager"),
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "ForTrainer": lambda ens: ForTrainer(ens, tau=1.0),
    "Sequential": lambda ens: nn.Sequential(nn.Identity(), ens),
    "the same twice": lambda ens: nn.ModuleList([ens, ens]),
    "two deep": lambda ens: nn.Sequential(torch.compile(ens, backend="eager")),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_ensemble_is_found_inside_a_module(wrap):
    ens = ensemble()
    expected = diversity_loss({"3": ens.gates()["3"]}, tau=0.3, weight=0.1)
    assert_close(diversity_loss(wrap(ens), tau=0.3, weight=0.1), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", ["torch.compile", "DistributedDataParallel"])
# Where a graph ends, torch looks at tensors in a way that it warns of.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_wrapped_ensemble_gets_the_gradients_of_a_plain_one(name):
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    gradients = []
    plain = ensemble()
    for ens in (plain, copy.deepcopy(plain)):
        model = ens if ens is plain else WRAPPERS[name](ens)
        (member_cross_entropy(model(x), y) + diversity_loss(model, tau=0.3, weight=0.1)).backward()
        gradients.append({name: parameter.grad for name, parameter in ens.named_parameters()})
    assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize(("model", "kind"), [(nn.Sequential(nn.Linear(2, 2)), "Sequential"), ([], "list"), (3, "int")])
def test_what_holds_no_ensemble_is_refused(model, kind):
    with pytest.raises(TypeError, match=f"a SigmaEnsemble or a mapping of gates, got {kind}, with no SigmaEnsemble"):
        diversity_loss(model, tau=1)


def test_several_ensembles_in_one_module_are_refused():
    with pytest.raises(ValueError, match="with one SigmaEnsemble inside, got ModuleList with 2"):
        diversity_loss(nn.ModuleList([ensemble(), nn.Sequential(ensemble())]), tau=1)


# Cross-entropy


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
    with pytest.raises(TypeError, match=f"labels must be integers, not {dtype}"):
        member_cross_entropy(torch.zeros(3, 2, 4, 5, 6), torch.zeros(3, 5, 6, dtype=dtype))


@pytest.mark.parametrize("labels", [[0, 4], [-1, 0], [-100, 3]])
def test_labels_outside_the_classes_are_refused(labels):
    message = rf"labels must lie in 0\.\.3, found {min(labels)}\.\.{max(labels)}"
    with pytest.raises(ValueError, match=message):
        member_cross_entropy(torch.zeros(2, 3, 4), torch.tensor(labels))
    with pytest.raises(ValueError, match=message):
        member_cross_entropy(torch.zeros(2, 3, 4, 5, 6), torch.tensor(labels)[:, None, None].expand(2, 5, 6))


def test_shapes_that_do_not_fit_are_refused():
    for shape in ((2, 4), (2, 3, 4, 5)):
        with pytest.raises(ValueError, match=r"logits must have shape \(B, M, K\), .* not \(2, .*4.*\)"):
            member_cross_entropy(torch.zeros(shape), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"labels must have shape \(2,\), or \(2, 4\) for probabilities, not \(3,\)"):
        member_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(2, 5, 6\), or \(2, 4, 5, 6\) for probabilities, not \(2, 4\)"):
        member_cross_entropy(torch.zeros(2, 3, 4, 5, 6), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_class_labels_give_the_very_numbers_of_one_cross_entropy(dtype):
    logits, labels = torch.randn(7, 3, 11, dtype=dtype, requires_grad=True), torch.randint(11, (7,))
    loss = member_cross_entropy(logits, labels)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(3))
    assert torch.equal(loss, expected)
    assert torch.equal(*(torch.autograd.grad(value, logits)[0] for value in (loss, expected)))


PIXELS = [(), (5, 6), (2, 5, 6)]


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_hot_labels_are_class_labels(pixels, dtype):
    logits, labels = torch.randn(3, 2, 4, *pixels), torch.randint(4, (3, *pixels))
    soft = F.one_hot(labels, 4).movedim(-1, 1).to(dtype)
    assert_close(member_cross_entropy(logits, soft), member_cross_entropy(logits, labels))


@pytest.mark.parametrize("pixels", PIXELS)
def test_mixed_labels_give_the_mixed_loss(pixels):
    """−Σ_k q_k log p_k is linear in q."""
    logits = torch.randn(3, 2, 4, *pixels)
    one, other = torch.randint(4, (2, 3, *pixels))
    mixed = 0.3 * F.one_hot(one, 4).movedim(-1, 1) + 0.7 * F.one_hot(other, 4).movedim(-1, 1)
    expected = 0.3 * member_cross_entropy(logits, one) + 0.7 * member_cross_entropy(logits, other)
    assert_close(member_cross_entropy(logits, mixed), expected)


@pytest.mark.parametrize("pixels", PIXELS)
def test_smoothed_labels_give_the_loss_of_label_smoothing(pixels):
    logits, labels = torch.randn(3, 2, 4, *pixels), torch.randint(4, (3, *pixels))
    smoothed = 0.9 * F.one_hot(labels, 4).movedim(-1, 1) + 0.1 / 4
    each = [F.cross_entropy(logits[:, m], labels, label_smoothing=0.1) for m in range(2)]
    assert_close(member_cross_entropy(logits, smoothed), torch.stack(each).mean())


@pytest.mark.parametrize("pixels", PIXELS[1:])
@pytest.mark.parametrize("soft", [False, True])
def test_dense_is_the_loss_of_all_pixels_as_samples(pixels, soft):
    logits, labels = torch.randn(3, 2, 4, *pixels), torch.randint(4, (3, *pixels))
    if soft:
        labels = torch.randn(3, 4, *pixels).softmax(1)
    flat = labels.movedim(1, -1).flatten(0, -2) if soft else labels.flatten()
    expected = member_cross_entropy(logits.movedim((1, 2), (-2, -1)).flatten(0, -3), flat)
    assert_close(member_cross_entropy(logits, labels), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_labels_of_half_precision_may_be_as_far_off_as_rounding_makes_them(dtype):
    logits = torch.randn(200, 2, 10)
    smoothed = (0.9 * F.one_hot(torch.randint(10, (2, 200)), 10).to(dtype)).add(0.1 / 10)
    for labels in (torch.randn(200, 10).mul(3).to(dtype).softmax(1), 0.3 * smoothed[0] + 0.7 * smoothed[1]):
        assert (labels.double().sum(1) - 1).abs().max() > 1e-4  # more than float32 may be
        expected = -(labels.float().unsqueeze(1) * logits.log_softmax(2)).sum(2).mean()
        assert_close(member_cross_entropy(logits, labels), expected)
        with pytest.raises(ValueError, match=r"labels must sum to 1 ± 0\.0001"):
            member_cross_entropy(logits, labels.float())


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0.5, 0.5], [0.5, 0.6]], r"labels must sum to 1 ± 0\.0001 over classes, found 1\.1"),
        ([[0.5, 0.5], [1.25, -0.25]], r"labels must be probabilities ≥ 0, found -0\.25"),
        ([[0.5, 0.5], [0.5, math.nan]], "labels must be probabilities ≥ 0, found nan"),
    ],
)
def test_labels_that_are_no_probabilities_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        member_cross_entropy(torch.zeros(2, 3, 2), torch.tensor(labels))
    with pytest.raises(ValueError, match=message):
        member_cross_entropy(torch.zeros(2, 3, 2, 1, 1), torch.tensor(labels)[..., None, None])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_probabilities_must_be_of_a_floating_type(dtype):
    with pytest.raises(TypeError, match=rf"labels of shape \(2, 4\) must be of a floating type, not {dtype}"):
        member_cross_entropy(torch.zeros(2, 3, 4), torch.eye(4)[:2].to(dtype))


@pytest.mark.parametrize("labels", [torch.zeros(2, dtype=torch.long), torch.ones(2, 1)])
def test_softmax_of_a_single_logit_is_refused(labels):
    with pytest.raises(ValueError, match='the loss would always be 0: use link="sigmoid"'):
        member_cross_entropy(torch.randn(2, 3, 1), labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_half_precision_is_computed_in_float32(dtype, link):
    logits = (10 * torch.randn(50, 3, 7)).to(dtype)
    labels = torch.randint(7, (50,)) if link == "softmax" else torch.randint(2, (50, 7))
    loss = member_cross_entropy(logits, labels, link)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, member_cross_entropy(logits.float(), labels, link))


# Sigmoid


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_zero_logits_give_log_2_whatever_the_targets(dtype):
    logits, labels = torch.zeros(2, 3, 1), torch.tensor([0, 1], dtype=dtype)
    assert member_cross_entropy(logits, labels, link="sigmoid").item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 5, 6), (4, 5, 6), (4, 5)])
def test_sigmoid_is_the_mean_over_all_logits(shape):
    logits, labels = torch.randn(3, 2, *shape, dtype=torch.float64), torch.rand(3, *shape, dtype=torch.float64)
    p, q = logits.sigmoid(), labels.unsqueeze(1)
    expected = -(q * p.log() + (1 - q) * (1 - p).log()).mean()
    assert_close(member_cross_entropy(logits, labels, link="sigmoid"), expected)
    if shape[:1] == (1,):  # targets without the dimension of the single logit
        assert_close(member_cross_entropy(logits, labels.squeeze(1), link="sigmoid"), expected)


def test_a_single_logit_is_a_softmax_of_two():
    logits, labels = torch.randn(5, 3, 1), torch.tensor([0, 1, 1, 0, 1])
    pair = torch.cat([torch.zeros_like(logits), logits], dim=2)
    assert_close(member_cross_entropy(logits, labels, link="sigmoid"), member_cross_entropy(pair, labels))


def test_far_logits_of_a_sigmoid_stay_finite():
    loss = member_cross_entropy(torch.tensor([[[200.0]], [[-200.0]]]), torch.tensor([0, 0]), link="sigmoid")
    assert loss.item() == 100


@pytest.mark.parametrize(
    ("labels", "found"),
    [([0, 2], r"0\.\.2"), ([-100, 1], r"-100\.\.1"), ([0.5, 1.5], r"0\.5\.\.1\.5"), ([0, math.nan], r"nan\.\.nan")],
)
def test_targets_outside_0_to_1_are_refused(labels, found):
    with pytest.raises(ValueError, match=rf"labels must lie in 0\.\.1, found {found}"):
        member_cross_entropy(torch.zeros(2, 3, 1), torch.tensor(labels), link="sigmoid")


def test_targets_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 4\), not \(2,\)"):
        member_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2), link="sigmoid")
    with pytest.raises(ValueError, match=r"labels must have shape \(2, 1\), not \(1,\)"):
        member_cross_entropy(torch.zeros(2, 3, 1), torch.zeros(1), link="sigmoid")
    with pytest.raises(ValueError, match=r"logits must have shape \(B, M, …\), not \(2,\)"):
        member_cross_entropy(torch.zeros(2), torch.zeros(2), link="sigmoid")


def test_other_links_are_refused():
    with pytest.raises(ValueError, match='link must be "softmax" or "sigmoid", not \'logit\''):
        member_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.long), link="logit")


@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_values_of_labels_on_other_devices_are_not_waited_for(link):
    """The meta device has no values to look at."""
    logits, soft = torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, 4, device="meta")
    for labels in (soft, torch.zeros(2, dtype=torch.long, device="meta")) if link == "softmax" else (soft,):
        assert member_cross_entropy(logits, labels, link).shape == ()
