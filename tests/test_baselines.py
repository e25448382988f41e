"""The peers, each against a computation member by member, and what the comparison rests on: same images, same seeds."""

import functools
import math

import pytest
import torch
from test_training import tiny
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import sigmaens as sn
from sigmaens import backbones, baselines, peers, results, training
from sigmaens.training import Recipe

SETTINGS = {
    "backbone": {"name": "narrow_resnet", "width": 8, "blocks": [1, 1]},
    "members": 4,
    "head": "fc",
    "sigma": {"regularize": "*.bn2", "tau": 0.1, "weight": 1e-3},
    "train": {"epochs": 1, "batch_size": 8, "lr": 0.05, "crop": 1},
}
PEERS = [
    method for method in baselines.PEERS if method != "lora_ensemble"
]  # transformers only: test_peers_transformers
FOLDED = ["mc_dropout", "batch_ensemble", "masksembles", "film_ensemble"]
BACKBONES = {
    "narrow": lambda: backbones.narrow_resnet(3, 1, width=8, blocks=(1, 1)),
    "bottleneck": lambda: backbones.ResNet(3, 1, width=8, blocks=(1, 1), block=backbones.Bottleneck),
    "wide": lambda: backbones.wide_resnet(3, 1, depth=10, factor=1),
}


def make(method, members=4, backbone="narrow", seed=0, **options):
    torch.manual_seed(seed)
    model = baselines.build(method, BACKBONES[backbone], {**SETTINGS, "members": members, "peers": {method: options}})
    return lively(model)


def lively(model):
    """Give norms statistics, scales and shifts that are not zero or one, as after training."""
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            for tensor in (norm.weight.data, norm.running_var):
                tensor.uniform_(0.5, 1.5)
            for tensor in (norm.bias.data, norm.running_mean):
                tensor.normal_(std=0.3)
    return model


def images(batch=5):
    return torch.randn(batch, 1, 8, 8)


def assert_near(found, expected):
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Member by member


def walk(state, x, members, train, times):
    """The narrow ResNet with a block a stage, written out for a list with a tensor for each member.

    Norms are shared: in training they take the statistics of all members together. `times(name, m, tensor)` is called
    with the input of every layer with weights, and with its output under the name "after " + name.
    """

    def weights(name, h, operation):
        y = (operation(times(name, m, t), state[f"{name}.weight"]) for m, t in enumerate(h))
        return [times(f"after {name}", m, t) for m, t in enumerate(y)]

    def norm(name, h):
        weight, bias, mean, var = (state[f"{name}.{k}"] for k in ("weight", "bias", "running_mean", "running_var"))
        if train:
            together = torch.cat(h)
            mean, var = together.mean((0, 2, 3)), together.var((0, 2, 3), unbiased=False)
        factor = weight / (var + 1e-5).sqrt()
        return [t * factor[:, None, None] + (bias - mean * factor)[:, None, None] for t in h]

    def conv(name, h, stride=1, padding=1):
        return weights(name, h, lambda t, w: F.conv2d(t, w, stride=stride, padding=padding))

    def relu(h):
        return [t.clamp_min(0) for t in h]

    h = relu(norm("bn1", conv("conv1", [x] * members)))
    for i, stride in enumerate((1, 2)):
        block = f"stages.{i}.0"
        y = relu(norm(f"{block}.bn1", conv(f"{block}.conv1", h, stride)))
        y = norm(f"{block}.bn2", conv(f"{block}.conv2", y))
        if i > 0:
            h = norm(f"{block}.shortcut.1", conv(f"{block}.shortcut.0", h, stride, padding=0))
        h = relu([a + b for a, b in zip(y, h, strict=True)])
    return torch.stack(weights("fc", [t.mean((2, 3)) for t in h], lambda t, w: t @ w.T), dim=1)


def spread(factors, like):
    return factors.view(factors.shape + (1,) * (like.dim() - factors.dim()))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("members", [1, 3])
def test_batch_ensemble_member_by_member(members, train):
    model, x = make("batch_ensemble", members).train(train), images()
    state = {k.removeprefix("backbone.").replace("conv.weight", "weight"): v for k, v in model.state_dict().items()}
    state["fc.weight"] = state["fc.linear.weight"]

    def times(name, m, t):
        if not name.startswith("after "):
            return t * spread(state[f"{name}.r_group"][m][None], t)
        name = name.removeprefix("after ")
        y = t * spread(state[f"{name}.s_group"][m][None], t)
        return y + state["fc.bias"][m] if name == "fc" else y

    assert_near(model(x), walk({k: v.clone() for k, v in state.items()}, x, members, train, times))


