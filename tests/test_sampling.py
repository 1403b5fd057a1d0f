"""Choosing tokens: equal to transformers' processors, and a function of (request, position) alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from speceyes.engines.errors import RequestError
from speceyes.runtime.options import Options
from speceyes.runtime.sampling import Sampling, choose, distribution, penalise, uniform
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

VOCABULARY = 97


def random_logits(seed):
    return np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1000),
    st.floats(0.2, 3.0),
    st.sampled_from([0, 1, 5, 40, 97, 200]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_distribution_equals_transformers_warpers(seed, temperature, top_k, top_p):
    logits = random_logits(seed)
    scores = torch.from_numpy(logits)[None].double()
    scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(-1)[0].numpy()
    tokens, probabilities = distribution(logits, Sampling(temperature, top_p, top_k))
    found = np.zeros(VOCABULARY)
    found[tokens] = probabilities
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_repetition_penalty_equals_transformers():
    logits = random_logits(3)
    ids = [4, 9, 9, 50]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), torch.from_numpy(logits.copy())[None])[0]
    seen = np.zeros(VOCABULARY, bool)
    seen[ids] = True
    np.testing.assert_allclose(penalise(logits, seen, 1.3), expected.numpy(), rtol=1e-6)


def test_greedy_takes_the_first_of_equal_logits():
    logits = np.zeros(VOCABULARY, np.float32)
    logits[[7, 30]] = 5
    assert choose(logits, Sampling(), np.zeros(VOCABULARY, bool), 0, 0) == 7


def test_choice_follows_the_distribution():
    logits = random_logits(1)
    sampling = Sampling(temperature=1.5, top_k=6)
    seen = np.zeros(VOCABULARY, bool)
    drawn = [choose(logits, sampling, seen, 11, position) for position in range(4000)]
    tokens, probabilities = distribution(logits, sampling)
    counts = np.array([drawn.count(token) for token in tokens])
    chi_square = ((counts - 4000 * probabilities) ** 2 / (4000 * probabilities)).sum()
    assert counts.sum() == 4000
    assert chi_square < 20.5  # 99.9 % quantile at 5 degrees of freedom


def test_random_numbers_depend_on_seed_and_position_alone():
    assert uniform(5, 3) == uniform(5, 3)
    assert len({uniform(seed, position) for seed in range(10) for position in range(10)}) == 100
    assert 0 <= uniform(2**64 - 1, 2**40) < 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -1}, "temperature: found -1"),
        ({"temperature": float("nan")}, "temperature: found nan"),
        ({"top_p": 0}, "top_p: found 0"),
        ({"top_k": -3}, "top_k: found -3"),
        ({"repetition_penalty": 0}, "repetition_penalty: found 0"),
        ({"seed": -1}, "seed: found -1"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
        ({"stop": [""]}, "stop: found"),
        ({"max_tokens": 3}, "did you mean 'max_new_tokens'"),
    ],
)
def test_options_out_of_range_are_named(values, named):
    with pytest.raises(RequestError, match=named.replace("[", r"\[")):
        Options.make(values)
