"""Training that goes on slim: the rule, the gradients, the optimiser's state, and runs that break off."""

import functools

import numpy as np
import pytest
import torch
from test_training import SETTINGS, Killed, assert_same, die, fresh, tiny
from torch import nn
from torch.optim import swa_utils
from torch.testing import assert_close

from sigmaens import backbones, baselines, diversity_loss, member_cross_entropy, paths, training
from sigmaens.ensemble import SigmaEnsemble, parameter_groups, save
from sigmaens.slim import Settling, SlimEnsemble, close, slim
from sigmaens.training import Recipe

# Gates polarise within two epochs of 4 steps.
RECIPE = Recipe(epochs=7, batch_size=8, lr=0.05, schedule="constant", crop=1)
RULE = Settling(patience=1)
SLIM = {**SETTINGS, "slim": {"regularize": "*.bn1", "tau": 0.1, "weight": 0.1, "threshold": 0.01, "patience": 1}}


def inner(seed=0, members=2):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SigmaEnsemble(
            backbones.narrow_resnet(3, 1, width=8, blocks=[1, 1]), members, head="fc", regularize="*.bn1"
        )


class Penalty:
    """A strong diversity loss that calls `die` at a step."""

    def __init__(self, step=-1):
        self.steps, self.step = 0, step

    def __call__(self, model):
        if self.steps == self.step:
            die()
        self.steps += 1
        return diversity_loss(model, tau=0.1, weight=0.1)


def run(model, rule=RULE, **options):
    return training.fit(model, tiny(32), RECIPE, seed=5, penalty=Penalty(), slim=rule, **options)


@functools.cache
def uninterrupted():
    model = inner()
    return model, run(model)


# The rule -------------------------------------------------------------------------------------------------------------


def gates(*rows):
    return {"a": torch.tensor(rows)[:, :1], "b": torch.tensor(rows)[:, 1:]}


def test_what_an_epoch_did_to_the_gates():
    rule = Settling(threshold=0.1)
    before = gates([0.5, 0.05, 0.9, 0.2], [0.4, 0.95, 0.8, 0.1])
    after = gates([0.05, 0.5, 0.95, 0.08], [0.1, 0.4, 0.97, 0.05])
    #  closed: .05 and .1, .08 and .05; between: .5, .4; crossed: .5→.05, .4→.1, .05→.5, .2→.08;
    #  moved: the second and the third channel, while nobody owns the first and the fourth any more.
    assert rule.observe(before, after) == {"closed": 0.5, "between": 0.25, "crossed": 0.5, "moved": 0.5}
    same = rule.observe(after, after)
    assert same == {"closed": 0.5, "between": 0.25, "crossed": 0.0, "moved": 0.0}


@pytest.mark.parametrize(
    ("crossed", "closed", "slim", "settled"),
    [
        ([0, 0], 0.5, 0.0, False),  # too few epochs
        ([0.1, 0, 0, 0], 0.5, 0.0, True),
        ([0, 0.1, 0, 0], 0.5, 0.0, False),
        ([0, 0, 0, 0.1], 0.5, 0.0, False),
        ([0, 0, 0], 0.0, 0.0, False),  # nothing to leave out
        ([0, 0, 0], 0.5, 0.5, False),  # left out already
        ([0, 0, 0], 0.6, 0.5, True),  # more has closed since
    ],
)
def test_when_gates_have_settled(crossed, closed, slim, settled):
    history = [{"crossed": c, "closed": closed, "slim": slim} for c in crossed]
    assert Settling(patience=3).settled(history) is settled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, r"threshold must be a number in \(0, 1\), not 0.0"),
        ({"threshold": 1.0}, "threshold must be"),
        ({"threshold": "0.1"}, "threshold must be .* not '0.1'"),
        ({"patience": 0}, "patience must be an integer ≥ 1, not 0"),
        ({"patience": True}, "patience must be"),
        ({"patience": 1.5}, "patience must be"),
    ],
)
def test_rules_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Settling(**options)