def unmasked(model):
    """The state by the backbone's own names, and the masks by those of the layers they precede."""
    state = {k.removeprefix("backbone."): v.clone() for k, v in model.state_dict().items()}
    masks = {k.removesuffix(".0.masks"): v for k, v in state.items() if k.endswith(".masks")}
    for name in masks:
        state |= {k.replace(f"{name}.1.", f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.1.")}
    return state, masks


@pytest.mark.parametrize(("method", "train"), [("masksembles", True), ("masksembles", False), ("mc_dropout", False)])
@pytest.mark.parametrize("members", [1, 3])
def test_masks_member_by_member(method, train, members):
    model, x = make(method, members, **({"rate": 0.4} if method == "mc_dropout" else {})).train(train), images()
    state, masks = unmasked(model)
    assert len(masks) == 6  # all layers but the one that sees the image

    def times(name, m, t):
        if name == "after fc":
            return t + state["fc.bias"]
        return t * spread(masks[name][m][None], t) if name in masks else t

    assert_near(model(x), walk(state, x, members, train, times))


def test_dropout_in_training_draws_a_mask_for_every_image_and_drops_channels():
    model, x = make("mc_dropout", rate=0.4).train(), images()
    state, masks = unmasked(model)
    dropped = []

    def times(name, m, t):
        if name == "after fc":
            return t + state["fc.bias"]
        if name not in masks:
            return t
        dropped.append(F.dropout(torch.ones(t.shape[:2]), 0.4))
        return t * spread(dropped[-1], t)

    torch.manual_seed(7)
    expected = walk(state, x, 1, True, times)
    torch.manual_seed(7)
    assert_near(model(x), expected)
    assert_near(torch.cat([d.flatten() for d in dropped]).unique(), torch.tensor([0, 1 / 0.6]))
    assert not torch.equal(dropped[0][0], dropped[0][1])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("members", [1, 3])
def test_film_members_are_networks_that_share_all_but_their_norms(members, backbone, train):
    model, x = make("film_ensemble", members, backbone).train(train), images()
    nets = []
    for m in range(members):
        net = BACKBONES[backbone]().train(train)
        own = {
            k.removeprefix("backbone.").replace(f"norms.{m}.", ""): v.clone()
            for k, v in model.state_dict().items()
            if ".norms." not in k or f".norms.{m}." in k
        }
        net.load_state_dict(own)
        nets.append(net)
    assert_near(model(x), torch.stack([net(x) for net in nets], dim=1))
    for m, net in enumerate(nets):
        for name, tensor in net.named_buffers():
            parent, _, leaf = name.rpartition(".")
            assert_near(model.backbone.get_submodule(f"{parent}.norms.{m}").get_buffer(leaf), tensor)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("backbone", "members"), [("narrow", 1), ("narrow", 4), ("bottleneck", 2), ("wide", 4)])
def test_packed_members_are_narrow_networks_side_by_side(backbone, members, train):
    model, x = make("packed_ensembles", members, backbone).train(train), images()
    share = 2 / members  # of the backbone's width, each
    narrow = {
        "narrow": lambda: backbones.narrow_resnet(3, 1, width=int(8 * share), blocks=(1, 1)),
        "bottleneck": lambda: backbones.ResNet(
            3, 1, width=int(8 * share), blocks=(1, 1), block=backbones.Bottleneck, stem=int(8 * share)
        ),
        "wide": lambda: backbones.ResNet(
            3, 1, width=int(16 * share), blocks=(1, 1, 1), block=backbones.WideBlock, stem=int(16 * share)
        ),
    }[backbone]
    nets = []
    for m in range(members):
        net = narrow().train(train)
        own = {k.removeprefix("backbone."): v for k, v in model.state_dict().items()}
        own["fc.weight"] = own["fc.weight"].flatten(0, 1)
        net.load_state_dict({k: v.chunk(members)[m].clone() if v.dim() else v.clone() for k, v in own.items()})
        nets.append(net)
    assert_near(model(x), torch.stack([net(x) for net in nets], dim=1))
    for m, net in enumerate(nets):
        for name, tensor in net.named_buffers():
            found = model.backbone.get_buffer(name)
            assert_near(found.chunk(members)[m] if found.dim() else found, tensor)


def test_packed_members_start_as_the_narrow_networks_they_are():
    wide = make("packed_ensembles", 4, "wide").backbone.stages[2][0].conv2.weight  # 128 channels in 4 groups of 32
    assert wide.shape == (128, 32, 3, 3)
    assert wide.std().item() == pytest.approx(math.sqrt(2 / (32 * 9)), rel=0.03)


def test_film_members_start_apart_as_in_the_authors_code():
    model = baselines.build("film_ensemble", BACKBONES["wide"], {**SETTINGS, "peers": {"film_ensemble": {"gain": 2.0}}})
    relative = []
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            bound = 2 * math.sqrt(6 / (4 + norm.num_features))
            relative += [norm.weight / bound, norm.bias / bound]
    relative = torch.cat(relative)
    assert 0.99 < relative.abs().max() <= 1
    assert relative.mean().item() == pytest.approx(0, abs=0.05)
    assert relative.std().item() == pytest.approx(1 / math.sqrt(3), rel=0.05)  # uniform


def test_the_stem_of_mimo_starts_as_the_backbones():
    weight = make("mimo", 12, "wide").backbone.conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (16 * 9)), rel=0.05)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_mimo_predicts_from_the_image_given_to_every_member(backbone):
    model, x = make("mimo", 3, backbone).eval(), images()
    state = {k.removeprefix("backbone."): v for k, v in model.state_dict().items()}
    state["conv1.weight"] = state["conv1.weight"].unflatten(1, (3, 1)).sum(1)
    for m in range(3):
        net = BACKBONES[backbone]().eval()
        net.load_state_dict(state | {k: state[k].chunk(3)[m] for k in ("fc.weight", "fc.bias")})
        assert_near(model(x)[:, m], net(x))


