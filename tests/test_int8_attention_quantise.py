"""Grouped int8: the bound on its error, its extremes, and the faults of the formula that it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from speceyes.plugins.int8_attention.quantise import dequantise, quantise

LIMIT = float(np.finfo(np.float32).max)
FLOATS = st.floats(-LIMIT, LIMIT, width=32)
ULP = np.finfo(np.float32).eps


def in_groups(values: np.ndarray, groups: int) -> np.ndarray:
    return values.reshape(*values.shape[:-1], groups, -1)


@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(24)), elements=FLOATS), st.sampled_from([1, 2, 8]))
def test_the_error_is_at_most_half_a_step(values: np.ndarray, groups: int) -> None:
    packed = quantise(values, groups)
    assert packed.codes.dtype == np.int8 and packed.scales.dtype == np.float32
    assert np.abs(packed.codes.astype(int)).max() <= 127
    assert (packed.scales >= np.finfo(np.float32).tiny).all()
    exact = packed.codes.reshape(*packed.scales.shape, -1).astype(np.float64) * packed.scales[..., None]
    grouped = in_groups(values, groups).astype(np.float64)
    rounding = 2 * ULP * np.abs(grouped).max(-1, keepdims=True)
    assert (np.abs(exact - grouped) <= packed.scales[..., None] / 2 + rounding).all()


@given(hnp.arrays(np.float32, (3, 16), elements=FLOATS), st.sampled_from([1, 4]))
def test_the_largest_magnitude_is_127_steps(values: np.ndarray, groups: int) -> None:
    packed = quantise(values, groups)
    largest = np.abs(in_groups(values, groups)).max(-1)
    codes = np.abs(in_groups(packed.codes, groups).astype(int)).max(-1)
    np.testing.assert_array_equal(codes[largest > 1e-35], 127)
    np.testing.assert_array_equal(packed.scales[largest == 0], 1)


@given(hnp.arrays(np.float32, (4, 8), elements=st.floats(0, 1e6, width=32)))
def test_one_sided_values_keep_their_sign_and_are_mirrored(values: np.ndarray) -> None:
    up, down = quantise(values), quantise(-values)
    assert (up.codes >= 0).all()
    np.testing.assert_array_equal(up.codes, -down.codes)
    np.testing.assert_array_equal(up.scales, down.scales)


def test_zeros_extremes_and_tiny_values() -> None:
    top = np.finfo(np.float32).max
    values = np.array([[0, 0], [top, -top], [1e-40, -1e-44], [-3, 0]], np.float32)
    codes, scales = quantise(values)
    np.testing.assert_array_equal(codes, [[0, 0], [127, -127], [0, 0], [-127, 0]])
    np.testing.assert_array_equal(
        scales[:, 0], np.array([1, top / np.float32(127), 1, np.float32(3) / 127], np.float32)
    )


def test_ties_round_to_even() -> None:
    np.testing.assert_array_equal(quantise(np.array([[127, 0.5, 1.5, -2.5]], np.float32)).codes, [[127, 0, 2, -2]])


def test_a_group_is_not_coarsened_by_its_neighbour() -> None:
    values = np.array([[1000.0, 1000.0, 0.001, 0.002]], np.float32)
    np.testing.assert_array_equal(quantise(values).codes, [[127, 127, 0, 0]])
    np.testing.assert_array_equal(quantise(values, 2).codes, [[127, 127, 64, 127]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_int8_cannot_hold_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantise(np.array([[1, bad]], np.float32))


@pytest.mark.parametrize("groups", [0, 3, 16])
def test_groups_must_divide_the_channels(groups: int) -> None:
    with pytest.raises(ValueError, match=rf"quant_groups: found {groups}; a divisor of the 8 channels"):
        quantise(np.ones((2, 8), np.float32), groups)


def documented(values: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """The formula of the source document: one scale for all values, absmax / 127.5, clipped to -128 … 127."""
    with np.errstate(invalid="ignore"):
        scale = np.abs(values).max() / np.float32(127.5)
        return np.rint(values / scale).clip(-128, 127), scale


def test_the_documented_formula_is_lopsided_and_makes_zeros_nan() -> None:
    """Regression example: 127.5 steps do not fit, so that the largest magnitude is off by half a step and more where
    it is positive, x and -x have different codes, and zeros are divided by zero."""
    values = np.array([[-51.0, 51.0, 20.4]], np.float32)
    codes, scale = documented(values)
    np.testing.assert_array_equal(codes, [[-128, 127, 51]])
    assert np.abs(codes * scale - values).max() >= 0.499 * scale
    assert np.isnan(documented(np.zeros(3, np.float32))[0]).all()

    ours = quantise(values)
    np.testing.assert_array_equal(ours.codes, [[-127, 127, 51]])
    assert np.abs(dequantise(ours) - values)[:, :2].max() <= 4 * ULP * 51
    np.testing.assert_array_equal(quantise(np.zeros((1, 3), np.float32)).codes, [[0, 0, 0]])


def test_features_are_packed_to_little_more_than_a_quarter() -> None:
    features = np.random.default_rng(0).standard_normal((64, 576)).astype(np.float32)
    packed = quantise(features, 8)
    assert packed.scales.shape == (64, 8)
    assert packed.nbytes == 64 * (576 + 8 * 4) < 0.27 * features.nbytes
    half_steps = packed.scales.repeat(72, axis=1) / 2
    assert (np.abs(dequantise(packed) - features) <= half_steps * 1.0001).all()
