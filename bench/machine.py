"""Where and with what a table was made: no figure without it."""

from __future__ import annotations

import os
import platform
import re
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("pulse-rl", "numpy", "numba", "zstandard")


def machine() -> dict[str, str]:
    """Processor, cores, memory, system, Python, load and date, in words."""
    return {
        "date": date.today().isoformat(),  # noqa: DTZ011  the day where the machine is
        "machine": f"{os.cpu_count()}-core {platform.machine()}, {_processor()}, {_memory():.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
        "load": "{:.1f} {:.1f} {:.1f} (1, 5, 15 minutes; before the run)".format(*os.getloadavg()),
    }


def slug() -> str:
    """A file name's worth of it."""
    return f"{date.today().isoformat()}-{os.cpu_count()}-core-{platform.machine()}".replace("_", "-")  # noqa: DTZ011


def _processor() -> str:
    place = Path("/proc/cpuinfo")
    text = place.read_text() if place.exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    return (model[1] if model else platform.processor() or "processor unknown") + (", AVX-512" if "avx512f" in text else "")


def _memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