def test_mimo_trains_every_member_on_all_images_in_its_own_order():
    model, x = make("mimo", 3).train(), images(6)
    net = backbones.narrow_resnet(9, 3, width=8, blocks=(1, 1)).train()
    net.load_state_dict({k.removeprefix("backbone."): v.clone() for k, v in model.state_dict().items()})
    torch.manual_seed(5)
    logits = model(x)
    torch.manual_seed(5)
    orders = [torch.randperm(6).tolist() for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    side_by_side = net(torch.cat([x[order] for order in orders], dim=1))
    for m, order in enumerate(orders):
        for row, image in enumerate(order):
            assert_near(logits[image, m], side_by_side[row, 3 * m : 3 * m + 3])


# Nearest identities


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize(
    ("method", "members", "options"),
    [
        ("mc_dropout", 3, {"rate": 0.0}),
        ("masksembles", 3, {"scale": 1.0}),
        ("masksembles", 1, {"scale": 2.0}),
        ("batch_ensemble", 1, {}),
        ("film_ensemble", 1, {}),
        ("mimo", 1, {}),
        ("packed_ensembles", 1, {"alpha": 1}),
    ],
)
def test_without_what_makes_it_an_ensemble_a_peer_is_its_backbone(method, members, options, backbone, train):
    plain = lively(BACKBONES[backbone]())
    settings = {**SETTINGS, "members": members, "peers": {method: options}}
    model = baselines.build(method, lambda: plain, settings).train(train)
    if method == "batch_ensemble":
        for name, parameter in model.named_parameters():
            if name.endswith("_group"):
                nn.init.ones_(parameter)
            elif parameter.dim() == 2 and name.endswith("bias"):
                parameter.data.copy_(plain.get_parameter(name.removeprefix("backbone.")))
    if method in ("film_ensemble", "mimo", "packed_ensembles"):
        own = {k: k.removeprefix("backbone.").replace("norms.0.", "") for k in model.state_dict()}
        state = {k: plain.state_dict()[v].view_as(model.state_dict()[k]) for k, v in own.items()}
        model.load_state_dict(state)
    x = images()
    expected = plain.train(train)(x)
    logits = model(x)
    for m in range(logits.shape[1]):
        assert_near(logits[:, m], expected)


def test_a_peer_leaves_its_backbone_as_it_was():
    for method in PEERS:
        plain = lively(BACKBONES["wide"]())
        before = {k: v.clone() for k, v in plain.state_dict().items()}
        model = baselines.build(method, lambda plain=plain: plain, SETTINGS).train()
        model(images()).sum().backward()
        assert_close(plain.state_dict(), before, rtol=0, atol=0)
        assert all(p.grad is None for p in plain.parameters())


# What the comparison rests on


@pytest.mark.parametrize("method", PEERS)
def test_every_member_sees_every_image(method):
    model = make(method).train()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.eval()  # or else every logit hangs on the whole batch
    x = images().requires_grad_()
    logits = model(x)
    assert logits.shape == (5, 1 if method == "mc_dropout" else 4, 3)
    for b in range(5):
        for m in range(logits.shape[1]):
            (gradient,) = torch.autograd.grad(logits[b, m].norm(), x, retain_graph=True)
            seen = gradient.flatten(1).abs().amax(1) > 0
            assert seen[b]
            if method != "mimo":
                assert seen.sum() == 1


@pytest.mark.parametrize("method", PEERS)
def test_members_predict_from_the_image_alone_and_differ(method):
    model, x = make(method).eval(), images(6)
    logits = model(x)
    torch.manual_seed(99)
    assert_close(model(x), logits, rtol=0, atol=0)
    assert_near(torch.cat([model(x[:1]), model(x[1:]).flip(0)]), torch.cat([logits[:1], logits[1:].flip(0)]))
    for m in range(1, 4):
        assert (logits[:, m] - logits[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("method", PEERS)
def test_a_saved_peer_predicts_as_before(tmp_path, method, backbone):
    model, x = make(method, backbone=backbone).eval(), images()
    sn.save(model, tmp_path / "model.safetensors")
    other = make(method, backbone=backbone, seed=1).eval()
    assert (other(x) - model(x)).abs().max() > 1e-3
    assert_close(sn.load(other, tmp_path / "model.safetensors")(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["mc_dropout", "masksembles"])
def test_masks_come_from_the_seed_and_are_kept(method):
    first, again, other = (make(method, seed=seed) for seed in (0, 0, 1))
    masks = [{k: v for k, v in model.state_dict().items() if k.endswith("masks")} for model in (first, again, other)]
    assert len(masks[0]) == 6
    assert_close(masks[0], masks[1], rtol=0, atol=0)
    assert any((masks[0][name] != masks[2][name]).any() for name in masks[0])
    assert not any(name.endswith("masks") for name, _ in first.named_parameters())


@functools.cache
def trained(method):
    model, history = training.train(method, tiny(), SETTINGS, seed=3)
    return model.state_dict(), history


@pytest.mark.parametrize("method", PEERS)
def test_training_repeats_from_its_seed_without_a_penalty(method):
    weights, history = trained(method)
    assert history[0]["penalty"] == 0
    torch.manual_seed(99)
    model, again = training.train(method, tiny(), SETTINGS, seed=3)
    assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert again == history
    other, _ = training.train(method, tiny(), SETTINGS, seed=4)
    assert max((a - b).abs().max() for a, b in zip(other.state_dict().values(), weights.values(), strict=True)) > 0.01


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", PEERS)
def test_a_run_that_broke_off_ends_as_one_that_did_not(tmp_path, method):
    recipe, steps = Recipe(epochs=2, batch_size=8, lr=0.05, crop=1), []

    def kill(model):
        steps.append(model)
        if len(steps) == 5:  # in the second epoch
            raise Killed
        return torch.zeros(())

    state = tmp_path / "fit.pt"
    with pytest.raises(Killed):
        training.fit(make(method), tiny(), recipe, seed=1, penalty=kill, state=state)
    runs = []
    for path in (state, None):
        torch.manual_seed(99)
        model = make(method)
        history = training.fit(model, tiny(), recipe, seed=1, state=path)
        runs.append((model.state_dict(), history))
    assert_close(runs[0][0], runs[1][0], rtol=0, atol=0)
    assert runs[0][1] == runs[1][1]
    assert torch.load(state, weights_only=True)["history"] == runs[0][1]


@pytest.mark.parametrize("method", PEERS)
def test_peers_learn(method):
    dataset, model = tiny(60), make(method)
    history = training.fit(model, dataset, Recipe(epochs=20, batch_size=12, lr=0.05, schedule="one_cycle"), seed=0)
    assert history[-1]["cross_entropy"] < 0.6 * history[0]["cross_entropy"]
    logits = training.predict(model, dataset.test.images, dataset, batch_size=7)
    assert logits.shape == (60, 4, 3)
    assert (logits.mean(1).argmax(1) == dataset.test.labels).mean() > 0.8


@pytest.mark.parametrize("method", PEERS)
def test_half_precision(method):
    x, logits = images(8), {}
    for half in (True, False):
        model = make(method).train()
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits[half] = model(x)
    assert_close(logits[True].float(), logits[False], rtol=0.1, atol=0.15)


def test_vectors_of_batch_ensemble_do_not_decay():
    groups = sn.parameter_groups(make("batch_ensemble"), lr=0.1, weight_decay=0.5)
    vectors = {p for name, p in make("batch_ensemble").named_parameters() if name.endswith(("r_group", "s_group"))}
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.1, 0.5), (0.1, 0.0)]
    assert len(groups[1]["params"]) == len(vectors) == 2 * 7
    assert all(p.shape[0] == 4 and p.dim() == 2 for p in groups[1]["params"])
    for method in ("film_ensemble", "masksembles"):
        assert [g["weight_decay"] for g in sn.parameter_groups(make(method), lr=0.1, weight_decay=0.5)] == [0.5]


def test_vectors_of_batch_ensemble_start_around_one():
    model = baselines.build("batch_ensemble", lambda: backbones.wide_resnet(3, 1, depth=10, factor=2), SETTINGS)
    vectors = torch.cat([p.flatten() for name, p in model.named_parameters() if name.endswith("_group")])
    assert vectors.mean().item() == pytest.approx(1, abs=0.02)
    assert vectors.std().item() == pytest.approx(0.5, abs=0.02)


# Masks


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("members", [1, 2, 4, 16])
@pytest.mark.parametrize("channels", [4, 16, 64, 100])
def test_fixed_masks_use_all_channels_equally(channels, members, scale):
    masks = peers.fixed_masks(channels, members, scale)
    assert masks.shape == (members, channels)
    assert set(masks.unique().tolist()) <= {0.0, 1.0}
    assert masks.any(dim=0).all()
    share = 1 / (scale * (1 - (1 - 1 / scale) ** members))
    assert masks.sum(dim=1).tolist() == [math.ceil(round(channels * share, 9))] * members


@pytest.mark.parametrize("scale", [1.5, 2.0, 4.0])
def test_two_masks_share_one_part_in_scale(scale):
    masks = peers.fixed_masks(2048, 4, scale)
    shared = masks @ masks.T / masks[0].sum()
    assert shared[~torch.eye(4, dtype=torch.bool)].mean().item() == pytest.approx(1 / scale, abs=0.03)


# Counts: paper, Table 1, millions of parameters with 100 classes and M = 4

COUNTS = {
    "resnet50": {
        "single": (23.705, 23.70),
        "batch_ensemble": (23.911, None),  # 23.81 in the paper, which fits s without r
        "mimo": (24.325, 24.33),
        "masksembles": (23.705, None),  # 23.81 with masks counted as parameters, which they are not
        "film_ensemble": (23.865, 23.87),
        "packed_ensembles": (23.965, None),  # 15.55 with γ = 2 in some layers
        "sigma": (24.381, 24.38),
    },
    "wide_resnet": {
        "single": (36.547, 36.55),
        "batch_ensemble": (36.656, 36.65),
        "mimo": (36.741, 36.74),
        "masksembles": (36.547, None),  # 36.59, as above
        "film_ensemble": (36.601, 36.60),
        "packed_ensembles": (36.640, None),  # 36.62 without the shifts of the convolutions
        "sigma": (36.760, 36.76),
    },
}


@pytest.mark.parametrize("backbone", COUNTS)
def test_parameters_of_the_paper(backbone):
    plain = backbones.build(backbone, classes=100, in_channels=3)
    for method, (ours, paper) in COUNTS[backbone].items():
        count = results.parameters(baselines.build(method, lambda: plain, SETTINGS)) / 1e6
        assert count == pytest.approx(ours, abs=5e-4)
        assert paper is None or count == pytest.approx(paper, abs=7e-3)  # some of the paper's are cut, not rounded


def test_single_networks_of_the_paper():
    assert round(results.parameters(backbones.resnet50(10)) / 1e6, 2) == 23.52
    assert round(results.parameters(backbones.wide_resnet(10)) / 1e6, 2) == 36.49


def test_multiply_adds_of_a_prediction():
    image = torch.zeros(1, 1, 8, 8)
    one = results.multiply_adds(BACKBONES["narrow"](), image)
    for method in FOLDED:
        assert results.multiply_adds(make(method), image) == 4 * one
    stem, head = 64 * 9 * 8, 16 * 3
    assert results.multiply_adds(make("mimo"), image) == one + 3 * stem + 3 * head
    # α²/M = 1 of the backbone's, but α of the stem's and of the head's.
    assert results.multiply_adds(make("packed_ensembles"), image) == one + stem + head


# Refusals


@pytest.mark.parametrize("members", [2, 4, 8, 16])
def test_packed_ensembles_grow_as_far_as_their_channels(members):
    model = baselines.build(
        "packed_ensembles", lambda: backbones.narrow_resnet(10, 1), {**SETTINGS, "members": members}
    )
    assert model(images()).shape == (5, members, 10)
    assert model.backbone.stages[0][0].conv1.weight.shape == (32, 32 // members, 3, 3)


def test_packed_groups_are_never_lowered():
    model = make("packed_ensembles", 2, gamma=4)
    groups = [layer.groups for layer in model.backbone.modules() if isinstance(layer, nn.Conv2d)]
    assert groups == [1] + [8] * 5
    assert model.backbone.fc.groups == 2
    for options, message in [
        ({"members": 5}, r"layer 'conv1' has 2 × 8 channels, which 5 groups \(members 5 × gamma 1\) do not divide"),
        ({"gamma": 8}, r"2 × 8 channels, which 32 groups \(members 4 × gamma 8\)"),
        ({"alpha": 1.3}, r"1\.3 × 8 channels"),
    ]:
        with pytest.raises(ValueError, match=message):
            make("packed_ensembles", **options)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("mc_dropout", {"rate": 1.0}, r"rate must be a probability in \[0, 1\), or None .*, not 1\.0"),
        ("mc_dropout", {"p": 0.1}, r"settings of 'mc_dropout': unknown \['p'\], known \['rate'\]"),
        ("masksembles", {"scale": 0.5}, r"scale must be a number ≥ 1, not 0\.5"),
        ("film_ensemble", {"gain": 0}, "gain must be a number > 0, not 0"),
        ("packed_ensembles", {"alpha": 0}, "alpha must be a number > 0, not 0"),
        ("packed_ensembles", {"gamma": 1.0}, r"gamma must be an integer ≥ 1, not 1\.0"),
        ("packed_ensembles", {"head": "fc"}, r"unknown \['head'\], known \['alpha', 'gamma'\]"),
        ("mimo", {"rho": 0}, r"unknown \['rho'\], known \[\]"),
    ],
)
def test_settings_that_are_unknown_or_out_of_range_are_named(method, options, message):
    with pytest.raises(ValueError, match=message):
        make(method, **options)


@pytest.mark.parametrize("method", PEERS)
def test_a_peer_needs_members(method):
    with pytest.raises(ValueError, match="members must be an integer ≥ 1, not 0"):
        make(method, members=0)


@pytest.mark.parametrize(
    ("method", "layers", "message"),
    [
        ("masksembles", [nn.Conv1d(1, 4, 3)], "layer '0' is a Conv1d"),
        ("batch_ensemble", [nn.Conv2d(1, 4, 3), nn.ConvTranspose2d(4, 4, 3)], "layer '1' is a ConvTranspose2d"),
        ("mimo", [nn.Linear(4, 4)], "layer '0' is a Linear"),
        ("packed_ensembles", [nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)], "layer '1' is a GroupNorm"),
        ("packed_ensembles", [nn.Conv2d(1, 4, 3), nn.Linear(4, 4)], "layer '1' is a linear layer before the head"),
        ("film_ensemble", [nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4)], "layer '1', InstanceNorm2d, has no scale"),
        ("film_ensemble", [nn.BatchNorm2d(4, affine=False)], "layer '0', BatchNorm2d, has no scale"),
    ],
)
def test_layers_that_cannot_be_converted_are_named(method, layers, message):
    network = nn.Sequential(*layers)
    network.add_module("fc", nn.Linear(4, 3))
    with pytest.raises(TypeError, match=message):
        baselines.build(method, lambda: network, SETTINGS)


@pytest.mark.parametrize("method", ["mimo", "packed_ensembles"])
def test_an_unknown_head_is_named(method):
    with pytest.raises(
        ValueError, match=r"head 'classifier' is no linear layer of the backbone; the last are \['fc'\]"
    ):
        baselines.build(method, BACKBONES["narrow"], {**SETTINGS, "head": "classifier"})


def test_film_needs_norms():
    with pytest.raises(ValueError, match="Sequential has no normalisation layers"):
        baselines.build("film_ensemble", lambda: nn.Sequential(nn.Linear(2, 2)), SETTINGS)


@pytest.mark.parametrize("depth", [4, 9, 27])
def test_wide_networks_have_fitting_depths(depth):
    with pytest.raises(ValueError, match=rf"depth must be 6n \+ 4 with n ≥ 1, not {depth}"):
        backbones.build("wide_resnet", 3, 1, depth=depth)
