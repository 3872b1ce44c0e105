"""Which elements a sparse codec keeps, and how their places travel.

Places are ascending int64. On the wire they are gaps: a byte g below 255 skips g elements and keeps the next one; 255
skips 255 and keeps none. Under zstd that comes within a few percent of the entropy H(p)/p bits each, for any share p.
Repeated, unsorted or negative places cannot be written this way.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from fusion.base.errors import WireError
from fusion.compress.frame import Buffer

Places = npt.NDArray[np.int64]
_SKIP = 255
_SMALL = 1 << 14  #: up to here an exact threshold costs less than a sampled one
_SAMPLES = (1 << 12, 1 << 16)  #: fewest and most elements looked at for a sampled threshold
_EXPECTED_KEPT = 256  #: kept elements wanted among the samples: about 6 % of deviation
_TOLERANCE = 0.25  #: beyond it a sampled threshold is not used
_GOLDEN = (5**0.5 - 1) / 2


def select(flat: torch.Tensor, kept: int, *, exact: bool) -> torch.Tensor | None:
    """Return the places (int64, on the device of `flat`) of the elements with the largest magnitudes.

    Exactly `kept`, of equal magnitudes the first; or about so many with a threshold found on a sample, which is a
    pure function of the input. None if an element is Inf or NaN.
    """
    size = flat.abs()
    if size.dtype in (torch.float16, torch.bfloat16):
        size = size.float()
    if size.numel() and not bool(size.amax() < torch.inf):
        return None
    if kept >= size.numel():
        return torch.arange(size.numel(), device=size.device)
    if kept == 0:
        return torch.empty(0, dtype=torch.int64, device=size.device)
    if not exact and size.numel() > _SMALL:
        places = _nonzero(size > _sampled_threshold(size, kept))
        if abs(places.numel() - kept) <= _TOLERANCE * kept:
            return places
    return _exactly(size, kept)


def _exactly(size: torch.Tensor, kept: int) -> torch.Tensor:
    threshold = _kept_th(size, kept)
    places = _nonzero(size >= threshold)
    if places.numel() == kept:
        return places
    above = _nonzero(size > threshold)
    ties = _nonzero(size == threshold)[: kept - above.numel()]
    return torch.cat((above, ties)).sort().values


def _kept_th(size: torch.Tensor, kept: int) -> float:
    """Return the `kept`-th largest number."""
    if size.device.type == "cpu":  # numpy's selection is 20 times faster than torch's
        position = size.numel() - kept
        return float(np.partition(size.numpy(), position)[position])
    return float(size.topk(kept, sorted=False).values.amin())


def _sampled_threshold(size: torch.Tensor, kept: int) -> float:
    count = size.numel()
    wanted = min(max(_SAMPLES[0], _EXPECTED_KEPT * count // kept), _SAMPLES[1], count // 2)
    sample = size.index_select(0, _sample_places(count, wanted).to(size.device))
    return _kept_th(sample, max(1, round(kept * wanted / count)))


@lru_cache(maxsize=32)
def _sample_places(count: int, wanted: int) -> torch.Tensor:
    """Return `wanted` places spread evenly, without a period that a tensor's width could share."""
    steps = np.arange(1, wanted + 1, dtype=np.float64) * _GOLDEN % 1.0
    return torch.from_numpy((steps * count).astype(np.int64))


def _nonzero(mask: torch.Tensor) -> torch.Tensor:
    if mask.device.type == "cpu":  # numpy's is five times faster than torch's
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def write_gaps(places: Places) -> bytes:
    """Return the bytes of ascending places."""
    gaps = np.diff(places, prepend=-1) - 1
    if not len(gaps) or gaps.max() < _SKIP:
        return gaps.astype(np.uint8).tobytes()
    ends = np.cumsum(gaps // _SKIP + 1)
    out = np.full(ends[-1], _SKIP, dtype=np.uint8)
    out[ends - 1] = gaps % _SKIP
    return out.tobytes()


def largest_gap_bytes(kept: int, elements: int) -> int:
    """Return the most bytes that `kept` places among `elements` can take."""
    return kept + elements // _SKIP


def read_gaps(data: Buffer, kept: int, elements: int) -> Places:
    """Return the places; WireError unless they are exactly `kept`, below `elements`."""
    gaps = np.frombuffer(data, dtype=np.uint8)
    is_place = gaps != _SKIP
    found = int(np.count_nonzero(is_place))
    if found != kept or (len(gaps) and not is_place[-1]):
        raise WireError(f"places: {found} in {len(gaps)} bytes, {kept} are expected")
    places: Places = (np.cumsum(gaps + is_place.astype(np.int64)) - 1)[is_place]
    if kept and places[-1] >= elements:
        raise WireError(f"places: the last is {places[-1]} of a tensor with {elements} elements")
    return places


def read_wide(data: Buffer, kept: int, elements: int) -> Places:
    """Return places that travelled as int64; WireError unless they ascend strictly from 0 to below `elements`."""
    places: Places = np.frombuffer(data, dtype=np.int64)
    if len(places) != kept or (kept and (places[0] < 0 or places[-1] >= elements or (np.diff(places) <= 0).any())):
        raise WireError(f"places: not {kept} ascending numbers from 0 to {elements - 1}")
    return places
