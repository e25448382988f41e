"""The implicit ensembles that σN-Ens is compared with, each made from the backbone it is compared on.

From TorchUncertainty 0.13 come the layers of BatchEnsemble and the head of Packed-Ensembles. The rest is written here,
since there the grouped convolutions lower γ silently, masks come from an unseeded generator and in float64, dropout
changes from call to call, MIMO leaves the members' orders to the caller, and there is no FiLM-Ensemble. The adapters
of peft are chosen for a whole batch in training (a choice by row, `adapter_names`, is refused there): members could not
train in one batch.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import backbones
from .ensemble import replace
from .folding import batch_of, folded
from .layers import Running, check_members, is_supported_norm, looks_like_norm

__all__ = ["MIMO", "BatchEnsemble", "FiLMEnsemble", "LoRAEnsemble", "MCDropout", "Masksembles", "PackedEnsemble"]

# The linear layers of self-attention by the names of timm and transformers; a fused one makes q, k and v in this order.
_FUSED = ("qkv", "Wqkv")
_ATTENTION = (*"qkv", *(f"{x}_{kind}" for kind in ("proj", "lin") for x in "qkv"), "query", "key", "value", *_FUSED)


class _Folded(nn.Module):
    """A network that takes its inputs once for each member, member slowest, as one batch of M·B rows."""

    def __init__(self, backbone: nn.Module, members: int):
        super().__init__()
        self.backbone = backbone
        self.members = members
        for name, layer in backbone.named_modules():
            if isinstance(layer, MemberLayer):
                layer.label = name

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the members' logits, shape (B, M, K), for arguments as `SigmaEnsemble.forward` takes them."""
        rows = batch_of((args, kwargs))
        with _RUNNING.run(rows and rows * self.members):
            return folded(self.backbone, self.members, args, kwargs)


_RUNNING = Running()  # the rows of the folded batch that runs in this thread


class MCDropout(_Folded):
    """Drop channels at random before every layer with weights but the first, also when predicting.

    In training one pass, with a mask for every image: logits (B, 1, K). In evaluation T = M passes with norms in
    evaluation mode, each with a mask drawn when the network was made: a pass is one thinned network, a draw of the
    weights as the method means it, and what it says of an image depends neither on the batch nor on the call.

    With `rate=None`, as for transformers, the backbone's own dropout layers do this at their own rates: single values
    in training, whole features (of the last dimension) in evaluation. Attention dropout is off in both, since it is
    a function there, which reads a layer's rate or holds a number of its own, and could drop in training alone.

    Args:
        backbone: Network of convolutions and linear layers, or any with dropout layers for `rate=None`. It is copied,
            not changed.
        members: Number of passes T.
        rate: Probability to drop a channel, in [0, 1), or None.

    Raises:
        ValueError: if `rate` is out of range, or None for a backbone without dropout layers.

    Source: Gal & Ghahramani, 2016, arXiv 1506.02142; whole channels: Tompson et al., 2015, arXiv 1411.4280.
    """

    def __init__(self, backbone: nn.Module, members: int, *, rate: float | None = 0.1):
        check_members(members)
        if rate is None:
            backbone = _own_dropout(backbone, members)
        elif not 0 <= rate < 1:
            raise ValueError(f"rate must be a probability in [0, 1), or None for the backbone's own, not {rate}")
        else:
            backbone = _mask_inputs(backbone, lambda channels: ChannelDropout(channels, members, rate))
        super().__init__(backbone, members)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the passes' logits: (B, 1, K) in training, (B, M, K) in evaluation."""
        return folded(self.backbone, 1, args, kwargs) if self.training else super().forward(*args, **kwargs)


class Masksembles(_Folded):
    """Give every member fixed masks over the input channels of every layer with weights but the first.

    Args:
        backbone: Network of convolutions and linear layers. It is copied, not changed.
        members: Number of masks N of a layer, one for each member.
        scale: S ≥ 1. Two members share about a part 1/S of a member's channels; 1 makes them equal.

    Source: Durasov et al., 2021, arXiv 2012.08334.
    """

    def __init__(self, backbone: nn.Module, members: int, *, scale: float = 2.0):
        check_members(members)
        if not 1 <= scale < math.inf:
            raise ValueError(f"scale must be a number ≥ 1, not {scale}")
        super().__init__(_mask_inputs(backbone, lambda c: ChannelMasks(fixed_masks(c, members, scale))), members)


