"""What the studies of pretrained networks say follows from the numbers: notebooks 14, 15 and 16 on made-up results."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from test_families import project, run

from sigmaens import data, paths, results
from sigmaens.checkpoint import write_tensors

__all__ = ["project"]  # the fixture

SEEDS = (0, 1, 2)
PARAMS = """
settings:
  tuned: &tuned
    seeds: [0, 1, 2]
    rows: [single, deep_ensembles, sigma]
    taus: []
    lambdas: []
    sizes: []
    members: 2
    scratch: scratch
    sigma: {pretrained: true, tau: 0.1, weight: 1e-4}
  scratch:
    <<: *tuned
    sigma: {pretrained: false, tau: 0.1, weight: 0.01}
"""
# AUROC on either set and ECE by method; SHIFTED is what ECE is at the strongest corruption. All claims hold.
HOLDS = {
    "auroc": {"single": 0.6, "deep_ensembles": 0.8, "sigma": 0.6},
    "scratch": {"single": 0.6, "deep_ensembles": 0.8, "sigma": 0.75},
    "u_mod": {"single": 0.5, "deep_ensembles": 0.7, "sigma": 0.55},
    "ece": {"single": 0.1, "deep_ensembles": 0.05, "sigma": 0.05},
    "shifted": {"single": 0.4, "deep_ensembles": 0.2, "sigma": 0.06},
    "exact": 1e-7,
}
# What changes, and the verdicts and strengths of claims 6, 8 and 10 then.
YES, SHOWN, WRONG = ("supported", ""), ("not supported", "not shown"), ("not supported", "contradicted")
CASES = {
    "as in the paper": ({}, (YES, YES, YES)),
    "stronger than Deep Ensembles": ({"auroc": {"sigma": 0.9}}, (WRONG, YES, YES)),
    "the gap is wider from scratch": ({"scratch": {"sigma": 0.5}}, (WRONG, YES, YES)),
    "the gap is the same from scratch": ({"scratch": {"sigma": 0.6}}, (SHOWN, YES, YES)),
    "not converted exactly": ({"exact": 1e-4}, (YES, SHOWN, YES)),
    "worse calibrated than Single": ({"ece": {"sigma": 0.15}, "shifted": {"sigma": 0.16}}, (YES, WRONG, YES)),
    "U_mod separates better": ({"u_mod": {"sigma": 0.8}}, (YES, YES, WRONG)),
    "calibration is lost under corruption": ({"shifted": {"sigma": 0.3}}, (YES, YES, WRONG)),
    "corruption hurts Single as little": ({"shifted": {"single": 0.11}}, (YES, YES, SHOWN)),
}


@pytest.fixture
def told(monkeypatch):
    """What notebooks say in Markdown, which nothing shows here."""
    said = []
    monkeypatch.setattr("IPython.display.Markdown", said.append)
    return said


@pytest.fixture
def dataset(monkeypatch):
    """A data set of 200 labels of two classes, which is all that these notebooks read of one."""
    split = SimpleNamespace(labels=np.arange(200) % 2)
    content = SimpleNamespace(test=split, validation=split, rated=None)
    monkeypatch.setattr(data, "load", lambda path: content)
    return content


def predicted(labels, ece):
    """Return member logits of 80 % accuracy and confidence 0.8 + ece: that is their calibration error too."""
    wrong = np.arange(len(labels)) // 2 % 5 == 0  # as many of either class
    logits = np.full((len(labels), 2, 2), np.log(0.2 - ece))
    logits[np.arange(len(labels)), :, labels ^ wrong] = np.log(0.8 + ece)
    return torch.tensor(logits, dtype=torch.float32)


def write(change, labels):
    """Write the results of both profiles; seeds stand in another order for one method, and move all methods alike."""
    values = {
        key: {**v, **change.get(key, {})} if isinstance(v, dict) else change.get(key, v) for key, v in HOLDS.items()
    }
    noise, wobble = {0: 0.0, 1: 0.08, 2: -0.05}, {0: 0.0, 1: 0.004, 2: -0.004}
    for profile in ("tuned", "scratch"):
        auroc = values["auroc" if profile == "tuned" else "scratch"]
        for method in auroc:
            train, evaluated = paths.results(profile, "train", method), paths.results(profile, "evaluate", method)
            train.mkdir(parents=True)
            evaluated.mkdir(parents=True)
            for seed in SEEDS:
                logits = predicted(labels, values["ece"][method])
                write_tensors(
                    {"logits/test": logits, "logits/validation": logits.clone()},
                    train / f"seed{seed}.outputs.safetensors",
                )
            order = SEEDS[::-1] if method == "sigma" else SEEDS
            scores = {"max_prob": auroc[method], "entropy": auroc[method] - 0.01, "modulation": values["u_mod"][method]}
            rows = [
                {"seed": seed, "set": name, "score": score, "auroc": value + noise[seed] + 0.01 * i}
                for i, name in enumerate(("near", "far"))
                for score, value in scores.items()
                for seed in order
            ]
            pd.DataFrame(rows).to_csv(evaluated / "ood.csv", index=False)
            rows = [
                {
                    "seed": seed,
                    "corruption": "noise",
                    "severity": s,
                    "ece": values["shifted"][method] + wobble[seed] * (method == "sigma") if s == 5 else 0.9,
                    "nll": 1.0,
                }
                for s in (1, 5)
                for seed in order
            ]
            pd.DataFrame(rows).to_csv(evaluated / "corruption.csv", index=False)
        results.write_json(paths.results(profile, "train", "sigma") / "exact.json", {0: values["exact"]})
        counts = {"single": 10, "deep_ensembles": 20, "sigma": 10}
        results.write_json(
            paths.results(profile, "comparison") / "metrics.json", {m: {"parameters": n} for m, n in counts.items()}
        )


@pytest.mark.parametrize("case", CASES)
def test_verdicts_on_pretrained_networks_follow_from_the_numbers(case, project, dataset, told):
    change, expected = CASES[case]
    (project / "params.yaml").write_text(PARAMS, encoding="utf-8")
    write(change, dataset.test.labels)
    claims = run("14_claims", profile="tuned")["claims"]
    assert [(claims[number]["verdict"], claims[number]["strength"]) for number in (6, 8, 10)] == list(expected)
    assert {claims[number]["n"] for number in (6, 8, 10)} == {3}
    # The half of claim 6 that a network from scratch can show, and 8 without a converted network.
    claims = run("14_claims", profile="scratch")["claims"]
    assert claims[6]["verdict"] == claims[8]["verdict"] == "not tested at this scale"
    written = json.loads((paths.results("scratch", "claims") / "metrics.json").read_text())
    gap = HOLDS["scratch"] | change.get("scratch", {})
    assert written["6"]["auroc_difference_from_scratch"]["mean"] == pytest.approx(gap["sigma"] - gap["deep_ensembles"])


@pytest.mark.parametrize(
    ("change", "gap", "answers"),
    [
        ({}, -0.2, ("yes", "yes", "yes", "weaker", "lower")),
        (
            {"auroc": {"sigma": 0.9}, "scratch": {"sigma": 0.85}, "u_mod": {"sigma": 0.8}, "ece": {"sigma": 0.15}},
            0.1,
            ("no, stronger", "no, stronger", "no, narrower", "stronger", "higher"),
        ),
        (
            {"auroc": {"sigma": 0.8}, "scratch": {"sigma": 0.8}},
            0.0,
            ("these data cannot tell",) * 3 + ("weaker", "lower"),
        ),
    ],
)
def test_answers_on_pretrained_and_from_scratch_follow_from_the_numbers(change, gap, answers, project, dataset, told):
    (project / "params.yaml").write_text(PARAMS, encoding="utf-8")
    write(change, dataset.test.labels)
    known = {"conversion": {"before": {"accuracy": 0.8}}, "difference": 0.0}
    unknown = ("backbones.build", "images.walk", "assert conversion")  # ImageNet's part, which test_pretrained has
    study = run("16_vision_finetune", unknown, known, profile="tuned")
    lines = told[-1].split("\n")
    assert [line.split("**")[1] for line in lines if line.startswith("- ")] == list(answers)
    for name in ("near", "far"):
        assert study["gaps"]["pretrained", name, "max_prob"].to_numpy() == pytest.approx(gap)
    assert set(study["measures"]["gap"]) == {
        f"{start} {name} {score}"
        for start in ("pretrained", "from scratch")
        for name in ("near", "far")
        for score in ("max_prob", "entropy", "modulation")
    }


def test_uncertainty_is_ranked_against_indecision(project, dataset, told, capsys):
    rng = np.random.default_rng(0)
    rating = rng.uniform(-4, 4, 300)
    dataset.rated = SimpleNamespace(labels=rating)
    text = "settings: {tiny: {seeds: [0, 1, 2], rows: [single, deep_ensembles, sigma]}}\n"
    (project / "params.yaml").write_text(text, encoding="utf-8")
    tables = {}
    for method in ("single", "deep_ensembles", "sigma"):
        rows = []
        for seed in SEEDS[::-1]:
            # σN-Ens' aleatoric part follows indecision in any scale, Deep Ensembles' modulation part does.
            follows = np.exp(-np.abs(rating + 0.1 * rng.normal(size=300)))
            other = np.exp(rng.normal(size=300) - 0.4 * np.abs(rating))
            aleatoric, modulation = (follows, other) if method == "sigma" else (other, follows)
            values = {"rating": rating, "p_last": 1 / (1 + np.exp(-rating)), "seed": seed}
            rows.append(
                pd.DataFrame(
                    {**values, "aleatoric": aleatoric, "modulation": modulation, "total": aleatoric + modulation}
                )
            )
        folder = paths.results("tiny", "evaluate", method)
        folder.mkdir(parents=True)
        tables[method] = pd.concat(rows)
        tables[method].to_csv(folder / "rated.csv", index=False)
    found = run("15_soft_labels", profile="tiny")["measures"]

    assert found["sentences"] == 300
    assert [found["sign"][method]["mean"] for method in tables] == pytest.approx([1, 1, 1])
    for method, part, least, most in (
        ("sigma", "aleatoric", 0.9, 1),
        ("sigma", "modulation", 0.2, 0.7),
        ("deep_ensembles", "aleatoric", 0.2, 0.7),
        ("deep_ensembles", "modulation", 0.9, 1),
    ):
        assert least < found["follows"][f"rho_{part}"][method]["mean"] < most
    assert set(found["follows"]["rho_modulation"]) == {"deep_ensembles", "sigma"}  # Single has no members

    def left(ranks, given):
        """Return what a line through the ranks of the aleatoric part leaves."""
        return ranks - np.polyval(np.polyfit(given, ranks, 1), given)

    expected = []
    for _, rows in tables["deep_ensembles"].groupby("seed"):
        a, m, u = (stats.rankdata(values) for values in (rows["aleatoric"], rows["modulation"], -rows["rating"].abs()))
        expected.append(np.corrcoef(left(m, a), left(u, a))[0, 1])
    partial = found["follows"]["rho_modulation given aleatoric"]["deep_ensembles"]
    assert partial["mean"] == pytest.approx(np.mean(expected))
    said = {line.split(":")[0]: line for line in told[-1].split("\n") if line.startswith("- ")}
    assert "more closely than" in said["- σN-Ens"]
    assert "less closely than" in said["- Deep Ensembles"]
