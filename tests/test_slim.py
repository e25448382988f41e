"""Slim ensembles: the outputs, gradients and statistics of the full ensemble, at the cost of the open gates."""

import copy
import functools
import importlib
import pickle
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import SigmaEnsemble, backbones, decompose, parameter_groups
from sigmaens.layers import SigmaBatchNorm
from sigmaens.results import multiply_adds
from sigmaens.slim import Cut, Pick, SlimEnsemble, Spread, close, slim, with_uncertainty

slim_module = importlib.import_module("sigmaens.slim")
EXACT = {"rtol": 0, "atol": 1e-12}


def settled(ens, share=0.6):
    """Close a share of the gates for good, and give the norms statistics as training might leave them."""
    with torch.no_grad():
        for layer in ens._layers().values():
            layer.gamma[torch.rand(layer.gamma.shape) < share] = -torch.inf
            if layer.running_mean is not None:
                layer.running_mean.normal_()
                layer.running_var.uniform_(0.5, 2)
    return ens


def closed(ens, slimmed):
    """The full ensemble with the gates that count as 0 set to 0."""
    ens = copy.deepcopy(ens)
    with torch.no_grad():
        for name, layer in ens._layers().items():
            layer.gamma[~slimmed._layers()[name].opened()] = -torch.inf
    return ens


def assert_equal(ens, slimmed, *inputs, atol=1e-12):
    """Outputs, gradients, and statistics of open channels agree, in evaluation and in training; members too."""
    full = closed(ens, slimmed)
    slimmed = copy.deepcopy(slimmed)
    for training in (False, True):
        full.train(training)
        slimmed.train(training)
        expected, got = full(*inputs), slimmed(*inputs)
        scale = max(1, expected.detach().abs().max().item())
        assert_close(got, expected, rtol=0, atol=atol * scale)
        weights = torch.randn_like(expected)
        for model, logits in ((full, expected), (slimmed, got)):
            model.zero_grad()
            (logits * weights).sum().backward()
        ours = dict(slimmed.named_parameters())
        limit = 1e4 * atol * max(1, *(parameter.grad.abs().max().item() for parameter in full.parameters()))
        for name, parameter in full.named_parameters():
            grad = torch.zeros_like(parameter) if ours[name].grad is None else ours[name].grad
            assert_close(grad, parameter.grad, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}")
    for name, layer in full._layers().items():
        if layer.running_mean is not None:
            other = slimmed._layers()[name]
            channels = other.opened()
            for which in ("running_mean", "running_var"):
                assert_close(getattr(other, which)[channels], getattr(layer, which)[channels], rtol=1e-10, atol=1e-10)
            assert_close(other.num_batches_tracked, layer.num_batches_tracked)
    full.eval()
    slimmed.eval()
    expected = full(*inputs)
    with torch.no_grad():
        assert_close(slimmed(*inputs), expected, rtol=0, atol=atol * scale)  # from what is kept ready
        for m in range(full.members):
            member = slimmed.member(m)
            assert not any(type(module).__module__ == "sigmaens.layers" for module in member.modules())
            logits = member(*inputs)
            assert_close(getattr(logits, "logits", logits), expected[:, m], rtol=0, atol=atol * scale)


class Chain(nn.Module):
    """Convolutions in a row, each with a norm: `middle` stands between the second norm and the third convolution."""

    def __init__(self, middle=None, *, conv=nn.Conv2d, after=None, **options):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = conv(6, 6, 3, **options)
        self.bn2 = nn.BatchNorm2d(6, momentum=None)
        self.middle = middle or nn.ReLU(inplace=True)
        self.conv3 = after or nn.Conv2d(6, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.conv3(self.middle(self.bn2(self.conv2(x))))
        return self.fc(x.flatten(2).mean(2))


class Functional(Chain):
    """A chain with other ways to write it."""

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = F.silu(F.max_pool2d(self.bn2(self.conv2(x)), 2), inplace=True).relu_()
        x = F.dropout(x.contiguous(), 0.0, self.training)
        return self.fc(self.conv3(x.mean((2, 3), keepdim=True)).flatten(1))


class ToLinear(nn.Module):
    """A last norm that a linear layer reads through a mean, and norms of one dimension."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.fc1, self.bn1 = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.fc2, self.ln = nn.Linear(8, 8), nn.LayerNorm(8)
        self.fc3, self.rms = nn.Linear(8, 8), nn.RMSNorm(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.bn(self.conv(x)).relu().mean((-1, -2))
        x = F.hardswish(self.bn1(self.fc1(x)))
        x = F.gelu(self.ln(self.fc2(x)))
        return self.fc(F.leaky_relu(self.rms(self.fc3(x)), 0.1))


class Groups(nn.Module):
    """A norm over groups, whose channels a convolution reads."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Conv2d(6, 5, 1)

    def forward(self, x):
        return self.conv2(self.norm(self.conv1(x)).relu()).mean((2, 3))


class Branches(nn.Module):
    """A norm that two convolutions read, both of which may be narrower, and one that a sum reads too."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.left, self.right = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)
        self.bn2, self.conv3 = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.left(x)) + self.right(x)
        return self.fc((y + self.conv3(y)).mean((2, 3)))


class Shared(nn.Module):
    """A norm, a convolution and an activation, each called twice."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)
        self.bn1, self.relu, self.fc = nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Linear(6, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn(self.conv(x)))
        x = self.relu(self.bn(self.conv(x)))
        return self.fc(x.mean((2, 3)))


NETS = {
    "narrow ResNet": lambda: backbones.narrow_resnet(5, width=4),
    "bottlenecks": lambda: backbones.ResNet(5, width=3, blocks=(1, 2), block=backbones.Bottleneck),
    "wide ResNet": lambda: backbones.ResNet(5, width=6, blocks=(2, 1), block=backbones.WideBlock, stem=4),
    "chain": Chain,
    "functions": Functional,
    "reflected padding, strides": lambda: Chain(padding_mode="reflect", padding=1, stride=2, dilation=1, bias=False),
    "to linear": ToLinear,
    "GroupNorm": Groups,
    "branches": Branches,
    "shared": Shared,
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("head", [False, True])
def test_slim_is_the_full_ensemble(name, head):
    net = NETS[name]().double()
    linear = "fc" if head and hasattr(net, "fc") else None
    ens = settled(SigmaEnsemble(net, 3, head=linear))
    x = torch.randn(3, 3, 12, 12, dtype=torch.float64)
    slimmed = slim(ens, x)
    assert_equal(ens, slimmed, x)
    single = slim(ens, x[:1]).eval()
    assert single(x).shape == (3, 3, 5)
    assert_close(single(x[:1]), closed(ens, slimmed).eval()(x[:1]), **EXACT)


def test_float32_agrees_to_a_millionth():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(10), 4, head="fc")).eval()
    x = torch.randn(4, 3, 16, 16)
    change = slim(ens, x).change(ens, x)
    assert change["relative"] < 1e-6
    assert set(change) == {"absolute", "relative"}


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    members=st.integers(1, 4),
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    blocks=st.lists(st.integers(1, 2), min_size=1, max_size=2),
    block=st.sampled_from([backbones.BasicBlock, backbones.Bottleneck, backbones.WideBlock]),
    width=st.integers(1, 5),
)
def test_any_network_and_any_masks(seed, members, share, blocks, block, width):
    torch.manual_seed(seed)
    net = backbones.ResNet(3, 2, width=width, blocks=blocks, block=block).double()
    ens = settled(SigmaEnsemble(net, members, head="fc" if seed % 2 else None), share)
    x = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    assert_equal(ens, slim(ens, x), x)


