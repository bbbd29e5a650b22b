from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_story_holds_in_a_real_vllm(tmp_path: Path) -> None:
    """A stale draft is rejected, a push of it helps, and in the end all is equal bit for bit."""
    arguments = ["demo-vllm", "--quick", "--json", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "weightsync.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert [claim for claim in result["claims"] if not claim["holds"]] == []
    assert [scene["pushed"] for scene in result["scenes"]] == [
        [],
        ["verifier"],
        ["draft"],
        ["draft", "verifier"],
        ["draft", "verifier"],
        [],
    ]
    assert all(scene["pause_ms"] > 0 for scene in result["scenes"][1:-1])
