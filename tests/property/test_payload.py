"""What a payload carries arrives bit for bit, whatever the weights and the values; what is left out of a value stays behind exactly."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse.codec import payload, ranks, values
from pulse.codec.cells import borders, cells_of
from pulse.codec.payload import DIGITS, NOTHING, Anchor, Entries
from pulse.errors import BaseMismatch, FormatError, UnsupportedFormat
from tests import rounds
from tests.property.test_cells import TORCH, moved, numbers_of, places
from tests.rounds import VIEWS

FINITE = 0x7F7FFFFF
SPECIAL = [
    0,
    1,
    2,
    0x7FFFFF,
    0x800000,
    0x800001,
    0x3F800000,
    0x3F7FFFFF,
    0x3F808000,
    0x3F807FFF,
    0x3F818000,
    0x38D1B717,
    FINITE,
    FINITE - 1,
]
MORE = [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x33000000, 0x33000001, 0x387FC000, 0x43E00000, 0x477FF000]  # Inf, NaN, view ends
signs = st.sampled_from([0, 1 << 31])
finite = st.builds(int.__or__, st.sampled_from(SPECIAL) | st.integers(0, FINITE) | st.integers(0x36000000, 0x3A000000), signs)
patterns = finite | st.builds(int.__or__, st.sampled_from(MORE) | st.integers(0, 0x7FFFFFFF), signs)


def floats(bits):
    return np.array(bits, np.uint32).view(np.float32)


@st.composite
def rows(draw, weights=patterns, most=24):
    """(weights, positions, values): FP32 patterns of weights, and of values at some of them: any, or such as lead to a neighbour."""
    held = draw(st.lists(weights, min_size=0, max_size=most))
    at = sorted(draw(st.sets(st.integers(0, len(held) - 1)))) if held else []
    found = []
    for i in at:
        near = floats([held[i], held[i] & 0xFF800000, max(held[i] + draw(st.integers(-70000, 70000)), 0) & 0xFFFFFFFF])
        with np.errstate(all="ignore"):
            steps = [float(near[0] - near[2]), float(near[0] - near[1]), float(near[0] * np.float32(2))]
        usable = [step for step in steps if np.isfinite(np.float32(step)) and abs(step) < 3e38]
        choice = draw(st.sampled_from([*usable, None]))
        found.append(draw(finite) if choice is None else int(np.float32(choice).view(np.uint32)))
    return held, at, found


def settings():
    return st.tuples(st.sampled_from([*DIGITS]), st.booleans(), st.sampled_from([1, 2, 5, 7, 1 << 10, 1 << 28]))


def built(row, views, gated=True):
    """An anchor in about equal pieces, one for each view, and the entries."""
    held, at, found = row
    pieces = np.array_split(np.array(held, np.uint32), len(views))
    return Anchor(tuple(pieces), tuple(views), gated), Entries(np.array(at, np.uint64), floats(found))


def same(left, right):
    return np.array_equal(left.positions, right.positions) and np.array_equal(left.values.view(np.uint32), right.values.view(np.uint32))


@contextmanager
def plain_coders():
    """Inside, nothing goes through the compiled coders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_compiled_coder_pays", lambda _: False)
        patch.setattr(values, "_compiled_pays", lambda _: False)
        yield


def proven(anchor, entries, value_dtype="float32", block=1 << 28):
    """The payload, after everything that must hold of any has been checked."""
    encoded = payload.encode(entries, anchor, value_dtype=value_dtype, block=block, threads=1)
    (found,) = payload.decode([encoded.blob], anchor, threads=1)
    assert same(found, entries._replace(values=encoded.sent))
    with plain_coders():
        assert payload.encode(entries, anchor, value_dtype=value_dtype, block=block, threads=1).blob == encoded.blob
        assert same(payload.decode([encoded.blob], anchor, threads=1)[0], found)
    value, sent = entries.values, encoded.sent
    if value_dtype == "float32":
        assert np.array_equal(sent.view(np.uint32), value.view(np.uint32))
    zero = value == 0
    assert np.array_equal((sent + (value - sent)).view(np.uint32)[~zero], value.view(np.uint32)[~zero])
    assert np.array_equal(sent.view(np.uint32)[zero], value.view(np.uint32)[zero])
    assert (np.abs(sent) <= np.abs(value)).all()
    assert (np.signbit(sent) == np.signbit(value)).all()
    assert (sent != 0)[~zero].all()
    return encoded


