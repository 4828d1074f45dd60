"""`ModuleWeights`: every dtype and layout as bits, views, ties, names, and writes that touch nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulse import MemoryWeights, Publisher, Subscriber
from pulse.arrays import as_bits, bits_like
from pulse.bits import DTYPES, TensorBits, dtype_of
from pulse.digest import digest_of
from pulse.errors import WeightsMismatch
from pulse.manifest import LateAnchor, anchor_key
from pulse.store import MemoryStore
from pulse.torch import ModuleWeights
from pulse.torch.tensors import bits_tensor, code_of, dtype_from, tensor_bits
from pulse.versions import Versions
from pulse.weights import Weights
from tests.chains import advance

NO_TORCH = {"F6_E2M3", "F6_E3M2"}
CODES = sorted(set(DTYPES) - NO_TORCH)


def raw(code: str, units: int, seed: int = 0) -> np.ndarray:
    unsigned = dtype_of(code).unsigned
    highest = 2 if code == "BOOL" else 2 ** (8 * unsigned.itemsize)
    return np.random.default_rng(seed).integers(0, highest, units, unsigned, endpoint=False)


def tensor(code: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of arbitrary bits. shape: as safetensors counts."""
    packed = 2 if code == "F4" else 1
    return bits_tensor(TensorBits(code, shape, raw(code, int(np.prod(shape, dtype=np.int64)) // packed, seed)))


def holding(**tensors: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in tensors.items():
        module.register_buffer(name, value)
    return module


def as_bytes(value: torch.Tensor) -> bytes:
    return tensor_bits(value).flat.tobytes()


# --- dtypes and layouts ---


@pytest.mark.parametrize("code", CODES)
def test_every_dtype_goes_out_and_in_as_bits(code: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {"flat": (6,), "square": (2, 4), "none": (0, 2)} | ({} if code == "F4" else {"scalar": ()})
    source = {name: tensor(code, *shape, seed=1) for name, shape in shapes.items()}
    target = holding(**{name: tensor(code, *shape, seed=2) for name, shape in shapes.items()})
    kept = {name: value.data_ptr() for name, value in target.named_buffers()}
    weights = ModuleWeights(target)
    assert weights.specs() == {name: tensor_bits(value).spec for name, value in source.items()}
    for name, value in source.items():
        wanted = tensor_bits(value)
        at = np.arange(wanted.flat.size, dtype=np.uint64)[::2]
        weights.scatter(name, at, wanted.flat[at])
        assert np.array_equal(weights.gather(name, at), wanted.flat[at])
        weights.assign(name, wanted)
        assert weights.read(name) == wanted
    assert {name: value.data_ptr() for name, value in target.named_buffers()} == kept


@pytest.mark.parametrize("code", CODES)
def test_every_dtype_travels_from_module_to_module(code: str) -> None:
    source = holding(a=tensor(code, 4, 6, seed=1), b=tensor(code, 2, seed=2))
    target = holding(a=tensor(code, 4, 6, seed=3), b=tensor(code, 2, seed=4))
    store = MemoryStore()
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    for number in range(3):
        publisher.publish()
        advance(subscriber)
        assert as_bytes(target.a) == as_bytes(source.a)
        assert as_bytes(target.b) == as_bytes(source.b)
        source.a.view(torch.uint8).view(-1)[number] ^= 1


def test_torch_and_the_wire_agree_on_what_each_dtype_is_called() -> None:
    assert {code_of(dtype_from(code)) for code in CODES} == set(CODES)
    for code in NO_TORCH:
        with pytest.raises(WeightsMismatch, match=code):
            dtype_from(code)
    with pytest.raises(WeightsMismatch, match="complex128"):
        code_of(torch.complex128)


LAYOUTS = {
    "transposed": lambda value: value.t(),
    "strided": lambda value: value.repeat_interleave(2, 1)[:, ::2],
    "a part of a larger one": lambda value: torch.cat([value, value])[2 : 2 + value.shape[0]],
    "a column of a larger one": lambda value: torch.stack([value, value], -1)[..., 1],
}


@pytest.mark.parametrize("code", ["BF16", "F32", "I64", "F8_E4M3", "BOOL"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_is_not_contiguous_is_read_and_written_by_row_major_positions(code: str, layout: str) -> None:
    live = LAYOUTS[layout](tensor(code, 4, 6))
    weights = ModuleWeights(holding(w=live))
    weights.specs()
    assert weights.read("w") == tensor_bits(live.contiguous())
    wanted = raw(code, live.numel(), seed=5)
    at = np.array([0, 1, 7, live.numel() - 1], np.uint64)
    expected = weights.read("w").flat.copy()
    expected[at] = wanted[at]
    weights.scatter("w", at, wanted[at])
    assert np.array_equal(weights.read("w").flat, expected)
    assert np.array_equal(weights.gather("w", at), wanted[at])
    weights.assign("w", TensorBits(code, tuple(live.shape), wanted))
    assert np.array_equal(tensor_bits(live.contiguous()).flat, wanted)


def test_channels_last_parameters_stay_channels_last() -> None:
    source, target = torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    store = MemoryStore()
    place = target.weight.data_ptr()
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    for _ in range(3):
        publisher.publish()
        advance(subscriber)
        assert torch.equal(target.weight, source.weight)
        assert target.weight.is_contiguous(memory_format=torch.channels_last)
        assert target.weight.data_ptr() == place
        with torch.no_grad():
            source.weight[1, 2, 0, 1] += 1


def test_a_layer_made_in_inference_mode_can_receive() -> None:
    source = torch.nn.Linear(4, 4)
    with torch.inference_mode():
        target = torch.nn.Linear(4, 4)
    store = MemoryStore()
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    for _ in range(2):
        publisher.publish()
        advance(subscriber)
        assert torch.equal(target.weight, source.weight)
        with torch.no_grad():
            source.weight[0, 0] += 1


def test_only_the_elements_that_changed_are_written() -> None:
    """Whatever else is in the weights stays there: it was not touched."""
    source = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    target = copy.deepcopy(source)
    store = MemoryStore()
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    publisher.publish()
    advance(subscriber)
    with torch.no_grad():
        source[0].weight[3, 5] += 1
        source[1].bias[2] += 1
    publisher.publish()
    update = subscriber.fetch()
    assert update is not None
    assert update.changed == 2
    poisoned = []
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(7)
            poisoned.append(parameter.data_ptr())
    subscriber.apply(update)
    assert (target[0].weight != 7).nonzero().tolist() == [[3, 5]]
    assert (target[1].bias != 7).nonzero().tolist() == [[2]]
    assert torch.equal(target[0].weight[3, 5], source[0].weight[3, 5])
    assert [parameter.data_ptr() for parameter in target.parameters()] == poisoned


def test_gradients_and_the_graph_survive_an_apply() -> None:
    source, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    target(torch.ones(1, 4)).sum().backward()
    before = target.weight.grad
    store = MemoryStore()
    Publisher(store, ModuleWeights(source)).publish()
    advance(Subscriber(store, ModuleWeights(target)))
    assert target.weight.grad is before
    assert target.weight.requires_grad
    assert target.weight.is_leaf
    target(torch.ones(1, 4)).sum().backward()


# --- which tensors there are ---


def test_persistent_buffers_are_published_and_others_are_not() -> None:
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert set(ModuleWeights(module).specs()) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}


class Tied(torch.nn.Module):
    def __init__(self, *, tied: bool = True, head_first: bool = False) -> None:
        super().__init__()
        for name in ("head", "embed") if head_first else ("embed", "head"):
            setattr(self, name, torch.nn.Linear(4, 3, bias=False))
        self.norm = torch.nn.LayerNorm(3)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("receiver_tied", [True, False])
@pytest.mark.parametrize("head_first", [True, False])
def test_tied_weights_count_once_and_reach_every_name(receiver_tied: bool, head_first: bool) -> None:
    source, target = Tied(), Tied(tied=receiver_tied, head_first=head_first)
    weights = ModuleWeights(source)
    assert dict(weights.aliases) == {"head.weight": "embed.weight"}
    assert set(weights.specs()) == {"embed.weight", "norm.weight", "norm.bias"}
    store = MemoryStore()
    publisher, subscriber = Publisher(store, weights), Subscriber(store, ModuleWeights(target))
    for _ in range(3):
        receipt = publisher.publish()
        advance(subscriber)
        assert subscriber.state_digest == receipt.state_digest
        assert torch.equal(target.head.weight, source.embed.weight)
        assert torch.equal(target.embed.weight, source.embed.weight)
        with torch.no_grad():
            source.head.weight[1, 1] += 1
    assert receipt.units == 12 + 6


def test_an_untied_trainer_does_not_fit_a_tied_receiver() -> None:
    store = MemoryStore()
    Publisher(store, ModuleWeights(Tied(tied=False))).publish()
    with pytest.raises(WeightsMismatch, match=r"embed.weight and head.weight are published apart"):
        Subscriber(store, ModuleWeights(Tied())).fetch()


def test_parameters_that_share_a_place_but_not_a_shape_are_no_ties() -> None:
    base = torch.arange(6.0)
    weights = ModuleWeights(holding(a=base, b=base.view(2, 3), c=torch.zeros(0), d=torch.zeros(0)))
    assert not weights.aliases
    assert set(weights.specs()) == {"a", "b", "c", "d"}


def test_names_are_those_of_the_checkpoint_whatever_wraps_the_module(tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    names = set(ModuleWeights(plain).specs())
    compiled = torch.compile(plain, backend="eager")
    inner = copy.deepcopy(plain)
    inner[1] = torch.compile(inner[1], backend="eager")  # type: ignore[assignment]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
        wrapped: list[Any] = [
            compiled,
            inner,
            parallel,
            torch.compile(parallel, backend="eager"),
            torch.nn.DataParallel(copy.deepcopy(plain)),
        ]
        for module in wrapped:
            assert set(ModuleWeights(module).specs()) == names
    finally:
        torch.distributed.destroy_process_group()


def test_a_name_that_looks_like_a_wrapper_is_kept() -> None:
    module = torch.nn.Module()
    module.module = torch.nn.Linear(2, 2)
    assert set(ModuleWeights(module).specs()) == {"module.weight", "module.bias"}


def test_a_module_on_the_meta_device_is_refused_by_name() -> None:
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    with pytest.raises(WeightsMismatch, match="weight: on the meta device there are no weights"):
        ModuleWeights(module)


def test_a_frozen_tensor_is_in_every_anchor() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].requires_grad_(requires_grad=False)
    store = MemoryStore()
    with Publisher(store, ModuleWeights(module), anchor_every=2) as publisher:
        for _ in range(3):
            publisher.publish()
            with torch.no_grad():
                module[0].weight[0, 0] += 1
    late = LateAnchor.from_bytes(store.get(anchor_key(2)))
    reader = Versions(store)
    found = reader.anchor_tensors(late.anchor, reader.index(late.tensors))
    assert found["1.weight"] == tensor_bits(module[1].weight)


# --- views ---


def test_a_view_as_a_dtype_casts_what_is_wide_enough_and_leaves_the_rest() -> None:
    module = holding(
        f64=torch.zeros(2, dtype=torch.float64), f32=torch.zeros(2), f16=torch.zeros(2, dtype=torch.float16), f8=tensor("F8_E4M3", 2),
        count=torch.zeros(2, dtype=torch.int64), mask=torch.zeros(2, dtype=torch.bool), wave=torch.zeros(2, dtype=torch.complex64),
    )  # fmt: skip
    weights = ModuleWeights(module, view=torch.bfloat16)
    assert {name: spec.dtype for name, spec in weights.specs().items()} == {
        "f64": "BF16", "f32": "BF16", "f16": "BF16", "f8": "F8_E4M3", "count": "I64", "mask": "BOOL", "wave": "C64",
    }  # fmt: skip
    assert weights.view == "BF16"
    assert ModuleWeights(module).view is None


def test_a_view_as_a_mapping_casts_what_it_names_and_the_first_pattern_wins() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    weights = ModuleWeights(module, view={"0.bias": torch.float32, "0.*": torch.bfloat16})
    assert {name: spec.dtype for name, spec in weights.specs().items()} == {
        "0.weight": "BF16",
        "0.bias": "F32",
        "1.weight": "F32",
        "1.bias": "F32",
    }
    assert weights.view == {"0.bias": "F32", "0.*": "BF16"}


@pytest.mark.parametrize(
    ("view", "text"),
    [
        ({"2.*": torch.bfloat16}, r"no tensor is named 2\.\*"),
        ({"*": torch.int8}, "0.weight is torch.float32, which has no view as torch.int8"),
        (torch.int32, "has no view as torch.int32"),
        ({"0.weight": torch.complex64}, "has no view as"),
    ],
)
def test_a_view_that_makes_no_sense_is_refused(view: Any, text: str) -> None:
    with pytest.raises(WeightsMismatch, match=text):
        ModuleWeights(torch.nn.Sequential(torch.nn.Linear(2, 2)), view=view)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_a_view_rounds_as_torch_casts_every_pattern(patterns: list[int]) -> None:
    live = torch.from_numpy(np.array(patterns, "<u4").view("<f4"))
    read = ModuleWeights(holding(w=live), view=torch.bfloat16).read("w")
    assert read == tensor_bits(live.to(torch.bfloat16))


def test_what_is_kept_in_fp32_stays_in_fp32_on_both_sides() -> None:
    source = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    target = copy.deepcopy(source)
    target[0].to(torch.bfloat16)
    store = MemoryStore()
    publisher = Publisher(store, ModuleWeights(source, view={"0.*": torch.bfloat16}))
    subscriber = Subscriber(store, ModuleWeights(target))
    with torch.no_grad():
        source[1].weight += 1e-6
    publisher.publish()
    advance(subscriber)
    assert torch.equal(target[1].weight, source[1].weight)
    assert torch.equal(target[0].weight, source[0].weight.to(torch.bfloat16))
    assert Versions(store).manifest(0).view == {"0.*": "BF16"}


def test_weights_with_a_view_are_read_and_never_written() -> None:
    store = MemoryStore()
    source = torch.nn.Linear(3, 3)
    Publisher(store, ModuleWeights(source, view=torch.bfloat16)).publish()
    target = torch.nn.Linear(3, 3)
    before = copy.deepcopy(target.state_dict())
    subscriber = Subscriber(store, ModuleWeights(target, view=torch.bfloat16))
    with pytest.raises(WeightsMismatch, match="a view is read, never written; receive without view="):
        advance(subscriber)
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    at, bits = np.array([0], np.uint64), ModuleWeights(target, view=torch.bfloat16).read("bias")
    viewed = ModuleWeights(target, view=torch.bfloat16)
    for call in (lambda: viewed.gather("bias", at), lambda: viewed.scatter("bias", at, bits.flat[:1]), lambda: viewed.assign("bias", bits)):
        with pytest.raises(WeightsMismatch, match="never written"):
            call()


# --- modules that change ---


def test_parameters_replaced_between_publishes_are_found() -> None:
    source, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    store = MemoryStore()
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    publisher.publish()
    advance(subscriber)
    changed = {name: value + (name == "bias") for name, value in source.state_dict().items()}
    source.load_state_dict(changed, assign=True)
    receipt = publisher.publish()
    assert (receipt.kind, receipt.changed) == ("patch", 4)
    target.load_state_dict({name: value.clone() for name, value in target.state_dict().items()}, assign=True)
    advance(subscriber)
    assert torch.equal(target.bias, source.bias)
    subscriber.verify()


def test_a_receiver_whose_parameters_were_replaced_by_others_is_repaired() -> None:
    source, target = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    store = MemoryStore()
    publisher, subscriber = Publisher(store, ModuleWeights(source)), Subscriber(store, ModuleWeights(target))
    publisher.publish()
    advance(subscriber)
    target.load_state_dict(torch.nn.Linear(4, 4).state_dict(), assign=True)
    with pytest.raises(Exception, match="bias, weight changed"):
        subscriber.verify()
    advance(subscriber)
    assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("change", ["a layer is added", "a layer is removed", "the dtype changes"])
def test_a_module_that_changes_is_published_as_an_anchor_that_says_so(change: str) -> None:
    source = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    store = MemoryStore()
    publisher = Publisher(store, ModuleWeights(source))
    publisher.publish()
    if change == "a layer is added":
        source.append(torch.nn.Linear(4, 4))
    elif change == "a layer is removed":
        source.pop(1)
    else:
        source.to(torch.bfloat16)
    receipt = publisher.publish()
    assert (receipt.kind, receipt.reason) == ("anchor", "names, shapes, dtypes or ties changed")
    target = copy.deepcopy(source)
    for parameter in target.parameters():
        torch.nn.init.zeros_(parameter)
    advance(Subscriber(store, ModuleWeights(target)))
    assert all(torch.equal(value, source.state_dict()[name]) for name, value in target.state_dict().items())


# --- training ---


def test_the_receiver_of_a_real_training_run_equals_the_masters_cast_to_bf16_at_every_step() -> None:
    torch.manual_seed(0)
    masters = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 50))
    policy = copy.deepcopy(masters).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=3e-6)
    store = MemoryStore()
    publisher = Publisher(store, ModuleWeights(masters, view=torch.bfloat16), anchor_every=3)
    subscriber = Subscriber(store, ModuleWeights(policy))
    densities = []
    for step in range(8):
        receipt = publisher.publish(step)
        densities.append(receipt.density)
        advance(subscriber)
        assert subscriber.state_digest == digest_of({name: tensor_bits(value) for name, value in policy.state_dict().items()})
        for name, value in masters.state_dict().items():
            assert torch.equal(policy.state_dict()[name].view(torch.int16), value.to(torch.bfloat16).view(torch.int16))
        tokens = torch.randint(0, 50, (8, 4))
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(masters(tokens).flatten(0, 1).float(), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    publisher.close()
    assert all(0 < density < 0.2 for density in densities[1:])


def test_module_and_memory_weights_are_weights_and_say_the_same() -> None:
    module = torch.nn.Linear(3, 2)
    live, copied = ModuleWeights(module), MemoryWeights(module.state_dict())
    assert isinstance(live, Weights)
    assert isinstance(copied, Weights)
    assert live.specs() == copied.specs()
    base = {name: copied.read(name).copy() for name in copied.specs()}
    with torch.no_grad():
        module.weight[1, 1] += 1
        module.bias += 1
    copied = MemoryWeights(module.state_dict())
    for name, bits in base.items():
        assert live.read(name) == copied.read(name)
        assert live.diff(name, bits) == copied.diff(name, bits)
        assert live.diff(name, live.read(name)) is None


def test_what_a_diff_holds_does_not_change_with_the_weights() -> None:
    for whole in (False, True):
        module = torch.nn.Linear(4, 4)
        weights = ModuleWeights(module)
        base = weights.read("weight").copy()
        with torch.no_grad():
            module.weight.view(-1)[: 16 if whole else 2] += 1
        found = weights.diff("weight", base)
        held = found.flat if isinstance(found, TensorBits) else found.values  # type: ignore[union-attr]
        before = held.copy()
        with torch.no_grad():
            module.weight.zero_()
        assert np.array_equal(held, before)


def test_a_sharded_module_is_refused_by_name(tmp_path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        module = torch.nn.Linear(4, 4)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(WeightsMismatch, match="weight: sharded over .*gather them first"):
            ModuleWeights(module)
    finally:
        torch.distributed.destroy_process_group()


def test_conjugate_views_are_read_as_the_numbers_they_stand_for() -> None:
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert as_bits(tensor.conj()) == as_bits(torch.tensor([1 - 2j], dtype=torch.complex64))


def test_packed_pairs_that_torch_cannot_hold_are_refused() -> None:
    odd = TensorBits("F4", (2, 3), np.zeros(3, np.uint8))
    with pytest.raises(WeightsMismatch, match="in pairs"):
        bits_like(odd, torch.zeros(1))
