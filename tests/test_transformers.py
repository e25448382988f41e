"""Backbones of timm, torchvision and transformers: the table of patterns, conversion, and what users give them."""

import ast
import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import sigmaens as sn
from sigmaens import SigmaEnsemble, backbones, paths
from sigmaens.layers import SigmaNorm, is_supported_norm

pytestmark = pytest.mark.usefixtures("one_thread")


# Small networks, with random weights and without dropout


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SMALL_TEXT = SMALL | {"vocab_size": 50, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def timm_network(name, **options):
    import timm

    return timm.create_model(name, num_classes=3, **options)


def timm_vit():
    return timm_network("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4)


def timm_convnext():
    return timm_network("convnext_tiny", depths=(1, 2, 1, 1), dims=(8, 16, 24, 32), ls_init_value=1.0)


def timm_swin():
    options = {"window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    return timm_network("swin_tiny_patch4_window7_224", img_size=32, **options)


def torchvision_resnet(block, layers=(1, 2, 1, 1)):
    from torchvision.models import resnet

    return resnet.ResNet(getattr(resnet, block), layers, num_classes=3)


def torchvision_vit():
    from torchvision.models import VisionTransformer

    net = VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=3)
    nn.init.normal_(net.heads.head.weight)  # zero before training
    return net


def torchvision_convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], layer_scale=1.0, num_classes=3)


def torchvision_swin():
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=3)


def torchvision_efficientnet():
    from torchvision.models import efficientnet_b0

    return efficientnet_b0(num_classes=3)


def hugging_face(kind, task="SequenceClassification", **options):
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=3, initializer_range=0.2, **options)
    return getattr(transformers, f"{kind}For{task}")(config)


def bert():
    return hugging_face("Bert", **SMALL_TEXT)


def roberta():
    return hugging_face("Roberta", **SMALL_TEXT)


def distilbert():
    sizes = {"vocab_size": 50, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
    return hugging_face("DistilBert", **sizes, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0)


def hugging_face_vit():
    return hugging_face("ViT", "ImageClassification", image_size=32, patch_size=8, **SMALL)


def hugging_face_swin():
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    return hugging_face("Swin", "ImageClassification", image_size=32, patch_size=4, **sizes)


def hugging_face_convnext():
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "layer_scale_init_value": 1.0}
    return hugging_face("ConvNext", "ImageClassification", **sizes)


def ids(rows=4):
    """Token ids of sentences of the same length; special ones left out."""
    return torch.randint(5, 50, (rows, 7))


def images(rows=4):
    return torch.randn(rows, 3, 32, 32)


# The table of docs/backbone.md: every row's backbone, its block class, its blocks, and which norm, as they run, is R


ROWS = {
    ("ResNet-18", "sigmaens"): (
        lambda: backbones.ResNet(3, width=8, blocks=(1, 2)),
        ("BasicBlock", 3),
        [1],
    ),
    ("ResNet-18", "torchvision"): (lambda: torchvision_resnet("BasicBlock"), ("BasicBlock", 5), [1]),
    ("ResNet-18", "timm"): (lambda: timm_network("resnet18", channels=(8, 16, 24, 32)), ("BasicBlock", 8), [1]),
    ("ResNet-50", "sigmaens"): (
        lambda: backbones.ResNet(3, width=8, blocks=(1, 2), block=backbones.Bottleneck),
        ("Bottleneck", 3),
        [0, 2],
    ),
    ("ResNet-50", "torchvision"): (lambda: torchvision_resnet("Bottleneck"), ("Bottleneck", 5), [0, 2]),
    ("ResNet-50", "timm"): (lambda: timm_network("resnet50", channels=(8, 16, 24, 32)), ("Bottleneck", 16), [0, 2]),
    ("WRN-28-10", "sigmaens"): (lambda: backbones.wide_resnet(3, depth=16, factor=1), ("WideBlock", 6), [0]),
    ("ViT", "timm"): (timm_vit, ("Block", 2), [1]),
    ("ViT", "torchvision"): (torchvision_vit, ("EncoderBlock", 2), [1]),
    ("ViT", "transformers"): (hugging_face_vit, ("ViTLayer", 2), [1]),
    ("BERT", "transformers"): (bert, ("BertLayer", 2), [1]),
    ("RoBERTa", "transformers"): (roberta, ("RobertaLayer", 2), [1]),
    ("DistilBERT", "transformers"): (distilbert, ("TransformerBlock", 2), [1]),
    ("ConvNeXt", "timm"): (timm_convnext, ("ConvNeXtBlock", 5), [0]),
    ("ConvNeXt", "torchvision"): (torchvision_convnext, ("CNBlock", 3), [0]),
    ("Swin", "timm"): (timm_swin, ("SwinTransformerBlock", 4), [1]),
    ("Swin", "torchvision"): (torchvision_swin, ("SwinTransformerBlock", 4), [1]),
    ("EfficientNet-B", "timm"): (
        lambda: timm_network("efficientnet_b0"),
        ("DepthwiseSeparableConv|InvertedResidual", 16),
        [-1],
    ),
    ("EfficientNet-B", "torchvision"): (torchvision_efficientnet, ("MBConv", 16), [-1]),
}


