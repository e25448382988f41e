"""dvc.yaml tells the truth: one name for stage, notebook and folder, and every module that decides is a dependency."""

import ast
import json
import re
import subprocess

import pytest

import sigmaens
from sigmaens import paths

ROOT = paths.root()
STAGES = paths.parse_yaml((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
WITH_NOTEBOOK = {name: stage for name, stage in STAGES.items() if name != "clean"}
# What a training notebook only shows with: a change there needs no new training.
SHOWN = {"figures", "metrics", "uncertainty", "analysis"}
TRAINING = {"layers", "ensemble", "losses", "backbones", "baselines", "peers", "data", "training", "results"}


def notebook(stage):
    return next(dep.removeprefix(".clean/") for dep in stage["deps"] if str(dep).startswith(".clean/"))


def modules(stage):
    return {dep.removeprefix("sigmaens/").removesuffix(".py") for dep in stage["deps"] if dep.startswith("sigmaens/")}


def imported(name):
    """Modules of the package that a notebook imports, those behind the public names it uses included."""
    found = set()
    cells = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "sigmaens":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sigmaens."):
            found.add(node.module.removeprefix("sigmaens."))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sn":
            found |= {home for home, names in sigmaens._HOMES.items() if node.attr in names}
    return found - {"paths"}


@pytest.mark.parametrize("name", WITH_NOTEBOOK)
def test_every_module_that_decides_a_result_is_a_dependency(name):
    stage = WITH_NOTEBOOK[name]
    if stage.get("frozen"):
        return
    source = notebook(stage)
    needed = imported(source)
    if source[:2] in ("02", "03", "04"):
        needed |= TRAINING
        needed -= SHOWN if source[:2] != "04" else {"losses"}
    if "01_data" in source:
        needed = {"data", "corruptions"}
    if "training" in needed and source[:2] not in ("02", "03", "04"):
        needed |= {"layers", "ensemble", "backbones", "baselines", "peers"}
    assert needed - modules(stage) == set()


@pytest.mark.parametrize("name", WITH_NOTEBOOK)
def test_stage_notebook_and_folder_bear_one_name(name):
    stage = WITH_NOTEBOOK[name]
    source = notebook(stage).removesuffix(".ipynb")
    assert (ROOT / "notebooks" / f"{source}.ipynb").is_file()
    (out,) = (next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"])
    assert f"--output {out}/{source}.ipynb" in " ".join(stage["cmd"].split())
    if not name.startswith(("sweep_", "finetune")):
        assert source[3:] == name
    if name != "finetune":
        assert re.search(rf"/{name}(/|$)", "/" + out) or name == "data"


@pytest.mark.parametrize("name", WITH_NOTEBOOK)
def test_only_what_people_read_is_kept_in_git(name):
    (out,) = WITH_NOTEBOOK[name]["outs"]
    cached = isinstance(out, str)
    assert cached == (name in ("data", "train", "finetune", "evaluate") or name.startswith("sweep_"))
    assert cached or next(iter(out.values())) == {"cache": False}


def test_no_pipe_hides_a_failure_and_no_swept_list_is_a_parameter_of_a_cell():
    for name, stage in STAGES.items():
        assert not re.search(r"[|;&]", stage["cmd"]), name
        if name.startswith(("train", "sweep")):
            assert not {"taus", "lambdas", "members", "methods", "rows"} & set(stage["params"]), name


def test_git_tracks_nothing_that_dvc_caches():
    tracked = subprocess.run(
        ["git", "ls-files", "results", "data"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cached = re.compile(r"data/|results/[^/]+/(train|evaluate|sweep_\w+)/")
    assert tracked.stdout.count("\n") > 30
    assert not [path for path in tracked.stdout.splitlines() if cached.match(path)]
