"""Networks by name: those of the CIFAR protocols, small enough for CPUs, and those of timm and transformers."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "ResNet",
    "Resized",
    "Tokens",
    "build",
    "initialize",
    "narrow_resnet",
    "resnet18",
    "resnet50",
    "timm_network",
    "transformer",
    "wide_resnet",
]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm, `bn1` and `bn2`, around a shortcut."""

    expansion = 1
    conv_bias = False

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3×3 convolution between two 1×1, with BatchNorm `bn1`, `bn2` and `bn3`, around a shortcut."""

    expansion = 4
    conv_bias = False

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class WideBlock(nn.Module):
    """Two 3×3 convolutions with shifts; `bn2` follows the sum with a shortcut that has no norm of its own."""

    expansion = 1
    conv_bias = True

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Conv2d(in_channels, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y) + self.shortcut(x)))


class ResNet(nn.Module):
    """Residual network for small images (He et al., 2016, arXiv 1512.03385): 3×3 stem, no pooling before the blocks.

    Args:
        classes: Number of classes K.
        in_channels: Channels of the images.
        width: Channels of the first stage's 3×3 convolutions; they double from stage to stage.
        blocks: Blocks in each stage. Every stage but the first halves height and width.
        block: `BasicBlock`, `Bottleneck` or `WideBlock`.
        stem: Channels of the stem; None makes it as wide as the first stage.

    Shape: (B, in_channels, H, W) to (B, K).
    """

    def __init__(
        self,
        classes: int,
        in_channels: int = 3,
        *,
        width: int = 64,
        blocks: Sequence[int] = (2, 2, 2, 2),
        block: type[BasicBlock | Bottleneck | WideBlock] = BasicBlock,
        stem: int | None = None,
    ):
        super().__init__()
        channels = width if stem is None else stem
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, bias=block.conv_bias)
        self.bn1 = nn.BatchNorm2d(channels)
        stages = []
        for i, depth in enumerate(blocks):
            stage = nn.Sequential()
            for j in range(depth):
                stage.append(block(channels, width * 2**i, stride=2 if i > 0 and j == 0 else 1))
                channels = width * 2**i * block.expansion
            stages.append(stage)
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


def initialize(network: nn.Module) -> None:
    """Draw the weights of a network's convolutions afresh, those of every group as of a convolution of its own.

    Source: He et al., 2015, arXiv 1502.01852, by the channels that leave.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            for group in module.weight.detach().chunk(module.groups):
                nn.init.kaiming_normal_(group, mode="fan_out", nonlinearity="relu")


def narrow_resnet(classes: int, in_channels: int = 3, *, width: int = 16, blocks: Sequence[int] = (1, 1, 1)) -> ResNet:
    """Return a ResNet for CPUs: 16 to 64 channels, one block a stage."""
    return ResNet(classes, in_channels, width=width, blocks=blocks)


def resnet18(classes: int, in_channels: int = 3, *, width: int = 64) -> ResNet:
    """Return the ResNet-18 of the CIFAR protocols: 64 channels wide, 11.17 million parameters with 10 classes."""
    return ResNet(classes, in_channels, width=width)


def resnet50(classes: int, in_channels: int = 3) -> ResNet:
    """Return the ResNet-50 of the CIFAR protocols, 23.52 million parameters with 10 classes."""
    return ResNet(classes, in_channels, blocks=(3, 4, 6, 3), block=Bottleneck)


