"""The entropy coder gives its numbers back, its compiled twin writes the same bytes, and both refuse the same ones."""

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import coder, kernels
from pulse.errors import FormatError
from pulse.kernels.coder import FULL, MALFORMED

WIDTHS = [8, 16, 32, 64]
MOST_MEAN = (1 << 40) - 1


def compiled(ranks, folded, starts, means, check, room=None):
    """The compiled twin's bytes, or `None` where the room of so many words does not do."""
    out = np.full(48 * (len(ranks) + len(means) + 1) if room is None else room, 0xFFFFFFFF, np.uint32)
    arrays = np.array(ranks, np.uint32), np.array(folded, np.uint64), np.array(starts, np.int64), np.array(means, np.uint64)
    low, width, words = kernels.encode(*arrays, np.uint64(check), coder.START.copy(), out)
    return None if words == FULL else coder.finish(out[:words].astype(">u4").tobytes(), int(low), int(width))


def plainly(data, means, count, size, width):
    """What the plain decoder says, `None` for a refusal."""
    try:
        return coder.decode(data, len(means), means, count, size, (1 << width) - 1)
    except FormatError:
        return None


def compiled_back(data, means, count, size, width):
    """What the compiled decoder says, `None` for a refusal."""
    ranks, folded, starts = np.empty(count, np.uint32), np.empty(count, np.uint64), np.zeros(len(means) + 1, np.int64)
    limits = np.uint64(size), np.uint64((1 << width) - 1)
    check, found = kernels.decode(
        np.frombuffer(data, np.uint8), np.array(means, np.uint64), *limits, coder.START.copy(), ranks, folded, starts
    )
    if found != count:
        assert found == MALFORMED or found < count
        return None
    return ranks.tolist(), folded.tolist(), starts.tolist(), int(check)


def proven(ranks, folded, starts, means, check, size, width):
    """The bytes, the same from both, which both read back."""
    data = coder.encode(ranks, folded, starts, means, check)
    assert compiled(ranks, folded, starts, means, check) == data
    expected = (ranks, folded, starts, check)
    assert plainly(data, means, len(ranks), size, width) == expected
    assert compiled_back(data, means, len(ranks), size, width) == expected
    return data


@st.composite
def blocks(draw):
    """What a block may hold: (ranks, folded, starts, means, check, size, width)."""
    width, size = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from([1, 10, 1000, 1 << 22, 1 << 28]))
    steps = st.integers(1, 3) | st.integers(1, (1 << width) - 1) | st.integers(0, width - 1).map(lambda place: 1 << place)
    ranks, folded, starts = [], [], [0]
    for _ in range(draw(st.integers(1, coder.CLASSES))):
        near = st.integers(0, min(size, 20) - 1)
        held = sorted(draw(st.sets(near | st.integers(0, size - 1), max_size=8)))
        ranks += held
        folded += [draw(steps) for _ in held]
        starts.append(len(ranks))
    means = [draw(st.integers(1, 5000) | st.integers(1, MOST_MEAN)) for _ in starts[1:]]
    return ranks, folded, starts, means, draw(st.sampled_from([0, 1, (1 << 32) - 1]) | st.integers(0, (1 << 32) - 1)), size, width


@given(blocks())
def test_what_is_encoded_is_decoded_and_both_twins_agree_to_the_byte(block):
    proven(*block)


def drawn(rng, classes, most):
    """A block of many changes, some of them dense."""
    width, size = rng.choice(WIDTHS), rng.choice([most, 1000 * most, 1 << 28])
    top = rng.choice([1, 2, 5, (1 << width) - 1])
    ranks, folded, starts = [], [], [0]
    for _ in range(classes):
        held = sorted(rng.sample(range(rng.choice([most, size])), rng.randint(0, most)))
        ranks += held
        folded += [rng.randint(1, top) for _ in held]
        starts.append(len(ranks))
    means = [rng.choice([1, 256, 5000, 1 << 30, MOST_MEAN]) for _ in range(classes)]
    return ranks, folded, starts, means, rng.getrandbits(32), size, width


@pytest.mark.parametrize("seed", range(24))
def test_long_blocks_in_which_every_context_learns_agree_too(seed):
    rng = random.Random(seed)
    proven(*drawn(rng, rng.choice([1, 3, 16]), rng.choice([30, 300, 1500])))


