"""`pulse plan`."""

from __future__ import annotations

import pytest

from pulse.codec import ENCODINGS


def test_numbers_give_sizes_and_seconds_for_a_ladder_of_links(pulse):
    seen = pulse("plan", "--params", "7.6e9", "--density", "0.01", "--json").json
    assert (seen["weights"], seen["changes"], seen["density"]) == (7_600_000_000, 76_000_000, 0.01)
    assert seen["bytes"]["whole"] == 15.2e9
    assert seen["bytes"]["int32 + bits"] == 456e6
    assert [row["link"] for row in seen["links"]] == [1e7, 1e8, 1e9, 1e10, 1e11]
    assert set(seen["bytes"]) == {"whole", "int32 + bits", *ENCODINGS}
    for row in seen["links"]:
        assert row["seconds"]["portable"] > 8 * seen["bytes"]["portable"] / row["link"]
        assert row["fastest"] == min(row["seconds"], key=row["seconds"].get)


def test_links_interval_and_workers_are_the_users(pulse):
    options = ("plan", "--params", "1e9", "--density", "0.006", "--link", "100Mbit,2.5 Gbit/s", "--json")
    alone, shared = pulse(*options, "--interval", 60).json, pulse(*options, "--interval", 60, "--workers", 4).json
    assert [row["link"] for row in alone["links"]] == [1e8, 2.5e9]
    for one, four in zip(alone["links"], shared["links"], strict=True):
        assert four["busy"]["portable"] == pytest.approx(4 * one["busy"]["portable"])
        assert 0 < four["training"] < one["training"] < 1
    assert "2.5 Gbit/s" in pulse(*options[:-1]).out


def test_a_checkpoint_and_a_learning_rate_give_an_expected_density(pulse, checkpoints):
    low, high = (pulse("plan", checkpoints[0], "--lr", lr, "--json").json for lr in ("1e-9", "1e-3"))
    assert 0 < low["density"] < high["density"] <= 1
    assert low["weights"] == 6704
    assert pulse("plan", checkpoints[0], "--density", "0.25", "--json").json["density"] == pytest.approx(0.25)


def test_checkpoints_and_stores_are_measured(pulse, checkpoints):
    for i, path in enumerate(checkpoints):
        pulse("publish", "store", path, "--step", i)
    seen = pulse("plan", *checkpoints, "--json").json
    assert seen["how"] == "measured on 2 steps"
    assert pulse("plan", "store", "--json").json["bytes"] == seen["bytes"]
    assert pulse("plan", "store", "--from", 1, "--json").json["how"] == "measured on 1 step"
    changed = pulse("diff", *checkpoints[:2], "--json").json["changed"] + pulse("diff", *checkpoints[1:], "--json").json["changed"]
    assert seen["changes"] == changed / 2


def test_the_screen_says_which_way_is_the_fastest_where(pulse):
    done = pulse("plan", "--params", "7.6e9", "--density", "0.01", "--interval", "50")
    assert done.code == 0
    for words in ("7,600,000,000 weights", "arrives before", "B/change", "fastest", "link busy", "15.2 GB"):
        assert words in done.out


def test_speeds_can_be_measured_here(pulse):
    seen = pulse("plan", "--params", "1e9", "--density", "0.01", "--measure", "--json").json
    assert set(seen["speeds"]) == {*ENCODINGS, "whole"}


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--params", "1e9"),
        ("0.safetensors",),
        ("0.safetensors", "--params", "1e9", "--density", "0.1"),
        ("--params", "1e9", "--density", "2"),
        ("--params", "1e9", "--density", "0.1", "--link", "fast"),
        ("--params", "1e9", "--density", "0.1", "--link", "0Mbit"),
    ],
)
def test_wrong_usage_exits_2(pulse, checkpoints, arguments):
    assert pulse("plan", *arguments).code == 2


@pytest.mark.parametrize(
    "options",
    [
        ("--params", "inf", "--density", "0.1"),
        ("--params", "1e6", "--density", "0.1", "--lr", "1e-6"),
        ("--params", "1e6", "--density", "0.1", "--from", "3"),
        ("--params", "1e6", "--density", "nan"),
    ],
)
def test_what_cannot_be_calculated_or_is_not_looked_at_is_refused(pulse, options):
    refused = pulse("plan", *options)
    assert refused.code == 2
    assert "Traceback" not in refused.err


def test_a_trace_needs_two_moments_and_no_guesses(pulse, checkpoints):
    assert pulse("publish", "store", checkpoints[0]).code == 0
    alone = pulse("plan", "store")
    assert alone.code == 1
    assert "two moments" in alone.err
    assert pulse("plan", *checkpoints, "--lr", "1e-6").code == 2
