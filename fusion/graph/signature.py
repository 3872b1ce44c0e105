"""Signatures of operators as data: what a call may pass, read from lines in torch's own notation.

`add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)`: `(a)` marks memory that the result
shares, `!` that it is written to, `?` that None may be passed, `=` that the argument may be left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(r"(?P<name>\w+(?:\.\w+)?)\((?P<parameters>.*)\) -> (?P<returns>.+)")
_PARAMETER = re.compile(
    r"(?P<base>[A-Za-z]+)(?:\((?P<alias>[a-z])(?P<write>!)?(?: -> \*)?\))?(?P<inner>\?)?"
    r"(?P<list>\[\d*\])?(?P<optional>\?)? (?P<name>\w+)(?P<default>=.*)?"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument that an operator takes."""

    name: str
    kind: str  #: "Tensor", "int", "float", "bool", "str", "Scalar", "ScalarType", "Layout", "Device", ...
    is_list: bool = False  #: a list of `kind`
    nullable_items: bool = False  #: whether items of the list may be None
    nullable: bool = False  #: whether None may be passed
    required: bool = True
    keyword_only: bool = False


@dataclass(frozen=True)
class OperatorInfo:
    """What everyone must know about an operator without asking torch."""

    name: str  #: "aten.linear.default", "fusion.dropout.default", "python.mul"
    cost: (
        str  #: its kind: names the rule in fusion.graph.costs that counts its operations, and how fast a node is at it
    )
    returns: int = 1  #: values returned; 0: a list whose length the graph states (split, chunk, unbind)
    aliases: tuple[int, ...] = ()  #: arguments whose memory the result may share (views, and reshape-like calls)
    mutates: tuple[int, ...] = ()  #: arguments that it writes to, including batch norm's statistics
    random: bool = False  #: draws random numbers: runs under a generator seeded by (job, step, micro-batch, operator)
    parameters: tuple[Parameter, ...] = ()  #: in order; those by keyword only come last
    shape: str = ""  #: the rule in fusion.graph.shapes that its result's shape must obey; "" where none is written

    @cached_property
    def positional(self) -> tuple[Parameter, ...]:
        """The parameters that may be passed by position."""
        return tuple(item for item in self.parameters if not item.keyword_only)

    @cached_property
    def index_of(self) -> dict[str, int]:
        """Index of each parameter by its name."""
        return {item.name: index for index, item in enumerate(self.parameters)}

    @cached_property
    def required(self) -> tuple[int, ...]:
        """Indices of the parameters that every call passes."""
        return tuple(index for index, item in enumerate(self.parameters) if item.required)


def family(
    text: str,
    cost: str,
    *,
    shape: str = "",
    namespace: str = "aten",
    random: bool = False,
    also_aliases: tuple[int, ...] = (),
    also_mutates: tuple[int, ...] = (),
) -> tuple[OperatorInfo, ...]:
    """Return the operators that `text` lists, one signature a line; a line that starts with a space goes on.

    The last two name arguments that torch's notation should mark but does not.
    """
    lines = text.strip().replace("\n ", " ").splitlines()
    return tuple(
        _operator(" ".join(line.split()), cost, shape, namespace, random, also_aliases, also_mutates) for line in lines
    )


def _operator(
    line: str,
    cost: str,
    shape: str,
    namespace: str,
    random: bool,
    also_aliases: tuple[int, ...],
    also_mutates: tuple[int, ...],
) -> OperatorInfo:
    match = _LINE.fullmatch(line)
    assert match is not None, line
    name = match["name"]
    if namespace != "python" and "." not in name:
        name += ".default"
    found = _parameters(match["parameters"])
    return OperatorInfo(
        name=f"{namespace}.{name}",
        cost=cost,
        returns=_count_returns(match["returns"]),
        aliases=_merge((index for index, item in enumerate(found) if item[1]), also_aliases),
        mutates=_merge((index for index, item in enumerate(found) if item[2]), also_mutates),
        random=random,
        parameters=tuple(item[0] for item in found),
        shape=shape,
    )


def _merge(marked: Iterable[int], further: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*marked, *further}))


def _parameters(text: str) -> list[tuple[Parameter, bool, bool]]:
    """Return each parameter with whether the result shares its memory and whether it is written to."""
    found: list[tuple[Parameter, bool, bool]] = []
    keyword_only = False
    for part in _split(text):
        if part == "*":
            keyword_only = True
            continue
        match = _PARAMETER.fullmatch(part)
        assert match is not None, part
        is_list = match["list"] is not None
        parameter = Parameter(
            name=match["name"],
            kind={"SymInt": "int"}.get(match["base"], match["base"]),
            is_list=is_list,
            nullable_items=is_list and match["inner"] is not None,
            nullable=match["optional"] is not None or (not is_list and match["inner"] is not None),
            required=match["default"] is None,
            keyword_only=keyword_only,
        )
        found.append((parameter, match["alias"] is not None, match["write"] is not None))
    return found


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def _count_returns(text: str) -> int:
    if text.endswith("[]"):
        return 0
    return len(_split(text[1:-1])) if text.startswith("(") else 1
