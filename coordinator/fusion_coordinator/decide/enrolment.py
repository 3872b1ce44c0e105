"""Who gets a certificate."""

from __future__ import annotations

import hashlib
import hmac

from fusion.base.errors import AuthError, ConfigError, NotFoundError
from fusion.security.credentials import RENEWABLE_S, Role
from fusion_coordinator.state import AnyEvent, State
from fusion_coordinator.state.events import Enrolled, Revoked, TokenCreated
from fusion_coordinator.state.records import TokenRecord

MIN_TOKEN_S, MAX_TOKEN_S = 1.0, 30 * 86_400.0
TOKEN_ROLES = (Role.NODE, Role.OWNER)


def hash_secret(secret: bytes) -> bytes:
    """Return what is kept of a token's secret. It is random and long, so a plain hash serves."""
    return hashlib.sha256(secret).digest()


def create_token(role: str, valid_s: float, token_id: str, secret: bytes, wall_s: float) -> TokenCreated:
    """Make a token; ConfigError for a role that is not given out by tokens, or for an odd life time."""
    if role not in TOKEN_ROLES:
        raise ConfigError(f"role must be one of {', '.join(TOKEN_ROLES)}; got {role[:40]!r}")
    if not MIN_TOKEN_S <= valid_s <= MAX_TOKEN_S:
        raise ConfigError(f"valid_s must be {MIN_TOKEN_S:g}..{MAX_TOKEN_S:g} seconds, got {valid_s:g}")
    return TokenCreated(wall_s, token_id, hash_secret(secret), Role(role), wall_s + valid_s)


def enrol(
    state: State, token_id: str, secret: bytes, identity: str, name: str, wall_s: float
) -> tuple[list[AnyEvent], Role]:
    """Use a token for `identity`; AuthError if it cannot be used.

    A token serves one key. The same key may ask again, because the answer may have been lost. Whether a token
    exists, is expired or used is told only to those who know its secret.
    """
    token = state.tokens.get(token_id)
    expected = token.secret_hash if token is not None else b"\x00" * 32
    if not hmac.compare_digest(expected, hash_secret(secret)) or token is None:
        raise AuthError("this join token is not known here; it was mistyped, or is very old; make a new one")
    if token.used_by and token.used_by != identity:
        raise AuthError("this join token was used by another machine; every machine needs one of its own")
    _check_usable(state, token, identity, wall_s)
    if token.used_by == identity:
        return [], token.role
    return [Enrolled(wall_s, token_id, identity, token.role, name)], token.role


def _check_usable(state: State, token: TokenRecord, identity: str, wall_s: float) -> None:
    if wall_s >= token.expires_wall_s:
        raise AuthError(f"this join token expired {wall_s - token.expires_wall_s:.0f} s ago; make a new one")
    if identity in state.revoked:
        raise AuthError("this key was revoked; join with a new one")


def renewable(state: State, identity: str, role: Role, expired_wall_s: float, wall_s: float) -> None:
    """Check that a node may have a new certificate for one that has expired; AuthError says why not."""
    if role is not Role.NODE:
        raise AuthError("only nodes' certificates are renewed after their end; join again")
    if identity in state.revoked:
        raise AuthError("this node has been revoked; ask the cluster's operator for a new token")
    if wall_s > expired_wall_s + RENEWABLE_S:
        days = (wall_s - expired_wall_s) / 86_400
        limit = f"a new one is given for up to {RENEWABLE_S / 86_400:.0f} days"
        raise AuthError(f"the certificate expired {days:.0f} days ago, {limit}; join again with a token")


def revoke(state: State, identity: str, wall_s: float) -> list[AnyEvent]:
    """Withdraw an identity; NotFoundError if nobody has it."""
    if identity not in state.identities and identity not in state.nodes:
        raise NotFoundError(f"identity {identity[:40]!r} is not known; see 'fusion-coordinator nodes --json'")
    return [] if identity in state.revoked else [Revoked(wall_s, identity)]
