"""Members in chunks: outputs, gradients and statistics are those of all members at once, in the memory of one chunk."""

import copy
import math
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import sigmaens as sn
from sigmaens import SigmaEnsemble, backbones, cost
from sigmaens.layers import SigmaNorm
from sigmaens.slim import slim

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Convolutions around a norm of images, then tokens with a norm of their own, and a linear layer."""

    def __init__(self, first, second):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, bias=False)
        self.norm1 = first
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.norm2 = second
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.conv2(F.relu(self.norm1(self.conv1(x))))
        tokens = x.flatten(2).mT if isinstance(self.norm2, SigmaNorm) and not self.norm2.normalizes_batch else x
        x = F.relu(self.norm2(tokens))
        return self.fc(x.mean(1) if x.dim() == 3 else x.mean((2, 3)))


def fused():
    from timm.layers import BatchNormAct2d

    return Net(BatchNormAct2d(6, act_layer=nn.SiLU), BatchNormAct2d(8))


NETS = {
    "BatchNorm": lambda: Net(nn.BatchNorm2d(6), nn.BatchNorm2d(8, momentum=None)),
    "sample norms": lambda: Net(nn.GroupNorm(3, 6), nn.LayerNorm(8)),
    "fused": fused,
    "no statistics": lambda: Net(nn.BatchNorm2d(6, track_running_stats=False), nn.RMSNorm(8)),
}


def settled(net):
    """Give the norms scales, shifts and statistics as training might leave them."""
    with torch.no_grad():
        for module in net.modules():
            if getattr(module, "running_mean", None) is not None:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)):
                module.weight.normal_()
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_()
    return net


def pair(kind, members, at_once, *, pretrained=False, head="fc"):
    """The same ensemble twice, once with chunks; members differ in gates and statistics."""
    make = SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble
    whole = make(settled(NETS[kind]()), members, head=head)
    with torch.no_grad():
        for layer in whole.modules():
            if isinstance(layer, SigmaNorm):
                layer.gamma.normal_()
                if layer.running_mean is not None:
                    layer.running_mean.normal_()
                    layer.running_var.uniform_(0.5, 2)
    chunked = copy.deepcopy(whole)
    chunked.at_once = at_once
    return whole, chunked


def loss(logits, labels, of):
    """A chunk's share of the members' mean loss."""
    return sn.member_cross_entropy(logits, labels) * logits.shape[1] / of


def assert_same_gradients(model, expected, **tolerance):
    found, wanted = ({n: p.grad for n, p in m.named_parameters()} for m in (model, expected))
    assert all(grad is not None and grad.abs().max() > 0 for grad in wanted.values())
    assert_close(found, wanted, **tolerance)


CASES = [(4, 1), (4, 2), (4, 3), (5, 1), (5, 2), (5, 3), (4, 4), (4, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("pretrained", "head"), [(False, "fc"), (True, "fc"), (True, None)])
@pytest.mark.parametrize(("members", "at_once"), CASES)
@pytest.mark.parametrize("kind", NETS)
def test_steps_and_outputs_are_those_of_all_at_once(kind, members, at_once, pretrained, head, dtype):
    whole, chunked = (m.to(dtype) for m in pair(kind, members, at_once, pretrained=pretrained, head=head))
    # Kernels round by the size of what they are given.
    double = dtype == torch.float64
    close = {"rtol": 1e-10, "atol": 1e-10} if double else {"rtol": 1e-4, "atol": 1e-5}
    closer = {"rtol": 1e-12, "atol": 1e-12} if double else {"rtol": 1e-6, "atol": 1e-6}
    labels = torch.tensor([0, 4, 2])
    for training in (True, True, False):
        x = torch.randn(3, 3, 6, 6, dtype=dtype)
        for model in (whole, chunked):
            model.train(training)
            model.zero_grad()
        expected = whole(x)
        loss(expected, labels, members).backward()
        parts = []
        for logits in chunked.chunks(x):
            loss(logits, labels, members).backward()
            parts.append(logits.detach())
        assert [part.shape[1] for part in parts] == [
            len(range(members)[i : i + at_once]) for i in range(0, members, at_once)
        ]
        assert_close(torch.cat(parts, 1), expected, **close)
        assert_same_gradients(chunked, whole, **close)
        assert_close(dict(chunked.named_buffers()), dict(whole.named_buffers()), **closer)
    if kind in ("BatchNorm", "fused"):
        assert chunked.backbone.norm1.num_batches_tracked.tolist() == [2] * members


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("kind", NETS)
def test_forward_alone_carries_gradients(kind, at_once, training):
    whole, chunked = (m.double().train(training) for m in pair(kind, 4, at_once))
    x = torch.randn(3, 3, 6, 6, dtype=torch.double)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for model, x in zip((whole, chunked), inputs, strict=True):
        logits = model(x)
        assert logits.shape == (3, 4, 5)
        # Members meet in this loss.
        (logits.softmax(-1).mean(1).log().sin().sum() + sn.diversity_loss(model, 0.1)).backward()
    assert_same_gradients(chunked, whole, rtol=1e-10, atol=1e-10)
    assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-10, atol=1e-10)
    assert_close(dict(chunked.named_buffers()), dict(whole.named_buffers()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("kind", NETS)
def test_channels_last(kind, at_once, training):
    whole, chunked = (
        m.train(training).to(memory_format=torch.channels_last, dtype=torch.double) for m in pair(kind, 4, at_once)
    )
    x = torch.randn(3, 3, 6, 6, dtype=torch.double).to(memory_format=torch.channels_last)
    assert_close(chunked(x), whole(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
# Of an RMSNorm under autocast torch warns.
@pytest.mark.parametrize("kind", ["BatchNorm", "sample norms", "fused"])
def test_bfloat16_autocast(kind, training):
    whole, chunked = (m.train(training) for m in pair(kind, 4, 3))
    x, labels = torch.randn(8, 3, 6, 6), torch.randint(5, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(x)
        loss(expected, labels, 4).backward()
        parts = []
        for logits in chunked.chunks(x):
            loss(logits, labels, 4).backward()
            parts.append(logits.detach())
    assert parts[0].dtype == expected.dtype
    assert_close(torch.cat(parts, 1), expected, rtol=2e-2, atol=2e-2)
    assert_same_gradients(chunked, whole, rtol=5e-2, atol=2e-2)


class Sentences(nn.Module):
    """Embeds tokens and attends to those that the mask shows; `steps` has no rows, and is written to."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm1 = nn.LayerNorm(8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, ids, mask, extra, steps):
        mask[:, 0] = True
        steps += 1
        x = self.norm1(self.embed(ids) * extra["weight"][0]) * steps[:, None]
        x = self.norm2(x + self.attend(x, x, x, key_padding_mask=~mask, need_weights=False)[0])
        return {"logits": self.fc(x[:, 0])}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_dictionaries_with_masks_and_backbones_that_write_into_inputs(at_once, training):
    whole = SigmaEnsemble(Sentences(), 5, head="fc").double().train(training)
    chunked = copy.deepcopy(whole)
    chunked.at_once = at_once

    def batch():
        mask = torch.arange(7) < torch.tensor([[7], [3], [5], [2]])
        mask[:, 0] = False
        ids = torch.arange(28).view(4, 7) % 11
        weight = torch.linspace(0.5, 2, 4, dtype=torch.double).view(4, 1, 1)
        return {"ids": ids, "mask": mask, "extra": {"weight": [weight]}, "steps": torch.ones(7, dtype=torch.double)}

    given, untouched = batch(), batch()
    expected = whole(batch())
    assert expected[:, 0].sub(expected[:, 1]).abs().max() > 1e-3
    assert_close(chunked(given), expected, rtol=1e-10, atol=1e-10)
    assert_close(torch.cat(list(chunked.chunks(**given)), 1), expected, rtol=1e-10, atol=1e-10)
    assert_close(given, untouched)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("separately", [True, False])
