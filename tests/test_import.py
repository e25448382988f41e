"""`import sigmaens` costs no more than `import torch`: everything heavier loads where it is used."""

import subprocess
import sys

import pytest

import sigmaens

HEAVY = (
    "accelerate",
    "dvc",
    "matplotlib",
    "pandas",
    "papermill",
    "safetensors",
    "scipy",
    "seaborn",
    "sklearn",
    "timm",
    "torch_uncertainty",
    "torchvision",
    "transformers",
)


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def with_torch() -> set[str]:
    return loaded_by("import torch")


@pytest.fixture(scope="module")
def with_sigmaens() -> set[str]:
    return loaded_by("import sigmaens; [getattr(sigmaens, name) for name in sigmaens.__all__]")


def test_sigmaens_loads_nothing_beyond_torch_but_the_standard_library(with_torch, with_sigmaens):
    assert with_sigmaens - with_torch - sys.stdlib_module_names == {"sigmaens"}


def test_heavy_libraries_stay_out(with_sigmaens):
    assert not with_sigmaens.intersection(HEAVY)


def test_torch_loads_with_the_first_name():
    assert "torch" not in loaded_by("import sigmaens")


def test_unknown_name_is_named():
    with pytest.raises(AttributeError, match="no attribute 'sigma'"):
        sigmaens.sigma  # noqa: B018
