"""The coder of values gives its numbers back, its compiled twin writes the same bytes, and both refuse the same ones."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import kernels, value_coder
from pulse.coder import finish
from pulse.errors import FormatError
from pulse.kernels import FULL, MALFORMED
from pulse.value_coder import MANTISSA, PLACES, RAW, ROWS, dropped

DIGITS = (32, 24, 8, 4, 2)


def arrays(rows, tops, far, beyond, raw):
    return (
        np.array(rows, np.uint8),
        np.array(tops, np.int32),
        np.array(far, np.uint8),
        np.array(beyond, np.uint32),
        np.array(raw, np.uint32),
    )


def compiled(rows, tops, far, beyond, raw, digits, room=None):
    """The compiled twin's bytes, or `None` where the room of so many words does not do."""
    out = np.full(16 * (len(rows) + 1) if room is None else room, 0xFFFFFFFF, np.uint32)
    low, width, words = kernels.encode_values(*arrays(rows, tops, far, beyond, raw), digits, value_coder.START.copy(), out)
    return None if words == FULL else finish(out[:words].astype(">u4").tobytes(), int(low), int(width))


def plainly(data, rows, tops, digits):
    """What the plain decoder says, `None` for a refusal."""
    try:
        return value_coder.decode(data, rows, tops, digits)
    except FormatError:
        return None


def compiled_back(data, rows, tops, digits):
    """What the compiled decoder says, `None` for a refusal."""
    rows, tops, *found = arrays(rows, tops, rows, rows, rows)
    number = kernels.decode_values(np.frombuffer(data, np.uint8), rows, tops, digits, value_coder.START.copy(), *found)
    if number != rows.size:
        assert number == MALFORMED
        return None
    return tuple(column.tolist() for column in found)


def proven(rows, tops, far, beyond, raw, digits):
    """The bytes, the same from both, which both read back."""
    data = value_coder.encode(rows, tops, far, beyond, raw, digits)
    assert compiled(rows, tops, far, beyond, raw, digits) == data
    assert plainly(data, rows, tops, digits) == (far, beyond, raw)
    assert compiled_back(data, rows, tops, digits) == (far, beyond, raw)
    return data


def entry(draw_int, digits):
    """(row, top, far, beyond, raw) of one entry, from a function that draws integers."""
    row = draw_int(0, ROWS - 1)
    if draw_int(0, 5) == 0:
        return row, draw_int(-400, 400), 0, 0, draw_int(0, (1 << 32) - 1)
    place = draw_int(0, PLACES - 1)
    number = 1 << place | draw_int(0, (1 << place) - 1)
    left_out = dropped(place, digits)
    return row, place + draw_int(0, RAW - 1), draw_int(0, 1), number >> left_out << left_out, 0


@st.composite
def blocks(draw):
    """What a block may hold: (rows, tops, far, beyond, raw, digits)."""
    digits = draw(st.sampled_from(DIGITS))
    entries = [entry(lambda lo, hi: draw(st.integers(lo, hi)), digits) for _ in range(draw(st.integers(0, 12)))]
    return *columns(entries), digits


def columns(entries):
    return [list(column) for column in zip(*entries, strict=True)] if entries else [[]] * 5


def drawn(seed, size):
    """A block of many values."""
    rng = random.Random(seed)
    digits = rng.choice(DIGITS)
    entries = [entry(rng.randint, digits) for _ in range(size)]
    return *columns(entries), digits


@given(blocks())
def test_what_is_encoded_is_decoded_and_both_twins_agree_to_the_byte(block):
    proven(*block)


@pytest.mark.parametrize("seed", range(12))
def test_long_blocks_in_which_every_context_learns_agree_too(seed):
    proven(*drawn(seed, random.Random(seed).choice([50, 400, 4000])))


