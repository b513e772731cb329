"""The model of accepted draft lengths: its mean, its distribution, its presets, bad numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from sgalloc.replay.acceptance import PRESETS, Acceptance, preset


@pytest.mark.parametrize("draft_tokens", [1, 2, 5, 16, 60])
@pytest.mark.parametrize("p", [Fraction(0), Fraction(1, 7), Fraction(5, 8), Fraction(999, 1000)])
def test_mean_is_the_closed_form(p, draft_tokens):
    exact = (1 - p ** (draft_tokens + 1)) / (1 - p)
    model = Acceptance(draft_tokens, p=float(p))
    assert model.mean == pytest.approx(float(exact), rel=1e-12)
    assert model.draft_tokens == draft_tokens


@pytest.mark.parametrize("draft_tokens", [1, 3, 16, 60, 1000])
@pytest.mark.parametrize("part", [1e-9, 0.01, 0.3, 0.7, 0.99, 1 - 1e-9])
def test_p_is_solved_from_the_mean(draft_tokens, part):
    mean = 1 + part * draft_tokens
    model = Acceptance(draft_tokens, mean=mean)
    assert 0 < model.p < 1
    assert model.mean == pytest.approx(mean, rel=1e-12)
    again = Acceptance(draft_tokens, p=model.p)
    assert again.mean == model.mean


def test_p_of_a_known_case():
    # One draft: 1 + p tokens. Two drafts: 1 + p + p * p = 1.75 at p = 0.5.
    assert Acceptance(1, mean=1.25).p == pytest.approx(0.25)
    assert Acceptance(2, mean=1.75).p == pytest.approx(0.5)


@pytest.mark.parametrize("number", [1, 1.0, np.float64(1), np.int64(1)])
def test_the_least_mean_accepts_nothing(number):
    model = Acceptance(4, mean=number)
    assert (model.p, model.mean) == (0.0, 1.0)
    assert model.draw(np.random.default_rng(0), 1000).tolist() == [1] * 1000


@pytest.mark.parametrize("number", [5, 5.0, np.float64(5), np.int64(5)])
def test_the_greatest_mean_accepts_all(number):
    model = Acceptance(4, mean=number)
    assert (model.p, model.mean) == (1.0, 5.0)
    assert model.draw(np.random.default_rng(0), 1000).tolist() == [5] * 1000


@pytest.mark.parametrize(("draft_tokens", "p"), [(1, 0.4), (7, 0.6), (16, 0.87), (60, 0.99)])
def test_draws_invert_the_distribution_number_by_number(draft_tokens, p):
    drawn = Acceptance(draft_tokens, p=p).draw(np.random.default_rng(5), 2000)
    expected = []
    for uniform in np.random.default_rng(5).random(2000).tolist():
        tokens = 1
        while tokens <= draft_tokens and uniform < p**tokens:
            tokens += 1
        expected.append(tokens)
    assert drawn.dtype == np.int64
    assert drawn.tolist() == expected


@pytest.mark.parametrize(("draft_tokens", "mean"), [(3, 2.5), (16, 3.23), (16, 7.87), (60, 3.71)])
def test_draws_have_the_frequencies_of_the_model(draft_tokens, mean):
    count = 200_000
    model = Acceptance(draft_tokens, mean=mean)
    drawn = model.draw(np.random.default_rng(1), count)
    assert drawn.min() >= 1 and drawn.max() <= draft_tokens + 1
    for tokens in range(1, draft_tokens + 2):
        at_least = model.p ** (tokens - 1)
        seen = np.count_nonzero(drawn >= tokens) / count
        error = 5 * np.sqrt(at_least * (1 - at_least) / count) + 5 / count
        assert abs(seen - at_least) <= error, tokens
    assert drawn.mean() == pytest.approx(mean, abs=5 * drawn.std() / np.sqrt(count))


def test_draws_depend_on_the_generator_alone_and_can_be_split():
    model = Acceptance(16, mean=4.24)
    first, second = np.random.default_rng(9), np.random.default_rng(9)
    parts = [model.draw(first, count) for count in (3, 0, 4)]
    assert [len(part) for part in parts] == [3, 0, 4]
    assert np.concatenate(parts).tolist() == model.draw(second, 7).tolist()
    assert first.random() == second.random()


@pytest.mark.parametrize(
    ("name", "mean", "draft_tokens", "least_p", "most_p"),
    [
        ("eagle3-16-low", 2.65, 16, 0.5, 0.8),
        ("eagle3-16-high", 3.23, 16, 0.5, 0.8),
        ("eagle3-60-low", 3.03, 60, 0.5, 0.8),
        ("eagle3-60-high", 3.71, 60, 0.5, 0.8),
        ("dflash-16-chat", 4.24, 16, 0.5, 0.8),
        ("dflash-16-maths", 7.87, 16, 0.8, 0.9),
    ],
)
def test_presets_are_the_published_values(name, mean, draft_tokens, least_p, most_p):
    model = preset(name)
    assert model.mean == pytest.approx(mean)
    assert model.draft_tokens == draft_tokens
    assert least_p <= model.p <= most_p
    assert model.draw(np.random.default_rng(0), 100_000).mean() == pytest.approx(mean, rel=0.02)


def test_presets_are_all_covered_and_take_another_bound():
    assert len(PRESETS) == 6
    model = preset("eagle3-16-high", draft_tokens=5)
    assert model.mean == pytest.approx(3.23)
    assert model.draw(np.random.default_rng(0), 10_000).max() == 6
    with pytest.raises(ValueError, match=r"mean is 7\.87: give a number from 1 to 7"):
        preset("dflash-16-maths", draft_tokens=6)


@pytest.mark.parametrize("name", ["eagle", "", None, ["dflash-16-chat"]])
def test_unknown_preset(name):
    with pytest.raises(ValueError, match="unknown: give one of eagle3-16-low") as caught:
        preset(name)
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"draft_tokens": 0, "p": 0.5}, "draft_tokens is 0"),
        ({"draft_tokens": -3, "p": 0.5}, "draft_tokens is -3"),
        ({"draft_tokens": 2.0, "p": 0.5}, "draft_tokens is 2.0"),
        ({"draft_tokens": True, "p": 0.5}, "draft_tokens is True"),
        ({"draft_tokens": float("nan"), "p": 0.5}, "draft_tokens is nan"),
        ({"draft_tokens": 10**12, "p": 0.5}, "draft_tokens is 1000000000000"),
        ({"draft_tokens": 4}, "exactly one"),
        ({"draft_tokens": 4, "mean": 2.0, "p": 0.5}, "exactly one"),
        ({"draft_tokens": 4, "mean": 0.99}, "mean is 0.99: give a number from 1 to 5"),
        ({"draft_tokens": 4, "mean": 5.01}, "mean is 5.01"),
        ({"draft_tokens": 4, "mean": float("nan")}, "mean is nan"),
        ({"draft_tokens": 4, "mean": float("inf")}, "mean is inf"),
        ({"draft_tokens": 4, "mean": 10**400}, "mean is 1000"),
        ({"draft_tokens": 4, "mean": "2"}, "mean is '2'"),
        ({"draft_tokens": 4, "mean": True}, "mean is True"),
        ({"draft_tokens": 4, "p": -0.1}, "p is -0.1: give a number from 0 to 1"),
        ({"draft_tokens": 4, "p": 1.1}, "p is 1.1"),
        ({"draft_tokens": 4, "p": float("nan")}, "p is nan"),
        ({"draft_tokens": 4, "p": [0.5]}, "p is [0.5]"),
    ],
)
def test_bad_numbers_are_refused(arguments, said):
    with pytest.raises(ValueError) as caught:
        Acceptance(**arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize("count", [-1, 1.0, True, None, float("nan")])
def test_bad_count_is_refused_and_draws_nothing(count):
    rng = np.random.default_rng(3)
    with pytest.raises(ValueError, match="n is"):
        Acceptance(4, p=0.5).draw(rng, count)
    assert rng.random() == np.random.default_rng(3).random()


@pytest.mark.parametrize("rng", [None, 3, np.random.RandomState(0)])
def test_bad_generator_is_refused(rng):
    with pytest.raises(ValueError, match="rng is"):
        Acceptance(4, p=0.5).draw(rng, 1)