def test_numbers_at_every_border_of_the_code_survive():
    gaps = sorted({max(0, n + d) for k in range(28) for n in (1 << k, 16 << k) for d in (-1, 0, 1)})
    ranks = np.cumsum([gap + 1 for gap in gaps if gap < 1 << 22]) - 1
    folded = [n for k in range(64) for n in ((1 << k) - 1, 1 << k, (1 << k) + 1) if 0 < n < 1 << 64] + [(1 << 64) - 1]
    for mean in [1, 2, 255, 256, 257, 511, 512, 1 << 16, (1 << 17) - 1, 1 << 17, 1 << 28, MOST_MEAN]:
        held = min(len(ranks), len(folded))
        proven(ranks[:held].tolist(), folded[-held:], [0, held], [mean], 7, 1 << 28, 64)
    proven(list(range(len(folded))), folded, [0, len(folded)], [256], 7, 1 << 28, 64)


def test_a_carry_runs_through_words_that_are_settled():
    rng = random.Random(0)
    carried = 0
    for _ in range(5):
        ranks = sorted(rng.sample(range(200), 40))
        wire = coder.encode(ranks, [rng.randint(1, 5000) for _ in ranks], [0, 40], [1024], 3)
        brink = wire[:12] + b"\xff" * 20  # of these decisions, some lead to just below a border, others past it
        found, folded, starts = np.zeros(40, np.uint32), np.zeros(40, np.uint64), np.zeros(2, np.int64)
        limits = np.uint64(1 << 28), np.uint64((1 << 64) - 1)
        kernels.decode(np.frombuffer(brink, np.uint8), np.array([1024], np.uint64), *limits, coder.START.copy(), found, folded, starts)
        for kept in range(6, 20):
            for gap, step in [(0, 1), (20, 9999)]:
                tail = [int(found[kept - 1]) + (1 + gap) * (i + 1) for i in range(40 - kept)]
                block = found[:kept].tolist() + tail, folded[:kept].tolist() + [step] * len(tail), [0, 40], [1024], 1
                data = coder.encode(*block)
                assert compiled(*block) == data
                carried += data[:12] > wire[:12] and data[12:16] == bytes(4)
    assert carried > 5


