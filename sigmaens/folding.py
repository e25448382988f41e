"""Passes of several members in one batch: arguments folded, and the proof that folding changes nothing."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .layers import Pass, SigmaNorm

__all__ = ["Proof", "batch_of", "by_keywords", "copied", "fold", "folded", "mapped", "plain", "prove", "structure"]

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def plain(backbone: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Run a backbone as it is and return its logits: its output, `.logits` of it, or its first tensor with dimensions.

    Raises:
        ValueError: if the output has no such tensor.
    """
    # torch's fused transformer layers read the norms' own tensors and so would pass by the gates. torch.compile cannot
    # follow the switch, so it is turned only where it switches something.
    fused = any(isinstance(module, _FUSED) for module in backbone.modules())
    with _no_fast_path() if fused else contextlib.nullcontext():
        output = backbone(*args, **kwargs)
    if isinstance(output, Tensor):
        found = output
    else:
        found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        values = list(output.values()) if isinstance(output, Mapping) else output
        if found is None and isinstance(values, (list, tuple)):
            found = next((t for t in values if isinstance(t, Tensor) and t.dim()), None)
    if not isinstance(found, Tensor) or not found.dim():
        got = "a tensor without dimensions" if isinstance(found, Tensor) else type(output).__name__
        raise ValueError(f"the backbone must return logits with a row for each of its inputs; got {got}")
    return found


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def folded(backbone: nn.Module, members: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Run a backbone on arguments folded for the members, and return the logits, (B, M, K).

    Raises:
        ValueError: if no argument has rows, or the backbone's rows are no multiple of M.
    """
    args, kwargs = by_keywords(args, kwargs)
    logits = plain(backbone, *fold(args, kwargs, members))
    if logits.shape[0] % members:
        raise ValueError(f"the backbone returned {logits.shape[0]} rows, which do not hold {members} members")
    return logits.unflatten(0, (members, -1)).transpose(0, 1)


def by_keywords(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a mapping that is the only argument, such as a tokenizer's batch, by keywords."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        return (), {**args[0], **kwargs}
    return args, dict(kwargs)


def fold(args: tuple[Any, ...], kwargs: dict[str, Any], members: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat for the members, member slowest, every tensor whose first dimension is that of the first tensor found.

    Raises:
        ValueError: if no argument has rows.
    """
    batch = batch_of((args, kwargs))
    if not batch:
        raise ValueError("no tensor with rows in a batch dimension among the arguments")

    def repeated(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == batch:
            return tensor.repeat(members, *[1] * (tensor.dim() - 1))
        return tensor.clone()

    return mapped((args, kwargs), repeated)


def mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change every tensor in nested tuples, lists and mappings; anything else is passed on as it is."""
    if isinstance(item, Tensor):
        return change(item)
    if isinstance(item, Mapping):
        changed = {key: mapped(value, change) for key, value in item.items()}
        if type(item) is dict:
            return changed
        same = copy.copy(item)
        for key, value in changed.items():
            same[key] = value
        return same
    if isinstance(item, (list, tuple)):
        changed = [mapped(value, change) for value in item]
        return type(item)(*changed) if hasattr(item, "_fields") else type(item)(changed)
    return item


def batch_of(item: Any) -> int | None:
    """Return the first dimension of the first tensor that has one, or None."""
    if isinstance(item, Tensor):
        return item.shape[0] if item.dim() else None
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, (list, tuple)):
        return next((size for size in map(batch_of, item) if size is not None), None)
    return None


def structure(item: Any, batch: int | None) -> Any:
    """Describe arguments by all that folding may depend on: their nesting, which tensors have B rows, and options."""
    if isinstance(item, Tensor):
        return "tensor", item.dim(), item.dim() > 0 and item.shape[0] == batch
    if isinstance(item, Mapping):
        return type(item).__name__, tuple((str(key), structure(value, batch)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item).__name__, tuple(structure(value, batch) for value in item)
    if item is None or isinstance(item, (bool, int, float, str)):
        return type(item).__name__, item
    return type(item).__name__


@dataclass
class Proof:
    """What was found when members ran both ways on arguments of one structure.

    Attributes:
        reason: Why members cannot be folded, or "".
        batch: Rows B of the arguments.
        rows: For each σNorm layer the numbers of rows that a member had there.
        distrusted: Shapes of arguments with which a later pass brought other numbers.
    """

    reason: str
    batch: int
    rows: dict[str, frozenset[int]]
    distrusted: set[Any] = field(default_factory=set)

    def rows_for(self, batch: int) -> dict[str, frozenset[int]]:
        """Return the numbers of rows that follow for another batch: as many for each row of it."""
        if batch == self.batch:
            return self.rows
        return {
            name: frozenset(n * batch // self.batch for n in numbers if n * batch % self.batch == 0)
            for name, numbers in self.rows.items()
        }


@torch.no_grad()
def prove(backbone: nn.Module, members: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proof:
    """Run the first members one by one, then folded, and compare what each σNorm layer gets and what is returned.

    Gates are made up for it, different for every member, and parameters that are all zero, as those of fresh heads, are
    drawn at random, so that nothing hides that rows are mixed up. Dropout is off. Rows are compared by two weighted
    sums each. All runs on copies that share the parameters, so the backbone and the random generators stay as they
    are; hooks run, as in every pass.

    Args:
        backbone: With σNorm layers, in the mode that the proof is for.
        members: How many members to fold, ≥ 2.
        args, kwargs: The caller's arguments.

    Raises:
        Whatever the backbone raises for one member.
    """
    batch = batch_of((args, kwargs))
    if not batch:
        return Proof("no argument is a tensor with rows", 0, {})
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    devices = sorted({parameter.device.index for parameter in backbone.parameters() if parameter.is_cuda})
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            drawn = {
                id(parameter): nn.Parameter(torch.empty_like(parameter).normal_(std=0.1), requires_grad=False)
                if parameter.is_floating_point() and parameter.numel() and not parameter.any()
                else parameter
                for parameter in backbone.parameters()
            }
            singles = [_observed(backbone, drawn, Pass(m, 1, probing=True), args, kwargs) for m in range(members)]
            rows = {name: frozenset(len(digest) for digest in calls) for name, calls in singles[0][0].items()}
            try:
                together = _observed(backbone, drawn, Pass(0, members, probing=True), args, kwargs)
            except Exception as error:  # whatever a backbone makes of rows that it does not expect
                first_line = (str(error).strip() or "no message").splitlines()[0]
                return Proof(f"the folded batch raises {type(error).__name__}: {first_line}", batch, rows)
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
    return Proof(_difference(singles, together), batch, rows)


Observed = tuple[dict[str, list[Tensor]], Tensor]


def _observed(
    backbone: nn.Module, parameters: dict[int, nn.Parameter], current: Pass, args: Any, kwargs: dict[str, Any]
) -> Observed:
    """Run a pass on a copy of the backbone: the digests of what each σNorm layer gets, by name, and the logits."""
    twin = copied(backbone, dict(parameters))
    for module in twin.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
    digests: dict[str, list[Tensor]] = {}
    running = next(module.running for module in twin.modules() if isinstance(module, SigmaNorm))
    given = fold(args, kwargs, current.count) if current.count > 1 else mapped((args, kwargs), Tensor.clone)
    with running.run(current._replace(seen=lambda name, x: digests.setdefault(name, []).append(_digest(x)))):
        logits = plain(twin, *given)
    if not digests:
        raise RuntimeError("no σNorm layer runs in a pass of the backbone: the members would be equal")
    return digests, logits


def copied(backbone: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy a backbone; results that it keeps, such as activations, are copied without their graph.

    Args:
        memo: What stands for tensors of the backbone in the copy, by their ids, as of `copy.deepcopy`.

    Raises:
        TypeError: if an attribute cannot be copied; it is named.
    """
    memo = {} if memo is None else memo

    def keep(item: Any) -> None:
        if isinstance(item, Tensor):
            if not item.is_leaf:
                memo[id(item)] = item.detach().clone()
        elif isinstance(item, (list, tuple, dict)):
            for value in item.values() if isinstance(item, dict) else item:
                keep(value)

    for module in backbone.modules():
        keep({name: value for name, value in vars(module).items() if name not in ("_modules", "_parameters")})
    try:
        return copy.deepcopy(backbone, memo)
    except Exception as error:  # whatever an attribute makes of being copied
        raise TypeError(f"{_culprit(backbone)} cannot be copied: {type(error).__name__}: {error}") from error


def _culprit(backbone: nn.Module) -> str:
    for name, module in backbone.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_"):
                try:
                    copy.deepcopy(value)
                except Exception:  # as above
                    return f"attribute {attribute!r} of " + (f"layer {name!r}" if name else "the backbone")
    return "the backbone"


def _digest(x: Tensor) -> Tensor:
    """Two weighted sums of every row, (rows, 2)."""
    flat = x.reshape(len(x), -1) if x.numel() else x.new_zeros(len(x), 1)
    places = torch.arange(1, flat.shape[1] + 1, device=x.device, dtype=torch.float32)
    weights = torch.stack([(places * 0.618034).frac() - 0.5, (places * 0.414214).frac()], dim=1)
    exact = torch.promote_types(x.dtype, torch.float32)
    return (flat.to(exact) @ weights.to(exact) / flat.shape[1] ** 0.5).to(x.dtype)


def _difference(singles: list[Observed], together: Observed) -> str:
    """Tell where the folded pass differs from those of single members, or ""."""
    members, (seen, logits) = len(singles), together
    names = list(singles[0][0])
    if list(seen) != names or any(list(single) != names for single, _ in singles):
        return "the folded batch runs other layers"
    for name in names:
        if len({len(single[name]) for single, _ in (*singles, together)}) > 1:
            return f"the folded batch runs layer {name!r} another number of times"
        for call, digest in zip(zip(*(single[name] for single, _ in singles), strict=True), seen[name], strict=True):
            if len(digest) != members * len(call[0]):
                return f"layer {name!r} gets {len(digest)} rows for {members} members, and {len(call[0])} for one"
            if not _close(torch.cat(call), digest):
                return f"layer {name!r} gets other values in the folded batch"
    each = [output for _, output in singles]
    if logits.shape != (members * len(each[0]), *each[0].shape[1:]):
        return f"the output has shape {tuple(logits.shape)} for {members} members, and {tuple(each[0].shape)} for one"
    return "" if _close(torch.cat(each), logits) else "the outputs of the folded batch differ"


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two results agree in half of the digits of their precision; other members or rows differ in the first."""
    precision = torch.promote_types(one.dtype, other.dtype)
    if torch.is_autocast_enabled(one.device.type):
        precision = torch.get_autocast_dtype(one.device.type)
    if not precision.is_floating_point:
        return torch.equal(one, other)
    if not (one.isfinite() == other.isfinite()).all():
        return False
    exact = torch.promote_types(precision, torch.float32)
    one, other = (t.to(exact).nan_to_num(0, 0, 0) for t in (one, other))
    return bool(((one - other).abs() <= torch.finfo(precision).eps ** 0.5 * one.abs().amax()).all())