def test_closing_is_for_good_and_spares_shifts():
    ens = inner()
    layer = ens.backbone.get_submodule(ens.regularized[0])
    other = next(norm for name, norm in ens._layers().items() if name not in ens.regularized)
    with torch.no_grad():
        layer.gamma[0, :3] = -5.0  # a gate of 0.0067
        other.gamma[0, 0] = -9.0
    assert close(ens, 0.01) == 3 / sum(g.numel() for g in ens.regularized_gates().values())
    assert layer.gates[0, :3].tolist() == [0, 0, 0]
    assert layer.gates[0, 3:].min() > 0
    assert other.gates[0, 0] > 0
    optimizer = torch.optim.Adam(parameter_groups(ens, 0.1))
    (ens(torch.randn(4, 1, 8, 8)).square().mean() + diversity_loss(ens, 0.1)).backward()
    optimizer.step()
    assert all(p.isfinite().all() for name, p in ens.named_parameters() if "gamma" not in name)
    assert layer.gates[0, :3].tolist() == [0, 0, 0]
    assert not any(p.isnan().any() for p in ens.parameters())

    pretrained = SigmaEnsemble.from_pretrained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 2)
    with torch.no_grad():
        pretrained.backbone[1].bias[1:] = 0.5
        pretrained.backbone[1].gamma.fill_(-6.0)
    assert close(pretrained, 0.01) == 0.25
    assert pretrained.gates()["1"].gt(0).tolist() == [[False, True, True, True]] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
        lambda p: torch.optim.Adam(p, 1e-3, weight_decay=1e-2, eps=1e-3),
        lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1, eps=1e-3),
    ],
    ids=["sgd", "nesterov", "adam", "adamw"],
)
def test_closed_gates_stay_so_with_weight_decay_and_in_averages(make):
    ens = inner()
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    optimizer = make(ens.parameters())  # which decays the scale logits too

    def step(model):
        optimizer.zero_grad()
        (member_cross_entropy(model.train()(x), y) + diversity_loss(ens, 0.1, 1e-2)).backward()
        optimizer.step()

    for _ in range(2):
        step(ens)
    with torch.no_grad():
        for name in ens.regularized:
            ens.backbone.get_submodule(name).gamma[:, ::2] = -6.0
    assert close(ens, 0.01) == 0.5
    slimmed = slim(ens, x, threshold=0.0, share=True)
    averages = [swa_utils.AveragedModel(ens, multi_avg_fn=fn) for fn in (None, swa_utils.get_ema_multi_avg_fn(0.5))]
    for _ in range(3):
        step(slimmed)
        for average in averages:
            average.update_parameters(ens)
    for model in (ens, *(average.module for average in averages)):
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        for name, gates in model.regularized_gates().items():
            assert gates.eq(0).equal(~slimmed.backbone.get_submodule(name).opened())
    assert_close(slimmed.eval()(x), ens.eval()(x), rtol=1e-5, atol=1e-5)


# Gradients and the optimiser ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_slim_steps_are_those_of_the_full_pass(dtype, tolerance, optimizer):
    torch.manual_seed(0)
    x, y = torch.randn(6, 1, 8, 8, dtype=dtype), torch.tensor([0, 1, 2, 0, 1, 2])
    makers = {
        "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9),
        "adam": lambda groups: torch.optim.Adam(groups, eps=1e-3),
    }

    def steps(shared):
        ens = inner(members=3).to(dtype)
        make = makers[optimizer](parameter_groups(ens, 0.01, 1e-3))
        running, gradients = ens, []
        for step in range(6):
            if step == 3:
                with torch.no_grad():  # by now there is momentum
                    for name in ens.regularized:
                        layer = ens.backbone.get_submodule(name)
                        layer.gamma.masked_fill_(torch.randperm(layer.gamma.numel()).view_as(layer.gamma) % 3 > 0, -9.0)
                assert close(ens, 0.01) > 0.5
                running = slim(ens, x, threshold=0.0, share=True) if shared else ens
                assert not shared or min(min(running.report[name].kept) for name in ens.regularized) < 8
            make.zero_grad()
            loss = member_cross_entropy(running.train()(x), y) + diversity_loss(ens, 0.1, 1e-2)
            loss.backward()
            gradients.append({name: p.grad.clone() for name, p in ens.named_parameters()})
            make.step()
        return gradients, ens

    torch.manual_seed(1)
    full, full_ens = steps(shared=False)
    torch.manual_seed(1)
    slimmed, slim_ens = steps(shared=True)
    for before, after in zip(full, slimmed, strict=True):
        for name in before:
            assert_close(after[name], before[name], rtol=tolerance, atol=tolerance, msg=name)
    assert_close(slim_ens.eval()(x), full_ens.eval()(x), rtol=10 * tolerance, atol=10 * tolerance)


