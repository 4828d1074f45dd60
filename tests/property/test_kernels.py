"""The compiled kernels give what plain numpy gives, and run where no cache can be written."""

import subprocess
import sys
import types
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse import digest, kernels, patch
from pulse.digest import Sum

WIDTHS = [1, 2, 4, 8]
SIZES = [0, 1, 2, 511, 512, 513, 1023, 1025, 5000]
PACKAGE = Path(kernels.__file__).parent


def random_units(width, size, seed=0):
    return np.random.default_rng([width, size, seed]).integers(0, 256, width * size, np.uint8).view(f"<u{width}")


def unaligned(units):
    """The same units, at an odd address."""
    room = np.empty(units.nbytes + 1, np.uint8)
    room[1:] = units.view(np.uint8)
    return np.frombuffer(room.data, units.dtype, offset=1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_sum_of_a_whole_tensor_equals_the_plain_one(width, size):
    flat = random_units(width, size)
    assert Sum(*map(int, kernels.sum_flat(flat))) == digest.plain_flat_sum(flat)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_sum_at_some_positions_equals_the_plain_one(width, size):
    values = random_units(width, size)
    positions = random_units(8, size, seed=1)
    assert Sum(*map(int, kernels.sum_at(positions, values))) == digest.mix_sum(positions, values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_changed_positions_equal_the_plain_ones(width, size):
    old = random_units(width, size)
    for seed, share in enumerate([0.0, 0.001, 0.3, 1.0]):
        new = old.copy()
        new[np.random.default_rng(seed).random(size) < share] ^= 1
        found = kernels.changed_positions(old, new)
        assert found.dtype == np.uint64
        assert np.array_equal(found, np.flatnonzero(old != new))


@given(st.sampled_from(WIDTHS), st.integers(0, 2000), st.sets(st.integers(0, 1999), max_size=20))
def test_changes_anywhere_are_found(width, size, at):
    old = np.zeros(size, f"<u{width}")
    new = old.copy()
    expected = sorted(i for i in at if i < size)
    new[expected] = 1
    assert kernels.changed_positions(old, new).tolist() == expected


@pytest.mark.parametrize("width", [2, 4])
def test_read_only_and_unaligned_memory_is_as_good(width):
    flat = random_units(width, 1025)
    odd, fixed = unaligned(flat), flat.copy()
    fixed.flags.writeable = False
    for twin in (odd, fixed):
        assert kernels.sum_flat(twin) == kernels.sum_flat(flat)
        assert kernels.changed_positions(flat, twin).size == 0


@given(st.sampled_from(WIDTHS), st.integers(0, 2000), st.sets(st.integers(0, 1999), max_size=20), st.integers(0, 9))
def test_scatter_writes_what_plain_numpy_writes(width, size, at, seed):
    flat = random_units(width, size, seed)
    positions = np.array(sorted(i for i in at if i < size), np.uint64)
    values = random_units(width, positions.size, seed=seed + 1)
    expected = flat.copy()
    expected[positions] = values
    for twin in (flat.copy(), unaligned(flat)):
        kernels.scatter(twin, positions, values)
        assert np.array_equal(twin, expected)


def test_large_tensors_go_through_the_kernels_and_small_ones_do_not_and_both_agree():
    for size in (digest._FAST_FROM - 1, digest._FAST_FROM, digest._FAST_FROM + 1):
        old = random_units(2, size)
        new = old.copy()
        new[::97] ^= 3
        positions = np.arange(size, dtype=np.uint64)
        assert digest.flat_sum(old) == digest.plain_flat_sum(old) == digest.sum_at(positions, old)
        assert np.array_equal(patch.changed_positions(old, new), np.flatnonzero(old != new))


def test_a_kernel_without_a_source_file_to_cache_beside_is_compiled_all_the_same():
    source = (PACKAGE / "digests.py").read_text(encoding="utf-8")
    loose = types.ModuleType("pulse.loose_kernels")
    exec(compile(source, "<nowhere>", "exec"), loose.__dict__)
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(loose.sum_flat.__wrapped__, cache=True)
    flat = random_units(2, 600)
    assert loose.sum_flat(flat) == kernels.sum_flat(flat)


def test_kernels_run_where_neither_the_package_nor_the_home_can_hold_a_cache(tmp_path):
    package = tmp_path / "pulse"
    (package / "kernels").mkdir(parents=True)
    for path in [*PACKAGE.parent.glob("*.py"), *PACKAGE.glob("*.py")]:
        (package / path.relative_to(PACKAGE.parent)).write_bytes(path.read_bytes())
    for folder in (package, package / "kernels"):
        (folder / "__pycache__").write_text("a file where numba wants a folder: not even root can write a cache here")
    code = (
        "import numba; import numpy as np; from pulse import digest, kernels\n"
        f"assert kernels.__file__.startswith({str(tmp_path)!r})\n"
        "flat = np.arange(40000, dtype='u2')\n"
        "assert digest.flat_sum(flat) == digest.plain_flat_sum(flat)\n"
        "try: numba.njit(digest.plain_flat_sum, cache=True)\n"
        "except RuntimeError as error: print(error)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path), "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/x", "NUMBA_CACHE_DIR": "/dev/null/numba"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "no locator available" in ran.stdout


def test_kernels_run_where_the_disk_is_too_full_for_a_cache(tmp_path):
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "import numpy as np; from pulse import digest, kernels\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "flat = np.arange(40000, dtype='u2')\n"
        "assert digest.flat_sum(flat) == digest.plain_flat_sum(flat)\n"
        "assert kernels.changed_positions(flat, flat[::-1].copy()).size == 40000\n"
    )
    environment = {"PATH": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert not list(tmp_path.rglob("*.nbc"))


def test_kernels_run_beside_a_cache_that_was_spoiled(tmp_path):
    code = (
        "import numpy as np; from pulse import digest, kernels\n"
        "flat = np.arange(40000, dtype='u2')\n"
        "assert digest.flat_sum(flat) == digest.plain_flat_sum(flat)\n"
        "print(kernels.is_cached())\n"
    )
    environment = {"PATH": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    for spoil in (b"", b"garbage", None):
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        for path in tmp_path.rglob("*.nbi"):
            path.write_bytes(path.read_bytes()[:40] if spoil is None else spoil)


def test_kernels_run_without_a_compiler_too():
    code = (
        "import numpy as np; from pulse import kernels\n"
        "assert kernels.changed_positions(np.arange(9, dtype='u2'), np.zeros(9, 'u2')).tolist() == list(range(1, 9))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PATH": "", "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
