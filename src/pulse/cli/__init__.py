"""The `pulse` command."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Annotated

import typer

from pulse import __version__
from pulse.cli import analysis, chains, patches

app = typer.Typer(
    name="pulse",
    help="RL policy weights from trainers to inference workers as lossless sparse patches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (patches.diff, patches.apply, patches.inspect):
    app.command(rich_help_panel="Two checkpoints")(command)
for command in (chains.publish, chains.log, chains.pull, chains.verify, chains.follow):
    app.command(rich_help_panel="A store of versions")(command)
for command in (analysis.analyze, analysis.plan):
    app.command(rich_help_panel="What training changes")(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"pulse {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """RL policy weights from trainers to inference workers as lossless sparse patches."""


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign must not end the command
    try:
        app()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # what is written to, and cannot be: a full disk behind stdout, a closed pipe, a folder without permission
        with contextlib.suppress(OSError):
            sys.stderr.write(f"pulse: {error.filename or 'output'}: {error.strerror}\n")
        os._exit(1)  # a second flush at exit would only fail again
