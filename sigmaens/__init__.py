"""σN-Ens: an ensemble hidden in one network, its diversity set by a softmax temperature (arXiv 2607.23860)."""

from .analysis import corner_energy, k_star, largest_share, sigma_norm_cos, soft_k, soft_k_histogram
from .ensemble import SigmaEnsemble, load, parameter_groups, save
from .layers import SigmaNorm
from .losses import diversity_loss, member_cross_entropy

__version__ = "0.1.0"
