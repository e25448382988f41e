"""σNorm layers: one gated norm is as many ordinary norms as it has members."""

import copy
import threading
from functools import partial

import hypothesis.extra.numpy as arrays
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import SigmaEnsemble
from sigmaens.layers import MemberHead, SigmaNorm, is_supported_norm, looks_like_norm

# Each with the shape of one input row.
BATCH_NORMS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (6,)),
    "BatchNorm1d of sequences": (lambda: nn.BatchNorm1d(6), (6, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), (6, 4, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(6, eps=1e-3), (6, 2, 3, 2)),
    "BatchNorm2d without affine": (lambda: nn.BatchNorm2d(6, affine=False), (6, 4, 3)),
    "BatchNorm2d with a cumulative mean": (lambda: nn.BatchNorm2d(6, momentum=None), (6, 4, 3)),
    "BatchNorm2d without statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (6, 4, 3)),
}
SAMPLE_NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(6), (5, 6)),
    "LayerNorm of two dimensions": (lambda: nn.LayerNorm((4, 6), eps=1e-3), (3, 4, 6)),
    "LayerNorm without shift": (lambda: nn.LayerNorm(6, bias=False), (6,)),
    "LayerNorm without affine": (lambda: nn.LayerNorm(6, elementwise_affine=False), (6,)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 6), (6, 4, 3)),
    "GroupNorm without affine": (lambda: nn.GroupNorm(2, 6, affine=False), (6, 5)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (5, 6)),
    "RMSNorm of two dimensions": (lambda: nn.RMSNorm((4, 6), eps=1e-3), (4, 6)),
}
NORMS = BATCH_NORMS | SAMPLE_NORMS

MEMBERS_AND_BATCH = [(1, 3), (2, 1), (4, 3), (5, 1), (5, 7)]


def trained(norm):
    """Give a norm a scale, a shift and statistics as training might leave them."""
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
        if getattr(norm, "running_mean", None) is not None:
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.num_batches_tracked.fill_(7)
    return norm


class Loop:
    """The members one after the other, from the formulas: scales (M, …), one shift, own statistics."""

    def __init__(self, norm, scales, shift):
        self.norm, self.scales, self.shift = norm, scales, shift
        self.means = self.variances = [None] * len(scales)
        if getattr(norm, "running_mean", None) is not None:
            self.means = [norm.running_mean.clone() for _ in scales]
            self.variances = [norm.running_var.clone() for _ in scales]
            self.count = norm.num_batches_tracked.item()

    def __call__(self, x, training):
        if training and self.means[0] is not None:
            self.count += 1
        parts = zip(x.chunk(len(self.scales)), self.scales, self.means, self.variances, strict=True)
        return torch.cat([self.member(*part, training) for part in parts])

    def member(self, x, scale, mean, var, training):
        norm, shift = self.norm, self.shift
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, norm.normalized_shape, scale, shift, norm.eps)
        if isinstance(norm, nn.RMSNorm):
            return F.rms_norm(x, norm.normalized_shape, scale, norm.eps)
        if isinstance(norm, nn.GroupNorm):
            return F.group_norm(x, norm.num_groups, scale, shift, norm.eps)
        momentum = norm.momentum
        if momentum is None and mean is not None:
            momentum = 1 / self.count if training else 0.0
        return F.batch_norm(x, mean, var, scale, shift, training or mean is None, momentum or 0.0, norm.eps)


def scales(layer, norm):
    """The scales that the formulas give for a layer from scratch, shaped as the norm's own."""
    shape = getattr(norm, "normalized_shape", (layer.gamma.shape[1],))
    return torch.sigmoid(layer.gamma).unflatten(1, tuple(shape))


