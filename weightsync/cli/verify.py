"""`weightsync verify`: does a worker hold what a checkpoint holds?"""

from __future__ import annotations

from typing import Annotated

import typer
from weightsync_client.credentials import Credentials

from weightsync.cli.credentials import with_credentials
from weightsync.cli.options import Checkpoint, Json, TargetName, To, addresses, name_mapping
from weightsync.cli.options import target as target_named
from weightsync.cli.output import print_facts, print_json

MAX_SHOWN = 10


@with_credentials
def verify(
    checkpoint: Checkpoint,
    *,
    to: To,
    target: TargetName = "verifier",
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of names that the worker need not have; may be repeated."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(help="OLD=NEW: another prefix of names; may be repeated."),
    ] = None,
    json: Json = False,
    credentials: Credentials,
) -> None:
    """Compare a checkpoint with live weights, bit for bit, by digests: no weights travel.

    Exits with 1 if anything differs, or if tensors of the worker were not compared.

    For example:

        weightsync verify ./step-100 --to 127.0.0.1:50051

        weightsync verify ./draft --target draft --to 127.0.0.1:50051
    """
    from weightsync_client import Checkpoint as Folder
    from weightsync_client import NameMapping
    from weightsync_client import verify as compare

    from weightsync.cli.exits import DIFFERENT
    from weightsync.core.names import IgnorePatterns

    patterns = IgnorePatterns(tuple(ignore or ()))
    source = (shard for shard in Folder(checkpoint) if not patterns.match(shard.name))
    rules = tuple(map(name_mapping, rename or ()))
    report = compare(
        addresses(to),
        source,
        target=target_named(target),
        names=NameMapping(rules=rules),
        credentials=credentials,
    )
    equal = report.equal and not report.not_compared
    if json:
        print_json(
            {
                "equal": equal,
                "compared": report.compared,
                "differences": [str(found) for found in report.differences],
                "not_compared": report.not_compared,
                "versions": report.weight_versions,
            }
        )
    else:
        facts: dict[str, object] = {"equal": "yes" if equal else "NO", "compared": report.compared}
        if report.differences:
            facts["different"] = _shown([str(found) for found in report.differences])
        if report.not_compared:
            facts["not compared"] = _shown(report.not_compared)
        for address, held in report.weight_versions.items():
            facts[address] = held or "(no version)"
        print_facts(facts)
    if not equal:
        raise typer.Exit(DIFFERENT)


def _shown(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ", ".join(names[:MAX_SHOWN]) + more
