"""How `einsum` is carried out: pair by pair, each as one batched matrix product. Counts its operations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusion.graph.dag import Argument

#: Dimension labels: a letter, or for those behind "..." their distance from its right end.
Label = str | int
Sizes = dict[Label, int]

MAX_TENSORS = 64


def einsum_flops(
    equation: str, shapes: Sequence[tuple[int, ...]], grads: Sequence[bool], path: Argument = None
) -> tuple[float, float]:
    """Return operations forward and backward of an einsum over tensors of these shapes.

    `grads` says which require a gradient; `path` is torch's list of positions, two a step, or None for left to right.
    Raise ValueError or LookupError where these do not fit together.
    """
    if len(shapes) > MAX_TENSORS:
        raise ValueError(f"einsum of {len(shapes)} tensors; allowed are {MAX_TENSORS}")
    terms, output = _parse(equation, shapes)
    pending = list(zip(terms, grads, strict=True))
    steps = _steps(path, len(pending))
    forward = backward = 0
    for first, second in steps:
        (left, left_grad), (right, right_grad) = pending[first], pending[second]
        rest = [item for index, item in enumerate(pending) if index not in (first, second)]
        needed = set(output).union(*(term for term, _ in rest))
        count, result = _contract(left, right, needed)
        forward += count
        backward += count * (left_grad + right_grad)
        joined = (result, left_grad or right_grad)
        pending = [*rest, joined] if path else [joined, *rest]
    return forward, backward


def _steps(path: Argument, tensors: int) -> list[tuple[int, int]]:
    if not isinstance(path, tuple):
        return [(0, 1)] * (tensors - 1)
    numbers = [item for item in path if isinstance(item, int)]
    return [(min(pair), max(pair)) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def _contract(left: Sizes, right: Sizes, needed: set[Label]) -> tuple[int, Sizes]:
    """Return the operations of one pair's product and the sizes of its result."""
    sizes = {label: max(left.get(label, 1), right.get(label, 1)) for label in (*left, *right)}
    result = {label: size for label, size in sizes.items() if label in needed}
    summed = [label for label in sizes if label not in needed and left.get(label, 1) != 1 and right.get(label, 1) != 1]
    if not summed:
        return 0, result  # torch multiplies element by element
    # a dimension that only one of the two has and nobody needs is added up before the product
    return 2 * prod(result.values()) * prod(sizes[label] for label in summed), result


def _parse(equation: str, shapes: Sequence[tuple[int, ...]]) -> tuple[list[Sizes], list[Label]]:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    terms = []
    for part, shape in zip(parts, shapes, strict=True):
        labels = _labels(part, len(shape) - len(part.replace("...", "")))
        terms.append(dict(zip(labels, shape, strict=True)))
    widest = max((label + 1 for term in terms for label in term if isinstance(label, int)), default=0)
    if arrow:
        return terms, _labels(output, widest)
    letters = inputs.replace(",", "").replace("...", "")
    once: list[Label] = [letter for letter in sorted(set(letters)) if letters.count(letter) == 1]
    return terms, [*range(widest), *once]


def _labels(part: str, hidden: int) -> list[Label]:
    before, dots, after = part.partition("...")
    middle: list[Label] = list(reversed(range(hidden))) if dots else []
    return [*before, *middle, *after]
