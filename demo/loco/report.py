"""`report.html` of a run with several trainers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from demo.loco.plots import plots
from demo.loco.show import HEADS, cells, facts
from demo.loco.summary import Summary
from demo.report import write_page


def write_report(summary: Summary) -> Path:
    """Write the run's report and say where it is."""
    settings = summary.settings
    claims = [f"{'Yes' if holds else 'NO'}: {text}." for text, holds in summary.claims]
    return write_page(
        settings.folder / "report.html",
        "loco/report.html.j2",
        model=Path(settings.model).name,
        settings=asdict(settings),
        verified=summary.verified,
        facts=claims + facts(summary),
        plots=plots(summary),
        heads=HEADS,
        rows=[(cells(row, settings.trainers), row.verified and row.equal(settings.trainers)) for row in summary.rows],
    )
