"""Networks by name, small enough for CPUs, with the layer names that the paper's patterns expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["ResNet", "build", "narrow_resnet", "resnet18"]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with BatchNorm, `bn1` and `bn2`, around a shortcut."""

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


class ResNet(nn.Module):
    """Residual network for small images (He et al., 2016, arXiv 1512.03385): 3×3 stem, no pooling before the blocks.

    Args:
        classes: Number of classes K.
        in_channels: Channels of the images.
        width: Channels of the stem and of the first stage; they double from stage to stage.
        blocks: Blocks in each stage. Every stage but the first halves height and width.

    Shape: (B, in_channels, H, W) to (B, K).
    """

    def __init__(self, classes: int, in_channels: int = 3, *, width: int = 64, blocks: Sequence[int] = (2, 2, 2, 2)):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages, channels = [], width
        for i, depth in enumerate(blocks):
            out = width * 2**i
            strides = [1 if i == 0 else 2] + [1] * (depth - 1)
            stages.append(
                nn.Sequential(*(BasicBlock(channels if j == 0 else out, out, s) for j, s in enumerate(strides)))
            )
            channels = out
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.fc(x.mean((2, 3)))


def narrow_resnet(classes: int, in_channels: int = 3, *, width: int = 16, blocks: Sequence[int] = (1, 1, 1)) -> ResNet:
    """Return a ResNet for CPUs: 16 to 64 channels, one block a stage."""
    return ResNet(classes, in_channels, width=width, blocks=blocks)


def resnet18(classes: int, in_channels: int = 3) -> ResNet:
    """Return the ResNet-18 of the CIFAR protocols, 11.17 million parameters with 10 classes."""
    return ResNet(classes, in_channels)


BACKBONES = {"narrow_resnet": narrow_resnet, "resnet18": resnet18}


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