@pytest.mark.parametrize("seed", range(6))
def test_an_encoder_with_too_little_room_says_so_and_writes_no_further(seed):
    rng = random.Random(seed)
    ranks, folded, starts, means, check, *_ = drawn(rng, 4, 200)
    data = coder.encode(ranks, folded, starts, means, check)
    tight = -(-len(data) // 4) + 96
    assert compiled(ranks, folded, starts, means, check, tight) == data
    for room in {0, 1, 47, 48, 49, 100, tight // 2, max(tight - 160, 0)}:
        assert compiled(ranks, folded, starts, means, check, room) in (None, data)
    assert compiled(ranks, folded, starts, means, check, 0) is None


def test_one_change_never_takes_more_than_the_room_kept_for_it():
    for mean in (1, 256, MOST_MEAN):
        for step in (1, (1 << 63) + 1, (1 << 64) - 1):
            ranks = [i * 1000 for i in range(50)] + [1 << 27]
            data = coder.encode(ranks, [step] * 51, [0, 51], [mean], 5)
            assert len(data) < 4 * 48 * 51
            assert compiled(ranks, [step] * 51, [0, 51], [mean], 5) == data


@given(st.binary(max_size=60), st.lists(st.integers(1, MOST_MEAN), min_size=1, max_size=3), st.integers(0, 12), st.sampled_from(WIDTHS))
def test_both_twins_make_the_same_of_arbitrary_bytes(data, means, count, width):
    for size in (5, 1 << 28):
        found = plainly(data, means, count, size, width)
        assert found == compiled_back(data, means, count, size, width)
        assert found is None or coder.encode(*found[:3], means, found[3]) == data


@given(blocks(), st.binary(min_size=1, max_size=9))
def test_no_other_bytes_mean_the_same_changes(block, more):
    ranks, folded, starts, means, check, size, width = block
    wire = coder.encode(ranks, folded, starts, means, check)
    for other in {wire + more, wire[:-1], wire[:-1] + more, (int.from_bytes(wire, "big") + 1).to_bytes(len(wire) + 1, "big")[1:]} - {wire}:
        for found in (plainly(other, means, len(ranks), size, width), compiled_back(other, means, len(ranks), size, width)):
            assert found != (ranks, folded, starts, check)


@given(blocks(), st.data())
def test_both_twins_make_the_same_of_altered_bytes_and_of_other_limits(block, data):
    ranks, folded, starts, means, check, size, width = block
    wire = bytearray(coder.encode(ranks, folded, starts, means, check))
    if wire and data.draw(st.booleans()):
        wire[data.draw(st.integers(0, len(wire) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    end = data.draw(st.integers(0, len(wire)) | st.just(len(wire)))
    wire = bytes(wire[:end]) + data.draw(st.sampled_from([b"", b"", b"\0", b"\x01", b"\xff" * 9]))
    count = max(0, len(ranks) + data.draw(st.integers(-1, 1)))
    size, width = data.draw(st.sampled_from([size, max(ranks, default=0), 1])), data.draw(st.sampled_from([width, 8]))
    found = plainly(wire, means, count, size, width)
    assert found == compiled_back(wire, means, count, size, width)
    if found is not None:
        got, steps, borders, again = found
        assert coder.encode(got, steps, borders, means, again) == wire
        assert len(got) == len(steps) == count == borders[-1]
        assert all(0 < step < 1 << width for step in steps)
        for lo, hi in pairwise(borders):
            assert all(a < b for a, b in pairwise([-1, *got[lo:hi], size]))


def test_bytes_that_end_in_zeros_or_go_on_too_long_are_refused():
    block = [3, 9, 4], [1, 2, 77], [0, 2, 3], [300, 5000], 0x01020304
    data = coder.encode(*block)
    assert plainly(data, block[3], 3, 100, 16) is not None
    for longer in (data + b"\0", data + b"\0" * 20, data + b"\x01" * 20, data + data):
        assert plainly(longer, block[3], 3, 100, 16) is None
        assert compiled_back(longer, block[3], 3, 100, 16) is None
    for other in (2, 4):
        assert plainly(data, block[3], other, 100, 16) is None
        assert compiled_back(data, block[3], other, 100, 16) is None


def test_the_start_of_every_context_is_a_probability_and_follows_the_geometric_law():
    assert coder.START.shape == (coder.CONTEXTS, 2)
    assert coder.START.min() >= coder.LEAST
    assert coder.START.max() <= coder.MOST
    for mean in (0.25, 1.0, 4.0, 16.0):  # units; no low bits there
        octave = int(np.floor(np.log2(mean * 256)))
        quarter = int(mean * 256 * 4 / 2**octave) & 3
        centre = (9 + 2 * quarter) / 8 * 2.0**octave / 256
        if octave <= 8:
            assert coder.START[(4 * octave + quarter) * coder.GAP, 0] / 65536 == pytest.approx(1 / (1 + centre), abs=0.01)


# Written into docs/format.md: ranks, folded steps, starts, means, check, and the bytes.
VECTORS = [
    (([], [], [0, 0], [256], 0x89ABCDEF), "044d5e6f78"),
    (([2, 7, 8], [2, 1, 300], [0, 3], [512], 0x01234567), "11199a35e3a90ee6a9"),
]


@pytest.mark.parametrize(("block", "expected"), VECTORS)
def test_the_vectors_of_the_specification_hold(block, expected):
    assert proven(*block, 1 << 22, 16).hex() == expected


@given(blocks())
def test_ranks_alone_are_written_without_steps_and_both_twins_agree_to_the_byte(block):
    ranks, _, starts, means, check, size, _ = block
    data = coder.encode(ranks, [], starts, means, check)
    assert compiled(ranks, [], starts, means, check) == data
    assert coder.decode(data, len(means), means, len(ranks), size, 0) == (ranks, [], starts, check)
    assert compiled_ranks(data, means, len(ranks), size) == (ranks, starts, check)


@pytest.mark.parametrize("seed", range(6))
def test_long_blocks_of_ranks_alone_agree_too_and_are_shorter(seed):
    ranks, folded, starts, means, check, size, _ = drawn(random.Random(seed), 3, 1500)
    data = coder.encode(ranks, [], starts, means, check)
    assert len(data) < len(coder.encode(ranks, folded, starts, means, check))
    assert compiled(ranks, [], starts, means, check) == data
    assert compiled_ranks(data, means, len(ranks), size) == (ranks, starts, check)


@given(
    st.binary(max_size=40), st.lists(st.integers(1, MOST_MEAN), min_size=1, max_size=3), st.integers(0, 12), st.sampled_from([5, 1 << 28])
)
def test_both_twins_make_the_same_of_arbitrary_bytes_for_ranks_alone(data, means, count, size):
    try:
        ranks, _, starts, check = coder.decode(data, len(means), means, count, size, 0)
    except FormatError:
        assert compiled_ranks(data, means, count, size) is None
    else:
        assert compiled_ranks(data, means, count, size) == (ranks, starts, check)
        assert coder.encode(ranks, [], starts, means, check) == data


def compiled_ranks(data, means, count, size):
    """What the compiled decoder says of ranks without steps, `None` for a refusal."""
    ranks, nothing, starts = np.empty(count, np.uint32), np.empty(0, np.uint64), np.zeros(len(means) + 1, np.int64)
    limits = np.uint64(size), np.uint64(0)
    code, start = np.frombuffer(data, np.uint8), np.array(means, np.uint64)
    check, found = kernels.decode(code, start, *limits, coder.START.copy(), ranks, nothing, starts)
    return (ranks.tolist(), starts.tolist(), int(check)) if found == count else None
