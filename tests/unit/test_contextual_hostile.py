"""Contextual patches that no honest writer made, and weights that they were not made for."""

import tracemalloc

import numpy as np
import pytest

from pulse import codec, coder
from pulse.bits import Spec, TensorBits, dtype_of
from pulse.codec.classes import Classes
from pulse.codec.contextual import _unclassed_check as unclassed_check
from pulse.codec.contextual import encode_ranks
from pulse.codec.lanes import lanes_of
from pulse.errors import BaseMismatch, DigestMismatch, FormatError, WeightsMismatch
from pulse.patch import Part, Patch, TensorPatch, apply, diff, relate
from tests.fuzz import oracle
from tests.fuzz.containers import closed, opened
from tests.fuzz.samples import Sample

UNITS = 600


def weights():
    """BF16 of two exponents, so that there are two classes to lie about; a U8 lane; and what came after them."""
    rng = np.random.default_rng(3)
    flat = (rng.integers(0, 2, UNITS) << 7 | 100 << 7 | rng.integers(0, 128, UNITS)).astype("<u2")
    old = {"w": TensorBits("BF16", (20, 30), flat), "u": TensorBits("U8", (40,), np.arange(40, dtype="u1"))}
    new = {name: bits.copy() for name, bits in old.items()}
    new["w"].flat[::41] += np.uint16(1)
    new["w"].flat[7::90] -= np.uint16(2)
    new["u"].flat[[3, 17]] = 200
    return old, new


OLD, NEW = weights()
PATCH = diff(OLD, NEW)
BLOCK = 250
U8, BF16 = 0, 1  # lanes, in the order of the parts


def honest():
    """The patch with two classes for one lane, which so few changes would not pay for."""
    header, pieces = opened(codec.encode(PATCH, OLD, encoding="contextual", block=BLOCK))
    classes = Classes((101,), (10_000, 5000))
    lane = lanes_of([part for part, _ in codec.header.parse_header(header).parts])[BF16]
    steps = relate(PATCH, OLD).changes[BF16]
    for i, span in enumerate(lane.blocks(BLOCK), start=1):
        lo, hi = np.searchsorted(steps.positions, np.array(span, np.uint64))
        pieces[i] = encode_ranks(lane, span, steps.positions[lo:hi], steps.values[lo:hi], classes, OLD.__getitem__)
    header["classes"][BF16] = [list(classes.exponents), list(classes.means)]
    return header, pieces


HEADER, PIECES = honest()
BLOB = closed(HEADER, PIECES)


def outcome(blob, base=OLD):
    """What the oracle of the fuzzer says; it raises for what must not be."""
    return oracle.patch_outcome(Sample(blob, base))


def altered(change):
    """The container with something done to copies of its header and sections."""
    header, pieces = opened(BLOB)
    change(header, pieces)
    assert (header, pieces) != (HEADER, PIECES)
    return closed(header, pieces)


def test_the_untouched_patch_decodes_and_puts_its_header_together_again():
    assert apply(codec.decode(BLOB, OLD), OLD) == NEW
    assert opened(BLOB) == (HEADER, PIECES)
    assert [part[1] for part in HEADER["parts"]] == ["U8", "BF16"]
    assert {tuple(entry[1:]) for entry in HEADER["blocks"]} == {(1, 0)}


def test_a_bit_turned_under_the_old_trailer_is_a_digest_mismatch():
    for at in range(len(BLOB) - 32 - sum(map(len, PIECES)), len(BLOB)):
        for bit in range(8):
            turned = bytearray(BLOB)
            turned[at] ^= 1 << bit
            with pytest.raises(DigestMismatch):
                codec.decode(turned, OLD)


def test_any_bit_turned_in_a_section_is_refused_under_an_honest_trailer_too():
    found = set()
    for i, piece in enumerate(PIECES):
        for at in range(len(piece)):
            for bit in range(8):
                turned = bytearray(piece)
                turned[at] ^= 1 << bit
                found.add(outcome(closed(HEADER, [*PIECES[:i], bytes(turned), *PIECES[i + 1 :]])))
    assert found == {"FormatError", "BaseMismatch"}


def test_a_section_cut_off_extended_or_exchanged_is_refused():
    for i, piece in enumerate(PIECES):
        others = [piece[:end] for end in range(len(piece))] + [piece + tail for tail in (b"\0", bytes(9), b"\x01", b"\xff" * 9)]
        others += [bytes(len(piece)), b"\xff" * len(piece), piece[::-1], piece + piece, piece[1:]]
        for other in others:
            assert outcome(closed(HEADER, [*PIECES[:i], other, *PIECES[i + 1 :]])) in ("FormatError", "BaseMismatch")
    for i in range(len(PIECES) - 1):
        exchanged = list(PIECES)
        exchanged[i : i + 2] = exchanged[i + 1], exchanged[i]
        assert outcome(closed(HEADER, exchanged)) in ("FormatError", "BaseMismatch")


