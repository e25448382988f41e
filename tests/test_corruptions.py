"""Corruptions: what each type does in closed form, and that a result depends on nothing but its arguments."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_sample_image

from sigmaens.corruptions import (
    EXTRA,
    SEVERITIES,
    STANDARD,
    block_mean,
    corrupt,
    corrupt_small,
    repeat_pixels,
)

NAMES = [*STANDARD, *EXTRA]
DETERMINISTIC = {
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
}


@pytest.fixture(scope="module")
def photographs():
    """Three 32×32 pieces of a photograph, (3, 32, 32, 3) uint8."""
    flower = block_mean(load_sample_image("flower.jpg")[np.newaxis, :424], factor=4, channels=3)[0]
    return np.stack([flower[y : y + 32, x : x + 32] for y, x in ((20, 40), (50, 60), (60, 100))])


def uniform(level, n=1):
    return np.full((n, 32, 32, 3), level, dtype=np.uint8)


def test_names_follow_the_paper():
    assert list(STANDARD.values()) == ["noise"] * 3 + ["blur"] * 4 + ["weather"] * 4 + ["digital"] * 4
    assert len(EXTRA) == 4
    assert not STANDARD.keys() & EXTRA.keys()


@pytest.mark.parametrize("name", NAMES)
def test_each_severity_changes_the_image_in_its_own_way(name, photographs):
    versions = {corrupt(photographs[:1], name, severity).tobytes() for severity in SEVERITIES}
    assert len(versions | {photographs[:1].tobytes()}) == 6


@pytest.mark.parametrize("name", NAMES)
def test_image_depends_on_its_position_and_nothing_beside_it(name, photographs):
    result = corrupt(photographs, name, 3)
    others = photographs.copy()
    others[[0, 2]] = 0
    np.testing.assert_array_equal(corrupt(others[:2], name, 3)[1], result[1])
    same = corrupt(photographs[[1, 1]], name, 3)
    assert np.array_equal(*same) == (name in DETERMINISTIC)


@pytest.mark.parametrize("name", NAMES)
def test_global_random_states_neither_matter_nor_change(name, photographs):
    def states():
        return random.getstate(), np.random.get_state()[1:3], torch.get_rng_state()  # noqa: NPY002

    results = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = states()
        results.append(corrupt(photographs[:1], name, 2))
        python, (keys, position), torch_state = states()
        assert python == before[0]
        assert position == before[1][1]
        np.testing.assert_array_equal(keys, before[1][0])
        assert torch.equal(torch_state, before[2])
    np.testing.assert_array_equal(*results)


def test_number_of_threads_neither_matters_nor_changes(photographs):
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(corrupt(photographs, "defocus_blur", 2))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DETERMINISTIC])
def test_seed_decides_the_random_types(name, photographs):
    assert not np.array_equal(corrupt(photographs, name, 3, seed=0), corrupt(photographs, name, 3, seed=1))


# In the others a random layer, direction or warp outweighs the step from one severity to the next.
@pytest.mark.parametrize("name", [*DETERMINISTIC - {"saturate"}, "glass_blur", *(n for n in NAMES if "noise" in n)])
def test_severity_removes_more_and_more(name, photographs):
    error = [((corrupt(photographs, name, s) / 255 - photographs / 255) ** 2).mean() for s in SEVERITIES]
    assert error == sorted(error)


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.08), (2, 0.12), (3, 0.18)])
def test_gaussian_noise_has_its_deviation(severity, deviation):
    noise = corrupt(uniform(128, n=4), "gaussian_noise", severity) / 255 - 128 / 255
    assert noise.std() == pytest.approx(deviation, rel=0.03)
    assert abs(noise.mean()) < 4 * deviation / noise.size**0.5


def test_shot_noise_has_the_variance_of_photons():
    noise = corrupt(uniform(51, n=4), "shot_noise", 1) / 255
    assert noise.mean() == pytest.approx(0.2, rel=0.02)
    assert noise.var() == pytest.approx(0.2 / 60, rel=0.06)


def test_impulse_noise_makes_values_black_or_white_alike():
    result = corrupt(uniform(128, n=4), "impulse_noise", 5)
    assert set(np.unique(result)) == {0, 128, 255}
    for extreme in (0, 255):
        assert (result == extreme).mean() == pytest.approx(0.27 / 2, rel=0.1)


def test_speckle_noise_scales_with_the_signal():
    noise = corrupt(uniform(100, n=4), "speckle_noise", 1) / 255
    assert noise.std() == pytest.approx(0.15 * 100 / 255, rel=0.05)
    np.testing.assert_array_equal(corrupt(uniform(0), "speckle_noise", 5), 0)


@pytest.mark.parametrize(
    "name", ["defocus_blur", "glass_blur", "zoom_blur", "elastic_transform", "pixelate", "gaussian_blur"]
)
def test_moving_light_around_leaves_a_uniform_image_alone(name):
    for severity in SEVERITIES:
        np.testing.assert_allclose(corrupt(uniform(77), name, severity), 77, atol=1)


@pytest.mark.parametrize(("severity", "sigma"), [(1, 1), (2, 2), (3, 3)])
def test_gaussian_blur_is_a_gaussian(severity, sigma):
    point = uniform(0)
    point[:, 16, 16] = 255
    expected = gaussian_filter(point[0, :, :, 0].astype(float), sigma)
    np.testing.assert_allclose(corrupt(point, "gaussian_blur", severity)[0, :, :, 0], expected, atol=0.6)


def test_elastic_transform_displaces_by_less_than_the_affine_shift_allows():
    ramp = np.broadcast_to(np.arange(0, 256, 8, dtype=np.uint8)[:, np.newaxis, np.newaxis], (32, 32, 3))[None]
    for severity in SEVERITIES:
        rows = corrupt(ramp, "elastic_transform", severity)[0, 12:20, 12:20, 0] / 8 - np.arange(12, 20)[:, None]
        assert 0 < abs(rows).max() < 6


def test_brightness_multiplies_and_contrast_shrinks_towards_the_mean():
    half = uniform(60)
    half[:, :16] = 100
    np.testing.assert_array_equal(corrupt(half, "brightness", 1), np.rint(half * 1.3))
    np.testing.assert_array_equal(corrupt(half, "contrast", 1), np.rint(80 + 0.4 * (half.astype(float) - 80)))


def test_saturate_leaves_grey_alone():
    half = uniform(60)
    half[:, :16] = 200
    np.testing.assert_array_equal(corrupt(half, "saturate", 5), half)


def test_pixelate_keeps_cells_of_four_pixels():
    image = np.random.default_rng(0).integers(256, size=(1, 32, 32, 3), dtype=np.uint8)
    cells = repeat_pixels(block_mean(image, 4, 3), 4)
    np.testing.assert_allclose(corrupt(image, "pixelate", 5).astype(int), cells, atol=1)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_spatter_adds_water_or_covers_with_mud(severity):
    image = uniform(120)
    difference = corrupt(image, "spatter", severity).astype(int) - image
    wet = difference.any(axis=3)
    assert 0 < wet.mean() < 0.5
    if severity <= 3:
        assert (difference >= 0).all()
        assert (difference[wet][:, 2] >= difference[wet][:, 0]).all()
    else:
        assert (difference[wet] < 0).all()
        np.testing.assert_array_equal(np.argsort(image[wet] + difference[wet], axis=1)[:, 0], 2)


@given(
    arrays(np.uint8, st.sampled_from([(2, 8, 8, 1), (1, 4, 6, 3), (1, 1, 1, 1)])),
    st.integers(1, 5),
)
def test_block_mean_undoes_repeat_pixels(images, factor):
    np.testing.assert_array_equal(block_mean(repeat_pixels(images, factor), factor, images.shape[3]), images)


def test_block_mean_rounds_to_nearest_even():
    images = np.array([0, 1, 1, 2, 3, 4], dtype=np.uint8).reshape(1, 1, 2, 3)
    assert block_mean(images, 1, 1).flatten().tolist() == [1, 3]
    assert block_mean(np.array([[0, 0], [1, 1]], dtype=np.uint8).reshape(1, 2, 2, 1), 2, 1).item() == 0


def test_small_images_are_corrupted_large():
    small = np.random.default_rng(0).integers(256, size=(2, 8, 8, 1), dtype=np.uint8)
    large = corrupt(repeat_pixels(small, 4), "fog", 3, seed=5)
    np.testing.assert_array_equal(corrupt_small(small, "fog", 3, seed=5), block_mean(large, 4, 1))


def test_noise_on_small_grey_images_keeps_its_strength_and_its_independence():
    noise = corrupt_small(np.full((40, 8, 8, 1), 128, dtype=np.uint8), "gaussian_noise", 3)
    assert noise.std() / 255 == pytest.approx(0.18, rel=0.05)
    assert abs(np.corrcoef(noise[:, :, 1:].ravel(), noise[:, :, :-1].ravel())[0, 1]) < 0.06


def test_large_colour_images_go_straight_through(photographs):
    wide = np.concatenate([photographs, photographs], axis=2)
    for images in (photographs, wide):
        np.testing.assert_array_equal(corrupt_small(images, "snow", 2), corrupt(images, "snow", 2))


def test_other_canvases_and_grey_of_full_size():
    assert corrupt_small(np.zeros((1, 28, 28, 1), dtype=np.uint8), "frost", 1, size=56).shape == (1, 28, 28, 1)
    grey = corrupt_small(uniform(90)[..., :1], "brightness", 1)
    np.testing.assert_array_equal(grey, np.full((1, 32, 32, 1), 117))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": uniform(0) / 255}, TypeError, "float64"),
        ({"images": [[0]]}, TypeError, "list"),
        ({"images": uniform(0)[0]}, ValueError, r"\(32, 32, 3\)"),
        ({"images": uniform(0)[..., :1]}, ValueError, r"\(1, 32, 32, 1\)"),
        ({"images": uniform(0)[:, :31]}, ValueError, "31×32.*corrupt_small"),
        ({"name": "gausian_noise"}, ValueError, "gausian_noise.*gaussian_noise"),
        ({"severity": 0}, ValueError, "got 0"),
        ({"severity": 6}, ValueError, "got 6"),
        ({"severity": 1.0}, TypeError, "severity.*1.0"),
        ({"severity": True}, TypeError, "severity.*True"),
        ({"seed": -1}, ValueError, "seed.*-1"),
        ({"seed": "0"}, TypeError, "seed.*'0'"),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = {"images": uniform(0), "name": "fog", "severity": 1, **change}
    with pytest.raises(error, match=message):
        corrupt(**arguments)


def test_small_side_must_divide_the_size():
    with pytest.raises(ValueError, match=r"multiple of.*28; got 32"):
        corrupt_small(np.zeros((1, 28, 28, 1), dtype=np.uint8), "fog", 1)
