"""Byte counts, rates and durations as people write and read them."""

from __future__ import annotations

import re

from fusion.base.errors import ConfigError

KIB, MIB, GIB = 2**10, 2**20, 2**30
_FACTORS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": KIB,
    "mi": MIB,
    "gi": GIB,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(bit|b|byte|B)(?:/s|ps)\s*")  # b is a bit, B a byte
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min)\s*", re.IGNORECASE)
_FLOPS = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmgt])?(?:flops?(?:/s)?)?\s*", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def parse_bytes(field: str, text: str) -> int:
    """Return the byte count that `text` states, such as "4GiB", "512 MB" or "1000"."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{field}: {text[:40]!r} is not a size; write for example 512MiB, 8GiB or 2000000000")
    return int(float(match[1]) * _FACTORS[(match[2] or "").lower()])


def parse_rate(field: str, text: str) -> float:
    """Return bytes per second of a rate such as "100 Mbit/s", "1.5 Gbit/s" or "12 MB/s"."""
    match = _RATE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{field}: {text[:40]!r} is not a rate; write for example 100 Mbit/s, 1 Gbit/s or 20 MB/s")
    bits = 1 if match[3] in ("bit", "b") else 8
    return float(match[1]) * _FACTORS[match[2].lower()] * bits / 8


def parse_duration(field: str, text: str) -> float:
    """Return the seconds of a duration such as "20 ms", "1.5 s" or "150 us"."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{field}: {text[:40]!r} is not a duration; write for example 20 ms, 1.5 s or 2 min")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_flops(field: str, text: str) -> float:
    """Return floating-point operations per second of a speed such as "10T", "500 GFLOPS" or "2.5e12"."""
    match = _FLOPS.fullmatch(text)
    if match is None:
        raise ConfigError(f"{field}: {text[:40]!r} is not a speed; write for example 10T, 500 GFLOPS or 2e12")
    return float(match[1]) * _FACTORS[(match[2] or "").lower()]


def format_flops(flops: float) -> str:
    """Return a speed as "12.5 TFLOPS"."""
    for unit, factor in (("TFLOPS", 1e12), ("GFLOPS", 1e9), ("MFLOPS", 1e6)):
        if flops >= factor:
            return f"{flops / factor:.3g} {unit}"
    return f"{flops:.3g} FLOPS"


def format_bytes(count: float) -> str:
    """Return `count` bytes in binary units with three significant digits: "1.46 MiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(size) < 1000 or unit == "PiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_rate(bytes_per_s: float) -> str:
    """Return a link's rate in the unit that links are sold in: "20 Mbit/s"."""
    bits = bytes_per_s * 8
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits:.3g} bit/s"


def format_duration(seconds: float) -> str:
    """Return a duration as "850 ms", "12.3 s", "4 min 05 s" or "3 h 12 min"."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
