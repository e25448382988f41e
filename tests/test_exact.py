"""Any backbone, member by member: what people's backbones do with a batch never mixes up the members."""

import copy
import functools
import io
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import sigmaens as sn
from sigmaens import SigmaEnsemble
from sigmaens.layers import SigmaNorm

pytestmark = pytest.mark.usefixtures("one_thread")


def spread(ens):
    """Give members gates and statistics of their own, in the backbone's precision."""
    with torch.no_grad():
        for layer in ens.modules():
            if isinstance(layer, SigmaNorm):
                layer.gamma.normal_()
                if layer.running_mean is not None:
                    layer.running_mean.normal_()
                    layer.running_var.uniform_(0.5, 2)
    return ens


def assert_members(ens, *args, folded, **kwargs):
    """The default pass is a loop over ordinary networks, in evaluation and in training, statistics too."""
    for training in (False, True):
        ens.train(training)
        twins = [ens.member(m).train(training) for m in range(ens.members)]
        expected = [twin(*args, **kwargs) for twin in twins]
        expected = torch.stack([getattr(y, "logits", y) for y in expected], dim=1)
        assert_close(ens(*args, **kwargs), expected, rtol=1e-8, atol=1e-8)
        for name, layer in ens._layers().items():
            if layer.running_mean is not None:
                for m, twin in enumerate(twins):
                    ordinary = twin.get_submodule(name)
                    assert_close(layer.running_mean[m], ordinary.running_mean, rtol=1e-10, atol=1e-10)
                    assert_close(layer.num_batches_tracked[m], ordinary.num_batches_tracked)
    passes = [line for line in repr(ens).splitlines() if "passes in" in line]
    assert passes
    for line in passes:
        assert ("folded into one batch" in line) == folded, line


class TwoViews(nn.Module):
    """Runs an image and its mirror image as one batch."""

    def __init__(self, only_in_training=False):
        super().__init__()
        self.only_in_training = only_in_training
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        if self.only_in_training and not self.training:
            return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))
        one, two = self.norm(self.conv(torch.cat([x, x.flip(-1)]))).relu().mean((2, 3)).chunk(2)
        return self.fc(one + 0.3 * two)


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 6])
def test_two_views_in_one_batch(batch, pretrained):
    make = SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble
    ens = make(TwoViews().double(), 3)
    x = torch.randn(batch, 3, 8, 8, dtype=torch.double)
    ens.eval()(x)  # the proof is made while members are equal, where pretrained
    assert_members(spread(ens), x, folded=False)
    assert "'norm' gets" in repr(ens)


def test_views_in_training_alone_are_found_in_training():
    ens = spread(SigmaEnsemble(TwoViews(only_in_training=True).double(), 3))
    x = torch.randn(4, 3, 8, 8, dtype=torch.double)
    assert_members_of_both(ens, x)
    assert "passes in evaluation: folded" in repr(ens)
    assert "passes in training: one by one" in repr(ens)


def assert_members_of_both(ens, x):
    for training in (False, True):
        ens.train(training)
        twins = [ens.member(m).train(training) for m in range(ens.members)]
        assert_close(ens(x), torch.stack([twin(x) for twin in twins], dim=1), rtol=1e-8, atol=1e-8)


class Prototypes(nn.Module):
    """Compares each image with the prototypes that it is given."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x, prototypes):
        return self.norm(x) @ prototypes.T


def test_prototypes_as_many_as_rows_are_not_repeated():
    ens = spread(SigmaEnsemble(Prototypes().double(), 3))
    prototypes = torch.randn(5, 6, dtype=torch.double)
    for batch in (5, 7, 5):
        x = torch.randn(batch, 6, dtype=torch.double)
        y = ens(x, prototypes)
        assert y.shape == (batch, 3, 5)
        assert_close(y, torch.stack([ens.member(m)(x, prototypes) for m in range(3)], dim=1))


class Masked(nn.Module):
    """Attention with a mask (L, L) that all sentences share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.fc = nn.Linear(6, 4)

    def forward(self, x, mask):
        x = self.norm(x)
        return self.fc(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0][:, -1])


@pytest.mark.parametrize("batch", [5, 3])
def test_masks_as_long_as_the_batch_are_not_repeated(batch):
    ens = spread(SigmaEnsemble(Masked().double(), 3))
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    assert_members(ens, torch.randn(batch, 5, 6, dtype=torch.double), mask, folded=batch == 3)


