"""Token streams: text or ready-made ids, cut into windows, with the next token of each place as its label."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fusion.base.errors import DataError
from fusion.graph.dag import TensorSpec
from fusion.job.source import Array, Source, StoredArray, held_out, write_arrays
from fusion.protocol.job import DataField, DataFile, DataSpec, WindowSource

_SCAN_TOKENS = 1 << 24
_PATH_LIKE_LENGTH = 260  #: a text shorter than this without a line break may be a path by mistake

Tokenizer = str | Callable[[str], Any] | Any


class TokenData(Source):
    """Windows of `block_size` tokens over one stream of ids.

    tokens: a one-dimensional integer array, list or tensor; or the path of a .npy file or of a raw .bin file of
        `file_dtype`, which is memory-mapped.
    block_size: tokens of a sample.
    inputs, labels: names of the two fields; `labels=None` makes none.
    shift_labels: whether the label of a place is its next token (True), or its own token (False), for models such as
        Hugging Face's that shift inside.
    stride: tokens from the start of one sample to the next; default `block_size`.
    dtype: what the model gets, "int64" or "int32"; files hold the ids in as few bytes as they fit.
    """

    def __init__(
        self,
        tokens: Array | Sequence[int] | str | os.PathLike[str] | Any,
        block_size: int,
        *,
        inputs: str = "input_ids",
        labels: str | None = "labels",
        shift_labels: bool = True,
        stride: int | None = None,
        dtype: str = "int64",
        file_dtype: str = "uint16",
    ) -> None:
        array = _load(tokens, file_dtype) if isinstance(tokens, str | os.PathLike) else _as_array(tokens)
        self._block_size = _positive("block_size", block_size)
        self._stride = self._block_size if stride is None else _positive("stride", stride)
        self._inputs, self._labels, self._shift = inputs, labels, shift_labels
        if dtype not in ("int64", "int32"):
            raise DataError(f"dtype of tokens must be int64 or int32, got {dtype!r}")
        if inputs == labels:
            raise DataError(f"inputs and labels are both named {inputs!r}; give them two names")
        self._dtype = dtype
        self.tokens = array
        self.samples = self._count(array)

    def _count(self, array: Array) -> int:
        if not array.size:
            raise DataError("the token data is empty")
        need = self._block_size + self._reach
        if array.size < need:
            raise DataError(
                f"the data has {array.size} tokens, one sample needs {need} (block_size={self._block_size}); "
                f"give more data or a smaller block_size"
            )
        return int((array.size - need) // self._stride + 1)

    @property
    def _reach(self) -> int:
        """Tokens that a sample needs beyond its inputs."""
        return 1 if self._labels is not None and self._shift else 0

    @property
    def field_names(self) -> tuple[str, ...]:
        return (self._inputs,) if self._labels is None else (self._inputs, self._labels)

    def split(self, fraction: float) -> tuple[TokenData, TokenData]:
        """Return (train, eval): the last `fraction` of the samples are held out. The two share no token."""
        kept = self.samples - held_out(self.samples, fraction)
        border = kept * self._stride + max(0, self._block_size - self._stride) + self._reach
        return self._over(self.tokens[:border]), self._over(self.tokens[border:])

    def _over(self, tokens: Array) -> TokenData:
        return TokenData(
            tokens,
            self._block_size,
            inputs=self._inputs,
            labels=self._labels,
            shift_labels=self._shift,
            stride=self._stride,
            dtype=self._dtype,
        )

    def describe(self, fields: Collection[str]) -> DataSpec:
        sample = TensorSpec(self._dtype, (self._block_size,))
        items = tuple(
            DataField(name, sample, WindowSource(0, "tokens", self._stride, offset))
            for name, offset in self._offsets.items()
            if name in fields
        )
        return DataSpec(items, (DataFile(),), self.samples)

    @property
    def _offsets(self) -> dict[str, int]:
        return {self._inputs: 0} | ({} if self._labels is None else {self._labels: self._reach})

    def first(self, count: int) -> dict[str, torch.Tensor]:
        starts = np.arange(count) % self.samples * self._stride
        places = starts[:, None] + np.arange(self._block_size)
        return {
            name: torch.from_numpy(self.tokens[places + offset].astype(self._dtype))
            for name, offset in self._offsets.items()
        }

    def write(self, directory: Path, stem: str, fields: Collection[str]) -> tuple[Path | None, ...]:
        """Write the stream once, as narrow as its largest id allows; the fields are windows of it."""
        low, high = extent(self.tokens)
        if low < 0 or high >= 2**31:
            raise DataError(f"token ids must lie in 0..2147483647, the data has {low}..{high}")
        narrow = "uint8" if high < 2**8 else "uint16" if high < 2**16 else "int32"
        path = directory / f"{stem}.safetensors"
        write_arrays(path, {"tokens": StoredArray(narrow, self.tokens)})
        return (path,)


class TextData(TokenData):
    """Text as tokens: `TokenData` over the ids that `tokenizer` makes of it.

    text: the text itself (a str), or the path of a UTF-8 file (a pathlib.Path), or several such paths.
    tokenizer: "bytes" (ids 0..255, no vocabulary needed), a function from a str to ids, or an object with `encode`
        such as those of transformers, tokenizers or tiktoken.
    The other arguments are those of `TokenData`.
    """

    def __init__(
        self,
        text: str | os.PathLike[str] | Iterable[os.PathLike[str]],
        block_size: int,
        *,
        tokenizer: Tokenizer = "bytes",
        inputs: str = "input_ids",
        labels: str | None = "labels",
        shift_labels: bool = True,
        stride: int | None = None,
        dtype: str = "int64",
    ) -> None:
        super().__init__(
            _tokenize(_read_texts(text), tokenizer),
            block_size,
            inputs=inputs,
            labels=labels,
            shift_labels=shift_labels,
            stride=stride,
            dtype=dtype,
        )


def _positive(field: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < 1:
        raise DataError(f"{field} must be a positive integer, got {value!r:.40}")
    return int(value.__index__())


def extent(array: Array, ignored: int | None = None) -> tuple[int, int]:
    """Return the least and greatest element of an integer array, with flat memory; (0, 0) if there is none.

    Elements equal to `ignored` do not count.
    """
    flat = array.reshape(-1)
    parts = (flat[start : start + _SCAN_TOKENS] for start in range(0, flat.size, _SCAN_TOKENS))
    if ignored is not None:
        parts = (part[part != ignored] for part in parts)
    ends = [(int(part.min()), int(part.max())) for part in parts if part.size]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0, 0)


def _as_array(tokens: Any) -> Array:
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy()
    array = np.asarray(tokens)
    if array.ndim != 1:
        raise DataError(f"tokens must have one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"tokens must be integers, got {array.dtype}")
    return array


def _load(path: str | os.PathLike[str], file_dtype: str) -> Array:
    file = Path(path)
    try:
        if file.suffix == ".npy":
            return _as_array(np.load(file, mmap_mode="r", allow_pickle=False))
        if file.suffix == ".bin":
            if file_dtype not in ("uint8", "uint16", "int32", "uint32", "int64"):
                raise DataError(f"file_dtype must be uint8, uint16, int32, uint32 or int64, got {file_dtype!r}")
            return np.memmap(file, dtype=np.dtype(file_dtype).newbyteorder("<"), mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read tokens from {file}: {error}") from error
    raise DataError(f"tokens are read from .npy and .bin files, got {str(file)!r}")


def _read_texts(text: Any) -> list[str | Path]:
    """Return the parts: a str is text, a path is a file whose text is read when it is tokenized."""
    if isinstance(text, str):
        if _names_a_file(text):
            raise DataError(f"text={text!r} is the name of a file; for its content pass pathlib.Path({text!r})")
        return [text]
    paths = list(text) if isinstance(text, Iterable) else [text]
    for path in paths:
        if not isinstance(path, os.PathLike):
            raise DataError(f"text must be a str, a pathlib.Path or a list of paths, got {type(path).__name__}")
    return [Path(path) for path in paths]


def _names_a_file(text: str) -> bool:
    if len(text) > _PATH_LIKE_LENGTH or "\n" in text or not text.strip():
        return False
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _tokenize(parts: list[str | Path], tokenizer: Tokenizer) -> Array:
    if isinstance(tokenizer, str) and tokenizer != "bytes":
        raise DataError(f"tokenizer must be 'bytes', a function, or an object with encode; got {tokenizer!r}")
    if isinstance(tokenizer, str):
        pieces = [np.frombuffer(_raw(part), dtype=np.uint8) for part in parts]
    else:
        pieces = [_ids(_decoded(part), tokenizer) for part in parts]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint8)


def _raw(part: str | Path) -> bytes:
    if isinstance(part, str):
        return part.encode()
    try:
        return part.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {part}: {error.strerror or error}") from error


def _decoded(part: str | Path) -> str:
    if isinstance(part, str):
        return part
    try:
        return _raw(part).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{part} is not UTF-8 at byte {error.start}; use tokenizer='bytes' or convert it") from error


def _ids(text: str, tokenizer: Any) -> Array:
    encode = getattr(tokenizer, "encode", tokenizer)
    if not callable(encode):
        raise DataError(f"tokenizer must be 'bytes', a function, or an object with encode; got {tokenizer!r:.40}")
    made = encode(text)
    return _as_array(getattr(made, "ids", made))