# The loop -------------------------------------------------------------------------------------------------------------


def test_training_goes_on_slim_once_the_gates_have_settled(monkeypatch):
    made = []
    method = SigmaEnsemble.slim
    monkeypatch.setattr(SigmaEnsemble, "slim", lambda *args, **kw: made.append(method(*args, **kw)) or made[-1])
    model = inner()
    history = run(model)
    started = next(row["epoch"] for row in history if row["slim"])
    before = history[:started]
    assert 1 < started < RECIPE.epochs - 1
    assert not any(row["slim"] for row in before)
    assert before[-1]["crossed"] == 0
    assert RULE.settled(before)
    assert not RULE.settled(before[:-1])
    assert history[started]["slim"] == before[-1]["closed"] >= 0.3
    assert len(made) == len({row["slim"] for row in history} - {0.0})
    shut = sum(gate.eq(0).sum().item() for gate in model.regularized_gates().values())
    assert shut / sum(gate.numel() for gate in model.regularized_gates().values()) == history[-1]["slim"]
    # It has run: those parameters are the ensemble's, and the closed channels left no trace in the statistics.
    assert {id(p) for p in made[-1].parameters()} == {id(p) for p in model.parameters()}
    layer = model.backbone.get_submodule(model.regularized[0])
    assert layer.running_mean.diff(dim=0).abs().sum() > 0
    dataset = tiny(32)
    logits = [training.predict(m, dataset.test.inputs, dataset) for m in (model, made[-1])]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


def test_without_the_rule_nothing_is_left_out_and_the_gates_are_watched():
    model = inner()
    history = run(model, rule=None)
    assert [row["slim"] for row in history] == [0.0] * RECIPE.epochs
    assert history[-1]["closed"] > 0.3
    assert history[0]["between"] > history[-1]["between"]
    assert all(gate.min() > 0 for gate in model.regularized_gates().values())
    assert "closed" not in training.fit(fresh("single"), tiny(32), Recipe(epochs=1, batch_size=8), seed=0)[0]
    # Until the gates have settled the two runs are one.
    slim_history = uninterrupted()[1]
    started = next(row["epoch"] for row in slim_history if row["slim"])
    assert history[:started] == slim_history[:started]


@pytest.mark.parametrize("epoch", range(1, RECIPE.epochs))
def test_a_slim_run_that_broke_off_ends_as_one_that_did_not(tmp_path, epoch):
    state = tmp_path / "fit.pt"
    with pytest.raises(Killed):
        training.fit(inner(), tiny(32), RECIPE, seed=5, penalty=Penalty(4 * epoch + 1), slim=RULE, state=state)
    model, penalty = inner(), Penalty()
    history = training.fit(model, tiny(32), RECIPE, seed=5, penalty=penalty, slim=RULE, state=state)
    assert penalty.steps == 4 * (RECIPE.epochs - epoch)
    expected, rows = uninterrupted()
    assert_same((model.state_dict(), history), (expected.state_dict(), rows))