def test_a_member_may_keep_all_or_nothing():
    ens = SigmaEnsemble(Chain().double(), 3)
    with torch.no_grad():
        ens.backbone.bn2.gamma[0] = -torch.inf
        ens.backbone.bn2.gamma[1, 1:] = -torch.inf
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    assert slimmed.report["bn2"].kept == (0, 1, 6)
    assert [slimmed.member(m).conv2.out_channels for m in range(3)] == [1, 1, 6]
    assert_equal(ens, slimmed, x)


def test_all_open_leaves_everything():
    ens = SigmaEnsemble(backbones.narrow_resnet(5, width=4), 2, head="fc").eval()
    x = torch.randn(2, 3, 8, 8)
    slimmed = slim(ens, x, threshold=0)
    assert all(set(cut.kept) == {cut.features} for cut in slimmed.report.values())
    assert_close(slimmed(x), ens(x), rtol=0, atol=1e-6)


def test_report_of_a_residual_network():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=8, blocks=(1, 1)), 2, head="fc"))
    report = slim(ens, torch.randn(1, 3, 8, 8)).report
    inner, last, stem = report["stages.1.0.bn1"], report["stages.1.0.bn2"], report["bn1"]
    assert inner == Cut(16, inner.kept, "stages.1.0.conv1", ("stages.1.0.conv2",), "")
    assert inner.kept == tuple((ens.backbone.stages[1][0].bn1.gates > 0.01).sum(1).tolist())
    assert last == Cut(16, last.kept, "stages.1.0.conv2", (), "add reads it")
    assert report["stages.1.0.shortcut.1"].producer == "stages.1.0.shortcut.0"
    assert stem.kept == (8, 8)
    assert "runs once for all members" in stem.reason
    assert "member head" in report["fc.norm"].reason


@pytest.mark.parametrize(
    ("build", "size", "inner", "rows", "columns"),
    [
        (backbones.resnet18, 8, "stages.2.1.bn1", "stages.2.1.conv1", ("stages.2.1.conv2",)),
        (backbones.resnet50, 8, "stages.2.1.bn2", "stages.2.1.conv2", ("stages.2.1.conv3",)),
        (backbones.wide_resnet, 4, "stages.2.3.bn1", "stages.2.3.conv1", ("stages.2.3.conv2",)),
    ],
)
def test_networks_of_the_paper(build, size, inner, rows, columns):
    ens = SigmaEnsemble(build(10), 1, head="fc")
    cuts = slim(ens, torch.randn(1, 3, size, size), share=True).report
    assert (cuts[inner].producer, cuts[inner].consumers) == (rows, columns)
    blocks = [name for name in cuts if name.startswith("stages") and name.endswith(".bn1")]
    assert len(blocks) == {"stages.2.1.bn1": 8, "stages.2.1.bn2": 16, "stages.2.3.bn1": 12}[inner]
    assert all(cuts[name].producer and cuts[name].consumers for name in blocks)


def test_torchvision_and_timm():
    timm = pytest.importorskip("timm")
    from torchvision.models import resnet

    for net, norm, rows, columns in (
        (resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=5), "layer1.0.bn1", "conv1", "conv2"),
        (timm.create_model("resnet10t", num_classes=5), "layer1.0.bn1", "conv1", "conv2"),
    ):
        ens = settled(SigmaEnsemble(net.double(), 2, head="fc"))
        x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
        slimmed = slim(ens, x)
        cut = slimmed.report[norm]
        assert (cut.producer, cut.consumers) == (f"layer1.0.{rows}", (f"layer1.0.{columns}",))
        assert_equal(ens, slimmed, x)