class BatchEnsemble(_Folded):
    r"""Multiply the input and output channels of shared weights by vectors of the member's own.

    .. math:: y_m = s_m \odot (W (r_m \odot x_m)) + b_m, \qquad r, s \sim N(1, 0.5^2)

    Norms are shared, with batch statistics over all members. `parameter_groups` keeps weight decay off r and s.

    Args:
        backbone: Network of convolutions and linear layers. It is copied, not changed.
        members: Number of members M.

    Source: Wen et al., 2020, arXiv 2002.06715; the layers are TorchUncertainty's, started from the backbone's weights.
    """

    def __init__(self, backbone: nn.Module, members: int):
        from torch_uncertainty.layers import BatchConv2d, BatchLinear

        check_members(members)

        def convert(name: str, layer: nn.Module, first: bool) -> nn.Module:
            # Made with fresh weights, which those of the backbone replace; the shift is the member's.
            if type(layer) is nn.Linear:
                rank_one = BatchLinear.from_linear(layer, members)
                rank_one.linear = layer
            else:
                rank_one = BatchConv2d.from_conv2d(layer, members)
                rank_one.conv = layer
            layer.bias = None
            return rank_one

        super().__init__(_convert(backbone, convert), members)


class FiLMEnsemble(_Folded):
    """Give every member norms of its own, statistics, scales γ and shifts β; all other weights are shared.

    Args:
        backbone: Network with norms that `SigmaNorm` supports. It is copied, not changed.
        members: Number of members M.
        gain: ρ. γ and β start uniform in ± ρ √(6 / (M + C)), for C channels, as in the authors' code: members that
            start equal would stay equal.

    Source: Turkoglu et al., 2022, arXiv 2206.00050.
    """

    def __init__(self, backbone: nn.Module, members: int, *, gain: float = 1.0):
        check_members(members)
        if not 0 < gain < math.inf:
            raise ValueError(f"gain must be a number > 0, not {gain}")
        backbone = copy.deepcopy(backbone)
        norms = {name: layer for name, layer in backbone.named_modules() if looks_like_norm(layer)}
        for name, norm in norms.items():
            if not is_supported_norm(norm) or norm.weight is None:
                raise TypeError(f"layer {name!r}, {type(norm).__name__}, has no scale that members could own")
            backbone = replace(backbone, name, MemberNorm(norm, members, gain))
        if not norms:
            raise ValueError(f"{type(backbone).__name__} has no normalisation layers for the members to own")
        super().__init__(backbone, members)


