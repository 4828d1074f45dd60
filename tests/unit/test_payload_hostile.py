"""Payloads that no honest writer made, altered ones, and bytes that are something else."""

import re
import subprocess
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

import pulse
from pulse import codec, coder, value_coder
from pulse.bits import TensorBits
from pulse.codec import dense, payload, values
from pulse.codec.payload import Anchor, Entries
from pulse.errors import BaseMismatch, DigestMismatch, FormatError, UnsupportedFormat
from pulse.patch import diff
from tests.cli.samples import PULSE
from tests.fuzz import oracle
from tests.fuzz.containers import closed, opened
from tests.fuzz.samples import Payload
from tests.property.test_payload import plain_coders
from tests.rounds import made

VIEWS = ("BF16", "F8_E4M3")
ANCHOR, ENTRIES = made(3, 600, VIEWS, share=0.1)
BLOCK = 250


def honest():
    """A payload of three blocks, all with two classes, which so few entries would not pay for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payload, "choose", lambda *_: payload.Classes((500,), (2560, 2560)))
        return payload.encode(ENTRIES, ANCHOR, value_dtype="bfloat16", facts={"round": 1}, block=BLOCK, threads=1)


BLOB, SENT = honest()
HEADER, PIECES = opened(BLOB)


@pytest.fixture(params=["compiled", "plain"])
def coders(request):
    """Through the compiled coders, or through none."""
    with plain_coders() if request.param == "plain" else nullcontext():
        yield request.param


def outcome(blob, anchor=ANCHOR):
    """What the oracle of the fuzzer says; it raises for what must not be."""
    pieces = {
        f"{i} {view}": TensorBits("F32", (flat.size,), flat) for i, (view, flat) in enumerate(zip(anchor.views, anchor.pieces, strict=True))
    }
    return oracle.payload_outcome(Payload(blob, pieces, anchor.gated))


def decoded(blob, anchor=ANCHOR):
    return payload.decode([blob], anchor, threads=1)[0]


def test_the_untouched_payload_decodes(coders):
    assert decoded(BLOB).positions.tolist() == ENTRIES.positions.tolist()
    assert decoded(BLOB).values.tolist() == SENT.tolist()
    assert closed(HEADER, PIECES) == BLOB
    assert len(HEADER["blocks"]) == 3
    assert len(PIECES) == 6
    assert set(HEADER) == {"kind", "facts", "units", "block", "gated", "value_dtype", "blocks", "classes"}


def test_every_truncation_and_extension_is_refused(coders):
    for end in range(len(BLOB)):
        with pytest.raises(FormatError):
            decoded(BLOB[:end])
    for more in (b"\0", b"\n", BLOB[-32:], BLOB):
        with pytest.raises(FormatError):
            decoded(BLOB + more)


def test_every_byte_altered_is_refused(coders):
    for at in range(len(BLOB)):
        for turn in (1, 0x10, 0x80, 0xFF):
            altered = bytearray(BLOB)
            altered[at] ^= turn
            with pytest.raises(FormatError):
                decoded(altered)


def test_any_bit_turned_in_positions_is_refused_under_an_honest_trailer_too(coders):
    found = set()
    for i in range(0, len(PIECES), 2):
        for at in range(len(PIECES[i])):
            for bit in range(8):
                turned = bytearray(PIECES[i])
                turned[at] ^= 1 << bit
                found.add(outcome(closed(HEADER, [*PIECES[:i], bytes(turned), *PIECES[i + 1 :]])))
    assert found == {"FormatError", "BaseMismatch"}


def test_bits_turned_in_values_under_an_honest_trailer_are_refused_or_lead_to_other_finite_values(coders):
    found = set()
    for i in range(1, len(PIECES), 2):
        for at in range(len(PIECES[i])):
            turned = bytearray(PIECES[i])
            turned[at] ^= 1 << at % 8
            blob = closed(HEADER, [*PIECES[:i], bytes(turned), *PIECES[i + 1 :]])
            found.add(result := outcome(blob))
            if result == "decoded":
                assert decoded(blob).positions.tolist() == ENTRIES.positions.tolist()
                assert decoded(blob).values.tolist() != SENT.tolist()
    assert found == {"FormatError", "decoded"}


def test_a_section_cut_off_extended_exchanged_or_random_is_refused_or_sound(coders):
    rng = np.random.default_rng(0)
    for i, piece in enumerate(PIECES):
        others = [piece[:end] for end in range(len(piece))] + [piece + tail for tail in (b"\0", bytes(9), b"\x01", b"\xff" * 9)]
        others += [bytes(len(piece)), b"\xff" * len(piece), piece[::-1], piece + piece, piece[1:], PIECES[i ^ 1], PIECES[i - 2]]
        others += [rng.bytes(size) for size in (*range(9), 60)]
        for other in others:
            result = outcome(closed(HEADER, [*PIECES[:i], other, *PIECES[i + 1 :]]))
            assert result in ("FormatError", "BaseMismatch") or i % 2
        for tail in (b"\0", bytes(9), piece):
            assert outcome(closed(HEADER, [*PIECES[:i], piece + tail, *PIECES[i + 1 :]])) == "FormatError"


def to(*path_and_value):
    """A change of one place in the header."""
    *path, last, value = path_and_value

    def change(header, _):
        place = header
        for step in path:
            place = place[step]
        place[last] = value

    return change


COUNT, MIDDLE = HEADER["blocks"][0]
LIES = {
    "another kind": to("kind", "dense"),
    "no kind": lambda header, _: header.pop("kind"),
    "no facts": lambda header, _: header.pop("facts"),
    "facts that are no object": to("facts", [1]),
    "a key more": to("more", 1),
    "fewer weights": to("units", 599),
    "more weights": to("units", 601),
    "no weights": to("units", 0),
    "weights beyond all memory": to("units", (1 << 63) - 1),
    "weights below zero": to("units", -600),
    "weights that are true": to("units", True),
    "blocks of nothing": to("block", 0),
    "blocks of another size": to("block", 251),
    "blocks of one weight": to("block", 1),
    "one block of everything": to("block", 1 << 28),
    "blocks beyond the limit": to("block", (1 << 28) + 1),
    "another gate": to("gated", 0),
    "a gate that is neither": to("gated", 2),
    "a gate that is true": to("gated", True),
    "a value dtype that is none": to("value_dtype", "int8"),
    "a value dtype that is a number": to("value_dtype", 8),
    "a block too few": lambda header, _: header["blocks"].pop(),
    "a block too many": lambda header, _: header["blocks"].append([0, 0]),
    "blocks that are no list": to("blocks", {}),
    "a block of one number": to("blocks", 0, [COUNT]),
    "a block of three numbers": to("blocks", 0, [COUNT, MIDDLE, 0]),
    "a block that is a number": to("blocks", 0, COUNT),
    "an entry more": to("blocks", 0, 0, COUNT + 1),
    "an entry fewer": to("blocks", 0, 0, COUNT - 1),
    "an entry that belongs to another block": lambda header, _: [to("blocks", 0, 0, COUNT + 1)(header, _), to("blocks", 1, 0, HEADER["blocks"][1][0] - 1)(header, _)],
    "as many entries as weights": to("blocks", 0, 0, BLOCK),
    "more entries than weights": to("blocks", 0, 0, BLOCK + 1),
    "more entries than weights in the last block": to("blocks", 2, 0, 101),
    "entries beyond 64 bits": to("blocks", 0, 0, 1 << 64),
    "entries below zero": to("blocks", 0, 0, -1),
    "no entries, but sections": to("blocks", 0, [0, 0]),
    "no entries, but a typical move": lambda header, pieces: [to("blocks", 0, [0, 1])(header, pieces), pieces.__delitem__(slice(0, 2))],
    "a typical move beyond all": to("blocks", 0, 1, 255 + 33),
    "a typical move beyond 64 bits": to("blocks", 0, 1, 1 << 64),
    "a typical move below zero": to("blocks", 0, 1, -1),
    "a typical move that is a fraction": to("blocks", 0, 1, 130.5),
    "no classes": lambda header, _: header.pop("classes"),
    "classes that are no list": to("classes", {}),
    "classes without means": to("classes", [[500], []]),
    "a mean too few": to("classes", [[500], [256]]),
    "a mean too many": to("classes", [[500], [256] * 3]),
    "a mean of zero": to("classes", [[500], [0, 256]]),
    "a mean of 2^40": to("classes", [[500], [1 << 40, 256]]),
    "levels that do not ascend": to("classes", [[501, 500], [256] * 3]),
    "a level of zero": to("classes", [[0], [256] * 2]),
    "a level that there is not": to("classes", [[4 * (255 + 24)], [256] * 2]),
    "a level beyond 64 bits": to("classes", [[1 << 64], [256] * 2]),
    "seventeen classes": to("classes", [list(range(1, 17)), [256] * 17]),
    "a section too few": lambda _, pieces: pieces.pop(),
    "a section too many": lambda _, pieces: pieces.append(b"x"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(lie, coders):
    header, pieces = opened(BLOB)
    LIES[lie](header, pieces)
    assert closed(header, pieces) != BLOB
    with pytest.raises((FormatError, BaseMismatch)):
        decoded(closed(header, pieces))


@pytest.mark.parametrize(
    "classes", [[[], [256]], [[500], [1, (1 << 40) - 1]], [[7, 499, 520], [256] * 4], [list(range(500, 515)), [256] * 16]]
)
def test_other_classes_than_the_writers_are_refused_or_lead_to_something_sound(classes, coders):
    assert outcome(closed(HEADER | {"classes": classes}, PIECES)) in ("FormatError", "BaseMismatch", "decoded")


@pytest.mark.parametrize("middle", [0, 1, 100, MIDDLE - 1, MIDDLE + 1, 200, 287])
def test_another_typical_move_is_refused_or_leads_to_something_sound(middle, coders):
    blocks = [[COUNT, middle], *HEADER["blocks"][1:]]
    assert outcome(closed(HEADER | {"blocks": blocks}, PIECES)) in ("FormatError", "decoded")


@pytest.mark.parametrize("value_dtype", ["float32", "float8"])
def test_another_value_dtype_is_refused_or_leads_to_something_sound(value_dtype, coders):
    assert outcome(closed(HEADER | {"value_dtype": value_dtype}, PIECES)) in ("FormatError", "decoded")


def forged(positions, column, middle=130, *, weights=None, check=None, count=None, block=1000):
    """A payload of one block and one class whose sections say so, whatever it is. column: (far, beyond, raw) of each entry."""
    weights = np.full(40, 0x3F800000, np.uint32) if weights is None else np.array(weights, np.uint32)
    anchor = Anchor((weights,), ("BF16",))
    inside = np.array([p for p in positions if p < weights.size], np.uint64)
    honest_check = payload.check_of(np.array([weights.size]), inside, weights[inside])
    where = coder.encode(list(positions), [], [0, len(positions)], [256], honest_check if check is None else check)
    rows, tops = (row.tolist() for row in values._contexts(anchor.at(inside), middle))
    what = value_coder.encode(rows[: len(column)], tops[: len(column)], *([entry[i] for entry in column] for i in range(3)), 32)
    count = len(positions) if count is None else count
    header = {
        "kind": "payload", "facts": {}, "units": weights.size, "block": block, "gated": 1, "value_dtype": "float32",
        "blocks": [[count, middle]], "classes": [[], [256]],
    }  # fmt: skip
    return closed(header, [where, what]), anchor


def raw(value):
    """An entry written as the 32 bits of a value."""
    return 0, 0, int(np.float32(value).view(np.uint32))


def test_an_honest_forgery_decodes(coders):
    blob, anchor = forged([3, 39], [(1, 1, 0), raw(0.5)])
    assert decoded(blob, anchor).positions.tolist() == [3, 39]
    assert decoded(blob, anchor).values.tolist() == [
        -(2.0**-8),
        0.5,
    ]  # the farther border of 1.0 is the outer one, half a step of BF16 away


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF])
def test_a_value_that_is_not_finite_is_refused(bits, coders):
    blob, anchor = forged([3, 5], [(0, 1, 0), (0, 0, bits)])
    with pytest.raises(FormatError, match="not finite"):
        decoded(blob, anchor)


@pytest.mark.parametrize(
    ("weight", "far", "beyond"),
    [
        (0x7F7FFFFF, 1, 1 << 20),  # from the largest number into the NaNs
        (0x7F7FFFFF, 1, 1 << 24),  # and beyond all patterns
        (0xFF7FFFFF, 1, 1 << 24),
        (0x00000001, 1, (1 << 32) - 1),
        (0x7F7FFFFF, 0, (1 << 32) - (1 << 24) - 1),  # over the zeros to the far end: the value is too large
        (0x7F800000, 1, 1 << 24),  # from infinity, and from NaN
        (0x7FC00000, 1, 1 << 25),
    ],
)
def test_a_move_that_leads_beyond_all_numbers_or_from_none_is_refused(weight, far, beyond, coders):
    middle = min(max((weight >> 23 & 255) + beyond.bit_length() - 1, 0), 287)
    blob, anchor = forged([0], [(far, beyond, 0)], middle, weights=[weight])
    with pytest.raises(FormatError, match="not finite"):
        decoded(blob, anchor)


def test_positions_beyond_the_block_are_malformed_and_a_wrong_check_is_for_another_anchor(coders):
    for positions in ([3, 40], [1 << 28], [(1 << 32) - 1]):
        blob, anchor = forged(positions, [raw(1)] * len([p for p in positions if p < 40]))
        with pytest.raises(FormatError, match="a block"):
            decoded(blob, anchor)
    blob, anchor = forged([3, 5], [raw(1), raw(2)], check=12345)
    with pytest.raises(BaseMismatch, match="another anchor"):
        decoded(blob, anchor)


def test_more_or_fewer_entries_than_the_header_says_are_malformed(coders):
    for count in (1, 3, 40):
        blob, anchor = forged([3, 7], [raw(1), raw(2)], count=count)
        with pytest.raises(FormatError, match="a block"):
            decoded(blob, anchor)
    for column in ([raw(1)], [raw(1)] * 3):
        blob, anchor = forged([3, 7, 9], column)
        if len(column) < 3:
            with pytest.raises(FormatError, match="a block"):
                decoded(blob, anchor)
        else:
            assert decoded(blob, anchor).values.tolist() == [1.0] * 3


def test_claims_take_memory_in_proportion_to_the_anchor_and_not_to_themselves():
    units = 1 << 20
    anchor = Anchor((np.full(units, 0x3F800000, np.uint32),), ("BF16",))
    pieces = [b"\x01", b""]
    decoded(payload.encode(Entries(np.arange(5000, dtype=np.uint64), np.full(5000, 0.5, np.float32)), anchor).blob, anchor)  # loads kernels
    header = opened(payload.encode(Entries(np.arange(1, dtype=np.uint64), np.full(1, 0.5, np.float32)), anchor).blob)[0]
    lies = [
        header | {"blocks": [[units, 130]]},
        header | {"units": (1 << 63) - 1, "block": 1 << 28},
        header | {"units": 1 << 40, "block": 1 << 28, "blocks": [[1 << 28, 130]] * 4096},
        header | {"block": 1 << 28, "blocks": [[1 << 28, 130]]},
        header | {"block": 1, "blocks": [[1, 130]]},
    ]
    for lie in lies:
        blob = closed(lie, pieces * sum(count > 0 for count, _ in lie["blocks"]))
        tracemalloc.start()
        with pytest.raises((FormatError, BaseMismatch)):
            decoded(blob, anchor)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 * units + (8 << 20)


def test_all_entries_in_few_bytes_take_memory_in_proportion_to_the_anchor():
    units = 1 << 18
    anchor = Anchor((np.full(units, 0x3F800000, np.uint32),), ("BF16",))
    blob = payload.encode(Entries(np.arange(units, dtype=np.uint64), np.full(units, 2.0**-9, np.float32)), anchor).blob
    assert len(blob) < units // 64
    tracemalloc.start()
    assert decoded(blob, anchor).values.size == units
    assert tracemalloc.get_traced_memory()[1] < 200 * units
    tracemalloc.stop()


def test_what_is_no_payload_says_what_it_is():
    old = {"w": TensorBits("F32", (4,), np.arange(4, dtype=np.uint32))}
    new = {"w": TensorBits("F32", (4,), np.array([0, 1, 2, 9], np.uint32))}
    patch, full = codec.encode(diff(old, new), old), dense.encode(np.zeros(600, np.float32), 8)[0]
    for blob, words in ((patch, "a patch between weights"), (full, "of the kind 'dense'"), (closed({}, []), "of the kind None")):
        with pytest.raises(FormatError, match=f"no payload .* {re.escape(words)}"):
            decoded(blob)
    for blob in (b"", b"PK\x03\x04", bytes(100), BLOB[:50], BLOB[:-1]):
        with pytest.raises(FormatError, match="payload"):
            decoded(blob)


def test_a_payload_is_no_patch_and_the_readers_of_patches_say_what_it_is(tmp_path):
    for read in (pulse.decode, codec.inspect, codec.read_header, lambda blob: pulse.decode(blob, {})):
        with pytest.raises(FormatError, match="no patch: it is a 'payload' that trainers exchange"):
            read(BLOB)
    (tmp_path / "round.pulse").write_bytes(BLOB)
    done = subprocess.run([PULSE, "inspect", "round.pulse"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "round.pulse" in done.stderr
    assert "no patch" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    with pytest.raises(FormatError, match="'dense'"):
        pulse.decode(dense.encode(np.zeros(6, np.float32), 4)[0])


def test_newer_payloads_are_unsupported_and_altered_ones_told_by_their_digest():
    newer = bytearray(BLOB)
    newer[8] = 1
    with pytest.raises(UnsupportedFormat, match="payload format version 1"):
        decoded(newer)
    newer = bytearray(BLOB)
    newer[-40] ^= 1
    with pytest.raises(DigestMismatch, match="payload: its trailer"):
        decoded(newer)
    with pytest.raises(UnsupportedFormat, match="value_dtype|value dtype"):
        decoded(closed(HEADER | {"value_dtype": "float4"}, PIECES))
