"""Bytes that are not an honest patch are refused with a `FormatError`: no other exception, no hang, no memory worth the name."""

import json
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard

from pulse import codec
from pulse.bits import TensorBits, dtype_of
from pulse.codec import sections
from pulse.errors import DigestMismatch, FormatError, UnsupportedFormat, WeightsMismatch
from pulse.patch import Part, Patch, TensorPatch, apply_bits, diff
from tests.fuzz.containers import built, loosely, sealed, taken_apart


def tensor(code, shape, units):
    return TensorBits(code, shape, np.array(units, np.uint64).astype(dtype_of(code).unsigned))


OLD = {
    "a": tensor("BF16", (4, 5), range(20)),
    "b": tensor("F32", (7,), range(7)),
    "c": tensor("BF16", (6,), range(6)),
    "gone": tensor("U8", (2,), [1, 2]),
}
NEW = {
    "a": tensor("BF16", (4, 5), [*range(18), 500, 7]),
    "b": tensor("F32", (7,), [0, 9, *range(2, 7)]),
    "c": tensor("BF16", (6,), [0, 1, 2, 3, 4, 50000]),
    "new": tensor("I16", (2, 5), range(300, 310)),
}
PATCH = diff(OLD, NEW)
BLOBS = {encoding: codec.encode(PATCH, OLD, encoding=encoding, block=8) for encoding in codec.ENCODINGS}
PORTABLE = BLOBS["portable"]


def altered(change, blob=PORTABLE):
    """The container with `change` done to its header, and an honest trailer."""
    header, pieces = taken_apart(blob)
    return built(change(header) or header, pieces)


def refuse(blob, match=None, error=FormatError):
    with pytest.raises(error, match=match):
        codec.decode(blob)
    with pytest.raises((FormatError, WeightsMismatch)):
        codec.decode(blob, OLD)
    for look in (codec.read_header, codec.inspect):
        with suppress(FormatError):
            look(blob)


def test_the_untouched_containers_decode():
    for blob in BLOBS.values():
        assert codec.decode(blob, OLD) == PATCH
        header, pieces = taken_apart(blob)
        assert built(header, pieces) == blob


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_a_patch_cut_off_at_any_byte_is_refused(encoding):
    for end in range(len(BLOBS[encoding])):
        refuse(BLOBS[encoding][:end])


@pytest.mark.parametrize("encoding", codec.ENCODINGS)
def test_a_patch_with_any_single_bit_flipped_is_refused(encoding):
    blob = BLOBS[encoding]
    for at in range(len(blob)):
        for bit in range(8):
            flipped = bytearray(blob)
            flipped[at] ^= 1 << bit
            with pytest.raises(FormatError):
                codec.decode(bytes(flipped), OLD)


@pytest.mark.parametrize("more", [b"\0", b"\n", bytes(32), PORTABLE])
def test_a_patch_with_something_after_it_is_refused(more):
    refuse(PORTABLE + more, "truncated or altered")
    refuse(sealed(PORTABLE + more))


def test_a_patch_in_the_middle_of_which_bytes_are_missing_doubled_or_swapped_is_refused():
    for at in range(0, len(PORTABLE) - 8, 5):
        refuse(PORTABLE[:at] + PORTABLE[at + 4 :])
        refuse(PORTABLE[: at + 4] + PORTABLE[at:])
        refuse(PORTABLE[:at] + b"\xa5" + PORTABLE[at:])


@pytest.mark.parametrize(
    "foreign", [b"", b"PK\x03\x04" + bytes(99), b"GGUF" * 30, b"\x89PNG\r\n\x1a\n" + bytes(90), bytes(1000), b"{}" * 40]
)
def test_a_foreign_file_is_refused_as_not_a_patch(foreign):
    refuse(foreign, "not a patch")


def test_a_patch_that_went_through_a_text_transfer_is_refused_as_foreign():
    refuse(PORTABLE.replace(b"\r\n", b"\n"), "not a patch")


