"""The step-time model: what a step costs, and what cannot be a cost."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from sgalloc.replay.clock import StepTime

FIELDS = ("base", "per_prefill_token", "per_request")


def test_a_step_costs_its_base_its_prefilled_tokens_and_its_requests():
    model = StepTime(base=1.0, per_prefill_token=0.25, per_request=0.5)
    assert model.seconds(0, 0) == 1.0
    assert model.seconds(8, 0) == 3.0
    assert model.seconds(0, 6) == 4.0
    assert model.seconds(8, 6) == 6.0


def test_the_three_parts_are_independent():
    for name, prefilled, decoding in (
        ("base", 0, 0),
        ("per_prefill_token", 1, 0),
        ("per_request", 0, 1),
    ):
        model = StepTime(**{"base": 1e-6, "per_prefill_token": 0.0, "per_request": 0.0, name: 2.0})
        base = 2.0 if name == "base" else 1e-6 + 2.0
        assert model.seconds(prefilled, decoding) == pytest.approx(base, rel=1e-12)


def test_the_defaults_are_the_machine_that_the_docstring_describes():
    model = StepTime()
    assert model.seconds(0, 1) == pytest.approx(7e-3, rel=0.01)
    assert model.seconds(0, 256) == pytest.approx(15e-3, rel=0.03)
    # 20,000 prefilled tokens a second, the fixed part of the step left out.
    assert model.seconds(20_000, 0) - model.seconds(0, 0) == pytest.approx(1.0)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [-1e-9, -1.0, 1e3 + 1, math.nan, math.inf, -math.inf])
def test_numbers_that_cannot_be_a_time_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} is {value!r}: give a number from "):
        StepTime(**{name: value})


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", ["0.1", None, True, [0.1], 1j])
def test_what_is_no_number_is_refused_by_name(name, value):
    with pytest.raises(ValueError) as caught:
        StepTime(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name} is {value!r}:") and "\n" not in text


def test_a_step_always_takes_time_but_its_parts_may_cost_nothing():
    with pytest.raises(ValueError, match=r"^base is 0\.0"):
        StepTime(base=0.0)
    least = StepTime(base=1e-6, per_prefill_token=0, per_request=0)
    assert least.seconds(10**6, 10**6) == 1e-6


def test_numpy_numbers_will_do():
    model = StepTime(np.float64(2.0), np.float32(0.5), np.int64(1))
    assert model.seconds(2, 3) == 6.0


@pytest.mark.parametrize("name", FIELDS)
def test_a_clock_does_not_change(name):
    model = StepTime()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(model, name, 1.0)
    assert model == StepTime()
