"""The committed notebooks: sources without outputs, executed ones that are theirs, and numbers that agree."""

import ast
import json
import subprocess
import sys

import pytest

from sigmaens import check, paths

ROOT = paths.root()
SOURCES = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Those that people read; the executed notebooks of data, training and evaluation stay in DVC's cache.
EXECUTED = sorted(path for path in (ROOT / "results").glob("*/*.ipynb")) + sorted(
    path for path in (ROOT / "results").glob("*/*/*.ipynb") if path.parent.joinpath("metrics.json").exists()
)


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def tagged(path, tag):
    return [cell for cell in cells(path) if tag in cell["metadata"].get("tags", [])]


def test_there_are_notebooks():
    assert len(SOURCES) == 18
    not_kept = ("01", "02", "03", "04")
    assert {path.stem for path in EXECUTED} == {path.stem for path in SOURCES if path.stem[:2] not in not_kept}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_source_has_no_outputs_and_one_parameters_cell(path):
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert len(tagged(path, "parameters")) == 1
    assert cells(path)[0]["cell_type"] == "markdown"


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_executed_notebook_is_its_source_run_from_the_top(path):
    source = [cell["source"] for cell in cells(ROOT / "notebooks" / path.name) if cell["source"]]
    executed = [cell for cell in cells(path) if "injected-parameters" not in cell["metadata"].get("tags", [])]
    assert ["".join(cell["source"]) for cell in executed] == ["".join(lines) for lines in source]
    counts = [cell["execution_count"] for cell in cells(path) if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_shown_numbers_are_those_of_the_file(path):
    """A number changed by hand, in the notebook or in the file, breaks this on every machine."""
    (cell,) = tagged(path, "nbval-check-output")
    shown = "".join(text for output in cell["outputs"] for text in output["text"]).splitlines()
    numbers = json.loads((path.parent / "metrics.json").read_text(encoding="utf-8"))
    assert len(shown) > 5
    expected = check.flatten(numbers)
    assert {line.split(" = ", 1)[0] for line in shown} == set(expected)
    for line in shown:
        name, value = line.split(" = ", 1)
        value = None if value == "nan" else ast.literal_eval(value)
        exact = not isinstance(value, float)
        assert value == (expected[name] if exact else pytest.approx(expected[name], rel=1e-5, abs=1e-12)), name


def test_method_notebook_runs_again_under_nbval():
    """The one notebook that needs no data; `make check` runs them all, once the pipeline has made the data."""
    command = [sys.executable, "-m", "pytest", "-p", "sigmaens.check", "--nbval-lax", "results/method/00_method.ipynb"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
