"""SigmaEnsemble: one vectorised forward is a loop over ordinary networks that share their weights."""

import copy
import json
import pickle
from collections import OrderedDict, UserDict
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import SigmaEnsemble, SigmaNorm, diversity_loss, ensemble, parameter_groups
from sigmaens.layers import MemberHead


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, or GroupNorm and LayerNorm, which know no batch."""

    def __init__(self, batch_norm=True):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6) if batch_norm else nn.GroupNorm(3, 6)
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.bn2 = nn.BatchNorm2d(8, momentum=0.3) if batch_norm else nn.LayerNorm((2, 2))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class ByHand:
    """The members of an ensemble over a `ConvNet`, one after the other, in torch functions alone.

    Weights are the ensemble's own tensors, so that gradients can be compared; statistics are copies.
    """

    def __init__(self, ens):
        self.ens, net = ens, ens.backbone
        self.norms = {"bn1": net.bn1, "bn2": net.bn2} | ({"fc": net.fc.norm} if ens.head else {})
        self.statistics = {
            name: (norm.running_mean.clone(), norm.running_var.clone())
            for name, norm in self.norms.items()
            if norm.running_mean is not None
        }

    def norm(self, name, m, x, training):
        gate = torch.sigmoid(self.norms[name].gamma[m])
        if name in self.statistics:
            mean, var = self.statistics[name]
            return F.batch_norm(x, mean[m], var[m], gate, None, training, 0.3 if name == "bn2" else 0.1)
        if name == "bn1":
            return F.group_norm(x, 3, gate)
        shape = (2, 2) if name == "bn2" else (8,)
        return F.layer_norm(x, shape, gate.view(shape))

    def member(self, x, m, training):
        net = self.ens.backbone
        x = F.conv2d(x, net.conv1.weight, padding=1)
        x = F.relu(self.norm("bn1", m, x, training))
        x = F.conv2d(x, net.conv2.weight, net.conv2.bias, stride=2)
        x = F.relu(self.norm("bn2", m, x, training)).mean((2, 3))
        if self.ens.head is None:
            return F.linear(x, net.fc.weight, net.fc.bias)
        return F.linear(self.norm("fc", m, x, training), net.fc.weight[m], net.fc.bias[m])

    def __call__(self, x, training):
        return torch.stack([self.member(x, m, training) for m in range(self.ens.members)], dim=1)


NETS = {"BatchNorm": lambda: ConvNet(), "sample norms": lambda: ConvNet(batch_norm=False)}


def settled(net):
    """Give the norms scales, shifts and statistics as training might leave them, non-positive scales among them."""
    with torch.no_grad():
        for module in net.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)):
                module.weight.normal_().flatten()[0] = 0.0
                module.bias.normal_()
    return net


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize(("members", "batch"), [(1, 3), (2, 1), (4, 3), (5, 2)])
@pytest.mark.parametrize("kind", NETS)
def test_forward_is_a_loop_over_members(kind, members, batch, head, memory_format):
    ens = SigmaEnsemble(NETS[kind](), members, head=head).to(memory_format=memory_format)
    loop = ByHand(ens)
    # BatchNorm in the head cannot train on one sample.
    for training in (True, True, False) if batch > 1 or kind != "BatchNorm" else (False,):
        ens.train(training)
        x = torch.randn(batch, 3, 6, 6).to(memory_format=memory_format).requires_grad_()
        y, expected = ens(x), loop(x, training)
        assert y.shape == (batch, members, 5)
        assert_close(y, expected)
        inputs = (x, *ens.parameters())
        found = torch.autograd.grad(y.sin().sum(), inputs)
        assert_close(found, torch.autograd.grad(expected.sin().sum(), inputs), rtol=1e-3, atol=1e-4)
        for name, (mean, var) in loop.statistics.items():
            assert_close(loop.norms[name].running_mean, mean)
            assert_close(loop.norms[name].running_var, var)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", NETS)
def test_forward_is_a_loop_under_bfloat16_autocast(kind, training):
    ens = SigmaEnsemble(NETS[kind](), 4, head="fc").train(training)
    loop = ByHand(ens)
    x = torch.randn(5, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ens(x), loop(x, training)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_close(y, expected, rtol=0.05, atol=0.05)
    assert (y.float() - loop(x, training)).abs().max() > 1e-4  # bfloat16 it was


@pytest.mark.parametrize("batch", [1, 3])
def test_evaluation_takes_any_batch(batch):
    ens = SigmaEnsemble(ConvNet(), 4, head="fc").eval()
    x = torch.randn(3, 3, 6, 6)
    assert_close(ens(x[:batch]), ens(x)[:batch])


def test_training_on_a_batch_of_one_says_what_to_do():
    with pytest.raises(ValueError, match="batches of at least 2"):
        SigmaEnsemble(ConvNet(), 4, head="fc")(torch.randn(1, 3, 6, 6))


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("head", [None, "fc"])
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("training", [True, False])
def test_member_is_the_ordinary_network(kind, head, pretrained, training):
    make = SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble
    ens = make(settled(NETS[kind]()), 3, head=head)
    ens(torch.randn(4, 3, 6, 6))
    members = [ens.train(training).member(m) for m in range(3)]
    x = torch.randn(4, 3, 6, 6)
    y = ens(x)
    for m, net in enumerate(members):
        assert not any(isinstance(module, (SigmaNorm, MemberHead)) for module in net.modules())
        assert all(module.training == training for module in net.modules())
        assert_close(net(x), y[:, m])


def test_member_is_a_copy():
    ens = SigmaEnsemble(ConvNet(), 2, head="fc")
    before = copy.deepcopy(ens.state_dict())
    member = ens.member(0)
    member(torch.randn(3, 3, 6, 6)).sum().backward()
    with torch.no_grad():
        for tensor in member.state_dict().values():
            tensor.zero_()
    assert_close(ens.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in ens.parameters())


@pytest.mark.parametrize("m", [-1, 3])
def test_member_must_exist(m):
    with pytest.raises(IndexError, match=rf"member {m} is not in 0\.\.2"):
        SigmaEnsemble(ConvNet(), 3).member(m)


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("training", [True, False])
def test_conversion_keeps_the_function_for_every_member(kind, members, training):
    net = settled(NETS[kind]()).train(training)
    ens = SigmaEnsemble.from_pretrained(net, members)
    x = torch.randn(3, 3, 6, 6)
    assert_close(ens(x), net(x)[:, None].expand(-1, members, -1))


def test_conversion_with_a_head_keeps_what_comes_before_it():
    net = settled(ConvNet()).eval()
    ens = SigmaEnsemble.from_pretrained(net, 3, head="fc")
    features = []
    net.fc.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    ens.backbone.fc.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    x = torch.randn(4, 3, 6, 6)
    net(x)
    y = ens(x)
    assert_close(features[-1], features[0].repeat(3, 1))
    assert (y[:, 0] - y[:, 1]).abs().max() > 0.01
    frozen = {name for name, _ in ens.named_buffers() if name.endswith(("scale", "bias"))}
    assert frozen == {f"backbone.{norm}.{part}" for norm in ("bn1", "bn2") for part in ("scale", "bias")}


def test_the_backbone_is_copied():
    net = settled(ConvNet())
    before = copy.deepcopy(net.state_dict())
    ens = SigmaEnsemble(net, 2, head="fc")
    ens(torch.randn(3, 3, 6, 6))
    with torch.no_grad():
        for tensor in ens.state_dict().values():
            tensor.zero_()
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert type(net.bn1) is nn.BatchNorm2d


def test_a_norm_used_at_two_places_stays_one():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    net.append(net[1])
    ens = SigmaEnsemble(net, 2)
    assert ens.backbone[1] is ens.backbone[3]
    assert list(ens.gates()) == ["1"]
    ordinary = [copy.deepcopy(net) for _ in range(2)]
    for m, member in enumerate(ordinary):
        member[1].weight.data.copy_(ens.gates()["1"][m])
    for training in (True, True, False):
        x = torch.randn(5, 4)
        expected = torch.stack([member.train(training)(x) for member in ordinary], dim=1)
        assert_close(ens.train(training)(x), expected)
    twin = ens.member(1)
    assert twin[1] is twin[3]
    assert_close(twin(x), ens(x)[:, 1])


def test_a_backbone_may_itself_be_a_norm():
    norm = nn.LayerNorm(4)
    ens = SigmaEnsemble(norm, 2)
    x = torch.randn(3, 4)
    gates = ens.gates()[""]
    assert_close(ens(x), torch.stack([F.layer_norm(x, (4,), gate) for gate in gates], dim=1))
    assert type(ens.member(1)) is nn.LayerNorm
    assert_close(ens.member(1)(x), ens(x)[:, 1])


def test_a_copy_a_cast_and_a_state_dict_keep_the_function():
    ens = SigmaEnsemble(ConvNet(), 3, head="fc")
    ens(torch.randn(4, 3, 6, 6))
    other = SigmaEnsemble(ConvNet(), 3, head="fc")
    other.load_state_dict(ens.state_dict())
    double = copy.deepcopy(ens).to(torch.float64)
    x = torch.randn(4, 3, 6, 6)
    expected = ens.eval()(x)
    assert_close(other.eval()(x), expected, rtol=0, atol=0)
    assert double.eval()(x.double()).dtype == torch.float64
    assert_close(double(x.double()).float(), expected)
    assert_close(ens.eval()(x), expected, rtol=0, atol=0)


def test_modes_reach_every_layer_and_start_as_the_backbones():
    ens = SigmaEnsemble(ConvNet(), 2, head="fc")
    for mode in (False, True):
        ens.train(mode)
        assert {module.training for module in ens.modules()} == {mode}
    frozen = ConvNet()
    frozen.bn1.eval()
    ens = SigmaEnsemble.from_pretrained(frozen, 2, head="fc")
    assert ens.training
    assert not ens.backbone.bn1.training
    assert ens.backbone.bn2.training


def test_sync_batch_norm_conversion_does_not_take_the_gates_away_silently():
    with pytest.raises(TypeError, match="weight"):
        nn.SyncBatchNorm.convert_sync_batchnorm(SigmaEnsemble(ConvNet(), 3, head="fc"))


# Heads and patterns


class Deep(nn.Module):
    def __init__(self, *, norm=nn.LayerNorm):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm1": norm(4), "mlp": nn.Linear(4, 4), "norm2": norm(4)}) for _ in range(2)
        )
        self.classifier = nn.ModuleDict({"out": nn.Linear(4, 3)})

    def forward(self, x):
        for block in self.blocks:
            x = x + block["norm2"](block["mlp"](block["norm1"](x)))
        return self.classifier["out"](x)


@pytest.mark.parametrize(
    ("regularize", "matched"),
    [
        ("*", ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "classifier.out.norm"]),
        ("*.norm2", ["blocks.0.norm2", "blocks.1.norm2"]),
        (["*.1.norm1", "classifier.*"], ["blocks.1.norm1", "classifier.out.norm"]),
        (("blocks.[0].*",), ["blocks.0.norm1", "blocks.0.norm2"]),
    ],
)
def test_patterns_choose_the_regularised_layers(regularize, matched):
    ens = SigmaEnsemble(Deep(), 3, head="classifier.out", regularize=regularize)
    assert ens.regularized == tuple(matched)
    assert list(ens.regularized_gates()) == matched
    gates = ens.gates()
    assert len(gates) == 5
    for name in matched:
        assert_close(ens.regularized_gates()[name], torch.sigmoid(ens.backbone.get_submodule(name).gamma))
        assert gates[name].shape == (3, 4)


@pytest.mark.parametrize("regularize", ["*.bn2", ["*.norm1", "*.bn2"], []])
def test_patterns_that_match_nothing_are_named(regularize):
    missing = r"\['\*\.bn2'\]" if regularize else r"\[\]"
    with pytest.raises(ValueError, match=rf"regularize {missing} matches none of the σNorm layers \['blocks.0.norm1'"):
        SigmaEnsemble(Deep(), 2, regularize=regularize)


@pytest.mark.parametrize("head", ["fc", "blocks.0.norm1", "classifier", ""])
def test_a_head_that_is_no_linear_layer_is_named(head):
    with pytest.raises(ValueError, match=rf"head '{head}' is no linear layer .* \['.*', 'classifier.out'\]"):
        SigmaEnsemble(Deep(), 2, head=head)


@pytest.mark.parametrize(("norm", "kind"), [(nn.LayerNorm, "LayerNorm"), (nn.BatchNorm1d, "BatchNorm1d")])
def test_the_heads_norm_is_of_the_backbones_kind(norm, kind):
    ens = SigmaEnsemble(Deep(norm=norm), 2, head="classifier.out")
    assert type(ens.member(0).classifier["out"][0]).__name__ == kind


@pytest.mark.parametrize("members", [0, True, 2.0, None])
def test_members_must_be_a_positive_integer(members):
    for make in (SigmaEnsemble, SigmaEnsemble.from_pretrained):
        with pytest.raises(ValueError, match=f"members must be an integer ≥ 1, not {members!r}"):
            make(Deep(), members)


def test_backbones_that_cannot_be_ensembles_are_refused():
    with pytest.raises(ValueError, match="Linear has no normalisation layers"):
        SigmaEnsemble(nn.Linear(3, 3), 2)
    with pytest.raises(TypeError, match="already has σNorm layers"):
        SigmaEnsemble(SigmaEnsemble(Deep(), 2), 2)
    with pytest.raises(TypeError, match=r"layer '1.0', a torch\.nn\.modules\.instancenorm\.InstanceNorm1d"):
        SigmaEnsemble(nn.Sequential(nn.LayerNorm(3), nn.Sequential(nn.InstanceNorm1d(3))), 2)


def test_repr_is_a_table_of_the_gated_layers():
    ens = SigmaEnsemble(ConvNet(), 4, head="fc", regularize="bn2")
    own = 4 * (6 + 8) + 4 * (8 + 8 * 5 + 5)
    total = own + 6 * 27 + 8 * 54 + 8
    assert repr(ens).splitlines() == [
        f"SigmaEnsemble of ConvNet: 4 members, {total} parameters ({own} of the members' own), head='fc'",
        "    bn1      BatchNorm2d      6 features",
        "  R bn2      BatchNorm2d      8 features",
        "    fc.norm  BatchNorm1d      8 features",
        "  R: regularised, 1 of 3 sigma-norm layers",
    ]


# Prediction


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.drop(self.norm(x)))


def test_predict_proba_is_the_mean_of_the_members_softmax_in_evaluation_mode():
    ens = SigmaEnsemble(Dropping(), 3, head="fc")
    ens.backbone.drop.eval()
    ens.backbone.fc.norm.eval()
    modes = [module.training for module in ens.modules()]
    statistics = ens.backbone.norm.running_mean.clone()
    x = torch.randn(5, 4)
    probs = ens.predict_proba(x)
    assert [module.training for module in ens.modules()] == modes
    assert_close(ens.backbone.norm.running_mean, statistics, rtol=0, atol=0)
    logits = ens.eval()(x)
    assert_close(probs, sum(logits[:, m].softmax(1) for m in range(3)) / 3)
    assert_close(probs.sum(1), torch.ones(5))
    assert not probs.requires_grad


def test_predict_proba_restores_the_modes_after_an_error():
    ens = SigmaEnsemble(Dropping(), 3)
    ens.backbone.drop.eval()
    with pytest.raises(RuntimeError):
        ens.predict_proba(torch.randn(5, 7))
    assert ens.training
    assert ens.backbone.norm.training
    assert not ens.backbone.drop.training


def test_predict_proba_is_at_least_float32():
    ens = SigmaEnsemble(Dropping(), 3)
    with torch.autocast("cpu", torch.bfloat16):
        probs = ens.predict_proba(torch.randn(64, 4))
    assert probs.dtype == torch.float32
    assert_close(probs.sum(1), torch.ones(64), rtol=1e-6, atol=1e-6)
    assert ens.double().predict_proba(torch.randn(2, 4).double()).dtype == torch.float64


# Inputs and outputs of all shapes


class Speaks(nn.Module):
    """Takes `x` and friends, and answers in the form asked for."""

    def __init__(self, answer=lambda logits: logits):
        super().__init__()
        self.norm, self.answer = nn.LayerNorm(4), answer

    def forward(self, x, *, shift=None, parts=(), table=None, gain=1.0, name=None):
        assert name in (None, "name")
        x = x * gain if not isinstance(gain, torch.Tensor) else x * gain[: len(x)]
        for part in parts:
            x = x + part
        if table is not None:
            x = x @ table
        return self.answer(self.norm(x if shift is None else x + shift))


def looped(ens, x):
    return torch.stack([F.layer_norm(x, (4,), gate) for gate in ens.gates()["norm"]], dim=1)


def test_every_tensor_with_a_row_for_each_sample_is_repeated():
    ens = SigmaEnsemble(Speaks(), 3)
    x, shift, part, table = torch.randn(5, 4), torch.randn(5, 1), torch.randn(5, 4), torch.randn(4, 4)
    y = ens(x, shift=shift, parts=[part, (part)], table=table, gain=torch.tensor(2.0).expand(1), name="name")
    assert_close(y, looped(ens, (2 * x + 2 * part) @ table + shift))
    assert_close(ens(x, gain=3.0), looped(ens, 3 * x))


@pytest.mark.parametrize("mapping", [dict, OrderedDict, UserDict])
def test_a_mapping_alone_is_passed_by_keywords(mapping):
    ens = SigmaEnsemble(Speaks(), 2)
    batch = {"x": torch.randn(5, 4), "shift": torch.randn(5, 4)}
    assert_close(ens(mapping(batch)), ens(**batch), rtol=0, atol=0)
    assert_close(ens(mapping(batch), gain=2.0), ens(**batch, gain=2.0), rtol=0, atol=0)


@pytest.mark.parametrize(
    "answer",
    [
        lambda y: (y, y + 1),
        lambda y: [y.sum(), y],
        lambda y: {"loss": y.sum(), "logits": y, "other": y + 1},
        lambda y: {"loss": y.sum(), "hidden": y},
        lambda y: SimpleNamespace(hidden=y + 1, logits=y),
        lambda y: {"aux": y + 1, "logits": y},
    ],
)
def test_logits_are_found_in_outputs_of_other_forms(answer):
    ens = SigmaEnsemble(Speaks(answer), 3)
    x = torch.randn(5, 4)
    assert_close(ens(x), looped(ens, x))


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda y: y.sum(), "a tensor without dimensions"),
        (lambda y: {"logits": y.sum(), "hidden": y}, "a tensor without dimensions"),
        (lambda y: None, "NoneType"),
        (lambda y: (y.sum(), 3), "tuple"),
        (lambda y: SimpleNamespace(hidden=y), "SimpleNamespace"),
    ],
)
def test_outputs_without_logits_are_refused(answer, got):
    with pytest.raises(ValueError, match=f"must return logits .* got {got}"):
        SigmaEnsemble(Speaks(answer), 3)(torch.randn(5, 4))


@pytest.mark.parametrize("answer", [lambda y: y[:5], lambda y: (y[:5], y[:7]), lambda y: y.mean(0, keepdim=True)])
def test_outputs_with_rows_of_their_own_are_those_of_a_loop(answer):
    ens, x = SigmaEnsemble(Speaks(answer), 3), torch.randn(5, 4)
    expected = [answer(F.layer_norm(x, (4,), gate)) for gate in ens.gates()["norm"]]
    assert_close(ens(x), torch.stack([y[0] if isinstance(y, tuple) else y for y in expected], dim=1))


def test_a_batch_of_none_gives_none():
    assert SigmaEnsemble(Speaks(), 2)(torch.empty(0, 4)).shape == (0, 2, 4)


class SequenceFirst(nn.Module):
    """torch's default: (T, B, D) inside, whatever the outside is."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.encoder(x.transpose(0, 1))[0])