class Video(nn.Module):
    """Folds frames into the batch, and takes the sequence of each clip apart again, sequence first."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.rnn = nn.GRU(6, 6)
        self.out = nn.LayerNorm(6)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        frames = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.fc(self.out(self.rnn(frames.transpose(0, 1))[0])[-1])


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 12])
def test_frames_in_the_batch_and_recurrence_over_them(batch):
    ens = spread(SigmaEnsemble(Video().double(), 3))
    x = torch.randn(batch, 4, 6, dtype=torch.double)
    for _ in range(2):
        assert_close(ens(x), torch.stack([ens.member(m)(x) for m in range(3)], dim=1))


class Mixes(nn.Module):
    """Looks at the whole batch, in training alone: a mean over it, or a neighbour's features."""

    def __init__(self, how):
        super().__init__()
        self.norm, self.fc, self.how = nn.LayerNorm(6), nn.Linear(6, 4), how

    def forward(self, x):
        x = self.norm(x)
        if self.training:
            x = x + (x.mean(0, keepdim=True) if self.how == "mean" else x.roll(1, 0))
        return self.fc(x)


@pytest.mark.parametrize("how", ["mean", "neighbour"])
def test_what_looks_at_the_whole_batch_in_training(how):
    ens = spread(SigmaEnsemble(Mixes(how).double(), 3))
    assert_members_of_both(ens, torch.randn(5, 6, dtype=torch.double))


def test_a_head_of_zeros_hides_nothing():
    net = Mixes("mean").double()
    nn.init.zeros_(net.fc.weight)
    ens = spread(SigmaEnsemble(net, 3))
    x = torch.randn(5, 6, dtype=torch.double)
    ens.train()(x)
    nn.init.normal_(ens.backbone.fc.weight)
    assert_members_of_both(ens, x)


class Packs(nn.Module):
    """Normalises the tokens that are there, of all sentences in one row of tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.fc = nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x, lengths):
        x = self.first(x.mT).mT  # has updated its statistics when the norm below finds other rows
        there = torch.arange(x.shape[1]) < lengths[:, None]
        y = torch.zeros_like(x)
        y[there] = self.norm(x[there])
        return self.fc(y.sum(1))


def test_rows_that_depend_on_the_data_and_not_on_the_batch():
    ens = spread(SigmaEnsemble(Packs().double(), 3))
    x = torch.randn(3, 5, 6, dtype=torch.double)
    for lengths in ([5, 5, 5], [1, 3, 2], [4, 4, 4], [5, 5, 5]):
        for training in (False, True):
            ens.train(training)
            twins = [ens.member(m).train(training) for m in range(3)]
            given = x, torch.tensor(lengths)
            assert_close(ens(*given), torch.stack([twin(*given) for twin in twins], dim=1), rtol=1e-8, atol=1e-8)
            for m, twin in enumerate(twins):  # taken back before members ran one by one
                for name in ("first", "norm"):
                    layer, ordinary = ens.backbone.get_submodule(name), twin.get_submodule(name)
                    assert_close(layer.running_mean[m], ordinary.running_mean)
                    assert_close(layer.num_batches_tracked[m], ordinary.num_batches_tracked)


def test_shapes_with_other_rows_are_not_folded_again():
    class Tokens(nn.Module):
        """Normalises tokens as rows, as many for each sentence as it has."""

        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum(1)

    ens, calls = spread(SigmaEnsemble(Tokens(), 3)), []
    ens(torch.randn(4, 3, 6))
    ens.backbone.norm.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    for expected in ([3 * 4 * 5, 4 * 5, 4 * 5, 4 * 5], [4 * 5] * 3):
        calls.clear()
        ens(torch.randn(4, 5, 6))
        assert calls == expected  # the folded pass that is given up, then one by one; then these at once
    calls.clear()
    ens(torch.randn(4, 3, 6))
    assert calls == [3 * 4 * 3]


class Positions(nn.Module):
    """Normalises its table of positions, as DeBERTa does."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 6))
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.fc((x @ self.norm(self.table).T) @ self.table)


def test_tables_that_have_no_batch_may_be_normalised():
    ens = spread(SigmaEnsemble(Positions().double(), 3))
    assert_members(ens, torch.randn(4, 6, dtype=torch.double), folded=False)


