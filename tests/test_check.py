"""Numbers agree within the stated tolerance, everything else exactly, and an empty comparison is a failure."""

import json
import math
import os
import re
import subprocess
import sys

import nbformat
import numpy as np
import pytest

from sigmaens import check, notebook

TOLERANCES = {"default": 1e-6, "nll": 1e-2, "ece": 0.1}


@pytest.mark.parametrize(
    ("fresh", "reference", "agree"),
    [
        (1.0, 1.0 + 9e-7, True),
        (1.0, 1.0 + 2e-6, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (math.inf, 1.0, False),
        (1, 1.0, True),
        (1, 1 + 2e-6, False),
        (3, 3, True),
        (3, 4, False),
        (True, 1, False),
        (True, 1.0, False),
        (False, False, True),
        (None, None, True),
        (None, 0.0, False),
        ("supported", "supported", True),
        ("supported", "not supported", False),
        ("1.0", 1.0, False),
    ],
)
def test_agreement_of_one_value(fresh, reference, agree):
    assert (check.compare({"x": fresh}, {"x": reference}, TOLERANCES) == []) is agree


@pytest.mark.parametrize("value", [3, True, "text"])
def test_no_tolerance_loosens_what_is_not_a_float(value):
    other = {3: 4, True: False, "text": "test"}[value]
    assert check.compare({"x": value}, {"x": other}, {"default": 100})


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        ("nll", 1e-2),
        ("sigma.nll.mean", 1e-2),
        ("nll.ece", 0.1),
        ("ece.nll", 1e-2),
        ("tau.0.1.nll", 1e-2),
        ("nll_of_ece", 1e-6),
        ("accuracy", 1e-6),
    ],
)
def test_tolerance_is_that_of_the_last_component_that_has_one(name, tolerance):
    assert not check.compare({name: 0.9 * tolerance}, {name: 0.0}, TOLERANCES)
    assert check.compare({name: 1.1 * tolerance}, {name: 0.0}, TOLERANCES)


def test_a_value_missing_on_either_side_disagrees():
    lines = check.compare({"a": {"x": 1.0}, "new": 2}, {"a": {"x": 1.0, "y": 3}}, TOLERANCES)
    assert lines == ["a.y: reference 3, fresh has no such value", "new: fresh 2, reference has no such value"]


@pytest.mark.parametrize("tolerances", [{}, {"default": -1}, {"default": math.nan}, {"default": 0, "nll": "1e-3"}])
def test_bad_tolerances_are_refused(tolerances):
    with pytest.raises(ValueError, match="must be a number >= 0"):
        check.compare({}, {}, tolerances)


