"""One JSON value a line: what is written is read back, and nothing is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmm4edit.json_lines import DuplicateKeyError, decode_line, encode_line

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_round_trip_on_one_line(value: object) -> None:
    line = encode_line(value)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_line(line.decode()) == value


def test_text_stays_readable_and_half_a_pair_is_escaped() -> None:
    assert encode_line({"a": "猫"}) == '{"a": "猫"}\n'.encode()
    assert encode_line("a\ud83d") == b'"a\\ud83d"\n'
    assert decode_line('"a\\ud83d"') == "a\ud83d"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_numbers_that_json_does_not_have(value: object) -> None:
    with pytest.raises(ValueError, match="^Out of range float values are not JSON compliant"):
        encode_line(value)


def test_a_key_given_twice() -> None:
    with pytest.raises(DuplicateKeyError, match="^the key 'b' stands twice$"):
        decode_line('{"a": {"b": 1, "c": 2, "b": 3}}')


def test_nesting_beyond_reason() -> None:
    with pytest.raises(ValueError, match="^brackets are nested too deeply$"):
        decode_line("[" * 200_000)
