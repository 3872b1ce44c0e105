"""The model's own names for the tensors of a captured graph."""

from __future__ import annotations

from collections.abc import Iterable

from fusion.graph.dag import Graph, InputKind


def names_of(graph: Graph, held: Iterable[str]) -> dict[str, str]:
    """Return the model's names for tensors -> the canonical name that holds each; `held` are all canonical names."""
    aliases = {item.name: item.aliases for item in graph.inputs if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
    found = {}
    for name in held:
        if not name.startswith("$"):
            found[name] = name
            found |= dict.fromkeys(aliases.get(name, ()), name)
    return found