def test_flatten_refuses_what_it_could_only_guess():
    with pytest.raises(ValueError, match=r"two values are named a\.b"):
        check.flatten({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(TypeError, match=r"a\.0 must be a number.*float32"):
        check.flatten({"a": [np.float32(1)]})


def test_shown_values_are_read_back_with_their_types_and_six_digits(capsys):
    metrics = {"f": 1 / 3, "big": 1.23456789e9, "whole": 2.0, "n": 11201000, "bad": math.nan, "far": -math.inf}
    metrics |= {"text": "it's = 'so'\n", "yes": True, "none": None, "noise": {"gaussian noise": 1e-7}}
    check.show(metrics)
    read = {}
    for line in capsys.readouterr().out.splitlines():
        read |= check._value(line)
    assert not check.compare(read, metrics, {"default": 5e-7, "big": 5e3})
    assert {name: type(value) for name, value in read.items()} == {
        name: type(value) for name, value in check.flatten(metrics).items()
    }


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A committed project in a folder of its repository, with results, as the working directory."""
    root = tmp_path / "a repository/project"
    write_json(root / "results/digits/tau/0.1/metrics.json", {"sigma": {"nll": 0.5, "n": 3}, "verdict": "supported"})
    write_json(root / "results/digits/claims/metrics.json", {"rho": -0.9})
    write_json(root / "results/digits/claims/other.json", {"rho": 0})
    write_json(root / "results/method/metrics.json", {"owners": 1.5})
    (root / "params.yaml").write_text(f"profiles: {{all: [digits]}}\ntolerances: {json.dumps(TOLERANCES)}\n")
    for key, value in {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}.items():
        monkeypatch.setenv(key, value)
    git(root.parent, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "results")
    monkeypatch.chdir(root / "results")
    return root


def write_json(path, metrics):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metrics))


def git(root, *arguments):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True)


def test_results_within_tolerance_pass(project, capsys):
    write_json(
        project / "results/digits/tau/0.1/metrics.json", {"sigma": {"nll": 0.509, "n": 3}, "verdict": "supported"}
    )
    assert check.main([]) == 0
    assert capsys.readouterr().out == (
        "method: 1 files, 1 values, all within tolerance\ndigits: 2 files, 4 values, all within tolerance\n"
    )
    write_json(project / "results/method/metrics.json", {"owners": 2.5})
    assert check.main([]) == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"sigma": {"nll": 0.511, "n": 3}, "verdict": "supported"},
            "sigma.nll: reference 0.5, fresh 0.511, tolerance 0.01",
        ),
        (
            {"sigma": {"nll": 0.5, "n": 3}, "verdict": "not supported"},
            "verdict: reference 'supported', fresh 'not supported'",
        ),
        (None, "results/digits/tau/0.1/metrics.json: committed, but missing here"),
    ],
)
def test_results_that_changed_fail(project, capsys, metrics, message):
    path = project / "results/digits/tau/0.1/metrics.json"
    write_json(path, metrics) if metrics else path.unlink()
    assert check.main(["digits"]) == 1
    out = capsys.readouterr().out
    assert message in out
    assert out.endswith("digits: 2 files, 4 values, 1 disagreements\n")


def test_notebooks_named_are_the_committed_ones_of_profiles_that_are_on(project, capsys):
    for name in ("digits/claims/14", "method/00", "fashion/claims/14"):
        write_json(project / f"results/{name}.ipynb", {})
    git(project, "add", ".")
    git(project, "commit", "-qm", "notebooks")
    write_json(project / "results/digits/claims/15.ipynb", {})
    assert check.main(["--notebooks"]) == 0
    assert capsys.readouterr().out.split() == ["results/method/00.ipynb", "results/digits/claims/14.ipynb"]


def test_nothing_to_compare_is_a_failure(project, capsys):
    (project / "params.yaml").write_text("profiles: {all: [digits, fashion]}\ntolerances: {default: 0}\n")
    write_json(project / "results/fashion/claims/metrics.json", {"rho": 1})
    assert check.main([]) == 1
    assert "results/fashion: no metrics.json with values is committed" in capsys.readouterr().out


def test_a_call_that_cannot_be_made_says_why(project, capsys):
    assert check.main(["digit"]) == 2
    assert "no profile digit in params.yaml; there are digits" in capsys.readouterr().err
    (project / "results/digits/claims/metrics.json").write_text("{")
    assert check.main([]) == 2
    assert "results/digits/claims/metrics.json is not JSON" in capsys.readouterr().err
    (project / "params.yaml").write_text("profiles: {all: [digits]}\n")
    assert check.main([]) == 2
    assert "params.yaml has no 'tolerances'" in capsys.readouterr().err
    (project / "params.yaml").write_text("profiles: {all: [digits]}\ntolerances: {default: 0}\n")
    (project.parent / ".git").rename(project / "git")
    assert check.main([]) == 2
    assert "git ls-tree failed" in capsys.readouterr().err


def test_nbval_compares_numbers_with_tolerance_and_refuses_void_notebooks(tmp_path, monkeypatch):
    """One run of the plugin over copies of an executed notebook that were changed by hand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(f"tolerances: {json.dumps(TOLERANCES)}\n")
    shown = "sigma.nll = 0.5\nrho = -0.9\nverdict = 'supported'\nthree seeds"
    tags = {"tags": ["nbval-check-output"]}
    cells = [
        nbformat.v4.new_code_cell("tau = 0.1", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(f"print({shown!r})", metadata=tags),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), "executed.ipynb")
    notebook.run("executed.ipynb", "same.ipynb", {})
    os.remove("executed.ipynb")

    changes = {
        "within": {"text": shown.replace("0.5", "0.509")},
        "beyond": {"text": shown.replace("0.5", "0.511")},
        "verdict": {"text": shown.replace("supported", "not supported")},
        "words": {"text": shown.replace("three", "four")},
        "fewer": {"text": shown.replace("rho = -0.9\n", "")},
        "empty": {"outputs": []},
        "unchecked": {"tags": []},
        "skipped": {"tags": ["nbval-check-output", "nbval-skip"]},
    }
    for name, change in changes.items():
        changed = nbformat.read("same.ipynb", as_version=4)
        cell = changed.cells[1]
        if "text" in change:
            cell.outputs[0].text = change["text"] + "\n"
        cell.outputs = change.get("outputs", cell.outputs)
        cell.metadata.tags = change.get("tags", cell.metadata.tags)
        nbformat.write(changed, f"{name}.ipynb")

    command = [sys.executable, "-m", "pytest", "-p", "sigmaens.check", "--nbval-lax", "-W", "error", "-rA"]
    done = subprocess.run([*command, "--continue-on-collection-errors"], capture_output=True, text=True)
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR) (\w+)\.ipynb", done.stdout, re.MULTILINE)
    worst = {name: outcome for outcome, name in sorted(outcomes, reverse=True)}
    assert worst == {
        "same": "PASSED",
        "within": "PASSED",
        "beyond": "FAILED",
        "verdict": "FAILED",
        "words": "FAILED",
        "fewer": "FAILED",
        "empty": "ERROR",
        "unchecked": "ERROR",
        "skipped": "ERROR",
    }
    assert "sigma.nll: reference 0.511, fresh 0.5, tolerance 0.01" in done.stdout
    assert "empty.ipynb: a checked cell must have outputs to compare: Cell 1" in done.stdout
    assert "unchecked.ipynb: a checked cell must have outputs to compare: no cell is checked" in done.stdout
