"""Keeps the node's certificate alive: asks for a new one once two thirds of its life are over."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cryptography import x509

from fusion.base.clock import Clock
from fusion.base.errors import FusionError
from fusion.observe.logs import fields
from fusion.security.credentials import Credentials, load_key, make_csr
from fusion.security.enrolment import renew_expired
from fusion.transport.channels import backoff_s
from fusion_node.control import Control

log = logging.getLogger("fusion.node.renewal")

RENEW_AT, JITTER = 2 / 3, 0.1  #: of the certificate's life
LOOK_S = 60.0  #: so often is the wall clock looked at, which may jump
RETRY_FIRST_S, RETRY_MAX_S = 5.0, 300.0


def renewal_wall_s(certificate_pem: bytes, jitter: float) -> float:
    """Return when to renew; `jitter` from -1 to 1 spreads a fleet's requests."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    begin_s = certificate.not_valid_before_utc.timestamp()
    life_s = certificate.not_valid_after_utc.timestamp() - begin_s
    return begin_s + life_s * RENEW_AT * (1 + JITTER * jitter)


async def renew_once(credentials: Credentials, control: Control, wall_s: float) -> Credentials:
    """Return the credentials with a new certificate for the same key; AuthError if what came back is not usable."""
    if credentials.expired_but_renewable(wall_s):
        return await asyncio.to_thread(renew_expired, credentials)
    certificate_pem = await control.renew(make_csr(load_key(credentials.key_pem)))
    renewed = replace(credentials, certificate_pem=certificate_pem)
    renewed.check(wall_s)
    return renewed


async def keep_renewed(
    credentials: Credentials, directory: Path, control: Control, clock: Clock, use: Callable[[Credentials], None]
) -> None:
    """Renew for ever: each new certificate is stored in `directory`, used for new channels and handed to `use`."""
    while True:
        due_s = renewal_wall_s(credentials.certificate_pem, random.uniform(-1, 1))  # noqa: S311  # spreads load
        while clock.wall_s() < due_s:
            await asyncio.sleep(min(LOOK_S, due_s - clock.wall_s()))
        credentials = await _renew_with_patience(credentials, control, clock)
        try:
            credentials.save(directory)
        except OSError as error:  # this process goes on with it; the next one would not
            log.error("renewed certificate not stored", extra=fields(directory=directory, reason=error))
        control.replace(credentials)
        use(credentials)
        log.info("certificate renewed", extra=fields(identity=credentials.identity))


async def _renew_with_patience(credentials: Credentials, control: Control, clock: Clock) -> Credentials:
    attempt = 0
    while True:
        try:
            return await renew_once(credentials, control, clock.wall_s())
        except FusionError as error:
            log.warning("certificate not renewed yet", extra=fields(reason=error))
            await asyncio.sleep(1.0 + backoff_s(attempt, RETRY_FIRST_S, RETRY_MAX_S))
            attempt += 1