def test_deberta_and_a_decoder_without_padding():
    from transformers import DebertaConfig, DebertaForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

    sizes = {"vocab_size": 40, "num_labels": 3}
    config = DebertaConfig(
        **sizes,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
    )
    config.relative_attention, config.pos_att_type = True, ["c2p", "p2c"]
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    nets = [DebertaForSequenceClassification(config)]
    config = GPT2Config(
        **sizes, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    config.pad_token_id = None
    nets.append(GPT2ForSequenceClassification(config))
    for net, batch in zip(nets, (3, 1), strict=True):
        ens = spread(SigmaEnsemble(net.double(), 3)).eval()
        ids = torch.randint(1, 40, (batch, 6))
        for _ in range(2):
            assert_close(ens(ids), torch.stack([ens.member(m)(ids).logits for m in range(3)], dim=1))


def test_the_backbone_alone_is_refused():
    ens = SigmaEnsemble(TwoViews(), 3)
    x = torch.randn(6, 3, 8, 8)
    ens(x)
    with pytest.raises(RuntimeError, match=r"layer 'norm' runs outside.*call the ensemble"):
        ens.backbone(x)


def test_ordinary_backbones_are_folded():
    class Net(TwoViews):
        def forward(self, x):
            return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))

    ens = spread(SigmaEnsemble(Net().double(), 3))
    rows = []
    assert_members(ens, torch.randn(4, 3, 8, 8, dtype=torch.double), folded=True)
    ens.backbone.conv.register_forward_hook(lambda module, args, y: rows.append(len(y)))
    ens(torch.randn(5, 3, 8, 8, dtype=torch.double))
    assert rows == [15]
    ens.at_once = 1
    ens(torch.randn(5, 3, 8, 8, dtype=torch.double))
    assert rows[1:] == [5, 5, 5]


@pytest.mark.parametrize("at_once", [2, "all"])
def test_folding_that_is_asked_for_and_not_proved_is_an_error(at_once):
    ens = SigmaEnsemble(TwoViews(), 3, at_once=at_once)
    with pytest.raises(ValueError, match=f"at_once={at_once!r}: members cannot be folded: .*'norm' gets"):
        ens(torch.randn(4, 3, 8, 8))
    packs = SigmaEnsemble(Packs().double(), 3, at_once=at_once).eval()
    x = torch.randn(3, 5, 6, dtype=torch.double)
    packs(x, torch.tensor([5, 5, 5]))
    with pytest.raises(ValueError, match=r"'norm' got .* another number than was proved"):
        packs(x, torch.tensor([1, 2, 3]))


def test_the_proof_leaves_nothing_behind():
    class Net(TwoViews):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            self.last = len(x)
            random.random()
            np.random.random()  # noqa: NPY002 -- the older generator has to be put back too
            return self.fc(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))

    ens = SigmaEnsemble(Net(), 3)
    twin = copy.deepcopy(ens)
    x = torch.randn(4, 3, 8, 8)
    ens._proof((x,), {})
    assert list(vars(ens.backbone)) == list(vars(twin.backbone))
    assert ens.backbone.drop.p == 0.5
    for name, tensor in twin.state_dict().items():
        assert torch.equal(ens.state_dict()[name], tensor), name
    states = []
    for prove in (True, False):
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002
        other = copy.deepcopy(twin)
        if prove:
            other._proof((x,), {})
        states.append((torch.rand(()).item(), random.random(), np.random.random()))  # noqa: NPY002
    assert states[0] == states[1]


def test_the_proof_is_made_once_for_each_structure():
    class Net(Prototypes):
        def forward(self, x, prototypes=None, scale=1.0):
            return self.norm(x) * scale if prototypes is None else super().forward(x, prototypes)

    ens = SigmaEnsemble(Net(), 3).eval()
    calls = []
    ens.backbone.norm.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for args in ((4, None), (9, None), (9, 5), (9, 5), (4, None)):
        calls.clear()
        ens(torch.randn(args[0], 6), None if args[1] is None else torch.randn(args[1], 6))
        counts.append(len(calls))
    assert counts == [5, 1, 5, 1, 1]


# Layers that are not what they seem


def test_an_option_that_is_new_in_every_call_is_not_proved_for_ever():
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x, shift):
            return self.norm(x) + shift

    ens, x = spread(SigmaEnsemble(Shifts(), 2)), torch.randn(3, 4)
    calls = []
    ens.backbone.norm.register_forward_hook(lambda *_: calls.append(1))
    expected = ens(x, 0.0)
    for shift in range(1, 100):
        calls.clear()
        assert_close(ens(x, float(shift)), expected + shift)
        assert len(calls) == (4 if shift < 64 else 2)  # two members, folded, and the pass itself; or one by one
    assert repr(ens).count("passes in training: folded") == 1
    ens.at_once = 2
    with pytest.raises(ValueError, match="cannot be folded: an option is new in every call"):
        ens(x, 100.0)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.block(x))


