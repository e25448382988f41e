"""σNorm: normalisation layers whose scale is a sigmoid gate, one gate vector and one set of statistics per member."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

__all__ = ["MemberHead", "SigmaNorm", "SynchronizedBatchNorm", "is_supported_norm", "looks_like_norm"]

_NATIVE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_BATCH_NORMS = _NATIVE[:3]
# Subclasses from these libraries scale by `weight` exactly as their parent does, whatever else they do around it
# (activation, channel order, casting) …
_TRUSTED = ("torch", "timm", "torchvision", "transformers")
# … except these: auxiliary norms of its own, …
_UNTRUSTED = ("SplitBatchNorm2d",)
# … a scale of `weight + 1`, …
_UNTRUSTED += ("NemotronLayerNorm1P", "VideoPrismLayerNorm")
# … and a forward that cannot run without a shift.
_UNTRUSTED += ("LayerNormExp2d", "ChameleonLayerNorm", "GradiumPhononTTSFlowLayerNorm", "PocketTTSFlowLayerNorm")
_OWNED = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class Pass(NamedTuple):
    """What a layer knows of the pass that runs through it: the folded batch's rows, and its members if not all."""

    rows: int | None = None
    members: slice | None = None


class _Running(threading.local):
    """The passes of this thread by layer, and those that its backward pass, known by number, computes again."""

    passes: dict[nn.Module, Pass] = {}  # noqa: RUF012, for it is replaced, never written to
    again: tuple[int, dict[int, Pass]] | None = None


_RUNNING = _Running()
_UNKNOWN = Pass()


def pass_of(layer: nn.Module) -> Pass:
    """Return the pass that runs through a layer in this thread."""
    current = _RUNNING.passes.get(layer, _UNKNOWN)
    if current is _UNKNOWN and _RUNNING.again is not None:
        backward, again = _RUNNING.again
        if backward == torch._C._current_graph_task_id():
            return again.get(id(layer), _UNKNOWN)
    return current


@contextlib.contextmanager
def running(layers: Iterable[nn.Module], current: Pass) -> Iterator[None]:
    """Tell layers of the pass that runs through them, in this thread alone; they ask `pass_of`."""
    before = _RUNNING.passes
    _RUNNING.passes = before | dict.fromkeys(layers, current)
    try:
        yield
    finally:
        _RUNNING.passes = before


def remember(logits: Tensor, layers: Iterable[nn.Module], current: Pass) -> None:
    """Tell layers of the pass that gave `logits` where its backward pass runs them again (gradient checkpointing)."""
    if not logits.requires_grad or torch.compiler.is_compiling():
        return
    again = {id(layer): current for layer in layers}

    def note(_: Tensor) -> None:
        _RUNNING.again = torch._C._current_graph_task_id(), again

    logits.register_hook(note)


def is_supported_norm(module: nn.Module) -> bool:
    """Tell whether `SigmaNorm` can stand in for `module`."""
    kind = type(module)
    native = next((n for n in _NATIVE if isinstance(module, n)), None)
    if native is None or isinstance(module, nn.modules.lazy.LazyModuleMixin) or kind.__name__ in _UNTRUSTED:
        return False
    if is_parametrized(module):
        return False
    return kind.forward is native.forward or kind.__module__.split(".")[0] in _TRUSTED


def looks_like_norm(module: nn.Module) -> bool:
    """Tell whether `module` itself normalises: a leaf by that name, holding its own parameters or statistics."""
    if isinstance(module, (*_NATIVE, nn.modules.batchnorm._NormBase)):
        return True
    owns = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
    return owns and re.search(r"Norm", type(module).__name__) is not None


