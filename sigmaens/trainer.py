"""ForTrainer: an ensemble as the one classifier that the Trainer and the pipelines of Hugging Face transformers expect.

Nothing here imports transformers: what a trainer asks a model for, the backbone answers.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .ensemble import SigmaEnsemble
from .folding import by_keywords
from .losses import diversity_loss, member_cross_entropy

__all__ = ["ForTrainer"]

# Of the backbone these would write or read a plain backbone, which an ensemble's weights do not fit.
_NOT_DELEGATED = ("from_pretrained", "push_to_hub", "save_pretrained")


class Output(dict):
    """Hold what a pass returns: `logits` and, where labels were given, `loss`, by key or as attributes."""

    @property
    def loss(self) -> Tensor | None:
        """The loss, a scalar in nats; None where no labels were given."""
        return self.get("loss")

    @property
    def logits(self) -> Tensor:
        """The logits of the mean prediction, shape (B, K)."""
        return self["logits"]


class _Forward:
    """Be the method `forward`, which shows the parameters of the backbone's forward where it is bound to an adapter.

    A method set on the instance would do the same, but replicas of the adapter would go on running the original.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = function

    def __get__(self, adapter: ForTrainer | None, owner: type | None = None) -> Any:
        function = self.function
        if adapter is None:
            return function
        if torch.compiler.is_compiling():
            return functools.partial(function, adapter)

        # No __wrapped__: accelerate strips wrappers by it, and would strip this one.
        def forward(self: ForTrainer, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        signature = adapter._signature()
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__doc__ = function.__doc__
        forward.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
        return MethodType(forward, adapter)


class ForTrainer(nn.Module):
    r"""Wrap an ensemble as one classifier for `transformers.Trainer` and the pipelines that classify texts or images.

    Its logits are those of the mean prediction, so their softmax is the mean of the members' probabilities:

    .. math:: z_k = \log \frac{1}{M} \sum_m \mathrm{softmax}(z^{(m)})_k

    With `link="sigmoid"` they are the logit of the mean sigmoid. In training mode the loss is the members'
    cross-entropy plus the diversity regulariser; in evaluation it is the cross-entropy of the mean prediction, its
    negative log-likelihood, without the regulariser. So Trainer's `eval_loss` is what users expect of it, and it is
    never above the mean of the members' own losses.

    The ensemble is the attribute `ensemble`, the one given and no copy: training the adapter trains it. Every other
    attribute is the backbone's (`config`, `device`, `main_input_name`, …), but for `save_pretrained`, `push_to_hub`
    and `from_pretrained`, since no plain backbone could load the weights.

    Args:
        ensemble: An ensemble of any backbone; pipelines need one of transformers.
        tau: Temperature τ > 0 of the regulariser.
        weight: Weight λ ≥ 0 of the regulariser.

    Shape: the backbone's arguments, with `labels` (B,), to a mapping of `loss`, a scalar in nats, and `logits` (B, K).

    Raises:
        TypeError: if it is given no ensemble.
        ValueError: if `tau` or `weight` is not allowed, or the backbone's config makes pipelines take the logits for
            those of another link than the ensemble's.

    Source: ours; the loss is that of the paper, section 3.

    Examples:
        >>> from sigmaens import SigmaEnsemble
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        >>> adapter = ForTrainer(SigmaEnsemble(net, members=4), tau=0.1, weight=1e-2)
        >>> output = adapter(torch.randn(5, 8), labels=torch.tensor([0, 1, 2, 0, 1]))
        >>> output.logits.shape, output.loss.shape
        (torch.Size([5, 3]), torch.Size([]))
    """

    # The loss is the mean over a batch, so Trainer divides it by the number of batches that it accumulates.
    accepts_loss_kwargs = False

    def __init__(self, ensemble: SigmaEnsemble, tau: float, weight: float = 1.0):
        super().__init__()
        if not isinstance(ensemble, SigmaEnsemble):
            raise TypeError(f"expected a SigmaEnsemble, got {type(ensemble).__name__}")
        with torch.no_grad():
            diversity_loss(ensemble, tau, weight)  # raises now what it would raise in the first step
        _check_config(ensemble)
        self.ensemble, self.tau, self.weight = ensemble, tau, weight
        self.training = ensemble.training

    def _signature(self) -> inspect.Signature:
        """Return the signature of the backbone's forward, with `labels` if they are missing there."""
        signature = inspect.signature(self.ensemble.backbone.forward)
        parameters = list(signature.parameters.values())
        if "labels" not in signature.parameters:
            place = next((i for i, p in enumerate(parameters) if p.kind is p.VAR_KEYWORD), len(parameters))
            parameters.insert(place, inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY, default=None))
        return signature.replace(parameters=parameters, return_annotation=Output)

    # Trainer reads the names of the labels from the class, whose forward is this function.
    @_Forward
    def forward(
        self, *args: Any, labels: Tensor | None = None, return_dict: bool | None = None, **kwargs: Any
    ) -> Output | tuple[Tensor, ...]:
        """Return the logits of the mean prediction, (B, K), and the loss if labels are given.

        Arguments are the backbone's own, which is never given `labels` and `return_dict`. Labels are what
        `member_cross_entropy` takes. With `return_dict=False` the result is a tuple, the loss first.

        Raises:
            ValueError: if the outputs are no logits of several classes, unless the link is "sigmoid".
        """
        args, kwargs = by_keywords(args, kwargs)
        labels, return_dict = kwargs.pop("labels", labels), kwargs.pop("return_dict", return_dict)
        if args:  # labels may be among them
            given = self._signature().bind_partial(*args, **kwargs)
            labels = given.arguments.pop("labels", labels)
            return_dict = given.arguments.pop("return_dict", return_dict)
            args, kwargs = given.args, given.kwargs
        members = self.ensemble(*args, **kwargs)
        members = members.to(torch.promote_types(members.dtype, torch.float32))
        output = Output()
        logits = self._mean(members)
        if labels is not None:
            link = self.ensemble.link
            if self.training:
                output["loss"] = member_cross_entropy(members, labels, link)
                output["loss"] = output["loss"] + diversity_loss(self.ensemble, self.tau, self.weight)
            else:
                output["loss"] = member_cross_entropy(logits.unsqueeze(1), labels, link)
        output["logits"] = logits
        return tuple(output.values()) if return_dict is False else output

    def _mean(self, members: Tensor) -> Tensor:
        """Return the logits (B, K) of the members' mean probabilities, from the members' logits (B, M, K)."""
        if self.ensemble.link == "sigmoid":  # the logit's two logarithms share the −log M that a mean needs
            return F.logsigmoid(members).logsumexp(1) - F.logsigmoid(-members).logsumexp(1)
        if members.dim() != 3 or members.shape[2] == 1:
            raise ValueError(
                f"outputs of shape {(len(members), *members.shape[2:])} are no logits of classes (B, K): "
                'link="sigmoid" takes every logit by itself, as for a single one'
            )
        return members.log_softmax(2).logsumexp(1) - math.log(members.shape[1])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Without an ensemble this is a copy or an unpickled adapter that is not yet filled.
            ensemble = self.__dict__.get("_modules", {}).get("ensemble")
            if ensemble is None or name in _NOT_DELEGATED or name.startswith("__"):
                raise
            backbone = ensemble.backbone
            if not hasattr(backbone, name):
                kind = type(backbone).__name__
                raise AttributeError(
                    f"neither {type(self).__name__} nor its backbone {kind} has an attribute {name!r}"
                ) from None
            return getattr(backbone, name)


def _check_config(ensemble: SigmaEnsemble) -> None:
    """Raise ValueError if pipelines would turn logits into probabilities by another link than the ensemble's."""
    config = getattr(ensemble.backbone, "config", None)
    labels, problem = getattr(config, "num_labels", None), getattr(config, "problem_type", None)
    if labels is None:
        return
    if problem == "regression":
        raise ValueError('config.problem_type is "regression", and an ensemble of classifiers has no such loss')
    applied = "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
    if applied != ensemble.link:
        raise ValueError(
            f"config.problem_type={problem!r} with {labels} labels makes pipelines apply a {applied}, and the link is "
            f'{ensemble.link!r}: build the ensemble with link="{applied}", or set the problem_type of the backbone\'s '
            "config"
        )
