"""`pulse analyze`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pulse import checkpoint
from pulse.bits import TensorBits
from tests.cli.samples import weights


@pytest.fixture
def store(pulse, checkpoints, tmp_path):
    """A store with the three checkpoints as versions 0 to 2, of steps 10 to 12."""
    for i, path in enumerate(checkpoints):
        assert pulse("publish", "store", path, "--step", 10 + i).code == 0
    return tmp_path / "store"


def test_checkpoints_in_order_give_what_each_step_changed(pulse, checkpoints):
    seen = pulse("analyze", *checkpoints, "--json").json
    read = [checkpoint.read(path) for path in checkpoints]
    changed = [sum(int((old[name].flat != new[name].flat).sum()) for name in old) for old, new in pairwise(read)]
    assert [row["changed"] for row in seen["per_step"]] == changed
    assert seen["weights"] == 6704
    assert [row["kind"] for row in seen["per_kind"]] == ["embedding", "norm", "other"]
    assert seen["step_sizes"] == [{"from": 1, "to": 1, "changes": sum(changed), "share": 1.0}]
    assert seen["critical"] is seen["views"] is None
    assert seen["labels"] == ["0.safetensors", "1.safetensors", "2.safetensors"]


def test_a_store_gives_what_its_checkpoints_give(pulse, checkpoints, store):
    files, chain = pulse("analyze", *checkpoints, "--json").json, pulse("analyze", store, "--json").json
    for key in ("share", "over_k_steps", "per_tensor", "per_class", "step_sizes", "directions", "magnitudes"):
        assert chain[key] == files[key]
    assert chain["labels"] == ["version 0 (step 10)", "version 1 (step 11)", "version 2 (step 12)"]
    assert all(row["published_bytes"] > 0 for row in chain["per_step"])


def test_versions_of_a_store_can_be_chosen(pulse, store):
    whole, part = pulse("analyze", store, "--json").json, pulse("analyze", store, "--from", 1, "--json").json
    assert part["labels"] == whole["labels"][1:]
    assert [row["changed"] for row in part["per_step"]] == [row["changed"] for row in whole["per_step"][1:]]
    named = pulse("analyze", f"{store}@1", f"{store}@newest", "--json").json
    assert [row["changed"] for row in named["per_step"]] == [row["changed"] for row in part["per_step"]]


def test_the_screen_has_every_table(pulse, checkpoints):
    done = pulse("analyze", *checkpoints, "--lr", "3e-6", "--views", "--all")
    assert done.code == 0
    for title in (
        "each step",
        "over k steps",
        "kinds of layer",
        "exponent classes",
        "changed again",
        "|step|",
        "|w| at the start",
        "lower precision",
        "tensors",
    ):
        assert title in done.out
    assert "below |w| = 7.68e-04" in done.out
    assert "layer.weight" in done.out
    assert max(map(len, done.out.splitlines())) <= 160


def test_masters_show_what_each_view_sees(pulse, tmp_path):
    rng = np.random.default_rng(0)
    masters = [(rng.standard_normal(20_000) * 0.02).astype(np.float32)]
    masters.append(masters[0] + np.float32(3e-6))
    for i, values in enumerate(masters):
        checkpoint.write(tmp_path / f"{i}.safetensors", {"w": TensorBits("F32", (20_000,), values.view(np.uint32))})
    views = {row["view"]: row["share"] for row in pulse("analyze", "0.safetensors", "1.safetensors", "--views", "--json").json["views"]}
    rounded = [(values.view(np.uint32) + 0x7FFF + ((values.view(np.uint32) >> 16) & 1)) >> 16 for values in masters]
    assert views["F32"] > 0.9
    assert views["BF16"] == np.mean(rounded[0] != rounded[1])
    assert views["F16"] == np.mean(masters[0].astype(np.float16) != masters[1].astype(np.float16))
    assert views["F8_E5M2"] < views["F8_E4M3"] + 0.01 < views["BF16"] + 0.01


def test_a_page_is_written_beside_the_tables(pulse, checkpoints, tmp_path):
    done = pulse("analyze", *checkpoints, "--html", "page.html")
    assert done.out.splitlines()[-1] == "plots: page.html"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_one_checkpoint_shows_its_magnitudes(pulse, checkpoints):
    done = pulse("analyze", checkpoints[0], "--lr", "1e-6")
    assert done.code == 0
    assert "give two or more" in done.out
    assert "|w| at the start" in done.out


def test_mistakes_are_one_clear_line(pulse, checkpoints, store, tmp_path):
    checkpoint.write(tmp_path / "odd.safetensors", {"other": weights(0)["norm.weight"]})
    for arguments, words in (
        ((checkpoints[0], "odd.safetensors"), "other tensors than in the first"),
        ((store, checkpoints[0]), "name a version of it"),
        ((*checkpoints, "--from", 1), "this is not one"),
        ((store, "--from", 2, "--to", 1), "there are no versions 2 to 1; the newest is 2"),
        ((store, "--to", 9), "the newest is 2"),
        (("nowhere",), "no such file"),
    ):
        refused = pulse("analyze", *arguments)
        assert refused.code == 1
        assert words in refused.err
        assert len(refused.err.splitlines()) == 1
    assert pulse("analyze").code == 2


def test_a_page_never_takes_the_place_of_something_else(pulse, checkpoints, tmp_path):
    before = checkpoints[0].read_bytes()
    refused = pulse("analyze", *checkpoints, "--html", checkpoints[0])
    assert refused.code == 1
    assert "not overwritten" in refused.err
    assert checkpoints[0].read_bytes() == before
    for _ in range(2):  # an older page may be
        assert pulse("analyze", *checkpoints, "--html", "page.html").code == 0
    assert pulse("analyze", *checkpoints, "--lr", "inf").code == 2
