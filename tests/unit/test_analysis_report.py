"""Kinds of layer, tables, plots and the page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulse.analysis import Checkpoints, count, figures
from pulse.analysis.layers import KINDS, kind_of
from pulse.analysis.page import page
from pulse.analysis.plots import Series, bars, lines, ticks
from pulse.analysis.sequences import same_tensors
from pulse.analysis.tables import overview, shortened, tables, tensor_table
from pulse.bits import Spec, TensorBits
from pulse.errors import WeightsMismatch
from tests.chains import Trainer


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("transformer.wte.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.norm.weight", "norm"),
        ("model.layers.0.input_layernorm.weight", "norm"),
        ("model.layers.3.self_attn.q_norm.weight", "norm"),
        ("transformer.h.0.ln_1.weight", "norm"),
        ("transformer.ln_f.bias", "norm"),
        ("model.layers.0.self_attn.q_proj.weight", "attention q"),
        ("model.layers.0.self_attn.k_proj.bias", "attention k"),
        ("model.layers.0.self_attn.v_proj.weight", "attention v"),
        ("model.layers.0.self_attn.o_proj.weight", "attention o"),
        ("model.layers.0.self_attn.qkv_proj.weight", "attention qkv"),
        ("transformer.h.0.attn.c_attn.weight", "attention qkv"),
        ("transformer.h.0.attn.c_proj.weight", "attention o"),
        ("transformer.h.0.mlp.c_proj.weight", "mlp down"),
        ("model.layers.0.mlp.gate_proj.weight", "mlp gate"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "mlp up"),
        ("model.layers.0.block_sparse_moe.experts.1.w2.weight", "mlp down"),
        ("model.layers.0.mlp.gate.weight", "other"),
        ("bert.encoder.layer.0.attention.output.dense.weight", "other"),
        ("counter", "other"),
    ],
)
def test_kinds_of_layer_follow_from_hugging_face_names(name, kind):
    assert kind_of(name) == kind
    assert kind in KINDS


@pytest.fixture(scope="module")
def found():
    trainer = Trainer()
    history = [trainer.bits()]
    for _ in range(20):
        trainer.step()
        history.append(trainer.bits())
    labels = [f"<{i}> & more" for i in range(21)]
    return figures(count(Checkpoints(history, labels), views=True), 3e-6)


def test_long_tables_say_in_the_middle_how_much_is_left_out():
    rows = [(str(i), "x") for i in range(20)]
    assert shortened(rows, 20) == tuple(rows)
    short = shortened(rows, 6)
    assert [row[0] for row in short] == ["0", "1", "2", "… 15 more", "18", "19"]
    assert len(short) == 6


def test_tables_are_rectangles_of_bounded_height(found):
    made = tables(found, 13)
    assert all(len(row) == len(table.headings) for table in made for row in table.rows)
    assert all(len(table.rows) <= 13 for table in made)
    assert made[0].rows[6][0] == "… 8 more"
    assert len(tensor_table(found).rows) == found["tensors"]


def test_the_overview_has_the_figures_of_the_history(found):
    text = "\n".join(overview(found))
    assert f"{found['weights']:,} weights" in text
    assert f"{100 * found['share']:.3g} %" in text
    assert "7.68e-04" in text  # 256 times the learning rate


class Checker(HTMLParser):
    """Sees to it that every element is closed, and that nothing is loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.svgs = [], 0

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)
        self.svgs += tag == "svg"

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_loads_nothing_and_escapes_names(found):
    text = page("<title> & all", found)
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.svgs == 9
    assert "&lt;20&gt; &amp; more" in text
    assert "<20>" not in text
    assert not re.search(r"https?://|url\(|@import|<script", text)


def test_a_page_of_one_checkpoint_shows_its_magnitudes():
    weights = {"w": TensorBits("F32", (4,), np.array([0, 1, -3, 2], np.float32).view(np.uint32))}
    checker = Checker()
    checker.feed(page("one", figures(count(Checkpoints([weights], ["one"])))))
    assert checker.svgs == 1


def test_nothing_to_show_can_be_drawn():
    for weights in ({}, {"empty": TensorBits("F32", (0,), np.zeros(0, np.uint32))}, {"i": TensorBits("I8", (3,), np.ones(3, np.uint8))}):
        for moments in (1, 2):
            seen = figures(count(Checkpoints([weights] * moments, ["a", "b"][:moments]), views=True), 1e-6)
            Checker().feed(page("nothing", seen))
            assert tables(seen)
            assert overview(seen)


finite = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(finite, st.floats(0, 1e6)), max_size=30), st.booleans())
def test_lines_stay_inside_their_frame(points, marks):
    drawing = ET.fromstring(lines([Series("a", sorted(points)), Series("b", sorted(points))], "x", "y", marks=marks))
    for line in drawing.iter("polyline"):
        for pair in line.get("points").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 440
            assert 0 <= y <= 240


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60))
def test_bars_are_as_high_as_their_values(values):
    drawing = ET.fromstring(bars([str(i) for i in range(len(values))], values, "y"))
    heights = [float(bar.get("height")) for bar in drawing.iter("rect")]
    assert len(heights) == len(values)
    assert max(heights) <= 240
    assert heights[values.index(max(values))] == max(heights)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.integers(2, 8))
def test_ticks_are_few_and_inside(low, width, most):
    found = ticks(low, low + width, most)
    assert len(found) <= most
    slack = 1e-6 * max(width, abs(low), 1e-9)
    assert all(low - slack <= tick <= low + width + slack for tick in found)


def test_other_tensors_than_in_the_first_checkpoint_are_named():
    first = {name: Spec("F32", (2,)) for name in "abcdef"}
    with pytest.raises(WeightsMismatch, match=r"third: other tensors .*: a, b, c and 3 more"):
        same_tensors(first, {}, "third")
    with pytest.raises(WeightsMismatch, match="f$"):
        same_tensors(first, first | {"f": Spec("BF16", (2,))}, "third")