class SigmaNorm(nn.Module):
    r"""Gate a normalisation layer with a sigmoid, separately for every member.

    .. math:: y_m = \sigma(\gamma_m) \odot \mathrm{norm}_m(x_m)

    Members are folded into the batch, member slowest: row `m * B + b` of the input belongs to member `m`, whose
    contiguous slice goes through the layer's own fused kernel with that member's gate as the scale. BatchNorm keeps
    batch and running statistics per member. In evaluation all members go through in one pass.

    A pretrained layer is converted exactly (`pretrained=True`), scales of any sign and zero included:

    .. math:: y_m = k\, s \odot \sigma(\gamma_m) \odot \mathrm{norm}_m(x_m) + \beta,
        \qquad \sigma(\gamma_m) = |w| / k, \quad s = \mathrm{sign}(w), \quad k = \max |w| / 0.95

    with `w` and `β` the layer's scale and shift; `k`, `s` and `β` are shared by the members and frozen. A scale of zero
    becomes a gate of 1e-38, which no gradient will open.

    Args:
        norm: BatchNorm1d/2d/3d, LayerNorm, GroupNorm or RMSNorm, or a subclass of one from timm, torchvision or
            transformers, whose activation or channel order is kept. It is copied, not changed.
        members: Number of members M ≥ 1.
        std: Standard deviation of the initial γ ~ N(0, std²) from scratch.
        pretrained: Start every member at the layer's present function instead.

    Attributes:
        gamma: Scale logits γ, shape (M, C) with C the number of scales of `norm`.
        scale: Frozen `k s`, shape (C,), or None from scratch.
        bias: Frozen `β`, shape (C,), or None.
        running_mean, running_var: Statistics of the members, shape (M, C), or None.

    Raises:
        TypeError: if `norm` is of another kind.
        ValueError: if `members` < 1, a pretrained scale is not finite, or an input's rows are no multiple of M.

    Source: paper, sections 3 (layer) and "Conversion"; the sign is this project's extension to scales ≤ 0.

    Examples:
        >>> layer = SigmaNorm(nn.LayerNorm(3), members=2)
        >>> layer(torch.randn(2 * 5, 3)).shape
        torch.Size([10, 3])
    """

    def __init__(self, norm: nn.Module, members: int, *, std: float = 1.0, pretrained: bool = False):
        super().__init__()
        if not is_supported_norm(norm):
            raise TypeError(
                f"no σNorm for {type(norm).__module__}.{type(norm).__name__}: expected BatchNorm1d/2d/3d, LayerNorm, "
                "GroupNorm, RMSNorm, or a subclass from timm, torchvision or transformers"
            )
        check_members(members)
        if not 0 <= std < float("inf"):
            raise ValueError(f"std must be a number ≥ 0, not {std}")
        self.members = members
        # Set by the ensemble: the layer's name.
        self.label: str | None = None
        template = copy.deepcopy(norm)
        # Not registered as a submodule: it has no tensors of its own left, but its children (activations) might.
        vars(self)["template"] = template
        for name, child in template.named_children():
            self.add_module(name, child)

        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
        self.shape = _scale_shape(norm)
        features = self.shape.numel()
        like = next((t for t in (weight, mean) if t is not None), torch.empty(()))
        options = {"device": like.device, "dtype": like.dtype}
        if pretrained:
            w = torch.ones(features, **options) if weight is None else weight.detach().flatten()
            scale, gamma = _factor(w, name=type(norm).__name__)
            self.gamma = nn.Parameter(gamma.repeat(members, 1))
            self.register_buffer("scale", scale)
            self.register_buffer("bias", None if bias is None else bias.detach().flatten().clone())
        else:
            self.gamma = nn.Parameter(torch.empty(members, features, **options).normal_(std=std))
            self.register_buffer("scale", None)
            self.register_buffer("bias", None)
            if mean is not None:
                mean, var = torch.zeros_like(mean), torch.ones_like(var)
        self.register_buffer("running_mean", None if mean is None else mean.repeat(members, 1))
        self.register_buffer("running_var", None if var is None else var.repeat(members, 1))
        count = None if mean is None else torch.zeros(members, dtype=torch.long, device=like.device)
        if pretrained and count is not None and norm.num_batches_tracked is not None:
            count += norm.num_batches_tracked
        self.register_buffer("num_batches_tracked", count)

        self.shifted = bias is not None
        for name in _OWNED:
            for registry in (template._parameters, template._buffers):
                if name in registry:
                    registry[name] = None
        self.native = type(template).forward in {kind.forward for kind in _NATIVE}
        self.train(norm.training)

    @property
    def gates(self) -> Tensor:
        """Gates σ(γ), shape (M, C), each in (0, 1)."""
        return torch.sigmoid(self.gamma)

    @property
    def weight(self) -> Tensor:
        """Effective scales of the members, shape (M, C): the gates, times `k s` after a conversion."""
        return self._scaled(self.gates)

    def _scaled(self, gates: Tensor) -> Tensor:
        return gates if self.scale is None else gates * self.scale

    @property
    def rows(self) -> int | None:
        """Rows of the folded batch in the ensemble's pass that runs in this thread, or None."""
        return pass_of(self).rows

    @property
    def normalizes_batch(self) -> bool:
        """Whether this is a BatchNorm."""
        return isinstance(self.template, _BATCH_NORMS)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and gate `x` of shape (M·B, …), member slowest; in chunks, M is the number of members present."""
        rows, present = pass_of(self)
        # (T, B, D) with T a multiple of B has the right number of rows, but not the right rows.
        turned = x.dim() == 3 and not self.normalizes_batch and x.shape[1] == rows != x.shape[0]
        if rows is not None and (x.shape[0] % rows or turned):
            raise ValueError(
                f"layer {self.label!r} got {tuple(x.shape)} where the batch of {rows} rows must come first: "
                "sequence-first backbones cannot be folded; use their batch-first form"
            )
        weight = self.weight if present is None else self._scaled(torch.sigmoid(self.gamma[present]))
        members = len(weight)
        if x.shape[0] % members:
            raise ValueError(
                f"{x.shape[0]} rows cannot hold {members} members: fold the members into the batch, row m·B + b"
            )
        fixed = self.normalizes_batch and self.native and not self.training and self.running_mean is not None
        if fixed and x.dtype == weight.dtype:
            return self._fixed(x, weight, present)
        if self.normalizes_batch and self.training and x.numel() == x.shape[1] * members:
            raise ValueError(
                f"BatchNorm cannot train on one value per channel and member (input {tuple(x.shape)}, "
                f"{members} members): use batches of at least 2"
            )
        weights = weight.unflatten(1, self.shape).unbind()
        numbers = range(self.members)[present or slice(None)]
        y = [self._slice(x_m, m, w_m) for x_m, m, w_m in zip(x.chunk(members), numbers, weights, strict=True)]
        return y[0] if members == 1 else torch.cat(y)

    def _fixed(self, x: Tensor, weight: Tensor, present: slice | None) -> Tensor:
        """Normalise by running statistics: all members in one pass over the memory."""
        self.template._check_input_dim(x)
        members = len(weight)
        mean, var = self.running_mean, self.running_var
        if present is not None:
            mean, var = mean[present], var[present]
        if x.dim() > 2 and x.is_contiguous():
            # Every row's channels count as channels of one image, which is where the native kernel is fastest.
            rows = x.shape[0] // members
            mean, var, scale, shift = (
                None if t is None else t.expand_as(weight).repeat_interleave(rows, dim=0).flatten()
                for t in (mean, var, weight, self.bias)
            )
            return F.batch_norm(x.flatten(0, 1)[None], mean, var, scale, shift, eps=self.template.eps).view_as(x)
        factor = weight * torch.rsqrt(var + self.template.eps)
        offset = -mean * factor
        if self.bias is not None:
            offset = offset + self.bias
        per_member = (members, 1, -1) + (1,) * (x.dim() - 2)
        y = torch.addcmul(offset.view(per_member), x.unflatten(0, (members, -1)), factor.view(per_member))
        return y.flatten(0, 1)

    def _slice(self, x: Tensor, m: int, weight: Tensor) -> Tensor:
        norm, bias = self.template, self.bias
        if bias is not None:
            bias = bias.view(self.shape)
        if self.native and isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
        if self.native and isinstance(norm, nn.GroupNorm):
            return F.group_norm(x, norm.num_groups, weight, bias, norm.eps)
        if self.native and isinstance(norm, nn.RMSNorm):
            return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)
        # BatchNorm and subclasses run their own forward, on a stand-in that holds this member's tensors: the template
        # itself stays as it is, so that threads may share the layer.
        owned = {"weight": weight, "bias": bias}
        if self.running_mean is not None:
            owned |= {name: getattr(self, name)[m] for name in _OWNED[2:]}
        stand_in = object.__new__(type(norm))
        vars(stand_in).update(vars(norm) | owned, training=self.training)
        return stand_in(x)

    def member(self, m: int) -> nn.Module:
        """Return member `m` as an ordinary layer of the original class, with the same outputs."""
        norm = copy.deepcopy(self.template)
        weight = self.weight[m].detach().clone().view(self.shape)
        norm.weight = nn.Parameter(weight)
        if self.shifted:
            bias = torch.zeros_like(weight) if self.bias is None else self.bias.clone().view(self.shape)
            norm.bias = nn.Parameter(bias)
        if self.running_mean is not None:
            for name in _OWNED[2:]:
                setattr(norm, name, getattr(self, name)[m].clone())
        return norm.train(self.training)

    def extra_repr(self) -> str:
        start = "scratch" if self.scale is None else "pretrained"
        return f"{type(self.template).__name__}, members={self.members}, features={self.gamma.shape[1]}, {start}"


class MemberHead(nn.Module):
    """Give every member a classifier of its own: a σNorm, then a linear layer, all members in one batched matmul.

    Args:
        linear: The linear layer it replaces; only its sizes, F to K, are kept.
        members: Number of members M.
        batch_norm: Normalise over the batch (convolutional backbones) or, if False, per sample (transformers).
        std: Standard deviation of the initial scale logits.

    Shape: (M·B, …, F) to (M·B, …, K), member slowest.
    Source: paper, section 3; the parameter counts of Table 1 fit a norm with one parameter a feature.
    """

    def __init__(self, linear: nn.Linear, members: int, *, batch_norm: bool, std: float = 1.0):
        super().__init__()
        options = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        features = linear.in_features
        norm = nn.BatchNorm1d(features, **options) if batch_norm else nn.LayerNorm(features, **options)
        self.norm = SigmaNorm(norm, members, std=std)
        fresh = [nn.Linear(features, linear.out_features, linear.bias is not None, **options) for _ in range(members)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach() for layer in fresh]))
        if linear.bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(torch.stack([layer.bias.detach() for layer in fresh]))
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        present = pass_of(self.norm).members
        weight, bias = (t if t is None or present is None else t[present] for t in (self.weight, self.bias))
        leading = x.shape[:-1]
        x = self.norm(x.flatten(0, -2)).unflatten(0, (len(weight), -1))
        y = x @ weight.mT if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)
        return y.flatten(0, 1).unflatten(0, leading)

    def member(self, m: int) -> nn.Module:
        """Return member `m` as an ordinary norm and linear layer."""
        linear = nn.Linear(self.weight.shape[2], self.weight.shape[1], self.bias is not None).to(self.weight)
        with torch.no_grad():
            linear.weight.copy_(self.weight[m])
            if self.bias is not None:
                linear.bias.copy_(self.bias[m])
        return nn.Sequential(self.norm.member(m), linear).train(self.training)

    def extra_repr(self) -> str:
        members, classes, features = self.weight.shape
        return f"members={members}, in_features={features}, out_features={classes}"


class SynchronizedBatchNorm(TorchFunctionMode):
    """Within this context every BatchNorm that trains takes the statistics of the rows of all processes together.

    It answers the calls of `torch.nn.functional.batch_norm`, so it holds for every layer that makes them: σNorm, whose
    members keep statistics of their own, the peers' norms, and subclasses. All processes must run the same layers, in
    the same order, forward and backward. Gradients are those of the sum of the processes' losses. The statistics are
    combined from each process's mean and variance, which lose no digits as sums of squares would.

    `torch.nn.SyncBatchNorm` is not used since it is a layer of its own kind, and refuses CPUs. A norm that a backward
    pass runs again (gradient checkpointing) is not answered.

    Args:
        counted: Whether this process's rows count; others take the statistics, and leave none.
    """

    def __init__(self, counted: bool = True):
        super().__init__()
        self.counted = counted

    def __torch_function__(self, function, types, args=(), kwargs=None):
        answer = self._batch_norm if function is F.batch_norm else function
        return answer(*args, **(kwargs or {}))

    def _batch_norm(
        self, x, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5
    ) -> Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
        with torch.no_grad():
            exact = x.to(torch.promote_types(x.dtype, torch.float32))
            var, mean = torch.var_mean(exact, _all_but_channels(x), correction=0)
            count = mean.new_full((1,), self.counted * x.numel() / x.shape[1])
            own = torch.cat([mean, var, count])
            every = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(every, own)
            means, variances, counts = torch.stack(every).split([len(mean), len(mean), 1], dim=1)
            count = counts.sum()
            mean = (counts * means).sum(0) / count
            var = (counts * (variances + (means - mean).square())).sum(0) / count
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean), momentum)
                running_var.lerp_((var * count / (count - 1)).to(running_var), momentum)
        return _Normalize.apply(x, weight, bias, mean, var, count, eps, self.counted)


class _Normalize(torch.autograd.Function):
    """Normalise by statistics of all processes' rows, which backward depend on every one of these rows."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, var, count, eps, counted):
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), count)
        ctx.counted = counted
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, inverse, count = ctx.saved_tensors
        per_channel = (1, -1) + (1,) * (x.dim() - 2)
        dy = dy.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(per_channel)
        own = torch.stack([t.sum(_all_but_channels(x)) for t in (dy, dy * centred)])
        through_mean, through_var = _summed(own) / count
        dx = dy
        if ctx.counted:
            dx = dx - through_mean.view(per_channel) - centred * (through_var * inverse.square()).view(per_channel)
        dx = dx * (inverse if weight is None else inverse * weight).view(per_channel)
        dweight, dbias = own[1] * inverse, own[0]
        wanted = [t if needed else None for t, needed in zip((dx, dweight, dbias), ctx.needs_input_grad, strict=False)]
        return *wanted, None, None, None, None, None


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _summed(own: Tensor) -> Tensor:
    total = own.clone()
    torch.distributed.all_reduce(total)
    return total


def check_members(members: int) -> None:
    """Raise ValueError unless `members` is an integer ≥ 1."""
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise ValueError(f"members must be an integer ≥ 1, not {members!r}")


def _scale_shape(norm: nn.Module) -> torch.Size:
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        return torch.Size(norm.normalized_shape)
    return torch.Size([norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features])


def _factor(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Split pretrained scales (C,) into frozen signed factors k·s and scale logits γ with k·s·σ(γ) = weight."""
    if not torch.isfinite(weight).all():
        raise ValueError(f"a scale of {name} is not finite: {weight[~torch.isfinite(weight)][0].item()}")
    k = weight.double().abs().max() / 0.95
    if k == 0:
        k = torch.ones_like(k)
    # A zero scale becomes the smallest gate float32 can tell from zero, so that its logit stays finite.
    gate = (weight.double().abs() / k).clamp_min(torch.finfo(torch.float32).tiny)
    gamma = torch.logit(gate).to(weight.dtype)
    # Dividing by the gate as it will be computed puts the rounding of γ into k, so the product is the old scale.
    return torch.where(weight == 0, k.to(weight.dtype), weight / torch.sigmoid(gamma)), gamma