def table():
    """Return the table's rows, {(backbone, library): (head, patterns)}."""
    text = (paths.root() / "docs/backbone.md").read_text(encoding="utf-8")
    section = text.split("## Which norms to regularise")[1].split("\n## ")[0]
    rows = {}
    for line in re.findall(r"^\| [A-Z].*\|$", section, re.MULTILINE):
        name, head, patterns, _ = (cell.strip(" `") for cell in line.strip("|").split("|"))
        name, libraries = re.fullmatch(r"(\S+) \((.+)\)", name).groups()
        rows |= {
            (name, library): (ast.literal_eval(head), ast.literal_eval(patterns)) for library in libraries.split(", ")
        }
    return rows


def test_every_row_of_the_table_is_tested():
    assert table().keys() == ROWS.keys()


@pytest.mark.parametrize("row", ROWS, ids=" of ".join)
def test_the_tables_patterns_match_the_norms_that_they_say(row):
    make, (block, count), places = ROWS[row]
    head, patterns = table()[row]
    net = make()
    ens = SigmaEnsemble(net, 2, head=head, regularize=patterns).train()
    assert SigmaEnsemble.from_pretrained(net, 2, head=head, regularize=patterns).regularized == ens.regularized

    # The norms that run inside each block, in order.
    running, norms = [], {}
    blocks = {n: m for n, m in ens.backbone.named_modules() if re.fullmatch(block, type(m).__name__)}
    assert len(blocks) == count
    for name, module in ens.backbone.named_modules():
        if name in blocks:
            norms[name] = []
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            module.register_forward_hook(lambda *_: running.pop() and None)
        if isinstance(module, SigmaNorm):
            module.register_forward_hook(lambda *_, name=name: norms[running[-1]].append(name) if running else None)
    x = ids(2) if row[0] in ("BERT", "RoBERTa", "DistilBERT") else images(2)
    y = ens(x)
    assert y.shape == (2, 2, 3)
    assert sorted(ens.regularized) == sorted(of_block[i] for of_block in norms.values() for i in places)

    F.cross_entropy(y.flatten(0, 1), torch.tensor([0, 0, 1, 1])).backward()
    for name in ens.regularized:
        gradient = ens.backbone.get_submodule(name).gamma.grad
        assert gradient.isfinite().all()
        assert gradient.any(1).all()  # of every member


# Conversion


CONVERTED = {
    "ViT of timm": (timm_vit, images),
    "ConvNeXt of timm": (timm_convnext, images),
    "Swin of timm": (timm_swin, images),
    "ViT of torchvision": (torchvision_vit, images),
    "ConvNeXt of torchvision": (torchvision_convnext, images),
    "Swin of torchvision": (torchvision_swin, images),
    "ViT of transformers": (hugging_face_vit, images),
    "ConvNeXt of transformers": (hugging_face_convnext, images),
    "Swin of transformers": (hugging_face_swin, images),
    "BERT": (bert, ids),
    "RoBERTa": (roberta, ids),
    "DistilBERT": (distilbert, ids),
}


