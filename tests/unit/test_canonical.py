"""Canonical JSON: one text for one value, and a reader that trusts nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import canonical
from pulse.errors import FormatError, UnsupportedFormat

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(texts, values, max_size=4))
def test_an_object_survives_its_text_and_the_text_is_the_only_one(value):
    data = canonical.to_json(value)
    assert canonical.from_json(data, "x") == value
    assert data.isascii()
    for other in (json.dumps([value]).encode(), data + b"\n", b" " + data, json.dumps(value, ensure_ascii=False).encode("utf-16")):
        with pytest.raises(FormatError, match=r"^x: not"):
            canonical.from_json(other, "x")


@given(st.dictionaries(texts, values, max_size=4), st.randoms())
def test_the_order_in_which_fields_were_put_does_not_matter(value, random):
    names = list(value)
    random.shuffle(names)
    assert canonical.to_json({name: value[name] for name in names}) == canonical.to_json(value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"1", b"null", b'"a"', b"{}x", b'{"a":01}', b'{"a":1.0e0}', b'{"a":-0}', b'{"a":1,"a":1}', b'{"a":Infinity}',
     b"\xff{}",
     b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'{"a":"\\ud83d"}', b"[" * 10**6, b'{"a":' + b"[" * 10**6, b'{"a":' + b"1" * 10**4 + b"}"],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_what_is_not_a_canonical_object_is_a_format_error(data):
    with pytest.raises(FormatError, match=r"^x: not"):
        canonical.from_json(data, "x")


def test_a_whole_surrogate_pair_is_text():
    assert canonical.from_json(b'{"a":"\\ud83d\\ude00"}', "x") == {"a": "\N{GRINNING FACE}"}


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.0, True, "1", None, [1], 10**4000], ids=lambda value: repr(value)[:9])
def test_only_integers_from_0_to_2_to_the_63_are_natural_numbers(value):
    with pytest.raises(FormatError, match="not a natural number"):
        canonical.natural(value)


def test_natural_numbers_are_read():
    assert [canonical.natural(value) for value in (0, (1 << 63) - 1)] == [0, (1 << 63) - 1]


@pytest.mark.parametrize("value", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64, " " * 64, "\uff10" * 64, 64, None, ["0"] * 64])
def test_a_sha256_is_64_lower_case_digits(value):
    with pytest.raises(FormatError, match=r"digits|not a string"):
        canonical.sha256_digits(value)


def test_readers_of_lists_optional_values_and_fields_go_through_their_parts():
    read = canonical.tuple_of(canonical.optional(canonical.natural))
    assert read([1, None]) == (1, None)
    assert canonical.fields({"a": 1, "b": "x"}, a=canonical.natural, b=canonical.text) == {"a": 1, "b": "x"}
    for value in ("ab", {"a": 1}, None, 3):
        with pytest.raises(FormatError, match="not a list"):
            read(value)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ([], "not an object"),
        ({}, r"missing fields \['a'\]"),
        ({"a": 1, "z": 2}, r"unknown fields \['z'\]"),
        ({"a": "x"}, "a: 'x' is not a natural number"),
    ],
)
def test_exactly_the_fields_asked_for_must_be_there_and_the_wrong_one_is_named(value, found):
    with pytest.raises(FormatError, match=found):
        canonical.fields(value, a=canonical.natural)


def test_a_field_that_this_reader_does_not_know_stays_a_wish_for_an_upgrade():
    def read(value):
        raise UnsupportedFormat(f"feature {value}")

    with pytest.raises(UnsupportedFormat, match="a: feature 7"):
        canonical.fields({"a": 7}, a=read)


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", ["x" * 10**6, list(range(10**5)), {str(i): i for i in range(10**5)}, deep(900)], ids=["text", "list", "object", "deep"]
)
def test_a_value_in_a_message_is_short_whatever_it_is(value):
    assert len(canonical.shown(value)) < 400
