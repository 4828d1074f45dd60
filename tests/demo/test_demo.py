"""The demo itself, on the real model: short, with a worker killed on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo.events import read_events
from demo.summary import summarise
from tests.demo.conftest import ROOT


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m demo`` as a user does."""
    command = [sys.executable, "-m", "demo", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "COLUMNS": "190"})


def processes_of(run: Path) -> list[str]:
    """What still runs with this run's settings."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(run) in command:
            found.append(command)
    return found


@pytest.mark.model
def test_steps_reach_the_workers_and_a_killed_one_comes_back(real_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    store = tmp_path / "a store elsewhere"
    chosen = ["--model", str(real_model), "--store", str(store), "--seed", "4294967295"]
    done = demo("--run", str(run), "--steps", "3", "--prompts", "2", "--held-out", "2", *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERIFIED" in done.stdout
    assert (store / "manifests" / "000000000003.json").exists()
    assert "killed worker-1" in done.stdout
    assert "worker-1-again caught up" in done.stdout
    summary = summarise(run)
    assert [row.step for row in summary.rows] == [0, 1, 2, 3]
    assert [row.kind for row in summary.rows] == ["anchor", "patch", "patch", "patch"]
    assert all(row.verified and row.ratio > 5 for row in summary.rows[1:])
    assert all(row.staleness == 0 for row in summary.rows)
    assert summary.requeued >= 1
    finished = [event for event in read_events(run / "events") if event["event"] == "finished"]
    assert sorted(event["worker"] for event in finished) == ["worker-0", "worker-1-again"]
    records = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {record["digest"] for record in records} == {
        event["digest"] for event in read_events(run / "events") if event["event"] == "published"
    }
    assert all(
        len(tokens) == len(logprobs) for record in records for tokens, logprobs in zip(record["tokens"], record["logprobs"], strict=True)
    )
    assert (run / "report.html").stat().st_size > 20_000
    assert processes_of(run) == []


@pytest.mark.model
def test_patches_and_checkpoints_learn_the_same(real_model: Path, tmp_path: Path) -> None:
    done = demo("--exact", "--run", str(tmp_path / "exact"), "--steps", "2", "--prompts", "2", "--held-out", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EXACT: 2 steps, nothing differs" in done.stdout


def test_a_model_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    done = demo("--model", str(tmp_path), "--run", str(tmp_path / "run"))
    assert done.returncode == 1
    assert "config.json" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_folder_of_something_else_is_left_alone(real_model: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = demo("--run", str(tmp_path))
    assert done.returncode == 1
    assert "choose another" in done.stdout
    assert (tmp_path / "thesis.txt").exists()


def test_wrong_usage_is_two() -> None:
    assert demo("--steps", "0").returncode == 2
    assert demo("--nonsense").returncode == 2


def test_a_folder_that_is_no_run_of_the_demo_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("mine")
    done = demo("--run", str(tmp_path))
    assert done.returncode != 0
    assert "no run of this demo" in done.stdout + done.stderr
    assert (tmp_path / "settings.json").read_text() == "mine"


def test_a_seed_that_generators_cannot_take_is_refused() -> None:
    assert demo("--seed", "-1").returncode == 2