class Shutting(Penalty):
    """A penalty that shuts a quarter of the gates of the one layer at the steps given, and counts the steps."""

    def __init__(self, *shuts, step=-1):
        super().__init__(step)
        self.shuts = shuts

    def __call__(self, model):
        if self.steps in self.shuts:
            part = self.shuts.index(self.steps)
            with torch.no_grad():
                for name in model.regularized:
                    model.backbone.get_submodule(name).gamma[:, part::4] = -50.0
        return 0 * super().__call__(model)


@pytest.mark.parametrize("broken", [None, 4 * 3 + 1, 4 * 5 + 1, 4 * 6 + 1])
def test_gates_that_settle_later_go_later(tmp_path, broken, monkeypatch):
    made = []
    method = SigmaEnsemble.slim
    monkeypatch.setattr(SigmaEnsemble, "slim", lambda *args, **kw: made.append(method(*args, **kw)) or made[-1])
    # Scale logits that learn this slowly cross nothing by themselves.
    recipe = Recipe(epochs=7, batch_size=8, lr=0.02, schedule="constant", gamma_multiplier=0.1)
    state = tmp_path / "fit.pt"

    def start(penalty):
        model = inner()
        with torch.no_grad():
            model.backbone.stages[0][0].bn2.gamma[0, 0] = -6.0
        return model, training.fit(model, tiny(32), recipe, seed=5, penalty=penalty, slim=RULE, state=state)

    steps = 0
    if broken is not None:
        with pytest.raises(Killed):
            start(Shutting(1, 4 * 3, step=broken))
        steps = 4 * (broken // 4)
        made.clear()
    penalty = Shutting(1, 4 * 3)
    penalty.steps = steps
    model, history = start(penalty)
    assert [row["slim"] for row in history] == [0, 0, 0.25, 0.25, 0.25, 0.5, 0.5]
    assert [row["crossed"] for row in history] == [0.25, 0, 0, 0.25, 0, 0, 0]
    assert len(made) == (1 if broken and broken >= 4 * 5 else 2)
    assert [made[-1].report[name].kept for name in model.regularized] == [(4, 4), (8, 8)]
    # A small gate of a layer that is not regularised has not been closed.
    other = "stages.0.0.bn2"
    assert 0 < model.gates()[other][0, 0] < RULE.threshold
    assert made[-1].report[other].kept == (8, 8)
    dataset = tiny(32)
    logits = [training.predict(m, dataset.test.inputs, dataset) for m in (model, made[-1])]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


def test_only_an_ensemble_of_sigma_norms_can_become_slim():
    with pytest.raises(TypeError, match="only a SigmaEnsemble can become slim, not a DeepEnsemble"):
        training.fit(fresh("single"), tiny(), RECIPE, seed=0, slim=RULE)


def test_slim_training_in_bfloat16_leaves_an_ordinary_ensemble():
    model = inner()
    recipe = Recipe(epochs=7, batch_size=8, lr=0.05, schedule="constant", precision="bf16")
    history = training.fit(model, tiny(32), recipe, seed=5, penalty=Penalty(), slim=RULE)
    assert history[-1]["slim"] > 0
    assert model(torch.randn(2, 1, 8, 8)).dtype == torch.float32


@pytest.mark.parametrize("change", ["rule", "regularize", "dropout"])
def test_the_state_of_a_run_with_other_settings_is_ignored(tmp_path, change):
    def start(changed):
        net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5 if changed and change == "dropout" else 0.1)),
            *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)),
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for module in net:
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
            ens = SigmaEnsemble(net, 2, regularize="4" if changed and change == "regularize" else "1")
        rule = Settling(patience=2 if changed and change == "rule" else 1)
        penalty = Penalty()
        training.fit(ens, tiny(), Recipe(epochs=1, batch_size=8), seed=0, penalty=penalty, slim=rule, state=state)
        return penalty.steps

    state = tmp_path / "fit.pt"
    assert start(False) == 3
    assert start(False) == 0
    assert start(True) == 3