@given(rows(), st.lists(st.sampled_from(VIEWS), min_size=1, max_size=4), settings())
def test_any_finite_values_of_any_weights_arrive_bit_for_bit_and_nothing_overshoots(row, views, setting):
    value_dtype, gated, block = setting
    proven(*built(row, views, gated), value_dtype, block)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("value_dtype", DIGITS)
@pytest.mark.parametrize("view", VIEWS)
def test_many_weights_and_values_of_every_size_arrive_too(view, value_dtype, gated):
    rng = np.random.default_rng(len(view))
    weights = rng.integers(0, 1 << 32, 3000, dtype=np.uint32)
    weights[::3] = (rng.standard_normal(1000) * 0.02).astype(np.float32).view(np.uint32)
    at = np.flatnonzero(rng.random(3000) < 0.7).astype(np.uint64)
    bits = rng.integers(0, 1 << 32, at.size, dtype=np.uint32)
    bits[::2] = (rng.standard_normal(bits[::2].size) * 10.0 ** rng.integers(-45, 38, bits[::2].size)).astype(np.float32).view(np.uint32)
    bits[~np.isfinite(bits.view(np.float32))] = 1
    proven(Anchor((weights,), (view,), gated), Entries(at, bits.view(np.float32)), value_dtype, 1000)


@pytest.mark.parametrize("units", [0, 1, 2, 100])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_no_entries_and_all_entries_of_no_weights_one_and_some(units, all_of_them):
    anchor = Anchor((np.arange(units, dtype=np.uint32) + np.uint32(0x3F800000),), ("BF16",))
    at = np.arange(units if all_of_them else 0, dtype=np.uint64)
    for block in (1, 3, 1 << 22):
        blob = proven(anchor, Entries(at, np.full(at.size, 0.25, np.float32)), block=block).blob
        assert payload.read(blob)[0].entries == at.size


def test_an_anchor_without_pieces_or_with_empty_ones_is_one_too():
    nothing = np.empty(0, np.uint32)
    proven(Anchor((), ()), NOTHING)
    proven(Anchor((nothing, nothing), ("F16", "BF16")), NOTHING)
    one = np.array([0x3F800000], np.uint32)
    proven(
        Anchor((nothing, one, nothing, one, nothing), ("F16", "BF16") * 2 + ("F32",)),
        Entries(np.arange(2, dtype=np.uint64), floats([1, 2])),
    )


