"""Trainers as real processes that meet over gloo, with whole models and with models that FSDP2 has sharded."""

from __future__ import annotations

import signal
import socket

import pytest
import torch

from pulse.torch.loco.methods import method_of
from tests.integration.loco_processes import STEPS, Layers, sharded, whole
from tests.nursery import Nursery
from tests.trainers import Played, digests, same_bits, trained


@pytest.fixture(scope="module")
def nursery():
    found = Nursery("tests.integration.loco_processes")
    yield found
    found.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def results(folder, ranks: int) -> list[dict]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_over_gloo_train_as_threads_do(tmp_path, ranks, nursery):
    port = free_port()
    assert nursery.lived(whole, *([(str(tmp_path), port, rank, ranks, None)] for rank in range(ranks))) == [[0]] * ranks
    for found, wanted in zip(results(tmp_path, ranks), trained(ranks, 3), strict=True):
        assert found["digests"] == digests([wanted])[0]
        assert found["trainer"]["outer"]["digest"] == wanted.outer.digest
        assert same_bits(found["trainer"]["model"]["up.weight"], wanted.model.up.weight)


@pytest.mark.parametrize("kill", [("payload", 1, False), ("payload", 1, True), ("vote", 1, True)], ids=str)
def test_a_process_is_killed_the_others_learn_which_and_all_go_on_from_what_they_saved(tmp_path, kill, nursery):
    """Before it sends, after that, and after its vote; while it sends is what tests/fault has. A gloo group does not survive it: all start again,
    each from its own state."""
    port = free_port()
    codes = nursery.lived(whole, *([(str(tmp_path), port, rank, 3, kill if rank == 1 else None)] for rank in range(3)))
    assert codes == [[0], [-signal.SIGKILL], [0]]
    for rank, found in enumerate(results(tmp_path, 3)):
        if rank != 1:
            assert found["error"].startswith("rank 1 ")
            assert len(found["digests"]) == found["trainer"]["outer"]["round"] == (2 if kill[0] == "vote" else 1)
    port = free_port()
    assert nursery.lived(whole, *([(str(tmp_path), port, rank, 3, None)] for rank in range(3))) == [[0]] * 3
    rows = results(tmp_path, 3)
    assert {row["trainer"]["outer"]["digest"] for row in rows} == {rows[0]["trainer"]["outer"]["digest"]}
    assert all(row["error"] == "" and row["trainer"]["outer"]["round"] >= 3 for row in rows)
    assert all(row["trainer"]["steps"] == STEPS for row in rows)


@pytest.mark.parametrize("options", [{}, {"value_dtype": "bfloat16"}, {"share": "scatter"}, {"method": "diloco"}], ids=str)
def test_shards_of_two_islands_end_with_the_bits_of_whole_models(tmp_path, options, nursery):
    port = free_port()
    assert nursery.lived(sharded, *([(str(tmp_path), port, rank, options)] for rank in range(4))) == [[0]] * 4
    rows = results(tmp_path, 4)
    assert [row["refused"] for row in rows] == [[]] * 4
    assert [[one["digest"] for one in rows[rank]["seen"]] for rank in (0, 1)] == [
        [one["digest"] for one in rows[rank]["seen"]] for rank in (2, 3)
    ]
    assert rows[0]["seen"][0]["digest"] != rows[1]["seen"][0]["digest"]  # each shard has its own
    assert rows[0]["seen"][0]["elements"] + rows[1]["seen"][0]["elements"] == sum(p.numel() for p in Layers().parameters())
    assert rows[1]["local"]["scale"].numel() == 0
    assert rows[0]["local"]["second"].shape != rows[1]["local"]["second"].shape
    check_against_whole(rows, options)


def check_against_whole(rows, options) -> None:
    """The same windows, with whole weights and all in one process, lead to the same bits."""
    start = dict(Layers().named_parameters())
    method = method_of(options.get("method", "pulseloco"), options.get("value_dtype", "float32"))
    played = Played({name: parameter.detach() for name, parameter in start.items()}, 2, method)
    names = [*start]
    for number in range(3):
        for island in (0, 1):
            for i, name in enumerate(names):
                played.local[island][i].copy_(rows[2 * island]["seen"][number]["before"][name].reshape(-1))
        played.round()
        for rank in range(4):
            seen = rows[rank]["seen"][number]["after"]
            for i, name in enumerate(names):
                assert same_bits(seen[name].reshape(-1), played.states[0].anchor[i])
        for island in (0, 1):
            assert rows[2 * island]["seen"][number]["sent"] + rows[2 * island + 1]["seen"][number]["sent"] == played.outgoing[island].count
    for island in (0, 1):
        if played.states[island].feedback is not None:
            for i, name in enumerate(names):
                shards = [rows[2 * island + shard]["feedback"][name] for shard in (0, 1)]
                assert same_bits(torch.cat(shards).reshape(-1), played.states[island].feedback[i])


def test_what_is_not_finite_in_one_shard_is_refused_by_all_shards_of_all_islands(tmp_path, nursery):
    port = free_port()
    assert nursery.lived(sharded, *([(str(tmp_path), port, rank, {}, "local")] for rank in range(4))) == [[0]] * 4
    rows = results(tmp_path, 4)
    assert "rank 1: second" in rows[1]["refused"][0]
    assert rows[3]["refused"] == rows[1]["refused"]
    assert "rank 1: another shard" in rows[0]["refused"][0]
    assert rows[2]["refused"] == rows[0]["refused"]
    assert [len(row["seen"]) for row in rows] == [3] * 4
    check_against_whole(rows, {})


def test_a_shard_whose_anchor_was_damaged_takes_over_another_and_its_island_gives_up_the_window(tmp_path, nursery):
    port = free_port()
    assert nursery.lived(sharded, *([(str(tmp_path), port, rank, {}, "anchor")] for rank in range(4))) == [[0]] * 4
    rows = results(tmp_path, 4)
    assert [row["refused"] for row in rows] == [[]] * 4
    assert [[one["resynced"] for one in row["seen"]] for row in rows] == [[(), (), ()], [(), (1,), ()]] * 2
    assert [[one["inner_steps"] for one in row["seen"]] for row in rows] == [[2, 2, 2]] * 2 + [[2, 0, 2]] * 2
    for number in range(3):
        first = rows[0]["seen"][number]["after"]
        assert all(same_bits(row["seen"][number]["after"][name], first[name]) for row in rows for name in first)
        assert not any(row["seen"][number]["differing"] for row in rows)


def test_other_settings_in_one_shard_are_refused_by_all_shards_of_all_islands(tmp_path, nursery):
    port = free_port()
    assert nursery.lived(sharded, *([(str(tmp_path), port, rank, {}, "settings")] for rank in range(4))) == [[0]] * 4
    refused = [row["refused"][0] for row in results(tmp_path, 4)]
    assert refused[1] == refused[3] == "WeightsMismatch: rank 1: other settings than the rest: lr 0.5 instead of 0.7"
    assert refused[0] == refused[2] == "RoundRefused: another shard of this trainer cannot take part, and says why"