@pytest.mark.parametrize("at_once", [1, 2])
def test_gradient_checkpointing_runs_the_same_members_again(at_once, separately, reentrant):
    class Saving(Net):
        def forward(self, x):
            part = super().forward
            return checkpoint(part, x, use_reentrant=reentrant) if x.requires_grad else part(x)

    def step(model, x, labels):
        if separately:
            for logits in model.chunks(x):
                loss(logits, labels, 4).backward()
        else:
            loss(model(x), labels, 4).backward()

    whole = SigmaEnsemble(Saving(nn.GroupNorm(3, 6), nn.LayerNorm(8)), 4, head="fc").double()
    chunked = copy.deepcopy(whole)
    chunked.at_once = at_once
    x, labels = torch.randn(4, 3, 6, 6, dtype=torch.double), torch.tensor([1, 2, 0, 4])
    loss(whole(x), labels, 4).backward()
    step(chunked, x.clone().requires_grad_(), labels)
    assert_same_gradients(chunked, whole, rtol=1e-10, atol=1e-10)
    # Nothing of it is left: outside of a pass no member is meant.
    with pytest.raises(RuntimeError, match="call the ensemble"):
        chunked.backbone(x.repeat(4, 1, 1, 1))


def test_what_is_no_chunk_is_refused_in_one_way():
    for bad in (0, -1, True, 2.0, "1", math.inf):
        message = f'^at_once must be an integer ≥ 1, "all", or None for what is proved, not {bad!r}$'
        for make in (SigmaEnsemble, SigmaEnsemble.from_pretrained):
            with pytest.raises(ValueError, match=message):
                make(nn.LayerNorm(3), at_once=bad)
        ens = SigmaEnsemble(nn.LayerNorm(3), at_once=2)
        with pytest.raises(ValueError, match=message):
            ens.at_once = bad
        assert ens.at_once == 2
    assert SigmaEnsemble(nn.LayerNorm(3)).at_once is None