def wide_resnet(classes: int, in_channels: int = 3, *, depth: int = 28, factor: int = 10) -> ResNet:
    """Return a WRN-depth-factor, by default the WRN-28-10 of the CIFAR protocols, 36.49 million parameters.

    The order of the layers, the shifts of the convolutions and the bare shortcuts are those of TorchUncertainty,
    whose network the paper's counts fit; the original (Zagoruyko & Komodakis, 2016, arXiv 1605.07146) puts norms
    before the convolutions.

    Raises:
        ValueError: if the depth is not 6n + 4.
    """
    if depth < 10 or depth % 6 != 4:
        raise ValueError(f"depth must be 6n + 4 with n ≥ 1, not {depth}")
    blocks = [(depth - 4) // 6] * 3
    return ResNet(classes, in_channels, width=16 * factor, blocks=blocks, block=WideBlock, stem=16)


class Resized(nn.Module):
    """Give a network of larger images what it expects: every image becomes `size` × `size` pixels, bilinearly.

    Shape: as of `net`, whose layers are now named `net.…`, but for images (B, C, H, W) of any height and width.
    """

    def __init__(self, net: nn.Module, size: int):
        super().__init__()
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size must be an integer ≥ 1, in pixels, not {size!r}")
        self.net = net
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return self.net(F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=False))

    def extra_repr(self) -> str:
        return f"size={self.size}"


class Tokens(nn.Module):
    """Let a Hugging Face classifier take one array, as networks of images do: padded token ids.

    The attention mask is where the ids are not the padding id, and columns that are padding in every row are cut.

    Args:
        net: A sequence classifier whose configuration has a padding id. Its layers are now named `net.…`.
        fresh: Names, in `net`, of the parameters that were drawn because the weights it was loaded from lack them.

    Shape: (B, L), int64, to (B, K).

    Raises:
        ValueError: if the configuration has no padding id, or ids come in another shape.
    """

    def __init__(self, net: nn.Module, fresh: Iterable[str] = ()):
        super().__init__()
        self.net = net
        self.fresh = tuple(fresh)
        self.padding = getattr(net.config, "pad_token_id", None)
        if self.padding is None:
            raise ValueError(f"the configuration of {type(net).__name__} has no pad_token_id to tell the padding by")

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the network knows: the rows of its embedding."""
        return self.net.get_input_embeddings().num_embeddings

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dim() != 2:
            raise ValueError(f"ids must be the token ids of sentences, (B, L), not of shape {tuple(ids.shape)}")
        mask = ids != self.padding
        seen = mask.any(0)
        return self.net(input_ids=ids[:, seen], attention_mask=mask[:, seen].long()).logits

    def extra_repr(self) -> str:
        return f"padding={self.padding}"


def timm_network(
    classes: int | None, in_channels: int, *, model: str, weights: str | None = None, size: int | None = None
) -> nn.Module:
    """Return a network of timm with a fresh head.

    Args:
        classes: Number of classes K. None, or the number of the weights, keeps the head that these bring; weights of
            no head need a K.
        in_channels: Channels of the images.
        model: Name by which timm creates it.
        weights: None draws them; "hub" downloads those that timm names; else a file of tensors, .safetensors or, as
            torch saves them, .pt, .pth or .bin, given as a path or as `package:NAME/PATH`, which lies in an installed
            Python package. The head may have any number of classes. What a training script saves besides the
            weights, under `state_dict` or `model`, is ignored, and averaged weights (`…_ema`) go first, as in timm.
            Of what torch saves, names that differ do not matter where all shapes agree in order.
        size: Height and width, in pixels, to which images are resized before the network; None leaves them.

    Shape: (B, in_channels, H, W) to (B, K).

    Raises:
        ValueError: if timm has no such model, or the weights are not the model's (the first difference is named) or
            have no head while `classes` is None.
        OSError: if there are no such weights.
    """
    import timm

    def create(**head: int) -> nn.Module:
        try:
            with _quiet() if weights == "hub" else contextlib.nullcontext():
                return timm.create_model(model, pretrained=weights == "hub", in_chans=in_channels, **head)
        except RuntimeError as error:
            raise ValueError(f"model {model!r}: {error}") from None
        except OSError as error:
            raise OSError(f"no weights of {model!r} on the hub, nor a copy here: {error}") from None

    net = create(**({} if weights or classes is None else {"num_classes": classes}))
    if weights not in (None, "hub"):
        state = _read(weights)
        ordered = not str(weights).endswith(".safetensors")  # these lie in the order of their names, not of the layers
        own, brought = net.num_classes, _classes(net, state, ordered)
        if brought != own:
            # Resetting the head would not do: some networks of timm lose a second head by it.
            net = create(num_classes=brought)
        _load(net, state, ordered, weights)
        if classes is None and brought == 0 != own:
            raise ValueError(f"{weights} has no head, so classes must say how many a fresh one is to have")
    if classes not in (None, net.num_classes):
        net.reset_classifier(classes)
    return net if size is None else Resized(net, size)


def transformer(classes: int | None, in_channels: int | None = None, *, model: str, pretrained: bool = True) -> Tokens:
    """Return a sequence classifier of transformers with a fresh head, which takes token ids.

    Args:
        classes: Number of classes K; None is what the configuration says. A head of that size in the weights is kept.
        in_channels: Ignored: token ids have no channels.
        model: Name on the hub, a folder, or `package:NAME/FOLDER`, a folder in an installed Python package.
        pretrained: Load the weights, from safetensors; if False they are drawn and only the configuration is read.

    Shape: (B, L), int64, to (B, K).

    What is drawn because the weights lack it, the head among it, is named in `fresh` of the result; it is empty where
    there are no weights.

    Raises:
        OSError: if there is no such model, or it has no safetensors.
        ValueError: if the safetensors are damaged, or lack one of the encoder's weights, so that it would be random.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForSequenceClassification

    where = _locate(model)
    labels = {} if classes is None else {"num_labels": classes}
    with _quiet():
        try:
            config = AutoConfig.from_pretrained(where, **labels)
            if not pretrained:
                return Tokens(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32))
            net, report = AutoModelForSequenceClassification.from_pretrained(
                where,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except OSError as error:
            raise OSError(
                f"no transformer {model!r}: model must be a name on the hub, a folder with a configuration and "
                f"safetensors, or package:NAME/FOLDER; {error}"
            ) from None
        except SafetensorError as error:
            raise ValueError(f"the weights of {model!r} are no safetensors, or damaged: {error}") from None
    absent = [*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]
    # The classifier is fresh, and so may be the pooler between it and the encoder.
    random = sorted(n for n in absent if n.startswith(f"{net.base_model_prefix}.") and ".pooler." not in n)
    if random:
        raise ValueError(f"the weights of {model!r} lack {random[0]}, one of {len(random)} that would be random")
    return Tokens(net.train(), [name for name, _ in net.named_parameters() if name in absent])


def _locate(where: str | Path) -> str | Path:
    """Return where a file or folder of an installed package lies, named `package:NAME/PATH`; else `where` itself."""
    if not str(where).startswith("package:"):
        return where
    name, _, inside = str(where).removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"{where!r}: no package {name!r} is installed")
    path = Path(spec.submodule_search_locations[0], inside)
    if not inside or not path.exists():
        raise FileNotFoundError(f"{where!r}: no {inside!r} in {path.parent if inside else path}")
    return path