def test_norms_with_an_activation_inside_and_depthwise_convolutions():
    timm = pytest.importorskip("timm")
    ens = settled(SigmaEnsemble(timm.create_model("test_efficientnet", num_classes=5).double(), 2)).eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    slimmed = slim(ens, x)
    report = slimmed.report
    narrowed = [name for name, cut in report.items() if cut.producer]
    assert narrowed
    assert any("groups" in cut.reason for cut in report.values())
    assert_close(slimmed(x), closed(ens, slimmed)(x), **EXACT)


@pytest.mark.parametrize("pretrained", [False, True])
def test_ffn_of_a_vision_transformer(pretrained):
    timm = pytest.importorskip("timm")
    net = timm.create_model("test_vit", num_classes=5, img_size=32).double()
    ens = (SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble)(net, 2, head="head")
    settled(ens)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    slimmed = slim(ens, x)
    cut = slimmed.report["blocks.0.norm2"]
    assert (cut.producer, cut.consumers) == (None, ("blocks.0.mlp.fc1",))
    assert max(cut.kept) < cut.features
    assert cut.reason == "it needs all channels for its statistics"
    assert slimmed.member(0).blocks[0].mlp.fc1.in_features == cut.kept[0]
    assert_equal(ens, slimmed, x)


def test_what_cannot_be_traced_is_traced_in_parts():
    class Unclear(nn.Module):
        def __init__(self):
            super().__init__()
            self.chain = Chain()
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x):
            x = self.norm(self.chain(x))
            return x if x.sum() > 1e9 else x.exp()

    ens = settled(SigmaEnsemble(Unclear().double(), 2))
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    report = slimmed.report
    assert report["norm"].producer is None
    assert report["norm"].reason.startswith("the backbone cannot be traced (TraceError: ")
    assert (report["chain.bn2"].producer, report["chain.bn2"].consumers) == ("chain.conv2", ("chain.conv3",))
    assert_equal(ens, slimmed, x)


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


class Twice(Chain):
    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return self.fc((self.conv3(y.relu()) + y[:, :4]).mean((2, 3)))


class Weights(Chain):
    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return self.fc((self.conv3(y) + F.conv2d(x[:, :, 4:, 4:], self.conv3.weight[:, :3])).mean((2, 3)))


class Flat(Chain):
    def __init__(self):
        super().__init__(after=nn.Linear(6 * 5 * 5, 4))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return self.fc(self.conv3(y.flatten(1)))


ALONE = {
    "sum": (lambda: Chain(nn.Sigmoid()), "layer 'middle' (Sigmoid) does not map 0 to 0"),
    "threshold": (lambda: Chain(nn.Hardtanh(1.0, 2.0)), "layer 'middle' (Hardtanh) does not map 0 to 0"),
    "own module": (lambda: Chain(Doubling()), "layer 'middle' is a Doubling"),
    "scales by channel": (lambda: Chain(nn.PReLU(6)), "layer 'middle' is a PReLU"),
    "softmax": (lambda: Chain(nn.Softmax(1)), "layer 'middle' is a Softmax"),
    "two readers": (Twice, "getitem reads it"),
    "flatten": (Flat, "flatten reads it"),
    "grouped": (lambda: Chain(after=nn.Conv2d(6, 4, 1, groups=2)), "layer 'conv3' has 2 groups"),
    "depthwise": (
        lambda: Chain(after=nn.Sequential(nn.Conv2d(6, 6, 1, groups=6), nn.Conv2d(6, 4, 1))),
        "layer 'conv3.0' has 6 groups",
    ),
    "transposed": (lambda: Chain(after=nn.ConvTranspose2d(6, 4, 1)), "layer 'conv3' is a ConvTranspose2d"),
    "norm after": (
        lambda: Chain(nn.GroupNorm(2, 6)),
        "layer 'middle' is a SigmaNorm",
    ),
    "weights read": (Weights, "the weight of layer 'conv3' is read elsewhere"),
    "parametrised": (
        lambda: Chain(after=nn.utils.parametrizations.weight_norm(nn.Conv2d(6, 4, 1))),
        "layer 'conv3' is a ParametrizedConv2d",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_readers_that_prove_nothing_get_zeros(name):
    build, reason = ALONE[name]
    ens = settled(SigmaEnsemble(build().double(), 2))
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    cut = slimmed.report["bn2"]
    assert (cut.producer, cut.consumers, cut.reason) == ("conv2", (), reason)
    assert_equal(ens, slimmed, x)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"groups": 2}, "layer 'conv2' has 2 groups"), ({"conv": nn.ConvTranspose2d}, "'conv2' is a ConvTranspose2d")],
)
def test_producers_that_prove_nothing_run_in_full(options, reason):
    ens = settled(SigmaEnsemble(Chain(**options).double(), 2))
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    cut = slimmed.report["bn2"]
    assert (cut.producer, cut.consumers) == (None, ("conv3",))
    assert cut.reason.endswith(reason)
    assert isinstance(slimmed.member(0).bn2[0], Pick)
    assert_equal(ens, slimmed, x)


def test_what_others_read_too_is_whole():
    class Reads(Chain):
        def forward(self, x):
            y = self.conv2(self.bn1(self.conv1(x)).relu())
            return self.fc(self.conv3(self.bn2(y).relu()).mean((2, 3)) + y.square().mean((1, 2, 3))[:, None])

    ens = settled(SigmaEnsemble(Reads().double(), 2))
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    cut = slimmed.report["bn2"]
    assert (cut.producer, cut.consumers, cut.reason) == (None, ("conv3",), "square reads layer 'conv2' too")
    assert_equal(ens, slimmed, x)


