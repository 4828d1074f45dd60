"""`python -m bench --quick`, run once: the table holds every row, ours are exact, and what must be smaller is smaller."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench import report, sizes, speeds
from bench.__main__ import main
from bench.machine import machine
from bench.rivals import RIVALS
from bench.steps import Step, synthetic
from pulse.bits import TensorBits
from pulse.codec import ENCODINGS
from pulse.digest import ZERO, tensor_sums
from pulse.errors import DigestMismatch

OURS = [f"pulse, {encoding}" for encoding in ENCODINGS]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    assert main(["--quick", "--rounds", "1", "--out", str(folder)]) == 0
    (page,), (data,) = folder.glob("*.md"), folder.glob("*.json")
    return page.read_text(), json.loads(data.read_text())


def test_every_step_has_every_layout(quick):
    _, data = quick
    assert [table["step"].split(",")[0] for table in data["sizes"]] == ["slice of a model", "slice of a model", "synthetic"]
    for table in data["sizes"]:
        assert {row["layout"] for row in table["rows"]} == {*RIVALS, *OURS, sizes.WHOLE, sizes.REFERENCE}


def test_ours_were_decoded_to_the_same_bits(quick):
    _, data = quick
    exact = [row["exact"] for table in data["sizes"] for row in table["rows"] if row["kind"] == "ours"]
    assert exact == [True] * len(exact)
    assert len(exact) == 3 * len(OURS)


def test_what_must_be_smaller_is_smaller(quick):
    _, data = quick
    for table in data["sizes"]:
        found = {row["layout"]: row["nbytes"] for row in table["rows"]}
        ours = ["pulse, contextual", "pulse, portable", "pulse, absolute"]
        chain = [*ours, "paper, kindest reading", "paper v3.1", "int32 + BF16 (vLLM, verl)", sizes.WHOLE]
        assert [found[name] for name in chain] == sorted(found[name] for name in chain)


def test_ratios_are_those_of_the_bytes(quick):
    _, data = quick
    for table in data["sizes"]:
        found = {row["layout"]: row for row in table["rows"]}
        for row in table["rows"]:
            assert row["per_change"] * table["changed"] == pytest.approx(row["nbytes"])
            assert row["times_smaller"] * row["nbytes"] == pytest.approx(2 * table["units"])
            assert row["to_paper"] * found["paper v3.1"]["nbytes"] == pytest.approx(row["nbytes"])
            assert row["to_reference"] * found[sizes.REFERENCE]["nbytes"] == pytest.approx(row["nbytes"])


def test_every_job_was_timed_in_one_thread_and_in_two(quick):
    _, data = quick
    jobs = {(row["job"], row["encoding"], row["threads"]) for row in data["speeds"]["rows"]}
    expected = {(job, encoding, threads) for job in ("encode", "apply") for encoding in ENCODINGS for threads in (1, 2)}
    assert jobs == expected | {("digest of everything", None, threads) for threads in (1, 2)}
    assert set(data["speeds"]["first_use"]) == {"compiled", "cached", "second"}


def test_the_page_says_what_its_figures_depend_on(quick):
    page, data = quick
    for words in [*data["machine"].values(), *(table[key] for table in data["sizes"] for key in ("lr", "regime", "step"))]:
        assert words in page
    for name in [*RIVALS, *OURS]:
        assert name in page


@pytest.fixture(scope="module")
def made_up():
    return synthetic(2e6, 1.25e-6)


@pytest.mark.parametrize("threads", speeds.THREADS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_timed_publisher_and_worker_move_the_weights_exactly(made_up, encoding, threads):
    sums = tensor_sums(made_up.old)
    live = {name: bits.copy() for name, bits in made_up.old.items()}
    speeds.receive(speeds.publish(made_up, sums, encoding, threads), live, sums, threads)
    assert live == made_up.new


def test_a_tensor_that_changed_as_a_whole_is_timed_as_well():
    old, new = ({"w": TensorBits("BF16", (1000,), np.full(1000, bits, "<u2"))} for bits in (1, 2))
    sums = tensor_sums(old)
    speeds.receive(speeds.publish(Step("s", "", "", old, new), sums, "portable", 1), old, sums, 1)
    assert old == new


def test_the_timed_worker_proves_the_result(made_up):
    sums = tensor_sums(made_up.old)
    live = {name: bits.copy() for name, bits in made_up.old.items()}
    blob = speeds.publish(made_up, sums, "portable", 1)
    with pytest.raises(DigestMismatch, match="the result"):
        speeds.receive(blob, live, dict.fromkeys(sums, ZERO), 1)


def test_extra_memory_is_the_peak_above_what_was_held():
    found = speeds.extra_memory(lambda: np.ones(4 << 20).sum())
    if found is None:
        pytest.skip("this system does not say")
    assert 24 << 20 < found < 48 << 20


def test_a_layout_that_is_not_exact_is_shouted_about(made_up):
    table = sizes.measure(made_up, lambda _: None)
    broken = replace(table, rows=tuple(replace(row, exact=False) if row.kind == "ours" else row for row in table.rows))
    results = report.Results("bench", machine(), (table,), None)
    assert "NOT EXACT" not in report.markdown(results)
    assert "NOT EXACT: pulse, portable" in report.markdown(replace(results, sizes=(broken,)))


def test_a_step_without_changes_is_refused(made_up):
    with pytest.raises(ValueError, match="nothing changed"):
        sizes.measure(replace(made_up, new=made_up.old), lambda _: None)
