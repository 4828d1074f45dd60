"""Encoding and decoding give back the patch, in every encoding and however it falls into blocks."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import codec
from pulse.bits import Spec, TensorBits, dtype_of
from pulse.codec import container, sections
from pulse.codec.lanes import Lane, from_gaps, join, lanes_of, split, to_gaps
from pulse.errors import BaseMismatch, WeightsMismatch
from pulse.patch import Part, Patch, TensorPatch, apply, diff, relate, resolve
from pulse.testing import strategies as some

encodings = st.sampled_from(codec.ENCODINGS)
blocks = st.sampled_from([1, 2, 7, 64, codec.patches.BLOCK])


@given(some.sequences(2), encodings, blocks)
def test_decoding_what_was_encoded_gives_the_same_patch(pair, encoding, block):
    old, new = pair
    patch = diff(old, new)
    blob = codec.encode(patch, old, encoding=encoding, block=block)
    assert codec.decode(blob, old) == patch
    assert apply(codec.decode(memoryview(blob), old), old) == new
    if encoding != "contextual":
        assert codec.decode(blob) == (relate(patch, old) if encoding == "portable" else patch)


@given(st.data(), some.sequences(2), encodings, blocks)
def test_spans_boxes_and_empty_parts_survive_the_round_trip(data, pair, encoding, block):
    old, new = pair
    patch = data.draw(some.cut(diff(old, new)))
    blob = codec.encode(patch, old, encoding=encoding, block=block)
    assert codec.decode(blob, old) == patch
    assert apply(codec.decode(blob, old), old) == new


@given(some.sequences(2), encodings, blocks)
def test_the_header_alone_says_what_the_patch_holds(pair, encoding, block):
    old, new = pair
    patch = diff(old, new)
    header = codec.read_header(codec.encode(patch, old, encoding=encoding, block=block))
    assert (header.encoding, header.block, header.base, header.result) == (encoding, block, patch.base, patch.result)
    assert header.parts == tuple((change.part, change.positions.size) for change in patch.changes)
    assert dict(header.whole) == {name: bits.spec for name, bits in patch.whole.items()}
    assert (header.removed, header.changed) == (patch.removed, patch.changed)
    codec.check_specs(header, {name: bits.spec for name, bits in old.items()})


@given(some.sequences(2), blocks)
def test_either_form_of_a_patch_encodes_to_the_same_bytes(pair, block):
    old, new = pair
    patch = diff(old, new)
    for encoding in codec.ENCODINGS:
        forms = {codec.encode(form, old, encoding=encoding, block=block) for form in (patch, relate(patch, old))}
        assert len(forms) == 1


@given(some.sequences(2))
def test_a_patch_that_is_in_the_encodings_own_form_needs_no_base(pair):
    old, new = pair
    patch = diff(old, new)
    assert codec.decode(codec.encode(patch, encoding="absolute")) == patch
    assert codec.decode(codec.encode(relate(patch, old), encoding="portable")) == relate(patch, old)


def tensors(*values, dtype="F32"):
    unsigned = dtype_of(dtype).unsigned
    return TensorBits(dtype, (len(values),), np.array(values, np.uint64).astype(unsigned))


def test_a_conversion_without_a_base_is_refused_before_anything_is_written():
    patch = diff({"w": tensors(1, 2, 3)}, {"w": tensors(1, 2, 4)})
    with pytest.raises(ValueError, match="needs base="):
        codec.encode(patch)
    with pytest.raises(WeightsMismatch, match="w, which these weights do not have"):
        codec.encode(patch, {})


@pytest.mark.parametrize(("options", "found"), [({"encoding": "dense"}, "known are"), ({"block": 0}, "1 to"), ({"block": 1 << 29}, "1 to")])
def test_an_encoding_or_block_size_that_no_reader_takes_is_refused(options, found):
    with pytest.raises(ValueError, match=found):
        codec.encode(Patch(), **options)


def test_a_part_listed_twice_is_refused_rather_than_half_lost():
    part = Part("w", Spec("F32", (4,)))
    once = TensorPatch(part, np.array([1], np.uint64), np.array([1], "<u4"))
    with pytest.raises(ValueError, match="twice"):
        codec.encode(Patch((once, once)), encoding="absolute")


def test_an_absolute_change_that_is_none_on_this_base_drops_out_of_the_portable_encoding():
    old = {"w": tensors(1, 2, 3)}
    part = Part("w", old["w"].spec)
    patch = Patch((TensorPatch(part, np.array([0, 2], np.uint64), np.array([1, 9], "<u4")),))
    assert codec.decode(codec.encode(patch, old), old).changes[0].positions.tolist() == [2]


def test_tensors_of_several_dtypes_and_sizes_share_lanes_and_blocks():
    rng = np.random.default_rng(0)
    old, new = {}, {}
    for i, code in enumerate(["BF16", "F32", "BF16", "U8", "F64", "BF16", "F32", "F4", "F6_E2M3"] * 5):
        spec = Spec(code, (4 * (i % 7 + 1),))
        flat = rng.integers(0, 256, spec.nbytes, np.uint8).view(dtype_of(code).unsigned)
        old[f"t{i}"] = TensorBits(code, spec.shape, flat)
        new[f"t{i}"] = old[f"t{i}"].copy()
        new[f"t{i}"].flat[:: 1 + i % 4] ^= 1
    for encoding in codec.ENCODINGS:
        for block in (1, 2, 7, 64):
            blob = codec.encode(diff(old, new), old, encoding=encoding, block=block)
            assert apply(codec.decode(blob, old), old) == new


def test_a_whole_tensor_spans_several_chunks_that_decode_alone():
    bits = tensors(*range(1000), dtype="U16")
    blob = codec.encode(diff({}, {"w": bits}), block=128)
    header = codec.read_header(blob)
    assert len(header.chunks) == 8
    assert codec.decode(blob).whole["w"] == bits


def test_the_same_patch_gives_the_same_bytes():
    old, new = {"a": tensors(1, 2, 3), "b": tensors(4)}, {"b": tensors(4), "a": tensors(1, 2, 4), "c": tensors(0)}
    turned = ({name: side[name] for name in reversed(side)} for side in (old, new))
    assert codec.encode(diff(old, new), old) == codec.encode(diff(*turned), old)


def test_a_blob_is_magic_header_sections_and_the_sha256_of_all_before():
    old, new = {"w": tensors(*range(64))}, {"w": tensors(*range(63), 99)}
    blob = codec.encode(diff(old, new), old)
    assert blob[:8] == b"\x89PULSE\r\n"
    assert blob[8:12] == bytes(4)
    assert blob[-32:] == hashlib.sha256(blob[:-32]).digest()


def test_a_header_that_packs_too_well_for_a_careful_reader_is_stored_as_it_is():
    patch = Patch(removed=("n" * (3 << 20),))
    blob = codec.encode(patch, encoding="absolute")
    assert len(blob) > 3 << 20
    assert codec.decode(blob) == patch


def test_a_header_of_many_tensors_is_packed_and_read_back():
    names = [f"model.layers.{i // 100}.mlp.experts.{i % 100}.gate_proj.weight" for i in range(30_000)]
    patch = Patch(removed=tuple(sorted(names)))
    blob = codec.encode(patch, encoding="absolute")
    assert len(blob) < 500_000
    assert codec.decode(blob) == patch


def test_specs_that_do_not_fit_the_header_are_refused_by_name():
    old, new = {"w": tensors(1, 2, 3)}, {"w": tensors(1, 2, 4)}
    header = codec.read_header(codec.encode(diff(old, new), old))
    with pytest.raises(WeightsMismatch, match=r"w: the patch changes F32\[3\], here it is F32\[4\]"):
        codec.check_specs(header, {"w": Spec("F32", (4,))})
    with pytest.raises(WeightsMismatch, match="missing"):
        codec.check_specs(header, {})


def test_decoding_with_a_base_of_another_shape_is_refused():
    old, new = {"w": tensors(1, 2, 3)}, {"w": tensors(1, 2, 4)}
    blob = codec.encode(diff(old, new), old)
    for base in ({"w": tensors(1, 2, 3, 4)}, {"w": replace(old["w"], dtype="I32")}, {}):
        with pytest.raises(WeightsMismatch, match="w"):
            codec.decode(blob, base)


unsigned_arrays = st.sampled_from([1, 2, 4, 8]).flatmap(
    lambda width: st.lists(st.integers(0, (1 << 8 * width) - 1) | st.integers(0, 3), max_size=40).map(lambda v: np.array(v, f"<u{width}"))
)


@given(unsigned_arrays)
def test_byte_planes_give_the_units_back(units):
    assert np.array_equal(sections.unpack_planes(sections.pack_planes(units), units.size, units.dtype, "x"), units)


@given(unsigned_arrays)
def test_zigzag_is_a_bijection_that_makes_small_steps_of_either_sign_small(units):
    assert np.array_equal(sections.unzigzag(sections.zigzag(units)), units)
    signed = units.view(f"<i{units.itemsize}").tolist()
    assert sections.zigzag(units).tolist() == [2 * step if step >= 0 else -2 * step - 1 for step in signed]


@given(st.integers(0, 1 << 40), st.sets(st.integers(0, 200)))
def test_gaps_give_the_positions_back(start, offsets):
    positions = np.array(sorted(start + offset for offset in offsets), np.uint64)
    gaps = to_gaps(positions, start)
    assert gaps.sum() + gaps.size == (int(positions[-1]) - start + 1 if offsets else 0)
    assert np.array_equal(from_gaps(gaps, start, start + 201), positions)


@given(st.data(), some.sequences(2))
def test_joining_a_lane_and_splitting_it_are_inverse(data, pair):
    changes = {change.part: change for change in data.draw(some.cut(diff(*pair))).changes}
    for lane in lanes_of(list(changes)):
        assert list(split(lane, *join(lane, changes))) == [changes[part] for part in lane.parts]


def test_blocks_cover_a_lane_without_gaps_and_only_the_last_is_shorter():
    parts = Part("a", Spec("U8", (5,))), Part("none", Spec("U8", (0,))), Part("b", Spec("U8", (6,)))
    (lane,) = lanes_of(parts)
    assert list(lane.blocks(4)) == [(0, 4), (4, 8), (8, 11)]
    assert [list(lane.pieces(span)) for span in lane.blocks(4)] == [
        [(parts[0], 0, 4, 0)],
        [(parts[0], 4, 5, 4), (parts[2], 0, 3, 5)],
        [(parts[2], 3, 6, 8)],
    ]
    assert list(Lane(dtype_of("U8"), (), (0,)).blocks(4)) == []


@given(some.sequences(2), st.integers(0, 1 << 20))
def test_the_bytes_do_not_depend_on_the_threads(pair, seed):
    old, new = pair
    for encoding in codec.ENCODINGS:
        blobs = [codec.encode(diff(old, new), old, encoding=encoding, block=1 + seed % 7, threads=threads) for threads in (1, 3)]
        assert blobs[0] == blobs[1]
        assert codec.decode(blobs[0], old, threads=3) == codec.decode(blobs[0], old, threads=1)


def test_a_contextual_patch_says_what_it_needs():
    old, new = {"w": tensors(*range(100))}, {"w": tensors(*range(99), 7)}
    patch = diff(old, new)
    for form in (patch, relate(patch, old)):
        with pytest.raises(ValueError, match="needs base="):
            codec.encode(form, encoding="contextual")
    blob = codec.encode(patch, old, encoding="contextual")
    with pytest.raises(ValueError, match=r"decode\(blob, base\)"):
        codec.decode(blob)
    with pytest.raises(BaseMismatch, match="applies to weights with state digest"):
        codec.decode(blob, {"w": tensors(*range(7, 107), dtype="F32")} | {"w": tensors(*(i << 24 for i in range(100)))})


@given(st.binary(max_size=200), st.integers(1, 4))
def test_a_section_gives_its_bytes_back(data, times):
    data *= times
    assert sections.unpack(sections.pack(data), len(data), "x") == data


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 9)), st.lists(st.binary(max_size=9), max_size=4))
def test_a_container_gives_header_and_sections_back(header, pieces):
    found, views = container.read(container.write(header, pieces))
    assert (found, [bytes(view) for view in views]) == (header, pieces)


@given(some.sequences(2))
def test_resolving_after_decoding_is_decoding_with_the_base(pair):
    old, new = pair
    blob = codec.encode(diff(old, new), old)
    assert resolve(codec.decode(blob), old) == codec.decode(blob, old)


class Counted(dict):
    """Tensors that count how often each is read, as those of a device are copied at each reading."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.reads = 0

    def __getitem__(self, name):
        self.reads += 1
        return super().__getitem__(name)


def test_a_tensor_of_many_blocks_is_read_once_and_not_for_each_block():
    rng = np.random.default_rng(0)
    old = {"w": tensors(*rng.integers(1 << 30, 1 << 31, 1000).tolist())}
    new = {"w": old["w"].copy()}
    new["w"].flat[::7] ^= 1
    patch = relate(diff(old, new), old)
    base = Counted(old)
    blob = codec.encode(patch, base, encoding="contextual", block=10, threads=1)
    assert base.reads == 1
    base.reads = 0
    assert apply(codec.decode(blob, base, threads=1), old) == new
    assert base.reads == 1
