"""From events to rows: a version counts as verified only if everybody found the same bits."""

from pathlib import Path
from typing import Any

import pytest

from demo.events import EventLog, EventTail
from demo.report import write_report
from demo.settings import Settings
from demo.show import caught_up, cells, facts, table
from demo.summary import Summary, summarise


def write_run(folder: Path, sha256: str = "s", digest: str = "d", used: str = "d") -> None:
    """Two versions, one worker; what the worker found for the second one can be told."""
    trainer, worker, demo = (EventLog(folder / "events" / f"{name}.jsonl", name) for name in ("trainer", "worker-0", "demo"))
    for version, kind, found in ((1, "anchor", ("s", "d", "d")), (2, "patch", (sha256, digest, used))):
        sent: dict[str, Any] = {"version": version, "step": version - 1, "kind": kind, "digest": "d", "parts": {}, "seconds": 0.1}
        trainer.write("published", **sent, changed=10, elements=1000, nbytes=30, full_nbytes=2000, stepped_at=1.0)
        trainer.write("hashed", version=version, sha256="s")
        applied = {"version": version, "base": version - 1 or None, "kind": kind, "patches": version - 1, "digest": "d", "nbytes": 30}
        worker.write("applied", **applied, fetch_seconds=0.2, apply_seconds=0.01)
        answered = {"version": version, "step": version - 1, "reward": 0.5, "staleness": 0, "to_first_token": 1.5, "seconds": 1.0}
        trainer.write("answered", split="train", **answered, by_worker={"worker-0": 1}, digests=[found[2]], length=3.0)
        worker.write("hashed", version=version, sha256=found[0], digest=found[1])
    demo.write("killed", worker="worker-0", version=1)
    demo.write("restarted", worker="worker-0", lost="worker-0")
    trainer.write("done", peak_memory=2**30)
    for log in (trainer, worker, demo):
        log.close()


def test_equal_bits_verify(tmp_path: Path) -> None:
    write_run(tmp_path)
    summary = summarise(tmp_path)
    assert summary.verified
    row = summary.rows[1]
    assert (row.changed_share, row.ratio, row.bytes_per_change, row.reward) == (0.01, 2000 / 30, 3.0, 0.5)
    assert table(summary).row_count == 2
    assert cells(row)[-1] == "yes 1/1"
    assert "version 1 when it was killed" in caught_up(summary.catch_ups[0])
    assert facts(summary)


@pytest.mark.parametrize("wrong", [{"sha256": "t"}, {"digest": "e"}, {"used": "e"}])
def test_any_other_bit_does_not(tmp_path: Path, wrong: dict[str, str]) -> None:
    write_run(tmp_path, **wrong)
    summary = summarise(tmp_path)
    assert not summary.verified
    assert [row.verified for row in summary.rows] == [True, False]


def test_nothing_verifies_nothing() -> None:
    assert not Summary([], [], 0, {}, 0.0, {}, 0.0).verified


def test_the_report_stands_alone(tmp_path: Path) -> None:
    write_run(tmp_path)
    settings = Settings(run=str(tmp_path), model="somewhere/model<b>", store="x")
    page = write_report(tmp_path, settings, summarise(tmp_path)).read_text()
    assert page.count("<svg") == 8
    for foreign in ("<script", "<link", "src=", "@import", "url(http"):
        assert foreign not in page
    assert "model<b>" not in page


def test_a_line_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    path.write_text('{"event": "a"}\n{"event"')
    assert tail.read() == [{"event": "a"}]
    path.write_text('{"event": "a"}\n{"event": "b"}\n')
    assert tail.read() == [{"event": "b"}]
