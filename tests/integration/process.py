"""Programs that tests run in processes of their own, where memory and threads are theirs alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

_PRELUDE = """
import gc, json, threading
from pathlib import Path

def rss():
    gc.collect()
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

def peak():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

def forget_peak():
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")

def tell(**facts):
    print(json.dumps(facts), flush=True)
"""


def run(program: str, **variables: str) -> dict[str, Any]:
    """Run a program with some environment variables, and return what it has told."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PRELUDE + program],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients'}"} | variables,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
