"""Patches written by earlier releases decode for ever, to the same numbers. `make.py` made them and never overwrites one."""

import importlib.util
import json
from itertools import accumulate
from pathlib import Path

import pytest

from pulse import codec
from pulse.codec import container

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
    base = make().base_of(path.stem) if path.stem.startswith("contextual") else None
    patch = codec.decode(path.read_bytes(), base)
    assert json.loads(json.dumps(make().described(patch))) == json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))


CONTEXTUAL = [path for path in GOLDEN if path.stem.startswith("contextual")]


@pytest.mark.parametrize("path", CONTEXTUAL, ids=lambda path: path.stem)
def test_a_golden_contextual_patch_is_still_written_as_it_was(path):
    patch, encoding, block = make().patches()[path.stem]
    header, sections = container.read(path.read_bytes())
    again, found = container.read(codec.encode(patch, make().base_of(path.stem), encoding=encoding, block=block))
    assert again == header
    ends = list(accumulate((entry[1] + entry[2] for entry in header["blocks"]), initial=0))
    ranks = [start for (_, number, steps), start in zip(header["blocks"], ends, strict=False) if number and not steps]
    assert [found[i] for i in ranks] == [sections[i] for i in ranks]
    assert bool(ranks) == (path.stem not in ("contextual-nothing", "contextual-rows"))


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
