"""Checkpoints: files that the safetensors library reads and writes alike, written whole or not at all."""

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
from hypothesis import given
from hypothesis import strategies as st

from pulse import checkpoint, files
from pulse.arrays import as_bits, bits_like
from pulse.bits import DTYPES, Spec, TensorBits, dtype_of
from pulse.errors import FileError, FormatError, WeightsMismatch
from pulse.testing import strategies as some
from pulse.torch.tensors import bits_tensor

TORCH = [code for code in DTYPES if not code.startswith("F6")]
NUMPY = [code for code in DTYPES if code[0] in "IUB" and code != "BF16"] + ["F64", "F32", "F16"]


def sample(code, shape=(4, 8), seed=0):
    spec = Spec(code, shape)
    data = np.random.default_rng(seed).integers(0, 2 if code == "BOOL" else 256, spec.nbytes, np.uint8)
    return TensorBits(code, shape, data.view(dtype_of(code).unsigned))


EVERY = {f"t.{code}": sample(code) for code in DTYPES} | {
    "scalar": sample("F32", ()),
    "empty": sample("BF16", (0, 3)),
    "ä ö": sample("U8", (3,)),
}


def parse(data):
    return checkpoint.parse(memoryview(data), "x")


@given(some.weights().filter(lambda weights: "__metadata__" not in weights))
def test_what_is_serialized_parses_back(weights):
    assert parse(checkpoint.serialize(weights)) == weights


@given(some.weights(), st.randoms())
def test_equal_weights_give_equal_bytes_in_whatever_order_they_come(weights, random):
    names = list(weights)
    random.shuffle(names)
    assert checkpoint.serialize({name: weights[name] for name in names}) == checkpoint.serialize(weights)


def test_a_file_of_every_dtype_is_read_by_the_safetensors_library_with_equal_bytes(tmp_path):
    checkpoint.write(tmp_path / "x.safetensors", EVERY)
    found = dict(safetensors.deserialize((tmp_path / "x.safetensors").read_bytes()))
    assert set(found) == set(EVERY)
    for name, bits in EVERY.items():
        assert (found[name]["dtype"], tuple(found[name]["shape"])) == (bits.dtype, bits.shape)
        assert bytes(found[name]["data"]) == bits.flat.tobytes()


def test_torch_loads_what_was_written_with_equal_bits(tmp_path):
    weights = {name: bits for name, bits in EVERY.items() if bits.dtype in TORCH}
    checkpoint.write(tmp_path / "x.safetensors", weights)
    found = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert {name: as_bits(tensor) for name, tensor in found.items()} == weights


def test_what_torch_wrote_is_read_with_equal_bits(tmp_path):
    weights = {name: bits for name, bits in EVERY.items() if bits.dtype in TORCH}
    safetensors.torch.save_file({name: bits_tensor(bits) for name, bits in weights.items()}, tmp_path / "x.safetensors")
    assert checkpoint.read(tmp_path / "x.safetensors") == weights


def test_numpy_files_go_both_ways_with_equal_bits(tmp_path):
    weights = {name: bits for name, bits in EVERY.items() if bits.dtype in NUMPY}
    arrays = {name: bits_like(bits, np.empty(0)) for name, bits in weights.items()}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors", metadata={"who": "them"})
    checkpoint.write(tmp_path / "ours.safetensors", weights)
    assert checkpoint.read(tmp_path / "theirs.safetensors") == weights
    assert {name: as_bits(array) for name, array in safetensors.numpy.load_file(tmp_path / "ours.safetensors").items()} == weights


def test_reading_maps_the_file_instead_of_copying_it(tmp_path):
    checkpoint.write(tmp_path / "x.safetensors", {"w": sample("BF16", (1 << 20,))})
    tracemalloc.start()
    bits = checkpoint.read(tmp_path / "x.safetensors")["w"]
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
    assert not bits.flat.flags.writeable


