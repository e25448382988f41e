"""The runner refuses what papermill lets pass, repeats itself byte for byte, and leaves nothing behind a failure."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

from sigmaens import notebook, paths

PARAMETERS = """
profile = "digits"
members: int = 4
tau = 0.1
augment = False
note = None
taus = [0.1, 1.0]
runs = ["single", "sigma"]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty project in a folder with a space in its name, as the working directory."""
    root = tmp_path / "a project"
    (root / "notebooks").mkdir(parents=True)
    (root / "params.yaml").write_text("profiles: [digits]\n")
    monkeypatch.chdir(root)
    yield root
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def write(path, *sources, parameters=PARAMETERS):
    cells = [nbformat.v4.new_markdown_cell("# Title")]
    if parameters is not None:
        cells.append(nbformat.v4.new_code_cell(parameters.strip(), metadata={"tags": ["parameters"]}))
    cells += [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


def write_clean(root, *sources, parameters=PARAMETERS):
    write(root / "notebooks/n.ipynb", *sources, parameters=parameters)
    notebook.clean_notebooks()


def main(*arguments):
    return notebook.main(["n", "--output", "out/n.ipynb", *arguments])


def leftovers(root):
    return [str(path.relative_to(root)) for path in root.rglob("*") if "out" in path.parts and path.is_file()]


def test_saving_a_source_changes_no_byte_of_its_copy(project):
    source = project / "notebooks/n.ipynb"
    write_clean(project, "x = 1", "x = 1", "x + 1")
    copy = project / ".clean/n.ipynb"
    before = copy.read_bytes()

    saved = json.loads(source.read_text())
    for count, cell in enumerate(saved["cells"]):
        cell["id"] = f"random-{count}"
        cell["metadata"] |= {"collapsed": True, "execution": {"iopub.status.busy": "2026-01-01T00:00:00Z"}}
        cell["source"] = "".join(cell["source"])
        if cell["cell_type"] == "code":
            cell |= {"execution_count": count, "outputs": [{"output_type": "stream", "name": "stdout", "text": "1"}]}
    saved["cells"].append({"cell_type": "code", "id": "z", "metadata": {}, "source": "", "outputs": []})
    saved["metadata"] = {"kernelspec": {"name": "mine", "display_name": "Mine"}, "widgets": {}}
    source.write_text(json.dumps(saved, indent=4))
    notebook.clean_notebooks()

    assert copy.read_bytes() == before
    assert before.endswith(b"}\n")
    nbformat.validate(nbformat.read(copy, as_version=4))


def test_a_notebook_imports_the_code_of_its_own_project(project, tmp_path, monkeypatch):
    other = tmp_path / "another clone"
    other.mkdir()
    for folder in (project, other):
        (folder / "of_the_project.py").write_text(f"NAME = {folder.name!r}\n")
    (other / "of_the_other.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(other))
    write_clean(project, "import of_the_project, of_the_other\nof_the_project.NAME")
    assert main() == 0
    shown = nbformat.read("out/n.ipynb", as_version=4).cells[-1].outputs[0].data["text/plain"]
    assert shown == "'a project'"


@pytest.mark.parametrize("own", [None, "65536"])
def test_large_blocks_are_kept_unless_the_user_says_otherwise(project, monkeypatch, own):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    if own is not None:
        monkeypatch.setenv("MALLOC_MMAP_MAX_", own)
    write_clean(project, "import os\nos.environ['MALLOC_MMAP_MAX_'], os.environ['MALLOC_TRIM_THRESHOLD_']")
    assert main() == 0
    shown = nbformat.read("out/n.ipynb", as_version=4).cells[-1].outputs[0].data["text/plain"]
    assert shown == f"('{own or 0}', '{2**34}')"


def test_ids_belong_to_contents_and_are_unique(project):
    write_clean(project, "a", "b", "b")
    first = [cell.id for cell in nbformat.read(".clean/n.ipynb", as_version=4).cells]
    write_clean(project, "new", "a", "b", "b")
    second = [cell.id for cell in nbformat.read(".clean/n.ipynb", as_version=4).cells]
    assert len(set(first)) == len(first)
    assert second[:2] + second[3:] == first


def test_copies_of_removed_sources_go_and_a_bad_source_stops_everything(project):
    write(project / "notebooks/gone.ipynb", "1")
    write_clean(project, "1")
    (project / "notebooks/gone.ipynb").unlink()
    notebook.clean_notebooks()
    assert [path.name for path in paths.clean().iterdir()] == ["n.ipynb"]

    before = (project / ".clean/n.ipynb").read_bytes()
    write(project / "notebooks/n.ipynb", "2")
    (project / "notebooks/o.ipynb").write_text("{}")
    with pytest.raises(ValueError, match=r"o\.ipynb is not a notebook"):
        notebook.clean_notebooks()
    assert (project / ".clean/n.ipynb").read_bytes() == before


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("tau=1e-3", 0.001),
        ("tau=1", 1.0),
        ("tau=-2", -2.0),
        ("members=8", 8),
        ("members=-2", -2),
        ("profile=off", "off"),
        ("profile=yes", "yes"),
        ("profile='1'", "1"),
        ("augment=true", True),
        ("augment=false", False),
        ("note=null", None),
        ("note=None", None),
        ("note=1e-3", 0.001),
        ("note=text", "text"),
        ("taus=[1e-3, 2]", [0.001, 2.0]),
        ("runs=[off]", ["off"]),
        ("runs=[]", []),
    ],
)
def test_values_arrive_with_the_type_of_their_default(project, argument, expected):
    write_clean(project, "1")
    _, prepared, _, _ = notebook._prepare("n", "out.ipynb", notebook._parse_parameters([argument]), 60)
    scope = {}
    exec(prepared.cells[1].source + "\n" + prepared.cells[2].source, scope)
    value = scope[argument.partition("=")[0]]
    assert repr(value) == repr(expected)


def test_order_and_spelling_of_parameters_make_no_difference(project):
    write_clean(project, "1")
    spellings = [["tau=1", "members=8"], ["members=8", "tau=1.0"]]
    texts = [
        notebook._text(notebook._prepare("n", "out.ipynb", notebook._parse_parameters(s), 60)[1]) for s in spellings
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tua=0.1"], "no parameter tua; it has profile, members, tau"),
        (["members=4.0"], "'members' must be int"),
        (["members=true"], "'members' must be int"),
        (["augment=1"], "'augment' must be bool"),
        (["augment=yes"], "'augment' must be bool"),
        (["profile=1"], "'profile' must be str"),
        (["profile=null"], "'profile' must be str"),
        (["tau=false"], "'tau' must be float"),
        (["tau=inf"], "'tau' must be float"),
        (["tau=.inf"], "'tau' must be finite"),
        (["note=.nan"], "'note' must be finite"),
        (["note=true"], "'note' must be str, int, float, NoneType"),
        (["taus=0.1"], "'taus' must be a list"),
        (["taus=[0.1, a]"], "'taus[1]' must be float"),
        (["taus=[.nan]"], "'taus[0]' must be finite"),
        (["tau=0.1", "tau=0.1"], "'tau' is given twice"),
        (["tau"], "'tau' is not of the form key=value"),
        (["taus=[1,"], "'[1,' is not YAML"),
        (["--timeout", "0"], "timeout must be a whole number of seconds"),
        (["--timeout", "soon"], "invalid int value: 'soon'"),
        (["--output", "out/n.html"], "output must be an .ipynb file"),
        (["--output", ".clean/n.ipynb"], "other than the notebook itself"),
        (["--frozen"], "unrecognized arguments: --frozen"),
    ],
)
def test_bad_calls_end_in_one_line_and_status_2(project, capsys, arguments, message):
    write_clean(project, "1")
    assert main(*arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not leftovers(project)


def test_bad_commands_end_in_one_line_and_status_2(project, capsys):
    write_clean(project, "1")
    for arguments, message in [
        (["n"], "--output is missing"),
        (["m", "--output", "m.ipynb"], "no notebook"),
        (["clean", "tau=1"], "clean takes no parameters"),
        ([], "required: notebook"),
    ]:
        assert notebook.main(arguments) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        "import os",
        "%matplotlib inline",
        "tau = float('inf')",
        "tau = 0.1\ntau += 1",
        "tau = sigma = 0.1",
        "tau: float",
        "tau = (1, 2)",
        "tau = {'a': 1}",
        "taus = [0.1, 1]",
    ],
)
def test_parameters_cell_must_be_there_and_hold_literals(project, capsys, parameters):
    write_clean(project, "1", parameters=parameters)
    assert main() == 2
    assert "n must have exactly one code cell" in (error := capsys.readouterr().err) or "may only assign" in error


def test_two_parameters_cells_are_refused(project):
    write(project / "notebooks/n.ipynb", "a = 1")
    found = nbformat.read("notebooks/n.ipynb", as_version=4)
    found.cells[-1].metadata.tags = ["parameters"]
    nbformat.write(found, "notebooks/n.ipynb")
    notebook.clean_notebooks()
    with pytest.raises(ValueError, match="got 2 tagged cells"):
        notebook.run("n", "out.ipynb", {})


def test_two_runs_give_the_same_bytes_and_no_trace_of_where_or_when(project, monkeypatch):
    write_clean(
        project,
        "import time\nfrom pathlib import Path\nassert Path('params.yaml').is_file()",
        "for i in range(3):\n    print(tau, i)\n    time.sleep(0.25)",
        "from tqdm import tqdm\nfrom tqdm.auto import trange\nsum(tqdm([1, 2])) + sum(trange(3))",
        "print({'single', 'sigma', 'packed', 'mimo'})",
        "import matplotlib.pyplot as plt\nprint('before')\nplt.plot([1, 2], label='a')\nplt.legend()\n"
        "plt.show()\nprint('after')",
        "# 1e-3",
    )
    notebook.run("n", "out/a.ipynb", {"tau": 1, "taus": [1]})
    monkeypatch.chdir(project / "notebooks")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    notebook.run("n", project / "out/b.ipynb", {"taus": [1.0], "tau": 1.0})

    text = (project / "out/a.ipynb").read_text()
    assert text == (project / "out/b.ipynb").read_text()
    assert not re.search(rf"{re.escape(str(project))}|papermill|duration|20\d\d-\d\d|{sys.version.split()[0]}", text)
    executed = nbformat.reads(text, as_version=4)
    nbformat.validate(executed)
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert (code[1].id, code[1].source) == ("injected-parameters", "# Parameters\ntau = 1.0\ntaus = [1.0]")
    assert code[3].outputs == [{"output_type": "stream", "name": "stdout", "text": "1.0 0\n1.0 1\n1.0 2\n"}]
    assert [output.output_type for output in code[4].outputs] == ["execute_result"]
    assert [output.get("text", "figure") for output in code[6].outputs] == ["before\n", "figure", "after\n"]
    assert "image/png" in code[6].outputs[1].data


def test_the_users_settings_do_not_reach_the_kernel(project, tmp_path, monkeypatch):
    home = tmp_path / "home"
    for path, text in {
        "ipython/profile_default/startup/00.py": "planted = 1",
        "ipython/profile_default/ipython_config.py": "c.InteractiveShellApp.exec_lines = ['planted = 1']",
        "jupyter/kernels/python3/kernel.json": '{"argv": ["false"], "display_name": "x", "language": "python"}',
        "matplotlibrc": "lines.linewidth: 42",
    }.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    monkeypatch.setenv("IPYTHONDIR", str(home / "ipython"))
    monkeypatch.setenv("JUPYTER_PATH", str(home / "jupyter"))
    monkeypatch.setenv("MATPLOTLIBRC", str(home / "matplotlibrc"))
    monkeypatch.setenv("MPLBACKEND", "svg")
    write_clean(
        project,
        "assert 'planted' not in globals()",
        "import matplotlib as mpl\nassert mpl.rcParams['lines.linewidth'] == 1.5\nmpl.get_backend()",
    )
    notebook.run("n", "out.ipynb", {})
    assert "inline" in nbformat.read("out.ipynb", as_version=4).cells[-1].outputs[0].data["text/plain"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("tau / 0", "ZeroDivisionError: float division by zero"),
        ("import warnings\nwarnings.warn('old')", "it wrote to stderr"),
        ("object()", "address of an object"),
        ("from sigmaens import paths\nprint(paths.root())", "a path of this machine"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os\nos._exit(0)", "its kernel died"),
        ("import time\ntime.sleep(60)", "longer than the timeout of 2 s"),
    ],
)
def test_a_failing_cell_is_shown_and_leaves_an_earlier_output_alone(project, capsys, source, reason):
    write_clean(project, source, "'never reached'")
    (project / "out").mkdir()
    (project / "out/n.ipynb").write_text("earlier")
    start = time.monotonic()
    assert main("--timeout", "2") == 1
    assert time.monotonic() - start < 15
    error = capsys.readouterr().err
    assert error.startswith(f"n: cell 3 of 4 failed\n\n{source}\n\n")
    assert reason in error
    assert "\x1b" not in error
    assert leftovers(project) == ["out/n.ipynb"]
    assert (project / "out/n.ipynb").read_text() == "earlier"


def test_noise_of_native_libraries_does_not_fail_a_run(project, capfd, monkeypatch):
    # Kernels do not capture it anyway where this is set.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    write_clean(project, "import os, time\nos.write(2, b'no such instruction')\ntime.sleep(0.5)")
    assert main() == 0
    assert "no such instruction" in capfd.readouterr().err
    assert not nbformat.read("out/n.ipynb", as_version=4).cells[-1].outputs


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_kernel_and_its_children_and_leaves_nothing(project, number, status):
    write_clean(
        project,
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(2, signal.SIG_IGN); "
        "time.sleep(300)'])\n"
        "open('started', 'w').write(f'{os.getpid()} {child.pid}')\nos.rename('started', 'pids')\ntime.sleep(300)",
    )
    command = [sys.executable, "-m", "sigmaens.notebook", "n", "--output", "out/n.ipynb"]
    # A shell in the background would hand down an ignored SIGINT.
    runner = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    while not Path("pids").exists():
        assert runner.poll() is None
        time.sleep(0.05)
    runner.send_signal(number)
    assert runner.wait(timeout=20) == status
    for pid in Path("pids").read_text().split():
        wait_until_gone(int(pid))
    assert not leftovers(project)


def test_children_of_a_dead_kernel_end_with_it(project):
    write_clean(
        project,
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "with open('pid', 'w') as file:\n    file.write(str(child.pid))\nos._exit(1)",
    )
    assert main() == 1
    wait_until_gone(int(Path("pid").read_text()))


def wait_until_gone(pid):
    """Wait until no process has this number; one that only waits to be reaped counts as gone."""
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} is an orphan")
