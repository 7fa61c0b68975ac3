"""The commands that may come from a machine without the jobs' storage, and their way over the wire. Pure.

The others start or end something on the machine on which they are typed, or read and write files there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tidegate.cluster.shipping import File, Files
from tidegate.v1 import command_line_pb2

LOOKING = frozenset({"get", "describe", "events", "logs", "wait", "why", "top", "timeline"})
"""They change nothing."""
SUBMIT = "submit"
CHANGING = frozenset({SUBMIT, "cancel", "pause", "drain", "scale", "migrate", "deadletter", "prune"})


KEEPALIVE_S = 20.0
"""A side that says nothing for longer is asked, and after as long again it is gone."""


def encode_folders(folders: Iterable[Files]) -> list[command_line_pb2.ShippedFolder]:
    return [
        command_line_pb2.ShippedFolder(
            files=[
                command_line_pb2.ShippedFile(name=name.as_posix(), content=file.content, is_program=file.is_program)
                for name, file in files.items()
            ]
        )
        for files in folders
    ]


def decode_folders(folders: Iterable[command_line_pb2.ShippedFolder]) -> list[Files]:
    return [{Path(file.name): File(file.content, file.is_program) for file in each.files} for each in folders]