def test_weights_go_into_one_file_or_into_shards_with_an_index(tmp_path):
    weights = {f"layer.{i}": sample("F32", (100,), i) for i in range(5)}
    assert [path.name for path in checkpoint.write(tmp_path / "one", weights)] == ["model.safetensors"]
    written = checkpoint.write(tmp_path / "many", weights, limit=900)
    assert sorted(path.name for path in written) == [
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors", checkpoint.INDEX,
    ]  # fmt: skip
    assert checkpoint.read(tmp_path / "one") == checkpoint.read(tmp_path / "many") == weights
    index = json.loads((tmp_path / "many" / checkpoint.INDEX).read_bytes())
    assert index["metadata"]["total_size"] == 2000
    found = {}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "many" / file, "pt") as shard:
            found[name] = as_bits(shard.get_tensor(name))
    assert found == weights


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own():
    specs = {"a": Spec("U8", (10,)), "b": Spec("U8", (100,)), "c": Spec("U8", (10,))}
    assert list(checkpoint.layout(specs, 50).values()) == [["a"], ["b"], ["c"]]
    assert checkpoint.layout({}, 50) == {"model.safetensors": []}


@pytest.mark.parametrize(("before", "after"), [(10_000, 500), (500, 10_000), (500, 900), (900, 500)])
def test_writing_over_a_directory_leaves_nothing_of_the_old_weights_that_a_tool_could_load(tmp_path, before, after):
    old, new = ({f"w{i}": sample("U8", (200,), seed + i) for i in range(5)} for seed in (0, 10))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter.safetensors").write_text("someone else's")
    checkpoint.write(tmp_path, old, limit=before)
    written = checkpoint.write(tmp_path, new, limit=after)
    assert checkpoint.read(tmp_path) == new
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "adapter.safetensors", *(path.name for path in written)}


def test_weights_mapped_from_a_directory_can_be_written_into_it(tmp_path):
    weights = {f"w{i}": sample("U8", (200,), i) for i in range(5)}
    checkpoint.write(tmp_path, weights, limit=500)
    checkpoint.write(tmp_path, checkpoint.read(tmp_path), limit=900)
    assert checkpoint.read(tmp_path) == weights


def test_the_name_that_safetensors_keeps_for_itself_is_refused():
    with pytest.raises(WeightsMismatch, match="__metadata__"):
        checkpoint.serialize({"__metadata__": sample("U8")})


SMALL = checkpoint.serialize({"w": sample("BF16", (3,)), "b": sample("F32", ()), "e": sample("U8", (0,))})


def test_a_file_cut_off_at_any_byte_is_refused():
    for end in range(len(SMALL)):
        with pytest.raises(FormatError, match=r"^x"):
            parse(SMALL[:end])


def test_a_file_with_something_after_it_is_refused():
    for more in (b"\0", b" ", SMALL):
        with pytest.raises(FormatError, match="extended"):
            parse(SMALL + more)


def test_a_flipped_bit_changes_a_value_or_is_a_format_error_and_nothing_else():
    for at in range(len(SMALL)):
        for bit in range(8):
            flipped = bytearray(SMALL)
            flipped[at] ^= 1 << bit
            try:
                parse(bytes(flipped))
            except FormatError:
                continue