@pytest.mark.parametrize("digits", DIGITS)
def test_numbers_at_every_border_of_the_code_survive(digits):
    numbers = sorted({n for k in range(PLACES) for n in (1 << k, (1 << k) + 1, (2 << k) - 1) if n < 1 << PLACES})
    places = [n.bit_length() - 1 for n in numbers]
    numbers = [n >> dropped(place, digits) << dropped(place, digits) for n, place in zip(numbers, places, strict=True)]
    zeros = [0] * len(numbers)
    for difference in (0, 1, 31, 32, RAW - 1):
        for row in (0, ROWS - 1):
            tops = [place + difference for place in places]
            proven([row] * len(numbers), tops, [i & 1 for i in range(len(numbers))], numbers, zeros, digits)


def test_so_many_bits_are_left_out_as_digits_say_and_never_a_whole_octave_of_a_weight():
    for digits in DIGITS:
        for place in range(PLACES):
            kept = place + 1 - dropped(place, digits)
            assert kept == min(place + 1, digits) if place < MANTISSA else dropped(place, digits) == max(MANTISSA - digits, 0)
    assert [dropped(place, 32) for place in range(PLACES)] == [0] * PLACES
    assert [dropped(place, 8) for place in (7, 8, 22, 23, 31)] == [0, 1, 15, 16, 16]


@pytest.mark.parametrize("seed", range(4))
def test_an_encoder_with_too_little_room_says_so_and_writes_no_further(seed):
    block = drawn(seed, 200)
    data = value_coder.encode(*block)
    tight = -(-len(data) // 4) + 32
    assert compiled(*block, room=tight) == data
    for room in {0, 1, 15, 16, 17, tight // 2, max(tight - 60, 0)}:
        assert compiled(*block, room=room) in (None, data)
    assert compiled(*block, room=0) is None


@given(st.binary(max_size=40), st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(-300, 350)), max_size=8), st.sampled_from(DIGITS))
def test_both_twins_make_the_same_of_arbitrary_bytes(data, known, digits):
    rows, tops = [row for row, _ in known], [top for _, top in known]
    found = plainly(data, rows, tops, digits)
    assert found == compiled_back(data, rows, tops, digits)
    assert found is None or value_coder.encode(rows, tops, *found, digits) == data


@given(blocks(), st.data())
def test_both_twins_make_the_same_of_altered_bytes_and_of_other_weights(block, data):
    rows, tops, far, beyond, raw, digits = block
    wire = bytearray(value_coder.encode(*block))
    if wire and data.draw(st.booleans()):
        wire[data.draw(st.integers(0, len(wire) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    end = data.draw(st.integers(0, len(wire)) | st.just(len(wire)))
    wire = bytes(wire[:end]) + data.draw(st.sampled_from([b"", b"", b"\0", b"\x01", b"\xff" * 9]))
    by, digits = data.draw(st.integers(-2, 2)), data.draw(st.sampled_from([digits, *DIGITS]))
    tops = [top + by for top in tops]
    found = plainly(wire, rows, tops, digits)
    assert found == compiled_back(wire, rows, tops, digits)
    if found is not None:
        assert value_coder.encode(rows, tops, *found, digits) == wire
        assert all(number < 1 << PLACES for number in found[1])


def test_bytes_that_end_in_zeros_or_go_on_too_long_are_refused():
    block = drawn(3, 40)
    data = value_coder.encode(*block)
    rows, tops, digits = block[0], block[1], block[5]
    for other in (data + b"\0", data + b"\0" * 20, data + b"\x01" * 20, data + data):
        assert plainly(other, rows, tops, digits) is None
        assert compiled_back(other, rows, tops, digits) is None
    for other in (data[:-1], data[1:], b""):  # may mean other values: a payload's trailer digest tells
        assert plainly(other, rows, tops, digits) == compiled_back(other, rows, tops, digits) != (block[2], block[3], block[4])
    assert plainly(b"", [], [], 32) == ([], [], [])
    assert compiled_back(b"", [], [], 32) == ([], [], [])


def test_a_value_that_would_lie_outside_its_places_is_refused():
    data = value_coder.encode([0], [20], [0], [1 << 10], [0], 32)
    for top in (9, -300, 42, 300):  # places below 0 and from 32 on
        assert plainly(data, [0], [top], 32) is None
        assert compiled_back(data, [0], [top], 32) is None
