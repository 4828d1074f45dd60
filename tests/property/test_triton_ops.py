"""The Triton kernels, under Triton's interpreter on the CPU: the same bits as the torch operations and the compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pulse.errors import WeightsMismatch
from pulse.kernels import changes
from pulse.torch import ops
from pulse.torch.tensors import host_integers

triton = pytest.importorskip("triton")

from pulse.torch import triton_ops  # noqa: E402  after the skip

BLOCK = triton_ops.BLOCK
WIDTHS = [1, 2, 4, 8]
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 7]


def random_units(width, units, seed=0):
    return np.random.default_rng([width, units, seed]).integers(0, 256, width * units, np.uint8).view(f"<u{width}")


def as_tensor(units):
    return host_integers(units, units.dtype.itemsize)


def as_units(tensor):
    array = tensor.numpy()
    return array.view(f"<u{array.itemsize}")


def assert_changes(old, new):
    """The kernels' positions and values are those of torch and of the compiled kernel."""
    found = triton_ops.changes(as_tensor(old), as_tensor(new))
    assert torch.equal(found.positions, ops.changed(as_tensor(old), as_tensor(new)))
    assert torch.equal(found.values, ops.gather(as_tensor(new), found.positions))
    expected = changes.changed_positions(old, new)
    assert np.array_equal(as_units(found.positions), expected)
    assert np.array_equal(as_units(found.values), new[expected])


class TestUnderTheInterpreter:
    """Collected in a process that has had the interpreter from its start: Triton asks for it once, when it is loaded."""

    __test__ = os.environ.get("TRITON_INTERPRET") == "1"

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_what_changed_is_found_in_order_whatever_the_size(self, width, size, share):
        old = random_units(width, size)
        new = np.where(np.random.default_rng(size).random(size) < share, ~old, old)
        assert_changes(old, new)

    @settings(max_examples=25)
    @given(st.sampled_from(WIDTHS), st.integers(0, 2 * BLOCK + 2), st.data())
    def test_changes_of_arbitrary_bits_anywhere_are_found(self, width, size, data):
        old = random_units(width, size)
        new = old.copy()
        edges = st.sampled_from([at for at in (0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, size - 1) if 0 <= at < size] or [0])
        for at in data.draw(st.sets(st.integers(0, size - 1) | edges, max_size=9)) if size else ():
            new[at] = data.draw(st.integers(0, (1 << 8 * width) - 1))
        assert_changes(old, new)

    def test_floats_are_compared_as_bits_and_strided_tensors_in_row_major_order(self):
        old = torch.tensor([[float("nan"), 0.0], [-0.0, 1.0]], dtype=torch.bfloat16)
        new = torch.tensor([[float("nan"), 0.0], [0.0, 1.5]], dtype=torch.bfloat16)
        assert triton_ops.changes(old, new).positions.tolist() == [2, 3]
        assert triton_ops.changes(old.t(), new.t()).positions.tolist() == [1, 3]

    @pytest.mark.parametrize("share", [0.01, 1.0])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_scatter_writes_what_torch_and_the_kernel_write_and_hands_back_the_old_units(self, width, size, share):
        flat, positions = random_units(width, size), np.flatnonzero(np.random.default_rng(size).random(size) < share)
        values = random_units(width, positions.size, seed=1)
        ours, theirs, expected = as_tensor(flat), as_tensor(flat), flat.copy()
        where = torch.from_numpy(positions)
        old = triton_ops.scatter_(ours, where, as_tensor(values))
        assert torch.equal(old, ops.scatter_(theirs, where, as_tensor(values)))
        assert torch.equal(ours, theirs)
        changes.scatter(expected, positions.astype(np.uint64), values)
        assert np.array_equal(as_units(ours), expected)
        triton_ops.scatter_(ours, where, old)
        assert np.array_equal(as_units(ours), flat)

    @settings(max_examples=25)
    @given(st.sampled_from(WIDTHS), st.integers(1, 2 * BLOCK + 2), st.data())
    def test_scatter_in_any_order_touches_only_the_units_named(self, width, size, data):
        flat = random_units(width, size)
        places = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=9))
        values = random_units(width, len(places), seed=1)
        expected = flat.copy()
        expected[places] = values
        found = as_tensor(flat)
        triton_ops.scatter_(found, torch.tensor(places, dtype=torch.int64), as_tensor(values))
        assert np.array_equal(as_units(found), expected)

    def test_parameters_are_written_in_place(self):
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        assert triton_ops.scatter_(parameter, torch.tensor([1, 5]), torch.tensor([1.5, -0.0])).tolist() == [0, 0]
        assert ops.units_of(parameter).tolist() == [0, 0x3FC00000, 0, 0, 0, -(1 << 31)]

    def test_what_does_not_fit_is_refused_before_anything_is_written(self):
        tensor, at = torch.zeros(4, 2), torch.tensor([1])
        for target, positions, values in [
            (tensor.t(), at, torch.ones(1)),
            (tensor, at, torch.ones(1, dtype=torch.float16)),
            (tensor, torch.tensor([1, 2]), torch.ones(1)),
            (tensor, at.int(), torch.ones(1)),
            (tensor, torch.empty(1, dtype=torch.int64, device="meta"), torch.ones(1)),
        ]:
            with pytest.raises(WeightsMismatch):
                triton_ops.scatter_(target, positions, values)
        assert not tensor.any()
        with pytest.raises(WeightsMismatch):
            triton_ops.changes(tensor, tensor.int())