class LoRAEnsemble(_Folded):
    r"""Give every member low-rank updates of a frozen transformer's q, k and v, and a linear head of its own.

    .. math:: y_m = W x_m + b + \frac{\alpha}{r} B_m A_m x_m

    A starts as a linear layer does and B at zero: all members start with the backbone's own features, and their heads
    differ. Only A, B and the heads are trained, and what `backbones.transformer` had to draw because the weights lack
    it, such as a pooler or a layer before the head: random, it would be of no use frozen. The members share it.

    Args:
        backbone: Trained transformer. It is copied, not changed.
        members: Number of members M.
        head: Dotted name of the linear layer that becomes the M heads, drawn afresh.
        rank: Rank r of an update. A fused layer, `qkv`, has three of them, for q, k and v.
        targets: `fnmatch` pattern or patterns over the names of the linear layers to update. None finds q, k and v
            by the names that timm and transformers give them.
        alpha: α; None is r, a factor of 1.

    Raises:
        ValueError: if `head` is no linear layer, `targets` match none, or `rank` or `alpha` is out of range.
        TypeError: if `targets` are no patterns.

    Source: Mühlematter et al., 2024, arXiv 2405.14438.
    """

    def __init__(
        self,
        backbone: nn.Module,
        members: int,
        *,
        head: str,
        rank: int = 8,
        targets: str | Iterable[str] | None = None,
        alpha: float | None = None,
    ):
        check_members(members)
        _check_head(backbone, head)
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be an integer ≥ 1, not {rank!r}")
        if alpha is not None and not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be a number > 0 or None, not {alpha}")
        factor = 1.0 if alpha is None else alpha / rank
        backbone = copy.deepcopy(backbone).requires_grad_(False)
        for tokens in (module for module in backbone.modules() if isinstance(module, backbones.Tokens)):
            for name in tokens.fresh:
                tokens.net.get_parameter(name).requires_grad_()
        modules = dict(backbone.named_modules(remove_duplicate=False))
        linears = [name for name, module in modules.items() if type(module) is nn.Linear and name != head]
        for name in _targets(linears, targets):
            parts = 3 if name.rpartition(".")[2] in _FUSED else 1
            if modules[name].out_features % parts:
                raise ValueError(f"layer {name!r} has {modules[name].out_features} outputs, not as many for q, k and v")
            backbone = replace(backbone, name, LowRank(modules[name], members, rank, factor, parts))
        super().__init__(replace(backbone, head, MemberLinear(modules[head], members)), members)


class MIMO(nn.Module):
    """One network that sees M images side by side on the channels and has a head for each.

    In training every member gets all images of the batch in an order of its own, and its logits are put back into
    the batch's order. In evaluation the same image is given M times. No inputs are repeated beyond that.

    Args:
        backbone: Network whose first layer is a convolution. It is copied, not changed; its convolutions are drawn
            afresh.
        members: Number of members M.
        head: Dotted name of the linear layer that becomes the M heads.

    Source: Havasi et al., 2021, arXiv 2010.06610.
    """

    def __init__(self, backbone: nn.Module, members: int, *, head: str):
        super().__init__()
        check_members(members)
        _check_head(backbone, head)

        def convert(name: str, layer: nn.Module, first: bool) -> nn.Module:
            if first:
                return _like(layer, in_channels=layer.in_channels * members)
            if name == head:
                return nn.Linear(layer.in_features, layer.out_features * members, layer.bias is not None)
            return layer

        self.backbone = _convert(backbone, convert)
        self.members = members
        backbones.initialize(self.backbone)

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' logits, shape (B, M, K)."""
        if not self.training:
            return self.backbone(x.repeat(1, self.members, 1, 1)).unflatten(1, (self.members, -1))
        orders = torch.stack([torch.randperm(len(x)) for _ in range(self.members)], dim=1).to(x.device)
        logits = self.backbone(x[orders].flatten(1, 2)).unflatten(1, (self.members, -1))
        return logits.take_along_dim(orders.argsort(dim=0)[:, :, None], dim=0)


