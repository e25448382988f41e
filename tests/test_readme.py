"""The README says what the results say, and its example runs."""

import re

import pytest

from sigmaens import paths, readme


@pytest.fixture
def text():
    return (paths.root() / "README.md").read_text(encoding="utf-8")


def test_blocks_are_the_results(text):
    assert len(readme.BLOCK.findall(text)) == 4
    assert readme.fill(text) == text, "run python -m sigmaens.readme"


def test_fill_replaces_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "params.yaml").touch()
    (tmp_path / "table.md").write_text("| new |\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    old = "before <!-- begin table.md -->\n| old |\n<!-- end --> after"
    assert readme.fill(old) == "before <!-- begin table.md -->\n| new |\n<!-- end --> after"
    (tmp_path / "README.md").write_text(old, encoding="utf-8")
    assert readme.main() == 0
    assert "| new |" in (tmp_path / "README.md").read_text(encoding="utf-8")
    (tmp_path / "table.md").unlink()
    assert readme.main() == 1


def test_links_lead_somewhere(text):
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (paths.root() / link).exists()]


def test_nothing_is_left_to_fill_in(text):
    assert not re.search(r"\b(TODO|TBD|XXX|[A-Z]+_TIME|BENCH)\b", text)


def test_links_of_notebooks_lead_somewhere():
    for path in [*paths.root().glob("notebooks/*.ipynb"), *paths.root().glob("results/**/*.ipynb")]:
        links = re.findall(r"\]\(([^)#]+?)\)", path.read_text(encoding="utf-8"))
        relative = [link for link in links if re.match(r"[\w./-]+\.(py|ipynb|md|yaml)$", link)]
        assert not [link for link in relative if not (path.parent / link).exists()], path


def test_example_runs(text):
    scope = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], scope)
    assert scope["probs"].shape == (8, 10)
    assert scope["probs"].sum(1).allclose(scope["probs"].new_ones(8))
    assert scope["uncertainty"].modulation.min() > 0
