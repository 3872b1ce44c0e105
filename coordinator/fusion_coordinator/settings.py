"""Times and limits by which the coordinator decides. One place, so that tests can turn them down together."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fusion.base.fortests import setting_for_tests
from fusion.base.units import MIB


@dataclass(frozen=True, slots=True)
class Settings:
    """The defaults are the product's; a node learns the first four when it registers."""

    heartbeat_s: float = 5.0
    self_fence_s: float = 25.0  #: a node ends its work that long after it sent the last answered heartbeat
    coordinator_grace_s: float = (
        900.0  #: ... or so long, if no stage of its job has had an answer for a while; 0: never
    )
    lease_s: float = 30.0  #: a node is lost that long after its last heartbeat was received; more than self_fence_s
    start_timeout_s: float = 120.0  #: a stage that has not reported for that long before READY fails its job
    hold_timeout_s: float = 120.0  #: a job that is to move comes to a step's end in that time, or in five of its steps
    blame_wait_s: float = 3.0  #: how long a "peer lost" waits for a report of what really happened
    vanished_s: float = 12.0  #: a stage whose node says for that long that it runs nothing is gone
    settle_s: float = (
        2.0  #: a plan waits until no node has become free for that long: those started together count together
    )
    release_wait_s: float = 10.0  #: ... nor for so long while a node still ends the work of a job that is over
    recover_wait_s: float = (
        10.0  #: a broken job waits at most that long for its workers to end, and for nodes to answer
    )
    rejoin_wait_s: float = 10.0  #: ... and for lost nodes to come back, if the latest step cannot be had without them
    upload_stall_s: float = 60.0  #: an upload of a state that has not grown for that long is given up
    ping_s: float = 5.0  #: between pings on a Watch stream
    sweep_s: float = 0.25  #: between looks at leases and deadlines
    flush_s: float = 0.25  #: metrics and logs wait at most that long for their common commit
    answers_kept_s: float = 86_400.0  #: how long a repeated request gets its first answer
    skew_warning_s: float = 300.0
    jobs_per_owner: int = 100  #: queued or running at a time
    log_lines_per_job: int = 10_000
    disk_reserve_bytes: int = 256 * MIB  #: uploads never fill the disk further than that
    upkeep_s: float = 3600.0  #: between copies of the database, and looks for blobs that nobody needs
    blobs_kept_s: float = 86_400.0  #: a blob that nothing refers to is deleted that long after it was stored
    enrolments_per_s: float = 20.0  #: from one host
    enrolment_burst: int = 40
    probes: bool = True  #: whether nodes measure the links between them
    probe_s: float = 0.5  #: between looks at what is to be measured
    measure_wait_s: float = 10.0  #: after a node came, a plan waits at most that long for its links to be measured
    replan_s: float = 10.0  #: between looks at whether a running job has a better plan
    replan_ratio: float = 1.25  #: so many times faster it must be
    replan_wins: int = 2  #: in so many looks in a row
    replan_hold_off_s: float = 60.0  #: after the job began to run, or last moved
    relay_bytes_per_s: float = 12.5e6  #: for nodes that cannot reach each other, all together; 0: none
    recode_wins: int = 2  #: looks in a row that must want other codecs
    recode_hold_off_s: float = 20.0  #: after the plan came into force, or the last change of codecs


def process_settings() -> Settings:
    """Return the product's settings; with FUSION_TEST=1 those that FUSION_SETTINGS (a JSON object) states differ."""
    text = setting_for_tests("FUSION_SETTINGS")
    return Settings() if text is None else msgspec.json.decode(text, type=Settings)
