"""SigmaEnsemble: any backbone with normalisation layers becomes an ensemble that shares all its other weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .checkpoint import load, save
from .folding import Proof, batch_of, by_keywords, copied, fold, mapped, plain, prove, structure
from .layers import MemberHead, Pass, Running, SigmaNorm, UnprovedRows, check_members, looks_like_norm, unsupported

if TYPE_CHECKING:
    from .slim import SlimEnsemble

__all__ = ["SigmaEnsemble", "load", "parameter_groups", "save"]

_RANK_ONE = (".r_group", ".s_group")  # BatchEnsemble's vectors r and s, by TorchUncertainty's names
_LINKS = ("softmax", "sigmoid")
_MOST_PROOFS = 64  # of an option that is new in every call there would be no end


class SigmaEnsemble(nn.Module):
    """Hide an ensemble in one network: members share every weight and own only their normalisation layers.

    Every norm of the backbone becomes a `SigmaNorm`, and the layer named by `head` becomes M heads. The cost is M
    forward passes; only parameters are saved.

    One after the other, members are right for any backbone: each pass is the plain backbone on the caller's own
    arguments, with one member's gates and statistics. Folded into one batch, member slowest, they are often faster. By
    default the first call with arguments of a new structure runs the members both ways and compares; where both agree,
    later passes are folded, and where they do not, members run one by one. `repr` says which, and why.

    Args:
        backbone: Any network with norm layers that `SigmaNorm` takes. It is copied, not changed.
        members: Number of members M ≥ 1.
        head: Dotted name of the linear layer that becomes M member heads (a norm, then a fresh linear layer).
            None keeps the output layer, shared by all members.
        regularize: `fnmatch` pattern or patterns over the names of the σNorm layers; the layers matched are the R
            of the diversity loss, for example `"*.bn2"`. The others are σNorm too.
        skip: Pattern or patterns over the names of norm layers that stay as they are, shared by all members.
        std: Standard deviation of the initial scale logits γ.
        pretrained: Convert a trained backbone; see `from_pretrained`.
        link: How logits become probabilities: "softmax" over the classes, or "sigmoid" for each logit by itself, as
            for a single logit or several labels.
        at_once: How many members run in one pass: None for what the proof allows, 1 for one by one, an integer or
            "all" for that many folded, with an error where the proof fails. It may be set later, changes nothing but
            time and memory, and is not saved. See `chunks` for training.

    Shape: inputs with B rows to logits (B, M, K), or (B, M, K, …) of a backbone with outputs (B, K, …).

    Raises:
        ValueError: if the backbone has no norm layer, `head`, `regularize` or `skip` matches nothing, or `members`,
            `link` or `at_once` is none of those allowed.
        TypeError: if the backbone has a norm that cannot be gated, or cannot be copied; what is in the way is named.

    Source: paper, section 3.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        >>> ens = SigmaEnsemble(net, members=4, head="3")
        >>> ens(torch.randn(5, 8)).shape
        torch.Size([5, 4, 3])
        >>> list(ens.gates())
        ['1', '3.norm']
    """

    _at_once: int | str | None = None

    def __init__(
        self,
        backbone: nn.Module,
        members: int = 4,
        *,
        head: str | None = None,
        regularize: str | Iterable[str] = "*",
        skip: str | Iterable[str] = (),
        std: float = 1.0,
        pretrained: bool = False,
        link: str = "softmax",
        at_once: int | str | None = None,
    ):
        super().__init__()
        check_members(members)
        if link not in _LINKS:
            raise ValueError(f"link must be one of {_LINKS}, not {link!r}")
        if not isinstance(backbone, nn.Module):
            raise TypeError(f"backbone must be a torch module, not {type(backbone).__name__}")
        if any(isinstance(module, (SigmaNorm, MemberHead)) for module in backbone.modules()):
            raise TypeError("the backbone already has σNorm layers")
        self.members, self.head, self.link, self.at_once = members, head, link, at_once
        if head is not None:
            linears = [name for name, module in backbone.named_modules() if type(module) is nn.Linear]
            if head not in linears:
                raise ValueError(f"head {head!r} is no linear layer of the backbone; the last are {linears[-3:]}")
        norms = {n: m for n, m in backbone.named_modules(remove_duplicate=False) if looks_like_norm(m)}
        skipped = matching(norms, skip, "skip", "norm layers") if skip else ()
        names = [name for name in norms if name not in skipped]
        for name in names:
            if problem := unsupported(norms[name]):
                kind = f"{type(norms[name]).__module__}.{type(norms[name]).__name__}"
                raise TypeError(f"layer {name!r}, a {kind}, {problem}; skip={name!r} leaves it as it is")
        backbone = copied(backbone)
        _check_forwards(backbone)
        gated: dict[nn.Module, SigmaNorm] = {}
        first = next((p for p in backbone.parameters() if p.is_floating_point()), None)
        for name in names:
            module = backbone.get_submodule(name)
            if isinstance(module, SigmaNorm):  # by another name of the layer above it
                continue
            if module not in gated:
                gated[module] = SigmaNorm(module, members, std=std, pretrained=pretrained, like=first)
            backbone = replace(backbone, name, gated[module])
        if not gated:
            raise ValueError(f"{type(backbone).__name__} has no normalisation layers, so there is nothing to gate")
        if head is not None:
            batch_norm = any(layer.normalizes_batch for layer in gated.values())
            linear = backbone.get_submodule(head)
            backbone = replace(backbone, head, MemberHead(linear, members, batch_norm=batch_norm, std=std))
        self.backbone = backbone
        self.regularized = matching(self._layers(), regularize)
        running = Running()
        for name, layer in self._layers().items():
            layer.label, layer.running = name, running
        self._proofs: dict[Any, Proof] = {}
        self.training = backbone.training

    @classmethod
    def from_pretrained(cls, backbone: nn.Module, members: int = 4, **options: Any) -> SigmaEnsemble:
        """Convert a trained backbone so that every member starts as its exact function, up to the head.

        Arguments as for the class; `std` then concerns the fresh heads alone. With `head=None` the whole output is
        kept, but the members are equal and stay so: the regulariser has no gradient between equal gates, and only
        fresh heads break the tie.

        Source: paper, section on conversion; exact here for scales of any sign, zero and above 1 too.
        """
        return cls(backbone, members, pretrained=True, **options)

    @property
    def at_once(self) -> int | str | None:
        """How many members run in one pass: None for what the proof allows, an integer, or "all"."""
        return self._at_once

    @at_once.setter
    def at_once(self, at_once: int | str | None) -> None:
        whole = isinstance(at_once, int) and not isinstance(at_once, bool) and at_once >= 1
        if not (at_once is None or at_once == "all" or whole):
            raise ValueError(f'at_once must be an integer ≥ 1, "all", or None for what is proved, not {at_once!r}')
        self._at_once = at_once

    def _layers(self) -> dict[str, SigmaNorm]:
        return {name: layer for name, layer in self.backbone.named_modules() if isinstance(layer, SigmaNorm)}

    @property
    def _running(self) -> Running:
        return next(iter(self._layers().values())).running

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the members' logits, shape (B, M, K).

        Arguments are the backbone's own; a mapping given as the only one, such as a tokenizer's batch, is passed by
        keywords. Every pass gets copies of the tensors, since the backbone may write into them. Folded, those with as
        many rows as the first are repeated. Of a backbone that returns more than a tensor, `.logits` is taken, or else
        its first tensor that is no single number.
        """
        logits = list(self.chunks(*args, **kwargs))
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)

    def chunks(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """Run the members `at_once` at a time: yield the logits (B, m, K) of m of them, then those of the next.

        Arguments as for `forward`. A training step that propagates each chunk back before the next one runs needs the
        memory of one chunk, and ends with the gradients and statistics of a step on all members, but for rounding
        and, with dropout, for what is drawn. Any other state that a backbone keeps, such as that of a spectral norm,
        is updated by every chunk.

        Examples:
            >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
            >>> ens = SigmaEnsemble(net, members=64, head="3", at_once=4)
            >>> for logits in ens.chunks(torch.randn(5, 8)):
            ...     loss = nn.functional.cross_entropy(logits.transpose(1, 2), torch.zeros(5, 4).long())
            ...     (loss * logits.shape[1] / ens.members).backward()
            >>> ens.backbone[1].gamma.grad.any(dim=1).sum().item()  # members with a gradient
            64
        """
        args, kwargs = by_keywords(args, kwargs)
        proof = self._proof(args, kwargs)
        size = 1
        if proof is not None and not proof.reason:
            size = min(self.members, self.at_once) if isinstance(self.at_once, int) else self.members
        for first in range(0, self.members, size):
            yield from self._run(first, min(size, self.members - first), args, kwargs, proof)

    def _run(self, first: int, count: int, args: Any, kwargs: Any, proof: Proof | None) -> Iterator[Tensor]:
        """Run `count` members in one pass, or one by one where they bring rows for which folding was not proved."""
        running, rows, given = self._running, None, None
        if count > 1:
            batch = batch_of((args, kwargs))
            rows, given = proof.rows_for(batch), fold(args, kwargs, count)
        else:
            given = mapped((args, kwargs), Tensor.clone) if self.members > 1 else (args, kwargs)
        current = Pass(first, count, rows)
        before = self._statistics() if count > 1 and self.training and self.at_once is None else {}
        try:
            with running.run(current):
                logits = plain(self.backbone, *given)
        except UnprovedRows as error:
            if self.at_once is not None:
                raise ValueError(f"{error}, another number than was proved: at_once=1 runs them one by one") from None
            proof.distrusted.add(_shapes((args, kwargs)))
            with torch.no_grad():
                for tensor, value in before.items():
                    tensor.copy_(value)
            for m in range(first, first + count):
                yield from self._run(m, 1, args, kwargs, None)
            return
        if logits.requires_grad and not torch.compiler.is_compiling():
            # Gradient checkpointing runs layers of this pass again when the gradient comes by here.
            logits.register_hook(functools.partial(_note, running, current))
        yield logits.unsqueeze(1) if count == 1 else logits.unflatten(0, (count, -1)).transpose(0, 1)

    def _statistics(self) -> dict[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return {}
        layers = [layer for layer in self._layers().values() if layer.running_mean is not None]
        buffers = [b for layer in layers for b in (layer.running_mean, layer.running_var, layer.num_batches_tracked)]
        return {buffer: buffer.clone() for buffer in buffers if buffer is not None}

    def _proof(self, args: Any, kwargs: Any) -> Proof | None:
        """Return the proof for arguments of this structure, made on the first call; None to run one by one."""
        if self.members == 1 or self.at_once == 1:
            return None
        batch = batch_of((args, kwargs))
        key = self.backbone.training, structure((args, kwargs), batch)
        proof = self._proofs.get(key)
        compiling, full = torch.compiler.is_compiling(), len(self._proofs) >= _MOST_PROOFS
        if proof is None and not compiling and not full:
            folded = self.at_once if isinstance(self.at_once, int) else 3
            proof = self._proofs[key] = prove(self.backbone, min(self.members, folded), args, kwargs)
        if self.at_once is not None:
            why = "an option is new in every call" if full else "call the ensemble once before it is compiled"
            reason = why if proof is None else proof.reason
            if reason:
                raise ValueError(
                    f"at_once={self.at_once!r}: members cannot be folded: {reason}; at_once=1 or None runs them one by "
                    "one"
                )
        elif proof is not None and proof.distrusted and _shapes((args, kwargs)) in proof.distrusted:
            return None
        return proof

    @torch.no_grad()
    def predict_proba(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean of the members' probabilities, shape (B, K), computed in evaluation mode.

        With `link="softmax"` those of K classes, from outputs (B, K) or dense ones (B, K, H, W); with "sigmoid" one for
        each logit, whatever their shape.

        Raises:
            ValueError: if softmax would be meaningless: for a single logit, or where it cannot be told which dimension
                holds the classes.
        """
        with evaluating(self):
            logits = self(*args, **kwargs)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.link == "sigmoid":
            return logits.sigmoid().mean(1)
        if logits.dim() not in (3, 5, 6) or logits.shape[2] == 1:
            raise ValueError(
                f"outputs of shape {(len(logits), *logits.shape[2:])} are no logits of classes (B, K) or (B, K, H, W): "
                'link="sigmoid" takes every logit by itself, as for a single one'
            )
        return logits.softmax(2).mean(1)

    def gates(self) -> dict[str, Tensor]:
        """Return the gates σ(γ) of every σNorm layer, {layer name: (M, C)}, attached to the graph."""
        return {name: layer.gates for name, layer in self._layers().items()}

    def regularized_gates(self) -> dict[str, Tensor]:
        """Return the gates of the layers matched by `regularize`, {layer name: (M, C)}."""
        return {name: self.backbone.get_submodule(name).gates for name in self.regularized}

    def member(self, m: int) -> nn.Module:
        """Return member `m` as an ordinary copy of the backbone, with ordinary norm layers and the same outputs.

        Raises:
            IndexError: if `m` is not in 0..M−1.
        """
        if isinstance(m, bool) or not 0 <= m < self.members:
            raise IndexError(f"member {m} is not in 0..{self.members - 1}")
        backbone = copy.deepcopy(self.backbone)
        ordinary: dict[int, nn.Module] = {}
        for name, module in dict(backbone.named_modules(remove_duplicate=False)).items():
            if self._has_members(module) and name != f"{self.head}.norm":
                ordinary.setdefault(id(module), module.member(m))
                backbone = replace(backbone, name, ordinary[id(module)])
        return backbone

    @staticmethod
    def _has_members(module: nn.Module) -> bool:
        """Tell whether a layer differs between members, so that `member` puts an ordinary one in its place."""
        return isinstance(module, (SigmaNorm, MemberHead))

    def save(self, path: str | os.PathLike) -> None:
        """Write the weights to a safetensors file; see `save`."""
        save(self, path)

    def load(self, path: str | os.PathLike) -> SigmaEnsemble:
        """Load weights written by `save` from an ensemble built alike, and return `self`; see `load`."""
        return load(self, path)

    def slim(self, *inputs: Any, threshold: float = 0.01, share: bool = False, **named_inputs: Any) -> SlimEnsemble:
        """Leave out, member by member, the channels whose gates are closed; see `sigmaens.slim.slim`."""
        from .slim import slim

        return slim(self, *inputs, threshold=threshold, share=share, **named_inputs)

    def __repr__(self) -> str:
        layers = self._layers()
        total = sum(p.numel() for p in self.parameters())
        own = sum(
            p.numel()
            for m in self.modules()
            if isinstance(m, (SigmaNorm, MemberHead))
            for p in m._parameters.values()
            if p is not None
        )
        lines = [
            f"SigmaEnsemble of {type(self.backbone).__name__}: {self.members} members, {total:,} parameters "
            f"({own:,} of the members' own), head={self.head!r}"
        ]
        width = max(map(len, layers))
        for name, layer in layers.items():
            mark = "R" if name in self.regularized else " "
            lines.append(
                f"  {mark} {name:<{width}}  {type(layer.template).__name__:<12} {layer.gamma.shape[1]:>5} features"
            )
        lines.append(f"  R: regularised, {len(self.regularized)} of {len(layers)} sigma-norm layers")
        passes = [
            f"  passes in {'training' if training else 'evaluation'}: "
            + (f"one by one, since {proof.reason}" if proof.reason else "folded into one batch")
            for (training, _), proof in self._proofs.items()
        ]
        return "\n".join(lines + list(dict.fromkeys(passes)))


def _note(running: Running, current: Pass, gradient: Tensor) -> None:
    running.backward = current


def _shapes(item: Any) -> Any:
    shapes: list[tuple[int, ...]] = []
    mapped(item, lambda tensor: shapes.append(tuple(tensor.shape)))
    return tuple(shapes)


def _check_forwards(backbone: nn.Module) -> None:
    """Raise TypeError if a copied backbone has a layer whose forward would go on running the original's layers."""
    inside = set(backbone.modules())
    for name, module in backbone.named_modules():
        bound = [vars(module).get("forward")]
        while isinstance(bound[-1], functools.partial):
            bound += [value for value in bound[-1].args if isinstance(value, nn.Module)] or [bound[-1].func]
        owner = bound[-1].__self__ if isinstance(bound[-1], MethodType) else bound[-1]
        if owner is not None and owner not in inside and any(looks_like_norm(m) for m in module.modules()):
            raise TypeError(
                f"the forward of layer {name!r} was replaced by a function bound to the original layer: a copy would "
                "go on running that, without gates"
            )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and each of its modules back into its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, gamma_multiplier: float = 100.0
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimiser: scale logits γ learn faster and do not decay.

    The vectors r and s of BatchEnsemble do not decay either. What is put around the optimiser can undo this:
    `OneCycleLR(max_lr=0.05)` gives every group the same rate, so give it one for each group; groups split by
    `ndim >= 2` let γ, (M, C), decay and hand it to Muon. `docs/optimizers.md` has the right lines.

    Args:
        model: Any module; one with neither gets a single group.
        lr: Learning rate of all parameters but γ.
        weight_decay: Weight decay of all other parameters; γ, r and s have none.
        gamma_multiplier: Factor on `lr` for γ. Source: paper, section 5 (×100).

    Examples:
        >>> ens = SigmaEnsemble(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), members=2)
        >>> [group["lr"] for group in parameter_groups(ens, lr=0.1)]
        [0.1, 10.0]
    """
    gammas = {m.gamma: None for m in model.modules() if isinstance(m, SigmaNorm) and m.gamma.requires_grad}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p not in gammas]
    vectors = [p for name, p in named if name.endswith(_RANK_ONE)]
    others = [p for name, p in named if not name.endswith(_RANK_ONE)]
    groups = [
        {"params": others, "lr": lr, "weight_decay": weight_decay},
        {"params": list(gammas), "lr": lr * gamma_multiplier, "weight_decay": 0.0},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def matching(
    names: Iterable[str], patterns: str | Iterable[str], argument: str = "regularize", of: str = "σNorm layers"
) -> tuple[str, ...]:
    """Return the names that match an `fnmatch` pattern, or one of several.

    Raises:
        TypeError: if a pattern is no string.
        ValueError: if a pattern matches nothing; it is named.
    """
    names, patterns = list(names), [patterns] if isinstance(patterns, str) else list(patterns or ())
    if not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"{argument} must be a pattern or a list of patterns, not {patterns}")
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if unmatched or not patterns:
        raise ValueError(f"{argument} {unmatched or patterns} matches none of the {of} {names}")
    return tuple(name for name in names if any(fnmatchcase(name, p) for p in patterns))


def replace(root: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Put a module in the place of the one with a dotted name, and return the root, which is `new` for the name ""."""
    if not name:
        return new
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, new)
    return root
