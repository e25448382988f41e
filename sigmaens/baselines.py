"""The methods compared in the paper, each a module whose forward gives member logits (B, M, K)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .ensemble import SigmaEnsemble

__all__ = ["METHODS", "DeepEnsemble", "build"]

METHODS = ("single", "deep_ensembles", "sigma", "finetune")


class DeepEnsemble(nn.Module):
    """Independent networks, one for each member; a single network is the case M = 1.

    Source: Lakshminarayanan et al., 2017, arXiv 1612.01474.
    """

    def __init__(self, nets: Iterable[nn.Module]):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' logits, shape (B, M, K)."""
        return torch.stack([net(x) for net in self.nets], dim=1)


def build(method: str, backbone: Callable[[], nn.Module], settings: dict[str, Any]) -> nn.Module:
    """Return an untrained module of a method.

    Args:
        method: One of `METHODS`.
        backbone: Makes a network: a freshly initialised one, or for `finetune` the trained one to convert.
        settings: A profile's settings: `members`, `head`, and the method's own block.

    Raises:
        ValueError: if there is no such method.
    """
    if method == "single":
        return DeepEnsemble([backbone()])
    if method == "deep_ensembles":
        return DeepEnsemble(backbone() for _ in range(settings["members"]))
    if method in ("sigma", "finetune"):
        make = SigmaEnsemble if method == "sigma" else SigmaEnsemble.from_pretrained
        return make(backbone(), settings["members"], head=settings["head"], regularize=settings["sigma"]["regularize"])
    raise ValueError(f"no method {method!r}; there are {METHODS}")