class Across(nn.Module):
    """Linear layers along positions, before and after a norm whose channels are another dimension."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn1 = nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6)
        self.before, self.bn, self.after = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x):
        x = self.bn1(self.conv(x)).relu()
        return self.fc(self.after(self.bn(self.before(x)).relu()).mean(2))


def test_layers_along_another_dimension_run_in_full():
    # As many channels as positions: no shape would tell.
    ens = settled(SigmaEnsemble(Across().double(), 2))
    x = torch.randn(3, 3, 6, dtype=torch.float64)
    slimmed = slim(ens, x)
    reason = (
        "the channels of layer 'before' are not the norm's; the columns of layer 'after' are not the norm's channels"
    )
    assert slimmed.report["bn"] == Cut(6, (6, 6), None, (), reason)
    assert slimmed.report["bn1"].reason.endswith("the columns of layer 'before' are not the norm's channels")
    assert_equal(ens, slimmed, x)


def test_what_an_attribute_keeps_is_whole():
    class Keeps(Chain):
        def forward(self, x):
            self.features = self.conv2(self.bn1(self.conv1(x)).relu())
            return self.fc(self.conv3(self.bn2(self.features).relu()).mean((2, 3)))

    ens = settled(SigmaEnsemble(Keeps().double(), 2))
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    cut = slimmed.report["bn2"]
    assert (cut.producer, cut.consumers) == (None, ("conv3",))
    assert cut.reason == "an attribute keeps what layer 'conv2' returns"
    assert_equal(ens, slimmed, x)
    with torch.no_grad():
        slimmed.eval()(x)
    assert slimmed.backbone.features.shape[1] == 6


def test_hooks_keep_a_layer_whole():
    ens = settled(SigmaEnsemble(Chain().double(), 2)).eval()
    seen = []
    ens.backbone.conv3.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    assert slimmed.report["bn2"].reason == "layer 'conv3' has hooks"
    seen.clear()
    slimmed(x)
    assert seen == [6, 6]

    ens = settled(SigmaEnsemble(Chain().double(), 2)).eval()
    ens.backbone.conv2.register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    slimmed = slim(ens, x)
    cut = slimmed.report["bn2"]
    assert (cut.producer, cut.reason) == (None, "layer 'conv2' has hooks")
    full = closed(ens, slimmed)
    expected = full(x)
    seen.clear()
    assert_close(slimmed(x), expected, **EXACT)
    full(x)
    assert seen == [6] * 3  # twice for members, and once for all of the full ensemble


def test_shifts_keep_their_channels():
    net = Chain().double()
    with torch.no_grad():
        net.bn2.weight.copy_(torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, -3.0]))
        net.bn2.bias.copy_(torch.tensor([0.5, 0.0, 0.0, 0.0, -1.0, 1.0]))
    ens = SigmaEnsemble.from_pretrained(net, 2)
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    assert slimmed.report["bn2"].kept == (4, 4)
    assert slimmed.member(0).conv2.out_channels == 4
    assert_close(slimmed.eval()(x)[:, 1], net.eval()(x), rtol=0, atol=1e-10)
    assert_equal(ens, slimmed, x, atol=1e-11)


def test_the_layers_before_the_first_norm_run_once():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 3, head="fc")).eval()
    x = torch.randn(2, 3, 8, 8)
    slimmed = slim(ens, x)
    calls = []
    slimmed.backbone.conv1.apply_to = lambda *a: (
        calls.append(1) or type(slimmed.backbone.conv1).apply_to(slimmed.backbone.conv1, *a)
    )
    slimmed(x)
    assert len(calls) == 1


@pytest.mark.parametrize("how", ["module", "function", "noise"])
def test_what_is_drawn_before_the_first_norm_is_drawn_for_every_member(how):
    class Draws(Chain):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            if how == "module":
                return super().forward(self.drop(x))
            if how == "function":
                return super().forward(F.dropout(x, 0.5, self.training))
            return super().forward(x + torch.rand_like(x))

    ens = SigmaEnsemble(Draws(), 3).train()
    with torch.no_grad():
        for layer in ens._layers().values():
            layer.gamma.fill_(1.0)  # so that members differ in what they draw alone
    logits = slim(ens, torch.randn(2, 3, 9, 9))(torch.randn(4, 3, 9, 9))
    assert all((logits[:, m] - logits[:, n]).abs().max() > 1e-3 for m, n in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("where", ["input", "first layer"])
def test_members_do_not_see_what_others_wrote(where):
    class Writes(Chain):
        def forward(self, x):
            if where == "input":
                return super().forward(x.mul_(2.0))
            y = self.conv1(x)
            y += 1
            return self.fc(self.conv3(self.bn2(self.conv2(self.bn1(y)))).mean((2, 3)))

    ens = settled(SigmaEnsemble(Writes().double(), 3)).eval()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x.clone())
    expected = closed(ens, slimmed)(x.clone())
    assert_close(slimmed(x.clone()), expected, **EXACT)
    assert_close(with_uncertainty(slimmed)(x.clone())[0], expected.softmax(-1).mean(1), **EXACT)


def test_multiply_adds_are_those_of_the_open_gates():
    width, side, members = 8, 16, 3
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(10, width=width), members, head="fc"))
    slimmed = slim(ens, torch.randn(1, 3, side, side))
    kept = {name: cut.kept for name, cut in slimmed.report.items()}
    total = side**2 * 3 * 9 * width  # the stem, once
    for m in range(members):
        before = width
        for stage in range(3):
            pixels = (side // 2**stage) ** 2
            inner, last = (kept[f"stages.{stage}.0.bn{i}"][m] for i in (1, 2))
            total += pixels * 9 * inner * (before + last)
            if stage:
                total += pixels * before * kept[f"stages.{stage}.0.shortcut.1"][m]
            before = width * 2**stage
        total += before * 10
    image = torch.randn(1, 3, side, side)
    assert multiply_adds(slimmed, image) == total
    assert total < multiply_adds(ens, image) / 2


def test_channels_last():
    ens = settled(SigmaEnsemble(Branches(), 2), 0).eval().to(memory_format=torch.channels_last)
    with torch.no_grad():
        for layer in ens._layers().values():
            layer.gamma[0, :3] = layer.gamma[1, 2:] = -torch.inf
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    slimmed = slim(ens, x)
    formats = []
    handle = slimmed.backbone.bn2.register_forward_hook(
        lambda module, args, y: formats.append(y.is_contiguous(memory_format=torch.channels_last))
    )
    expected = closed(ens, slimmed)(x)
    assert_close(slimmed(x), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        assert_close(slimmed(x), expected, rtol=0, atol=1e-5)
    handle.remove()
    assert formats == [True] * 4
    assert slimmed.member(0).conv3.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("training", [False, True])
def test_autocast(training):
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 2, head="fc")).train(training)
    x = torch.randn(8, 3, 8, 8)
    slimmed = slim(ens, x)
    full = closed(ens, slimmed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, expected = slimmed(x), full(x)
    assert got.dtype == torch.bfloat16
    assert_close(got, expected, rtol=0.05, atol=0.05)


def test_gates_below_the_threshold():
    ens = SigmaEnsemble(Chain(), 2).eval()
    with torch.no_grad():
        for layer in ens._layers().values():
            layer.gamma.copy_(torch.linspace(-8, 8, 12).view(2, 6))
    x, labels = torch.randn(20, 3, 9, 9), torch.arange(20) % 5
    slimmed = slim(ens, x, threshold=0.02)
    assert slimmed.report["bn2"].kept == (3, 6)
    gates = slimmed.gates()["bn2"]
    assert_close(gates, torch.where(ens.gates()["bn2"] <= 0.02, 0, ens.gates()["bn2"]))
    change = slimmed.change(ens, x, labels=labels)
    before, after = ens(x), slimmed(x)
    assert change["absolute"] == pytest.approx((before - after).abs().max().item())
    assert change["relative"] == pytest.approx(change["absolute"] / before.abs().max().item())
    assert change["absolute"] > 1e-5
    for which, logits in enumerate((before, after)):
        probs = logits.double().softmax(-1).mean(1)
        assert change["accuracy"][which] == (probs.argmax(1) == labels).double().mean().item()
        assert change["nll"][which] == pytest.approx(F.nll_loss(probs.log(), labels).item())
    modes = ens.train().training, slimmed.train().training
    assert slimmed.change(ens, x, labels=labels) == change
    assert (ens.training, slimmed.training) == modes == (True, True)
    ens.eval()
    # A gate at the threshold itself counts as closed.
    edge = ens.gates()["bn2"][0, 2].item()
    assert slim(ens, x, threshold=edge).report["bn2"].kept[0] == 3
    assert slim(ens, x, threshold=edge * 0.999).report["bn2"].kept[0] == 4


@pytest.mark.parametrize("threshold", [None, "0.1", True, 1, -0.1, float("nan"), torch.tensor([0.1, 0.2])])
def test_thresholds_that_are_none(threshold):
    ens = SigmaEnsemble(Chain(), 2)
    with pytest.raises(ValueError, match=r"threshold must be a number in \[0, 1\)"):
        ens.slim(torch.randn(2, 3, 9, 9), threshold=threshold)
    with pytest.raises(ValueError, match=r"threshold must be a number in \[0, 1\)"):
        close(ens, threshold)


def test_inputs_that_show_nothing_are_refused():
    ens = SigmaEnsemble(Chain(), 2)
    with pytest.raises(ValueError, match=r"needs example inputs.*not \(0.01,\)"):
        ens.slim(0.01)
    with pytest.raises(ValueError, match="example inputs are not finite"):
        ens.slim(torch.full((2, 3, 9, 9), torch.nan))


def test_sharing_parameters_trains_both():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 2, head="fc", regularize="*.bn1"))
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.SGD(parameter_groups(ens, 0.1, 1e-4), momentum=0.9)
    shared, apart = slim(ens, x, share=True), slim(ens, x)
    assert {id(p) for p in shared.parameters()} == {id(p) for p in ens.parameters()}
    assert not {id(p) for p in apart.parameters()} & {id(p) for p in ens.parameters()}
    assert len(parameter_groups(shared, 0.1)[1]["params"]) == len(parameter_groups(ens, 0.1)[1]["params"])
    assert list(shared.regularized_gates()) == list(ens.regularized)
    for _ in range(2):
        logits = shared.train()(x)
        F.cross_entropy(logits.flatten(0, 1), y.repeat_interleave(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(shared.eval()(x), closed(ens, shared).eval()(x), rtol=0, atol=1e-5)
    assert ens.backbone.bn1.num_batches_tracked.tolist() == [2, 2]
    assert (apart.eval()(x) - shared(x)).abs().max() > 1e-3


def test_what_is_kept_ready_follows_the_weights():
    ens = settled(SigmaEnsemble(Chain(), 2)).eval()
    x = torch.randn(2, 3, 9, 9)
    slimmed = slim(ens, x)
    with torch.no_grad():
        for change in (
            lambda net: net.conv3.weight.mul_(2),
            lambda net: net.bn2.running_mean.add_(1),
            lambda net: net.bn2.gamma.sub_(1),
            lambda net: net.double().float(),
            lambda net: setattr(net.conv2, "weight", nn.Parameter(net.conv2.weight * 3)),
            lambda net: net.conv1.bias.add_(1),
        ):
            before = slimmed(x)
            for net in (ens.backbone, slimmed.backbone):
                change(net)
            assert_close(slimmed(x), closed(ens, slimmed)(x), rtol=0, atol=1e-5)
            assert not slimmed(x).requires_grad
        assert not torch.equal(before, slimmed(x))
    assert slimmed(x).requires_grad
    state = slimmed.state_dict()
    with torch.inference_mode():
        made_there = slim(ens, x)
        made_there.load_state_dict(state)
        assert_close(made_there(x), slimmed(x))


def test_what_is_kept_ready_survives_another_eval():
    ens = settled(SigmaEnsemble(Chain(), 2)).eval()
    x = torch.randn(2, 3, 9, 9)
    slimmed = slim(ens, x)
    layers = [slimmed.backbone.get_submodule(name) for name in ("bn1", "conv2", "bn2", "conv3")]

    def kept():
        with torch.no_grad():
            slimmed(x)
            return [layer.ready(m) for layer in layers for m in range(2)]

    first = kept()
    assert len(set(map(id, first))) == 8
    slimmed.eval()
    slimmed.eval()
    assert all(a is b for a, b in zip(kept(), first, strict=True))
    slimmed.train().eval()
    assert not any(a is b for a, b in zip(kept(), first, strict=True))


def test_what_is_kept_ready_follows_the_weights_of_activations_inside():
    timm = pytest.importorskip("timm")
    net = Chain(nn.Identity())
    net.bn2 = timm.layers.BatchNormAct2d(6, act_layer=nn.PReLU)
    ens = settled(SigmaEnsemble(net, 2)).eval()
    x = torch.randn(2, 3, 9, 9)
    slimmed = slim(ens, x)
    with torch.no_grad():
        before = slimmed(x)
        for model in (ens, slimmed):
            model.backbone.bn2.act.weight.fill_(3.0)
        after = slimmed(x)
        assert_close(after, ens(x), rtol=0, atol=1e-5)
        assert (after - before).abs().max() > 1e-2


def folding(slimmed, x):
    """What a pass without gradients returns, and the norms that it leaves to the convolutions before, by member."""
    names, seen = {layer: name for name, layer in slimmed._layers().items()}, []
    original = slim_module._SlimNorm.forward

    def forward(self, x):
        if self in slim_module._TURN.folded:
            seen.append(names[self])
        return original(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slim_module._SlimNorm, "forward", forward)
        with torch.no_grad():
            return slimmed(x), seen


class Noting(nn.BatchNorm2d):
    """A BatchNorm that may do more than scale and shift."""


def test_a_norm_that_alone_reads_a_convolution_is_folded_into_it():
    ens = settled(SigmaEnsemble(Chain(), 2)).double().eval()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    slimmed = slim(ens, x)
    y, seen = folding(slimmed, x)
    assert seen == ["bn2"] * 2  # the first convolution runs once for all members
    assert_close(y, closed(ens, slimmed)(x), **EXACT)
    again, of_the_copy = folding(copy.deepcopy(slimmed), x)
    assert_close(again, y, **EXACT)
    assert of_the_copy == seen
    ordinary = slimmed.member(1)
    assert [type(ordinary.bn2), ordinary.conv2.bias is None] == [nn.BatchNorm2d, Chain().conv2.bias is None]
    # Not where somebody looks on, where the norm learns, where it may do more, or where weights would be rounded.
    for module in (slimmed.backbone.bn2, slimmed.backbone.conv2):
        for register in (
            module.register_forward_hook,
            module.register_forward_pre_hook,
            nn.modules.module.register_module_forward_hook,
            nn.modules.module.register_module_forward_pre_hook,
        ):
            looked = []
            handle = register(lambda *call, looked=looked: looked.append(call[-1]) and None)
            assert folding(slimmed, x)[1] == []
            handle.remove()
            assert len(looked) >= 2
        module.forward = functools.partial(type(module).forward, module)
        assert folding(slimmed, x)[1] == []
        del module.forward
    assert folding(slimmed, x)[1] == seen
    learning = copy.deepcopy(slimmed)
    learning.backbone.bn2.train()
    assert folding(learning, x)[1] == []
    assert not torch.equal(learning.backbone.bn2.running_mean, slimmed.backbone.bn2.running_mean)
    with torch.autocast("cpu", torch.bfloat16):
        assert folding(slimmed.float(), x.float())[1] == []
    assert folding(slimmed, x.float())[1] == seen
    assert folding(copy.deepcopy(slimmed).bfloat16(), x.bfloat16())[1] == []
    for norm in (Noting(6), nn.BatchNorm2d(6, track_running_stats=False)):
        net = Chain()
        net.bn2 = norm
        other = settled(SigmaEnsemble(net, 2)).eval()
        thin = slim(other, x.float())
        z, none = folding(thin, x.float())
        assert_close(z, closed(other, thin)(x.float()), rtol=0, atol=1e-5)
        assert none == []


def test_a_norm_is_folded_once_wherever_its_parts_come_from():
    ens = settled(SigmaEnsemble(Chain(), 2)).eval()
    x = torch.randn(2, 3, 9, 9)
    expected = closed(ens, slim(ens, x))(x)
    for name in ("conv2", "bn2"):
        slimmed = slim(ens, x)
        setattr(slimmed.backbone, name, copy.deepcopy(getattr(slimmed.backbone, name)))
        y, seen = folding(slimmed, x)
        assert_close(y, expected, rtol=0, atol=1e-5)
        assert seen == []


def test_a_backbone_that_goes_another_way_than_on_the_example_is_an_error():
    class Early(Chain):
        early = False

        def forward(self, x):
            x = self.conv2(F.relu(self.bn1(self.conv1(x))))
            return self.fc(self.conv3(x if self.early else self.bn2(x)).flatten(2).mean(2))

    ens = settled(SigmaEnsemble(Early(), 2), share=0).eval()
    x = torch.randn(2, 3, 9, 9)
    slimmed = slim(ens, x)
    slimmed.backbone.early = True
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"layers \['bn2'\] did not get .* goes another way"):
        slimmed(x)
    slimmed.backbone.early = False
    y, seen = folding(slimmed, x)
    assert_close(y, ens(x), rtol=0, atol=1e-5)
    assert seen == ["bn2"] * 2


def test_what_is_kept_ready_keeps_the_memory_that_tells_it_apart():
    ens = settled(SigmaEnsemble(Chain(), 2)).eval()
    x = torch.randn(2, 3, 9, 9)
    slimmed = slim(ens, x)
    with torch.no_grad():
        for _ in range(20):
            slimmed(x)
            for _ in range(2):
                for parameter in slimmed.parameters():
                    parameter.data = parameter.data * 0.9
            assert_close(slimmed(x), copy.deepcopy(slimmed)(x), rtol=0, atol=0)


def test_nothing_stays_folded_after_an_error():
    ens = settled(SigmaEnsemble(Chain(), 2)).eval()
    x = torch.randn(2, 3, 9, 9)
    slimmed = slim(ens, x)
    with torch.no_grad():
        good = slimmed(x)

        def fail(norm, x):
            if norm in slim_module._TURN.folded:
                raise KeyboardInterrupt
            return original(norm, x)

        original = slim_module._SlimNorm.forward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slim_module._SlimNorm, "forward", fail)
            with pytest.raises(KeyboardInterrupt):
                slimmed(x)
        assert not slim_module._TURN.folded
        assert_close(slimmed(x), good, rtol=0, atol=0)


def test_the_size_of_chunks_goes_along():
    ens = settled(SigmaEnsemble(Chain(), 3, at_once=2))
    x = torch.randn(2, 3, 9, 9)
    assert slim(ens, x).at_once == 2
    ens.at_once = None
    assert slim(ens, x).at_once is None


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["full", "slim"])
@pytest.mark.usefixtures("one_thread")
def test_one_compiled_graph(kind, training):
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4, blocks=(1, 1)), 2, head="fc"))
    x = torch.randn(4, 3, 8, 8)
    model = (ens if kind == "full" else slim(ens, x)).train(training)
    compiled = copy.deepcopy(model)
    torch.compiler.reset()
    compile_ = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    got, expected = compile_(x), model(x)
    assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for logits in (got, expected):
        logits.square().sum().backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert sum(grad is not None and grad.abs().max() > 0 for grad in wanted.values()) > 5
    for name, parameter in compiled.named_parameters():
        assert_close(parameter.grad, wanted[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    for (name, buffer), other in zip(compiled.named_buffers(), model.buffers(), strict=True):
        assert_close(buffer, other, msg=lambda m, n=name: f"{n}: {m}")
    if not training:
        with torch.no_grad():
            assert_close(compile_(x), model(x), rtol=1e-6, atol=1e-6)


def test_save_and_load(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        return settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 2, head="fc")).eval()

    x = torch.randn(2, 3, 8, 8)
    one, other = slim(build(1), x), slim(build(2), x)
    assert one.report != other.report
    one.save(tmp_path / "slim.safetensors")
    with torch.no_grad():
        other(x)
    assert other.load(tmp_path / "slim.safetensors") is other
    assert other.report == one.report
    assert torch.equal(other(x), one(x))
    assert [m.shape for m in other.member(1).parameters()] == [m.shape for m in one.member(1).parameters()]
    # Loaded as a part of something else, it follows as well.
    third = nn.Sequential(slim(build(3), x))
    third.load_state_dict({f"0.{name}": tensor for name, tensor in one.state_dict().items()})
    assert torch.equal(third[0](x), one(x))

    full = build(1)
    full.save(tmp_path / "full.safetensors")
    with pytest.raises(ValueError, match=r"full.safetensors holds .*'SigmaEnsemble'.* it lacks .*\.open"):
        other.load(tmp_path / "full.safetensors")
    with pytest.raises(ValueError, match=r"an unknown backbone.*\.open"):
        full.load(tmp_path / "slim.safetensors")
    wider = slim(settled(SigmaEnsemble(backbones.narrow_resnet(5, width=5), 2, head="fc")), x)
    with pytest.raises(ValueError, match="shape"):
        wider.load(tmp_path / "slim.safetensors")
    assert set(full.state_dict()) == {name for name in one.state_dict() if not name.endswith(".open")}


def test_copies_and_pickles():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 2, head="fc")).eval()
    x = torch.randn(2, 3, 8, 8)
    slimmed = slim(ens, x)
    with torch.no_grad():
        expected = slimmed(x)
        assert torch.equal(copy.deepcopy(slimmed)(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(slimmed))(x), expected)
    proba = slimmed.train().predict_proba(x)
    assert slimmed.training
    assert_close(proba, expected.softmax(-1).mean(1))


def test_threads_run_members_apart():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 4, head="fc")).eval()
    inputs = [torch.randn(2, 3, 8, 8) for _ in range(4)]
    slimmed = slim(ens, inputs[0])
    with torch.no_grad():
        expected = [slimmed(x) for x in inputs]
    wrong = []

    def work(x, y):
        with torch.no_grad():
            wrong.extend(i for i in range(10) if not torch.equal(slimmed(x), y))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_ordinary_member():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=8), 2, head="fc")).eval()
    slimmed = slim(ens, torch.randn(1, 3, 8, 8))
    kept = {name: cut.kept[1] for name, cut in slimmed.report.items()}
    block = slimmed.member(1).stages[1][0]
    assert type(block.conv1) is nn.Conv2d
    assert type(block.bn1) is nn.BatchNorm2d
    inner, last = kept["stages.1.0.bn1"], kept["stages.1.0.bn2"]
    assert (block.conv1.in_channels, block.conv1.out_channels) == (8, inner) == block.conv1.weight.shape[1::-1]
    assert (block.conv2.in_channels, block.conv2.out_channels) == (inner, last)
    assert block.bn1.num_features == inner == len(block.bn1.running_var) == len(block.bn1.bias)
    assert isinstance(block.bn2[1], Spread)
    member = slimmed.member(1)
    x = torch.randn(3, 3, 8, 8)
    assert_close(torch.export.export(member, (x,)).module()(x), member(x))
    with torch.no_grad():
        before = slimmed(x)
        member.stages[1][0].conv1.weight.zero_()
        assert torch.equal(slimmed(x), before)
    for m in (2, -1, True):
        with pytest.raises(IndexError, match=r"is not in 0\.\.1"):
            slimmed.member(m)


def test_repr_names_what_is_left_out():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=8, blocks=(1,)), 2, regularize="*.bn1"))
    text = repr(slim(ens, torch.randn(1, 3, 8, 8)))
    assert text.startswith("SlimEnsemble of ResNet: 2 members, head=None\n")
    assert "left out: rows of stages.0.0.conv1 and columns of stages.0.0.conv2" in text
    assert "  R stages.0.0.bn1" in text


def test_arguments():
    ens = SigmaEnsemble(Chain(), 2)
    x = torch.randn(2, 3, 9, 9)
    with pytest.raises(TypeError, match="ens must be a SigmaEnsemble, not Chain"):
        slim(Chain(), x)
    with pytest.raises(TypeError, match="slim already"):
        slim(slim(ens, x), x)
    with pytest.raises(TypeError, match="see slim"):
        SlimEnsemble(Chain(), 2)
    with pytest.raises(TypeError, match="ens must be"):
        with_uncertainty(Chain())
    with pytest.raises(RuntimeError, match="call the ensemble itself"):
        slim(ens, x).backbone(x)
    with pytest.raises(ValueError, match="use batches of at least 2"):
        slim(SigmaEnsemble(ToLinear(), 2), x).train()(x[:1])


def test_slimming_leaves_the_ensemble_as_it_was():
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4), 2, head="fc"))
    ens.backbone.stages[0].eval()
    modes = [m.training for m in ens.modules()]
    state = {name: tensor.clone() for name, tensor in ens.state_dict().items()}
    slimmed = slim(ens, torch.randn(2, 3, 8, 8), share=True)
    assert [m.training for m in ens.modules()] == modes == [m.training for m in slimmed.modules()]
    assert all(torch.equal(tensor, state[name]) for name, tensor in ens.state_dict().items())
    assert not any(m._forward_pre_hooks for m in ens.modules())
    assert all(type(m) is SigmaBatchNorm for m in ens._layers().values())


# Export ---------------------------------------------------------------------------------------------------------------


def exported(kind):
    ens = settled(SigmaEnsemble(backbones.narrow_resnet(5, width=4, blocks=(1, 1)), 3, head="fc")).eval()
    x = torch.randn(3, 3, 8, 8)
    return (ens if kind == "full" else slim(ens, x)), x


@pytest.mark.parametrize("kind", ["full", "slim"])
def test_uncertainty(kind):
    ens, x = exported(kind)
    mean, *parts = with_uncertainty(ens.train())(x)
    assert ens.training
    probs = ens.eval()(x).detach().softmax(-1)
    assert_close(mean, probs.mean(1))
    for got, expected in zip(parts, decompose(probs), strict=True):
        assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
        assert got.shape == (3,)


def test_uncertainty_of_sure_members():
    class Sure(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x):
            return self.norm(x) * 500

    for value in with_uncertainty(SigmaEnsemble(Sure(), 2))(torch.randn(4, 3)):
        assert torch.isfinite(value).all()
        assert (value >= 0).all()


@pytest.mark.parametrize("kind", ["full", "slim"])
def test_torch_export(kind):
    ens, x = exported(kind)
    module = with_uncertainty(ens)
    batch = torch.export.Dim.DYNAMIC
    program = torch.export.export(module, (x,), dynamic_shapes={"args": ({0: batch},)})
    for inputs in (x, torch.randn(5, 3, 8, 8)):
        for got, expected in zip(program.module()(inputs), module(inputs), strict=True):
            assert_close(got, expected, rtol=0, atol=1e-6)
    if kind == "slim":  # the weights are the members' own
        held = sum(tensor.numel() for tensor in program.state_dict.values() if tensor.dim() == 4)
        stem = ens.backbone.conv1.weight.numel()
        assert (
            held
            == stem
            + sum(p.numel() for m in range(3) for name, p in ens.member(m).named_parameters() if p.dim() == 4)
            - 3 * stem
        )


@pytest.mark.parametrize("kind", ["full", "slim"])
@pytest.mark.filterwarnings("ignore")
def test_onnx(kind):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    ens, x = exported(kind)
    module = with_uncertainty(ens)
    names = ["probabilities", "total", "aleatoric", "modulation"]
    shapes = {"args": ({0: torch.export.Dim.DYNAMIC},)}
    program = torch.onnx.export(
        module, (x,), dynamo=True, dynamic_shapes=shapes, output_names=names, verbose=False, optimize=True
    )
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == names
    for inputs in (x, torch.randn(5, 3, 8, 8)):
        values = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        for got, expected in zip(values, module(inputs), strict=True):
            assert_close(torch.from_numpy(got), expected.detach(), rtol=1e-5, atol=1e-6)
