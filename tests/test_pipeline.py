"""dvc.yaml tells the truth: one name for stage, notebook and folder, and every module that decides is a dependency."""

import ast
import json
import re
import shutil
import subprocess

import pytest
from dvc.utils.hydra import apply_overrides
from dvc.utils.serialize import load_yaml

import sigmaens
from sigmaens import paths

ROOT = paths.root()
STAGES = paths.parse_yaml((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
PARAMS = paths.parse_yaml((ROOT / "params.yaml").read_text(encoding="utf-8"))
FAMILIES = ("image", "short", "text", "vision")
WITH_NOTEBOOK = {name: stage for name, stage in STAGES.items() if name != "clean"}
# What a training notebook only shows with: a change there needs no new training.
SHOWN = {"figures", "metrics", "uncertainty", "analysis"}
TRAINING = {"layers", "ensemble", "losses", "backbones", "baselines", "peers", "slim", "data", "training", "results"}


def notebook(stage):
    return next(dep.removeprefix(".clean/") for dep in stage["deps"] if str(dep).startswith(".clean/"))


def swept(code):
    """The sweeps that a notebook reads through `results.sweep`."""
    return set(re.findall(r'(?<!\[)"(tau|lambda|members|members_packed)"', code)) if "results.sweep(" in code else set()


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
        needed = {"data", "corruptions", "images", "text"}
    needed -= {"text"} if "01_data" not in source else set()  # whose one use there is to show sentences
    if "training" in needed and source[:2] not in ("02", "03", "04"):
        needed |= {"layers", "ensemble", "slim", "backbones", "baselines", "peers"}
    needed |= {"tracing"} if "slim" in needed else set()
    assert needed - modules(stage) == set()


@pytest.mark.parametrize("name", WITH_NOTEBOOK)
def test_stage_notebook_and_folder_bear_one_name(name):
    stage = WITH_NOTEBOOK[name]
    source = notebook(stage).removesuffix(".ipynb")
    assert (ROOT / "notebooks" / f"{source}.ipynb").is_file()
    (out,) = (next(iter(out)) if isinstance(out, dict) else out for out in stage["outs"])
    assert f"--output {out}/{source}.ipynb" in " ".join(stage["cmd"].split())
    plain = re.sub(r"_(text|vision|slim|short)$", "", name)
    if not plain.startswith(("sweep_", "finetune")):
        assert source[3:] == plain
    if plain != "finetune":
        assert re.search(rf"/{plain}(/|$)", "/" + out) or plain == "data"


@pytest.mark.parametrize("name", WITH_NOTEBOOK)
def test_only_what_people_read_is_kept_in_git(name):
    (out,) = WITH_NOTEBOOK[name]["outs"]
    cached = isinstance(out, str)
    assert cached == name.startswith(("data", "train", "finetune", "evaluate", "sweep_"))
    assert cached or next(iter(out.values())) == {"cache": False}


def test_no_pipe_hides_a_failure_and_no_swept_list_is_a_parameter_of_a_cell():
    for name, stage in STAGES.items():
        assert not re.search(r"[|;&]", stage["cmd"]), name
        if name.startswith(("train", "sweep")):
            listed = {param.rsplit(".", 1)[-1] for param in stage["params"]}
            assert not {"taus", "lambdas", "sizes", "methods", "rows"} & listed, name
            assert "settings.${item.profile}" not in stage["params"], name


def test_every_profile_has_settings_and_one_family():
    on = PARAMS["profiles"]
    assert sorted(on["all"]) == sorted(profile for family in FAMILIES for profile in on[family])
    assert set(on["all"]) | set(on["finetune"]) <= PARAMS["settings"].keys()
    assert set(on["finetune"]) | set(on["slim"]) <= set(on["vision"])
    assert sorted(on["tau"]) == sorted(on["image"] + on["short"] + on["text"])
    for profile, settings in PARAMS["settings"].items():
        lists = [family for family in FAMILIES if PARAMS[family]["methods"] == settings["methods"]]
        assert len(lists) == 1, profile
        assert len(settings["seeds"]) >= 2
        own = {"taus": settings["sigma"]["tau"], "lambdas": settings["sigma"]["weight"], "sizes": settings["members"]}
        assert not [name for name, value in own.items() if value in settings[name]], "trained twice"


def test_every_stage_of_a_family_is_listed_for_its_profiles_only():
    for name, stage in STAGES.items():
        if name in ("clean", "method"):
            continue
        family = name.rsplit("_", 1)[-1] if name.endswith(("_text", "_vision", "_slim", "_short")) else None
        family = "slim" if name == "slim_vision" else family
        profiles = stage["matrix"]["profile"].removeprefix("${profiles.").removesuffix("}")
        assert profiles == (family or profiles)
        assert profiles in ("all", "image", "short", "text", "tau", "vision", "finetune", "slim")
        lists = [value for key, value in stage["matrix"].items() if key != "profile"]
        assert all(value.startswith(f"${{{profiles}.") for value in lists), name


def test_light_stages_know_every_list_they_read():
    """A notebook that reads `settings["taus"]` depends on that list, or on all settings."""
    for name, stage in WITH_NOTEBOOK.items():
        code = (ROOT / "notebooks" / notebook(stage)).read_text(encoding="utf-8").replace('\\"', '"')
        params = stage.get("params", [])
        if "settings.${item.profile}" in params or name == "data":
            continue
        if "tau" in swept(code):
            assert {f"settings.${{item.profile}}.{key}" for key in ("taus", "sigma.tau")} <= set(params), name
        read = set(re.findall(r'settings\["(\w+)"\]', code)) - (
            {"taus", "methods", "rows"} if "train" in name else set()
        )
        known = {param.removeprefix("settings.${item.profile}.").split(".")[0] for param in params}
        assert read <= known, (name, read - known)


def test_every_sweep_that_a_notebook_reads_is_a_dependency():
    """Of the whole paper. The other families lack some sweeps, and their claims and slim members say what they read."""
    for name, stage in WITH_NOTEBOOK.items():
        code = (ROOT / "notebooks" / notebook(stage)).read_text(encoding="utf-8").replace('\\"', '"')
        read = set(re.findall(r"sweep_\w+", code)) | {f"sweep_{over}" for over in swept(code)}
        whole = stage.get("matrix", {}).get("profile") in ("${profiles.image}", "${profiles.tau}")
        if whole and not stage.get("frozen"):
            read |= {"train"} if swept(code) else set()
            assert {f"results/${{item.profile}}/{folder}" for folder in read} <= set(stage["deps"]), name


def test_git_tracks_nothing_that_dvc_caches():
    tracked = subprocess.run(
        ["git", "ls-files", "results", "data"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    cached = re.compile(r"data/|results/[^/]+/(train|evaluate|sweep_\w+)/")
    assert tracked.stdout.count("\n") > 30
    assert not [path for path in tracked.stdout.splitlines() if cached.match(path)]


def test_dvc_can_change_a_setting(tmp_path):
    # DVC writes the whole file anew, without quotes: a source like set:NAME inside braces could not be read again.
    changed = shutil.copy(ROOT / "params.yaml", tmp_path)
    expected = load_yaml(changed)
    apply_overrides(changed, ["settings.digits.train.epochs=60"])
    expected["settings"]["digits"]["train"]["epochs"] = 60
    assert load_yaml(changed) == expected


def test_no_profile_waits_for_cached_results_of_another():
    # imagenet has its verdicts where cifar10_scratch was never run: of other profiles only what git keeps is read.
    others = [d for d in STAGES["claims_vision"]["deps"] if d.startswith(("data", "results")) and "${item" not in d]
    assert others == ["results/${settings.cifar10_finetune.scratch}/ood/metrics.json"]
    assert (ROOT / others[0].replace("${settings.cifar10_finetune.scratch}", "cifar10_scratch")).is_file()
