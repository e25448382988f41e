"""The methods compared in the paper by name, each a module whose forward gives member logits (B, M, K)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .ensemble import SigmaEnsemble
from .peers import MIMO, BatchEnsemble, FiLMEnsemble, Masksembles, MCDropout, PackedEnsemble

__all__ = ["METHODS", "PEERS", "DeepEnsemble", "build"]

PEERS = {
    "mc_dropout": MCDropout,
    "batch_ensemble": BatchEnsemble,
    "mimo": MIMO,
    "masksembles": Masksembles,
    "film_ensemble": FiLMEnsemble,
    "packed_ensembles": PackedEnsemble,
    "packed_ensembles_gamma2": PackedEnsemble,
}
METHODS = ("single", "deep_ensembles", "sigma", "finetune", *PEERS)


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
        settings: A profile's settings: `members`, `head`, `sigma`, and the options of `peers` by method, where given.

    Raises:
        ValueError: if there is no such method, or it has no such setting.
    """
    if method == "single":
        return DeepEnsemble([backbone()])
    if method == "deep_ensembles":
        return DeepEnsemble(backbone() for _ in range(settings["members"]))
    if method in ("sigma", "finetune"):
        make = SigmaEnsemble if method == "sigma" else SigmaEnsemble.from_pretrained
        return make(backbone(), settings["members"], head=settings["head"], regularize=settings["sigma"]["regularize"])
    if method not in PEERS:
        raise ValueError(f"no method {method!r}; there are {METHODS}")
    peer, options = PEERS[method], dict(settings.get("peers", {}).get(method, {}))
    known = [name for name in peer.__init__.__kwdefaults__ or {}]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ValueError(f"settings of {method!r}: unknown {unknown}, known {known}")
    if peer in (MIMO, PackedEnsemble):
        options["head"] = settings["head"]
    return peer(backbone(), settings["members"], **options)
