"""SigmaEnsemble: any backbone with normalisation layers becomes an ensemble that shares all its other weights."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .layers import MemberHead, Pass, SigmaNorm, check_members, is_supported_norm, looks_like_norm, remember, running

if TYPE_CHECKING:
    from .slim import SlimEnsemble

__all__ = ["SigmaEnsemble", "load", "parameter_groups", "save"]

FORMAT_VERSION = 1
_RANK_ONE = (".r_group", ".s_group")  # BatchEnsemble's vectors r and s, by TorchUncertainty's names


class SigmaEnsemble(nn.Module):
    """Hide an ensemble in one network: members share every weight and own only their normalisation layers.

    Every norm of the backbone becomes a `SigmaNorm`, and the layer named by `head` becomes M heads. The batch is
    repeated M times, member slowest, and runs through the backbone as one batch, so the cost is M forward passes;
    only parameters are saved. Where that takes too much memory, `at_once` members at a time do.

    Args:
        backbone: Any network with BatchNorm, LayerNorm, GroupNorm or RMSNorm layers. It is copied, not changed.
        members: Number of members M ≥ 1.
        head: Dotted name of the linear layer that becomes M member heads (a norm, then a fresh linear layer).
            None keeps the output layer, shared by all members.
        regularize: `fnmatch` pattern or patterns over the names of the σNorm layers; the layers matched are the R
            of the diversity loss, for example `"*.bn2"`. The others are σNorm too.
        std: Standard deviation of the initial scale logits γ.
        at_once: How many members run in one pass, an integer ≥ 1, or None for all. It may be set later, changes
            nothing but time and memory, and is not saved. Evaluation then takes the memory of one such chunk;
            for training, see `chunks`.

    Shape: inputs with B rows to logits (B, M, K).

    Raises:
        ValueError: if the backbone has no norm layer, `head` or `regularize` matches nothing, or `members` or
            `at_once` < 1.
        TypeError: if the backbone has a norm that cannot be gated; it is named.

    Source: paper, section 3.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        >>> ens = SigmaEnsemble(net, members=4, head="3")
        >>> ens(torch.randn(5, 8)).shape
        torch.Size([5, 4, 3])
        >>> list(ens.gates())
        ['1', '3.norm']
    """

    _at_once: int | None = None

    def __init__(
        self,
        backbone: nn.Module,
        members: int = 4,
        *,
        head: str | None = None,
        regularize: str | Iterable[str] = "*",
        std: float = 1.0,
        at_once: int | None = None,
    ):
        super().__init__()
        self._build(backbone, members, head, regularize, std, at_once, pretrained=False)

    @classmethod
    def from_pretrained(
        cls,
        backbone: nn.Module,
        members: int = 4,
        *,
        head: str | None = None,
        regularize: str | Iterable[str] = "*",
        std: float = 1.0,
        at_once: int | None = None,
    ) -> SigmaEnsemble:
        """Convert a trained backbone so that every member starts as its exact function, up to the head.

        Arguments as for the class; `std` then concerns the fresh heads alone. With `head=None` the whole output is
        kept, but the members are equal and stay so: the regulariser has no gradient between equal gates, and only
        fresh heads break the tie.

        Source: paper, section on conversion; exact here for scales of any sign, zero and above 1 too.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._build(backbone, members, head, regularize, std, at_once, pretrained=True)
        return self

    def _build(self, backbone, members, head, regularize, std, at_once, *, pretrained):
        check_members(members)
        if not isinstance(backbone, nn.Module):
            raise TypeError(f"backbone must be a torch module, not {type(backbone).__name__}")
        if any(isinstance(module, (SigmaNorm, MemberHead)) for module in backbone.modules()):
            raise TypeError("the backbone already has σNorm layers")
        backbone = copy.deepcopy(backbone)
        self.members = members
        self.head = head
        self.at_once = at_once

        if head is not None:
            linears = [name for name, module in backbone.named_modules() if type(module) is nn.Linear]
            if head not in linears:
                raise ValueError(f"head {head!r} is no linear layer of the backbone; the last are {linears[-3:]}")
        gated: dict[int, SigmaNorm] = {}
        places = dict(backbone.named_modules(remove_duplicate=False))
        for name, module in places.items():
            if is_supported_norm(module):
                if id(module) not in gated:
                    gated[id(module)] = SigmaNorm(module, members, std=std, pretrained=pretrained)
                backbone = replace(backbone, name, gated[id(module)])
            elif looks_like_norm(module):
                kind = f"{type(module).__module__}.{type(module).__name__}"
                raise TypeError(f"layer {name!r} is a {kind}, which has no σNorm: see SigmaNorm for those that have")
        if not gated:
            raise ValueError(f"{type(backbone).__name__} has no normalisation layers, so there is nothing to gate")
        if head is not None:
            batch_norm = any(layer.normalizes_batch for layer in gated.values())
            linear = backbone.get_submodule(head)
            backbone = replace(backbone, head, MemberHead(linear, members, batch_norm=batch_norm, std=std))
        self.backbone = backbone

        names = list(self._layers())
        self.regularized = matching(names, regularize)
        for name, layer in self._layers().items():
            layer.label = name
        self.training = backbone.training

    @property
    def at_once(self) -> int | None:
        """How many members run in one pass, or None for all."""
        return self._at_once

    @at_once.setter
    def at_once(self, at_once: int | None) -> None:
        if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
            raise ValueError(f"at_once must be an integer ≥ 1, or None for all members, not {at_once!r}")
        self._at_once = at_once

    def _layers(self) -> dict[str, SigmaNorm]:
        return {name: layer for name, layer in self.backbone.named_modules() if isinstance(layer, SigmaNorm)}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the members' logits, shape (B, M, K).

        Every tensor argument whose first dimension is B, that of the first tensor found, is repeated for the
        members, in nested lists and mappings too; anything else is passed as it is. A mapping given as the only
        argument, such as a tokenizer's batch, is passed by keywords. Of a backbone that returns more than a tensor,
        `.logits` is taken, or else its first tensor with a row for each input row.

        Inside the backbone the batch must stay the first dimension. A norm that sees it elsewhere, as in
        sequence-first transformers, is refused by name; only a sequence exactly M·B long cannot be told from a batch.
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
        layers, size = self._layers().values(), self.at_once or self.members
        if size >= self.members:
            yield folded(self.backbone, self.members, args, kwargs, layers)
            return
        for first in range(0, self.members, size):
            present = slice(first, min(first + size, self.members))
            yield folded(self.backbone, present.stop - first, args, kwargs, layers, present)

    @torch.no_grad()
    def predict_proba(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean of the members' softmax probabilities, shape (B, K), computed in evaluation mode."""
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            logits = self(*args, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1).mean(1)

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
        lines.append(f"  R: regularised, {len(self.regularized)} of {len(layers)} σNorm layers")
        return "\n".join(lines)


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.0, gamma_multiplier: float = 100.0
) -> list[dict[str, Any]]:
    """Return parameter groups for any torch optimiser: scale logits γ learn faster and do not decay.

    The vectors r and s of BatchEnsemble do not decay either.

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


def save(model: nn.Module, path: str | os.PathLike) -> None:
    """Write a module's state to a safetensors file with a format version, whole or not at all.

    Raises:
        OSError: if it cannot be written, naming the file.
    """
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    # One entry only: safetensors writes several in random order, and equal models should give equal bytes.
    metadata = {"sigmaens": json.dumps(_describe(model))}
    write_tensors(state, Path(path), metadata)


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        OSError: if it cannot be written, naming the file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
        temporary = Path(folder) / path.name
        try:
            save_file(tensors, temporary, metadata=metadata)
            os.replace(temporary, path)
        except (SafetensorError, OSError) as error:
            raise OSError(f"cannot write {path}: {error}") from error


def load(model: nn.Module, path: str | os.PathLike) -> nn.Module:
    """Load a file written by `save` into a module built alike, and return the module.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no safetensors file of this project, of another version, or of another model; the
            difference is named and the module is left as it was.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("sigmaens", "{}"))
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    if "version" not in about:
        raise ValueError(f"{path} was not written by sigmaens")
    if about["version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {about['version']}, this is version {FORMAT_VERSION}")
    expected = model.state_dict()
    problems = [f"lacks {name}" for name in expected if name not in state]
    problems += [f"has an unknown {name}" for name in state if name not in expected]
    problems += [
        f"has {name} as {state[name].dtype} instead of {tensor.dtype}"
        for name, tensor in expected.items()
        if name in state and state[name].dtype != tensor.dtype
    ]
    problems += [
        f"has {name} of shape {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"{path} holds {about}, not {_describe(model)}: it {'; '.join(problems[:3])}{more}")
    model.load_state_dict(state)
    return model


def _describe(model: nn.Module) -> dict[str, Any]:
    about = {"version": FORMAT_VERSION, "class": type(model).__name__}
    if isinstance(model, SigmaEnsemble):
        about |= {"members": model.members, "backbone": type(model.backbone).__name__, "head": model.head}
    return about


def folded(
    backbone: nn.Module,
    members: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layers: Collection[nn.Module] = (),
    present: slice | None = None,
) -> Tensor:
    """Run a backbone on arguments repeated for the members, member slowest, and return the logits, (B, M, K).

    What is repeated and what is taken as the logits: see `SigmaEnsemble.forward`. A single member gets the arguments
    as they are.

    Args:
        backbone: Network whose batch is the first dimension, M·B rows here.
        members: Number of members M in this pass.
        args, kwargs: Arguments of the call, with B rows.
        layers: Layers that need to know of the pass, such as its rows; they ask `layers.pass_of`.
        present: Which of the ensemble's members the pass has, if not all; the σNorm layers among `layers` take these.
            Every tensor is then copied, so that the next pass finds what this one did.

    Raises:
        ValueError: if no argument has rows, or the backbone does not return a row for each that it is given.
    """
    if len(args) == 1 and isinstance(args[0], Mapping):
        args, kwargs = (), {**args[0], **kwargs}
    batch = _batch_size((args, kwargs))
    if not batch:
        raise ValueError("no tensor with rows in a batch dimension among the arguments")
    args, kwargs = _fold((args, kwargs), batch, members, copied=present is not None)
    current = Pass(members * batch, present)
    # torch.compile cannot follow the switch, so it is turned only where it switches something.
    fused = any(isinstance(module, _FUSED) for module in backbone.modules())
    with running(layers, current), _no_fast_path() if fused else contextlib.nullcontext():
        output = backbone(*args, **kwargs)
    logits = _logits(output, rows=members * batch)
    if present is not None:
        remember(logits, layers, current)
    return logits.unflatten(0, (members, batch)).transpose(0, 1)


def matching(names: Iterable[str], patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names that match an `fnmatch` pattern, or one of several.

    Raises:
        TypeError: if a pattern is no string.
        ValueError: if a pattern matches nothing; it is named.
    """
    names, patterns = list(names), [patterns] if isinstance(patterns, str) else list(patterns or ())
    if not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"regularize must be a pattern or a list of patterns, not {patterns}")
    unmatched = [p for p in patterns if not any(fnmatchcase(name, p) for name in names)]
    if unmatched or not patterns:
        raise ValueError(f"regularize {unmatched or patterns} matches none of the σNorm layers {names}")
    return tuple(name for name in names if any(fnmatchcase(name, p) for p in patterns))


def replace(root: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Put a module in the place of the one with a dotted name, and return the root, which is `new` for the name ""."""
    if not name:
        return new
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, new)
    return root


def _batch_size(item: Any) -> int | None:
    if isinstance(item, Tensor):
        return item.shape[0] if item.dim() else None
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, (list, tuple)):
        return next((size for size in map(_batch_size, item) if size is not None), None)
    return None


def _fold(item: Any, batch: int, members: int, copied: bool) -> Any:
    if isinstance(item, Tensor):
        if members > 1 and item.dim() > 0 and item.shape[0] == batch:
            return item.repeat(members, *[1] * (item.dim() - 1))
        return item.clone() if copied else item
    if isinstance(item, Mapping):
        return {key: _fold(value, batch, members, copied) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        folded = [_fold(value, batch, members, copied) for value in item]
        return type(item)(*folded) if hasattr(item, "_fields") else type(item)(folded)
    return item


_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """Keep torch's fused transformer layers, which read the norms' own tensors and so pass by the gates, from use."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _logits(output: Any, rows: int) -> Tensor:
    if not isinstance(output, Tensor):
        named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
        values = list(output.values()) if isinstance(output, Mapping) else output
        if named is not None:
            output = named
        elif isinstance(values, (list, tuple)):
            output = next((t for t in values if isinstance(t, Tensor) and t.shape[:1] == (rows,)), output)
    if not isinstance(output, Tensor) or output.shape[:1] != (rows,):
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"the backbone must return {rows} rows of logits, a row for each it is given; got {got}")
    return output