def test_a_forward_bound_to_the_original_is_refused_by_name():
    net = Blocks()
    net.block.forward = lambda x: nn.Sequential.forward(net.block, x)
    with pytest.raises(TypeError, match="forward of layer 'block' was replaced by a function bound to the orig"):
        SigmaEnsemble(net, 3)


@pytest.mark.parametrize("how", ["partial", "method"])
def test_a_forward_that_can_be_copied_is_kept(how):
    net = Blocks()

    def forward(module, x):
        return 2 * nn.Sequential.forward(module, x)

    net.block.forward = (
        functools.partial(forward, net.block) if how == "partial" else types.MethodType(forward, net.block)
    )
    ens = spread(SigmaEnsemble(net.double(), 3))
    x = torch.randn(4, 6, dtype=torch.double)
    y = ens(x)
    for m, gate in enumerate(ens.gates()["block.1"]):
        expected = 2 * F.layer_norm(F.linear(x, net.block[0].weight, net.block[0].bias), (6,), gate)
        assert_close(y[:, m], F.linear(expected, net.fc.weight, net.fc.bias))
    y.sum().backward()
    assert ens.backbone.block[1].gamma.grad.abs().min() > 0


def test_hooks_of_accelerate_on_a_norm_are_refused_by_name():
    from accelerate.hooks import ModelHook, add_hook_to_module

    net = Blocks()
    add_hook_to_module(net.block[1], ModelHook())
    with pytest.raises(TypeError, match=r"layer 'block.1'.*had its forward replaced"):
        SigmaEnsemble(net, 3)
    net = Blocks()
    add_hook_to_module(net.block, ModelHook())
    ens = spread(SigmaEnsemble(net, 3))
    y = ens(torch.randn(4, 6))
    assert (y[:, 0] - y[:, 1]).abs().max() > 1e-3


def test_an_ensemble_whose_layers_never_run_is_an_error():
    net = Blocks()
    kept = [net.block]
    net.again = lambda x: kept[0](x)
    net.__class__ = type("Kept", (Blocks,), {"forward": lambda self, x: self.fc(self.again(x))})
    with pytest.raises(RuntimeError, match="no σNorm layer runs"):
        SigmaEnsemble(net, 3)(torch.randn(4, 6))


def test_hooks_of_a_norm_are_kept():
    net = Blocks()
    seen = []
    net.block[1].register_forward_hook(lambda module, args, y: seen.append(type(module)) or 2 * y)
    net.block[1].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    ens = spread(SigmaEnsemble(net, 3))
    x = torch.randn(4, 6)
    y = ens(x)
    assert set(seen) == {SigmaNorm}
    inner = F.linear(x, net.block[0].weight, net.block[0].bias) + 1
    for m, gate in enumerate(ens.gates()["block.1"]):
        assert_close(y[:, m], F.linear(2 * F.layer_norm(inner, (6,), gate), net.fc.weight, net.fc.bias))


def test_weight_norm_pruning_and_activations_that_are_kept_can_be_copied():
    from torch.nn.utils import prune

    net = Blocks()
    prune.l1_unstructured(net.block[0], "weight", 0.5)
    net.kept = [net.block(torch.randn(2, 6)), {"last": net.fc(torch.randn(2, 6))}]
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(net.fc)
    net.fc(torch.randn(2, 6))
    ens = spread(SigmaEnsemble(net, 3))
    x = torch.randn(4, 6)
    y = ens(x)
    for m, gate in enumerate(ens.gates()["block.1"]):
        expected = F.layer_norm(F.linear(x, net.block[0].weight, net.block[0].bias), (6,), gate)
        assert_close(y[:, m], F.linear(expected, net.fc.weight, net.fc.bias))