def test_a_changed_trailer_is_told_as_a_digest_with_both_values():
    with pytest.raises(DigestMismatch, match=r"SHA-256 0{64}, its bytes have [0-9a-f]{64}"):
        codec.decode(PORTABLE[:-32] + bytes(32))


def test_a_newer_version_an_unknown_flag_or_encoding_asks_for_an_upgrade():
    header, pieces = taken_apart(PORTABLE)
    refuse(built(header, pieces, version=1), "version 1", UnsupportedFormat)
    refuse(built(header, pieces, flags=2), "flags 0x2", UnsupportedFormat)
    refuse(altered(lambda header: header.update(encoding="dense")), "dense", UnsupportedFormat)
    refuse(altered(lambda header: header["parts"][0].__setitem__(3, ["stripe", 1, 2])), "stripe", UnsupportedFormat)
    with pytest.raises(UnsupportedFormat, match="version 1"):
        codec.decode(built({"whatever": 1}, version=1)[:-40])  # even if the rest makes no sense to this reader


@pytest.mark.parametrize("raw", [0, 1, 10, 1 << 20, (1 << 32) - 1])
def test_a_header_that_lies_about_its_size_is_refused(raw):
    header, pieces = taken_apart(PORTABLE)
    refuse(built(header, pieces, raw=raw), "patch header")


@pytest.mark.parametrize("stored", [0, 1, 10, 1 << 20, (1 << 32) - 1])
def test_a_header_that_lies_about_its_stored_size_is_refused(stored):
    header, pieces = taken_apart(PORTABLE)
    refuse(built(header, pieces, stored=stored), "patch header")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b"{}",
        b'{"a":1, "b":2}',
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b"\xff\xfe{\0}\0",
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 900 + b"1" + b"}" * 900,
        b'{"removed":["\\ud800"]}',
        '{"\u00e4":1}'.encode(),
    ],
    ids=lambda header: repr(header[:20]),
)
def test_a_header_that_is_not_one_canonical_object_with_the_right_fields_is_refused(header):
    refuse(built(header))


def put(*path_and_value):
    """A change of one place in the header."""
    *path, last, value = path_and_value

    def change(header):
        place = header
        for step in path:
            place = place[step]
        place[last] = value

    return change


