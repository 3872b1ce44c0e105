"""`fusion-node doctor`: the general checks, and those that only a node has: device, memory, its own reachability."""

from __future__ import annotations

import asyncio
import time

from fusion.base.errors import FusionError
from fusion.base.units import GIB, format_bytes
from fusion.observe import doctor
from fusion.observe.doctor import Check, fail, ok, warn
from fusion.security.credentials import Credentials
from fusion.security.tls import coordinator_server_name
from fusion.transport.channels import open_channel
from fusion_node.control import Control
from fusion_node.daemon import Settings
from fusion_node.hardware import look
from fusion_node.reachability import find_out

SMALL_MEMORY_BYTES = GIB  #: less holds no useful stage


def examine(settings: Settings) -> list[Check]:
    """Run all checks; takes a few seconds, up to half a minute when nothing answers."""
    checks = [doctor.check_python(), *doctor.check_packages(), doctor.check_protobuf()]
    checks += asyncio.run(_check_hardware(settings))
    checks += [doctor.check_disk(settings.home), doctor.check_congestion_control()]
    key = settings.home / "key.pem"
    if key.exists():
        checks.append(doctor.check_key(key))
        if checks[-1].status is doctor.Status.FAIL:
            return checks  # no command would use it
    try:
        credentials = Credentials.load(settings.home)
    except FusionError as error:
        return [*checks, fail("credentials", str(error), "run: fusion-node join JOINSTRING")]
    return checks + check_cluster(credentials, settings)


async def _check_hardware(settings: Settings) -> list[Check]:
    try:
        found = await look(settings.limits, settings.home / "speed.json")
    except FusionError as error:
        return [fail("device", str(error), "choose another with --device, or install the torch for it")]
    speed = f"{found.flops / 1e9:.1f} GFLOP/s with {found.threads} threads"
    checks = [ok("device", f"{found.device} ({found.device_name}), {speed}")]
    memory = f"{format_bytes(found.memory_bytes)} for jobs"
    if found.memory_bytes < SMALL_MEMORY_BYTES:
        return [*checks, warn("memory", memory, "end other programs, or raise --max-memory")]
    return [*checks, ok("memory", memory)]


def check_cluster(credentials: Credentials, settings: Settings) -> list[Check]:
    """Whether the certificate is in order, the coordinator answers, and the others reach this node."""
    wall_s = time.time()
    try:
        credentials.check(wall_s)
        problem = ""
    except FusionError as error:
        problem = str(error)
    checks = [doctor.check_certificate(credentials.certificate_pem, problem, wall_s)]
    if problem:
        return checks  # the coordinator would refuse it, and say less
    server_name = coordinator_server_name(credentials.cluster)
    channel = open_channel(credentials.coordinator, credentials, server_name)
    try:
        answers = doctor.check_coordinator(channel, credentials.coordinator, server_name, settings.home)
    finally:
        channel.close()
    checks += answers
    if answers[0].status is not doctor.Status.FAIL:
        checks.append(asyncio.run(_check_reachability(credentials, settings)))
    return checks


async def _check_reachability(credentials: Credentials, settings: Settings) -> Check:
    name = "reachability"
    control = Control(credentials)
    try:
        found = await find_out(settings.listen, settings.advertise, credentials.coordinator, control.probe)
    except FusionError as error:
        remedy = "if that other program is fusion-node itself, all is well: stop it to test, or read its first lines"
        return warn(name, str(error), remedy)
    finally:
        await control.close()
    if not found.reachable:
        return fail(name, found.detail.partition(": ")[0], found.detail.partition(": ")[2])
    return ok(name, f"the coordinator reaches this node at {found.address}")
