"""Cells that other machines run come back through the remote: by hand, as SLURM jobs, from DVC's queue."""

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import numpy as np
import pytest
import test_tiny_paper

Paper = test_tiny_paper.Paper
# Under another name, since `environment` adapts it.
surroundings = test_tiny_paper.environment
ROOT = Path(__file__).parents[1]
SLURM = ROOT / "examples/slurm_sweep.sh"

PARAMS = """
taus: [0.5, 1]
train: {epochs: 3}
"""

PIPELINE = """
stages:
  clean:
    cmd: python -m sigmaens.notebook clean
    deps: [notebooks]
    outs: [.clean]
  data:
    cmd: python -m sigmaens.notebook data --output data/data.ipynb
    deps: [.clean/data.ipynb]
    outs: [data]
  train:
    matrix: {tau: "${taus}"}
    cmd: python -m sigmaens.notebook train tau=${item.tau} --output results/train/${item.tau}/train.ipynb
    deps: [.clean/train.ipynb, data]
    params: [train]
    outs: ["results/train/${item.tau}"]
  figures:
    cmd: python -m sigmaens.notebook figures --output results/figures/figures.ipynb
    deps: [.clean/figures.ipynb, results/train]
    outs:
      - results/figures: {cache: false}
"""

# A cell shows where its package lies in its clone, and waits after half of its work if it is told to.
NOTEBOOKS = {
    "data": ["seed = 0", "import numpy as np\n\nnp.save('data/x.npy', np.arange(5.0) + seed)"],
    "train": [
        "tau = 0.1",
        "import os\nimport time\nfrom pathlib import Path\n\n"
        "import numpy as np\nimport sigmaens\nfrom sigmaens import paths",
        "folder = Path(f'results/train/{tau:g}')\n"
        "weights = np.load('data/x.npy') * tau * paths.load_params()['train']['epochs']\n"
        "np.save(folder / 'first.npy', weights[:3])\n"
        "time.sleep(int(os.environ.get('WAIT', 0)))\n"
        "np.save(folder / 'second.npy', weights[3:])",
        "print(Path(sigmaens.__file__).relative_to(paths.root()))",
    ],
    "figures": [
        "places = 3",
        "import json\nfrom pathlib import Path\nimport numpy as np",
        "sums = {}\n"
        "for folder in sorted(Path('results/train').iterdir()):\n"
        "    sums[folder.name] = round(sum(float(np.load(file).sum()) for file in folder.glob('*.npy')), places)\n"
        "Path('results/figures/metrics.json').write_text(json.dumps(sums)) and sums",
    ],
}


@pytest.fixture(scope="module")
def environment(surroundings):
    """Without a search path that would come before the code of a clone."""
    return {key: value for key, value in surroundings.items() if key != "PYTHONPATH"}


@pytest.fixture(scope="module")
def bucket():
    """An S3 server of this machine with one bucket, and what a client needs to know."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "the S3 server ended"
            time.sleep(0.1)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(urllib.request.Request(f"{address}/sweeps", method="PUT"), timeout=30).close()
        yield address
    finally:
        server.terminate()
        server.wait(30)


class Machine(Paper):
    """A clone of the author's repository, as another machine has it."""

    def __init__(self, hub, root, environment):
        super().__init__(root, environment)
        subprocess.run(["git", "clone", "-q", hub, root], env=environment, check=True)