def ordinary(ens):
    """Whether layers know of no pass."""
    norms = [layer for layer in ens.modules() if isinstance(layer, SigmaNorm)]
    with pytest.raises(RuntimeError, match="call the ensemble"):
        norms[0](torch.randn(ens.members * 2, norms[0].gamma.shape[1], 2, 2))
    return True


def test_abandoned_and_failed_passes_leave_nothing_behind():
    whole, chunked = (m.eval() for m in pair("BatchNorm", 4, 1))
    x = torch.randn(3, 3, 6, 6)
    chunks = chunked.chunks(x)
    next(chunks)
    assert ordinary(chunked)  # between chunks too
    del chunks
    assert_close(chunked(x), whole(x))
    fails = chunked.backbone.conv2.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chunked(x)
    assert ordinary(chunked)
    fails.remove()
    with pytest.raises(TypeError, match="conv2d"):  # as of the backbone itself
        next(chunked.chunks(3))
    chunked.at_once = None
    assert torch.equal(chunked(x), whole(x))


def test_the_size_of_chunks_holds_for_a_whole_pass():
    whole, chunked = (m.eval() for m in pair("BatchNorm", 5, 2))
    x = torch.randn(3, 3, 6, 6)
    chunks = chunked.chunks(x)
    parts = [next(chunks)]
    chunked.at_once = 1
    assert_close(torch.cat([*parts, *chunks], 1), whole(x))


def test_an_ensemble_may_run_within_a_pass_of_itself():
    whole, chunked = (m.eval() for m in pair("BatchNorm", 4, 3))
    x, inner = torch.randn(2, 3, 3, 6, 6)
    found = []

    def again(*_):
        handle.remove()
        chunked.at_once = 2
        found.append(chunked(inner[:2]))

    handle = chunked.backbone.norm1.register_forward_hook(again)
    assert_close(chunked(x), whole(x))
    assert_close(found, [whole(inner[:2])])


