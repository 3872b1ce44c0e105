"""Addresses as people write them: HOST:PORT, with brackets around an IPv6 host."""

from __future__ import annotations

import re

from fusion.base.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\.?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9_.-]{1,16})?")


def split_address(field: str, text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return (host, port) of "host:port" or "[ipv6]:port"; the host comes without brackets.

    Raises ConfigError for anything else. Port 0 is allowed: it lets the system choose one to listen on.
    """
    host, port_text = _parts(text)
    valid = _IPV6.fullmatch(host) if ":" in host else _HOST.fullmatch(host)
    if not valid:
        raise ConfigError(f"{field}: {text[:80]!r} is not HOST:PORT (an IPv6 host goes in brackets)")
    if not port_text and default_port is not None:
        return host, default_port
    if not (port_text.isascii() and port_text.isdigit() and len(port_text) <= 5 and int(port_text) <= 65535):
        raise ConfigError(f"{field}: port {port_text[:20]!r} of {text[:80]!r} must be 0..65535")
    return host, int(port_text)


def _parts(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host if ":" in host else "", rest.removeprefix(":")
    host, _, port = text.partition(":")
    return host, port


def join_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
