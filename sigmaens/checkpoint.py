"""Weights in files: safetensors that say what they hold, written whole or not at all, and never unpickled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = ["load", "save", "write_tensors"]

FORMAT_VERSION = 1


def save(model: nn.Module, path: str | os.PathLike) -> None:
    """Write a module's state to a safetensors file with a format version, whole or not at all.

    What modules keep besides tensors (`get_extra_state`) is written as JSON.

    Raises:
        OSError: if it cannot be written, naming the file.
        TypeError: if a module keeps something that is neither a tensor nor JSON; the module is named.
    """
    entries = model.state_dict()
    state = {n: t.detach().cpu().contiguous().clone() for n, t in entries.items() if isinstance(t, Tensor)}
    extra = {name: value for name, value in entries.items() if name not in state}
    for name, value in extra.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise TypeError(f"cannot write {name}, a {type(value).__name__}: only tensors and JSON can be saved")
    about = _describe(model) | ({"extra": extra} if extra else {})
    # One entry only: safetensors writes several in random order, and equal models should give equal bytes.
    write_tensors(state, Path(path), {"sigmaens": json.dumps(about)})


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        OSError: if it cannot be written, naming the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        temporary = Path(folder) / path.name
        try:
            save_file(tensors, temporary, metadata=metadata)
            os.replace(temporary, path)
        except (SafetensorError, OSError) as error:
            raise OSError(f"cannot write {path}: {error}") from error


def load(model: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Load a file written by `save` into a module built alike, and return the module.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no safetensors file of this project, of another version, or of another model; the
            difference is named and the module is left as it was.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("sigmaens", "{}"))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    if "version" not in about:
        raise ValueError(f"{path} was not written by sigmaens")
    if about["version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {about['version']}, this is version {FORMAT_VERSION}")
    state |= about.pop("extra", {})
    expected = model.state_dict()
    tensors = {n: t for n, t in expected.items() if isinstance(t, Tensor) and isinstance(state.get(n), Tensor)}
    problems = [f"lacks {name}" for name in expected if name not in state]
    problems += [f"has an unknown {name}" for name in state if name not in expected]
    problems += [
        f"has {name} as {state[name].dtype} instead of {tensor.dtype}"
        for name, tensor in tensors.items()
        if state[name].dtype != tensor.dtype
    ]
    problems += [
        f"has {name} of shape {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in tensors.items()
        if state[name].shape != tensor.shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"{path} holds {about}, not {_describe(model)}: it {'; '.join(problems[:3])}{more}")
    model.load_state_dict(state)
    return model


def _describe(model: nn.Module) -> dict[str, Any]:
    about = {"version": FORMAT_VERSION, "class": type(model).__name__}
    if hasattr(model, "backbone") and hasattr(model, "members") and hasattr(model, "head"):
        about |= {"members": model.members, "backbone": type(model.backbone).__name__, "head": model.head}
    return about
