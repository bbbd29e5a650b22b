"""The guide's own adapter, run through the suite that the guide shows."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "adapters.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)

# pytest collects the class `TestLoopEngine` that they define.
exec(compile("\n".join(BLOCKS), str(GUIDE), "exec"))  # noqa: S102