PART = ["a", "BF16", [4, 5], None, 2]
HUGE = 1 << 62
LIES = {
    "no encoding": lambda header: header.pop("encoding") and None,
    "unknown field": put("extra", 1),
    "missing field": lambda header: header.pop("chunks") and None,
    "encoding of another type": put("encoding", ["portable"]),
    "block zero": put("block", 0),
    "block negative": put("block", -1),
    "block huge": put("block", HUGE),
    "block too large to be a natural number": put("block", 1 << 80),
    "block a float": put("block", 8.0),
    "block true": put("block", True),
    "other block size": put("block", 9),
    "base no digest": put("base", "00"),
    "base upper case": put("base", "A" * 32),
    "result a number": put("result", 5),
    "removed a string": put("removed", "gone"),
    "removed twice": put("removed", ["gone", "gone"]),
    "removed and changed": put("removed", ["a"]),
    "removed and carried whole": put("removed", ["new"]),
    "changed and carried whole": put("whole", 0, 0, "a"),
    "removed a number": put("removed", [1]),
    "removed half a surrogate": put("removed", ["\ud800"]),
    "part too short": put("parts", 0, ["a", "BF16", [4, 5], None]),
    "part not a list": put("parts", 0, "a"),
    "part of an unknown dtype": put("parts", 0, 1, "BF17"),
    "part of a dtype that is no text": put("parts", 0, 1, [1]),
    "part of a packed dtype that fills no byte": put("parts", 0, ["a", "F4", [3], None, 0]),
    "part listed twice": lambda header: header["parts"].append(header["parts"][0]),
    "part with two shapes": lambda header: header["parts"].append(["a", "BF16", [5, 4], None, 0]),
    "part with two dtypes": lambda header: header["parts"].append(["a", "F32", [4, 5], None, 0]),
    "part missing": lambda header: header["parts"].pop() and None,
    "part of a negative shape": put("parts", 0, 2, [-4, -5]),
    "part of a huge shape": put("parts", 0, 2, [HUGE]),
    "part of an overflowing shape": put("parts", 0, 2, [1 << 32, 1 << 32]),
    "part of a shape with zero and huge": put("parts", 0, 2, [HUGE, HUGE, 0]),
    "part of too many dimensions": put("parts", 0, 2, [1] * 65),
    "part of a larger shape": put("parts", 0, 2, [1 << 30]),
    "part of a smaller shape": put("parts", 0, 2, [1]),
    "more changes than units": put("parts", 0, 4, 21),
    "more changes than there are": put("parts", 0, 4, 3),
    "fewer changes than there are": put("parts", 0, 4, 1),
    "negative changes": put("parts", 0, 4, -2),
    "changes moved to another part": lambda header: [put("parts", 0, 4, 1)(header), put("parts", 2, 4, 2)(header)],
    "empty place": put("parts", 0, 3, []),
    "place of another type": put("parts", 0, 3, 5),
    "unknown kind of part": put("parts", 0, 3, ["sphere", 1]),
    "kind that is no text": put("parts", 0, 3, [[1]]),
    "span outside": put("parts", 0, 3, ["span", 0, 21]),
    "span reversed": put("parts", 0, 3, ["span", 5, 4]),
    "span of three": put("parts", 0, 3, ["span", 0, 1, 2]),
    "span huge": put("parts", 0, 3, ["span", HUGE, HUGE + 20]),
    "box outside": put("parts", 0, 3, ["box", [0, 4], [0, 6]]),
    "box reversed": put("parts", 0, 3, ["box", [4, 0], [0, 5]]),
    "box of one dimension": put("parts", 0, 3, ["box", [0, 20]]),
    "box of triples": put("parts", 0, 3, ["box", [0, 4, 1], [0, 5, 1]]),
    "box of a packed dtype": put("parts", 0, ["a", "F4", [4, 10], ["box", [0, 4], [0, 10]], 2]),
    "block with more changes": put("blocks", 0, 0, 1),
    "block with a huge count": put("blocks", 0, 0, 1 << 28),
    "block with more planes": put("blocks", 2, 1, 5),
    "block with huge planes": put("blocks", 2, 1, HUGE),
    "planes moved from values to gaps": lambda header: header.update(
        blocks=[[n, g + 1, v - 1] if v else [n, 0, 0] for n, g, v in header["blocks"]]
    ),
    "planes moved from gaps to values": lambda header: header.update(
        blocks=[[n, g - 1, v + 1] if g else [n, 0, v] for n, g, v in header["blocks"]]
    ),
    "block missing": lambda header: header["blocks"].pop() and None,
    "block too many": lambda header: header["blocks"].append([0, 0, 0]),
    "blocks swapped": lambda header: header["blocks"].reverse(),
    "whole of another dtype": put("whole", 0, 1, "U8"),
    "whole of another shape": put("whole", 0, 2, [5]),
    "whole huge": put("whole", 0, 2, [HUGE]),
    "whole twice": lambda header: header["whole"].append(header["whole"][0]),
    "whole of a packed dtype that fills no byte": put("whole", 0, ["new", "F6_E2M3", [5]]),
    "chunk with more planes": put("chunks", 0, 3),
    "chunk with huge planes": put("chunks", 0, HUGE),
    "chunk missing": lambda header: header["chunks"].pop() and None,
    "chunk too many": lambda header: header["chunks"].append(0),
    "sections missing": lambda header: header.pop("sections") and None,
    "sections a number": put("sections", 5),
    "section negative": put("sections", 0, -1),
    "section true": put("sections", 0, True),
    "section longer": lambda header: put("sections", 0, header["sections"][0] + 1)(header),
    "sections shifted": lambda header: header["sections"].__setitem__(slice(2), [header["sections"][0] + 1, header["sections"][1] - 1]),
    "section huge": put("sections", 0, HUGE),
    "section beyond all integers": put("sections", 0, 10**4000),
    "one section more": lambda header: header["sections"].append(0),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_under_an_honest_trailer_is_refused(lie):
    header, pieces = taken_apart(PORTABLE)
    honest = json.dumps(header)
    LIES[lie](header)
    assert json.dumps(header) != honest
    refuse(built(loosely(header), pieces))


def rebuilt(patch, block=8, encoding="portable"):
    return codec.encode(patch, encoding=encoding, block=block)


def one(part, positions, values, width=2):
    return TensorPatch(part, np.array(positions, np.uint64), np.array(values, f"<u{width}"))


@pytest.mark.parametrize("encoding", ["portable", "absolute"])
def test_parts_that_write_a_unit_twice_are_refused(encoding):
    spec = OLD["a"].spec
    values = "steps" if encoding == "portable" else "bits"
    row, column = Part("a", spec, box=((1, 2), (0, 5))), Part("a", spec, box=((0, 4), (2, 3)))
    refuse(rebuilt(Patch((one(row, [2], [1]), one(column, [1], [1])), values=values), encoding=encoding), "overlap")
    first, second = Part("a", spec, span=(0, 10)), Part("a", spec, span=(9, 20))
    refuse(rebuilt(Patch((one(first, [9], [1]), one(second, [0], [1])), values=values), encoding=encoding), "overlap")
    refuse(rebuilt(Patch((one(Part("a", spec), [9], [1]), one(second, [0], [1])), values=values), encoding=encoding), "overlap")


def test_a_part_of_no_units_is_honest():
    spec = OLD["a"].spec
    parts = [Part("a", spec, box=((1, 1), (0, 5))), Part("a", spec, span=(3, 3)), Part("a", spec, box=((0, 4), (5, 5)))]
    patch = Patch((*(one(part, [], []) for part in parts), one(Part("a", spec), [3], [1])), values="steps")
    decoded = codec.decode(rebuilt(patch))
    assert decoded == patch
    assert apply_bits(decoded, OLD)["a"].flat[3] == 4
    assert [part.locate(np.empty(0, np.uint64)).size for part in parts] == [0, 0, 0]


def test_a_step_of_zero_is_refused():
    refuse(rebuilt(Patch((one(Part("a", OLD["a"].spec), [3, 4], [1, 0]),), values="steps")), "step of zero")


def packed(planes):
    return [sections.pack(plane) for plane in planes]


def sparse(gaps, values, *, count=None, units=20, block=32):
    """A container of one part whose planes are given as they are."""
    pieces = [*gaps, *values]
    count = len(gaps[0]) if count is None else count
    header = {
        "encoding": "absolute", "block": block, "base": None, "result": None, "removed": [],
        "parts": [["w", "U8", [units], None, count]], "blocks": [[count, len(gaps), len(values)]], "whole": [], "chunks": [],
        "sections": list(map(len, pieces)),
    }  # fmt: skip
    return built(header, b"".join(pieces))


def test_positions_outside_the_block_are_refused():
    codec.decode(sparse([bytes([9, 9])], [b"ab"]))
    refuse(sparse([bytes([10, 9])], [b"ab"]), "a block of 20 units holds a position 20")
    refuse(sparse([b"\xff\xff"] * 4, [b"ab"]), "holds a position")
    refuse(sparse([bytes([19, 0])], [b"ab"]), "holds a position 20")


def test_planes_that_are_too_many_too_long_or_too_short_are_refused():
    refuse(sparse([bytes(2)] * 5, [b"ab"]), "5 planes for units of 4 bytes")
    refuse(sparse([bytes(2)], [b"ab", b"ab"]), "2 planes for units of 1 bytes")
    refuse(sparse([bytes(3)], [b"ab"], count=2), "3 stored bytes for 2 raw")
    refuse(sparse([bytes(1)], [b"ab"], count=2), "zstd")
    refuse(sparse([b""], [b"ab"], count=2), "zstd")


@pytest.mark.parametrize(
    "frame",
    [
        zstandard.compress(bytes(1000))[:-1],
        zstandard.compress(bytes(1000)) + b"\0",
        zstandard.compress(bytes(1000)) * 2,
        zstandard.compress(bytes(999)),
        zstandard.compress(bytes(1001)),
        zstandard.compress(bytes(1 << 24)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 24)),
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(bytes(1000)),
        b"\x28\xb5\x2f\xfd" + bytes(40),
        b"",
    ],
    ids=["cut", "extended", "twice", "short", "long", "bomb", "no size", "bomb of no size", "skippable", "garbage", "empty"],
)  # fmt: skip
def test_a_section_that_is_not_one_frame_of_the_right_size_is_refused(frame):
    refuse(sparse([frame], [bytes(1000)], count=1000, units=1000, block=1000), "gaps, plane 0")


