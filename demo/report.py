"""`report.html`: one file, no links to anything outside it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from demo.plots import plots
from demo.settings import Settings
from demo.show import HEADS, cells, facts
from demo.summary import Summary


def write_report(folder: Path, settings: Settings, summary: Summary) -> Path:
    """Write the run's report and say where it is."""
    loader = FileSystemLoader(Path(__file__).resolve().parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("report.html.j2")
    path = folder / "report.html"
    page = template.render(
        model=Path(settings.model).name,
        settings=asdict(settings),
        verified=summary.verified,
        facts=facts(summary),
        plots=plots(summary),
        heads=HEADS,
        rows=[(cells(row), row.verified) for row in summary.rows],
    )
    path.write_text(page, encoding="utf-8")
    return path