def test_what_cannot_be_copied_is_named():
    net = Blocks()
    net.block.file = io.BufferedReader(io.BytesIO())
    with pytest.raises(TypeError, match="attribute 'file' of layer 'block' cannot be copied"):
        SigmaEnsemble(net, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_logits_are_float32_whatever_the_backbone_is(dtype):
    net = Blocks().to(dtype)
    ens = SigmaEnsemble.from_pretrained(net, 3, head="fc")
    gamma = ens.backbone.block[1].gamma
    assert gamma.dtype == torch.float32
    x = torch.randn(4, 6, dtype=dtype)
    before = gamma.detach().clone()
    optimizer = torch.optim.SGD(sn.parameter_groups(ens, lr=2e-5))
    loss = sn.member_cross_entropy(ens(x).float(), torch.tensor([0, 1, 2, 0]))
    loss.backward()
    optimizer.step()
    assert_close(gamma.detach(), before - 2e-3 * gamma.grad, rtol=0, atol=0)
    assert ((gamma.detach() - before) != 0).any()
    cast = SigmaEnsemble(Blocks(), 3)
    exact = cast.backbone.block[1].gamma.detach().clone()
    cast.to(dtype)
    assert torch.equal(cast.backbone.block[1].gamma, exact)
    assert cast(x).dtype == dtype
    assert cast.member(1).block[1].weight.dtype == dtype
    assert cast.double().backbone.block[1].gamma.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiny_scales_of_half_precision_are_converted_exactly(dtype):
    norm = nn.LayerNorm(4).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([6e-8, -1.0, 0.0, 3.0]))
        norm.bias.normal_()
    layer = SigmaNorm(norm, 2, pretrained=True)
    assert_close(layer.weight[1], norm.weight, rtol=0, atol=1e-37)  # a scale of 0 is a gate of 1e-38
    x = torch.randn(6, 4, dtype=dtype)
    assert torch.equal(layer(x), norm(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("pretrained", [False, True])
def test_norms_without_tensors_compute_in_the_precision_of_the_backbone(pretrained, dtype):
    net = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3)).to(dtype)
    build = SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble
    ens, x = build(net, 2), torch.randn(4, 6, dtype=dtype)
    assert ens.backbone[1].weight.dtype == dtype
    logits = ens(x)
    assert logits.dtype == dtype
    for m in range(2):
        assert torch.equal(logits[:, m], ens.member(m)(x))
    if pretrained:
        assert_close(logits[:, 0], net(x), rtol=torch.finfo(dtype).eps * 8, atol=torch.finfo(dtype).eps * 8)


class Gated(nn.Module):
    """The norm of Mamba 2: it may get a second input."""

    def __init__(self):
        super().__init__()
        self.norm = GatedRMSNorm(6)

    def forward(self, x):
        return self.norm(x, x + 1)


class GatedRMSNorm(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x, gate=None):
        x = x if gate is None else x * nn.functional.silu(gate)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_norms_that_get_other_inputs_are_refused_by_name():
    with pytest.raises(
        TypeError, match=r"layer 'norm', a .*GatedRMSNorm, takes other inputs too \(gate\); skip='norm'"
    ):
        SigmaEnsemble(Gated(), 2)


def test_skipped_layers_stay_as_they_are():
    from timm.layers.grn import GlobalResponseNorm

    net = nn.Sequential(nn.LayerNorm(6), GlobalResponseNorm(6), nn.LayerNorm(6), nn.Linear(6, 3))
    with pytest.raises(TypeError, match=r"layer '1', a timm.layers.grn.GlobalResponseNorm.*skip='1'"):
        SigmaEnsemble(net, 3)
    ens = SigmaEnsemble(net, 3, skip=["1", "2"])
    assert list(ens.gates()) == ["0"]
    assert type(ens.backbone[2]) is nn.LayerNorm
    with pytest.raises(ValueError, match=r"skip \['9'\] matches none of the norm layers \['0', '1', '2'\]"):
        SigmaEnsemble(net, 3, skip=["1", "9"])


# What people do around a model


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 4)
    )


def test_update_bn_computes_the_statistics_of_all_members_anew():
    from torch.optim.swa_utils import AveragedModel, update_bn

    ens = spread(SigmaEnsemble(convolutions(), 3))
    averaged = AveragedModel(ens)
    loader = [torch.randn(5, 3, 8, 8) for _ in range(4)]
    update_bn(loader, averaged)
    layer = averaged.module.backbone[1]
    assert layer.momentum == 0.3
    for m in range(3):
        twin = ens.member(m)
        update_bn(loader, twin)
        assert_close(layer.running_mean[m], twin[1].running_mean)
        assert_close(layer.running_var[m], twin[1].running_var)
        assert layer.num_batches_tracked[m] == 4


