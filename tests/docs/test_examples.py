"""What the documentation shows is run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_fits_on_a_page(path):
    assert len(path.read_text().splitlines()) < 60


def test_the_trainer_and_worker_examples_meet_in_a_folder(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    worker = subprocess.Popen(
        [sys.executable, EXAMPLES / "worker.py", tmp_path / "store", "15"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        trainer = subprocess.run(
            [sys.executable, EXAMPLES / "trainer.py", tmp_path / "store", "6"],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
            timeout=200,
        )
        out, _ = worker.communicate(timeout=200)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 0
    assert "step 6: " in trainer.stdout
    assert out.splitlines()[-1].startswith("version 6, ")
    assert out.endswith("verified\n")


def test_the_ranks_of_the_islands_example_end_with_the_same_weights(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, EXAMPLES / "islands.py", tmp_path / "store"]
    ranks = [subprocess.Popen([*command, str(rank), "2", "2"], stdout=subprocess.PIPE, text=True, env=environment) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    ends = [out.splitlines()[-1] for out in outputs]
    assert ends[0].removeprefix("rank 0") == ends[1].removeprefix("rank 1")
    assert ends[0].endswith("after 2 rounds")
    pulled = subprocess.run([Path(sys.executable).parent / "pulse", "log", tmp_path / "store"], capture_output=True, text=True, check=True)
    assert "step 16" in pulled.stdout or " 16" in pulled.stdout


def test_the_readme_example_runs_as_it_stands(tmp_path):
    """The first Python block of the README, line for line, after the few lines that it takes for granted."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert len(block[1].splitlines()) <= 25
    taken_for_granted = (
        "import contextlib, torch\n"
        "model, policy = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64).to(torch.bfloat16)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)\n"
        "loader = [torch.randn(8, 64) for _ in range(3)]\n"
        "def train_step(model, optimizer, batch):\n"
        "    model(batch).square().mean().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "class engine: paused = staticmethod(contextlib.nullcontext)\n"
        "turns = iter([True, False])\n"
        "def serving(): return next(turns)\n"
    )
    checks = "assert subscriber.version == 2\nassert torch.equal(policy.weight, model.weight.to(torch.bfloat16))\n"
    code = taken_for_granted + block[1].replace("s3://bucket/run-7", (tmp_path / "store").as_uri()) + checks
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=tmp_path)


def shown_sessions():
    """Each command that a page shows with its output: the page's name, the command, the lines."""
    for page in (ROOT / "README.md", ROOT / "docs" / "analysis.md"):
        for block in re.findall(r"```\n\$ (.*?)```", page.read_text(), re.DOTALL):
            command, *lines = block.rstrip("\n").split("\n")
            if lines and not any(line.startswith("$ ") for line in lines):
                yield pytest.param(command.split("   #")[0], lines, id=f"{page.stem}: {command[:60]}")


@pytest.mark.parametrize(("command", "lines"), list(shown_sessions()))
def test_a_command_that_a_page_shows_prints_what_it_shows(command, lines, tmp_path):
    shutil.copytree(ROOT / "tests" / "data", tmp_path / "tests" / "data")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True)
    assert [line.rstrip() for line in ran.stdout.splitlines()[: len(lines)]] == lines


def test_links_between_documents_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())]
    assert [(page.name, target) for page, target in links if "://" not in target and not (page.parent / target).exists()] == []
