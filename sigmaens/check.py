"""Compare fresh numbers with committed ones, within the tolerances that `params.yaml` states.

    python -m sigmaens.check [profile …]                       # metrics.json in the working tree against HEAD
    python -m sigmaens.check --notebooks [profile …]           # names of their executed notebooks, to be run again:
    pytest -p sigmaens.check --nbval-lax results/digits        # executed notebooks against a new run

`params.yaml` holds absolute tolerances by name, `default` among them: `tolerances: {default: 1e-6, ece: 1e-3}`.
Exit status of the first: 0, 1 for a disagreement or nothing to compare, 2 for a call that could not be made.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pluggy import HookimplMarker

from sigmaens import paths

__all__ = ["compare", "flatten", "main", "show"]

CELL_TIMEOUT = 600.0
NBVAL_DEFAULT_TIMEOUT = 2000.0
LINE = re.compile(r"(.+?) = (.+)")


def flatten(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Name every value of nested dictionaries and lists by its dotted path.

    >>> flatten({"sigma": {"nll": 0.5, "ece": [0.1, 0.2]}})
    {'sigma.nll': 0.5, 'sigma.ece.0': 0.1, 'sigma.ece.1': 0.2}

    Raises:
        TypeError: for a value that is no number, string, bool or None.
        ValueError: if two values get the same name.
    """
    flat: dict[str, Any] = {}
    for name, value in _leaves("", metrics):
        if not isinstance(value, str | int | float | None):
            raise TypeError(f"{name} must be a number, a string, a bool or None, got {type(value).__name__}")
        if name in flat:
            raise ValueError(f"two values are named {name}")
        flat[name] = value
    return flat


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, value


def compare(fresh: Mapping[str, Any], reference: Mapping[str, Any], tolerances: Mapping[str, float]) -> list[str]:
    """Return one line for every value on which fresh and reference metrics disagree, missing ones included.

    Floats agree within an absolute tolerance, and NaN with NaN; ints, strings and bools agree if equal. The
    tolerance of `sigma.nll.mean` is that of the last component named in `tolerances`, else `default`.

    >>> compare({"nll": 0.52, "verdict": "supported"}, {"nll": 0.5, "verdict": "supported"}, {"default": 0.01})
    ['nll: reference 0.5, fresh 0.52, tolerance 0.01']

    Raises:
        ValueError: if `tolerances` has no `default`, or one that is negative or no number.
    """
    for name, value in {"default": None, **tolerances}.items():
        if type(value) not in (int, float) or not value >= 0:
            raise ValueError(f"tolerance {name!r} must be a number >= 0, got {value!r}")
    fresh, reference = flatten(fresh), flatten(reference)
    lines = []
    for name in sorted(fresh.keys() | reference.keys()):
        if name not in fresh:
            lines.append(f"{name}: reference {reference[name]!r}, fresh has no such value")
        elif name not in reference:
            lines.append(f"{name}: fresh {fresh[name]!r}, reference has no such value")
        else:
            named = (part for part in reversed(name.split(".")) if part in tolerances)
            tolerance = tolerances[next(named, "default")]
            if not _agree(fresh[name], reference[name], tolerance):
                allowed = f", tolerance {tolerance}" if isinstance(reference[name], float) else ""
                lines.append(f"{name}: reference {reference[name]!r}, fresh {fresh[name]!r}{allowed}")
    return lines


def _agree(fresh: Any, reference: Any, tolerance: float) -> bool:
    kinds = {type(fresh), type(reference)}
    if float not in kinds or not kinds <= {float, int}:
        return type(fresh) is type(reference) and fresh == reference
    both_nan = math.isnan(fresh) and math.isnan(reference)
    return both_nan or fresh == reference or abs(fresh - reference) <= tolerance


def show(metrics: Mapping[str, Any]) -> None:
    """Print metrics as sorted lines `name = value`, floats with six significant digits: a notebook's checked cell.

    >>> show({"nll": 0.123456789, "members": 4, "verdict": "supported", "ece": 0.0})
    ece = 0.0
    members = 4
    nll = 0.123457
    verdict = 'supported'
    """
    for name, value in sorted(flatten(metrics).items()):
        print(f"{name} = {float(f'{value:.6g}') if isinstance(value, float) else value!r}")


