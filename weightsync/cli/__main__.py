"""`python -m weightsync.cli`, where no script was installed."""

from __future__ import annotations

from weightsync.cli.main import app

if __name__ == "__main__":
    app(prog_name="weightsync")