def file(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


EMPTY = b'"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
HOSTILE = {
    "nothing": b"",
    "a header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "a header beyond the file": struct.pack("<Q", 3) + b"{}",
    "no header": file(b""),
    "a list": file([]),
    "text of half a surrogate": file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "another charset": file('{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16")),
    "a byte order mark": file(b"\xef\xbb\xbf{}"),
    "a tensor named twice": file(b"{%s,%s}" % (EMPTY, EMPTY)),
    "a shape given twice": file(b'{"w":{"dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0]}}'),
    "a deep header": file(b'{"w":' * 100_000),
    "a deep shape": file(b'{"w":{"dtype":"U8","shape":' + b"[" * 400 + b"]" * 400 + b',"data_offsets":[0,0]}}'),
    "a number of 10,000 digits": file(b'{"w":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,0]}}'),
    "an entry that is a number": file({"w": 5}),
    "no offsets": file({"w": {"dtype": "U8", "shape": [4]}}, bytes(4)),
    "an unknown dtype": file({"w": entry("F7")}, bytes(4)),
    "a dtype that is a list": file({"w": entry([])}, bytes(4)),
    "a shape that is a number": file({"w": entry() | {"shape": 4}}, bytes(4)),
    "a shape of floats": file({"w": entry(shape=(4.0,))}, bytes(4)),
    "a negative shape": file({"w": entry(shape=(-4, -1))}, bytes(4)),
    "a shape of truths": file({"w": entry(shape=(True, 4))}, bytes(4)),
    "a huge shape": file({"w": entry(shape=(1 << 40, 1 << 40))}, bytes(4)),
    "a huge empty shape": file({"w": entry(shape=(1 << 62, 1 << 62, 0), offsets=(0, 0))}),
    "many dimensions": file({"w": entry(shape=(1,) * 65, offsets=(0, 1))}, bytes(1)),
    "very many large dimensions": file({"w": entry(shape=((1 << 62),) * 100_000)}, bytes(4)),
    "offsets of one": file({"w": entry(offsets=(0,))}, bytes(4)),
    "offsets of three": file({"w": entry(offsets=(0, 4, 4))}, bytes(4)),
    "offsets reversed": file({"w": entry(offsets=(4, 0))}, bytes(4)),
    "offsets beyond the file": file({"w": entry(offsets=(1 << 60, (1 << 60) + 4))}, bytes(4)),
    "offsets that do not fit the shape": file({"w": entry(offsets=(0, 3))}, bytes(3)),
    "a packed tensor that fills no byte": file({"w": entry("F4", (3,), (0, 1))}, bytes(1)),
    "tensors that overlap": file({"a": entry(), "b": entry(offsets=(2, 6))}, bytes(6)),
    "tensors on one place": file({"a": entry(), "b": entry()}, bytes(4)),
    "a hole": file({"a": entry(), "b": entry(offsets=(5, 9))}, bytes(9)),
    "a hole at the start": file({"a": entry(offsets=(1, 5))}, bytes(5)),
    "another format": b"PK\x03\x04" + bytes(100),
    "zeros": bytes(100),
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in HOSTILE if case != "zeros"])
def test_a_file_that_lies_is_refused_by_name(case):
    with pytest.raises(FormatError, match=r"^x"):
        parse(HOSTILE[case])


def test_a_file_of_zeros_is_refused():
    with pytest.raises(FormatError, match="not JSON"):
        parse(HOSTILE["zeros"])


def test_messages_about_hostile_headers_stay_short():
    for case in ("very many large dimensions", "a deep shape"):
        with pytest.raises(FormatError) as caught:
            parse(HOSTILE[case])
        assert len(str(caught.value)) < 1000


def test_arbitrary_alterations_never_raise_anything_but_a_format_error():
    seed = int(os.environ.get("PULSE_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(32)
    for i in range(5000):
        rng = random.Random(f"{seed} {i}")
        data = bytearray(SMALL)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice([rng.randbytes(rng.randrange(3)), b"9", b"0", b'"', b"[", b"-", b"e"])
        try:
            parse(bytes(data))
        except FormatError:
            pass
        except Exception as error:  # noqa: BLE001  whatever it is, it is a failure
            pytest.fail(f"PULSE_FUZZ_SEED={seed}, round {i}: {type(error).__name__}: {error}\n{bytes(data)!r}")


def test_data_at_an_odd_place_parses_all_the_same():
    odd = file(json.dumps({"w": entry("F32", (1,))}).encode() + b" ", bytes([1, 2, 3, 4]))
    for pad in range(4):
        assert parse(memoryview(bytes(pad) + odd)[pad:])["w"].flat.tolist() == [0x04030201]


INDEXES = {
    "no JSON": b"nope",
    "a list": b"[]",
    "no map": b"{}",
    "a map that is a list": b'{"weight_map":[1]}',
    "a deep one": b"[" * 100_000,
    "a shard that is a number": b'{"weight_map":{"w":5}}',
    "a shard that is a list": b'{"weight_map":{"w":["model.safetensors"]}}',
    "a shard without a name": b'{"weight_map":{"w":""}}',
    "the directory above": b'{"weight_map":{"w":".."}}',
    "this directory": b'{"weight_map":{"w":"."}}',
    "a shard elsewhere": b'{"weight_map":{"w":"../one/model.safetensors"}}',
    "an absolute shard": b'{"weight_map":{"w":"/etc/x.safetensors"}}',
    "a shard with a zero byte": b'{"weight_map":{"w":"a\\u0000.safetensors"}}',
    "a shard of half a surrogate": b'{"weight_map":{"w":"\\ud800.safetensors"}}',
    "a foreign kind of file": b'{"weight_map":{"w":"pytorch_model.bin"}}',
    "another charset": b'\xff\xfe"',
    "another tensor": b'{"weight_map":{"v":"model.safetensors"}}',
    "one tensor too many": b'{"weight_map":{"w":"model.safetensors","v":"model.safetensors"}}',
    "no tensor of the shard": b'{"weight_map":{}, "more": {"w":"model.safetensors"}}',
}


@pytest.mark.parametrize("case", [case for case in INDEXES if case != "no tensor of the shard"])
def test_an_index_that_lies_or_leads_out_of_its_directory_is_refused_by_name(tmp_path, case):
    checkpoint.write(tmp_path, {"w": sample("U8")})
    (tmp_path / checkpoint.INDEX).write_bytes(INDEXES[case])
    with pytest.raises(FormatError, match=str(tmp_path)):
        checkpoint.read(tmp_path)


def test_missing_empty_and_unfit_files_are_named(tmp_path):
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "folder.safetensors").mkdir()
    cases = {"nothing.safetensors": FileError, "empty.safetensors": FormatError, "folder.safetensors": FileError}
    for name, error in cases.items():
        with pytest.raises(error, match=name):
            checkpoint.read(tmp_path / name)
    (tmp_path / checkpoint.INDEX).write_text('{"weight_map":{"w":"model-00001-of-00002.safetensors"}}')
    with pytest.raises(FileError, match="model-00001-of-00002"):
        checkpoint.read(tmp_path)


def test_a_torn_shard_is_refused_by_name(tmp_path):
    checkpoint.write(tmp_path, {f"w{i}": sample("U8", (200,), i) for i in range(5)}, limit=500)
    torn = tmp_path / "model-00002-of-00003.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    with pytest.raises(FormatError, match="model-00002-of-00003"):
        checkpoint.read(tmp_path)


def test_companions_are_the_directorys_own_files_that_are_no_weights(tmp_path):
    names = ["config.json", "tokenizer.json", ".hidden", "model.safetensors", "model.safetensors.index.json", "x.gguf", "pytorch_model.bin"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert [name for name, _ in checkpoint.companions(tmp_path)] == ["config.json", "tokenizer.json"]
    assert [name for name, _ in checkpoint.companions(tmp_path / "x.gguf")] == ["x.gguf"]
    with pytest.raises(FileError, match="no such file"):
        list(checkpoint.companions(tmp_path / "none"))


@pytest.mark.parametrize("place", ["missing/x.safetensors", "plain/x.safetensors", "folder.safetensors", "plain/folder"])
def test_a_place_that_cannot_be_written_is_a_file_error_and_nothing_is_left(tmp_path, place):
    (tmp_path / "plain").write_text("a file")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(FileError, match="cannot write"):
        checkpoint.write(tmp_path / place, {"w": sample("U8")})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder.safetensors", "plain"]


def limited(target, limit=None):
    """Writes weights ten times as large as before into `target`, in a process whose files may not grow beyond 100,000 bytes."""
    code = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import numpy as np
from pathlib import Path
from pulse import checkpoint, files
from pulse.bits import TensorBits
from pulse.errors import FileError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
small = TensorBits("U8", (60_000,), np.ones(60_000, "u1"))
large = TensorBits("U8", (200_000,), np.ones(200_000, "u1"))
try:
    checkpoint.write(Path({str(target)!r}), {{"a": small, "z": large}}, limit={limit or checkpoint.SHARD_BYTES})
except FileError as error:
    print(error)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_disk_that_fills_up_is_a_file_error_and_the_old_file_is_as_it_was(tmp_path):
    checkpoint.write(tmp_path / "x.safetensors", {"w": sample("U8")})
    before = contents(tmp_path)
    assert f"cannot write {tmp_path / 'x.safetensors'}: File too large; what was there is unchanged" in limited(tmp_path / "x.safetensors")
    assert contents(tmp_path) == before


def test_a_disk_that_fills_up_at_the_second_shard_leaves_the_whole_directory_as_it_was(tmp_path):
    checkpoint.write(tmp_path, {"a": sample("U8", (60_000,)), "z": sample("U8", (60_000,))}, limit=70_000)
    before = contents(tmp_path)
    assert "model-00002-of-00002.safetensors: File too large" in limited(tmp_path, 70_000)
    assert contents(tmp_path) == before


def test_a_file_is_replaced_in_one_step_and_no_other_file_appears(tmp_path):
    path = tmp_path / "x"
    files.write_file(path, b"old")
    with path.open("rb") as reader:
        files.write_file(path, memoryview(b"new"))
        assert reader.read() == b"old"
    assert contents(tmp_path) == {"x": b"new"}


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path):
    files.write_file(tmp_path / "x", b"old")
    with pytest.raises(TypeError):
        files.write_file(tmp_path / "x", "text is not bytes")
    assert contents(tmp_path) == {"x": b"old"}
