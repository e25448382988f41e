"""What a run leaves behind, and the statistics of comparisons."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import nn

import sigmaens as sn
from sigmaens import metrics, results
from sigmaens.backbones import narrow_resnet, resnet18


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return results.Run("tiny", "sweep_tau/0.1", (0, 3))


def ensemble(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return sn.SigmaEnsemble(net, members=2, head="3")


def test_run_keeps_weights_predictions_and_gates(run):
    rng = np.random.default_rng(0)
    logits = {seed: rng.normal(size=(7, 2, 3)).astype(np.float32) for seed in run.seeds}
    models = {seed: ensemble(seed) for seed in run.seeds}
    for seed in run.seeds:
        run.save(seed, models[seed], {"test": logits[seed]})
    for seed, probs, gates in zip(run.seeds, run.probs("test"), run.gates(), strict=True):
        expected = np.exp(logits[seed].astype(float))
        np.testing.assert_allclose(probs, expected / expected.sum(-1, keepdims=True), rtol=1e-12)
        assert list(gates) == list(models[seed].gates())
        for name, gate in models[seed].gates().items():
            torch.testing.assert_close(gates[name], gate.detach(), rtol=0, atol=0)
        restored = sn.load(ensemble(99), run.checkpoint(seed))
        x = torch.randn(5, 4)
        torch.testing.assert_close(restored.eval()(x), models[seed].eval()(x), rtol=0, atol=0)
    labels = rng.integers(0, 3, 7)
    table = run.table("test", labels)
    assert list(table.index) == [0, 3]
    for seed, probs in zip(run.seeds, run.probs("test"), strict=True):
        assert table.loc[seed, "nll"] == metrics.nll(probs.mean(1), labels)
        member = np.mean([metrics.nll(probs[:, m], labels) for m in range(2)])
        assert math.isclose(table.loc[seed, "member_nll"], member, rel_tol=1e-9)
        assert table.loc[seed, "cos"] == sn.sigma_norm_cos(models[seed].gates())
        assert run.table("test", labels, members=1).loc[seed, "nll"] == metrics.nll(probs[:, 0], labels)
    for seed, z in zip(run.seeds, run.logits("test"), strict=True):
        np.testing.assert_array_equal(z, logits[seed])
    rows = [
        {"seed": seed, "epoch": e, "cross_entropy": 10 * seed + e, "penalty": 0}
        for seed in run.seeds
        for e in (0, 1, 1)
    ]
    pd.DataFrame(rows).to_csv(run.folder / "history.csv", index=False)
    assert list(run.final_cross_entropy()) == [1, 31]


def test_two_saves_are_the_same_bytes(run):
    logits = {"test": np.zeros((3, 2, 3), np.float32), "validation": np.ones((2, 2, 3), np.float32)}
    run.save(0, ensemble(), logits)
    files = sorted(run.folder.iterdir())
    first = [file.read_bytes() for file in files]
    run.save(0, ensemble(), logits)
    assert [file.read_bytes() for file in sorted(run.folder.iterdir())] == first
    assert len(files) == 2


def test_missing_seed_says_how_to_get_it(run):
    with pytest.raises(FileNotFoundError, match=r"sweep_tau/0\.1 has no results for seed 0.*dvc"):
        run.probs("test")


def test_interval_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 5))
    expected = stats.ttest_rel(a, b).confidence_interval(0.95)
    np.testing.assert_allclose(results.interval(a - b), (expected.low, expected.high))
    with pytest.raises(ValueError, match="at least two"):
        results.interval([1.0])


def test_summary_and_per_cent():
    assert results.summary([0.5]) | {"sd": 0} == {"mean": 0.5, "sd": 0, "n": 1}
    assert results.per_cent([0.1, 0.2, 0.3]) == "20.0 ± 10.0"


def test_multiply_adds_closed_form():
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 25, 7))
    assert results.multiply_adds(net, torch.zeros(1, 3, 5, 5)) == 25 * 8 * 3 * 9 + 8 * 25 * 7


def test_every_member_costs_a_pass():
    backbone = narrow_resnet(10, 1)
    image = torch.zeros(1, 1, 8, 8)
    one = results.multiply_adds(backbone, image)
    assert results.multiply_adds(sn.SigmaEnsemble(backbone, members=4, head="fc"), image) == 4 * one


def test_parameters_of_the_paper():
    # Paper, section 6 (derived): four heads with a gate-only norm.
    assert round(results.parameters(sn.SigmaEnsemble(resnet18(10), 4, head="fc")) / 1e6, 3) == 11.201
    assert round(results.parameters(sn.SigmaEnsemble(resnet18(100), 4, head="fc")) / 1e6, 3) == 11.386


def test_json_is_plain_and_whole(tmp_path):
    path = tmp_path / "deep" / "metrics.json"
    results.write_json(path, {"a": np.float64(1 / 3), "b": float("nan"), 1: [np.int64(2), True, "x", None]})
    assert json.loads(path.read_text()) == {"1": [2, True, "x", None], "a": 0.333333, "b": None}
    with pytest.raises(TypeError):
        results.write_json(path, {"a": object()})
    assert json.loads(path.read_text())["a"] == 0.333333
    assert [file.name for file in path.parent.iterdir()] == ["metrics.json"]


def test_a_full_disk_is_named_and_nothing_stays(run, full_disk):
    model = ensemble()
    with pytest.raises(OSError, match=r"cannot write .*seed0\.outputs\.safetensors: "), full_disk():
        run.save(0, model, {"test": np.zeros((700, 2, 3), np.float32)})
    assert list(run.folder.iterdir()) == []


def test_a_sweep_holds_the_run_of_the_comparison_at_the_profiles_own_value(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text(
        "settings:\n"
        "  swept: {taus: [0.02, 5.0, 1], lambdas: [0.1], sizes: [8, 2], members: 4, sigma: {tau: 0.1, weight: 0.01}}\n"
        "  plain: {taus: [], lambdas: [], sizes: [], members: 4, sigma: {tau: 0.1, weight: 0.01}}\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    expected = {
        "tau": {0.02: "sweep_tau/0.02", 0.1: "train/sigma", 1: "sweep_tau/1", 5.0: "sweep_tau/5.0"},
        "lambda": {0.01: "train/sigma", 0.1: "sweep_lambda/0.1"},
        "members": {2: "sweep_members/2", 4: "train/sigma", 8: "sweep_members/8"},
        "members_packed": {2: "sweep_members_packed/2", 4: "train/packed_ensembles", 8: "sweep_members_packed/8"},
    }
    for over, names in expected.items():
        runs = results.sweep("swept", over, (0, 1))
        assert [*runs.items()] == [(value, results.Run("swept", name, (0, 1))) for value, name in names.items()]
        assert results.sweep("plain", over, (0, 1)) == {}
    with pytest.raises(ValueError, match=r"a sweep is over one of .*'members_packed'.*, not 'width'"):
        results.sweep("swept", "width", (0, 1))
