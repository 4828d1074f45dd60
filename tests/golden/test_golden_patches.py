"""Patches written by earlier releases decode for ever, to the same numbers. `make.py` made them and never overwrites one."""

import importlib.util
import json
from pathlib import Path

import pytest

from pulse import codec

HERE = Path(__file__).parent
GOLDEN = sorted((HERE / "v0").glob("*.pulse"))


def make():
    spec = importlib.util.spec_from_file_location("golden_make", HERE / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_golden_patch_is_there_with_its_numbers():
    assert {path.stem for path in GOLDEN} == set(make().patches())
    assert all(path.with_suffix(".json").exists() for path in GOLDEN)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_patch_decodes_to_the_numbers_recorded_with_it(path):
    patch = codec.decode(path.read_bytes())
    assert json.loads(json.dumps(make().described(patch))) == json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


def test_the_maker_leaves_what_is_there_alone(tmp_path, monkeypatch, capsys):
    module = make()
    monkeypatch.setattr(module, "HERE", tmp_path)
    (tmp_path / "portable.pulse").write_bytes(b"old")
    (tmp_path / "nothing.json").write_text("old")
    module.main()
    assert (tmp_path / "portable.pulse").read_bytes() == b"old"
    assert not (tmp_path / "portable.json").exists()
    assert (tmp_path / "nothing.json").read_text() == "old"
    assert not (tmp_path / "nothing.pulse").exists()
    assert "portable: is there and stays" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    module.main()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