@pytest.mark.parametrize(
    ("name", "members", "batch"),
    # One value per channel has no variance: that is an error, with a test of its own.
    [(n, *mb) for n in NORMS for mb in MEMBERS_AND_BATCH if not (n == "BatchNorm1d" and mb[1] == 1)],
)
def test_members_are_a_loop_over_ordinary_norms(name, members, batch):
    make, shape = NORMS[name]
    norm = make()
    layer = SigmaNorm(trained(norm), members)
    loop = Loop(make(), scales(layer, norm), None)
    for training in (True, True, True, False):
        layer.train(training)
        x = torch.randn(members * batch, *shape, requires_grad=True)
        weighting = torch.randn(members * batch, *shape)
        y, expected = layer(x), loop(x, training)
        assert_close(y, expected)
        inputs = (x, layer.gamma)
        gradients = torch.autograd.grad((y * weighting).sum(), inputs)
        assert_close(gradients, torch.autograd.grad((expected * weighting).sum(), inputs, retain_graph=True))
        if layer.running_mean is not None:
            assert_close(layer.running_mean, torch.stack(loop.means))
            assert_close(layer.running_var, torch.stack(loop.variances))
            assert layer.num_batches_tracked.tolist() == [loop.count] * members


# As torch says of its own RMSNorm there.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_members_are_a_loop_under_bfloat16_autocast(name, training):
    make, shape = NORMS[name]
    norm = make()
    layer = SigmaNorm(norm, 4).train(training)
    loop = Loop(norm, scales(layer, norm), None)
    x = torch.randn(4 * 3, *shape).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), loop(x, training)
    assert y.dtype == expected.dtype
    assert_close(y.float(), expected.float(), rtol=1e-2, atol=1e-2)
    if layer.running_mean is not None:
        assert layer.running_mean.dtype == torch.float32
        assert_close(layer.running_mean, torch.stack(loop.means))


@pytest.mark.parametrize("name", NORMS)
def test_members_have_statistics_and_gradients_of_their_own(name):
    make, shape = NORMS[name]
    layer = SigmaNorm(make(), 3)
    x = torch.randn(3 * 4, *shape, requires_grad=True)
    layer(x)[4:8].square().sum().backward()
    assert x.grad[4:8].abs().sum() > 0
    assert (x.grad[:4] == 0).all()
    assert (x.grad[8:] == 0).all()
    assert (layer.gamma.grad[[0, 2]] == 0).all()


