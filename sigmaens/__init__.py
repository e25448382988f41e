"""σN-Ens: an ensemble hidden in one network, its diversity set by a softmax temperature (arXiv 2607.23860)."""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "analysis": ("corner_energy", "k_star", "largest_share", "sigma_norm_cos", "soft_k", "soft_k_histogram"),
    "ensemble": ("SigmaEnsemble", "load", "parameter_groups", "save"),
    "layers": ("SigmaNorm",),
    "losses": ("diversity_loss", "member_cross_entropy"),
    "slim": ("SlimEnsemble", "with_uncertainty"),
    "trainer": ("ForTrainer",),
    "uncertainty": ("decompose", "disagreement", "diversity_ratio", "jensen_gap", "ood_scores", "pairwise_kl"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


# Found on first use, so that the notebook runner, a process for every stage, does not wait for torch.
def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"sigmaens.{module}"), name)
    raise AttributeError(f"module 'sigmaens' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