def test_threads_run_chunks_and_batches_of_their_own():
    whole, chunked = (m.eval() for m in pair("BatchNorm", 5, 2))
    inputs = [torch.randn(batch, 3, 6, 6) for batch in (1, 2, 3, 4)]
    with torch.no_grad():
        expected = [whole(x) for x in inputs]
    start = threading.Barrier(len(inputs), timeout=60)
    right = []

    def work(x, y):
        start.wait()
        with torch.no_grad():
            right.extend(torch.allclose(chunked(x), y, atol=1e-5) for _ in range(10))

    threads = [threading.Thread(target=work, args=both) for both in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 40


def test_chunks_touch_nothing_else(tmp_path):
    whole, chunked = pair("BatchNorm", 5, 2)
    x = torch.randn(3, 3, 6, 6)
    assert_close(chunked.predict_proba(x), whole.predict_proba(x))
    assert chunked.training
    assert list(chunked.state_dict()) == list(whole.state_dict())
    chunked.save(tmp_path / "chunked")
    whole.save(tmp_path / "whole")
    assert (tmp_path / "chunked").read_bytes() == (tmp_path / "whole").read_bytes()
    loaded = pair("BatchNorm", 5, 3)[1].load(tmp_path / "whole").eval()
    assert loaded.at_once == 3
    assert copy.deepcopy(loaded).at_once == 3
    with torch.no_grad():
        logits = whole.eval()(x)
        assert_close(loaded(x), logits)
        for m in range(5):
            assert_close(chunked.eval().member(m)(x), logits[:, m])


@pytest.mark.parametrize("size", [1, 3])
def test_compiled_backbones_run_the_members_they_are_given(size):
    whole, chunked = (m.eval() for m in pair("BatchNorm", 4, size))
    chunked.backbone = torch.compile(chunked.backbone, backend="eager")
    x = torch.randn(3, 3, 6, 6)
    for _ in range(2):
        assert_close(chunked(x), whole(x))


def test_an_exported_ensemble_may_run_in_chunks():
    whole, chunked = (m.eval() for m in pair("sample norms", 4, 3))
    x = torch.randn(3, 3, 6, 6)
    with pytest.raises(ValueError, match="call the ensemble once before it is compiled"):
        torch.export.export(chunked, (x,))
    chunked(x)
    assert_close(torch.export.export(chunked, (x,)).module()(x), whole(x))


@pytest.mark.parametrize("at_once", [None, 2, 9])
def test_slim_ensembles_run_one_by_one(at_once):
    # In double, since kernels of other sizes round otherwise.
    whole = SigmaEnsemble(backbones.narrow_resnet(5, width=4), 4, head="fc").double()
    with torch.no_grad():
        for layer in whole.modules():
            if isinstance(layer, SigmaNorm):
                layer.gamma[:, ::2] = -math.inf
    x, labels = torch.randn(3, 3, 8, 8, dtype=torch.double), torch.tensor([0, 4, 2])
    slimmed = slim(whole, x)
    slimmed.at_once = at_once
    assert any(layer.shared for layer in slimmed.modules() if hasattr(layer, "shared"))
    for training in (True, False):
        for model in (whole, slimmed):
            model.train(training)
            model.zero_grad()
        expected = whole(x)
        loss(expected, labels, 4).backward()
        parts = []
        for logits in slimmed.chunks(x):
            assert logits.shape == (3, 1, 5)
            loss(logits, labels, 4).backward()
            parts.append(logits.detach())
        assert_close(torch.cat(parts, 1), expected.detach(), rtol=1e-10, atol=1e-10)
        assert_same_gradients(slimmed, whole, rtol=1e-10, atol=1e-10)
        statistics = {name: tensor for name, tensor in slimmed.named_buffers() if "running" in name}
        full = dict(whole.named_buffers())
        for name, tensor in statistics.items():
            layer = slimmed.backbone.get_submodule(name.removeprefix("backbone.").rpartition(".")[0])
            open_ = layer.opened()
            assert_close(tensor[open_], full[name][open_], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert_close(torch.cat(list(slimmed.chunks(x)), 1), whole(x), rtol=1e-10, atol=1e-10)


def test_memory_is_that_of_one_chunk():
    def peaks(members, at_once):
        ens = SigmaEnsemble(backbones.narrow_resnet(10, 3, width=8), members, head="fc", at_once=at_once)
        x, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))

        def train():
            for logits in ens.train().chunks(x):
                loss(logits, labels, members).backward()

        @torch.no_grad()
        def evaluate():
            ens.eval()(x)

        train()  # so that gradients exist
        return [cost.peak_memory(job) for job in (train, evaluate)]

    one, two, eight = peaks(1, None), peaks(2, None), peaks(8, None)
    for phase in range(2):
        assert two[phase] > 1.8 * one[phase]
        assert eight[phase] > 7 * one[phase]
    for members in (2, 8):
        for found, single in zip(peaks(members, 1), one, strict=True):
            assert single * 0.95 < found < single * 1.1
    for found, double in zip(peaks(8, 2), two, strict=True):
        assert double * 0.95 < found < double * 1.1