# The method -----------------------------------------------------------------------------------------------------------


def test_the_method_is_sigma_with_its_changes(tmp_path):
    settings = paths.merge(SLIM, {"train": {"epochs": 7, "schedule": "constant"}})
    settings["train"].pop("milestones")
    dataset = tiny(32)
    model, history = training.train("sigma_slim", dataset, settings, seed=0)
    assert type(model) is SigmaEnsemble
    assert model.regularized == ("stages.0.0.bn1",)
    assert history[-1]["slim"] > 0
    other = model.backbone.get_submodule("stages.0.0.bn2")
    with torch.no_grad():
        other.gamma[0, 0] = -6.0  # a small gate that training has not closed
    save(model, tmp_path / "model.safetensors")
    restored = training.restore("sigma_slim", tmp_path / "model.safetensors", dataset, settings)
    assert isinstance(restored, SlimEnsemble)
    report = restored.report["stages.0.0.bn1"]
    assert sum(report.kept) == round((1 - history[-1]["slim"]) * 2 * report.features) < 2 * report.features
    assert restored.report["stages.0.0.bn2"].kept == (4, 4)
    logits = [training.predict(m, dataset.test.inputs, dataset) for m in (model, restored)]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)


def test_settings_of_the_method_are_those_of_sigma_but_for_its_own():
    assert baselines.sigma_settings("sigma", SLIM) == SETTINGS["sigma"]
    own = baselines.sigma_settings("sigma_slim", SLIM)
    assert (own["regularize"], own["weight"], own["patience"]) == ("*.bn1", 0.1, 1)
    for lacking in (SETTINGS, {**SETTINGS, "slim": {}}):
        with pytest.raises(ValueError, match="'sigma_slim' needs the settings of `slim`"):
            training.train("sigma_slim", tiny(), lacking, seed=0)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"regularize": "*.bn1", "patience": 1}, r"missing \['threshold'\], unknown \[\]"),
        ({**SLIM["slim"], "treshold": 0.1}, r"missing \[\], unknown \['treshold'\]"),
    ],
)
def test_settings_of_slim_that_are_missing_or_unknown_are_named(own, said):
    with pytest.raises(ValueError, match=said):
        training.train("sigma_slim", tiny(), {**SLIM, "slim": own}, seed=0)


# Members in chunks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("rule", [None, RULE])
def test_training_in_chunks_is_training_at_once(rule, precision, monkeypatch):
    passes = []
    chunks = SlimEnsemble.chunks
    monkeypatch.setattr(SlimEnsemble, "chunks", lambda *args: passes.append(1) or chunks(*args))
    recipe = Recipe(epochs=6, batch_size=8, lr=0.02, schedule="constant", gamma_multiplier=300.0, precision=precision)
    ended = {}
    for at_once in (None, 1, 2):
        model = inner(members=3)
        model.at_once = at_once
        history = training.fit(model, tiny(32), recipe, seed=5, penalty=Penalty(), slim=rule)
        ended[at_once] = [row["cross_entropy"] for row in history], training.predict(model, tiny().test.inputs, tiny())
        assert model.at_once == at_once
        # Slim too, each member is propagated back before the next one runs.
        assert len(passes) == (4 * sum(row["slim"] > 0 for row in history) if at_once else 0)
        passes.clear()
        assert bool(history[-1]["slim"]) == (rule is not None)
    tolerance = {"no": 2e-3, "bf16": 0.1}[precision]
    for at_once in (1, 2):
        for found, expected in zip(ended[at_once], ended[None], strict=True):
            np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)


def test_chunks_are_a_setting_of_sigma():
    settings = paths.merge(SLIM, {"sigma": {"at_once": 1}})
    dataset = tiny()
    for method in ("sigma", "sigma_slim"):
        net = lambda: training._backbone(dataset, settings)  # noqa: E731
        assert baselines.build(method, net, settings).at_once == 1
    assert baselines.build("sigma", net, SLIM).at_once is None