@pytest.mark.parametrize("training", [True, False])
def test_channels_last_stays_channels_last(training):
    layer = SigmaNorm(nn.BatchNorm2d(6), 4).train(training)
    reference = copy.deepcopy(layer)
    x = torch.randn(12, 6, 4, 3)
    y = layer(x.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_close(y, reference(x), check_stride=False)
    assert_close(layer.running_var, reference.running_var)


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_member_is_an_ordinary_norm(name, pretrained):
    make, shape = NORMS[name]
    norm = trained(make())
    layer = SigmaNorm(norm, 3, pretrained=pretrained)
    nn.init.normal_(layer.gamma)
    layer(torch.randn(3 * 4, *shape))
    ordinary = [layer.member(m) for m in range(3)]
    assert {type(member) for member in ordinary} == {type(norm)}
    shifted = getattr(norm, "bias", None) is not None
    assert [name for name, _ in ordinary[0].named_parameters()] == ["weight", "bias"][: 1 + shifted]
    for training in (True, False):
        layer.train(training)
        x = torch.randn(3 * 4, *shape)
        outputs = [member.train(training)(x_m) for member, x_m in zip(ordinary, x.chunk(3), strict=True)]
        assert_close(layer(x), torch.cat(outputs))
        if layer.running_mean is not None:
            assert_close(layer.running_mean, torch.stack([member.running_mean for member in ordinary]))
            assert_close(layer.num_batches_tracked, torch.stack([m.num_batches_tracked for m in ordinary]))


@pytest.mark.parametrize("name", ["BatchNorm2d", "LayerNorm", "GroupNorm", "RMSNorm"])
def test_member_shares_nothing_with_the_ensemble(name):
    make, _ = NORMS[name]
    layer = SigmaNorm(trained(make()), 2, pretrained=True)
    before = copy.deepcopy(layer.state_dict())
    member = layer.member(1)
    with torch.no_grad():
        for tensor in member.state_dict().values():
            tensor.zero_()
    assert_close(layer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", NORMS)
def test_one_member_is_the_ordinary_layer_with_a_sigmoid_scale(name):
    make, shape = NORMS[name]
    norm = make()
    layer = SigmaNorm(norm, 1)
    norm.weight = nn.Parameter(scales(layer, norm)[0].detach())
    for training in (True, True, False):
        x = torch.randn(4, *shape)
        assert_close(layer.train(training)(x), norm.train(training)(x))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("members", "batch"), MEMBERS_AND_BATCH)
def test_conversion_keeps_the_function(name, members, batch):
    make, shape = NORMS[name]
    norm = trained(make())
    weight = getattr(norm, "weight", None)
    if weight is not None:
        with torch.no_grad():
            weight.flatten()[:5] = torch.tensor([0.0, -1.5e-9, -2.0, 13.1, 1.0])
    layer = SigmaNorm(norm, members, pretrained=True)
    assert [parameter for parameter, _ in layer.named_parameters()] == ["gamma"]
    for training in (True, False):
        if training and name == "BatchNorm1d" and batch == 1:
            continue
        norm.train(training)
        layer.train(training)
        x = torch.randn(batch, *shape)
        expected = norm(x).repeat(members, *[1] * len(shape))
        assert_close(layer(x.repeat(members, *[1] * len(shape))), expected)


@given(
    arrays.arrays(
        "float32",
        st.integers(1, 8),
        elements=st.one_of(st.just(0.0), st.floats(-(2**60), 2**60, width=32), st.floats(-(2**-30), 2**-30, width=32)),
    )
)
def test_conversion_keeps_scales_of_any_sign_and_size(weight):
    weight = torch.from_numpy(weight)
    norm = nn.LayerNorm(len(weight))
    norm.weight.data.copy_(weight)
    layer = SigmaNorm(norm, 2, pretrained=True)
    assert layer.gamma.isfinite().all()
    assert (layer.gates <= 0.95 * (1 + 1e-6)).all()
    smallest = torch.finfo(torch.float32).tiny * max(1.0, 1.1 * weight.abs().max().item())
    assert_close(layer.weight, weight.expand(2, -1), rtol=3e-7, atol=smallest)


def test_conversion_puts_the_largest_scale_at_gate_95_percent():
    norm = nn.BatchNorm1d(3)
    norm.weight.data = torch.tensor([-4.0, 2.0, 1.0])
    layer = SigmaNorm(norm, 2, pretrained=True)
    assert_close(layer.gates[0], torch.tensor([0.95, 0.475, 0.2375]))
    assert_close(layer.scale, torch.tensor([-1.0, 1.0, 1.0]) * 4 / 0.95)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scale_that_is_not_finite_is_refused(value):
    norm = nn.BatchNorm2d(3)
    norm.weight.data[1] = value
    with pytest.raises(ValueError, match=f"scale of BatchNorm2d is not finite: {value}"):
        SigmaNorm(norm, 2, pretrained=True)


def test_from_scratch_the_layer_is_blank():
    norm = trained(nn.BatchNorm2d(1000))
    layer = SigmaNorm(norm, 4, std=2.0)
    assert layer.gamma.std().item() == pytest.approx(2, rel=0.05)
    assert layer.gamma.mean().item() == pytest.approx(0, abs=0.1)
    assert layer.bias is None
    assert (layer.running_mean == 0).all()
    assert (layer.running_var == 1).all()
    assert layer.num_batches_tracked.tolist() == [0] * 4


def test_the_norm_given_is_not_changed():
    norm = trained(nn.BatchNorm2d(6))
    before = copy.deepcopy(norm.state_dict())
    layer = SigmaNorm(norm, 2, pretrained=True)
    layer(torch.randn(4, 6, 3, 3)).sum().backward()
    layer.gamma.data.zero_()
    assert_close(norm.state_dict(), before, rtol=0, atol=0)
    assert norm.weight.grad is None


def test_a_copy_a_cast_and_a_state_dict_keep_the_function():
    layer = SigmaNorm(trained(nn.BatchNorm2d(6)), 3, pretrained=True)
    x = torch.randn(6, 6, 4, 4)
    other = SigmaNorm(nn.BatchNorm2d(6), 3, pretrained=True)
    other.load_state_dict(layer.state_dict())
    double = copy.deepcopy(layer).to(torch.float64)
    layer(x)
    for twin in (other, double):
        y = twin(x.to(twin.gamma.dtype))
        assert y.dtype == twin.gamma.dtype
        assert_close(twin.running_mean.float(), layer.running_mean)
        assert_close(twin.eval()(x.to(twin.gamma.dtype)).float(), layer.eval()(x))
        layer.train()


def test_a_norm_in_evaluation_mode_stays_in_it():
    assert not SigmaNorm(nn.BatchNorm2d(3).eval(), 2).training
    assert SigmaNorm(nn.BatchNorm2d(3), 2).training


@pytest.mark.parametrize("members", [0, -1, True, 2.0, "4", None])
def test_members_must_be_a_positive_integer(members):
    with pytest.raises(ValueError, match=f"members must be an integer ≥ 1, not {members!r}"):
        SigmaNorm(nn.LayerNorm(3), members)


def test_negative_std_is_refused():
    for std in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"std must be a number ≥ 0, not {std}"):
            SigmaNorm(nn.LayerNorm(3), 2, std=std)