def _classes(net: nn.Module, state: Mapping[str, Tensor], ordered: bool) -> int:
    """Return for how many classes a file's head is: 0 if the head is all it lacks, timm's number if it cannot be told.

    The head is where timm says that the network's classifiers are, of which the first counts.
    """
    heads = net.default_cfg.get("classifier") or ()
    heads = [f"{head}.weight" for head in ((heads,) if isinstance(heads, str) else heads)]
    expected, state = _uncounted(net.state_dict()), _uncounted(state)
    places = _places(expected, state, ordered)
    for head in heads:
        found = state.get(places.get(head, head))
        if found is not None and found.dim():
            return len(found)
    bare = len(places) == len(state) and any(head in expected for head in heads)
    return 0 if bare else net.num_classes


def _load(net: nn.Module, state: Mapping[str, Tensor], ordered: bool, weights: str | Path) -> None:
    """Load the tensors of a file, of which the norms' counts of batches may be absent or too many."""
    expected, found = _uncounted(net.state_dict()), _uncounted(state)
    places = _places(expected, found, ordered)
    for name, tensor in expected.items():
        if name not in places:
            raise ValueError(f"{weights} is not of this model: it lacks {name} {tuple(tensor.shape)}")
        other = found[places[name]]
        if other.shape != tensor.shape:
            raise ValueError(
                f"{weights} is not of this model: its {places[name]} {tuple(other.shape)} stands where {name} "
                f"{tuple(tensor.shape)} belongs"
            )
    unknown = [name for name in found if name not in places.values()]
    if unknown:
        raise ValueError(f"{weights} is not of this model: it has an unknown {unknown[0]}, one of {len(unknown)}")
    counts = [name for name in net.state_dict() if name not in expected]
    others = [name for name in state if name not in found]
    renamed = any(name != other for name, other in places.items())
    if renamed and len(counts) == len(others):
        places |= dict(zip(counts, others, strict=True))
    else:
        places |= {name: name for name in counts if name in others}
    net.load_state_dict({name: state[other] for name, other in places.items()}, strict=False)


