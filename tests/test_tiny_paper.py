"""A paper of two training cells and one figure, built by DVC in a folder with a space in its name."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

PARAMS = """
taus: [0.5, 1]
values: [1e-3, -2, "off", null]
flags: [true]
"""

PIPELINE = """
stages:
  clean:
    cmd: python -m sigmaens.notebook clean
    deps: [notebooks]
    outs: [.clean]
  train:
    matrix: {tau: "${taus}"}
    cmd: python -m sigmaens.notebook train tau=${item.tau} --output results/train/${item.tau}/train.ipynb
    deps: [.clean/train.ipynb]
    outs: ["results/train/${item.tau}"]
  figures:
    cmd: python -m sigmaens.notebook figures --output results/figures/figures.ipynb
    deps: [.clean/figures.ipynb, results/train/0.5, results/train/1]
    params: [taus]
    outs:
      - results/figures/figures.ipynb: {cache: false}
      - results/figures/figure.png: {cache: false}
    metrics:
      - results/figures/metrics.json: {cache: false}
"""

TYPES_PIPELINE = """
stages:
  types:
    matrix: {value: "${values}", flag: "${flags}"}
    cmd: >-
      python -m sigmaens.notebook .clean/types.ipynb value=${item.value} flag=${item.flag}
      --output types/${item.value}.ipynb
    outs: ["types/${item.value}.ipynb"]