class PackedEnsemble(nn.Module):
    """M narrow networks side by side in one of α times the width, kept apart by grouped convolutions.

    Args:
        backbone: Network of convolutions, BatchNorm and one linear layer. It is copied, not changed; its weights are
            drawn afresh.
        members: Number of members M.
        head: Dotted name of the linear layer that becomes the M heads.
        alpha: Factor on the width α; a member is α/M times as wide as the backbone.
        gamma: Groups γ within a member, in every convolution but the first.

    Raises:
        ValueError: if the groups, M·γ, do not divide the channels of a layer; it is named.

    Source: Laurent et al., 2023, arXiv 2210.09184; the head is TorchUncertainty's.
    """

    def __init__(self, backbone: nn.Module, members: int, *, head: str, alpha: float = 2, gamma: int = 1):
        from torch_uncertainty.layers import PackedLinear

        super().__init__()
        check_members(members)
        _check_head(backbone, head)
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be a number > 0, not {alpha}")
        if isinstance(gamma, bool) or not isinstance(gamma, int) or gamma < 1:
            raise ValueError(f"gamma must be an integer ≥ 1, not {gamma!r}")
        groups = members * gamma

        def widen(name: str, channels: int) -> int:
            if (alpha * channels) % groups:
                raise ValueError(
                    f"layer {name!r} has {alpha} × {channels} channels, which {groups} groups "
                    f"(members {members} × gamma {gamma}) do not divide"
                )
            return int(alpha * channels)

        def convert(name: str, layer: nn.Module, first: bool) -> nn.Module:
            if name == head:
                widen(name, layer.in_features)
                sizes = layer.in_features, layer.out_features
                return PackedLinear(*sizes, alpha, members, bias=layer.bias is not None, last=True)
            if type(layer) is nn.Linear:
                raise TypeError(f"layer {name!r} is a linear layer before the head, which cannot be packed")
            out = widen(name, layer.out_channels)
            if first:
                return _like(layer, out_channels=out)
            inner = layer.groups * groups
            return _like(layer, in_channels=widen(name, layer.in_channels), out_channels=out, groups=inner)

        backbone = _convert(backbone, convert)
        for name, norm in list(backbone.named_modules()):
            if type(norm) is nn.BatchNorm2d:
                options = norm.eps, norm.momentum, norm.affine, norm.track_running_stats
                backbone = replace(backbone, name, nn.BatchNorm2d(widen(name, norm.num_features), *options))
            elif looks_like_norm(norm):
                raise TypeError(f"layer {name!r} is a {type(norm).__name__}; only BatchNorm2d keeps members apart")
        self.backbone = backbone
        self.members = members
        backbones.initialize(backbone)

    def forward(self, x: Tensor) -> Tensor:
        """Return the members' logits, shape (B, M, K)."""
        return _unfold(self.backbone(x), self.members)


class MemberLayer(nn.Module):
    """A layer that treats the rows of each member apart.

    Attributes:
        members: Number of members M.
        label: Name of the layer in its network.
    """

    def __init__(self, members: int):
        super().__init__()
        self.members = members
        self.label: str | None = None

    def split(self, x: Tensor) -> Tensor:
        """Return rows (M·B, …), member slowest, as (M, B, …).

        Raises:
            ValueError: if the first dimension is not that of the batch.
        """
        rows = _RUNNING.now
        turned = x.dim() == 3 and x.shape[1] == rows != x.shape[0]
        if x.shape[0] % (rows or self.members) or turned:
            batch = f"a batch of {rows or self.members} rows"
            raise ValueError(f"layer {self.label!r} got {tuple(x.shape)} where {batch} must come first")
        return x.unflatten(0, (self.members, -1))


