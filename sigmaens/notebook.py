"""Run notebooks strictly: typed parameters, stable bytes, and nothing left behind by a run that failed.

    python -m sigmaens.notebook clean
    python -m sigmaens.notebook NAME key=value … --output PATH [--timeout SECONDS]

The first writes canonical copies of the sources; the second runs one copy through papermill, in the project's
folder, in a kernel that sees neither the user's IPython profile nor their kernelspecs and matplotlib settings.
Exit status: 0, 1 for a notebook that failed, 2 for a call that could not be made.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import logging
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# ruff: noqa: E402
# jsonschema, which nbformat imports, would compile a grammar of internationalised web addresses: a second a run.
sys.modules.setdefault("rfc3987_syntax", None)

import nbformat
from nbformat import NotebookNode

from sigmaens import paths

__all__ = ["NotebookError", "clean_notebooks", "main", "run"]

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE = {"name": "python", "pygments_lexer": "ipython3"}
KERNEL_OPTIONS = [
    "--HistoryManager.enabled=False",
    "--Application.log_level=CRITICAL",
    # What native libraries print is about the machine, so it goes to the terminal and not into the notebook.
    "--IPKernelApp.capture_fd_output=False",
]
SCALARS = (bool, int, float, str, type(None))
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class NotebookError(RuntimeError):
    """A cell raised, wrote what cannot be repeated, ran out of time, or took its kernel down."""


def clean_notebooks() -> list[Path]:
    """Write the canonical copy of every source notebook into `paths.clean()` and return the copies' paths.

    A copy keeps what a person wrote (sources, tags, attachments) and nothing else, so that saving a source from
    JupyterLab, or running it there, changes no byte of it. Copies of removed sources are removed.

    Raises:
        ValueError: if there is no source, or one is no notebook; nothing is written then.
    """
    sources = sorted(paths.notebooks().glob("*.ipynb"))
    if not sources:
        raise ValueError(f"no notebook in {paths.notebooks()}")
    texts = {paths.clean() / source.name: _text(_canonical(source)) for source in sources}
    paths.clean().mkdir(exist_ok=True)
    for copy, text in texts.items():
        _write(copy, text)
    for stale in set(paths.clean().glob("*.ipynb")) - set(texts):
        stale.unlink()
    return list(texts)


def run(name: str, output: str | Path, parameters: Mapping[str, Any], timeout: int | None = None) -> None:
    """Run the clean copy of a notebook in the project's folder and write the executed notebook to `output`.

    The result holds no time, random id, absolute path or version, so that a second run gives the same bytes. A
    cell that writes to stderr, or shows an object's address or a path of this machine, fails the run for that
    reason. `output` appears only when every cell has succeeded; an earlier file there survives a failure.

    Args:
        name: notebook in `paths.clean()` without its suffix, or the path of any `.ipynb` file.
        output: `.ipynb` file to write.
        parameters: values that replace defaults of the cell tagged `parameters`. A value has the type of its
            default; an int stands for a float; a default of None takes str, int, float and None; the elements of
            a list have the type of the default's elements.
        timeout: longest time a cell may take, in seconds; None is no limit, since a cell may train for days.

    Raises:
        FileNotFoundError: if there is no such notebook.
        ValueError: if the notebook has no usable `parameters` cell, a parameter is unknown, inf or nan, or
            `output` or `timeout` is not allowed.
        TypeError: if a value's type is not its default's.
        NotebookError: naming the cell that failed, with its source and plain traceback.
    """
    _execute(*_prepare(name, output, parameters, timeout))


def main(argv: list[str] | None = None) -> int:
    """Run the command line in this module's docstring and return its exit status."""
    try:
        options = _Parser().parse_intermixed_args(argv)
        if options.notebook == "clean":
            if options.parameters or options.output:
                raise ValueError("clean takes no parameters and no --output")
            clean_notebooks()
            return 0
        if options.output is None:
            raise ValueError("--output is missing: the path of the executed notebook")
        parameters = _parse_parameters(options.parameters)
        job = _prepare(options.notebook, options.output, parameters, options.timeout)
    except (OSError, TypeError, ValueError) as error:
        print(f"sigmaens.notebook: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        _execute(*job)
    except NotebookError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{options.notebook}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


class _Parser(argparse.ArgumentParser):
    """The command line; its errors are raised, so that they end as one line like all others."""

    def __init__(self) -> None:
        super().__init__(prog="python -m sigmaens.notebook", description="Run a notebook strictly.")
        self.add_argument("notebook", help="name or path of a notebook, or `clean`")
        self.add_argument("parameters", nargs="*", metavar="key=value", help="values as in YAML 1.2")
        self.add_argument("--output", help="path of the executed notebook")
        self.add_argument("--timeout", type=int, help="seconds a cell may take (default: no limit)")

    def error(self, message: str) -> None:
        raise ValueError(message)


def _parse_parameters(arguments: list[str]) -> dict[str, Any]:
    """Read `key=value` arguments; `None` is null, since that is how DVC writes a null into a command."""
    from ruamel.yaml import YAMLError

    parameters: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise ValueError(f"parameter {argument!r} is not of the form key=value")
        if key in parameters:
            raise ValueError(f"parameter {key!r} is given twice")
        try:
            parameters[key] = None if text == "None" else paths.parse_yaml(text)
        except YAMLError:
            raise ValueError(f"parameter {key!r}: {text!r} is not YAML") from None
    return parameters


def _prepare(
    name: str, output: str | Path, parameters: Mapping[str, Any], timeout: int | None
) -> tuple[str, NotebookNode, Path, int]:
    """Check a call of `run` as far as that goes without a kernel; return what `_execute` takes."""
    source, output = Path(name), Path(output).absolute()
    if source.suffix != ".ipynb":
        source = paths.clean() / f"{name}.ipynb"
    if not source.is_file():
        raise FileNotFoundError(f"no notebook {source}: run `python -m sigmaens.notebook clean`, or correct its name")
    if output.suffix != ".ipynb" or output == source.absolute():
        raise ValueError(f"output must be an .ipynb file other than the notebook itself, got {output}")
    if timeout is not None and (type(timeout) is not int or timeout < 1):
        raise ValueError(f"timeout must be a whole number of seconds, at least 1, got {timeout!r}")
    notebook = _canonical(source)
    _inject(notebook, parameters, source.stem)
    output.parent.mkdir(parents=True, exist_ok=True)
    return source.stem, notebook, output, timeout


def _canonical(source: Path) -> NotebookNode:
    """Read a notebook and keep what a person wrote in it.

    The id of a cell comes from its contents, so that it is the same wherever the cell stands.
    """
    metadata = NotebookNode(kernelspec=NotebookNode(KERNEL), language_info=NotebookNode(LANGUAGE))
    seen: dict[str, int] = {}
    try:
        found = nbformat.v4.reads(source.read_text(encoding="utf-8"))
        cells = [_canonical_cell(cell) for cell in found.cells if cell.source.strip()]
        for cell in cells:
            digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
            seen[digest] = seen.get(digest, 0) + 1
            cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        notebook = NotebookNode(cells=cells, metadata=metadata, nbformat=4, nbformat_minor=5)
        nbformat.validate(notebook)
    except (AttributeError, TypeError, ValueError, nbformat.ValidationError) as error:
        raise ValueError(f"{source} is not a notebook of format 4: {error!r}") from None
    return notebook


def _canonical_cell(cell: NotebookNode) -> NotebookNode:
    kept = NotebookNode({key: cell[key] for key in ("cell_type", "source", "attachments") if key in cell})
    kept.metadata = NotebookNode(tags=cell.metadata.tags) if cell.metadata.get("tags") else NotebookNode()
    if cell.cell_type == "code":
        kept.update(execution_count=None, outputs=[])
    return kept


def _text(notebook: NotebookNode) -> str:
    return nbformat.v4.writes(notebook) + "\n"


def _write(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _inject(notebook: NotebookNode, parameters: Mapping[str, Any], name: str) -> None:
    """Insert a cell with the checked parameters after the cell tagged `parameters`.

    papermill could do it, but warns where we refuse, and its text depends on whether `black` is installed.
    """
    tagged = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1 or notebook.cells[tagged[0]].cell_type != "code":
        raise ValueError(f"{name} must have exactly one code cell tagged 'parameters', got {len(tagged)} tagged cells")
    defaults = _defaults(notebook.cells[tagged[0]].source, name)
    unknown = sorted(set(parameters) - set(defaults))
    if unknown:
        raise ValueError(f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(defaults) or 'none'}")
    values = {key: _conform(key, parameters[key], default) for key, default in defaults.items() if key in parameters}
    if values:
        lines = ["# Parameters", *(f"{key} = {value!r}" for key, value in values.items())]
        cell = nbformat.v4.new_code_cell("\n".join(lines), id="injected-parameters")
        cell.metadata.tags = ["injected-parameters"]
        notebook.cells.insert(tagged[0] + 1, cell)


def _defaults(source: str, name: str) -> dict[str, Any]:
    """Read the assignments of a parameters cell without running it."""
    try:
        return dict(_default(statement) for statement in ast.parse(source).body)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"{name}: the parameters cell may only assign numbers, strings, booleans, None or lists of one of these "
            f"to names: {error}"
        ) from None


def _default(statement: ast.stmt) -> tuple[str, Any]:
    match statement:
        case (
            ast.Assign(targets=[ast.Name(key)], value=node)
            | ast.AnnAssign(target=ast.Name(key), value=ast.expr() as node)
        ):
            with suppress(ValueError):
                value = ast.literal_eval(node)
                elements = value if isinstance(value, list) else [value]
                if len({type(element) for element in elements}) <= 1 and all(type(e) in SCALARS for e in elements):
                    return key, value
    raise ValueError(f"got {ast.unparse(statement)!r}")


def _conform(key: str, value: Any, default: Any) -> Any:
    """Return a parameter's value in the type of its default, or refuse it."""
    if isinstance(default, list):
        if not isinstance(value, list):
            raise TypeError(f"parameter {key!r} must be a list like its default {default!r}, got {value!r}")
        example = default[0] if default else None
        return [_conform(f"{key}[{i}]", element, example) for i, element in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"parameter {key!r} must be finite, got {value!r}")
    if type(default) is float and type(value) is int:
        return float(value)
    allowed = (str, int, float, type(None)) if default is None else (type(default),)
    if type(value) not in allowed:
        types = ", ".join(kind.__name__ for kind in allowed)
        raise TypeError(
            f"parameter {key!r} must be {types} (default {default!r}), got {type(value).__name__} {value!r}"
        )
    return value


def _execute(name: str, notebook: NotebookNode, output: Path, timeout: int | None) -> None:
    """Run a prepared notebook and write it to `output` if every cell succeeds."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    running = 0

    def enter(cell: NotebookNode, cell_index: int) -> None:
        nonlocal running
        running = cell_index

    def leave(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        reply = execute_reply["content"]
        reason = "\n".join(reply["traceback"]) if reply["status"] == "error" else _unrepeatable(cell)
        if reason:
            raise failure(reason)

    def failure(reason: str) -> NotebookError:
        source = notebook.cells[running].source
        return NotebookError(
            f"{name}: cell {running + 1} of {len(notebook.cells)} failed\n\n{source}\n\n{ANSI.sub('', reason)}"
        )

    # nbclient's own account of a dead kernel would come on top of ours.
    logging.getLogger("papermill").addHandler(logging.NullHandler())
    with _kernel() as kernel:
        try:
            executed = papermill.execute_notebook(
                notebook,
                None,
                cwd=paths.root(),
                progress_bar={"desc": name, "unit": "cell"} if sys.stderr.isatty() else False,
                execution_timeout=timeout,
                iopub_timeout=60,
                kernel_manager_class=kernel,
                extra_arguments=KERNEL_OPTIONS,
                on_cell_execute=enter,
                on_cell_executed=leave,
            )
        except CellTimeoutError:
            raise failure(f"it took longer than the timeout of {timeout} s") from None
        except DeadKernelError:
            raise failure("its kernel died") from None
    for cell, ran in zip(notebook.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.update(execution_count=ran.execution_count, outputs=_merge_streams(ran.outputs))
    nbformat.validate(notebook)
    _write(output, _text(notebook))


def _unrepeatable(cell: NotebookNode) -> str:
    """Say what in a cell's outputs would differ on another machine or in another run; empty if nothing does."""
    for output in cell.outputs:
        if output.get("name") == "stderr":
            return f"it wrote to stderr:\n{output.text}"
        texts = [output.text] if "text" in output else [v for k, v in output.data.items() if k.startswith("text/")]
        for text in texts:
            if str(paths.root()) in text or ADDRESS.search(text):
                return f"it shows a path of this machine or the address of an object:\n{text}"
    return ""


def _merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join neighbouring pieces of stdout, which the kernel cuts wherever its clock strikes."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream":
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


@contextmanager
def _kernel() -> Iterator[type]:
    """Yield a class of kernel managers; its kernels, and all processes they started, end with the block."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from traitlets import default

    groups = []
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "matplotlibrc")
        settings.touch()
        environment = {
            # glibc takes blocks beyond 32 MiB from the system every time, whose zeroing can take as long as a pass.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(2**34),
            **os.environ,
            "IPYTHONDIR": folder,
            "MATPLOTLIBRC": str(settings),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            # This project's code, also where the environment has that of another clone installed.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(paths.root()), os.environ.get("PYTHONPATH")])),
            "PYTHONHASHSEED": "0",
            # tqdm's word on importing its notebook bars, which many libraries do; silent bars need no widgets.
            "PYTHONWARNINGS": "ignore:IProgress not found",
            "TQDM_DISABLE": "1",
        }

        class Kernel(AsyncKernelManager):
            @default("kernel_spec_manager")
            def _kernel_spec_manager_default(self) -> KernelSpecManager:
                return KernelSpecManager(kernel_dirs=[])

            async def start_kernel(self, **options: Any) -> None:
                await super().start_kernel(env=environment, **options)
                groups.append(self.provisioner.pgid)

        try:
            yield Kernel
        finally:
            for group in groups:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
