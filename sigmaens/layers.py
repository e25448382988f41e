"""σNorm: normalisation layers whose scale is a sigmoid gate, one gate vector and one set of statistics per member."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

__all__ = ["MemberHead", "SigmaBatchNorm", "SigmaNorm", "is_supported_norm", "looks_like_norm"]

_BatchNorm = nn.modules.batchnorm._BatchNorm
_NATIVE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_FORWARDS = {kind.forward for kind in _NATIVE}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OWNED = ("weight", "bias", *_STATISTICS)
_HOOKS = ("hooks", "hooks_with_kwargs", "hooks_always_called", "_is_full_backward_hook")


class Pass(NamedTuple):
    """The members that a pass through the backbone runs, and what is known of it.

    Attributes:
        first, count: The members are first, …, first + count − 1. One member gets the backbone's own batch; more are
            folded into it, member slowest.
        rows: For each σNorm layer the numbers of rows that a member may have there, proved before; None: any number.
        probing: Whether the gates are numbers made up to tell the members apart.
        seen: Is told what each σNorm layer gets, by name, or None.
    """

    first: int
    count: int
    rows: Mapping[str, frozenset[int]] | None = None
    probing: bool = False
    seen: Callable[[str, Tensor], None] | None = None


class UnprovedRows(ValueError):
    """A layer got another number of rows than those for which folding was proved."""


class Running(threading.local):
    """The pass that runs in this thread, known to all layers of an ensemble.

    Attributes:
        now: The pass, or None outside of one.
        backward: The pass whose gradients were asked for last. Gradient checkpointing runs layers of it again.
    """

    def __init__(self) -> None:  # which threading.local calls in every thread
        self.now: Pass | None = None
        self.backward: Pass | None = None

    @contextlib.contextmanager
    def run(self, current: Pass) -> Iterator[None]:
        """Let the layers run `current` within this context."""
        before, self.now = self.now, current
        try:
            yield
        finally:
            self.now = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        return memo.setdefault(id(self), Running())

    def __reduce__(self) -> tuple[type, tuple]:
        return Running, ()


def looks_like_norm(module: nn.Module) -> bool:
    """Tell whether `module` itself normalises: a leaf by that name, holding its own parameters or statistics."""
    if isinstance(module, (*_NATIVE, nn.modules.batchnorm._NormBase)):
        return True
    return "Norm" in type(module).__name__ and any(
        tensor is not None for tensor in (*module._parameters.values(), *module._buffers.values())
    )


def is_supported_norm(module: nn.Module) -> bool:
    """Tell whether `SigmaNorm` can stand in for `module`."""
    return looks_like_norm(module) and unsupported(module) is None


def unsupported(norm: nn.Module) -> str | None:
    """Return why no σNorm can stand in for a norm, as a clause such as "has norms inside", or None."""
    return _examine(norm)[0]


def _examine(norm: nn.Module) -> tuple[str | None, float]:
    """Return why no σNorm can stand in for `norm`, or None, and the offset o of its scale, weight + o.

    A layer with a forward of its own is tried out: with scales of 0 everywhere nothing of its input may come through.
    That tells norms from those that add their input, and a scale of `weight` from one of `weight + 1`.
    """
    weight = getattr(norm, "weight", None)
    if isinstance(norm, nn.modules.lazy.LazyModuleMixin):
        return "is lazy: run the backbone once before", 0.0
    if isinstance(norm, nn.SyncBatchNorm):
        return "takes its statistics over processes: convert the ordinary BatchNorm", 0.0
    if "forward" in vars(norm):
        return "had its forward replaced (hooks of accelerate do that): remove them before the conversion", 0.0
    if isinstance(norm._buffers.get("weight"), Tensor):
        return "has a frozen scale", 0.0
    if is_parametrized(norm) or not (weight is None or isinstance(weight, nn.Parameter)):
        return "has a scale that is computed (weight norm, pruning): make it permanent before the conversion", 0.0
    if type(norm).forward in _FORWARDS:
        return None, 0.0
    inputs = [
        p
        for p in inspect.signature(norm.forward).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if len(inputs) > 1:
        return f"takes other inputs too ({inputs[1].name})", 0.0
    if any(looks_like_norm(child) for child in norm.modules() if child is not norm):
        return "has norms inside", 0.0
    if not isinstance(norm, _NATIVE) and (weight is None or weight.dim() != 1):
        return "has no scale for each feature", 0.0
    if other := {n for r in (norm._parameters, norm._buffers) for n, t in r.items() if t is not None} - {*_OWNED}:
        return f"has tensors of its own, {sorted(other)}", 0.0
    shape = _scale_shape(norm)
    stand_in = copy.deepcopy(norm).cpu().float().requires_grad_(False).eval()
    for offset in (0.0, 1.0):
        for size in ((3, *shape), (3, 4, *shape), (3, *shape, 4, 4), (3, *shape, 2, 4, 4)):
            with torch.no_grad(), torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
                torch.manual_seed(0)
                x, other = torch.randn(2, *size)
                answers = [
                    _with(stand_in, weight=torch.full(shape, scale), bias=torch.zeros(shape))(given)
                    for scale, given in ((-offset, x), (-offset, other), (0.5, x), (0.5, other))
                ]
                if torch.equal(answers[0], answers[1]) and not torch.equal(answers[2], answers[3]):
                    return None, offset
    return "lets its input through where the scale is 0, or cannot be tried out", 0.0


def _with(norm: nn.Module, **tensors: Any) -> nn.Module:
    """Return a stand-in for `norm` that holds other tensors; the norm stays as it is, so that threads may share it."""
    stand_in = object.__new__(type(norm))
    vars(stand_in).update(vars(norm), **tensors)
    return stand_in


class SigmaNorm(nn.Module):
    r"""Gate a normalisation layer with a sigmoid, separately for every member.

    .. math:: y_m = \sigma(\gamma_m) \odot \mathrm{norm}_m(x_m)

    Inside an ensemble the layer runs the members of the ensemble's pass: one, on whatever input the backbone has for
    it; or several folded into the batch, member slowest, so that row `m * B + b` belongs to member `m` and each
    contiguous slice goes through the layer's own kernel. A layer of no ensemble takes all members so. BatchNorm keeps
    batch and running statistics per member, and is found as a BatchNorm by what looks for one (see `SigmaBatchNorm`).

    A pretrained layer is converted exactly (`pretrained=True`), scales of any sign and zero included:

    .. math:: y_m = k\, s \odot \sigma(\gamma_m) \odot \mathrm{norm}_m(x_m) + \beta,
        \qquad \sigma(\gamma_m) = |w| / k, \quad s = \mathrm{sign}(w), \quad k = \max |w| / 0.95

    with `w` and `β` the layer's scale and shift; `k`, `s` and `β` are shared by the members and frozen. A scale of zero
    becomes a gate of 1e-38, which no gradient will open.

    Args:
        norm: BatchNorm1d/2d/3d, LayerNorm, GroupNorm or RMSNorm, a subclass of one, or a layer of another kind with
            one scale for each feature, as the RMSNorms of transformers. What else it does, such as an activation, is
            kept, and so are its hooks. It is copied, not changed.
        members: Number of members M ≥ 1.
        std: Standard deviation of the initial γ ~ N(0, std²) from scratch.
        pretrained: Start every member at the layer's present function instead.
        like: A tensor of the device and precision in which a norm without tensors of its own computes.

    Attributes:
        gamma: Scale logits γ, shape (M, C) with C the number of scales of `norm`, in float32 at least, whatever the
            layer computes in: steps of an optimiser would be lost in half precision.
        scale: Frozen `k s`, shape (C,), or None from scratch.
        bias: Frozen `β`, shape (C,), or None.
        running_mean, running_var: Statistics of the members, shape (M, C), or None.

    Raises:
        TypeError: if `norm` is of a kind that cannot be gated.
        ValueError: if `members` < 1, a pretrained scale is not finite, or an input's rows are no multiple of M.
        RuntimeError: if the layer of an ensemble is called outside of the ensemble's pass.

    Source: paper, sections 3 (layer) and "Conversion"; the sign is this project's extension to scales ≤ 0.

    Examples:
        >>> layer = SigmaNorm(nn.LayerNorm(3), members=2)
        >>> layer(torch.randn(2 * 5, 3)).shape
        torch.Size([10, 3])
    """

    def __new__(cls, norm: nn.Module | None = None, *args: Any, **kwargs: Any) -> SigmaNorm:
        return super().__new__(SigmaBatchNorm if cls is SigmaNorm and isinstance(norm, _BatchNorm) else cls)

    def __init__(
        self,
        norm: nn.Module,
        members: int,
        *,
        std: float = 1.0,
        pretrained: bool = False,
        like: Tensor | None = None,
    ):
        nn.Module.__init__(self)
        problem, self.offset = _examine(norm) if looks_like_norm(norm) else ("is no norm", 0.0)
        if problem:
            raise TypeError(f"no σNorm for {type(norm).__module__}.{type(norm).__name__}: it {problem}")
        check_members(members)
        if not 0 <= std < float("inf"):
            raise ValueError(f"std must be a number ≥ 0, not {std}")
        self.members = members
        # Set by the ensemble: the layer's name, and the pass that runs.
        self.label: str | None = None
        self.running: Running | None = None
        template = copy.deepcopy(norm)
        # Not registered as a submodule: it has no tensors of its own left, but its children (activations) might.
        vars(self)["template"] = template
        for name, child in template.named_children():
            self.add_module(name, child)
        blank = vars(nn.Module())
        for name in [name for name in vars(template) if name.endswith(_HOOKS)]:
            vars(self)[name], vars(template)[name] = vars(template)[name], blank[name]

        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
        self.shape = _scale_shape(norm)
        features = self.shape.numel()
        like = next((t for t in (weight, mean, like) if t is not None), torch.empty(()))
        # Of the precision that the layer computes in; it follows casts.
        self.register_buffer("_like", torch.empty(0, device=like.device, dtype=like.dtype), persistent=False)
        precise = {"device": like.device, "dtype": torch.promote_types(like.dtype, torch.float32)}
        if pretrained:
            w = torch.ones(features, **precise) if weight is None else weight.detach().flatten() + self.offset
            scale, gamma = _factor(w, name=type(norm).__name__)
            self.gamma = nn.Parameter(gamma.repeat(members, 1))
            self.register_buffer("scale", scale)
            self.register_buffer("bias", None if bias is None else bias.detach().flatten().clone())
        else:
            self.gamma = nn.Parameter(torch.empty(members, features, **precise).normal_(std=std))
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
        self.native = type(template).forward in _FORWARDS
        self.train(norm.training)

    def _apply(self, fn: Any, recurse: bool = True) -> SigmaNorm:
        precise = [t for t in (self.gamma, self.scale) if t is not None]
        before = [t.data for t in precise]
        super()._apply(fn, recurse)
        for tensor, old in zip((self.gamma, self.scale), before, strict=False):
            if tensor.dtype != old.dtype and torch.finfo(tensor.dtype).bits < 32:
                tensor.data = old.to(tensor.device, torch.promote_types(tensor.dtype, torch.float32))
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(tensor.dtype)
        return self

    @property
    def gates(self) -> Tensor:
        """Gates σ(γ), shape (M, C), each in (0, 1)."""
        return torch.sigmoid(self.gamma)

    @property
    def weight(self) -> Tensor:
        """Effective scales of the members, shape (M, C): the gates, times `k s` after a conversion."""
        return self._scaled(self.gates)

    def _scaled(self, gates: Tensor) -> Tensor:
        return (gates if self.scale is None else gates * self.scale).to(self._like.dtype)

    @property
    def normalizes_batch(self) -> bool:
        """Whether this is a BatchNorm."""
        return isinstance(self.template, _BatchNorm)

    def current(self) -> Pass:
        """Return the pass that runs.

        Raises:
            RuntimeError: if the layer is an ensemble's and none runs.
        """
        if self.running is None:
            return Pass(0, self.members)
        if self.running.now is not None:
            return self.running.now
        if self.running.backward is not None and _recomputing():
            return self.running.backward
        raise RuntimeError(
            f"layer {self.label!r} runs outside of the ensemble's pass, so that no member is meant: call the ensemble "
            "itself, not its backbone; ens.member(m) is an ordinary network"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and gate `x` for the members of the pass; if these are several, (M·B, …), member slowest."""
        first, count, rows, probing, seen = self.current()
        if seen is not None:
            seen(self.label, x)
        gamma = self.gamma if count == self.members else self.gamma[first : first + count]
        weight = self._scaled(_made_up_gates(gamma, first) if probing else torch.sigmoid(gamma))
        if self.normalizes_batch and self.training and x.numel() == x.shape[1] * count:
            raise ValueError(
                f"BatchNorm cannot train on one value per channel and member (input {tuple(x.shape)}, "
                f"{count} members): use batches of at least 2"
            )
        if count == 1:
            return self._slice(x, first, weight.view(self.shape))
        if x.dim() == 0 or x.shape[0] % count:
            raise ValueError(
                f"an input of shape {tuple(x.shape)} cannot hold {count} members: fold them into the batch, row m·B + b"
            )
        if rows is not None and x.shape[0] // count not in rows[self.label]:
            raise UnprovedRows(f"layer {self.label!r} got {x.shape[0]} rows for {count} members")
        if self._fixed_for(x):
            return self._fixed(x, weight, slice(first, first + count))
        slices = zip(x.chunk(count), weight.unflatten(1, self.shape).unbind(), strict=True)
        return torch.cat([self._slice(x_m, first + i, w_m) for i, (x_m, w_m) in enumerate(slices)])

    def _fixed_for(self, x: Tensor) -> bool:
        """Whether running statistics are all that the layer needs for `x`."""
        fixed = self.normalizes_batch and self.native and not self.training and self.running_mean is not None
        return fixed and x.dtype == self._like.dtype

    def _fixed(self, x: Tensor, weight: Tensor, members: slice) -> Tensor:
        """Normalise by running statistics: several members in one pass over the memory."""
        self.template._check_input_dim(x)
        mean, var = self.running_mean[members], self.running_var[members]
        if x.dim() > 2 and x.is_contiguous():
            # Every row's channels count as channels of one image, which is where the native kernel is fastest.
            rows = x.shape[0] // len(weight)
            mean, var, scale, shift = (
                None if t is None else t.expand_as(weight).repeat_interleave(rows, dim=0).flatten()
                for t in (mean, var, weight, self.bias)
            )
            return F.batch_norm(x.flatten(0, 1)[None], mean, var, scale, shift, eps=self.template.eps).view_as(x)
        factor = weight * torch.rsqrt(var + self.template.eps)
        offset = -mean * factor
        if self.bias is not None:
            offset = offset + self.bias
        per_member = (len(weight), 1, -1) + (1,) * (x.dim() - 2)
        y = torch.addcmul(offset.view(per_member), x.unflatten(0, (len(weight), -1)), factor.view(per_member))
        return y.flatten(0, 1)

    def _slice(self, x: Tensor, m: int, weight: Tensor) -> Tensor:
        """Normalise the rows of member `m` and scale them by `weight`, of the layer's own shape."""
        norm, bias = self.template, None if self.bias is None else self.bias.view(self.shape)
        if self.native and isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
        if self.native and isinstance(norm, nn.GroupNorm):
            return F.group_norm(x, norm.num_groups, weight, bias, norm.eps)
        if self.native and isinstance(norm, nn.RMSNorm):
            return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)
        if not self.native:
            weight = weight - self.offset if self.offset else weight
            bias = torch.zeros_like(weight) if self.shifted and bias is None else bias
        owned = {"weight": weight, "bias": bias}
        if self.running_mean is not None:
            owned |= {name: getattr(self, name)[m] for name in _STATISTICS}
        return _with(norm, **owned, training=self.training)(x)

    def member(self, m: int) -> nn.Module:
        """Return member `m` as an ordinary layer of the original class, with the same outputs."""
        norm = copy.deepcopy(self.template)
        weight = self.weight[m].detach().clone().view(self.shape)
        norm.weight = nn.Parameter(weight - self.offset)
        if self.shifted:
            bias = torch.zeros_like(weight) if self.bias is None else self.bias.clone().view(self.shape)
            norm.bias = nn.Parameter(bias)
        if self.running_mean is not None:
            for name in _STATISTICS:
                setattr(norm, name, getattr(self, name)[m].clone())
        return norm.train(self.training)

    def extra_repr(self) -> str:
        start = "scratch" if self.scale is None else "pretrained"
        return f"{type(self.template).__name__}, members={self.members}, features={self.gamma.shape[1]}, {start}"


