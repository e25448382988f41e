"""Where every artefact lies, whatever directory a notebook, a test or a stage runs in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["clean", "data", "load_params", "merge", "notebooks", "parse_yaml", "results", "root", "settings", "state"]


def root() -> Path:
    """Return the project's folder: the nearest one, from the working directory upwards, with a `params.yaml`.

    Raises:
        FileNotFoundError: if no folder above the working directory holds one.
    """
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "params.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no params.yaml in {here} or above it: run from inside the project")


def notebooks() -> Path:
    """Source notebooks, committed without outputs."""
    return root() / "notebooks"


def clean() -> Path:
    """Canonical copies of the source notebooks, written by the `clean` stage; every other stage runs these."""
    return root() / ".clean"


def data(profile: str) -> Path:
    """Arrays and cards of a profile's data sets, written by the `data` stage."""
    return root() / "data" / profile


def results(profile: str, *parts: str) -> Path:
    """Folder of a stage's results, for example `results("digits", "sweep_tau", "0.1")`."""
    return root().joinpath("results", profile, *parts)


def state(profile: str, *parts: str) -> Path:
    """Training state of unfinished runs, kept outside the pipeline's outputs so that a killed run can go on."""
    return root().joinpath(".state", profile, *parts)


def parse_yaml(text: str) -> Any:
    """Read YAML 1.2, the dialect DVC reads: `1e-3` is a number; `off`, `yes` and `no` are strings.

    >>> parse_yaml("[1e-3, -2, off, null]")
    [0.001, -2, 'off', None]
    """
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


def load_params() -> dict[str, Any]:
    """Return the contents of `params.yaml`, the one source of truth of the pipeline."""
    return parse_yaml((root() / "params.yaml").read_text(encoding="utf-8"))


def settings(profile: str) -> dict[str, Any]:
    """Return the settings block of a profile.

    Raises:
        KeyError: naming the profile and the ones that exist.
    """
    blocks = load_params()["settings"]
    if profile not in blocks:
        raise KeyError(f"profile {profile!r} has no settings in params.yaml; there are {sorted(blocks)}")
    return blocks[profile]


def merge(block: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block of settings with changes, which go down into nested blocks.

    >>> merge({"sigma": {"tau": 0.1, "weight": 0.01}, "members": 4}, {"sigma": {"tau": 5.0}})
    {'sigma': {'tau': 5.0, 'weight': 0.01}, 'members': 4}
    """
    merged = {**block, **changes}
    for key in block.keys() & changes.keys():
        if isinstance(block[key], Mapping) and isinstance(changes[key], Mapping):
            merged[key] = merge(block[key], changes[key])
    return merged