def test_batch_norms_in_evaluation_mode_are_frozen():
    ens = spread(SigmaEnsemble(convolutions(), 3)).train()
    before = ens.backbone[1].running_mean.clone()
    frozen = [m for m in ens.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(frozen) == 1
    for module in frozen:
        module.eval()
    x = torch.randn(5, 3, 8, 8)
    y = ens(x)
    assert torch.equal(ens.backbone[1].running_mean, before)
    assert_close(y, torch.stack([ens.member(m).eval()(x) for m in range(3)], dim=1))
    assert (frozen[0].num_features, frozen[0].eps, frozen[0].affine, frozen[0].track_running_stats) == (
        6,
        1e-5,
        True,
        True,
    )


@pytest.mark.parametrize("pretrained", [False, True])
def test_links(pretrained):
    class Answers(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.norm, self.shape = nn.LayerNorm(12), shape

        def forward(self, x):
            return self.norm(x).unflatten(1, self.shape)

    x = torch.randn(5, 12)
    make = SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble
    for shape in ((12,), (3, 2, 2)):
        ens = make(Answers(shape), 4)
        with torch.no_grad():
            expected = torch.stack([ens.member(m).eval()(x).softmax(1) for m in range(4)]).mean(0)
        assert_close(ens.predict_proba(x), expected)
    for shape in ((12, 1), (3, 4), (1, 3, 4)):
        with pytest.raises(ValueError, match=r"are no logits of classes.*sigmoid"):
            make(Answers(shape), 4).predict_proba(x)
        ens = make(Answers(shape), 4, link="sigmoid")
        with torch.no_grad():
            expected = torch.stack([ens.member(m).eval()(x).sigmoid() for m in range(4)]).mean(0)
        assert_close(ens.predict_proba(x), expected)
    one = make(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 1)), 4)
    with pytest.raises(ValueError, match=r"shape \(5, 1\) are no logits of classes"):
        one.predict_proba(x)
    with pytest.raises(ValueError, match="link must be one of"):
        make(Answers((12,)), 4, link="logit")


def test_repr_can_be_written_anywhere():
    ens = SigmaEnsemble(convolutions(), 3)
    ens(torch.randn(2, 3, 8, 8))
    repr(ens).encode("cp1252")
    nn.Module.__repr__(ens).encode("cp1252")
    str(ens.backbone).encode("ascii")


def test_conversion_does_not_need_float64_on_the_device(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoDouble(TorchDispatchMode):
        """As MPS: no float64 but on the CPU; here what stands for the device is the meta device."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta" and tensor.dtype == torch.float64:
                    raise TypeError("this device has no float64")
            return out

    norm = nn.LayerNorm(4)
    weight = norm.weight.detach().clone()
    norm.to("meta")
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: weight if tensor.device.type == "meta" else tensor)
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(4, dtype=torch.bool))
    with NoDouble():
        layer = SigmaNorm(norm, 2, pretrained=True)
    assert layer.gamma.device.type == "meta"


class Keeps(nn.Module):
    """A norm and a classifier, and something besides tensors."""

    def __init__(self, kept):
        super().__init__()
        self.norm, self.kept = nn.LayerNorm(6), kept

    def forward(self, x):
        return self.norm(x)

    def get_extra_state(self):
        return self.kept

    def set_extra_state(self, state):
        self.kept = state


@pytest.mark.parametrize("kept", [{"step": 3, "names": ["a", "b"], "rate": 0.1}, None, "text", torch.arange(3)])
def test_extra_state_is_saved_and_loaded(kept, tmp_path):
    ens = SigmaEnsemble(Keeps(kept), 2)
    ens.save(tmp_path / "ens.safetensors")
    blank = torch.zeros(3, dtype=torch.long) if isinstance(kept, torch.Tensor) else {}
    other = SigmaEnsemble(Keeps(blank), 2).load(tmp_path / "ens.safetensors")
    x = torch.randn(4, 6)
    assert_close(other(x), ens(x), rtol=0, atol=0)
    if isinstance(kept, torch.Tensor):
        assert torch.equal(other.backbone.kept, kept)
    else:
        assert other.backbone.kept == kept


@pytest.mark.parametrize("kept", [object(), (1, 2), {1: 2}, float("nan"), {"a": torch.zeros(1)}])
def test_extra_state_that_is_no_json_is_refused(kept, tmp_path):
    with pytest.raises(TypeError, match=r"cannot write backbone\._extra_state, a .*: only tensors and JSON"):
        SigmaEnsemble(Keeps(kept), 2).save(tmp_path / "ens.safetensors")
    assert not list(tmp_path.iterdir())
