"""`pulse diff`, `apply`, `inspect`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from pulse import checkpoint
from tests.cli.samples import weights


def test_a_patch_turns_the_old_checkpoint_into_the_new_one_byte_for_byte(pulse, checkpoints, tmp_path):
    old, new, _ = checkpoints
    made = pulse("diff", old, new, "-o", "step.pulse")
    assert made.code == 0
    assert "smaller than NEW" in made.out
    applied = pulse("apply", "step.pulse", old, "-o", "made.safetensors")
    assert applied.code == 0
    assert (tmp_path / "made.safetensors").read_bytes() == new.read_bytes()


@pytest.mark.parametrize("encoding", ["portable", "absolute"])
def test_every_encoding_can_be_asked_for_and_is_named(pulse, checkpoints, encoding):
    made = pulse("diff", *checkpoints[:2], "-o", "step.pulse", "--encoding", encoding, "--json")
    assert made.json["encoding"] == encoding
    assert pulse("inspect", "step.pulse", "--json").json["encoding"] == encoding


def test_diff_exits_0_and_says_so_when_nothing_differs(pulse, checkpoints):
    made = pulse("diff", checkpoints[0], checkpoints[0])
    assert made.code == 0
    assert "0 of 6,704 weights changed" in made.out


def test_inspect_lists_the_tensors_with_the_most_changes_first(pulse, checkpoints):
    pulse("diff", *checkpoints[:2], "-o", "step.pulse")
    seen = pulse("inspect", "step.pulse", "--json").json
    counts = [row["changed"] for row in seen["tensors"]]
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == seen["changed"]
    assert "layer.weight" in pulse("inspect", "step.pulse").out


def test_directories_with_their_config_files_go_in_and_come_out(pulse, tmp_path):
    old = weights(0)
    for name, tensors in (("old", old), ("new", weights(1, 0.02, old))):
        checkpoint.write(tmp_path / name, tensors, limit=8000)
        (tmp_path / name / "config.json").write_text("{}")
    assert (tmp_path / "old" / checkpoint.INDEX).exists()
    pulse("diff", "old", "new", "-o", "step.pulse")
    assert pulse("apply", "step.pulse", "old", "-o", "made").code == 0
    assert checkpoint.read(tmp_path / "made") == checkpoint.read(tmp_path / "new")
    assert (tmp_path / "made" / "config.json").read_text() == "{}"


def test_apply_does_not_write_into_a_directory_that_holds_something(pulse, checkpoints, tmp_path):
    pulse("diff", *checkpoints[:2], "-o", "step.pulse")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("keep")
    refused = pulse("apply", "step.pulse", checkpoints[0], "-o", "there")
    assert refused.code == 1
    assert "not empty" in refused.err
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]


def test_a_wrong_base_is_refused_and_nothing_is_written(pulse, checkpoints, tmp_path):
    pulse("diff", *checkpoints[:2], "-o", "step.pulse")
    refused = pulse("apply", "step.pulse", checkpoints[2], "-o", "made.safetensors")
    assert refused.code == 1
    assert refused.err.startswith("pulse: BaseMismatch: the patch applies to weights with state digest ")
    assert not (tmp_path / "made.safetensors").exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "extended", "foreign"])
def test_a_damaged_patch_is_one_clear_line(pulse, checkpoints, tmp_path, damage):
    pulse("diff", *checkpoints[:2], "-o", "step.pulse")
    path = tmp_path / "step.pulse"
    data = bytearray(path.read_bytes())
    match damage:
        case "truncated":
            data = data[:-7]
        case "flipped":
            data[len(data) // 2] ^= 4
        case "extended":
            data += b"\0"
        case "foreign":
            data = bytearray(checkpoints[0].read_bytes())
    path.write_bytes(data)
    for arguments in (("apply", path, checkpoints[0], "-o", "made.safetensors"), ("inspect", path)):
        refused = pulse(*arguments)
        assert refused.code == 1
        assert len(refused.err.splitlines()) == 1
        assert refused.err.startswith("pulse: ")


def test_errors_are_json_for_programs(pulse):
    refused = pulse("diff", "nowhere", "nothing", "--json")
    assert refused.code == 1
    assert refused.json["error"] == "FileError"
    assert "nowhere" in refused.json["message"]


def test_wrong_usage_exits_2(pulse, checkpoints):
    assert pulse("diff", checkpoints[0]).code == 2
    assert pulse("unknown").code == 2
    assert pulse("diff", *checkpoints[:2], "--encoding", "magic").code == 2


def test_an_output_that_cannot_be_written_is_one_clear_line(pulse, checkpoints):
    refused = pulse("diff", *checkpoints[:2], "-o", "no/such/folder/step.pulse")
    assert refused.code == 1
    assert "No such file or directory" in refused.err


def test_a_disk_that_is_full_leaves_the_old_output_as_it_was(pulse, checkpoints, tmp_path, small_disk):
    shutil.copy(checkpoints[0], small_disk / "made.safetensors")
    before = (small_disk / "made.safetensors").read_bytes()
    pulse("diff", *checkpoints[:2], "-o", "step.pulse")
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (small_disk.stat().st_size or 1))
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"x" * max(free - 4096, 0))
    refused = pulse("apply", "step.pulse", checkpoints[0], "-o", small_disk / "made.safetensors")
    assert refused.code == 1
    assert "No space left on device" in refused.err
    assert (small_disk / "made.safetensors").read_bytes() == before
    assert not list(small_disk.glob(".*"))


def test_help_loads_nothing_that_would_make_it_slow(pulse):
    """Timing never fails a test; what is loaded may."""
    import subprocess
    import sys

    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, pulse.cli; print(*sys.modules)"], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"numpy", "torch", "numba", "obstore", "zstandard"} & set(loaded)
    started = time.perf_counter()
    assert "Two checkpoints" in pulse("--help").out
    print(f"help took {time.perf_counter() - started:.2f} s")


def test_versions_are_printed(pulse):
    from pulse import __version__

    assert pulse("--version").out.strip() == f"pulse {__version__}"


def test_weights_in_a_sharded_directory_and_in_a_file_have_one_digest(pulse, tmp_path):
    tensors = weights(3)
    checkpoint.write(tmp_path / "one.safetensors", tensors)
    checkpoint.write(tmp_path / "many", tensors, limit=5000)
    seen = pulse("diff", "one.safetensors", "many", "--json").json
    assert seen["base"] == seen["result"]


def test_a_patch_written_over_its_own_old_checkpoint_is_whole(pulse, checkpoints):
    old, new, _ = checkpoints
    pulse("diff", old, new, "-o", "step.pulse")
    assert pulse("apply", "step.pulse", old, "-o", old).code == 0
    assert Path(old).read_bytes() == Path(new).read_bytes()


def test_diff_never_writes_over_a_checkpoint(pulse, checkpoints):
    before = Path(checkpoints[0]).read_bytes()
    refused = pulse("diff", *checkpoints[:2], "-o", checkpoints[0])
    assert refused.code == 1
    assert "is not a patch; it is not overwritten" in refused.err
    assert Path(checkpoints[0]).read_bytes() == before


def test_arguments_in_the_wrong_order_are_recognised(pulse, checkpoints):
    pulse("diff", *checkpoints[:2], "-o", "step.pulse")
    refused = pulse("apply", checkpoints[0], "step.pulse", "-o", "made.safetensors")
    assert refused.code == 1
    assert "pulse apply PATCH OLD -o NEW" in refused.err


def test_errors_in_a_patch_name_its_file(pulse, checkpoints, tmp_path):
    (tmp_path / "torn.pulse").write_bytes(b"\x89PULSE\r\n")
    assert "torn.pulse" in pulse("inspect", "torn.pulse").err
    assert "torn.pulse" in pulse("apply", "torn.pulse", checkpoints[0], "-o", "made.safetensors").err


def test_an_output_device_that_is_full_is_one_clear_line(checkpoints):
    import subprocess

    from tests.cli.samples import PULSE

    with Path("/dev/full").open("w") as full:
        done = subprocess.run([PULSE, "diff", *checkpoints[:2]], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "pulse: output: No space left on device\n"


def test_apply_does_not_write_over_the_patch_that_it_reads(pulse, checkpoints, tmp_path):
    pulse("diff", *checkpoints[:2], "-o", "step.safetensors")  # an odd name for a patch
    before = (tmp_path / "step.safetensors").read_bytes()
    refused = pulse("apply", "step.safetensors", checkpoints[0], "-o", "step.safetensors")
    assert refused.code == 1
    assert "write the result elsewhere" in refused.err
    assert (tmp_path / "step.safetensors").read_bytes() == before
