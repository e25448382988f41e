"""BatchNorm whose statistics are those of all processes' rows, for every layer that calls torch's function."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["SynchronizedBatchNorm"]


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