class Sweep:
    """The author's paper with its data made and sent; nothing is trained yet."""

    def __init__(self, folder, environment, *remote):
        self.folder, self.environment = folder, environment
        self.run("git", "init", "-q", "--bare", "-b", "main", "hub.git")
        self.author = author = self.machine("author")
        author.dvc("init", "-q")
        for arguments in remote:
            author.dvc("remote", *arguments, "-q")
        shutil.copytree(ROOT / "sigmaens", author.root / "sigmaens", ignore=shutil.ignore_patterns("__pycache__"))
        (author.root / "notebooks").mkdir()
        for name, cells in NOTEBOOKS.items():
            author.save_notebook(name, cells)
        (author.root / "params.yaml").write_text(PARAMS)
        (author.root / "dvc.yaml").write_text(PIPELINE)
        (author.root / ".gitignore").write_text("/.clean/\n/data/\n/results/train/*/\n__pycache__/\n")
        (author.root / ".dvcignore").write_text("__pycache__/\n.gitignore\n")
        assert author.ran("data") == ["clean", "data"]
        self.publish("Sweep")

    def run(self, *command):
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True)

    def machine(self, name):
        return Machine(self.folder / "hub.git", self.folder / name, self.environment)

    def publish(self, message):
        self.author.run("git", "add", ".")
        self.author.run("git", "commit", "-qm", message)
        self.author.run("git", "push", "-q", "origin", "HEAD:main")
        self.author.dvc("push", "-q", "--run-cache")


@pytest.fixture
def sweep(tmp_path, environment):
    return Sweep(tmp_path, environment, ("add", "-d", "store", str(tmp_path / "store")))


@pytest.fixture
def sweep_s3(tmp_path, environment, bucket):
    account = {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
    }
    remote = ("add", "-d", "store", "s3://sweeps/paper"), ("modify", "store", "endpointurl", bucket)
    return Sweep(tmp_path, environment | account, *remote)


def trained(paper, tau):
    return {path.name: path.read_bytes() for path in (paper.root / f"results/train/{tau}").iterdir()}


def metrics(paper):
    return json.loads((paper.root / "results/figures/metrics.json").read_text())


@pytest.mark.parametrize("fixture", ["sweep", "sweep_s3"])
def test_a_cell_of_another_machine_comes_back_through_the_remote(fixture, request):
    sweep = request.getfixturevalue(fixture)
    author, other = sweep.author, sweep.machine("another machine")
    assert other.ran("--pull", "train@0.5") == ["train@0.5"]
    other.dvc("push", "--run-cache", "train@0.5")
    assert author.ran("--pull") == ["train@1", "figures"]
    assert trained(author, "0.5") == trained(other, "0.5")
    assert metrics(author) == {"0.5": 15.0, "1": 30.0}
    # The cell ran the code of its own clone, and its bytes are those of a run at home.
    output = nbformat.reads(trained(other, "0.5")["train.ipynb"].decode(), as_version=4).cells[-1].outputs[0]
    assert output.text == "sigmaens/__init__.py\n"
    assert author.ran("--force", "--single-item", "train@0.5") == ["train@0.5"]
    assert trained(author, "0.5") == trained(other, "0.5")
    # Why the run cache and not commits: the lock files of two machines do not merge.
    for machine in (author, other):
        machine.run("git", "commit", "-qm", "Results", "dvc.lock")
    author.run("git", "push", "-q", "origin", "HEAD:main")
    assert "Merge conflict in dvc.lock" in other.run("git", "pull", "--no-rebase", "origin", "main", status=1)


