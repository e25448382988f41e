"""Networks by name, small enough for CPUs, with the layer names that the paper's patterns expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ResNet", "build", "initialize", "narrow_resnet", "resnet18", "resnet50", "wide_resnet"]


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


def resnet18(classes: int, in_channels: int = 3) -> ResNet:
    """Return the ResNet-18 of the CIFAR protocols, 11.17 million parameters with 10 classes."""
    return ResNet(classes, in_channels)


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


BACKBONES = {
    "narrow_resnet": narrow_resnet,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "wide_resnet": wide_resnet,
}


def build(name: str, classes: int, in_channels: int, **options: Any) -> nn.Module:
    """Return a freshly initialised backbone by name.

    Raises:
        ValueError: if there is no such backbone or it has no such option.
    """
    if name not in BACKBONES:
        raise ValueError(f"no backbone {name!r}; there are {sorted(BACKBONES)}")
    try:
        return BACKBONES[name](classes, in_channels, **options)
    except TypeError as error:
        raise ValueError(f"backbone {name!r}: {error}") from None
