"""Identifiers that look alike are distinct types, and the rules that they obey."""

from __future__ import annotations

import re
import secrets
from typing import NewType

from fusion.base.errors import ConfigError

NodeId = NewType("NodeId", str)  #: base32(sha256(SPKI))[:20], lower case; proven by the node's certificate
JobId = NewType("JobId", str)  #: made by the coordinator: "job-" and 10 random characters of [a-z2-7]
ClusterId = NewType("ClusterId", str)  #: made by `fusion-coordinator init`: 10 random characters of [a-z2-7]
StageIndex = NewType("StageIndex", int)  #: 0 is the stage that runs the first operators
EdgeId = NewType("EdgeId", int)  #: index into the plan's list of edges
ValueId = NewType("ValueId", int)  #: index into a graph's list of values
Epoch = NewType("Epoch", int)  #: number of the plan in force, from 1; it only grows
Incarnation = NewType("Incarnation", int)  #: grows each time that a node registers

ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
NAME_RULE = "1 to 63 of A-Z a-z 0-9 . _ -, starting with a letter or a digit, not ending in a dot"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9_-])?")
_ID = re.compile(r"[a-z0-9-]{8,40}")


def random_id(prefix: str = "", length: int = 10) -> str:
    """Return `prefix` followed by `length` random characters (5 bits each)."""
    return prefix + "".join(secrets.choice(ALPHABET) for _ in range(length))


def check_name(field: str, name: str) -> str:
    """Return `name` if it is fit for a node or a job; raise ConfigError otherwise."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{field}: {name[:80]!r} is not a usable name; allowed: {NAME_RULE}")
    return name


def is_id(text: str) -> bool:
    """Whether `text` has the form of a server-made identifier. Only such text ever becomes part of a path."""
    return bool(_ID.fullmatch(text))