def _uncounted(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors but for the norms' counts of batches: integers or, where averaged as floats, told by name."""
    return {
        name: tensor
        for name, tensor in state.items()
        if tensor.dim() or (tensor.dtype != torch.int64 and not name.endswith("num_batches_tracked"))
    }


def _places(expected: Collection[str], state: Collection[str], ordered: bool) -> dict[str, str]:
    """Return what each of the model's names is in a file: itself or, if none stands at another's place, by order."""
    places = dict(zip(expected, state, strict=False))
    if not ordered or any(name != other and other in expected for name, other in places.items()):
        return {name: name for name in expected if name in state}
    return places


def _read(weights: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, in the file's order; nothing else is unpickled.

    They are taken out of what training scripts save around them, and of the prefixes that wrapped networks add.
    """
    path = Path(_locate(weights))
    if not path.is_file():
        raise FileNotFoundError(f"no weights {path}: expected a file, package:NAME/PATH or 'hub'")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None
    elif path.suffix in (".pt", ".pth", ".bin"):
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever an unpickler makes of the bytes
            raise ValueError(f"{path} is no file of tensors alone ({type(error).__name__})") from error
    else:
        raise ValueError(f"weights must be .safetensors, .pt, .pth or .bin, not {path.name!r}")
    if isinstance(state, Mapping):
        inside = (state.get(key) for key in ("state_dict_ema", "model_ema", "state_dict", "model"))
        state = next((found for found in inside if isinstance(found, Mapping)), state)
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise ValueError(f"{path} must hold tensors by name, a network's state_dict()")
    state = dict(state)
    # Compiled and parallel networks may wrap each other in either order.
    for prefix in ("_orig_mod.", "module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and reports of transformers and its hub from stderr, where notebooks take them for failure."""
    from huggingface_hub import utils as hub
    from transformers.utils import logging as bars

    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    shown, shown_by_hub = bars.is_progress_bar_enabled(), not hub.are_progress_bars_disabled()
    bars.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        (bars.enable_progress_bar if shown else bars.disable_progress_bar)()
        (hub.enable_progress_bars if shown_by_hub else hub.disable_progress_bars)()


BACKBONES = {
    "narrow_resnet": narrow_resnet,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "timm": timm_network,
    "transformer": transformer,
    "wide_resnet": wide_resnet,
}


def build(name: str, classes: int | None, in_channels: int | None, **options: Any) -> nn.Module:
    """Return a backbone by name, freshly initialised but for weights that its options name.

    Raises:
        ValueError: if there is no such backbone or it has no such option.
        OSError: if there are no such weights.
    """
    if name not in BACKBONES:
        raise ValueError(f"no backbone {name!r}; there are {sorted(BACKBONES)}")
    try:
        return BACKBONES[name](classes, in_channels, **options)
    except TypeError as error:
        raise ValueError(f"backbone {name!r}: {error}") from None