"""

NOTEBOOKS = {
    "train": [
        "tau = 0.1",
        "import numpy as np\nfrom sigmaens import paths\n\nfolder = paths.root() / 'results/train' / f'{tau:g}'",
        "folder.mkdir(parents=True, exist_ok=True)\nnp.save(folder / 'gates.npy', np.linspace(0, tau, 5))\ntau",
    ],
    "figures": [
        "scale = 1.0",
        "import json\nimport matplotlib.pyplot as plt\nimport numpy as np\nfrom sigmaens import paths\n\n"
        "taus = paths.load_params()['taus']\nresults = paths.root() / 'results'",
        "gates = {tau: np.load(results / f'train/{tau}/gates.npy', allow_pickle=False) for tau in taus}\n"
        "for tau, line in gates.items():\n    plt.plot(scale * line, label=f'{tau}')\nplt.legend()\n"
        "plt.savefig(results / 'figures/figure.png')\nplt.show()",
        "metrics = {f'{tau}': {'mean': float(line.mean())} for tau, line in gates.items()}\n"
        "(results / 'figures/metrics.json').write_text(json.dumps(metrics)) and metrics",
    ],
    "types": ["value = None\nflag = False", "print(repr(value), type(value).__name__, repr(flag))"],
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Variables that keep the user's git and DVC settings out and this interpreter in."""
    home = tmp_path_factory.mktemp("home")
    person = {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    dvc = {f"DVC_{kind}_DIR": str(home / kind) for kind in ("GLOBAL_CONFIG", "SYSTEM_CONFIG", "SITE_CACHE")}
    return {
        **os.environ,
        **person,
        **dvc,
        "DVC_NO_ANALYTICS": "true",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


class Paper:
    """A repository and the commands a reader types in it."""

    def __init__(self, root, environment):
        self.root, self.environment = root, environment

    def run(self, *command, status=0):
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def dvc(self, *arguments, **options):
        return self.run(sys.executable, "-m", "dvc", *arguments, **options)

    def ran(self, *arguments):
        """Reproduce and return the names of the stages that ran."""
        lines = self.dvc("repro", *arguments).splitlines()
        return [line.split("'")[1] for line in lines if line.startswith("Running stage")]

    def stale(self):
        return set(json.loads(self.dvc("status", "--json")))

    def files(self):
        """Contents of everything the pipeline wrote."""
        folders = [self.root / "results", self.root / ".clean"]
        found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in [*found, self.root / "dvc.lock"]}

    def save_notebook(self, name, cells, **metadata):
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
        notebook.cells[0].metadata.tags = ["parameters"]
        notebook.metadata.update(metadata)
        nbformat.write(notebook, self.root / f"notebooks/{name}.ipynb")


@pytest.fixture(scope="module")
def original(tmp_path_factory, environment):
    """The paper, reproduced once, committed, and pushed to a folder."""
    root = tmp_path_factory.mktemp("tiny") / "a paper"
    (root / "notebooks").mkdir(parents=True)
    paper = Paper(root, environment)
    paper.run("git", "init", "-q")
    paper.dvc("init", "-q")
    paper.dvc("remote", "add", "-q", "-d", "folder", str(tmp_path_factory.mktemp("remote")))
    (root / "params.yaml").write_text(PARAMS)
    (root / "dvc.yaml").write_text(PIPELINE)
    for name, cells in NOTEBOOKS.items():
        paper.save_notebook(name, cells)
    assert paper.ran() == ["clean", "train@0.5", "train@1", "figures"]
    paper.run("git", "add", ".")
    paper.run("git", "commit", "-qm", "paper")
    paper.dvc("push", "-q")
    return paper


@pytest.fixture
def paper(original, tmp_path, environment):
    """A copy of the paper that a test may break."""
    return Paper(shutil.copytree(original.root, tmp_path / "a copy"), environment)


def test_git_holds_what_readers_want_to_see(original):
    tracked = set(original.run("git", "ls-files", "results").split())
    assert {f"results/figures/{name}" for name in ("figures.ipynb", "figure.png", "metrics.json")} <= tracked
    assert not any(name.endswith(".npy") for name in tracked)


def test_an_integer_in_the_matrix_is_a_float_for_a_float_parameter(original):
    executed = nbformat.read(original.root / "results/train/1/train.ipynb", as_version=4)
    assert executed.cells[1].source == "# Parameters\ntau = 1.0"
    assert executed.cells[-1].outputs[0].data["text/plain"] == "1.0"


def test_a_second_repro_does_nothing(paper):
    assert paper.ran() == []
    assert paper.run("git", "status", "--porcelain") == ""


def test_a_forced_repro_changes_no_byte(paper):
    before = paper.files()
    assert len(before) >= 10
    assert paper.ran("--force") == ["clean", "train@0.5", "train@1", "figures"]
    assert paper.files() == before
    assert paper.run("git", "status", "--porcelain") == ""


def test_a_broken_cell_stops_the_pipeline_and_leaves_no_notebook(paper):
    paper.save_notebook("figures", [*NOTEBOOKS["figures"], "1 / 0"])
    out = paper.dvc("repro", status=255)
    assert "figures: cell 5 of 5 failed" in out
    assert "ZeroDivisionError: division by zero" in out
    assert not list((paper.root / "results/figures").glob("*figures.ipynb*"))
    assert paper.stale() >= {"figures"}


def test_a_typo_in_a_parameter_stops_the_pipeline(paper):
    pipeline = paper.root / "dvc.yaml"
    pipeline.write_text(pipeline.read_text().replace("train tau=", "train tua="))
    assert "train has no parameter tua; it has tau" in paper.dvc("repro", "train@1", status=255)
    assert not (paper.root / "results/train/1/train.ipynb").exists()


def test_saving_a_notebook_makes_nothing_stale_but_clean(paper):
    paper.save_notebook("train", NOTEBOOKS["train"], language_info={"name": "python", "version": "3.99"})
    assert paper.stale() == {"clean"}
    assert paper.ran() == ["clean"]


def test_figures_rebuild_from_a_remote_without_training(original, tmp_path, environment):
    original.run("git", "clone", "-q", ".", str(tmp_path / "a clone"))
    clone = Paper(tmp_path / "a clone", environment)
    clone.dvc("pull", "-q")
    assert clone.stale() == set()
    assert clone.ran("--force", "--single-item", "figures") == ["figures"]
    assert clone.files() == original.files()
    assert clone.run("git", "status", "--porcelain") == ""


def test_matrix_values_keep_their_types_on_the_whole_path(paper):
    """`1e-3` is a number, `off` a string, `null` None and `true` a bool: from params.yaml to the kernel."""
    (paper.root / "dvc.yaml").write_text(TYPES_PIPELINE)
    assert len(paper.ran()) == 4
    seen = {}
    for path in (paper.root / "types").glob("*.ipynb"):
        seen[path.stem] = nbformat.read(path, as_version=4).cells[-1].outputs[0].text
    assert seen == {
        "0.001": "0.001 float True\n",
        "-2": "-2 int True\n",
        "off": "'off' str True\n",
        "None": "None NoneType True\n",
    }