def unsettled(net):
    """Give the norms scales as real checkpoints have them: negative, zero, and far above 1."""
    with torch.no_grad():
        for module in net.modules():
            if is_supported_norm(module):
                module.weight.normal_(std=0.5)
                module.weight[:3] = torch.tensor([0.0, -7.0, 20.0])
                module.bias.normal_(std=0.5)
    return net.eval()


def logits(net, *args, **kwargs):
    output = net(*args, **kwargs)
    return output if isinstance(output, torch.Tensor) else output.logits


def relative_difference(y, expected):
    return ((y - expected).abs().max() / expected.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize("name", CONVERTED)
def test_conversion_is_exact_for_scales_of_any_sign(name):
    make, inputs = CONVERTED[name]
    net, x = unsettled(make()), inputs()
    expected = logits(net, x)
    assert (expected[0] - expected[1]).abs().max() > 1e-3 * expected.abs().max()
    ens = SigmaEnsemble.from_pretrained(net, 3)
    y = ens(x)
    for m in range(3):
        assert relative_difference(y[:, m], expected) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("name", CONVERTED)
def test_a_member_is_an_ordinary_network_of_the_library(name, head):
    make, inputs = CONVERTED[name]
    net, x = make(), inputs()
    linears = [n for n, m in net.named_modules() if type(m) is nn.Linear]
    ens = SigmaEnsemble(net, 3, head=linears[-1] if head else None).eval()
    y = ens(x)
    assert (y[:, 0] - y[:, 1]).abs().max() > 1e-4
    for m in range(3):
        member = ens.member(m)
        assert type(member) is type(net)
        assert not any(isinstance(module, SigmaNorm) for module in member.modules())
        assert relative_difference(logits(member, x), y[:, m]) < 1e-5


# What a tokenizer gives


TEXT = {"BERT": bert, "RoBERTa": roberta, "DistilBERT": distilbert}
LENGTHS = (7, 3, 5, 1)


def sentences(padding):
    x = ids()
    mask = (torch.arange(7) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": torch.where(mask > 0, x, padding), "attention_mask": mask}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TEXT)
def test_a_padded_sentence_is_the_sentence_alone(name, training):
    net = TEXT[name]()
    padding = net.config.pad_token_id
    ens = SigmaEnsemble(net, 3, head=[n for n, m in net.named_modules() if type(m) is nn.Linear][-1]).train(training)
    words = sentences(padding)
    y = ens(words)
    assert (y[:, 0] - y[:, 1]).abs().max() > 1e-3
    for b, length in enumerate(LENGTHS):
        alone = ens({key: value[b : b + 1, :length] for key, value in words.items()})
        assert_close(alone[0], y[b], rtol=1e-4, atol=1e-5)
    # And the mask is what does it.
    assert (ens(input_ids=words["input_ids"])[1:] - y[1:]).abs().max() > 1e-3


@torch.no_grad()
def test_token_types_reach_every_member():
    ens = SigmaEnsemble(bert(), 3).eval()
    words = sentences(0)
    types = torch.randint(2, (4, 7))
    y = ens(**words, token_type_ids=types)
    assert ((y - ens(**words)).abs().amax((0, 2)) > 1e-3).all()
    for m in range(3):
        assert_close(y[:, m], ens.member(m)(**words, token_type_ids=types).logits, rtol=1e-4, atol=1e-5)
    assert_close(ens({"token_type_ids": types, **words}), y, rtol=0, atol=0)


@torch.no_grad()
def test_embeddings_stand_for_ids():
    ens = SigmaEnsemble(bert(), 3).eval()
    words = sentences(0)
    embedded = ens.backbone.get_input_embeddings()(words["input_ids"])
    y = ens(inputs_embeds=embedded, attention_mask=words["attention_mask"])
    assert_close(y, ens(words), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("labels", [torch.tensor([0, 1, 2, 0]), torch.eye(3)[[0, 1, 2, 0]]], ids=["one", "several"])
def test_labels_leave_the_logits_as_they_are(labels, return_dict):
    """The backbone's own loss is over all rows, and nobody gets it."""
    ens = SigmaEnsemble(bert(), 3).eval()
    words = sentences(0)
    y = ens(words)
    assert_close(ens(**words, labels=labels, return_dict=return_dict), y, rtol=0, atol=0)
    assert_close(ens({"labels": labels, **words}, output_hidden_states=True), y, rtol=0, atol=0)


def test_labels_give_the_backbone_the_mean_loss_of_the_members():
    ens = SigmaEnsemble(bert(), 3).eval()
    seen = []
    ens.backbone.register_forward_hook(lambda _, args, output: seen.append(output.loss))
    y, labels = ens(**sentences(0), labels=torch.tensor([0, 1, 2, 0])), torch.tensor([0, 1, 2, 0])
    expected = F.cross_entropy(y.flatten(0, 1), labels.repeat_interleave(3))
    assert_close(seen[-1], expected)  # the passes before prove folding


def test_positions_shared_by_all_rows_come_after_what_has_the_batch():
    ens = SigmaEnsemble(bert(), 3).eval()
    words = sentences(0)
    with torch.no_grad():
        y = ens(**words)
        assert_close(ens(**words, position_ids=torch.arange(7)[None]), y, rtol=0, atol=0)


# Precision and memory


MIXED = {"ViT of timm": (timm_vit, images), "ViT of transformers": (hugging_face_vit, images), "BERT": (bert, ids)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_is_close_to_full(name, dtype):
    make, inputs = MIXED[name]
    ens = SigmaEnsemble(make(), 3, head=None).eval()
    x, y = inputs(), torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        expected = ens(x)
    with torch.autocast("cpu", dtype):
        mixed = ens(x)
        loss = sn.member_cross_entropy(mixed, y) + sn.diversity_loss(ens, tau=0.5, weight=1e-3)
    loss.backward()
    assert mixed.dtype == dtype
    assert relative_difference(mixed.float(), expected) < (0.05 if dtype == torch.bfloat16 else 0.01)
    for parameter in ens.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is None or parameter.grad.isfinite().all()
    assert all(ens.backbone.get_submodule(name).gamma.grad.any() for name in ens.gates())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["ViT of transformers", "BERT", "ViT of timm"])
def test_recomputed_activations_give_the_same_gradients(name, when):
    make, inputs = MIXED[name]
    net = make().train()
    x = inputs()

    def recompute(net):
        (net.set_grad_checkpointing if "timm" in name else net.activation_checkpointing_enable)()

    def gradients(recomputed):
        torch.manual_seed(1)
        backbone = copy.deepcopy(net)
        if recomputed and when == "before":
            recompute(backbone)
        ens = SigmaEnsemble(backbone, 3)
        if recomputed and when == "after":
            recompute(ens.backbone)
        calls = []
        for layer in ens._layers().values():
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
        ens(x)  # proves folding
        calls.clear()
        sn.member_cross_entropy(ens(x), torch.tensor([0, 1, 2, 0])).backward()
        return {n: p.grad for n, p in ens.named_parameters()}, len(calls) - len(ens.gates())

    expected, again = gradients(recomputed=False)
    assert again == 0
    found, again = gradients(recomputed=True)
    assert again >= 4  # two norms in each of two blocks
    assert_close(found, expected, rtol=1e-5, atol=1e-7)


# Training


def test_a_vision_transformer_learns_digits():
    import timm
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.images[:, None] / 8 - 1, dtype=torch.float32)
    y = torch.tensor(digits.target, dtype=torch.long)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    options = {"in_chans": 1, "num_classes": 10, "global_pool": "avg", "fc_norm": False}
    net = timm.create_model("vit_tiny_patch16_224", **sizes, **options)
    ens = SigmaEnsemble(backbones.Resized(net, 16), 4, head="net.head", regularize="*.norm2").train()
    optimizer = torch.optim.AdamW(sn.parameter_groups(ens, lr=5e-3, weight_decay=0.01))
    for _ in range(9):
        for rows in torch.randperm(1000).split(50):
            loss = sn.member_cross_entropy(ens(x[rows]), y[rows]) + sn.diversity_loss(ens, tau=0.5, weight=1e-4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    probs = ens.predict_proba(x[1000:])
    accuracy = (probs.argmax(1) == y[1000:]).float().mean().item()
    assert accuracy > 0.7  # chance is 0.1, and 0.89 was seen
    with torch.no_grad():
        shares = ens.eval()(x[1000:]).softmax(-1)
    assert sn.jensen_gap(shares, y[1000:]) > 0.01  # nats: the members differ