class LowRank(MemberLayer):
    """Add to a frozen linear layer an update for every member, factor · B A x, all members in one batched product.

    Args:
        linear: The linear layer, F to O.
        members: Number of members M.
        rank: Rank r of an update.
        factor: α/r.
        parts: Number P of updates side by side on the outputs, each of rank r.

    Attributes:
        A: Shape (M, P, r, F). B: Shape (M, P, O/P, r).

    Shape: (M·B, …, F) to (M·B, …, O), member slowest.
    """

    def __init__(self, linear: nn.Linear, members: int, rank: int, factor: float, parts: int = 1):
        super().__init__(members)
        self.linear = linear
        self.factor = factor
        bound = 1 / math.sqrt(linear.in_features)  # that of nn.Linear
        A = linear.weight.new_empty(members, parts, rank, linear.in_features).uniform_(-bound, bound)
        self.A = nn.Parameter(A)
        self.B = nn.Parameter(linear.weight.new_zeros(members, parts, linear.out_features // parts, rank))

    def forward(self, x: Tensor) -> Tensor:
        low = torch.einsum("mnf,mprf->mnpr", self.split(x).flatten(1, -2), self.A)
        update = torch.einsum("mnpr,mpor->mnpo", low, self.B)
        y = self.linear(x)
        return y + self.factor * update.reshape(y.shape)

    def extra_repr(self) -> str:
        return "members={}, parts={}, rank={}, factor={}".format(*self.A.shape[:3], self.factor)


class MemberLinear(MemberLayer):
    """Fresh linear layers in the place of one, F to K, one for each member. Shape: (M·B, …, F) to (M·B, …, K)."""

    def __init__(self, linear: nn.Linear, members: int):
        super().__init__(members)
        sizes = linear.in_features, linear.out_features, linear.bias is not None
        options = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        layers = [nn.Linear(*sizes, **options) for _ in range(members)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in layers]))
        if linear.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.split(x).flatten(1, -2)
        y = rows @ self.weight.mT if self.bias is None else torch.baddbmm(self.bias[:, None], rows, self.weight.mT)
        return y.reshape(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        members, classes, features = self.weight.shape
        return f"members={members}, in_features={features}, out_features={classes}"


class FeatureDropout(MemberLayer):
    """Drop single values in training, and in evaluation for every member the same features of all its values.

    The features are drawn from `seed`, which is drawn from the global generator and kept in the state: their number
    need not be known before the call.

    Attributes:
        p: 0, for functions that read the rate of the layer and drop by it in training alone.

    Shape: (rows, features) or (rows, …, features); in evaluation M·B rows, member slowest.
    """

    p = 0.0

    def __init__(self, members: int, rate: float):
        super().__init__(members)
        self.rate = rate
        self.register_buffer("seed", torch.randint(2**62, ()))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 3:
            raise ValueError(
                f"layer {self.label!r} got {tuple(x.shape)}: expected (rows, features) or (rows, tokens, features), "
                "where whole features can be dropped; set the rate of this layer to 0 in the backbone"
            )
        if self.training:
            return F.dropout(x, self.rate)
        generator = torch.Generator().manual_seed(int(self.seed))
        kept = torch.rand(self.members, x.shape[-1], generator=generator) >= self.rate
        factors = (kept / (1 - self.rate)).to(x)
        rows = self.split(x)
        return (rows * factors.view(self.members, *[1] * (rows.dim() - 2), -1)).flatten(0, 1)

    def extra_repr(self) -> str:
        return f"members={self.members}, rate={self.rate}"


class ChannelMasks(nn.Module):
    """Multiply the channels of every member's rows by that member's mask.

    Attributes:
        masks: Shape (M, C), kept in the state.

    Shape: (M·B, C, …), member slowest.
    """

    def __init__(self, masks: Tensor):
        super().__init__()
        self.register_buffer("masks", masks)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.masks.shape[0]
        return _scale_channels(x, self.masks.repeat_interleave(rows, dim=0))

    def extra_repr(self) -> str:
        return "members={}, channels={}".format(*self.masks.shape)


class ChannelDropout(ChannelMasks):
    """Drop channels with a fresh mask for every row in training, with the members' own masks in evaluation."""

    def __init__(self, channels: int, members: int, rate: float):
        super().__init__(F.dropout(torch.ones(members, channels), rate))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return _scale_channels(x, F.dropout(torch.ones(x.shape[:2], device=x.device), self.rate))


class MemberNorm(nn.Module):
    """A norm for each member, with scales and shifts that start apart. Shape: (M·B, …), member slowest."""

    def __init__(self, norm: nn.Module, members: int, gain: float):
        super().__init__()
        self.norms = nn.ModuleList(copy.deepcopy(norm) for _ in range(members))
        for parameter in self.norms.parameters():
            bound = gain * math.sqrt(6 / (members + parameter.numel()))
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.norms))
        return torch.cat([norm(part) for norm, part in zip(self.norms, parts, strict=True)])


def fixed_masks(channels: int, members: int, scale: float) -> Tensor:
    """Return masks of zeros and ones, shape (M, C), with equally many ones each and none at a channel of no use.

    A mask has `ones` of a number of places, and places in no mask are removed. As published, C / ones =
    S (1 − (1 − 1/S)^M), rounded so that the ones suffice, and draws that leave other than C places are thrown away.

    Source: Durasov et al., 2021, arXiv 2012.08334, section 3.
    """
    ones = math.ceil(round(channels / (scale * (1 - (1 - 1 / scale) ** members)), 9))
    left = ((places, places * (1 - (1 - ones / places) ** members)) for places in itertools.count(channels))
    places = next(places for places, expected in left if expected > channels - 0.5)
    while True:
        masks = torch.rand(members, places).argsort(dim=1) < ones
        masks = masks[:, masks.any(dim=0)]
        if masks.shape[1] == channels:
            return masks.float()


