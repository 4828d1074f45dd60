"""A patch turns one set of weights into another, bit for bit, whatever the bits are."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse import digest
from pulse.arrays import as_bits
from pulse.bits import Spec, TensorBits
from pulse.errors import BaseMismatch, DigestMismatch, FormatError, WeightsMismatch
from pulse.patch import Part, Patch, TensorPatch, apply, apply_bits, changed_positions, compose, diff, relate, resolve
from pulse.testing import strategies as some
from pulse.torch.tensors import bits_tensor

pairs = some.sequences(2)
triples = some.sequences(3)
CODES = {"<f4": "F32", "<f8": "F64", "<f2": "F16"}


def frozen(tensors):
    """A deep copy, to show later that nothing was changed."""
    return {name: bits.copy() for name, bits in tensors.items()}


def undigested(patch):
    return replace(patch, base=None, result=None)


def known(patch, tensors):
    """The changes of `patch` to tensors that are there."""
    return {name: tensors[name] for name in {change.part.name for change in patch.changes}}


@given(pairs)
def test_applying_the_diff_gives_the_new_weights_bit_for_bit_and_changes_neither_side(pair):
    old, new = pair
    before = frozen(old), frozen(new)
    patch = diff(old, new)
    result = apply(patch, old)
    assert result == new
    for bits in result.values():
        assert isinstance(bits, TensorBits)
    assert (old, new) == before


@given(pairs)
def test_read_only_weights_are_enough(pair):
    old, new = frozen(pair[0]), frozen(pair[1])
    for bits in [*old.values(), *new.values()]:
        bits.flat.flags.writeable = False
    assert apply(diff(old, new), old) == new


@given(pairs)
def test_torch_tensors_go_in_and_come_out(pair):
    old, new = ({name: bits_tensor(bits) for name, bits in side.items() if not bits.dtype.startswith("F6")} for side in pair)
    before = {name: as_bits(tensor).copy() for name, tensor in old.items()}
    result = apply(diff(old, new), old)
    assert all(isinstance(tensor, torch.Tensor) for tensor in result.values()) or not old
    assert {name: as_bits(tensor) for name, tensor in result.items()} == {name: as_bits(tensor) for name, tensor in new.items()}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in result.items() if old} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in new.items() if old
    }
    assert {name: as_bits(tensor) for name, tensor in old.items()} == before


@given(st.data(), st.sampled_from(list(CODES)), st.sampled_from("<>"), st.booleans())
def test_numpy_arrays_go_in_and_come_out_contiguous_or_not_in_either_byte_order(data, kind, order, strided):
    bits = data.draw(some.specs(some.DTYPES[CODES[kind]]).flatmap(some.tensors))
    after = data.draw(some.edited(bits))

    def array(units):
        made = units.flat.view(f"<u{units.flat.itemsize}").astype(f"{order}u{units.flat.itemsize}").view(kind.replace("<", order))
        made = made.reshape(units.shape)
        return made.T.copy().T if strided else made

    old, new = {"w": array(bits)}, {"w": array(after)}
    kept = old["w"].tobytes()
    result = apply(diff(old, new), old)
    assert isinstance(result["w"], np.ndarray)
    assert result["w"].dtype == np.dtype(kind)
    assert as_bits(result["w"]) == after
    assert old["w"].tobytes() == kept


@given(pairs)
def test_a_patch_names_exactly_the_tensors_that_differ(pair):
    old, new = pair
    assert diff(old, new).names == {name for name in old | new if old.get(name) != new.get(name)}
    assert diff(old, old) == Patch(base=digest.digest_of(old), result=digest.digest_of(old))


@given(pairs)
def test_a_patch_carries_the_state_digests_of_both_sides(pair):
    patch = diff(*pair)
    assert (patch.base, patch.result) == tuple(map(digest.digest_of, pair))


@given(pairs)
def test_every_listed_change_is_one_and_none_is_missing(pair):
    old, new = pair
    for change in diff(old, new).changes:
        name = change.part.name
        differ = np.flatnonzero(old[name].flat != new[name].flat)
        assert change.positions.tolist() == differ.tolist()
        assert change.values.tolist() == new[name].flat[differ].tolist()


@given(pairs)
def test_an_absolute_patch_applied_twice_gives_what_it_gives_once(pair):
    old, new = pair
    patch = undigested(diff(old, new))
    once = apply_bits(patch, old)
    again = apply_bits(Patch(patch.changes), {name: once[name] for name in known(patch, once)})
    assert again == known(patch, once)


@given(pairs)
def test_relating_and_resolving_are_inverse_and_both_forms_apply_alike(pair):
    old, new = pair
    patch = diff(old, new)
    steps = relate(patch, old)
    assert steps.values == "steps"
    assert all(change.values.all() for change in steps.changes)
    assert resolve(steps, old) == patch
    assert relate(steps, old) is steps
    assert resolve(patch, old) is patch
    assert apply(steps, old) == new


def test_relating_drops_what_is_written_but_does_not_differ():
    old = {"w": as_bits(np.arange(4, dtype=np.float32))}
    part = Part("w", old["w"].spec)
    patch = Patch((TensorPatch(part, np.array([1, 2], np.uint64), old["w"].flat[[1, 3]]),))
    assert relate(patch, old).changes[0].positions.tolist() == [2]


@given(st.data(), pairs)
def test_a_patch_cut_into_spans_and_boxes_does_the_same(data, pair):
    old, new = pair
    for patch in (diff(old, new), relate(diff(old, new), old)):
        pieces = data.draw(some.cut(patch))
        for change in pieces.changes:
            change.part.check()
        assert apply(pieces, old) == new


@given(triples, st.booleans())
def test_a_composed_patch_does_what_its_two_do_in_turn(triple, relative):
    a, b, c = triple
    first, second = diff(a, b), diff(b, c)
    if relative:
        first, second = relate(first, a), relate(second, b)
    both = compose(first, second)
    assert (both.base, both.result) == (first.base, second.result)
    assert apply(both, a) == c


@given(st.data(), triples, st.booleans())
def test_patches_cut_in_any_two_ways_compose(data, triple, relative):
    a, b, c = triple
    first, second = diff(a, b), diff(b, c)
    if relative:
        first, second = relate(first, a), relate(second, b)
    first, second = data.draw(some.cut(first)), data.draw(some.cut(second))
    both = compose(first, second)
    assert apply(both, a) == c
    for change in both.changes:
        assert change.positions.size
        assert (np.diff(change.positions.astype(np.int64)) > 0).all()


@given(st.data(), triples)
def test_patches_cut_in_the_same_way_stay_cut_when_composed(data, triple):
    a, b, _ = triple
    patch = data.draw(some.cut(undigested(diff(a, b))))
    parts = {change.part for change in compose(patch, patch).changes}
    assert parts == {change.part for change in patch.changes if change.positions.size}


@given(some.sequences(4), st.booleans())
def test_composing_is_associative(states, relative):
    patches = [diff(old, new) for old, new in pairwise(states)]
    if relative:
        patches = [relate(patch, old) for patch, old in zip(patches, states, strict=False)]
    x, y, z = patches
    left, right = compose(compose(x, y), z), compose(x, compose(y, z))
    assert left == right
    assert apply(left, states[0]) == states[-1]


@given(triples)
def test_relative_changes_that_undo_each_other_vanish(triple):
    a, b, _ = triple
    same = {name: bits for name, bits in b.items() if name in a and a[name].spec == bits.spec}
    old = {name: a[name] for name in same}
    there, back = relate(diff(old, same), old), relate(diff(same, old), same)
    assert compose(there, back).changes == ()


def vector(values, dtype="F32"):
    return TensorBits(dtype, (len(values),), np.array(values, np.float32 if dtype == "F32" else np.int32).view("<u4"))


def change(name, bits, positions, values):
    return TensorPatch(Part(name, bits.spec), np.array(positions, np.uint64), np.array(values, bits.flat.dtype))


W = vector([1, 2, 3, 4])


def test_absolute_and_relative_patches_of_weights_do_not_compose():
    first, second = Patch((change("w", W, [0], [7]),)), Patch((change("w", W, [1], [1]),), values="steps")
    with pytest.raises(WeightsMismatch, match="resolve or relate"):
        compose(first, second)
    with pytest.raises(WeightsMismatch, match="resolve or relate"):
        compose(second, first)


def test_a_relative_patch_composes_with_the_tensors_that_an_absolute_one_carries_whole():
    first = Patch(whole={"w": W})
    second = Patch((change("w", W, [1], [1]),), values="steps")
    both = compose(first, second)
    assert both.changes == ()
    assert both.whole["w"].flat.tolist() == [W.flat[0], W.flat[1] + 1, *W.flat[2:]]
    mixed = compose(Patch((change("v", W, [0], [7]),), whole={"w": W}), second)
    assert (mixed.values, len(mixed.changes)) == ("bits", 1)


def test_patches_that_disagree_on_a_shape_or_dtype_do_not_compose():
    square = TensorBits("F32", (2, 2), W.flat)
    for other in (square, replace(W, dtype="I32")):
        with pytest.raises(WeightsMismatch, match="w: the patches disagree"):
            compose(Patch((change("w", W, [0], [7]),)), Patch((change("w", other, [1], [7]),)))


def test_a_patch_that_changes_what_the_one_before_removes_does_not_compose():
    with pytest.raises(WeightsMismatch, match="changes w, which the first one removes"):
        compose(Patch(removed=("w",)), Patch((change("w", W, [0], [7]),)))


def test_patches_without_changes_compose():
    empty = Patch((change("w", W, [], []),))
    assert compose(empty, empty).changes == ()
    assert compose(Patch(), Patch()) == Patch()


def test_patches_that_do_not_follow_each_other_are_refused_with_both_digests():
    first, second = Patch(result="a" * 32), Patch(base="b" * 32)
    with pytest.raises(BaseMismatch, match=r"b{32}.*a{32}"):
        compose(first, second)


def test_a_wrong_base_is_refused_with_both_digests_and_what_to_do():
    patch = diff({"w": W}, {"w": vector([1, 2, 3, 5])})
    other = {"w": vector([9, 2, 3, 4])}
    with pytest.raises(BaseMismatch, match=f"{patch.base}.*{digest.digest_of(other)}.*anchor"):
        apply(patch, other)


@pytest.mark.parametrize(
    ("receiver", "found"),
    [
        ({"w": vector([1, 2, 3, 4], "I32")}, r"patch is for F32\[4\], these weights have I32\[4\]"),
        ({"w": vector([1, 2, 3])}, r"patch is for F32\[4\], these weights have F32\[3\]"),
        ({"v": W}, "changes w, which these weights do not have"),
    ],
)
@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("values", ["bits", "steps"])
def test_a_receiver_with_other_names_shapes_or_dtypes_is_refused_by_name(receiver, found, digests, values):
    patch = diff({"w": W}, {"w": vector([1, 2, 3, 5])})
    patch = patch if values == "bits" else relate(patch, {"w": W})
    with pytest.raises(WeightsMismatch, match=found):
        apply(patch if digests else undigested(patch), receiver)


def test_a_patch_that_lies_about_its_result_is_found_out():
    patch = replace(diff({"w": W}, {"w": vector([1, 2, 3, 5])}), result="0" * 32)
    with pytest.raises(DigestMismatch, match=r"0{32}"):
        apply(patch, {"w": W})


def test_weights_can_be_made_from_nothing_without_torch_tensors_in_sight():
    assert apply(diff({}, {"w": W}), {}) == {"w": W}
    assert apply(diff({"w": W}, {}), {"w": W}) == {}


def test_a_mostly_changed_tensor_is_carried_whole():
    patch = diff({"w": W}, {"w": vector([5, 6, 7, 4])})
    assert not patch.changes
    assert patch.whole["w"].flat.tolist() == vector([5, 6, 7, 4]).flat.tolist()
    assert patch.changed == 4


@given(some.tensors().flatmap(lambda bits: st.tuples(st.just(bits), some.edited(bits))))
def test_changed_positions_are_those_that_differ(pair):
    old, new = pair
    assert changed_positions(old.flat, new.flat).tolist() == [i for i in range(old.flat.size) if old.flat[i] != new.flat[i]]


@given(some.specs().flatmap(lambda spec: st.tuples(st.just(spec), some.parts("w", spec))))
def test_parts_locate_every_unit_of_the_tensor_exactly_once(found):
    spec, parts = found
    located = np.concatenate([part.locate(np.arange(part.units, dtype=np.uint64)) for part in parts])
    assert sorted(located.tolist()) == list(range(spec.units))


def test_a_box_counts_its_units_in_row_major_order():
    part = Part("w", Spec("F32", (3, 4)), box=((1, 3), (2, 4)))
    assert part.locate(np.arange(4, dtype=np.uint64)).tolist() == [6, 7, 10, 11]


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ({"span": (0, 13)}, "span"),
        ({"span": (3, 2)}, "span"),
        ({"box": ((0, 3),)}, "box"),
        ({"box": ((0, 3), (0, 5))}, "box"),
        ({"box": ((2, 1), (0, 4))}, "box"),
        ({"box": ((-1, 1), (0, 4))}, "box"),
        ({"box": ((0, 1), (0, 4)), "span": (0, 1)}, "both"),
    ],
)
def test_a_part_outside_its_tensor_is_refused(place, found):
    with pytest.raises(FormatError, match=f"w: {found}"):
        Part("w", Spec("F32", (3, 4)), **place).check()


def test_a_packed_tensor_has_no_boxes():
    with pytest.raises(FormatError, match="no boxes"):
        Part("w", Spec("F4", (2, 4)), box=((0, 1), (0, 4))).check()
