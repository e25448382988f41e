"""Common corruptions of images: 19 types at 5 severities, the same for everybody (paper section 8).

The transforms are TorchUncertainty's with the severity constants of ImageNet-C, made for 224 pixels. At 32 pixels
they are CIFAR-C-*style* and mostly stronger than CIFAR-C itself (Hendrycks & Dietterich, arXiv 1903.12261), whose
constants are beside them. Two are repaired and one is added, see `_transform`.

    ================== ========================= ========================= ================================
    severity 1 … 5     here                      CIFAR-C                   here also
    ================== ========================= ========================= ================================
    gaussian_noise     σ .08 … .38               σ .04 … .10
    shot_noise         60 … 3 photons            500 … 50 photons
    impulse_noise      3 … 27 % of the values    1 … 7 %
    defocus_blur       radius 3 … 10 px          radius .3 … 1.5 px
    glass_blur         σ .7 … 1.5, moves 1 … 3+  σ .05 … .4, moves 1       swaps are simultaneous
    motion_blur        box of 7 … 31 px          Gaussian of σ 1 … 2.5 px  black beyond the border
    zoom_blur          up to × 1.10 … 1.30       up to × 1.05 … 1.25
    snow               flakes × 3 … 2.5          flakes × 1 … 1.25         motion blur as above
    frost              frost × .4 … .75          frost × .2 … .45          frost scaled, not only cropped
    fog                1.5 … 3                   .2 … 1.5
    brightness         × 1.3 … 2.5               + .05 … .3                black stays black
    contrast           × .4 … .05                × .75 … .15               about the grey mean
    elastic_transform  CIFAR-C's below 64 px     shift σ 0 … .5 px         blur cut at 1.5σ, not 3σ
    pixelate           to 60 … 25 % of the side  to 95 … 65 %
    jpeg_compression   quality 25 … 7            quality 80 … 40
    speckle_noise      σ .15 … .6                σ .06 … .2
    gaussian_blur      σ 1 … 6 px                σ .4 … 1 px
    spatter            CIFAR-C's                 water 1 … 3, mud 4 and 5
    saturate           × .8 … .1                 × .3, .1, 1.5, 2, 2.5     never gains colour
    ================== ========================= ========================= ================================
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["EXTRA", "SEVERITIES", "STANDARD", "block_mean", "corrupt", "corrupt_small", "repeat_pixels"]

STANDARD = {
    "gaussian_noise": "noise",
    "shot_noise": "noise",
    "impulse_noise": "noise",
    "defocus_blur": "blur",
    "glass_blur": "blur",
    "motion_blur": "blur",
    "zoom_blur": "blur",
    "snow": "weather",
    "frost": "weather",
    "fog": "weather",
    "brightness": "weather",
    "contrast": "digital",
    "elastic_transform": "digital",
    "pixelate": "digital",
    "jpeg_compression": "digital",
}
"""The 15 types of the headline mean and the family of each, under the names of the CIFAR-C files."""

EXTRA = {"speckle_noise": "noise", "gaussian_blur": "blur", "spatter": "weather", "saturate": "digital"}
"""The four types outside the headline mean."""

SEVERITIES = (1, 2, 3, 4, 5)

_CLASSES = {
    "gaussian_noise": "GaussianNoise",
    "shot_noise": "ShotNoise",
    "impulse_noise": "ImpulseNoise",
    "defocus_blur": "DefocusBlur",
    "glass_blur": "GlassBlur",
    "motion_blur": "MotionBlur",
    "zoom_blur": "ZoomBlur",
    "snow": "Snow",
    "frost": "Frost",
    "fog": "Fog",
    "brightness": "Brightness",
    "contrast": "Contrast",
    "elastic_transform": "Elastic",
    "pixelate": "Pixelate",
    "jpeg_compression": "JPEGCompression",
    "speckle_noise": "SpeckleNoise",
    "gaussian_blur": "GaussianBlur",
    "saturate": "Saturation",
}

# Amplitude, smoothness and affine shift of the displacement in CIFAR-C, as fractions of the side. At severity 1
# the amplitude is zero and any smoothness will do.
_ELASTIC = ((0, 0.2, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))

_SMALLEST = 32


def corrupt(images: np.ndarray, name: str, severity: int, seed: int = 0) -> np.ndarray:
    """Corrupt colour images, each with noise of its own.

    Image i is a function of its pixels and of (seed, name, severity, i) alone: neither the images beside it
    nor the global random states matter, and those states are left as they were. Results are clipped to [0, 1],
    scaled to 255 and rounded to the nearest integer, ties to even.

    Args:
        images: (N, H, W, 3) uint8, H and W at least 32.
        name: one of `STANDARD` or `EXTRA`.
        severity: 1 (weakest) to 5.
        seed: ≥ 0.

    Returns:
        (N, H, W, 3) uint8.

    Raises:
        TypeError: images that are not a uint8 array; a severity or seed that is not an integer.
        ValueError: another shape, an unknown name, a severity outside 1 … 5, a negative seed.
    """
    _check(images, name, severity, seed, channels=(3,))
    if min(images.shape[1:3]) < _SMALLEST:
        raise ValueError(
            f"images of {images.shape[1]}×{images.shape[2]} pixels are too small to corrupt: at least "
            f"{_SMALLEST}×{_SMALLEST}; use corrupt_small"
        )
    out = np.empty_like(images)
    transform = _transform(name, severity, min(images.shape[1:3]))
    with _undisturbed():
        for i, image in enumerate(images):
            state = np.random.SeedSequence([seed, zlib.crc32(name.encode()), severity, i])
            # `torch.manual_seed` would reseed the accelerators too, which nobody restores.
            torch.default_generator.manual_seed(int(state.generate_state(1)[0]))
            x = torch.tensor(image).permute(2, 0, 1) / 255
            y = transform(x, np.random.default_rng(state))
            out[i] = (y.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return out


def corrupt_small(images: np.ndarray, name: str, severity: int, seed: int = 0, size: int = 32) -> np.ndarray:
    """Corrupt images that are too small, or too grey, for `corrupt`.

    Pixels are repeated until the shorter side has `size` of them, grey becomes RGB, the result is corrupted
    and reduced by block means (and the mean of the channels) to the shape it came in. Of noise, which is independent
    from value to value and would average out, one value is kept instead of the mean of its block: the images get the
    noise that `corrupt` would give them at their own size. A `pixelate` whose cells divide the blocks does nothing
    (8 pixels at size 32: severities 2 and 5). Images of at least `size` pixels keep their size.

    Args:
        images: (N, H, W, C) uint8, C = 1 or 3; the shorter side divides `size` or is at least as long.
        name, severity, seed: as for `corrupt`.
        size: shorter side to corrupt at, at least 32 pixels.

    Returns:
        (N, H, W, C) uint8.

    Raises:
        TypeError, ValueError: as `corrupt`, and a shorter side that does not divide `size`.
    """
    _check(images, name, severity, seed, channels=(1, 3))
    side = min(images.shape[1:3])
    if side < size and size % side:
        raise ValueError(f"size must be a multiple of the images' shorter side, {side}; got {size}")
    factor = max(size // side, 1)
    large = corrupt(repeat_pixels(images, factor), name, severity, seed)
    if (STANDARD | EXTRA)[name] == "noise":
        return large[:, ::factor, ::factor, : images.shape[3]].copy()
    return block_mean(large, factor, images.shape[3])


def repeat_pixels(images: np.ndarray, factor: int) -> np.ndarray:
    """Repeat each pixel `factor` times along both sides, and grey in three channels; `block_mean` undoes it.

    Args:
        images: (N, H, W, C), C = 1 or 3.

    Returns:
        (N, H·factor, W·factor, 3).
    """
    large = images.repeat(factor, axis=1).repeat(factor, axis=2)
    return large.repeat(3, axis=3) if images.shape[3] == 1 else large


def block_mean(images: np.ndarray, factor: int, channels: int) -> np.ndarray:
    """Reduce images by the mean of blocks of `factor`² pixels, and of the channels if `channels` is 1.

    Args:
        images: (N, H, W, C) uint8, H and W multiples of `factor`.

    Returns:
        (N, H/factor, W/factor, channels) uint8, rounded to the nearest integer, ties to even.
    """
    n, height, width, c = images.shape
    blocks = images.reshape(n, height // factor, factor, width // factor, factor, channels, c // channels)
    return np.rint(blocks.mean(axis=(2, 4, 6))).astype(np.uint8)


def _check(images: Any, name: str, severity: int, seed: int, channels: tuple[int, ...]) -> None:
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        kind = getattr(images, "dtype", type(images).__name__)
        raise TypeError(f"images must be a uint8 array, got {kind}")
    if images.ndim != 4 or images.shape[3] not in channels:
        allowed = " or ".join(str(c) for c in channels)
        raise ValueError(f"images must have shape (N, H, W, {allowed}), got {images.shape}")
    if name not in STANDARD | EXTRA:
        raise ValueError(f"unknown corruption {name!r}; there are {[*STANDARD, *EXTRA]}")
    for argument, value in (("severity", severity), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{argument} must be an integer, got {value!r}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be 1 … 5, got {severity}")
    if seed < 0:
        raise ValueError(f"seed must be ≥ 0, got {seed}")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep torch's random state, and work in one thread: images this small only lose time to several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # TorchUncertainty 0.13 mixes tensors and arrays in ways that NumPy 2 announces to change.
            warnings.filterwarnings("ignore", message="__array", category=DeprecationWarning)
            yield
    finally:
        torch.set_num_threads(threads)


def _transform(name: str, severity: int, side: int) -> Callable[[Tensor, np.random.Generator], Tensor]:
    """Return a function of an image (3, H, W) in [0, 1], of shorter side `side`, and a generator.

    It may draw from torch's global generator too.
    """
    if name == "spatter":
        return partial(_spatter, severity=severity)

    from torch_uncertainty.transforms import corruption

    module = getattr(corruption, _CLASSES[name])(severity)
    if name == "frost":
        # Decoded once instead of once an image.
        module.frost_ds = [module.frost_ds[k] for k in range(len(module.frost_ds))]
    if name == "elastic_transform" and side < 64:
        # The displacement does not scale with the image: at 32 pixels, ImageNet-C's severity 2 tears it apart.
        module.mix = _ELASTIC[severity - 1]
    if name == "gaussian_blur":
        # The library's kernel has one pixel at σ = 1, which blurs nothing; the original's reaches to 4σ.
        module.kernel_size = int(8 * module.sigma[0] + 1)

    def apply(image: Tensor, rng: np.random.Generator) -> Tensor:
        module.rng = rng
        return module(image)

    return apply


def _spatter(image: Tensor, rng: np.random.Generator, severity: int) -> Tensor:
    """Splash water (severities 1 to 3) or mud (4 and 5) on an image, with the constants of CIFAR-C."""
    import cv2
    from scipy.ndimage import gaussian_filter

    mean, deviation, sigma, threshold, strength = [
        (0.62, 0.1, 0.7, 0.7, 0.5),
        (0.65, 0.1, 0.8, 0.7, 0.5),
        (0.65, 0.3, 1.0, 0.69, 0.5),
        (0.65, 0.1, 0.7, 0.69, 0.6),
        (0.65, 0.1, 0.5, 0.68, 0.6),
    ][severity - 1]
    liquid = gaussian_filter(rng.normal(mean, deviation, image.shape[1:]), sigma, mode="nearest")
    liquid[liquid < threshold] = 0
    if severity > 3:
        mud = gaussian_filter((liquid > 0).astype(np.float64), strength, mode="nearest")
        mud[mud < 0.8] = 0
        brown = torch.tensor([63, 42, 20]).view(3, 1, 1) / 255
        return image * (1 - torch.from_numpy(mud)) + brown * torch.from_numpy(mud)

    drops = (liquid.clip(0, 1) * 255).astype(np.uint8)
    distance = cv2.distanceTransform(255 - cv2.Canny(drops, 50, 150), cv2.DIST_L2, 5).clip(max=20)
    shade = cv2.equalizeHist(cv2.blur(distance, (3, 3)).astype(np.uint8))
    relief = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float32)
    water = drops * cv2.blur(cv2.filter2D(shade, cv2.CV_8U, relief), (3, 3)).astype(np.float64)
    turquoise = torch.tensor([175, 238, 238]).view(3, 1, 1) / 255
    return image + turquoise * torch.from_numpy(strength * water / max(water.max(), 1.0))