def _scale_channels(x: Tensor, factors: Tensor) -> Tensor:
    return x * factors.to(x.dtype).view(factors.shape + (1,) * (x.dim() - 2))


def _unfold(logits: Tensor, members: int) -> Tensor:
    return logits.unflatten(0, (members, -1)).transpose(0, 1)


def _convert(backbone: nn.Module, rule: Callable[[str, nn.Module, bool], nn.Module]) -> nn.Module:
    """Copy a backbone and put `rule(name, layer, first)` in the place of each convolution and linear layer.

    Raises:
        TypeError: if the first is no convolution, or another layer has a matrix of weights; it is named.
    """
    backbone = copy.deepcopy(backbone)
    holders = {
        name: layer
        for name, layer in backbone.named_modules()
        if any(p.dim() > 1 for p in layer.parameters(recurse=False))
    }
    for i, (name, layer) in enumerate(holders.items()):
        if type(layer) is not nn.Conv2d and (i == 0 or type(layer) is not nn.Linear):
            where = f"layer {name!r}" if name else "the backbone itself"
            raise TypeError(f"{where} is a {type(layer).__name__}: expected Conv2d, and Linear after the first")
        backbone = replace(backbone, name, rule(name, layer, i == 0))
    return backbone


def _mask_inputs(backbone: nn.Module, mask: Callable[[int], nn.Module]) -> nn.Module:
    def convert(name: str, layer: nn.Module, first: bool) -> nn.Module:
        if first:  # its input channels are the colours
            return layer
        return nn.Sequential(mask(layer.in_channels if type(layer) is nn.Conv2d else layer.in_features), layer)

    return _convert(backbone, convert)


def _own_dropout(backbone: nn.Module, members: int) -> nn.Module:
    """Copy a backbone, make its dropout layers the members', and set rates that functions use to zero.

    Raises:
        ValueError: if it has no dropout layer with a rate in (0, 1).
    """
    backbone = copy.deepcopy(backbone)
    modules = dict(backbone.named_modules(remove_duplicate=False))
    drops = {name: layer.p for name, layer in modules.items() if type(layer) is nn.Dropout and layer.p > 0}
    if not drops or max(drops.values()) == 1:
        raise ValueError(
            f"rate None asks for dropout layers in the backbone, with rates below 1; {type(backbone).__name__} has "
            f"{drops or 'none'}"
        )
    for layer in modules.values():
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
    for name, rate in drops.items():
        backbone = replace(backbone, name, FeatureDropout(members, rate))
    return backbone


def _targets(linears: list[str], patterns: str | Iterable[str] | None) -> list[str]:
    if patterns is None:
        found = [name for name in linears if name.rpartition(".")[2] in _ATTENTION]
        if not found:
            raise ValueError(
                f"the backbone has no linear layers by the usual names {_ATTENTION}: name those to update in targets; "
                f"the last are {linears[-3:]}"
            )
        return found
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"targets must be a pattern, a list of patterns or None, not {patterns}")
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in linears)]
    if unmatched or not patterns:
        raise ValueError(f"targets {unmatched or patterns} match no linear layer; the last are {linears[-3:]}")
    return [name for name in linears if any(fnmatchcase(name, p) for p in patterns)]


def _like(conv: nn.Conv2d, **changes: int) -> nn.Conv2d:
    kept = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    options = {name: getattr(conv, name) for name in kept} | {"bias": conv.bias is not None}
    return nn.Conv2d(**options | changes)


def _check_head(backbone: nn.Module, head: str) -> None:
    linears = [name for name, module in backbone.named_modules() if type(module) is nn.Linear]
    if head not in linears:
        raise ValueError(f"head {head!r} is no linear layer of the backbone; the last are {linears[-3:]}")