def test_rows_that_are_no_multiple_of_members_are_refused():
    with pytest.raises(ValueError, match=r"shape \(7, 3\) cannot hold 2 members"):
        SigmaNorm(nn.LayerNorm(3), 2)(torch.randn(7, 3))


def test_training_on_one_value_per_channel_is_refused():
    layer = SigmaNorm(nn.BatchNorm1d(3), 2)
    with pytest.raises(ValueError, match="batches of at least 2"):
        layer(torch.randn(2, 3))
    assert layer.num_batches_tracked.tolist() == [0, 0]
    assert layer.eval()(torch.randn(2, 3)).isfinite().all()


@pytest.mark.parametrize("training", [True, False])
def test_inputs_of_the_wrong_rank_are_refused_as_by_the_norm(training):
    with pytest.raises(ValueError, match="expected 4D input"):
        SigmaNorm(nn.BatchNorm2d(3), 2).train(training)(torch.randn(4, 3, 5))


def test_repr_names_the_layer():
    assert repr(SigmaNorm(nn.BatchNorm2d(6), 4)) == "SigmaNorm(BatchNorm2d, members=4, features=6, scratch)"


# Norms of other libraries


def library_norms():
    from timm.layers import BatchNormAct2d, GroupNormAct, LayerNorm2d, LayerNormFp32
    from torchvision.models.convnext import LayerNorm2d as TorchvisionLayerNorm2d
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm

    return {
        "timm BatchNormAct2d": BatchNormAct2d(6, act_layer=nn.LeakyReLU),
        "timm BatchNormAct2d without activation": BatchNormAct2d(6, apply_act=False),
        "timm GroupNormAct": GroupNormAct(6, group_size=3, act_layer=nn.SiLU),
        "timm LayerNorm2d": LayerNorm2d(6),
        "timm LayerNormFp32": LayerNormFp32((6, 4, 3)),
        "torchvision LayerNorm2d": TorchvisionLayerNorm2d(6),
        "transformers ConvNextLayerNorm": ConvNextLayerNorm(6, data_format="channels_first"),
    }


@pytest.fixture(scope="module", params=range(7))
def library_norm(request):
    return list(library_norms().values())[request.param]


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("members", [1, 4])
def test_norms_of_libraries_are_gated_member_by_member(library_norm, pretrained, members):
    norm = trained(copy.deepcopy(library_norm))
    layer = SigmaNorm(norm, members, pretrained=pretrained)
    nn.init.normal_(layer.gamma)
    ordinary = [copy.deepcopy(norm) for _ in range(members)]
    gates = torch.sigmoid(layer.gamma.detach())
    with torch.no_grad():
        for m, member in enumerate(ordinary):
            if pretrained:
                k = norm.weight.flatten().abs().max() / 0.95
                member.weight.copy_((k * norm.weight.flatten().sign() * gates[m]).view_as(norm.weight))
            else:
                member.weight.copy_(gates[m].view_as(norm.weight))
                member.bias.zero_()
                if layer.running_mean is not None:
                    member.running_mean.zero_()
                    member.running_var.fill_(1)
    for training in (True, True, False):
        x = torch.randn(members * 3, 6, 4, 3, requires_grad=True)
        y = layer.train(training)(x)
        parts = zip(ordinary, x.chunk(members), strict=True)
        expected = torch.cat([member.train(training)(x_m) for member, x_m in parts])
        assert_close(y, expected)
        assert_close(torch.autograd.grad(y.sin().sum(), x), torch.autograd.grad(expected.sin().sum(), x))
        twins = torch.cat([layer.member(m)(x_m) for m, x_m in enumerate(x.chunk(members)) if not training] or [y])
        assert_close(twins, expected)
    if layer.running_mean is not None:
        assert_close(layer.running_var, torch.stack([member.running_var for member in ordinary]))