def slurm(folder, environment, task, *cells, **variables):
    """Start a job of an array as SLURM does: a copy of the script, its variables, a process group that it can kill."""
    script = shutil.copy(SLURM, folder / "slurm_script")
    array = {"SLURM_SUBMIT_DIR": str(folder / "author"), "SLURM_ARRAY_TASK_ID": str(task)}
    return subprocess.Popen(
        ["bash", script, *cells],
        cwd=folder,
        env=environment | array | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_slurm_job_that_was_killed_leaves_nothing_behind_and_runs_again(sweep):
    cells = sweep.author.dvc("stage", "list", "--name-only").split()
    assert cells == ["clean", "data", "train@0.5", "train@1", "figures"]
    clone = sweep.folder / "author.sweep/train@1"
    half = clone / "results/train/1/first.npy"
    sent = {path for path in (sweep.folder / "store").rglob("*") if path.is_file()}

    job = slurm(sweep.folder, sweep.environment, 4, *cells, WAIT="120")
    while not half.exists():
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    assert {path.name for path in half.parent.iterdir()} == {"first.npy"}
    killed = Paper(clone, sweep.environment)
    killed.dvc("push", "--run-cache")
    assert {path for path in (sweep.folder / "store").rglob("*") if path.is_file()} == sent

    job = slurm(sweep.folder, sweep.environment, 4, *cells)
    log, _ = job.communicate(timeout=120)
    assert job.returncode == 0, log
    assert [line.split("'")[1] for line in log.splitlines() if line.startswith("Running stage")] == ["train@1"]
    assert not clone.exists()
    assert sweep.author.ran("--pull") == ["train@0.5", "figures"]
    assert metrics(sweep.author) == {"0.5": 15.0, "1": 30.0}


def test_a_slurm_job_beyond_the_cells_says_so(tmp_path, environment):
    job = slurm(tmp_path, environment, 3, "train@0.5", "train@1")
    log, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "no cell of this number, only 2 are given" in log


def test_slurm_jobs_that_share_a_folder_take_turns_at_dvc(tmp_path):
    """With stand-ins for SLURM and for a DVC that, as the real one, starts beside no other in its folder."""
    tools = tmp_path / ".venv/bin"
    tools.mkdir(parents=True)
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    (tmp_path / ".dvc/tmp/rwlock").write_text("of a job that was killed")
    stand_ins = {
        "dvc": "set -e; lock=.dvc/tmp/rwlock; [[ ! -e $lock ]]; touch $lock; sleep 0.3; echo dvc $* >> log; rm $lock",
        "scontrol": "echo node1; echo node2",
        "srun": 'echo "$@" >> log',
    }
    for name, code in stand_ins.items():
        (tools / name).write_text(f"#!/bin/bash\n{code}\n")
        (tools / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    jobs = [
        subprocess.Popen(
            ["bash", ROOT / "examples/slurm.sh", stage, "imagenet", method],
            cwd=tmp_path,
            env=os.environ | job,
            stderr=subprocess.PIPE,
            text=True,
        )
        for stage, method in (("train_vision", "single"), ("train_vision", "sigma"), ("finetune", "finetune"))
    ]
    for job in jobs:
        assert job.communicate(timeout=60)[1] == ""
        assert job.returncode == 0
    log = (tmp_path / "log").read_text().splitlines()
    for method in ("single", "sigma"):
        own = [line for line in log if line.endswith(method)]
        stage = f"--single-item train_vision@imagenet-{method}"
        assert own[::2] == [f"dvc repro --dry {stage}", f"dvc repro {stage}"]
        assert re.search(
            f"torchrun --nnodes=2 .*--rdzv-endpoint=node1:20007 -m sigmaens.training imagenet {method}$", own[1]
        )
    # A profile has one cell for fine-tuning, whose name has no method.
    assert [line for line in log if "finetune" in line] == [
        "dvc repro --dry --single-item finetune@imagenet",
        *[line for line in log if line.endswith("-m sigmaens.training imagenet finetune")],
        "dvc repro --single-item finetune@imagenet",
    ]
    assert log.count("dvc repro clean data@imagenet") == 3


def test_the_queue_of_another_machine_runs_changed_parameters(sweep):
    author, other = sweep.author, sweep.machine("another machine")
    other.dvc("exp", "run", "--queue", "--pull", "-n", "longer", "-S", "train.epochs=7", "train@0.5")
    other.dvc("exp", "run", "--run-all")
    other.dvc("exp", "push", "--run-cache", "origin", "longer")
    assert other.run("git", "status", "--porcelain") == ""

    author.dvc("exp", "pull", "origin", "longer")
    shown = csv.DictReader(author.dvc("exp", "show", "--csv").splitlines())
    assert {row["Experiment"]: row["train.epochs"] for row in shown} == {"": "3", "longer": "7"}
    # Taken over by hand, which keeps the layout of params.yaml, the change finds its result.
    (author.root / "params.yaml").write_text(PARAMS.replace("epochs: 3", "epochs: 7"))
    assert author.ran("--pull", "train@0.5") == []
    assert np.load(author.root / "results/train/0.5/first.npy").tolist() == [0.0, 3.5, 7.0]
