"""The kinds of value a key can have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from fleetx.config.kinds import Kind, boolean, choice, integer, key, names, number, numbers, optional, size
from fleetx.errors import ConfigError


def refusal(kind: Kind, value: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        kind.check("here", value)
    return str(caught.value)


def test_a_refusal_names_the_place_the_value_and_what_is_allowed() -> None:
    assert refusal(integer(1), 0) == "here is 0; it must be an integer of at least 1."


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        integer(1).check("here", 0)


@pytest.mark.parametrize("value", [1, 0, "True", None, 1.0])
def test_a_boolean_is_true_or_false_and_nothing_that_resembles_them(value: Any) -> None:
    assert refusal(boolean(), value) == f"here is {value!r}; it must be True or False."


@pytest.mark.parametrize("value", [True, 4.0, "4", None, math.nan])
def test_an_integer_is_not_a_bool_nor_a_float_nor_text(value: Any) -> None:
    assert refusal(integer(1), value) == f"here is {value!r}; it must be an integer of at least 1."


def test_an_integer_accepts_both_of_its_bounds() -> None:
    assert [integer(1, 3).check("here", value) for value in (1, 2, 3)] == [1, 2, 3]


def test_an_integer_says_its_upper_bound() -> None:
    assert refusal(integer(1, 3), 4) == "here is 4; it must be an integer of at least 1 and at most 3."


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.5", None])
def test_a_number_is_finite_and_not_a_bool(value: Any) -> None:
    assert refusal(number(), value) == f"here is {value!r}; it must be a finite number."


def test_a_number_becomes_a_float() -> None:
    value = number().check("here", 2)
    assert (value, type(value)) == (2.0, float)


def test_a_number_says_all_of_its_bounds() -> None:
    assert refusal(number(0.0, below=1.0), 1.0) == "here is 1.0; it must be a finite number at least 0 and below 1."


def test_an_open_bound_refuses_the_bound_itself() -> None:
    assert refusal(number(above=0.0), 0) == "here is 0; it must be a finite number above 0."


def test_a_closed_bound_accepts_the_bound_itself() -> None:
    assert number(0.0, 1.0).check("here", 1) == 1.0


def test_a_choice_says_every_choice() -> None:
    assert refusal(choice("paper", "fleet"), "papers") == "here is 'papers'; it must be one of 'paper', 'fleet'."


def test_a_choice_refuses_a_list_without_failing_on_its_type() -> None:
    assert "it must be one of" in refusal(choice("paper"), ["paper"])


def test_names_refuse_a_bare_string_because_it_would_be_read_letter_by_letter() -> None:
    assert refusal(names(), "bn") == """here is 'bn'; it must be a list of non-empty strings, such as ["norm", "bias"]."""
    assert refusal(names("head"), "bn") == """here is 'bn'; it must be a list of non-empty strings, such as ["head"]."""


@pytest.mark.parametrize("value", [[""], ["a", 3], [None], {"a": 1}])
def test_names_refuse_empty_and_foreign_elements(value: Any) -> None:
    assert "it must be a list of non-empty strings" in refusal(names(), value)


def test_names_give_a_list_of_their_own() -> None:
    given = ["a"]
    parsed = names().check("here", given)
    given.append("b")
    assert parsed == ["a"]


def test_numbers_check_each_element() -> None:
    assert refusal(numbers(number(0.0, below=1.0)), [0.5, 1.0]) == (
        "here is [0.5, 1.0]; it must be a non-empty list, each element a finite number at least 0 and below 1."
    )


def test_numbers_refuse_nan_among_them() -> None:
    assert "it must be a non-empty list" in refusal(numbers(number()), [0.5, math.nan])


def test_numbers_refuse_the_empty_list() -> None:
    assert "it must be a non-empty list" in refusal(numbers(number()), [])


def test_ascending_numbers_refuse_a_step_down() -> None:
    assert "it must be a non-empty ascending list" in refusal(numbers(number(), ascending=True), [0.9, 0.75])


def test_an_optional_kind_accepts_none() -> None:
    assert optional(integer(1)).check("here", None) is None


def test_an_optional_kind_still_checks_what_is_given() -> None:
    assert refusal(optional(integer(1)), 0) == "here is 0; it must be None or an integer of at least 1."


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (512, 512),
        ("512", 512),
        ("20GB", 20_000_000_000),
        ("20GiB", 20 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("4k", 4000),
        ("1tb", 10**12),
    ],
)
def test_a_size_is_read_in_thousands_or_with_an_i_in_1024s(value: Any, expected: int) -> None:
    assert size().check("here", value) == expected


@pytest.mark.parametrize("value", ["", "GB", "20 XB", "-1GB", "0GB", 0, True, 2.5, None, "nan"])
def test_a_size_refuses_what_is_no_positive_number_of_bytes(value: Any) -> None:
    assert 'it must be a number of bytes, such as 20_000_000_000, "20GB" or "20GiB"' in refusal(size(), value)


def test_the_default_list_of_a_key_is_not_shared_between_instances() -> None:
    @dataclass
    class Example:
        layers: list[str] = key(["norm"], names(), "layers")

    Example().layers.append("bias")
    assert Example().layers == ["norm"]