def test_random_bytes_for_a_section_are_refused():
    rng = np.random.default_rng(0)
    for i in range(len(PIECES)):
        for size in [*range(12), 50, 300]:
            for _ in range(3):
                assert outcome(closed(HEADER, [*PIECES[:i], rng.bytes(size), *PIECES[i + 1 :]])) in ("FormatError", "BaseMismatch")


def to(*path_and_value):
    """A change of one place in the header."""
    *path, last, value = path_and_value

    def change(header, _):
        place = header
        for step in path:
            place = place[step]
        place[last] = value

    return change


TWO = [[101], [1000, 1000]]
LIES = {
    "no classes": lambda header, _: header.pop("classes"),
    "classes of no lane": to("classes", []),
    "classes of one lane": lambda header, _: header["classes"].pop(),
    "classes of three lanes": lambda header, _: header["classes"].append([[], [256]]),
    "classes that are no list": to("classes", {}),
    "classes that are one number": to("classes", BF16, 5),
    "classes without means": to("classes", BF16, [[101], []]),
    "classes of three lists": to("classes", BF16, [[101], [1, 1], []]),
    "a mean too few": to("classes", BF16, [[101], [1000]]),
    "a mean too many": to("classes", BF16, [[101], [1000, 1000, 1000]]),
    "a mean of zero": to("classes", BF16, [[101], [0, 1000]]),
    "a mean below zero": to("classes", BF16, [[101], [-1, 1000]]),
    "a mean of 2^40": to("classes", BF16, [[101], [1 << 40, 1000]]),
    "a mean of 2^62": to("classes", BF16, [[101], [1 << 62, 1000]]),
    "a mean beyond 64 bits": to("classes", BF16, [[101], [1 << 70, 1000]]),
    "a mean that is no integer": to("classes", BF16, [[101], [1000.0, 1000]]),
    "a mean that is true": to("classes", BF16, [[101], [True, 1000]]),
    "exponents that do not ascend": to("classes", BF16, [[102, 101], [1, 1, 1]]),
    "exponents that are equal": to("classes", BF16, [[101, 101], [1, 1, 1]]),
    "an exponent of zero": to("classes", BF16, [[0], [1000, 1000]]),
    "an exponent below zero": to("classes", BF16, [[-1], [1000, 1000]]),
    "an exponent that the dtype lacks": to("classes", BF16, [[256], [1000, 1000]]),
    "an exponent beyond 64 bits": to("classes", BF16, [[1 << 64], [1000, 1000]]),
    "an exponent of an integer": to("classes", U8, TWO),
    "seventeen classes": to("classes", BF16, [list(range(1, 17)), [1] * 17]),
    "a block of two sections": lambda header, pieces: [header["blocks"][0].__setitem__(1, 2), pieces.insert(0, b"x")],
    "a block of one section and a plane": lambda header, pieces: [header["blocks"][0].__setitem__(2, 1), pieces.insert(0, b"x")],
    "a block of gaps": to("blocks", 0, [HEADER["blocks"][0][0], 0, 1]),
    "a block of nine planes": lambda header, pieces: [header["blocks"].__setitem__(0, [1, 1, 9]), pieces.extend([b"x"] * 9)],
    "a count without a section": lambda header, pieces: [header["blocks"][0].__setitem__(1, 0), pieces.pop(0)],
    "a section without a count": to("blocks", 0, 0, 0),
    "a count and its part's too large": lambda header, _: [to("blocks", 0, 0, HEADER["blocks"][0][0] + 1)(header, _), to("parts", 0, 4, HEADER["parts"][0][4] + 1)(header, _)],
    "a count and its part's too small": lambda header, _: [to("blocks", 0, 0, HEADER["blocks"][0][0] - 1)(header, _), to("parts", 0, 4, HEADER["parts"][0][4] - 1)(header, _)],
    "a count that belongs to another block": lambda header, _: [to("blocks", 1, 0, HEADER["blocks"][1][0] + 1)(header, _), to("blocks", 2, 0, HEADER["blocks"][2][0] - 1)(header, _)],
    "blocks of another size": to("block", 299),
    "classes in another encoding": to("encoding", "portable"),
    "a part's count moved": lambda header, _: [to("parts", 0, 4, HEADER["parts"][0][4] + 1)(header, _), to("parts", 1, 4, HEADER["parts"][1][4] - 1)(header, _)],
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_about_classes_and_blocks_is_refused(lie):
    with pytest.raises(FormatError):
        codec.decode(altered(LIES[lie]), OLD)


@pytest.mark.parametrize(
    "classes", [[[], [256]], [[101], [1, (1 << 40) - 1]], [[7, 99, 102, 200], [256] * 5], [list(range(90, 105)), [256] * 16]]
)
def test_other_classes_than_the_writers_are_refused_or_lead_to_a_sound_patch(classes):
    assert outcome(altered(to("classes", BF16, classes))) in ("FormatError", "BaseMismatch", "decoded")


def forged(ranks, folded, *, code="U8", units=40, classes=None, check=0, count=None):
    """A patch of one block whose section says so, whatever it is."""
    exponents, means = classes or ([], [256])
    starts = [0, *np.cumsum([len(held) for held in ranks]).tolist()]
    section = coder.encode([rank for held in ranks for rank in held], folded, starts, means, check)
    count = len(folded) if count is None else count
    header = {
        "encoding": "contextual", "block": 1000, "base": None, "result": None, "removed": [], "parts": [["t", code, [units], None, count]],
        "blocks": [[count, 1, 0]], "whole": [], "chunks": [], "classes": [[exponents, means]],
    }  # fmt: skip
    return closed(header, [section])


def flat(code, units=40):
    return {"t": TensorBits(code, (units,), np.arange(units).astype(dtype_of(code).unsigned))}


@pytest.mark.parametrize("code", ["U8", "F8_E4M3", "BF16", "I32", "F32"])
def test_a_step_too_large_for_the_dtype_is_malformed(code):
    top = (1 << 8 * dtype_of(code).width) - 1
    with pytest.raises(BaseMismatch):  # well formed, but its check is not honest
        codec.decode(forged([[5]], [top], code=code), flat(code))
    for step in (top + 1, top + 2, 2 * top, (1 << 64) - 1):
        with pytest.raises(FormatError, match="a block"):
            codec.decode(forged([[5]], [step], code=code), flat(code))


def test_a_rank_beyond_the_block_is_malformed_and_one_beyond_its_class_is_for_other_weights():
    with pytest.raises(FormatError, match="a block"):
        codec.decode(forged([[3, 40]], [1, 1]), flat("U8"))
    for most in (1 << 28, (1 << 32) - 1):
        with pytest.raises(FormatError, match="a block"):
            codec.decode(forged([[most]], [1]), flat("U8"))
    with pytest.raises(BaseMismatch):
        codec.decode(forged([[], [39]], [1], code="BF16", classes=([1], [256, 256])), flat("BF16"))  # none of 40 is that large
    with pytest.raises(BaseMismatch):
        codec.decode(forged([[3, 39]], [1, 1]), flat("U8"))


def test_more_changes_than_the_header_says_are_malformed():
    for count in (1, 3, 40):
        with pytest.raises(FormatError, match="a block"):
            codec.decode(forged([[3, 7]], [1, 1], count=count), flat("U8"))


def test_a_claim_of_many_changes_takes_no_more_memory_than_the_limit_allows_for():
    units = 1 << 20
    base = {"t": TensorBits("U8", (units,), np.zeros(units, "u1"))}
    header, _ = opened(forged([[3]], [1], units=units))
    header |= {"block": units, "parts": [["t", "U8", [units], None, units]], "blocks": [[units, 1, 0]]}
    for section in (b"", b"\xff" * 20):
        blob = closed(header, [section])
        with pytest.raises((FormatError, BaseMismatch)):
            codec.decode(blob, base)  # loads the kernels, too
        tracemalloc.start()
        with pytest.raises(FormatError, match="limit"):
            codec.decode(blob, base, max_bytes=8 * units)
        assert tracemalloc.get_traced_memory()[1] < units
        with pytest.raises((FormatError, BaseMismatch)):
            codec.decode(blob, base, max_bytes=9 * units)
        assert tracemalloc.get_traced_memory()[1] < 4 * 9 * units
        tracemalloc.stop()


def test_weights_of_another_shape_or_none_are_told_by_name():
    with pytest.raises(ValueError, match=r"decode\(blob, base\)"):
        codec.decode(BLOB)
    for base in (
        {},
        {"w": OLD["w"]},
        OLD | {"u": TensorBits("I8", (40,), OLD["u"].flat)},
        OLD | {"w": TensorBits("BF16", (30, 20), OLD["w"].flat)},
    ):
        with pytest.raises(WeightsMismatch):
            codec.decode(BLOB, base)


def test_a_bit_that_rotted_where_something_changes_is_told():
    for change in PATCH.changes:
        name, width = change.part.name, dtype_of(change.part.spec.dtype).width
        for position in change.positions.tolist()[::3]:
            for bit in range(8 * width):
                rotten = OLD[name].copy()
                rotten.flat[position] ^= rotten.flat.dtype.type(1 << bit)
                with pytest.raises(BaseMismatch):
                    codec.decode(BLOB, OLD | {name: rotten})


def test_a_bit_that_rotted_elsewhere_is_told_if_it_moves_a_unit_to_another_class_and_else_changes_nothing():
    told = 0
    changed = set(PATCH.changes[BF16].positions.tolist())
    classes = HEADER["classes"][BF16][0]
    for position in [at for at in range(UNITS) if at not in changed][::20]:
        for bit in (0, 6, 7, 8, 12, 15):
            rotten = OLD["w"].copy()
            rotten.flat[position] ^= np.uint16(1 << bit)
            before, after = (np.searchsorted(classes, int(bits.flat[position]) >> 7 & 255, side="right") for bits in (OLD["w"], rotten))
            if before == after:
                assert codec.decode(BLOB, OLD | {"w": rotten}, threads=1) == PATCH
                continue
            told += 1
            with pytest.raises(BaseMismatch):
                codec.decode(BLOB, OLD | {"w": rotten}, threads=1)
    assert told > 20


def test_weights_of_another_version_are_told():
    for base in (NEW, OLD | {"w": NEW["w"]}, {name: TensorBits(b.dtype, b.shape, np.zeros_like(b.flat)) for name, b in OLD.items()}):
        with pytest.raises(BaseMismatch):
            codec.decode(BLOB, base)


def test_parts_that_write_a_unit_twice_are_refused():
    spec = OLD["w"].spec
    steps = np.array([1], "<u2")
    row, column = Part("w", spec, box=((1, 2), (0, 30))), Part("w", spec, box=((0, 20), (2, 3)))
    patch = Patch((TensorPatch(row, np.array([2], np.uint64), steps), TensorPatch(column, np.array([1], np.uint64), steps)), values="steps")
    with pytest.raises(FormatError, match="overlap"):
        codec.decode(codec.encode(patch, OLD, encoding="contextual"), OLD)


def test_blocks_of_gaps_are_refused_as_in_the_portable_encoding():
    base = flat("U8", 400)
    patch = diff(base, {"t": TensorBits("U8", (400,), np.where(np.arange(400) < 190, 0, np.arange(400)).astype("u1"))})
    portable, planes = opened(codec.encode(patch, base, encoding="portable"))
    (change,) = patch.changes
    check = unclassed_check(change.positions, base["t"].flat[change.positions])
    header = portable | {"encoding": "contextual", "classes": [[[], [256]]]}
    assert codec.decode(closed(header, [*planes, check]), base) == patch
    count, gap_planes, step_planes = header["blocks"][0]
    nothing, far = bytes(count), b"\xff" * count
    for pieces in (
        [nothing] * len(planes),
        [far] * len(planes),
        [planes[0][:-1], *planes[1:]],
        [*planes[::-1], b""],
        [*planes[:-1], nothing],
    ):
        with pytest.raises(FormatError):
            codec.decode(closed(header | {"blocks": [[count, gap_planes, len(pieces) - gap_planes]]}, [*pieces, check]), base)
    for wrong in (b"", check[:3], check + b"\0"):
        with pytest.raises(FormatError, match="check"):
            codec.decode(closed(header, [*planes, wrong]), base)
    with pytest.raises(FormatError, match="sections"):
        codec.decode(closed(header, planes), base)


def test_blocks_of_gaps_tell_a_wrong_base_too():
    old = {"w": TensorBits("F32", (64, 32), (0x3F000000 + np.arange(2048)).astype("<u4"))}
    new = {"w": old["w"].copy()}
    new["w"].flat[320:640] = 0
    blob = codec.encode(diff(old, new), old, encoding="contextual")
    assert codec.read_header(blob).blocks[0][2] > 0
    other = {"w": old["w"].copy()}
    other["w"].flat[400] ^= 1
    with pytest.raises(BaseMismatch):
        codec.decode(blob, other)


def test_a_spec_of_so_many_units_that_no_weights_have_them_is_refused_before_anything_is_read():
    spec = Spec("U8", (1 << 60,))
    header, pieces = opened(forged([[3]], [1]))
    for block in (1000, 1 << 28):
        lying = header | {"block": block, "parts": [["t", spec.dtype, [1 << 60], None, 1]]}
        with pytest.raises(FormatError, match="blocks"):
            codec.decode(closed(lying, pieces), flat("U8"))
