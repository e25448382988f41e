"""Slim members: what closed gates silence is left out, so that an ensemble costs about what its open gates cost.

A gate of zero without a shift makes its channel exactly zero, and so does any function with f(0) = 0 after it. The
channel's rows in the layer before the norm and its columns in the layers after it then change nothing for that member.
Which layers these are is read from a graph of the backbone (`tracing`), and only what the graph proves is left out.
Pruning libraries such as Torch-Pruning cut one network for good; here every member has other channels in one set of
shared weights, so they do not fit.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from .ensemble import SigmaEnsemble, evaluating, replace
from .folding import by_keywords, plain
from .layers import MemberHead, SigmaNorm
from .tracing import LAYERS, OWN, Place, Plan, axis_of, plan

__all__ = ["Cut", "Settling", "SlimEnsemble", "close", "slim", "with_uncertainty"]


class Cut(NamedTuple):
    """What slimming does at one σNorm layer.

    Attributes:
        features: Gates C of a member.
        kept: Gates that stay open, for each member. Of none, one channel runs on with a gate of 0.
        producer: The layer whose rows (outputs) of closed channels are left out, or None.
        consumers: The layers whose columns (inputs) of closed channels are left out.
        reason: Why not more is left out, or "".
    """

    features: int
    kept: tuple[int, ...]
    producer: str | None
    consumers: tuple[str, ...]
    reason: str


class SlimEnsemble(SigmaEnsemble):
    """An ensemble whose members run one after the other, each without the channels that its closed gates silence.

    Made by `slim`. It holds the parameters of the ensemble under the same names, shared by the members, and for every
    slimmed σNorm layer a mask `open` (M, C). Each member takes its rows and columns of the shared weights as it runs,
    so gradients and running statistics arrive where those of the full pass do, and are the same. Layers before the
    first σNorm run once. In evaluation without gradients the members' layers are kept ready, and a plain BatchNorm with
    statistics of its own is folded into the convolution whose rows it closes (see `report`), unless a hook looks on or
    weights are not in float32 or float64; outputs are those of the full pass up to rounding.

    `gates` counts closed gates as 0, and `member(m)` is an ordinary, narrower network. Files hold weights and masks:
    `load` takes those of any slim ensemble of the same backbone and is slimmed in the file's way afterwards; a file of
    the full ensemble is refused. In evaluation, narrowed weights are kept: write to weights under `torch.no_grad()`
    rather than through `.data`, which nothing notices before the next `train()` or `eval()`.

    Shape: inputs with B rows to logits (B, M, K).
    """

    def __init__(self, *args: Any, **kwargs: Any):
        raise TypeError("a SlimEnsemble is made from a SigmaEnsemble: see slim")

    @classmethod
    def _of(cls, ens: SigmaEnsemble, backbone: nn.Module, found: Plan) -> SlimEnsemble:
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.members, self.head, self.regularized = ens.members, ens.head, ens.regularized
        self.at_once, self.link = ens.at_once, ens.link
        self.backbone = backbone
        self._proofs = {}
        self._places = found.places
        self._guarded = found.guarded
        self.training = ens.training
        self.register_load_state_dict_post_hook(_follow_masks)
        _follow_masks(self)
        return self

    @property
    def report(self) -> dict[str, Cut]:
        """What is left out at each σNorm layer, {layer name: `Cut`}."""
        layers = self._layers()
        return {
            name: Cut(
                layers[name].gamma.shape[1],
                tuple(layers[name].opened().sum(1).tolist()),
                place.producer,
                place.consumers,
                place.reason,
            )
            for name, place in self._places.items()
        }

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the members' logits, shape (B, M, K). Arguments as for the full ensemble; none is repeated."""
        return _one_by_one(self.backbone, self.members, args, kwargs, self._layers().values(), self._guarded)

    def chunks(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """Run the members one by one, whatever `at_once` is: yield the logits (B, 1, K) of each.

        See `SigmaEnsemble.chunks`. Where gradients are wanted, layers before the first σNorm run for every member.
        """
        return _turns(self.backbone, self.members, args, kwargs, self._layers().values(), self._guarded, apart=True)

    @staticmethod
    def _has_members(module: nn.Module) -> bool:
        return isinstance(module, (*OWN, _Narrow))

    def change(
        self, ens: SigmaEnsemble, *args: Any, labels: Tensor | None = None, **kwargs: Any
    ) -> dict[str, float | tuple[float, float]]:
        """Measure, in evaluation mode, what slimming changed on inputs given as to `forward`.

        Args:
            ens: The full ensemble.
            labels: Classes of the rows, (B,), of integers in 0..K−1.

        Returns:
            `absolute`, the largest change of a logit; `relative`, the same by the largest absolute logit before; and
            with labels `accuracy` and `nll` (nats), each before and after.
        """
        from . import metrics

        with torch.no_grad(), evaluating(ens), evaluating(self):
            before, after = (model(*args, **kwargs).double().cpu() for model in (ens, self))
        absolute = (after - before).abs().max().item()
        largest = before.abs().max().item()
        result: dict[str, float | tuple[float, float]] = {
            "absolute": absolute,
            "relative": absolute / largest if largest else float(absolute > 0),
        }
        if labels is not None:
            probs = [logits.softmax(-1).mean(1) for logits in (before, after)]
            labels = torch.as_tensor(labels).cpu()
            result["accuracy"] = tuple(metrics.accuracy(p, labels) for p in probs)
            result["nll"] = tuple(metrics.nll(p, labels) for p in probs)
        return result

    def load(self, path: str | os.PathLike) -> SlimEnsemble:
        """Load a file written by `save` from an ensemble built alike, slimmed in whatever way, and return `self`.

        The masks of the file replace the present ones. Errors: see `sigmaens.load`.
        """
        return super().load(path)

    def __repr__(self) -> str:
        report = self.report
        lines = [f"SlimEnsemble of {type(self.backbone).__name__}: {self.members} members, head={self.head!r}"]
        width = max(map(len, report), default=0)
        for name, cut in report.items():
            kept = ", ".join(map(str, cut.kept))
            mark = "R" if name in self.regularized else " "
            done = [f"rows of {cut.producer}"] if cut.producer else []
            done += [f"columns of {name}" for name in cut.consumers]
            what = " and ".join(done) or "nothing"
            why = f" ({cut.reason})" if cut.reason else ""
            lines.append(f"  {mark} {name:<{width}}  {kept} of {cut.features} open; left out: {what}{why}")
        return "\n".join(lines)


def slim(
    ens: SigmaEnsemble, *inputs: Any, threshold: float = 0.01, share: bool = False, **named_inputs: Any
) -> SlimEnsemble:
    """Leave out, member by member, the channels whose gates are closed.

    A gate counts as 0 if it is at most `threshold`, its channel has no shift β ≠ 0, and there is something to leave
    out: the rows of the convolution or linear layer right before a BatchNorm, where nothing else reads them; the
    columns of the ungrouped convolutions and linear layers after any norm, where everything that reads the norm is
    such a layer, through functions with f(0) = 0, pooling, dropout and means. A norm before a sum, say, has zeros put
    in the places of its closed channels. All other gates stay as they are. The outputs are those of the ensemble with
    the gates that count as 0 set to 0, in evaluation and, but for what dropout draws, in training.

    Args:
        ens: The ensemble. It is copied, not changed.
        inputs, named_inputs: Example inputs of a few rows, given as to `ens`, which runs on them a few times. The slim
            ensemble is to be called with arguments of the same kinds. What the network makes of them decides what is
            proved, so they should be as real as a batch of training, not all zero.
        threshold: Largest gate that counts as closed, in [0, 1).
        share: Keep the ensemble's own parameters and statistics instead of copies, so that training either trains
            both and an optimiser goes on with its state.

    Raises:
        TypeError: if `ens` is no SigmaEnsemble, or slim already.
        ValueError: if `threshold` is not in [0, 1), the inputs hold no batch, or the outputs for them are not finite.

    Examples:
        >>> block = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.Flatten())
        >>> ens = SigmaEnsemble(block, members=2)
        >>> with torch.no_grad():
        ...     _ = ens.backbone[1].gamma.fill_(-torch.inf)[0, :2].zero_()
        >>> slim(ens, torch.randn(1, 3, 1, 1))
        SlimEnsemble of Sequential: 2 members, head=None
          R 1  2, 0 of 8 open; left out: columns of 3 (layer '0' runs once for all members)
    """
    if not isinstance(ens, SigmaEnsemble):
        raise TypeError(f"ens must be a SigmaEnsemble, not {type(ens).__name__}")
    if isinstance(ens, SlimEnsemble):
        raise TypeError("the ensemble is slim already: slim the full one")
    _check_threshold(threshold)
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves((inputs, named_inputs))):
        raise ValueError(f"slim needs example inputs, as of ens(x): ens.slim(x, threshold=…), not {inputs or 'none'}")
    tensors = itertools.chain(ens.backbone.parameters(), ens.backbone.buffers())
    backbone = copy.deepcopy(ens.backbone, {id(tensor): tensor for tensor in tensors} if share else None)
    found = plan(backbone, ens.members, inputs, named_inputs)
    for module in [module for module in backbone.modules() if isinstance(module, OWN)]:
        module.__class__ = _SlimNorm if isinstance(module, SigmaNorm) else _SlimHead
    for name in (*found.shared, *(n for p in found.places.values() for n in (p.producer, *p.consumers) if n)):
        layer = backbone.get_submodule(name)
        layer.__class__ = _NARROW.get(type(layer), type(layer))
        layer.shared = name in found.shared
    for name, place in found.places.items():
        if place.producer or place.consumers:
            backbone.get_submodule(name).close(threshold)
        # A linear layer may be called on more dimensions than its norm takes.
        if place.producer and not isinstance(backbone.get_submodule(place.producer), nn.Linear):
            backbone.get_submodule(place.producer).norm = (backbone.get_submodule(name),)
    return SlimEnsemble._of(ens, backbone, found)


