"""`weightsync sharing`: which weights a verifier and its draft hold together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from weightsync_client.credentials import Credentials

from weightsync.cli.credentials import with_credentials
from weightsync.cli.options import Json, addresses
from weightsync.cli.output import print_json, print_line, print_table, size
from weightsync.core.errors import InvalidRequestError

COLUMNS = ("worker", "group", "tensors", "size")


@with_credentials
def sharing(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="The verifier's checkpoint folder and the draft's.", metavar="V D"),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Ask running workers instead.", show_default=False)
    ] = None,
    all_equal: Annotated[
        bool, typer.Option("--all", help="Look at all tensors, not only embedding and head.")
    ] = False,
    json: Json = False,
    *,
    credentials: Credentials,
) -> None:
    """Tell which weights a draft can hold together with its verifier, or does on a worker.

    For example:

        weightsync sharing ./verifier ./draft

        weightsync sharing --to 127.0.0.1:50051
    """
    if to is not None and not folders:
        _ask(addresses(to), credentials, json=json)
    elif to is None and folders is not None and len(folders) == 2:  # noqa: PLR2004 - V and D
        _look(folders[0], folders[1], all_equal=all_equal, json=json)
    else:
        raise InvalidRequestError(
            "give two folders, the verifier's and the draft's, or --to ADDRESS",
            subjects=["folders"],
        )


def _look(verifier: Path, draft: Path, *, all_equal: bool, json: bool) -> None:
    from weightsync.cli.quiet import quiet_transformers
    from weightsync.loader import load_pair

    quiet_transformers()
    report = load_pair(verifier, draft, all_equal=all_equal).report
    if json:
        print_json(report.to_dict())
    else:
        print_line(report.render())


def _ask(places: list[str], credentials: Credentials, *, json: bool) -> None:
    from weightsync_client import connect

    from weightsync.cli.tensors import held_bytes

    rows: list[tuple[str, str, list[str], int]] = []
    for address in places:
        groups: dict[str, tuple[list[str], int]] = {}
        with connect(address, credentials=credentials) as worker:
            for info in worker.tensors():
                if info.share_group:
                    names, _ = groups.setdefault(info.share_group, ([], held_bytes(info)))
                    names.append(f"{info.target}:{info.name}")
        rows += ((address, group, *found) for group, found in groups.items())
    if json:
        for address, group, names, num_bytes in rows:
            print_json({"worker": address, "group": group, "tensors": names, "bytes": num_bytes})
    else:
        print_table(COLUMNS, ((a, g, " = ".join(names), size(n)) for a, g, names, n in rows))
