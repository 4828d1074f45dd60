"""Payloads written by earlier releases decode for ever, and a reader written from docs/format.md alone reads them too."""

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from pulse.codec import container, payload
from pulse.codec.payload import Anchor, Entries
from tests import rounds
from tests.golden import make_payloads, payload_reader

GOLDEN = sorted((Path(__file__).parent / "v0" / "payloads").glob("*.pulse"))
named = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)


def recorded(path):
    """What was recorded with a payload, and the anchor in it."""
    text = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    return text, Anchor(tuple(np.array(piece, np.uint32) for piece in text["pieces"]), tuple(text["views"]), text["gated"])


def test_every_golden_payload_is_there_with_its_numbers():
    assert {path.stem for path in GOLDEN} == set(make_payloads.payloads())
    assert all(path.with_suffix(".json").exists() for path in GOLDEN)


@named
def test_a_golden_payload_decodes_to_the_numbers_recorded_with_it(path):
    text, anchor = recorded(path)
    (found,) = payload.decode([path.read_bytes()], anchor)
    assert make_payloads.described(found, anchor, dict(payload.read(path.read_bytes())[0].facts)) == text


@named
def test_the_reader_that_was_written_from_the_document_reads_it_too(path):
    text, _ = recorded(path)
    header, positions, values = payload_reader.decode(path.read_bytes(), text["pieces"], text["views"])
    assert (header["facts"], bool(header["gated"]), positions, values) == (text["facts"], text["gated"], text["positions"], text["values"])


@named
def test_a_golden_payload_is_still_written_as_it_was(path):
    entries, anchor, value_dtype, block = make_payloads.payloads()[path.stem]
    again = payload.encode(entries, anchor, value_dtype=value_dtype, block=block, facts={"name": path.stem, "round": 3})
    header, sections = container.read(path.read_bytes())
    assert container.read(again.blob) == (header, sections)
    assert again.sent.view(np.uint32).tolist() == recorded(path)[0]["values"]


def test_the_golden_payloads_hold_every_kind_of_value():
    kinds = set()
    for path in GOLDEN:
        text, anchor = recorded(path)
        entries = Entries(np.array(text["positions"], np.uint64), np.array(text["values"], np.uint32).view(np.float32))
        known = anchor.at(entries.positions)
        moves, _ = payload.values.moves_of(entries.values, known, 32)
        negative = known.patterns >> np.uint32(31)
        kinds |= set(zip((moves.beyond != 0).tolist(), (moves.far != 0).tolist(), known.outer.tolist(), negative.tolist(), strict=True))
    assert len([kind for kind in kinds if kind[0]]) == 8
    assert len([kind for kind in kinds if not kind[0]]) >= 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value_dtype", payload.DIGITS)
def test_both_readers_agree_on_a_real_round(rank, value_dtype):
    anchor, entries = rounds.real(rank)
    encoded = payload.encode(entries, anchor, value_dtype=value_dtype, block=10_000)
    _, positions, values = payload_reader.decode(encoded.blob, anchor.pieces, anchor.views)
    assert positions == entries.positions.tolist()
    assert values == encoded.sent.view(np.uint32).tolist()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("view", rounds.VIEWS)
def test_both_readers_agree_on_any_weights(view, gated):
    rng = np.random.default_rng([len(view), gated])
    weights = rng.integers(0, 1 << 32, 400, dtype=np.uint32)
    at = np.flatnonzero(rng.random(400) < 0.5).astype(np.uint64)
    bits = rng.integers(0, 1 << 32, at.size, dtype=np.uint32)
    bits[~np.isfinite(bits.view(np.float32))] = 5
    anchor = Anchor((weights,), (view,), gated)
    for value_dtype in payload.DIGITS:
        encoded = payload.encode(Entries(at, bits.view(np.float32)), anchor, value_dtype=value_dtype, block=150)
        _, positions, values = payload_reader.decode(encoded.blob, anchor.pieces, anchor.views)
        assert (positions, values) == (at.tolist(), encoded.sent.view(np.uint32).tolist())


def test_that_reader_refuses_altered_bytes_and_other_weights():
    path = next(path for path in GOLDEN if path.stem == "float32-blocks-of-100")
    text, _ = recorded(path)
    blob = path.read_bytes()
    for at in range(0, len(blob), 7):
        with pytest.raises(ValueError, match="."):
            payload_reader.decode(blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :], text["pieces"], text["views"])
    at, pieces = text["positions"][5], [list(piece) for piece in text["pieces"]]
    starts = [0, *accumulate(map(len, pieces))]
    k = sum(start <= at for start in starts) - 1
    pieces[k][at - starts[k]] ^= 1 << 10
    with pytest.raises(ValueError, match="another anchor"):
        payload_reader.decode(blob, pieces, text["views"])


def test_the_maker_leaves_what_is_there_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_payloads, "HERE", tmp_path)
    (tmp_path / "float32.pulse").write_bytes(b"old")
    (tmp_path / "nothing.json").write_text("old")
    make_payloads.main()
    assert (tmp_path / "float32.pulse").read_bytes() == b"old"
    assert (tmp_path / "nothing.json").read_text() == "old"
    assert "float32: is there and stays" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    make_payloads.main()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