@pytest.mark.parametrize("value_dtype", DIGITS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_real_round_arrives_and_takes_at_most_2_8_bytes_per_entry_with_all_framing(rank, value_dtype):
    anchor, entries = rounds.real(rank)
    assert 0.03 < entries.positions.size / anchor.units < 0.05
    blob = proven(anchor, entries, value_dtype).blob
    assert len(blob) <= {"float32": 2.8, "bfloat16": 2.2, "float8": 1.7}[value_dtype] * entries.positions.size


def test_of_a_real_round_nearly_all_values_are_moves_and_shortening_keeps_most_of_them():
    anchor, entries = rounds.real()
    known = anchor.at(entries.positions)
    for value_dtype, least in (("float32", 1.0), ("bfloat16", 0.99), ("float8", 0.9)):
        moves, sent = payload.values.moves_of(entries.values, known, DIGITS[value_dtype])
        assert (moves.beyond != 0).mean() > 0.99
        assert np.linalg.norm(sent) >= least * np.linalg.norm(entries.values)


@pytest.mark.parametrize("value_dtype", DIGITS)
def test_values_keep_their_digits_also_where_the_weight_is_zero_or_changes_its_sign(value_dtype):
    rng = np.random.default_rng(1)
    value = (rng.standard_normal(5000) * 10.0 ** rng.integers(-8, 3, 5000)).astype(np.float32)
    for scale in (0.0, 1e-12, 1e-3, 1.0):
        weights = (value * rng.standard_normal(5000) * scale).astype(np.float32)
        anchor = Anchor((weights.view(np.uint32),), ("BF16",), gated=False)
        sent = proven(anchor, Entries(np.arange(5000, dtype=np.uint64), value), value_dtype).sent
        assert (np.abs(value - sent) <= np.abs(value) * 2.0 ** (2 - DIGITS[value_dtype])).all()


@pytest.mark.parametrize("value_dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("view", TORCH)
@given(st.data())
def test_a_shortened_value_that_changed_the_view_still_does(view, value_dtype, data):
    most = int(numbers_of(view).max().view(np.uint32))
    bits = st.builds(int.__or__, st.integers(0, most) | st.sampled_from([b for b in SPECIAL if b <= most]), signs)
    check_visible(view, value_dtype, *built(data.draw(rows(bits)), [view]))


@pytest.mark.parametrize("value_dtype", ["bfloat16", "float8"])
@pytest.mark.parametrize("view", TORCH)
def test_that_holds_around_every_midpoint_and_for_moves_to_around_the_next_ones(view, value_dtype):
    rng = np.random.default_rng(0)
    weights = rng.choice(places(view)[0], 20_000)
    outward, inward = borders(weights, cells_of(view))
    out = rng.random(weights.size) < 0.5
    extra = rng.choice([-1, 0, 1, 2, 3, 5, 17, 255, 256, 257, 65_536, 65_541, 100_000], weights.size)
    target = moved(weights, np.where(out, outward + extra, -(inward + extra)))
    value = weights.view(np.float32) - target.view(np.float32)
    usable = np.isfinite(value)
    entries = Entries(np.arange(usable.sum(), dtype=np.uint64), value[usable])
    assert check_visible(view, value_dtype, Anchor((weights[usable],), (view,)), entries).mean() > 0.5


def check_visible(view, value_dtype, anchor, entries):
    """Which entries change the bits of a real cast: of all of these, what is sent changes them as well."""
    weights = torch.from_numpy(anchor.pieces[0].view(np.float32).copy())[torch.from_numpy(entries.positions.astype(np.int64))]
    sent = torch.from_numpy(payload.encode(entries, anchor, value_dtype=value_dtype, threads=1).sent)

    def bits(tensor):
        return tensor.to(TORCH[view]).view(torch.int16 if view.endswith("16") else torch.int8)

    value = torch.from_numpy(entries.values)
    changed = bits(weights) != bits(weights - value)
    assert (bits(weights) != bits(weights - sent))[changed].all()
    return changed.numpy()


def test_shortening_a_real_round_keeps_every_change_of_the_view():
    for rank in (0, 1):
        anchor, entries = rounds.real(rank)
        weights = np.concatenate(anchor.pieces).view(np.float32)[entries.positions]
        for value_dtype in ("bfloat16", "float8"):
            sent = payload.encode(entries, anchor, value_dtype=value_dtype).sent
            assert (rounds.bf16(weights) != rounds.bf16(weights - sent)).all()


@cache
def large():
    """Pieces of several views, large enough for every kernel, in several blocks."""
    return rounds.made(5, 120_000, ("BF16", "F16", "F8_E4M3", "BF16"))


def test_threads_change_nothing_and_the_size_of_blocks_changes_the_bytes_alone():
    anchor, entries = large()
    blobs = {block: payload.encode(entries, anchor, block=block, threads=1).blob for block in (3000, 50_000, 1 << 22)}
    assert len(set(blobs.values())) == 3
    for block, blob in blobs.items():
        for threads in (None, 2, 5):
            assert payload.encode(entries, anchor, block=block, threads=threads).blob == blob
            assert same(payload.decode([blob], anchor, threads)[0], entries)


def test_payloads_of_several_ranks_are_decoded_in_one_pass_as_each_alone_is():
    anchor, entries = large()
    some = [entries, NOTHING, Entries(entries.positions[::7], entries.values[::7] * np.float32(3)), Entries(*(row[:40] for row in entries))]
    blobs = [
        payload.encode(few, anchor, block=30_000, value_dtype=dtype).blob for few, dtype in zip(some, [*DIGITS, "float32"], strict=True)
    ]
    together = payload.decode([*blobs, blobs[0]], anchor)
    alone = [payload.decode([blob], anchor)[0] for blob in [*blobs, blobs[0]]]
    assert all(same(left, right) for left, right in zip(together, alone, strict=True))
    assert payload.decode([], anchor) == []
    other = payload.encode(entries, anchor, block=30_001).blob
    with pytest.raises(FormatError, match="one size"):
        payload.decode([blobs[0], other], anchor)


def test_how_an_anchor_is_cut_into_pieces_and_held_in_memory_changes_nothing():
    rng = np.random.default_rng(2)
    weights = rng.integers(0, 1 << 32, 40_000, dtype=np.uint32)
    entries = rounds.made(2, 40_000)[1]
    blob = payload.encode(entries, Anchor((weights,), ("F16",)), block=7000).blob
    fixed = weights.copy()
    fixed.flags.writeable = False
    for pieces in ([fixed], np.split(weights, [1, 5, 6999, 7001, 39_999]), [np.repeat(weights, 2)[::2]]):
        anchor = Anchor(tuple(pieces), ("F16",) * len(pieces))
        assert payload.encode(entries, anchor, block=7000).blob == blob
        assert same(payload.decode([blob], anchor)[0], entries)


def test_facts_travel_and_are_read_without_an_anchor():
    anchor, entries = rounds.real()
    facts = {"round": 12, "rank": 3, "name": "größe", "list": [1, [2], {"x": None}]}
    header, sections = payload.read(payload.encode(entries, anchor, facts=facts).blob)
    assert header.facts == facts
    assert (header.units, header.entries, header.gated, header.value_dtype) == (anchor.units, entries.positions.size, 1, "float32")
    assert len(sections) == 2


def test_one_odd_entry_makes_the_others_no_larger():
    anchor, entries = rounds.real()
    odd = entries.values.copy()
    odd[5] = 1e30
    plain, spoiled = (len(payload.encode(Entries(entries.positions, value), anchor).blob) for value in (entries.values, odd))
    assert spoiled < plain + 40


@pytest.mark.parametrize(
    ("positions", "found"),
    [
        ([3, 2], [1.0, 1.0]), ([3, 3], [1.0, 1.0]), ([100], [1.0]), ([1 << 60], [1.0]), ([3], [np.nan]), ([3], [np.inf]), ([3], [-np.inf]),
        ([3, 4], [1.0]), ([], [1.0]),
    ],
)  # fmt: skip
def test_entries_that_are_none_are_refused(positions, found):
    anchor, _ = rounds.made(0, 100)
    with pytest.raises(ValueError, match=r"positions ascend|not finite|see Entries"):
        payload.encode(Entries(np.array(positions, np.uint64), np.array(found, np.float32)), anchor)


def test_other_dtypes_and_options_are_refused():
    anchor, entries = rounds.made(0, 100)
    for wrong in (
        entries._replace(values=entries.values.astype(np.float64)),
        entries._replace(positions=entries.positions.astype(np.int64)),
    ):
        with pytest.raises(ValueError, match="see Entries"):
            payload.encode(wrong, anchor)
    with pytest.raises(ValueError, match="value_dtype"):
        payload.encode(entries, anchor, value_dtype="int8")
    for block in (0, -1, (1 << 28) + 1):
        with pytest.raises(ValueError, match="blocks"):
            payload.encode(entries, anchor, block=block)
    with pytest.raises(ValueError, match="threads"):
        payload.encode(entries, anchor, threads=0)
    for pieces, views in (
        ((np.zeros(3, np.float32),), ("BF16",)),
        ((np.zeros((3, 1), np.uint32),), ("BF16",)),
        ((np.zeros(3, np.uint32),), ()),
    ):
        with pytest.raises(ValueError, match=r"row of uint32|shorter"):
            Anchor(pieces, views)
    with pytest.raises(UnsupportedFormat, match="no view"):
        Anchor((np.zeros(3, np.uint32),), ("I32",))


def test_another_anchor_is_told():
    anchor, entries = rounds.real()
    blob = payload.encode(entries, anchor).blob
    pieces = [piece.copy() for piece in anchor.pieces]
    starts = np.array(anchor.starts)
    for position in entries.positions[::40].astype(int):
        k = int(np.searchsorted(starts, position, side="right")) - 1
        for bit in (0, 3, 15, 16, 22, 23, 31):
            pieces[k][position - starts[k]] ^= np.uint32(1 << bit)
            with pytest.raises(BaseMismatch, match="another anchor"):
                payload.decode([blob], Anchor(tuple(pieces), anchor.views))
            pieces[k][position - starts[k]] ^= np.uint32(1 << bit)
    assert same(payload.decode([blob], Anchor(tuple(pieces), anchor.views))[0], entries)
    with pytest.raises(BaseMismatch, match="another anchor"):
        payload.decode([blob], Anchor(anchor.pieces, ("F16",) * 4))
    with pytest.raises(BaseMismatch, match="gated"):
        payload.decode([blob], Anchor(anchor.pieces, anchor.views, gated=False))
    with pytest.raises(BaseMismatch, match="40128 weights"):
        payload.decode([blob], Anchor(anchor.pieces[1:], anchor.views[1:]))