def run(*arguments, **environment):
    """Python in a process of its own, without the interpreter unless it is asked for."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], env=kept | environment, capture_output=True, text=True, check=False)


def test_the_kernels_give_the_same_bits_under_the_interpreter():
    tests = f"{__file__}::{TestUnderTheInterpreter.__name__}"
    ran = run("-m", "pytest", "--quiet", "-p", "no:cacheprovider", tests, TRITON_INTERPRET="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from pulse.torch import triton_ops as ops
for unit in ("*u8", "*i16", "*i32", "*i64"):
    pair = {"old": unit, "new": unit}
    for kernel, types in [
        (ops._count, pair | {"counts": "*i64", "units": "i64"}),
        (ops._compact, pair | {"ends": "*i64", "positions": "*i64", "values": unit, "units": "i64"}),
        (ops._exchange, {"flat": unit, "positions": "*i64", "values": unit, "old": unit, "changes": "i64"}),
    ]:
        made = compile(ASTSource(kernel, types | {"block": "constexpr"}, {"block": ops.BLOCK}), GPUTarget(TARGET))
        print(len(made.asm[BINARY]) > 0)
"""


@pytest.mark.parametrize(("target", "binary"), [("'cuda', 90, 32", "cubin"), ("'hip', 'gfx942', 64", "hsaco")])
def test_the_kernels_compile_for_a_gpu_though_none_is_here(target, binary, tmp_path):
    """The interpreter takes what the compiler refuses, such as a name from outside in an annotation."""
    ran = run("-c", COMPILE.replace("TARGET", target).replace("BINARY", repr(binary)), TRITON_CACHE_DIR=str(tmp_path))
    assert (ran.stderr, ran.stdout.split()) == ("", ["True"] * 12)


def test_on_the_cpu_without_the_interpreter_it_says_what_to_use(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(WeightsMismatch, match=r"these tensors are on the CPU: use pulse\.torch\.ops"):
        triton_ops.changes(torch.zeros(2), torch.ones(2))


def test_without_triton_it_says_what_to_install_and_nothing_else_needs_it():
    code = "import sys\nsys.modules['triton'] = None\nimport pulse.torch.ops\nprint('fine')\nimport pulse.torch.triton_ops"
    ran = run("-c", code)
    assert ran.stdout == "fine\n"
    assert "ModuleNotFoundError: pulse.torch.triton_ops needs Triton: pip install triton" in ran.stderr
