"""pyproject.toml, constraints.txt and environment.yml describe one environment, and it is complete."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sigmaens.paths import parse_yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
# Asked for by a package that is installed without its dependencies.
LEFT_OUT = {"sentence-transformers"}


def constraint_lines() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def pins() -> dict[str, str]:
    pairs = (line.split("==") for line in constraint_lines())
    return {canonicalize_name(name): version for name, version in pairs}


def conda() -> tuple[list[str], list[str]]:
    """The conda packages and the lines of the pip section."""
    *packages, section = parse_yaml((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    return packages, section["pip"]


def test_every_constraint_is_one_exact_public_version():
    assert [line for line in constraint_lines() if not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)] == []
    assert len(pins()) == len(constraint_lines())


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_every_direct_dependency_is_pinned_within_its_range(requirement):
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_whatever_a_pinned_package_requires_here_is_pinned_too():
    missing = set()
    for name in pins():
        extras = next((r.extras for r in DIRECT if canonicalize_name(r.name) == name), set())
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # pinned for another platform
            continue
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras}):
                missing.add(canonicalize_name(requirement.name))
    assert missing - pins().keys() <= LEFT_OUT


def test_conda_installs_every_direct_dependency_at_its_pin_and_then_the_project():
    packages, lines = conda()
    assert [lines[0], lines[-1]] == ["--constraint constraints.txt", "--editable .[dev]"]
    got = {(r.name, frozenset(r.extras), str(r.specifier)) for r in map(Requirement, lines[1:-1])}
    assert got == {(r.name, frozenset(r.extras), f"=={pins()[canonicalize_name(r.name)]}") for r in DIRECT}
    python = next(package for package in packages if package.startswith("python="))
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python.removeprefix("python="))
