"""What the graph of a backbone proves: which channels of a closed gate may be left out, and which layers run once.

The backbone is traced with `torch.fx`, and each graph is run beside the code on the example inputs, since code may tell
a tracer's stand-ins from tensors. Where the whole backbone cannot be traced its children are, as far down as needed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from .folding import by_keywords, mapped, plain
from .layers import MemberHead, Pass, SigmaNorm

__all__ = ["LAYERS", "OWN", "Place", "Plan", "axis_of", "plan"]

OWN = (SigmaNorm, MemberHead)  # what has parameters of each member
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # what can have fewer rows and columns
# Elementwise, each channel by itself; that 0 stays 0 is tried out.
_POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.GELU, nn.Mish, nn.Hardswish),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Softplus, nn.Hardtanh, nn.Threshold),
    *(nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Softshrink, nn.Hardshrink),
)
_POINTWISE_NAMES = (
    *("relu", "relu6", "leaky_relu", "elu", "celu", "selu", "silu", "gelu", "mish", "hardswish"),
    *("sigmoid", "logsigmoid", "hardsigmoid", "softplus", "hardtanh", "threshold"),
    *("tanh", "tanhshrink", "softsign", "softshrink", "hardshrink"),
)
# Each channel by itself, and zeros stay zeros whatever the options.
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_POOLS = tuple(
    getattr(nn, f"{kind}Pool{n}d") for kind in ("Max", "Avg", "AdaptiveAvg", "AdaptiveMax") for n in (1, 2, 3)
)
_DROPOUT_NAMES = ("dropout", "dropout1d", "dropout2d", "dropout3d")
_POOL_NAMES = tuple(f"{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg") for n in (1, 2, 3))


@dataclass(frozen=True)
class Place:
    """What may be left out around a σNorm layer: see `Cut`."""

    producer: str | None = None
    consumers: tuple[str, ...] = ()
    reason: str = ""

    def __and__(self, other: Place) -> Place:
        """What may be left out in both of two graphs."""
        same = self.producer == other.producer, self.consumers == other.consumers
        reasons = "; ".join(dict.fromkeys(reason for reason in (self.reason, other.reason) if reason))
        if not all(same) and not reasons:
            reasons = "others read it in training"
        return Place(self.producer if same[0] else None, self.consumers if same[1] else (), reasons)


class Plan(NamedTuple):
    """What may be left out, by σNorm layer; which layers run once; whether members need copies of common tensors."""

    places: dict[str, Place]
    shared: set[str]
    guarded: bool


def plan(net: nn.Module, members: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Read from a backbone what may be left out, in evaluation and in training alike.

    Args:
        net: A backbone with σNorm layers.
        members: Members that they have.
        args, kwargs: Example inputs of a few rows, as the backbone takes them.
    """
    hooked = {
        module
        for module in net.modules()
        if any(hooks for name, hooks in vars(module).items() if name in _HOOKS) or "forward" in vars(module)
    }
    with _restoring(net):
        example = _Example(net, members, args, kwargs)
        readings = [_Reading(net.train(training), example, hooked) for training in (False, True)]
        places, others = ({name: reading.place(name) for name in reading.norms} for reading in readings)
        shared = readings[0].shared & readings[1].shared
        guarded = any(reading.writes for reading in readings)
    return Plan({name: place & others[name] for name, place in places.items()}, shared, guarded)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Example:
    """How the modules are called when a backbone runs on the example inputs.

    Attributes:
        calls: For each module with σNorm layers inside, the arguments of its last call, tensors without values.
        count: How often each module is called.
        dims: Dimensions of what each σNorm layer normalises.
    """

    def __init__(self, net: nn.Module, members: int, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.count: Counter[nn.Module] = Counter()
        self.dims: dict[nn.Module, int] = {}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.count[module] += 1
            if isinstance(module, SigmaNorm):
                self.dims[module] = args[0].dim()
            elif _gated_inside(module):
                self.calls[module] = tree_map(lambda t: t.new_empty(()) if isinstance(t, Tensor) else t, (args, kwargs))

        running = next(module.running for module in net.modules() if isinstance(module, SigmaNorm))

        def run() -> Tensor:
            with running.run(Pass(0, 1)):
                return plain(net, *mapped(by_keywords(args, kwargs), Tensor.clone))

        self.run = run
        handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in net.eval().modules()]
        if not self._run_with(handles).isfinite().all():
            raise ValueError("the outputs for the example inputs are not finite, so that they show nothing")

    def _run_with(self, handles: list[Any]) -> Tensor:
        try:
            with torch.no_grad():
                return self.run()
        finally:
            for handle in handles:
                handle.remove()

    def differing(self, graphs: dict[nn.Module, fx.Graph]) -> set[nn.Module]:
        """Find the modules whose graph, in their present mode, computes on the example inputs anything else than they.

        Code may tell a tracer's stand-ins from tensors and go another way with them. What reaches the layers is
        compared, and what is returned.
        """
        seen: list[Any] = []
        given: dict[nn.Module, list[Tensor]] = {}
        wrong: set[nn.Module] = set()
        layers = {
            module.get_submodule(node.target)
            for module, graph in graphs.items()
            for node in graph.nodes
            if node.op == "call_module"
        }

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append((module, _print((args, kwargs))))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[module] = [leaf.clone() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            seen.clear()
            torch.manual_seed(0)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            real = [*seen, (module, _print(output))]
            seen.clear()
            torch.manual_seed(0)
            try:
                again = fx.Interpreter(module, graph=graphs[module]).run(*given.pop(module))
            except Exception:  # whatever code makes of a way that it does not go by itself
                wrong.add(module)
                return
            if not _same(real, [*seen, (module, _print(again))]):
                wrong.add(module)

        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        for module in graphs:
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
        self._run_with(handles)
        return wrong


def _print(values: Any) -> list[tuple[torch.Size, float, float]]:
    """Something short that tells tensors apart: shape, norm, and a weighted sum."""
    prints = []
    for t in tree_leaves(values):
        if isinstance(t, Tensor) and t.layout is torch.strided:
            v = (torch.view_as_real(t) if t.is_complex() else t).detach().flatten().cpu().double()
            prints.append((t.shape, v.norm().item(), (v @ torch.linspace(1, 2, len(v), dtype=v.dtype)).item()))
    return sorted(prints)


def _same(one: list[tuple[nn.Module, Any]], other: list[tuple[nn.Module, Any]]) -> bool:
    if [(module, [p[0] for p in prints]) for module, prints in one] != [
        (module, [p[0] for p in prints]) for module, prints in other
    ]:
        return False
    pairs = zip(*([p for _, prints in side for p in prints] for side in (one, other)), strict=True)
    # Far above what the order of a sum may change.
    return all(
        math.isnan(a + b) or (math.isclose(a, b, rel_tol=1e-5) and abs(x - y) <= 1e-5 * a * math.sqrt(n.numel()))
        for (n, a, x), (_, b, y) in pairs
    )


class _Tracer(fx.Tracer):
    """Trace a call of a module down to σNorm layers, member heads and whatever has neither inside."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__(param_shapes_constant=True)
        self.call = args, kwargs

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        if isinstance(module, OWN):
            return True
        return not _gated_inside(module) and (
            super().is_leaf_module(module, name) or not any(True for _ in module.children())
        )

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        """Every tensor of the call becomes an input of the graph; anything else is as in the call."""
        number = itertools.count()

        def hold(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.create_proxy("placeholder", f"input{next(number)}", (), {})
            if leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)):
                return leaf
            raise TypeError(f"it takes a {type(leaf).__name__}")

        args, kwargs = tree_map(hold, self.call)
        return (lambda *given: root_fn(*given, **kwargs)), [self.root, *args]


class _Reading:
    """What the graphs of a backbone, in its present mode, prove.

    The backbone is one graph if it can be traced, and the graph computes what it does; else its children are, as far
    down as needed.

    Attributes:
        norms: The σNorm layers by name.
        shared: Names of layers that depend on no member and may run once.
        writes: Whether the backbone writes, or may write, into its inputs or what else depends on no member.
    """

    def __init__(self, net: nn.Module, example: _Example, hooked: set[nn.Module]):
        self.net = net
        self.example = example
        self.hooked = hooked
        self.norms = {name: m for name, m in net.named_modules() if isinstance(m, SigmaNorm)}
        self.names = {module: name for name, module in net.named_modules()}
        self.failures: list[tuple[str, str]] = []
        self.modules: dict[fx.Node, nn.Module] = {}
        self.calls: dict[nn.Module, list[fx.Node]] = {}
        self.direct: set[nn.Module] = set()
        self.held: set[fx.Node] = set()
        graphs = self._graphs()
        for prefix, graph in graphs:
            for node in graph.nodes:
                if node.op == "call_module":
                    module = self.modules[node] = net.get_submodule(_join(prefix, node.target))
                    self.calls.setdefault(module, []).append(node)
                elif node.op == "get_attr":
                    self.direct.add(net.get_submodule(_join(prefix, node.target).rpartition(".")[0]))
        self.shared: set[str] = set()
        self.writes = True
        if graphs and graphs[0][0] == "":
            self._share(graphs[0][1])

    def _graphs(self) -> list[tuple[str, fx.Graph]]:
        """The graphs that compute what the code does."""
        modes = {layer: layer.training for layer in self.norms.values()}
        buffers = {buffer: buffer.clone() for buffer in self.net.buffers()}
        graphs: list[tuple[str, fx.Graph]] = []
        found = dict(self._trace(self.net))
        try:
            for layer in modes:  # which would take another batch for their statistics
                layer.training = False
            with torch.random.fork_rng(sorted({p.device.index for p in self.net.parameters() if p.is_cuda})):
                while found:
                    wrong = self.example.differing(found)
                    graphs += [(self.names[module], graph) for module, graph in found.items() if module not in wrong]
                    self.failures += [(self.names[module], "does something else when it is traced") for module in wrong]
                    found = {m: graph for module in wrong for m, graph in self._below(module)}
        finally:
            for layer, mode in modes.items():
                layer.training = mode
            for buffer, value in buffers.items():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        return graphs

    def _below(self, module: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
        for child in module.children():
            if not isinstance(child, OWN) and _gated_inside(child):
                yield from self._trace(child)

    def _trace(self, module: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
        name = self.names[module]
        if self.example.count[module] == 1:
            try:
                with _restoring(module):
                    before = torch.get_rng_state(), random.getstate()
                    graph = _Tracer(*self.example.calls[module]).trace(module)
                    if not torch.equal(before[0], torch.get_rng_state()) or before[1] != random.getstate():
                        torch.set_rng_state(before[0])
                        random.setstate(before[1])
                        raise RuntimeError("it draws random numbers")
                    attributes = tree_leaves([list(vars(inner).values()) for inner in module.modules()])
                    self.held |= {leaf.node for leaf in attributes if isinstance(leaf, fx.Proxy)}
                    constants = {name: t for name, t in vars(module).items() if name.startswith("_tensor_constant")}
                vars(module).update(constants)
                yield module, graph
                return
            # Any code of a backbone may fail in any way when it is traced.
            except Exception as error:
                first = (str(error).strip() or "no message").splitlines()[0]
                self.failures.append((name, f"cannot be traced ({type(error).__name__}: {first})"))
        else:
            self.failures.append((name, f"is called {self.example.count[module]} times"))
        yield from self._below(module)

    def place(self, name: str) -> Place:
        """Tell what may be left out around a σNorm layer."""
        norm = self.norms[name]
        nodes = self.calls.get(norm, [])
        if name not in self.norms or any(isinstance(p, MemberHead) for p in self._parents(name)):
            return Place(reason="its member head has weights of the member's own only")
        if not nodes:
            inside = [f for f in self.failures if f[0] == "" or name.startswith(f"{f[0]}.")]
            where, why = inside[-1] if inside else ("", "does not call it")
            return Place(reason=f"{self._called(where)} {why}")
        if problem := self._several(norm):
            return Place(reason=f"it {problem}")
        if norm not in self.example.dims:
            return Place(reason="it is called in training alone")
        open_zero = next((problem for child in norm.children() if (problem := self._zero(child))), None)
        if open_zero:
            return Place(reason=f"its {open_zero}")
        if axis_of(norm) is None:
            return Place(reason=f"it is a {type(norm.template).__name__}")
        if len(norm.shape) > 1:
            return Place(reason="it has gates in more than one dimension")
        (node,) = nodes
        producer, missing = self._producer(norm, node)
        consumers, blocker = self._consumers(norm, node)
        return Place(producer, consumers, "; ".join(reason for reason in (missing, blocker) if reason))

    def _parents(self, name: str) -> Iterator[nn.Module]:
        parts = name.split(".")
        return (self.net.get_submodule(".".join(parts[:i])) for i in range(len(parts)))

    def _called(self, name: str) -> str:
        return f"layer {name!r}" if name else "the backbone"

    def _several(self, module: nn.Module) -> str | None:
        times = max(len(self.calls[module]), self.example.count[module])
        if times != 1:
            return f"is called {times} times"
        return "has hooks" if module in self.hooked else None

    def _layer(self, node: fx.Node) -> str | None:
        """Tell why the layer of a node cannot have fewer rows or columns."""
        module = self.modules[node]
        name = self._called(self.names[module])
        if type(module) not in LAYERS:
            return f"{name} is a {module._get_name()}"
        if getattr(module, "groups", 1) > 1:
            return f"{name} has {module.groups} groups"
        if problem := self._several(module):
            return f"{name} {problem}"
        if module in self.direct:
            return f"the weight of {name} is read elsewhere"
        return None

    def _producer(self, norm: SigmaNorm, node: fx.Node) -> tuple[str | None, str]:
        before = node.args[0] if node.args else None
        if not norm.normalizes_batch:
            return None, "it needs all channels for its statistics"
        if not isinstance(before, fx.Node) or before.op != "call_module":
            return None, f"it follows {self._what(before)}"
        if problem := self._layer(before):
            return None, problem
        layer = self.modules[before]
        name = self._called(self.names[layer])
        if self.names[layer] in self.shared:
            return None, f"{name} runs once for all members"
        if before in self.held:
            return None, f"an attribute keeps what {name} returns"
        others = [user for user in before.users if user is not node]
        if others:
            return None, f"{self._what(others[0])} reads {name} too"
        if isinstance(layer, nn.Linear) and self.example.dims[norm] != 2:
            return None, f"the channels of {name} are not the norm's"
        return self.names[layer], ""

    def _consumers(self, norm: SigmaNorm, node: fx.Node) -> tuple[tuple[str, ...], str]:
        dims = self.example.dims[norm]
        axis = axis_of(norm) % dims
        consumers: list[str] = []
        open_nodes = [(node, dims, axis)]
        while open_nodes:
            node, dims, axis = open_nodes.pop()
            if node in self.held:
                return (), "an attribute keeps it"
            for user in node.users:
                if user.args[:1] != (node,) or node in tree_leaves((user.args[1:], user.kwargs)):
                    return (), f"{self._what(user)} reads it"
                passed = self._passes(user, dims, axis)
                if isinstance(passed, tuple):
                    open_nodes.append((user, *passed))
                    continue
                if passed or user.op != "call_module":
                    return (), passed or f"{self._what(user)} reads it"
                if problem := self._layer(user):
                    return (), problem
                layer = self.modules[user]
                if axis != (dims - 1 if isinstance(layer, nn.Linear) else 1):
                    return (), f"the columns of {self._called(self.names[layer])} are not the norm's channels"
                consumers.append(self.names[layer])
        return (tuple(consumers), "") if consumers else ((), "nothing reads it")

    def _passes(self, node: fx.Node, dims: int, axis: int) -> tuple[int, int] | str | None:
        """Tell whether zeros stay zeros, channel by channel: the new dimensions and axis, or why not, or None."""
        options = tree_leaves((node.args[1:], node.kwargs))
        if any(isinstance(option, fx.Node) for option in options):
            return None
        module = self.modules.get(node)
        if module is not None:
            if module in self.hooked:
                return f"layer {self.names[module]!r} has hooks"
            if isinstance(module, _POOLS):
                spatial = int(type(module).__name__[-2])
                indices = getattr(module, "return_indices", False)
                return (dims, axis) if axis == 1 and dims == spatial + 2 and not indices else None
            if not _channelwise(module):
                return None
            problem = self._zero(module)
            return f"{problem}" if problem else (dims, axis)
        if node.op not in ("call_function", "call_method"):
            return None
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if node.op == "call_function" and node.target not in (getattr(F, name, None), getattr(torch, name, None)):
            return None
        base = name.removesuffix("_")
        if base in (*_DROPOUT_NAMES, "contiguous", "clone"):
            return dims, axis
        if base in _POOL_NAMES and not node.kwargs.get("return_indices", False):
            return (dims, axis) if axis == 1 and dims == int(base[-2]) + 2 else None
        if base == "mean":
            return _mean(node, dims, axis)
        if base in _POINTWISE_NAMES:
            zero = torch.zeros(1)
            function = node.target if node.op == "call_function" else getattr(Tensor, name)
            if function(zero, *node.args[1:], **node.kwargs).item() != 0:
                return f"{name} does not map 0 to 0"
            return dims, axis
        return None

    def _zero(self, module: nn.Module) -> str | None:
        """Tell why a module is not known to act on each channel by itself and to map 0 to 0."""
        name = self._called(self.names[module])
        if not _channelwise(module):
            return f"{name} is a {module._get_name()}"
        if module in self.hooked:
            return f"{name} has hooks"
        if isinstance(module, nn.Identity) or _drops(module):
            return None
        like = next(module.parameters(), torch.zeros(1))
        with torch.no_grad():
            value = type(module).forward(module, like.new_zeros(1))
        return None if value.item() == 0 else f"{name} ({type(module).__name__}) does not map 0 to 0"

    def _what(self, node: Any) -> str:
        if not isinstance(node, fx.Node):
            return "an argument"
        if node.op == "call_module":
            module = self.modules[node]
            return f"{self._called(self.names[module])} ({type(module).__name__})"
        if node.op == "placeholder":
            return "an input"
        if node.op == "output":
            return "the output"
        return f"{getattr(node.target, '__name__', node.target)}"

    def _share(self, graph: fx.Graph) -> None:
        """Find the layers that depend on no member."""
        self.writes = False
        same: set[fx.Node] = set()
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                same.add(node)
                continue
            alike = all(parent in same for parent in node.all_input_nodes)
            module = self.modules.get(node)
            if module is not None:
                fixed = _channelwise(module) and not _drops(module)
                alike &= fixed or type(module) in LAYERS or type(module) in _POOLS
            else:
                alike &= not any(word in str(node.target) for word in ("drop", "rand", "bernoulli", "normal"))
            self.writes |= _writes(node, module) and any(parent in same for parent in node.all_input_nodes)
            if alike and node.op != "output":
                same.add(node)
        self.shared = {
            self.names[module]
            for node in same
            if (module := self.modules.get(node)) is not None
            and type(module) in LAYERS
            and self._several(module) is None
        }


def axis_of(norm: SigmaNorm) -> int | None:
    """The dimension that holds the channels, or None for a norm that may do more than normalise and activate."""
    if norm.native:
        return -1 if isinstance(norm.template, (nn.LayerNorm, nn.RMSNorm)) else 1
    kind = type(norm.template)
    return _AXES_OF_TIMM.get(kind.__name__) if kind.__module__.startswith("timm.layers.") else None


_AXES_OF_TIMM = {"BatchNormAct2d": 1, "LayerNorm": -1, "LayerNorm2d": 1, "GroupNorm": 1, "GroupNorm1": 1}


def _gated_inside(module: nn.Module) -> bool:
    return any(isinstance(inner, OWN) for inner in module.modules())


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _channelwise(module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(module, nn.PReLU):
        return module.num_parameters == 1
    if kind in _POINTWISE or kind is nn.Identity or _drops(module):
        return True
    return kind.__module__.startswith("timm.layers.activations")


def _drops(module: nn.Module) -> bool:
    return type(module) in _DROPOUTS or type(module).__name__ == "DropPath"


def _writes(node: fx.Node, module: nn.Module | None) -> bool:
    """Tell whether a node writes into what it reads."""
    if module is not None:
        known = type(module).__module__.split(".")[0] in ("torch", "timm", "torchvision", "sigmaens")
        return not known or getattr(module, "inplace", False)
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    # A graph shows x += 1 as x + 1.
    augmented = node.op == "call_function" and hasattr(operator, f"i{name}") and node.target is getattr(operator, name)
    return (
        augmented
        or name == "setitem"
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("inplace", False)
        or node.kwargs.get("out") is not None
        or (name in (*_POINTWISE_NAMES, *_DROPOUT_NAMES) and any(arg is True for arg in node.args))
    )


def _mean(node: fx.Node, dims: int, axis: int) -> tuple[int, int] | None:
    """Follow the channels through a mean over other dimensions."""
    names = ("dim", "keepdim")
    given = dict(zip(names, node.args[1:], strict=False)) | {n: v for n, v in node.kwargs.items() if n in names}
    over = given.get("dim")
    over = (over,) if isinstance(over, int) else over
    if not isinstance(over, (tuple, list)) or not over:
        return None
    over = {d % dims for d in over}
    if axis in over or 0 in over:
        return None
    if given.get("keepdim", False):
        return dims, axis
    return dims - len(over), axis - sum(d < axis for d in over)


@contextlib.contextmanager
def _restoring(net: nn.Module) -> Iterator[None]:
    """Leave the modules of a network with the attributes, modes among them, that they came with."""
    before = {module: dict(vars(module)) for module in net.modules()}
    try:
        yield
    finally:
        for module, attributes in before.items():
            vars(module).clear()
            vars(module).update(attributes)
