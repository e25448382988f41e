"""The methods compared in the paper by name, each a module whose forward gives member logits (B, M, K)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .ensemble import SigmaEnsemble
from .folding import by_keywords, plain
from .peers import MIMO, BatchEnsemble, FiLMEnsemble, LoRAEnsemble, Masksembles, MCDropout, PackedEnsemble

__all__ = ["METHODS", "PEERS", "DeepEnsemble", "build", "sigma_settings"]

PEERS = {
    "mc_dropout": MCDropout,
    "batch_ensemble": BatchEnsemble,
    "mimo": MIMO,
    "masksembles": Masksembles,
    "film_ensemble": FiLMEnsemble,
    "packed_ensembles": PackedEnsemble,
    "packed_ensembles_gamma2": PackedEnsemble,
    "lora_ensemble": LoRAEnsemble,
}
METHODS = ("single", "deep_ensembles", "sigma", "sigma_slim", "finetune", *PEERS)


class DeepEnsemble(nn.Module):
    """Independent networks, one for each member; a single network is the case M = 1.

    Source: Lakshminarayanan et al., 2017, arXiv 1612.01474.
    """

    def __init__(self, nets: Iterable[nn.Module]):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the members' logits, shape (B, M, K), for arguments as `SigmaEnsemble.forward` takes them."""
        return torch.stack([plain(net, *by_keywords(args, kwargs)) for net in self.nets], dim=1)


def build(method: str, backbone: Callable[[], nn.Module], settings: dict[str, Any]) -> nn.Module:
    """Return an untrained module of a method.

    Args:
        method: One of `METHODS`.
        backbone: Makes a network: a freshly initialised one, or for `finetune` the trained one to convert.
        settings: A profile's settings: `members`, `head`, `sigma`, and where given `slim` and the options of `peers`
            by method. With `pretrained: true` in `sigma`, the network of method `sigma` is trained and is converted
            too; `at_once` there is how many members run at once. The options' `train`, a method's own recipe, is for
            others to read.

    Raises:
        ValueError: if there is no such method, or it has no such setting.
    """
    if method == "single":
        return DeepEnsemble([backbone()])
    if method == "deep_ensembles":
        return DeepEnsemble(backbone() for _ in range(settings["members"]))
    if method in ("sigma", "sigma_slim", "finetune"):
        sigma = sigma_settings(method, settings)
        pretrained = method == "finetune" or sigma.get("pretrained", False)
        make = SigmaEnsemble.from_pretrained if pretrained else SigmaEnsemble
        options = {"head": settings["head"], "regularize": sigma["regularize"], "at_once": sigma.get("at_once")}
        return make(backbone(), settings["members"], **options)
    if method not in PEERS:
        raise ValueError(f"no method {method!r}; there are {METHODS}")
    peer, options = PEERS[method], dict(settings.get("peers", {}).get(method, {}))
    options.pop("train", None)
    known = [name for name in peer.__init__.__kwdefaults__ or {}]
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ValueError(f"settings of {method!r}: unknown {unknown}, known {known}")
    if peer in (MIMO, PackedEnsemble, LoRAEnsemble):
        options["head"] = settings["head"]
    return peer(backbone(), settings["members"], **options)


def sigma_settings(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return a profile's settings of a σN-Ens: the block `sigma`, changed for `sigma_slim` by the block `slim`.

    Raises:
        ValueError: if the profile has no slim members, or lacks one of their settings, or has one that is not known.
    """
    if method != "sigma_slim":
        return settings["sigma"]
    if not settings.get("slim"):
        raise ValueError("method 'sigma_slim' needs the settings of `slim`, which this profile does not have")
    sigma, own, needed = settings["sigma"], settings["slim"], {"regularize", "threshold", "patience"}
    missing, unknown = sorted(needed - own.keys()), sorted(own.keys() - needed - sigma.keys())
    if missing or unknown:
        raise ValueError(f"settings of `slim`: missing {missing}, unknown {unknown}")
    return {**sigma, **own}
