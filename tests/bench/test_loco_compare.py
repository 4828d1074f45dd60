"""`python -m bench.loco --quick`, run once; a cell that is killed and goes on; the figures, by hand."""

from __future__ import annotations

import copy
import json
import re
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.loco import cells, coded, figures, grpo
from bench.loco.__main__ import main
from bench.loco.cells import Cell
from bench.loco.margin import MARGIN
from bench.loco.settings import CONTESTANTS, QUICK
from bench.loco.start import starting_model
from bench.loco.tables import verdict
from bench.loco.task import Task
from bench.loco.trainers import trainers_of
from pulse.exchange import MemoryExchange
from pulse.torch import OuterOptimizer

BY_NAME = {one.name: one for one in CONTESTANTS}
PARAMETERS = 13_216


def silent(_):
    """Say nothing."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert main(["--quick", "--seeds", "0", "1", "--run", str(folder), "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def data(run):
    (path,) = run.glob("*-loco-quick.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def played(run):
    return {path.stem: json.loads(path.read_text()) for path in (run / "cells").glob("*.json")}


@pytest.fixture(scope="module")
def start(run):
    return starting_model(QUICK, run, silent)


def test_every_contestant_is_played_with_every_seed(data, played):
    assert set(played) == {Cell(one, seed).name for one in CONTESTANTS for seed in (0, 1)}
    assert [one["name"] for one in data["summaries"]] == [one.name for one in CONTESTANTS]
    assert all(len(cell["rows"]) == QUICK.rounds for cell in played.values())


def test_all_contestants_begin_with_the_same_rollouts(played):
    for seed in (0, 1):
        firsts = {cell["rows"][0]["reward"] for cell in played.values() if cell["seed"] == seed}
        assert len(firsts) == 1


def test_all_contestants_learn_from_as_many_tokens(played):
    answers = QUICK.rounds * QUICK.ranks * QUICK.inner_steps * QUICK.prompts * QUICK.group
    assert {cell["rows"][-1]["tokens"] for cell in played.values()} == {answers * 2}


def test_ddp_sends_as_many_times_the_bytes_of_dense_diloco_as_there_are_inner_steps(data):
    by_name = {one["name"]: one for one in data["summaries"]}
    assert by_name["ddp"]["payload"] == QUICK.inner_steps * 4 * PARAMETERS
    assert by_name["ddp"]["to_dense"] == 1 / QUICK.inner_steps
    assert by_name["ddp"]["to_ddp_bf16"] == 1 / 2
    assert by_name["diloco"]["to_dense"] == pytest.approx(1, abs=0.01)


def test_what_must_be_smaller_is_smaller(data):
    sizes = {one["name"]: one["payload"] for one in data["summaries"]}
    order = ["pulseloco, fp8 values", "pulseloco, bf16 values", "pulseloco", "diloco, 8 bits", "diloco", "ddp"]
    assert [sizes[name] for name in order] == sorted(sizes[name] for name in order)
    assert sizes["diloco, 4 bits"] < sizes["diloco, 8 bits"]


def test_a_sparse_payload_reaches_all_others_and_a_dense_one_goes_round_a_ring(start):
    found = {}
    for name in ("pulseloco", "diloco"):
        setup = replace(QUICK, ranks=4, rounds=1)
        trainers = trainers_of(setup, BY_NAME[name], start)
        found[name] = cells.one_round(trainers, setup, start, 0, 1)
    assert found["pulseloco"]["wire_bytes"] == 3 * found["pulseloco"]["payload_bytes"]
    assert found["diloco"]["wire_bytes"] == 1.5 * found["diloco"]["payload_bytes"]


def test_the_page_holds_every_table_and_the_report_loads_nothing(run):
    (page,) = run.glob("*.md")
    text = page.read_text()
    for title in ("Payloads", "On the wire", "Learning", "No worse than DiLoCo?", "Time to a reward", "Sent, seen, waiting"):
        assert f"## {title}" in text
    report = (run / "report.html").read_text()
    assert report.count("<svg") == 10
    assert not re.search(r'(src|href)="(?!#)', report)
    for one in CONTESTANTS:
        assert f"<td>{one.name}</td>" in report


def test_a_second_run_plays_nothing_again(run):
    before = {path.name: path.stat().st_mtime_ns for path in (run / "cells").iterdir()}
    assert main(["--quick", "--seeds", "0", "1", "--run", str(run), "--out", str(run)]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (run / "cells").iterdir()} == before


def test_a_folder_with_cells_of_another_setup_is_refused(run):
    with pytest.raises(SystemExit, match="another setup"):
        main(["--run", str(run), "--out", str(run)])


class Killed(Exception):
    """The process is gone."""


@pytest.mark.parametrize("name", ["pulseloco", "pulseloco, rest in masters", "sparseloco", "ddp"])
def test_a_killed_cell_goes_on_and_ends_as_if_it_had_not_been(name, start, tmp_path):
    setup, cell = replace(QUICK, rounds=7), Cell(BY_NAME[name], 3)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    said = []

    def kill(line):
        said.append(line)
        if "round 6" in line:
            raise Killed

    expected = cells.play(cell, setup, start, whole, silent)
    with pytest.raises(Killed):
        cells.play(cell, setup, start, cut, kill)
    said.clear()
    found = cells.play(cell, setup, start, cut, said.append)
    assert len(said) == 2
    for rows in (expected["rows"], found["rows"]):
        for row in rows:
            del row["seconds"]
    assert found == expected
    assert [path.suffix for path in cut.iterdir()] == [".json"]


@pytest.mark.parametrize("name", ["pulseloco", "pulseloco, rest in masters", "pulseloco, fp8 values", "diloco", "sparseloco"])
def test_played_ranks_end_with_the_bits_of_ranks_that_meet(name, start):
    contestant, setup, windows = BY_NAME[name], replace(QUICK, ranks=3), 2
    policy = cells.policy_of(start, [weight.detach().view(-1) for weight in start.parameters()])
    noise = torch.Generator().manual_seed(5)
    rollouts = []
    for _ in range(windows):
        asked = setup.task.split()[0][:9]
        parts = grpo.sample(policy, setup.task, asked, 4, noise).split(3)
        rollouts.append([part.split(setup.inner_steps) for part in parts])
    trainers = trainers_of(setup, contestant, start)
    expected = [trainers.window(window).digest for window in rollouts]
    digests = [None] * 3

    def rank(number, exchange):
        model = copy.deepcopy(start)
        inner = torch.optim.AdamW(model.parameters(), lr=setup.lr, eps=setup.epsilon, weight_decay=0.0, fused=True)
        outer = OuterOptimizer(
            model.named_parameters(),
            exchange=exchange,
            inner_steps=setup.inner_steps,
            method=contestant.method,
            residual=contestant.residual,
        )
        digests[number] = []
        for window in rollouts:
            for now in window[number]:
                grpo.loss(model, setup.task, now).backward()
                inner.step()
                inner.zero_grad()
                report = outer.step()
            digests[number].append(report.digest)

    threads = [threading.Thread(target=rank, args=pair) for pair in enumerate(MemoryExchange.group(3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [expected] * 3


def test_without_feedback_nothing_waits_for_the_next_round(start):
    setup = replace(QUICK, rounds=2)
    rows = {}
    for name in ("pulseloco", "pulseloco, no feedback"):
        trainers = trainers_of(setup, BY_NAME[name], start)
        rows[name] = [cells.one_round(trainers, setup, start, 0, number) for number in (1, 2)]
    assert rows["pulseloco"][0]["waiting"] == rows["pulseloco, no feedback"][0]["waiting"]
    assert rows["pulseloco, no feedback"][1]["waiting"] < rows["pulseloco"][1]["waiting"]


def test_scores_are_what_sampling_finds(start):
    sums = QUICK.task.split()[0]
    found = grpo.sample(start, QUICK.task, sums, 200, torch.Generator().manual_seed(1))
    assert float(found.rewards.mean()) == pytest.approx(grpo.score(start, QUICK.task, sums).expected, abs=0.01)


def test_answers_are_the_sums_and_no_held_out_sum_is_trained_on():
    task = Task(2)
    assert task.sequences(torch.tensor([[37, 48], [99, 5]])).tolist() == [
        [3, 7, 10, 4, 8, 11, 0, 8, 5],
        [9, 9, 10, 0, 5, 11, 1, 0, 4],
    ]
    trained, held_out = (set(map(tuple, sums.tolist())) for sums in task.split())
    assert not trained & held_out
    assert len(trained) == 4 * len(held_out) == 8000


def test_a_group_that_agrees_gives_no_advantage():
    found = grpo.advantages(torch.tensor([1.0, 1.0, 1.0, 0.0]), 2)
    assert found[:2].tolist() == [0, 0]
    assert found[2] > 0 > found[3]


def test_the_interval_is_students():
    found = figures.interval([0.01, 0.02, 0.06])
    assert found.mean == pytest.approx(0.03)
    assert found.high - found.mean == pytest.approx(2.920 * np.std([0.01, 0.02, 0.06], ddof=1) / 3**0.5)


def test_a_verdict_needs_the_whole_interval():
    assert verdict(figures.Interval(-0.5 * MARGIN, -0.9 * MARGIN, -0.1 * MARGIN)) == "met"
    assert verdict(figures.Interval(-0.5 * MARGIN, -1.1 * MARGIN, 0.1 * MARGIN)) == "undecided"
    assert verdict(figures.Interval(-1.5 * MARGIN, -3 * MARGIN, 0)) == "not met"


def test_differences_are_between_equal_seeds():
    def cell(seed, score):
        return {"seed": seed, "rows": [{"score": score}]}

    found = figures.paired([cell(1, 0.5), cell(2, 0.9)], [cell(2, 0.8), cell(1, 0.4)], figures.final)
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))


def test_a_level_is_reached_between_rounds():
    cell = {"before": {"score": 0.4}, "rows": [{"score": 0.5}, {"score": 0.7}]}
    assert figures.rounds_to(cell, 0.45) == pytest.approx(0.5)
    assert figures.rounds_to(cell, 0.6) == pytest.approx(1.5)
    assert figures.rounds_to(cell, 0.8) is None


def test_time_on_a_link_is_computing_and_then_receiving():
    rows = [{"seconds": {"train": 1.0, "encode": 0.5}, "wire_bytes": 12.5e6, "score": 1.0}]
    cell = {"seed": 0, "before": {"score": 0.0}, "rows": rows}
    assert figures.round_seconds([cell]) == pytest.approx(2.5)
    assert figures.seconds_to([cell], 0.5, share=0.5) == pytest.approx(1.0)


def test_shares_of_what_is_sent_and_what_is_seen():
    row = {"union": 10, "view_changed": 8, "both": 6}
    assert figures.invisible(row) == pytest.approx(0.4)
    assert figures.unsent(row) == pytest.approx(0.25)


def test_byte_gaps_say_where_entries_are():
    positions = np.array([0, 1, 256, 257 + 255, 3000], np.uint64)
    found, place = [], -1
    for byte in coded._byte_gaps(positions).tolist():
        place += byte
        if byte < 255:
            place += 1
            found.append(place)
    assert found == positions.tolist()


def test_lossless_entries_take_fewer_bytes_than_any_plain_way(start):
    trainers = trainers_of(QUICK, BY_NAME["pulseloco"], start)
    old = [tensor.clone() for tensor in trainers.shared]
    policy = cells.policy_of(start, old)
    rollouts = grpo.sample(policy, QUICK.task, QUICK.task.split()[0][:16], 8, torch.Generator().manual_seed(2))
    window = trainers.window([part.split(QUICK.inner_steps) for part in rollouts.split(QUICK.ranks)])
    costs = coded.costs(window.carried[0], old, trainers.layout)
    ways = [
        "pulse, float8",
        "pulse, bfloat16",
        "pulse, float32",
        "byte gap + FP32, zstd-1",
        "byte gap + FP32",
        "int32 + FP32",
        "int64 + FP32",
    ]
    assert [costs[way] for way in ways] == sorted(costs[way] for way in ways)
    assert costs["int64 + FP32"] == 12 * costs["entries"]