class MeanOnly(nn.LayerNorm):
    """A user's subclass that does something else."""

    def forward(self, x):
        return x - x.mean(-1, keepdim=True)


class Renamed(nn.BatchNorm2d):
    """A user's subclass that does nothing else."""


def refused_norms():
    from timm.layers import EvoNorm2dS0, SplitBatchNorm2d
    from timm.layers.grn import GlobalResponseNorm
    from timm.layers.norm_act import FrozenBatchNormAct2d
    from torch.nn.utils import prune
    from torchvision.ops import FrozenBatchNorm2d

    replaced = nn.LayerNorm(4)
    replaced.forward = partial(nn.LayerNorm.forward, replaced)  # as hooks of accelerate do
    return [
        (nn.SyncBatchNorm(4), "takes its statistics over processes"),
        (nn.InstanceNorm2d(4), "has no scale for each feature"),
        (nn.LazyBatchNorm2d(), "is lazy"),
        (nn.utils.parametrizations.weight_norm(nn.LayerNorm(4)), "has a scale that is computed"),
        (prune.l1_unstructured(nn.LayerNorm(4), "weight", 1), "has a scale that is computed"),
        (MeanOnly(4), "lets its input through where the scale is 0"),
        (FrozenBatchNorm2d(4), "has a frozen scale"),
        (FrozenBatchNormAct2d(4), "has a frozen scale"),
        (SplitBatchNorm2d(4), "has norms inside"),
        (EvoNorm2dS0(4, group_size=2), r"has tensors of its own, \['v'\]"),
        (GlobalResponseNorm(4), "lets its input through where the scale is 0"),
        (replaced, "had its forward replaced"),
    ]


@pytest.mark.parametrize("i", range(12))
def test_other_norms_are_refused_by_name(i):
    norm, why = refused_norms()[i]
    assert looks_like_norm(norm)
    assert not is_supported_norm(norm)
    with pytest.raises(TypeError, match=rf"no σNorm for [\w.]*\.{type(norm).__name__}: it {why}"):
        SigmaNorm(norm, 2)
    holder = nn.Module()
    holder.inner = nn.Sequential(nn.LayerNorm(4), norm)
    if not isinstance(norm, nn.LayerNorm):
        with pytest.raises(TypeError, match=rf"layer 'inner.1'.* {why}.*skip='inner.1'"):
            SigmaEnsemble(holder, 2)


def other_norms():
    """Layers of other kinds, each with the scale that it multiplies by."""
    from timm.layers import RmsNorm
    from timm.layers.norm import LayerNormExp2d
    from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return {
        "Llama": (LlamaRMSNorm(4), 0),
        "Qwen3": (Qwen3RMSNorm(4), 0),
        "T5": (T5LayerNorm(4), 0),
        "Gemma": (GemmaRMSNorm(4), 1),
        "Nemotron": (NemotronLayerNorm1P(4), 1),
        "timm's RMSNorm": (RmsNorm(4), 0),
        "timm's LayerNorm of exponentials": (LayerNormExp2d(4), 0),
        "Chameleon, which needs a shift": (ChameleonLayerNorm((4,)), 0),
        "InstanceNorm": (nn.InstanceNorm2d(4, affine=True), 0),
    }


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("name", other_norms())
def test_norms_of_other_kinds_are_gated(name, pretrained):
    norm, offset = other_norms()[name]
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-0.5, 0.0, 0.7, 2.0]) - offset)
        if getattr(norm, "bias", None) is not None and pretrained:
            norm.bias.normal_()
    x = torch.randn(6, 4, 5, 5) if "2d" in type(norm).__name__ else torch.randn(6, 3, 4)
    layer = SigmaNorm(norm, 2, pretrained=pretrained)
    if pretrained:
        assert_close(layer(x), torch.cat([norm(part) for part in x.chunk(2)]))
    with torch.no_grad():
        layer.gamma.normal_()
    for m, part in enumerate(x.chunk(2)):
        twin = copy.deepcopy(norm)
        with torch.no_grad():
            twin.weight.copy_(layer.weight[m] - offset)
            if getattr(twin, "bias", None) is not None and not pretrained:
                twin.bias.zero_()
        assert_close(layer(x).chunk(2)[m], twin(part))
        assert_close(layer.member(m)(part), twin(part))
    if not pretrained:
        with torch.no_grad():
            layer.gamma.fill_(-torch.inf)
        assert layer(x).abs().max() == 0