def peak(work):
    """The most memory that `work` held at a time, in bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def many(entry, times):
    return b"[" + b",".join([entry] * times) + b"]"


def hollow(**changes):
    """A container of nothing, with some fields of its header replaced by texts."""
    fields = {
        "base": b"null", "block": b"1", "blocks": b"[]", "chunks": b"[]", "encoding": b'"absolute"', "parts": b"[]", "removed": b"[]",
        "result": b"null", "sections": b"[]", "whole": b"[]",
    } | changes  # fmt: skip
    return built(b"{" + b",".join(b'"%s":%s' % (name.encode(), fields[name]) for name in sorted(fields)) + b"}")


LARGE = b"268435456"
ONE_LARGE = b"[[268435456,0,0]]"
BOMBS = {
    "a header of 250 MB of spaces": lambda: built(b" " * 250_000_000),
    "a header of 30 MB of empty lists": lambda: hollow(removed=many(b"[]", 10_000_000)),
    "a header of 1 MB of empty lists": lambda: hollow(removed=many(b"[]", 300_000)),
    "a header of 1 MB of dimensions": lambda: hollow(whole=b'[["w","U8",' + many(b"9223372036854775807", 50_000) + b"]]"),
    "a part of 2^60 units in blocks of one": lambda: hollow(parts=b'[["w","U8",[1152921504606846976],null,0]]'),
    "a tensor of 2^60 bytes": lambda: hollow(whole=b'[["w","U8",[1152921504606846976]]]', block=LARGE),
    "a tensor of 2^28 bytes of nothing": lambda: hollow(whole=b'[["w","U8",[268435456]]]', block=LARGE, chunks=b"[0]"),
    "2^28 changes of nothing": lambda: hollow(parts=b'[["w","U8",[268435456],null,268435456]]', block=LARGE, blocks=ONE_LARGE),
    "2^28 changes that only a block has": lambda: hollow(parts=b'[["w","U8",[268435456],null,0]]', block=LARGE, blocks=ONE_LARGE),
    "2^28 changes of which a section knows": lambda: hollow(
        parts=b'[["w","U8",[268435456],null,1]]', block=LARGE, blocks=b"[[268435456,1,0]]", sections=b"[0]"
    ),
}  # fmt: skip


@pytest.mark.timeout(60)  # hours, if the bomb went off
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_quickly_and_in_little_memory(bomb):
    blob = BOMBS[bomb]()
    assert len(blob) < 100_000
    assert peak(lambda: refuse(blob)) < 64 << 20


@pytest.mark.timeout(60)
def test_a_hundred_thousand_empty_blocks_take_no_more_than_seconds():
    blob = hollow(parts=b'[["w","U8",[120000],null,0]]', blocks=many(b"[0,0,0]", 120_000))
    assert codec.decode(blob).changed == 0


def test_what_decoding_may_take_can_be_limited_and_the_error_says_so():
    with pytest.raises(FormatError, match=r"limit is 10 \(max_bytes=\)"):
        codec.decode(PORTABLE, max_bytes=10)
    assert codec.decode(PORTABLE, OLD, max_bytes=1000) == PATCH


def test_messages_about_hostile_values_stay_short():
    for blob in (hollow(removed=b'["' + b"x" * 100 + b'",' + many(b"7", 100_000) + b"]"), hollow(encoding=b'"' + b"y" * 900_000 + b'"')):
        with pytest.raises(FormatError) as caught:
            codec.decode(blob)
        assert len(str(caught.value)) < 1000
