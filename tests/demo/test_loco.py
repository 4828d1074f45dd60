"""Several trainers, several workers, one store: real processes on the model that is made on the spot, killed and started again."""

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.events import EventLog, read_events
from demo.loco.link import Link, Shaped, rate_of
from demo.loco.report import write_report
from demo.loco.run import Kills, Run, kills_for
from demo.loco.saved import load, save
from demo.loco.settings import Settings
from demo.loco.show import cells, facts, table
from demo.loco.small import character_tokenizer
from demo.loco.summary import Summary, summarise
from demo.task import prompt_tokens
from pulse.store import MemoryStore, ObjectStore
from pulse.testing.store import StoreContract
from tests.demo.conftest import ROOT
from tests.demo.test_demo import processes_of


def loco(*options: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m demo.loco`` as a user does."""
    command = [sys.executable, "-m", "demo.loco", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False, env={**os.environ, "COLUMNS": "210"})


def anchors(settings: Settings) -> list[str]:
    """The digest of the anchor after each round."""
    return [row.digests[0] for row in summarise(settings).rows]


class Forgetful(Run):
    """A run whose killed trainer comes back without what it had saved."""

    def _start_trainer(self, name: str, rank: int) -> None:
        self._settings.state(rank).unlink(missing_ok=True)
        super()._start_trainer(name, rank)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run in which a worker and a trainer were killed, as a user starts it."""
    folder = tmp_path_factory.mktemp("loco") / "run"
    done = loco("--model", "small", "--rounds", "2", "--inner-steps", "2", "--run", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    for said in ("killed worker-1", "worker-1-again caught up", "killed trainer-1 after 1 of 2 steps of its window 2", "VERIFIED"):
        assert said in done.stdout
    assert processes_of(folder) == []
    assert list(folder.rglob("state.*")) == []
    return Settings.load(folder / "settings.json")


def test_trainers_agree_workers_hold_it_and_the_killed_come_back(settings: Settings) -> None:
    summary = summarise(settings)
    assert all(holds for _, holds in summary.claims)
    assert len(summary.claims) == 5
    assert [row.round for row in summary.rows] == [1, 2]
    assert all(0 < row.share_sent < row.union / row.elements < 1 and row.under_dense > 2 for row in summary.rows)
    assert all(row.stale == 1 for row in summary.rows)
    assert [(back.window, back.step, back.round) for back in summary.trainers_back] == [(2, 1, 1)]
    assert {event["staleness"] for event in read_events(settings.folder / "events") if event["event"] == "answered"} == {0}
    assert (settings.folder / "report.html").stat().st_size > 20_000


def test_a_run_without_kills_ends_at_the_same_bits(settings: Settings, tmp_path: Path) -> None:
    calm = replace(settings, run=str(tmp_path), store=str(tmp_path / "store"), workers=1)
    Run(calm, Kills(), lambda event: None).execute()
    assert summarise(calm).verified
    assert anchors(calm) == anchors(settings)


def test_a_trainer_that_lost_its_state_takes_over_the_others_and_the_run_says_so(settings: Settings, tmp_path: Path) -> None:
    forgetful = replace(settings, run=str(tmp_path), store=str(tmp_path / "store"), workers=1)
    Forgetful(forgetful, Kills(trainer=3), lambda event: None).execute()
    summary = summarise(forgetful)
    assert all(row.equal(2) and row.verified for row in summary.rows)
    assert [holds for _, holds in summary.claims] == [True, True, True, False]


def test_a_small_models_tokens_are_characters() -> None:
    tokenizer = character_tokenizer()
    tokens = prompt_tokens(tokenizer, "4 + 7")
    assert tokenizer.decode(tokens) == "13 + 6 = 19\n4 + 7 ="
    assert len(tokens) == 19


def test_somebody_is_killed_in_the_middle_of_a_window() -> None:
    settings = Settings(run="x", model="x", store="x", rounds=6, inner_steps=8)
    assert kills_for(settings) == Kills(worker=20, trainer=28)
    assert kills_for(replace(settings, trainers=1)).trainer is None
    assert kills_for(replace(settings, rounds=1, inner_steps=1)) == Kills(worker=0, trainer=0)


def test_trainers_have_seeds_and_folders_of_their_own() -> None:
    settings = Settings(run="run", model="x", store="x", seed=3)
    own = [settings.of(rank) for rank in range(6)] + [replace(settings, seed=4).of(0)]
    assert len({one.seed for one in own}) == 7
    assert len({one.run for one in own}) == 6
    assert settings.state(1).parent == own[1].folder


def test_a_save_that_is_cut_off_leaves_the_state_before(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0" / "state.pt"
    assert load(path) is None
    save(path, {"random": torch.arange(3), "outer": {"round": 1}})
    path.with_suffix(".partial").write_bytes(b"half of the next one")
    found = load(path)
    assert found is not None
    assert found["outer"] == {"round": 1}
    save(path, {"outer": {"round": 2}})
    assert load(path) == {"outer": {"round": 2}}


# --- the link ---


def test_a_link_carries_one_transfer_after_the_other() -> None:
    link = Link(1e6)
    assert link.until(125_000, now=10.0) == 11.0
    assert link.until(125_000, now=10.5) == 12.0
    assert link.until(250_000, now=20.0) == 22.0


class TestShapedStore(StoreContract):
    """Behind a link, however fast, a store promises what it promised."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        return Shaped(MemoryStore(), 1e12)


def test_rates_are_read_as_people_write_them() -> None:
    assert [rate_of(text) for text in ("100mbit", "1Gbit/s", "2.5gbit", "64kbit")] == [1e8, 1e9, 2.5e9, 64e3]
    for wrong in ("100", "0mbit", "-1mbit", "fast", "100mb"):
        with pytest.raises(argparse.ArgumentTypeError, match="write 100mbit"):
            rate_of(wrong)


# --- from events to claims ---


def write_run(folder: Path, **changed: Any) -> Summary:
    """Two trainers, a worker, one round; `changed` is said by trainer 1 of the round, or by the publisher or worker of its version."""
    settings = Settings(run=str(folder), model="model<b>", store="x", rounds=1, inner_steps=2)
    trainers = [EventLog(folder / "events" / f"trainer-{rank}.jsonl", f"trainer-{rank}", rank=rank) for rank in range(2)]
    worker = EventLog(folder / "events" / "worker-0.jsonl", "worker-0")
    said: dict[str, Any] = {
        "round": 1, "elements": 1000, "sent": 40, "union": 60, "view_changed": 50, "payload_bytes": [100, 300], "wire_sent": 120,
        "wire_received": 330, "inner_steps": 2, "feedback_norm": 0.1, "age_mean": 1.0, "age_max": 1, "digest": "a" * 32, "resynced": [],
        "seconds": {"encode": 0.1, "meet": 1.0, "exchange": 0.2, "decode": 0.1, "vote": 0.05, "commit": 0.1},
    }  # fmt: skip
    for version, held in ((0, {}), (1, {key: changed[key] for key in ("sha256", "state_digest") if key in changed})):
        kind, units = ("patch", changed.get("patch_changed", 50)) if version else ("anchor", 1000)
        published = {
            "version": version,
            "step": version,
            "kind": kind,
            "changed": units,
            "elements": 1000,
            "nbytes": 30,
            "full_nbytes": 2000,
        }
        trainers[0].write("published", **published, digest="d", parts={}, seconds=0.1)
        trainers[0].write("hashed", version=version, sha256="s")
        worker.write("hashed", version=version, sha256=held.get("sha256", "s"), digest=held.get("state_digest", "d"))
        if version == 0:
            for rank, trainer in enumerate(trainers):
                answered = {"version": 0, "step": 1, "reward": 0.25 + rank / 2, "staleness": 0, "to_first_token": None, "seconds": 1.0}
                trainer.write("answered", split="train", **answered, by_worker={"worker-0": 1}, digests=["d"], length=3.0)
            trainers[0].write("round", **said)
            if not changed.get("silent"):
                trainers[1].write("round", **{**said, "digest": changed.get("anchor", "a" * 32)})
    for log in (*trainers, worker):
        log.close()
    return summarise(settings)


def test_equal_bits_everywhere_verify(tmp_path: Path) -> None:
    summary = write_run(tmp_path)
    assert summary.verified
    (row,) = summary.rows
    assert (row.payload, row.under_dense, row.under_ddp(4), row.under_ddp(2)) == (200.0, 20.0, 40.0, 20.0)
    assert (row.share_sent, row.rewards, row.stale) == (0.04, (0.25, 0.75), 1)
    assert row.seconds == pytest.approx({"encode": 0.1, "wait": 1.0, "exchange": 0.25, "decode": 0.1, "commit": 0.1, "publish": 0.1})
    assert table(summary).row_count == 1
    assert cells(row, 2)[-2:] == ["yes", "yes 1/1"]
    assert any("5.00 B per entry" in fact for fact in facts(summary))


@pytest.mark.parametrize(
    ("changed", "failing"),
    [({"anchor": "b" * 32}, 0), ({"silent": True}, 0), ({"sha256": "t"}, 1), ({"state_digest": "e"}, 1), ({"patch_changed": 49}, 2)],
)
def test_anything_else_does_not(tmp_path: Path, changed: dict[str, Any], failing: int) -> None:
    summary = write_run(tmp_path, **changed)
    assert not summary.verified
    assert [index for index, (_, holds) in enumerate(summary.claims) if not holds] == [failing]


def test_the_report_stands_alone(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path)).read_text()
    assert page.count("<svg") == 8
    assert "Yes: each patch holds exactly" in page
    for foreign in ("<script", "<link", "src=", "@import", "url(http"):
        assert foreign not in page
    assert "model<b>" not in page


def test_wrong_usage_is_two() -> None:
    assert loco("--trainers", "7").returncode == 2
    assert loco("--method", "telepathy").returncode == 2