@pytest.mark.parametrize("length", [3, 5, 8, 24])
def test_sequence_first_backbones_are_not_mixed_up(length):
    ens = SigmaEnsemble(SequenceFirst(), 4).eval()
    x = torch.randn(3, length, 8)
    assert_close(ens(x), torch.stack([ens.member(m)(x) for m in range(4)], dim=1))
    assert "one by one" in repr(ens)


def test_what_is_no_backbone_pattern_or_member_is_named():
    with pytest.raises(TypeError, match="backbone must be a torch module, not str"):
        SigmaEnsemble("resnet18", 2)
    for patterns in (None, [], [3]):
        with pytest.raises((TypeError, ValueError), match="regularize"):
            SigmaEnsemble(Speaks(), 2, regularize=patterns)
    with pytest.raises(IndexError, match="member True"):
        SigmaEnsemble(Speaks(), 2).member(True)
    with pytest.raises(TypeError, match="a SigmaEnsemble or a mapping of gates, got Linear"):
        diversity_loss(nn.Linear(2, 2), tau=0.1)
    for tau in ("0.1", None, True):
        with pytest.raises(ValueError, match="tau must be a number > 0"):
            diversity_loss({"a": torch.rand(2, 3)}, tau=tau)


def test_a_file_of_another_precision_is_refused(tmp_path):
    ens = SigmaEnsemble(Speaks(), 2)
    ens.save(tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match=r"as torch.float32 instead of torch.float64"):
        SigmaEnsemble(Speaks(), 2).double().load(tmp_path / "half.safetensors")