def _check_threshold(threshold: float) -> None:
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < 1:
        raise ValueError(f"threshold must be a number in [0, 1), not {threshold!r}")


# Training -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settling:
    """When the regularised gates count as settled, so that training may go on with a slim ensemble.

    That is when some are closed, and for `patience` epochs none has crossed `threshold` in either direction. Which
    member owns a channel is then decided, as long as the loss and the learning rate keep their nature.

    Args:
        threshold: Largest gate that counts as closed, in (0, 1).
        patience: Epochs ≥ 1.

    Examples:
        >>> rule = Settling(patience=1)
        >>> before = {"layer": torch.tensor([[0.90, 0.2], [0.30, 0.7]])}
        >>> after = {"layer": torch.tensor([[0.99, 0.0], [0.00, 0.6]])}
        >>> rule.observe(before, after)
        {'closed': 0.5, 'between': 0.25, 'crossed': 0.5, 'moved': 0.0}
    """

    threshold: float = 0.01
    patience: int = 3

    def __post_init__(self) -> None:
        if (
            isinstance(self.threshold, bool)
            or not isinstance(self.threshold, (int, float))
            or not 0 < self.threshold < 1
        ):
            raise ValueError(f"threshold must be a number in (0, 1), not {self.threshold!r}")
        if isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"patience must be an integer ≥ 1, not {self.patience!r}")

    @staticmethod
    def gates(model: nn.Module) -> dict[str, Tensor] | None:
        """Return copies of the regularised gates, {layer name: (M, C)}; None for a model without any."""
        if not isinstance(model, SigmaEnsemble):
            return None
        return {name: gates.detach().clone() for name, gates in model.regularized_gates().items()}

    def observe(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
        """Compare the gates {layer name: (M, C)} before and after an epoch.

        Returns:
            Shares of the gates that are `closed`, lie `between` the threshold and 1 − threshold, and have `crossed`
            the threshold; and the share of the channels that `moved`: another member now has the largest gate.
        """
        old, new = (torch.cat(list(gates.values()), dim=1) for gates in (before, after))
        closed = new <= self.threshold
        # Where all are closed nobody owns the channel, and the first of equal gates says nothing.
        moved = (old.argmax(0) != new.argmax(0)) & (new.amax(0) > self.threshold)
        shares = {
            "closed": closed,
            "between": ~closed & (new < 1 - self.threshold),
            "crossed": closed != (old <= self.threshold),
            "moved": moved,
        }
        return {name: share.double().mean().item() for name, share in shares.items()}

    def settled(self, history: Sequence[Mapping[str, float]]) -> bool:
        """Tell whether after these epochs gates have settled that are closed and not yet left out.

        Args:
            history: For each epoch what `observe` returned, and `slim`, the share of the gates that were left out.
        """
        last = history[-self.patience :]
        unchanged = len(last) == self.patience and not any(row["crossed"] for row in last)
        return unchanged and last[-1]["closed"] > last[-1]["slim"]


@torch.no_grad()
def close(ens: SigmaEnsemble, threshold: float) -> float:
    """Close for good, in place, the regularised gates that are at most `threshold`, and return their share.

    Their scale logits become −10,000, where a gate is exactly 0 and so is its gradient; −∞ would become NaN under
    weight decay and in averages of weights. Gates of channels with a shift β ≠ 0 stay.

    Raises:
        ValueError: if `threshold` is not in [0, 1).
    """
    _check_threshold(threshold)
    closed = total = 0
    for name in ens.regularized:
        layer = ens.backbone.get_submodule(name)
        shut = layer.gates <= threshold
        if layer.bias is not None:
            shut &= layer.bias == 0
        layer.gamma.masked_fill_(shut, -1e4)
        closed, total = closed + shut.sum().item(), total + shut.numel()
    return closed / total


# Running -------------------------------------------------------------------------------------------------------------


class _Turn(threading.local):
    """Whose turn it is in this thread, and of that turn.

    Attributes:
        once: What layers that run once have returned.
        guarded: Whether members get copies.
        layers: The σNorm layers and member heads of the backbone that runs.
        folded: Norms whose work the layer before has done, so that they have nothing more to normalise.
    """

    member: int | None = None
    once: dict[nn.Module, Tensor] | None = None
    guarded = False
    layers: Collection[nn.Module] = ()

    def __init__(self) -> None:
        self.folded: set[nn.Module] = set()


_TURN = _Turn()


def _one_by_one(
    backbone: nn.Module, members: int, args: Any, kwargs: Any, layers: Collection[nn.Module], guarded: bool
) -> Tensor:
    """Return the logits (B, M, K) of members that run one after the other."""
    logits = list(_turns(backbone, members, args, kwargs, layers, guarded))
    return logits[0] if members == 1 else torch.cat(logits, dim=1)


def _turns(
    backbone: nn.Module,
    members: int,
    args: Any,
    kwargs: Any,
    layers: Collection[nn.Module],
    guarded: bool,
    apart: bool = False,
) -> Iterator[Tensor]:
    """Run the members one after the other, and yield the logits (B, 1, K) of each.

    Args:
        guarded: Give each member its own copy of the inputs and of what layers that run once return, since the
            backbone may write into them.
        apart: Share no graph between members, so that each may be propagated back before the next one runs.
    """
    once: dict[nn.Module, Tensor] = {}
    layers = tuple(layers)
    for m in range(members):
        given = tree_map(_copied, (args, kwargs)) if guarded else (args, kwargs)
        if apart and torch.is_grad_enabled():
            once = {}
        _TURN.member, _TURN.once, _TURN.guarded, _TURN.layers = m, once, guarded, layers
        _TURN.folded.clear()
        try:
            logits = plain(backbone, *by_keywords(*given)).unsqueeze(1)
            if _TURN.folded:
                missed = [name for name, module in backbone.named_modules() if module in _TURN.folded]
                raise RuntimeError(
                    f"layers {missed} did not get what the layers before them return: the backbone goes another way "
                    "than on the example inputs; slim the ensemble again, on inputs of this kind"
                )
        finally:
            _TURN.member = _TURN.once = None
            _TURN.folded.clear()
        yield logits


def _first(layer: nn.Module, make: Callable[[], Any]) -> Any:
    """Return what was made for a layer when the first member called it."""
    if layer not in _TURN.once:
        _TURN.once[layer] = make()
    return _TURN.once[layer]


def _once(layer: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a layer returned to the first member."""
    y = _first(layer, lambda: run(x))
    return y.clone() if _TURN.guarded else y


def _member() -> int:
    if _TURN.member is None:
        raise RuntimeError(
            "the backbone of a SlimEnsemble runs for one member at a time: call the ensemble itself, without "
            "gradient checkpointing"
        )
    return _TURN.member


def _pick(x: Tensor, channels: Tensor | None, axis: int = 0) -> Tensor:
    """Take some channels, or all for None, in the memory format of `x`."""
    if channels is None:
        return x
    if axis == 1 and _channels_last(x):
        return x.movedim(1, -1).index_select(-1, channels).movedim(-1, 1)
    return x.index_select(axis, channels)


def _pick_each(x: Tensor, channels: list[Tensor | None]) -> Sequence[Tensor]:
    """`_pick` for every member in one go, so that the backward pass writes one gradient of `x` instead of M."""
    if all(picked is None for picked in channels):
        return [x] * len(channels)
    every = torch.arange(len(x), device=x.device)
    channels = [every if picked is None else picked for picked in channels]
    return _pick(x, torch.cat(channels)).split([len(picked) for picked in channels])


def _spread(x: Tensor, channels: Tensor | None, axis: int, features: int) -> Tensor:
    """Put channels in their places among zeros: the opposite of `_pick`."""
    if channels is None:
        return x
    if axis == 1 and _channels_last(x):
        return _spread(x.movedim(1, -1), channels, x.dim() - 1, features).movedim(-1, 1)
    shape = list(x.shape)
    shape[axis] = features
    return x.new_zeros(shape).index_copy_(axis, channels, x)


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


class _Readied:
    """A layer that, where no gradients are wanted, keeps each member's ordinary layer ready.

    It is made again when a tensor of the layer, of an activation inside it or of a norm folded into it was replaced or
    written to, or the mode changed. What is written through `.data` goes unnoticed by torch and so here; so does
    another `eps`.
    """

    def train(self, mode: bool = True) -> nn.Module:
        if any(module.training != mode for module in self.modules()):
            vars(self).pop("_ready", None)
        return super().train(mode)

    def folding(self) -> _SlimNorm | None:
        """The norm after this layer that its ready layers do the work of, or None."""
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_ready"}

    def ready(self, m: int) -> nn.Module | None:
        """The ordinary layer of a member, or None where the shared tensors themselves must be used."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        folded = self.folding()
        modules = itertools.chain(self.modules(), folded.modules() if folded else ())
        own = itertools.chain.from_iterable((*m._parameters.values(), *m._buffers.values()) for m in modules)
        sources = [t for t in own if t is not None]
        try:
            found = [(id(t), t._version, t.data_ptr()) for t in sources]
        except RuntimeError:  # made in inference mode, which counts no versions
            return None
        cache = vars(self).setdefault("_ready", {})
        layer, before, _ = cache.get(m, (None, None, None))
        if found != before:
            layer = self.member(m)
            if folded:
                folded.fold_into(layer, m)
            cache[m] = layer, found, (sources, [t.detach() for t in sources])  # which keeps ids and memory taken
        if folded:
            _TURN.folded.add(folded)
        return layer


class _SlimNorm(_Readied, SigmaNorm):
    """A σNorm that runs for one member at a time, without the channels that it has closed.

    What a SigmaNorm becomes; set by `close` and `follow`:

    Attributes:
        open: Mask of the channels that are not closed, (M, C), or absent where nothing is left out.
        picks, spreads: Whether all channels arrive, or are to leave.
    """

    picks = spreads = False

    def close(self, threshold: float) -> None:
        closed = self.gates.detach() <= threshold
        if self.bias is not None:
            closed &= self.bias == 0
        self.register_buffer("open", ~closed)

    def opened(self) -> Tensor:
        """The mask (M, C)."""
        return self._buffers["open"] if "open" in self._buffers else torch.ones_like(self.gamma, dtype=torch.bool)

    def channels(self, m: int) -> Tensor | None:
        """The channels that run for a member, or None for all."""
        return self._buffers.get(f"channels{m}")

    def follow(self, place: Place) -> None:
        """Take over what the mask says."""
        self.picks = place.producer is None
        self.spreads = not place.consumers
        for m, mask in enumerate(self.opened()):
            channels = mask.nonzero().flatten()
            if not len(channels):  # a layer of no channels would be no ordinary layer
                channels = torch.zeros(1, dtype=torch.long, device=mask.device)
            self.register_buffer(f"channels{m}", None if mask.all() else channels, persistent=False)

    @property
    def gates(self) -> Tensor:
        gates = torch.sigmoid(self.gamma)
        return gates.where(self._buffers["open"], 0) if "open" in self._buffers else gates

    @property
    def axis(self) -> int:
        return axis_of(self)

    def forward(self, x: Tensor) -> Tensor:
        m = _member()
        channels = self.channels(m)
        if self in _TURN.folded:
            _TURN.folded.remove(self)
            return _spread(x, channels, 1, self.gamma.shape[1]) if self.spreads else x
        if ready := self.ready(m):
            return ready.forward(x)
        if not self.normalizes_batch:
            y = self._slice(x, m, _first(self, lambda: self.weight.unbind())[m].view(self.shape))
            return y if self.spreads else _pick(y, channels, self.axis)
        if self.training and x.numel() == x.shape[1]:
            raise ValueError(
                f"BatchNorm cannot train on one value per channel and member (input {tuple(x.shape)}, "
                f"{self.members} members): use batches of at least 2"
            )
        y = self._batch_norm(_pick(x, channels if self.picks else None, 1), m, channels)
        return _spread(y, channels, 1, self.gamma.shape[1]) if self.spreads else y

    def _weights(self) -> Sequence[Tensor]:
        """The scales of the channels that run, for each member."""
        every = torch.arange(self.gamma.numel(), device=self.gamma.device).view(self.gamma.shape)
        return _pick_each(self.weight.flatten(), [_pick(row, self.channels(m)) for m, row in enumerate(every)])

    def _batch_norm(self, x: Tensor, m: int, channels: Tensor | None) -> Tensor:
        owned = {"weight": _first(self, self._weights)[m]}
        owned["bias"] = None if self.bias is None else _pick(self.bias, channels)
        statistics = {} if self.running_mean is None else {n: getattr(self, n)[m] for n in _STATISTICS}
        # Copies: the backward pass keeps them, and must not find that another member has written into their storage.
        picked = {name: _pick(tensor, channels) for name, tensor in statistics.items()}
        if self.training and channels is None:
            picked = {name: tensor.clone() for name, tensor in statistics.items()}
        if self.num_batches_tracked is not None:
            owned["num_batches_tracked"] = self.num_batches_tracked[m]
        stand_in = object.__new__(type(self.template))
        vars(stand_in).update(vars(self.template) | owned | picked, training=self.training)
        y = stand_in(x)
        if self.training:
            for name, tensor in statistics.items():
                if channels is None:
                    tensor.copy_(picked[name])
                else:
                    tensor.index_copy_(0, channels, picked[name])
        return y

    def member(self, m: int) -> nn.Module:
        norm = super().member(m)
        channels = self.channels(m)
        if channels is None:
            return norm
        features = self.gamma.shape[1]
        if not self.normalizes_batch:
            return norm if self.spreads else nn.Sequential(norm, Pick(channels, self.axis, features))
        for registry, kind in ((norm._parameters, nn.Parameter), (norm._buffers, lambda t: t)):
            for name in ("weight", "bias", *_STATISTICS):
                if registry.get(name) is not None:
                    registry[name] = kind(_pick(registry[name].detach(), channels))
        norm.num_features = len(channels)
        before = [Pick(channels, 1, features)] if self.picks else []
        after = [Spread(channels, 1, features)] if self.spreads else []
        return nn.Sequential(*before, norm, *after).train(self.training) if before or after else norm

    @property
    def foldable(self) -> bool:
        """Whether it is a plain BatchNorm with statistics of its own, which only scales and shifts in evaluation."""
        return type(self.template) in _PLAIN and self.running_mean is not None

    @torch.no_grad()
    def fold_into(self, layer: nn.Module, m: int) -> None:
        """Have a member's convolution, which only this norm reads, scale and shift as the norm does in evaluation."""
        channels = self.channels(m)
        weight, bias, mean, var = (
            None if t is None else _pick(t, channels).double()
            for t in (self.weight[m], self.bias, self.running_mean[m], self.running_var[m])
        )
        scale = weight / (var + self.template.eps).sqrt()
        shift = -mean if layer.bias is None else layer.bias.double() - mean
        shift = shift * scale if bias is None else shift * scale + bias
        weight = layer.weight.double() * scale.view(-1, *[1] * (layer.weight.dim() - 1))
        dtype = layer.weight.dtype
        layer.weight, layer.bias = nn.Parameter(weight.to(dtype)), nn.Parameter(shift.to(dtype))


_STATISTICS = ("running_mean", "running_var")
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _SlimHead(MemberHead):
    """A member head that runs for one member at a time: what a MemberHead becomes."""

    def forward(self, x: Tensor) -> Tensor:
        m = _member()
        y = self.norm(x.flatten(0, -2))
        return F.linear(y, self.weight[m], None if self.bias is None else self.bias[m]).unflatten(0, x.shape[:-1])


class _Narrow(_Readied):
    """A layer that takes a member's rows and columns of its weight: what a convolution or linear layer becomes.

    Attributes:
        shared: Whether it runs once for all members.
        norm: Of a convolution the norm that alone reads it, in a tuple so that it is no part of this layer; or nothing.
    """

    shared = False
    norm: tuple[_SlimNorm, ...] = ()

    def folding(self) -> _SlimNorm | None:
        for norm in self.norm:
            there = norm in _TURN.layers and norm.foldable and not norm.training
            whole = self.weight.dtype in (torch.float32, torch.float64) and not _autocast(self.weight)
            if there and whole and not (_hooked(self) or _hooked(norm)):
                return norm
        return None

    def follow(self, side: str, norm: _SlimNorm) -> None:
        """Have the rows or columns that a norm has channels."""
        self.members = norm.members
        for m in range(norm.members):
            self.register_buffer(f"{side}{m}", norm.channels(m), persistent=False)

    def narrowed(self, m: int) -> tuple[Tensor, Tensor | None]:
        """The weight and shift of a member."""
        rows, columns = (self._buffers.get(f"{side}{m}") for side in ("rows", "columns"))
        return _pick(_pick(self.weight, rows), columns, 1), None if self.bias is None else _pick(self.bias, rows)

    def each(self) -> Sequence[tuple[Tensor, Tensor | None]]:
        """`narrowed` of every member."""
        rows, columns = ([self._buffers.get(f"{side}{m}") for m in range(self.members)] for side in ("rows", "columns"))
        biases = [None] * self.members if self.bias is None else _pick_each(self.bias, rows)
        weights = map(functools.partial(_pick, axis=1), _pick_each(self.weight, rows), columns)
        return list(zip(weights, biases, strict=True))

    def forward(self, input: Tensor) -> Tensor:  # by the name that torch gives it
        m = _member()
        if not self.shared:
            ready = self.ready(m)
            # Not the call of it, which would run hooks a second time.
            return ready.forward(input) if ready else self.apply_to(input, *_first(self, self.each)[m])
        return _once(self, input, lambda x: self.apply_to(x, self.weight, self.bias))

    def member(self, m: int) -> nn.Module:
        """Return an ordinary layer."""
        weight, bias = self.narrowed(m)
        layer = copy.copy(self)
        layer.__class__ = next(kind for kind, narrow in _NARROW.items() if narrow is type(self))
        layer._buffers, layer._non_persistent_buffers_set = {}, set()
        tensors = {"weight": weight, "bias": bias}
        layer._parameters = {n: None if t is None else nn.Parameter(t.detach().clone()) for n, t in tensors.items()}
        if _channels_last(self.weight):
            layer.to(memory_format=torch.channels_last)
        sizes = ("out_features", "in_features") if isinstance(layer, nn.Linear) else ("out_channels", "in_channels")
        vars(layer).update(zip(sizes, weight.shape, strict=False))
        for name in ("shared", "norm"):
            vars(layer).pop(name, None)
        return layer


class _NarrowConv1d(_Narrow, nn.Conv1d):
    def apply_to(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._conv_forward(x, weight, bias)


class _NarrowConv2d(_Narrow, nn.Conv2d):
    apply_to = _NarrowConv1d.apply_to


class _NarrowConv3d(_Narrow, nn.Conv3d):
    apply_to = _NarrowConv1d.apply_to


class _NarrowLinear(_Narrow, nn.Linear):
    def apply_to(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


_NARROW = dict(zip(LAYERS, (_NarrowConv1d, _NarrowConv2d, _NarrowConv3d, _NarrowLinear), strict=True))


class Pick(nn.Module):
    """Take some of the channels along an axis."""

    def __init__(self, channels: Tensor, axis: int, features: int):
        super().__init__()
        self.register_buffer("channels", channels.clone())
        self.axis, self.features = axis, features

    def forward(self, x: Tensor) -> Tensor:
        return _pick(x, self.channels, self.axis)

    def extra_repr(self) -> str:
        return f"{len(self.channels)} of {self.features}"


class Spread(Pick):
    """Put channels in their places among zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return _spread(x, self.channels, self.axis, self.features)


def _follow_masks(ens: SlimEnsemble, incompatible: object = None) -> None:
    """Have every layer run the channels that the masks say; after loading, those of the file."""
    for name, place in ens._places.items():
        norm = ens.backbone.get_submodule(name)
        if "open" not in norm._buffers:
            continue
        norm.follow(place)
        for side, layers in (("rows", [place.producer] if place.producer else []), ("columns", place.consumers)):
            for layer in layers:
                ens.backbone.get_submodule(layer).follow(side, norm)


def _autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _hooked(module: nn.Module) -> bool:
    """Whether somebody is known to look at what a module gets or returns."""
    everywhere = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    return "forward" in vars(module) or any((*everywhere, module._forward_hooks, module._forward_pre_hooks))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


# Export ---------------------------------------------------------------------------------------------------------------


class _ByTurn(nn.Module):
    """The ordinary layers of the members in the place of one for all, or a single one that runs once."""

    def __init__(self, layer: SigmaNorm | MemberHead | _Narrow, members: int):
        super().__init__()
        self.shared = getattr(layer, "shared", False)
        self.layers = nn.ModuleList(layer.member(m) for m in range(1 if self.shared else members))

    def forward(self, x: Tensor) -> Tensor:
        return _once(self, x, self.layers[0]) if self.shared else self.layers[_member()](x)


class _WithUncertainty(nn.Module):
    def __init__(self, ens: SigmaEnsemble):
        super().__init__()
        backbone = copy.deepcopy(ens.backbone).eval()
        made: dict[int, nn.Module] = {}
        for name, module in dict(backbone.named_modules(remove_duplicate=False)).items():
            if isinstance(module, (*OWN, _Narrow)) and name != f"{ens.head}.norm":
                made.setdefault(id(module), _ByTurn(module, ens.members))
                backbone = replace(backbone, name, made[id(module)])
        self.backbone, self.members = backbone, ens.members
        self.guarded = getattr(ens, "_guarded", True)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = _one_by_one(self.backbone, self.members, args, kwargs, (), self.guarded)
        if logits.dim() != 3 or logits.shape[2] == 1:
            shape = (len(logits), *logits.shape[2:])
            raise ValueError(f"with_uncertainty needs logits of several classes (B, K), not outputs of shape {shape}")
        log = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        probs = log.exp()
        mean = probs.mean(1)
        # Not the logarithm of the mean, which underflows.
        log_mean = log.logsumexp(1) - torch.log(torch.tensor(float(log.shape[1]), dtype=log.dtype, device=log.device))

        def expected(probs: Tensor, values: Tensor) -> Tensor:
            return torch.where(probs == 0, 0, probs * values).sum(-1)  # NaN stays NaN

        total = -expected(mean, log_mean)
        aleatoric = -expected(probs, log).mean(1)
        modulation = expected(probs, log - log_mean.unsqueeze(1)).mean(1).clamp(min=0)
        return mean, total, aleatoric, modulation


def with_uncertainty(ens: SigmaEnsemble) -> nn.Module:
    """Return a module for `torch.export` and ONNX: from inputs as of `ens` to probabilities and their uncertainty.

    Its outputs are the mean probabilities (B, K), and the total, aleatoric and modulation uncertainty, (B,) each, in
    nats, as of `decompose`, in the ensemble's precision. It holds copies of the members' ordinary layers, in evaluation
    mode, and runs one member after the other, so that the batch may be of any size in what is exported.

    Raises:
        TypeError: if `ens` is no ensemble.
        ValueError: if its link is not "softmax", or, when the module runs, outputs are dense or of a single class.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        >>> mean, total, aleatoric, modulation = with_uncertainty(SigmaEnsemble(net, members=4))(torch.randn(5, 8))
        >>> mean.shape, total.shape
        (torch.Size([5, 3]), torch.Size([5]))
        >>> torch.allclose(total, aleatoric + modulation, atol=1e-6)
        True
    """
    if not isinstance(ens, SigmaEnsemble):
        raise TypeError(f"ens must be a SigmaEnsemble or SlimEnsemble, not {type(ens).__name__}")
    if ens.link != "softmax":
        raise ValueError(f'with_uncertainty needs an ensemble with link="softmax", not {ens.link!r}')
    return _WithUncertainty(ens)