def main(argv: list[str] | None = None) -> int:
    """Compare `metrics.json` files with their committed versions and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sigmaens.check", description="Compare results with HEAD.")
    parser.add_argument(
        "profiles", nargs="*", metavar="profile", help="default: all profiles that are on in params.yaml"
    )
    parser.add_argument("--notebooks", action="store_true", help="print the executed notebooks that are committed")
    options = parser.parse_args(argv)
    wanted = options.profiles
    try:
        profiles, tolerances = _param("profiles")["all"], _param("tolerances")
        known = dict.fromkeys([*profiles, *paths.load_params().get("settings", {})])  # those that are off too
        unknown = sorted(set(wanted) - set(known))
        if unknown:
            raise ValueError(f"no profile {', '.join(unknown)} in params.yaml; there are {', '.join(known)}")
        # The notebook on the method belongs to no profile.
        folders = wanted or ["method", *profiles]
        if options.notebooks:
            print("\n".join(name for folder in folders for name in _committed(folder) if name.endswith(".ipynb")))
            return 0
        reports = [_check_folder(folder, tolerances) for folder in folders]
    except (OSError, TypeError, ValueError) as error:
        print(f"sigmaens.check: {error}", file=sys.stderr)
        return 2
    return max(reports)


def _param(name: str) -> Any:
    params = paths.load_params()
    if not params.get(name):
        raise ValueError(f"params.yaml has no {name!r}")
    return params[name]


def _check_folder(folder: str, tolerances: Mapping[str, float]) -> int:
    """Report on one folder of results; return 1 if a committed value is not met, or if there is none."""
    names = [name for name in _committed(folder) if name.endswith("/metrics.json")]
    lines, values = [], 0
    for name in names:
        reference = _read(name, _git("show", f"HEAD:./{name}"))
        values += len(flatten(reference))
        if (paths.root() / name).is_file():
            fresh = _read(name, (paths.root() / name).read_text(encoding="utf-8"))
            lines += [f"{name}: {line}" for line in compare(fresh, reference, tolerances)]
        else:
            lines.append(f"{name}: committed, but missing here")
    if not values:
        lines.append(f"results/{folder}: no metrics.json with values is committed, so nothing was compared")
    outcome = f"{len(lines)} disagreements" if lines else "all within tolerance"
    print("\n".join([*lines, f"{folder}: {len(names)} files, {values} values, {outcome}"]))
    return int(bool(lines))


def _committed(folder: str) -> list[str]:
    return _git("ls-tree", "-r", "-z", "--name-only", "HEAD", f"results/{folder}/").split("\0")


def _read(name: str, text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}") from None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=paths.root(), capture_output=True, encoding="utf-8")
    if done.returncode:
        raise ValueError(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def pytest_configure(config: Any) -> None:
    """Run notebooks in this interpreter, and give up on a cell (or its dead kernel) in minutes."""
    config.option.nbval_current_env = not config.option.nbval_kernel_name
    if config.option.nbval_cell_timeout == NBVAL_DEFAULT_TIMEOUT:
        config.option.nbval_cell_timeout = CELL_TIMEOUT


@HookimplMarker("pytest")(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Iterator[None]:
    """Compare numbers of notebook cells with tolerance, and refuse notebooks whose checks are void."""
    from nbval.plugin import IPyNbFile

    report = yield
    if isinstance(collector, IPyNbFile) and report.passed:
        checked = [cell for cell in report.result if cell.options["check"] and not cell.options["skip"]]
        void = [cell.name for cell in checked if not cell.cell.outputs]
        if len(void) == len(checked) or (collector.config.option.nbval_lax and void):
            report.outcome = "failed"
            cells = ", ".join(void) or "no cell is checked"
            report.longrepr = f"{collector.name}: a checked cell must have outputs to compare: {cells}"
        for cell in checked:
            cell.compare_outputs = partial(_compare_outputs, cell)
    return report


def _compare_outputs(cell: Any, fresh: list[Any], reference: list[Any]) -> bool:
    """Let nbval compare outputs after fresh lines `name = value` within tolerance were replaced by committed ones."""
    tolerances = _param("tolerances")
    notes = []
    for new, old in zip(fresh, reference, strict=False):
        if "text" in new and "text" in old:
            new.text, lines = _adopt(new.text, old.text, tolerances)
            notes += lines
    same = type(cell).compare_outputs(cell, fresh, reference)
    if not same:
        cell.comparison_traceback += notes
    return same


def _adopt(fresh: str, reference: str, tolerances: Mapping[str, float]) -> tuple[str, list[str]]:
    """Return the fresh text with the reference's lines wherever these agree, and the lines that disagree."""
    lines, notes = fresh.splitlines(keepends=True), []
    for i, (new, old) in enumerate(zip(lines, reference.splitlines(keepends=True), strict=False)):
        new_value, old_value = _value(new), _value(old)
        if new_value.keys() == old_value.keys() and new_value:
            disagreements = compare(new_value, old_value, tolerances)
            notes += disagreements
            lines[i] = new if disagreements else old
    return "".join(lines), notes


def _value(line: str) -> dict[str, Any]:
    """Read a line that `show` printed; empty for any other line."""
    match = LINE.fullmatch(line.rstrip("\n"))
    if not match:
        return {}
    try:
        value = float(match[2]) if match[2] in ("nan", "inf", "-inf") else ast.literal_eval(match[2])
        return flatten({match[1]: value})
    except (SyntaxError, TypeError, ValueError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