def test_a_subclass_that_only_renames_is_accepted():
    layer = SigmaNorm(Renamed(4), 2)
    assert type(layer.member(0)) is Renamed


def test_modules_that_merely_contain_norms_or_have_no_state_are_none():
    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(3)

    assert not looks_like_norm(PreNorm())
    assert not looks_like_norm(nn.LocalResponseNorm(3))
    assert not looks_like_norm(nn.Linear(3, 3))


class Meet(nn.Module):
    """An activation in which two threads wait for each other."""

    barrier = threading.Barrier(2, timeout=10)

    def forward(self, x):
        self.barrier.wait()
        return x


def test_two_threads_may_use_a_layer_at_once():
    from timm.layers import BatchNormAct2d

    norm = BatchNormAct2d(3)
    norm.act = nn.Identity()
    layer = SigmaNorm(norm, 2).eval()
    x = torch.randn(2, 4, 3, 2, 2)
    expected = [layer(part) for part in x]
    shared = SigmaNorm(norm, 2).eval()
    shared.template.act = Meet()
    shared.load_state_dict(layer.state_dict())
    results = [None, None]

    def work(i):
        results[i] = shared(x[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_close(results, expected)


# Heads


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
@pytest.mark.parametrize("members", [1, 4])
def test_heads_are_a_norm_and_a_linear_layer_for_each_member(batch_norm, bias, shape, members):
    linear = nn.Linear(6, 3, bias=bias)
    head = MemberHead(linear, members, batch_norm=batch_norm)
    mean, var = torch.zeros(members, 6), torch.ones(members, 6)
    for training in (True, True, False):
        x = torch.randn(members * 3, *shape, requires_grad=True)
        expected = []
        for m, x_m in enumerate(x.chunk(members)):
            gate = torch.sigmoid(head.norm.gamma[m])
            rows = x_m.flatten(0, -2)
            if batch_norm:
                rows = F.batch_norm(rows, mean[m], var[m], gate, training=training)
            else:
                rows = F.layer_norm(rows, (6,), gate)
            rows = F.linear(rows, head.weight[m], None if head.bias is None else head.bias[m])
            expected.append(rows.view(*x_m.shape[:-1], 3))
        y, expected = head.train(training)(x), torch.cat(expected)
        assert_close(y, expected)
        inputs = (x, *head.parameters())
        assert_close(torch.autograd.grad(y.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs))
    assert (head.bias is None) == (not bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_member_of_a_head_is_ordinary(batch_norm, bias):
    head = MemberHead(nn.Linear(6, 3, bias=bias), 3, batch_norm=batch_norm).double()
    head(torch.randn(12, 6, dtype=torch.float64))
    x = torch.randn(12, 6, dtype=torch.float64)
    expected = head.eval()(x)
    members = [head.member(m) for m in range(3)]
    assert_close(torch.cat([member(x_m) for member, x_m in zip(members, x.chunk(3), strict=True)]), expected)
    assert not any(module.training for member in members for module in member.modules())


def test_heads_start_fresh_and_different():
    linear = nn.Linear(64, 10)
    head = MemberHead(linear, 4, batch_norm=False)
    tensors = [linear.weight, *head.weight]
    assert all(not torch.equal(a, b) for i, a in enumerate(tensors) for b in tensors[:i])
    assert_close(head.weight.std().item(), linear.weight.std().item(), rtol=0.1, atol=0)
    assert head.weight.abs().max() <= 1 / 8  # the bound of torch's own initialisation, 1/√64
