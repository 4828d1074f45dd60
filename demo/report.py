"""`report.html`: one file, no links to anything outside it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from demo.plots import plots
from demo.settings import Settings
from demo.show import HEADS, cells, facts
from demo.summary import Summary


def write_report(folder: Path, settings: Settings, summary: Summary) -> Path:
    """Write the run's report and say where it is."""
    return write_page(
        folder / "report.html",
        "report.html.j2",
        model=Path(settings.model).name,
        settings=asdict(settings),
        verified=summary.verified,
        facts=facts(summary),
        plots=plots(summary),
        heads=HEADS,
        rows=[(cells(row), row.verified) for row in summary.rows],
    )


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Fill in a template of the demo, write what comes of it, and say where it is."""
    loader = FileSystemLoader(Path(__file__).resolve().parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    path.write_text(environment.get_template(template).render(values), encoding="utf-8")
    return path
