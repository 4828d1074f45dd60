"""Stores written by earlier releases are read for ever, to the same files. `make_store.py` made them and never overwrites one."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from pulse import follow
from pulse.store import LocalStore
from pulse.versions import Versions

HERE = Path(__file__).parent
STORE = HERE / "v0" / "compressed-anchors"


@pytest.mark.parametrize("version", range(3))
def test_a_golden_version_is_pulled_as_the_file_recorded_with_it(tmp_path, version):
    follow.pull(LocalStore(STORE), version, tmp_path / "pulled.safetensors")
    assert (tmp_path / "pulled.safetensors").read_bytes() == STORE.with_name(f"{STORE.name}-{version}.safetensors").read_bytes()


def test_both_golden_anchors_are_compressed_and_lead_to_the_newest_version(tmp_path):
    reader = Versions(LocalStore(STORE))
    own, late = reader.manifest(0).anchor, reader.late_anchor(2)
    assert own.compressed
    assert late.anchor.compressed
    newest, way = reader.restore_and_plan(2)
    assert (way.start.version, len(way.patches)) == (2, 0)
    shutil.copytree(STORE, tmp_path / "store")
    (tmp_path / "store" / late.anchor.weights[0].payload.key).unlink()
    older, way = Versions(LocalStore(tmp_path / "store")).restore_and_plan(2)
    assert (way.start.version, len(way.patches)) == (0, 2)
    assert older == newest


def test_the_maker_of_stores_leaves_what_is_there_alone(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("golden_make_store", HERE / "make_store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    module.main()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(before) > 8
    module.main()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "is there and stays" in capsys.readouterr().out