# Backbones of libraries: member m is the backbone with its norms' scales set to σ(γ_m)


def with_gates(net, ens, m):
    """Return the backbone with member m's scales and no shifts, built without any of the ensemble's methods."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for name, gates in ens.gates().items():
            norm = net.get_submodule(name)
            norm.weight.copy_(gates[m].view_as(norm.weight))
            if norm.bias is not None:
                norm.bias.zero_()
    return net


def assert_members_are_ordinary(net, read=lambda y: y, **inputs):
    net.eval()
    ens = SigmaEnsemble(net, 3)
    with torch.no_grad():
        y = ens(**inputs)
        for m in range(3):
            expected = read(with_gates(net, ens, m)(**inputs))
            assert_close(y[:, m], expected, rtol=1e-4, atol=1e-5)
            assert_close(read(ens.member(m)(**inputs)), expected, rtol=1e-4, atol=1e-5)
        assert (y[:, 0] - y[:, 1]).abs().max() > 1e-3
        kept = SigmaEnsemble.from_pretrained(settled(net), 2)(**inputs)
        assert_close(kept[:, 1], read(net(**inputs)), rtol=1e-4, atol=1e-5)
    return ens


def test_bert_of_transformers():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
        initializer_range=0.5,
    )
    net = BertForSequenceClassification(config)
    ids = torch.randint(1, 50, (4, 7))
    mask = torch.arange(7) < torch.tensor([[7], [3], [5], [1]])
    inputs = {"input_ids": ids, "attention_mask": mask.long()}
    ens = assert_members_are_ordinary(net, lambda output: output.logits, **inputs)
    y = ens(UserDict(inputs))
    assert_close(y, ens(**inputs), rtol=0, atol=0)
    assert_close(ens(**inputs, labels=torch.tensor([0, 1, 2, 0])), y)
    assert_close(ens({"input_ids": ids[1:2, :3]})[0], y[1])  # padding is not seen
    heads = SigmaEnsemble.from_pretrained(net, 4, head="classifier", regularize="*.output.LayerNorm")
    assert len(heads.regularized) == 4
    assert heads(**inputs).shape == (4, 4, 3)


def test_convnext_of_transformers():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, layer_scale_init_value=1.0)
    net = ConvNextForImageClassification(config)
    assert_members_are_ordinary(net, lambda output: output.logits, pixel_values=torch.randn(3, 3, 16, 16))


def test_resnet_with_fused_activations_of_timm():
    from timm.layers import BatchNormAct2d
    from timm.models.resnetv2 import ResNetV2

    norm = partial(BatchNormAct2d, eps=1e-3)
    net = ResNetV2((1, 1), (16, 32), num_classes=3, stem_chs=8, norm_layer=norm, conv_layer=nn.Conv2d)
    assert_members_are_ordinary(net, x=torch.randn(3, 3, 16, 16))


def test_encoder_of_torch_whose_fused_path_would_pass_by_the_gates():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [2]])
    before = torch.backends.mha.get_fastpath_enabled()
    for inputs in ({}, {"src_key_padding_mask": padding}):
        ens = SigmaEnsemble(net.eval(), 3)
        x = torch.randn(3, 6, 8)
        with torch.no_grad():
            y = ens(x, **inputs)
            for m in range(3):
                expected = with_gates(net, ens, m).train()(x, **inputs)
                seen = ~padding if inputs else torch.ones_like(padding)
                assert_close(y[:, m][seen], expected[seen])
    assert torch.backends.mha.get_fastpath_enabled() == before


# Optimisers


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_parameter_groups_hold_every_parameter_once(optimizer):
    ens = SigmaEnsemble(ConvNet(), 2, head="fc")
    groups = optimizer(parameter_groups(ens, lr=0.1, weight_decay=0.01, gamma_multiplier=30)).param_groups
    grouped = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, ens.parameters()))
    gammas = {id(norm.gamma) for norm in (ens.backbone.bn1, ens.backbone.bn2, ens.backbone.fc.norm)}
    for group in groups:
        own = {id(parameter) for parameter in group["params"]}
        assert own == gammas or not own & gammas
        assert group["lr"] == pytest.approx(3.0 if own == gammas else 0.1)
        assert group["weight_decay"] == (0 if own == gammas else 0.01)


def test_parameter_groups_step_as_they_say():
    ens = SigmaEnsemble(nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)), 2)
    optimizer = torch.optim.SGD(parameter_groups(ens, lr=0.01, weight_decay=0.5, gamma_multiplier=100))
    weight, gamma = (parameter.detach().clone() for parameter in ens.parameters())
    for parameter in ens.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    after = list(ens.parameters())
    assert_close(after[0].detach(), weight - 0.01 * (1 + 0.5 * weight))
    assert_close(after[1].detach(), gamma - 1.0)


def test_parameter_groups_leave_out_what_is_frozen_or_missing():
    ens = SigmaEnsemble(Deep(), 2)
    ens.backbone.blocks[0]["norm1"].gamma.requires_grad_(False)
    ens.backbone.classifier["out"].weight.requires_grad_(False)
    grouped = [parameter for group in parameter_groups(ens, lr=1.0) for parameter in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in ens.parameters() if p.requires_grad}
    assert [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2), lr=1.0)] == [2]


# Files


@pytest.fixture
def saved(tmp_path):
    ens = SigmaEnsemble(settled(ConvNet()), 3, head="fc")
    ens(torch.randn(4, 3, 6, 6))
    ens.save(tmp_path / "ens.safetensors")
    return ens, tmp_path / "ens.safetensors"


def refuses(model, path, message):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        ensemble.load(model, path)
    assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_saved_ensemble_gives_the_same_outputs(tmp_path, pretrained):
    make = SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble
    ens = make(settled(ConvNet()), 3, head="fc").to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 6, 6)
    ens(x)
    ens.save(tmp_path / "a")
    ens.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    other = make(ConvNet(), 3, head="fc").load(tmp_path / "a")
    assert_close(other.state_dict(), ens.state_dict(), rtol=0, atol=0)
    assert_close(other.eval()(x), ens.eval()(x), check_stride=False)


def test_a_norm_used_at_two_places_is_saved(tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    net.append(net[1])
    ens = SigmaEnsemble(net, 2)
    ens.save(tmp_path / "a")
    other = SigmaEnsemble(net, 2).load(tmp_path / "a")
    assert other.backbone[1] is other.backbone[2]
    assert_close(other.state_dict(), ens.state_dict(), rtol=0, atol=0)


def test_files_of_other_models_are_refused(saved):
    _, path = saved
    other = SigmaEnsemble(ConvNet(), 4, head="fc")
    refuses(other, path, r"holds .*'members': 3.*, not .*'members': 4.*has backbone.bn1.gamma of shape \(3, 6\)")
    refuses(SigmaEnsemble(ConvNet(), 3), path, "lacks backbone.fc.weight|has an unknown backbone.fc.norm.gamma")
    refuses(SigmaEnsemble.from_pretrained(ConvNet(), 3, head="fc"), path, "lacks backbone.bn1.scale")
    refuses(nn.Linear(2, 2), path, r"lacks weight; lacks bias; has an unknown .* \(and \d+ more\)")
    wide = ConvNet()
    wide.fc = nn.Linear(8, 6)
    refuses(
        SigmaEnsemble(wide, 3, head="fc"), path, r"has backbone.fc.weight of shape \(3, 5, 8\) instead of \(3, 6, 8\)"
    )


def test_files_that_are_damaged_or_foreign_are_refused(saved, tmp_path):
    from safetensors.torch import save_file

    ens, path = saved
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        refuses(ens, tmp_path / "cut", "cut is no safetensors file")
    state = {name: tensor.contiguous() for name, tensor in ens.state_dict().items()}
    for metadata, message in [
        (None, "was not written by sigmaens"),
        ({"format": "pt"}, "was not written by sigmaens"),
        ({"sigmaens": "{}"}, "was not written by sigmaens"),
        ({"sigmaens": '{"version": 2}'}, "has format version 2, this is version 1"),
    ]:
        save_file(state, tmp_path / "other", metadata=metadata)
        refuses(ens, tmp_path / "other", message)
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*nowhere"):
        ens.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        ens.load(tmp_path)


class Payload:
    ran = False

    def __reduce__(self):
        return setattr, (Payload, "ran", True)


def test_nothing_is_unpickled(saved, tmp_path):
    ens, path = saved
    for write in (pickle.dump, torch.save):
        with (tmp_path / "trap").open("wb") as file:
            write(Payload(), file)
        refuses(ens, tmp_path / "trap", "is no safetensors file")
    assert not Payload.ran
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert json.loads(header["__metadata__"]["sigmaens"])["version"] == 1
    assert header.keys() - {"__metadata__"} == ens.state_dict().keys()


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_save_leaves_what_was_there(saved, tmp_path, monkeypatch, exists):
    import safetensors.torch

    ens, path = saved
    target = path if exists else tmp_path / "new"
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fails(state, file, metadata):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        ens.save(target)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_batch_norm_without_statistics_gets_batch_norm_heads():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.ReLU(), nn.Linear(6, 3))
    ens = SigmaEnsemble(net, members=2, head="3")
    assert isinstance(ens.backbone[3].norm.template, nn.BatchNorm1d)