class SigmaBatchNorm(SigmaNorm, _BatchNorm):
    """The σNorm of a BatchNorm, which `SigmaNorm` makes: a BatchNorm for what looks for one.

    So `torch.optim.swa_utils.update_bn` computes the statistics of all members anew, and code that puts every BatchNorm
    into evaluation mode freezes theirs. Its settings are those of the BatchNorm it stands in for, and may be set.
    """

    def _get_name(self) -> str:
        return "SigmaNorm"


def _setting(name: str) -> property:
    return property(lambda self: getattr(self.template, name), lambda self, value: setattr(self.template, name, value))


for _name in ("num_features", "eps", "momentum", "affine", "track_running_stats"):
    setattr(SigmaBatchNorm, _name, _setting(_name))


class MemberHead(nn.Module):
    """Give every member a classifier of its own: a σNorm, then a linear layer, all members in one batched matmul.

    Args:
        linear: The linear layer it replaces; only its sizes, F to K, are kept.
        members: Number of members M.
        batch_norm: Normalise over the batch (convolutional backbones) or, if False, per sample (transformers).
        std: Standard deviation of the initial scale logits.

    Shape: (M·B, …, F) to (M·B, …, K), member slowest; (…, F) to (…, K) where one member runs.
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
        first, count = self.norm.current()[:2]
        y = self.norm(x.flatten(0, -2))
        if count == 1:
            bias = None if self.bias is None else self.bias[first]
            return F.linear(y, self.weight[first], bias).unflatten(0, x.shape[:-1])
        weight, bias = (t if t is None else t[first : first + count] for t in (self.weight, self.bias))
        y = y.unflatten(0, (count, -1))
        y = y @ weight.mT if bias is None else torch.baddbmm(bias[:, None], y, weight.mT)
        return y.flatten(0, 1).unflatten(0, x.shape[:-1])

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


def check_members(members: int) -> None:
    """Raise ValueError unless `members` is an integer ≥ 1."""
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise ValueError(f"members must be an integer ≥ 1, not {members!r}")


def _recomputing() -> bool:
    """Whether a backward pass runs this code again: gradient checkpointing, or a function with its own backward."""
    again = ("torch.utils.checkpoint", "torch.autograd.function")
    return any(frame.f_globals.get("__name__") in again for frame, _ in traceback.walk_stack(None))


def _made_up_gates(gamma: Tensor, first: int) -> Tensor:
    """Gates in [0.3, 1) that differ between the members from `first` on and between features, for probing."""
    numbers = torch.arange(1, gamma.numel() + 1, device=gamma.device, dtype=gamma.dtype).view_as(gamma)
    return 0.3 + 0.7 * ((numbers + first * gamma.shape[1]) * 0.618034).frac()


def _scale_shape(norm: nn.Module) -> torch.Size:
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        return torch.Size(norm.normalized_shape)
    if isinstance(norm, (nn.GroupNorm, _BatchNorm)):
        return torch.Size([norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features])
    return norm.weight.shape


def _factor(weight: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Split pretrained scales (C,) into frozen signed factors k·s and scale logits γ with k·s·σ(γ) = weight."""
    if not torch.isfinite(weight).all():
        raise ValueError(f"a scale of {name} is not finite: {weight[~torch.isfinite(weight)][0].item()}")
    dtype = torch.promote_types(weight.dtype, torch.float32)
    w = weight.cpu().double()  # not every device has float64
    k = w.abs().max() / 0.95
    if k == 0:
        k = torch.ones_like(k)
    # A zero scale becomes the smallest gate float32 can tell from zero, so that its logit stays finite.
    gamma = torch.logit((w.abs() / k).clamp_min(torch.finfo(torch.float32).tiny)).to(dtype)
    # Dividing by the gate as it will be computed puts the rounding of γ into k, so the product is the old scale.
    scale = torch.where(w == 0, k.to(dtype), weight.cpu().to(dtype) / torch.sigmoid(gamma))
    return scale.to(weight.device), gamma.to(weight.device)
