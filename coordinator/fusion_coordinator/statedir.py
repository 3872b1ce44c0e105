"""The state directory: what lies where, how `init` fills it, and the coordinator's own certificate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from cryptography import x509

from fusion.base.address import join_address, split_address
from fusion.base.clock import Clock
from fusion.base.errors import ConfigError
from fusion.base.ids import ClusterId, check_name, random_id
from fusion.security.ca import CertificateAuthority
from fusion.security.credentials import Credentials, Role, load_key, write_file
from fusion_coordinator.store.sqlite import SqliteStore

T = TypeVar("T")
DEFAULT_LISTEN = "127.0.0.1:7443"
RENEW_AT = 2 / 3  #: of the certificate's life


class Config(msgspec.Struct, frozen=True):
    """What `init` decided."""

    cluster: ClusterId
    name: str
    listen: str  #: host:port of the mutual-TLS port
    advertise: tuple[str, ...] = ()  #: host:port, where others reach it


class Running(msgspec.Struct, frozen=True):
    """Where the running coordinator listens; written at each start."""

    pid: int
    address: str
    enrol_address: str


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths below one state directory."""

    path: Path

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.path / "coordinator.db"

    @property
    def blobs(self) -> Path:
        """The blob store."""
        return self.path / "blobs"

    @property
    def checkpoints(self) -> Path:
        """The jobs' checkpoints."""
        return self.path / "checkpoints"

    @property
    def admin(self) -> Path:
        """The operator's credentials."""
        return self.path / "admin"

    @property
    def own(self) -> Path:
        """The coordinator's own credentials."""
        return self.path / "own"

    def config(self) -> Config:
        """Read the configuration; ConfigError if there is no cluster here."""
        return _read(self.path / "config.json", Config, "run 'fusion-coordinator init' first, or state --state-dir")

    def running(self) -> Running:
        """Read where the coordinator listens; ConfigError if it never ran."""
        return _read(self.path / "server.json", Running, "start it with 'fusion-coordinator serve'")

    def write_running(self, running: Running) -> None:
        """Leave word for the commands that talk to the running coordinator."""
        write_file(self.path / "server.json", msgspec.json.encode(running) + b"\n", 0o644)

    def ca(self, config: Config) -> CertificateAuthority:
        """Read the CA."""
        return CertificateAuthority.load(config.cluster, self.path)


def _read(path: Path, kind: type[T], what_to_do: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; {what_to_do}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not usable: {error}") from None


def initialise(
    directory: Path, owner_directory: Path, name: str, listen: str, advertise: Sequence[str], clock: Clock
) -> tuple[Config, bool]:
    """Make a new cluster; return its configuration and whether an owner's credentials were written.

    ConfigError if the directory holds one already: nothing in it is ever overwritten.
    """
    state, wall_s = StateDir(directory), clock.wall_s()
    _, port = split_address("listen", listen)
    check_name("name", name)
    addresses = tuple(join_address(*split_address("advertise", address, port)) for address in advertise)
    if (directory / "config.json").exists() or state.database.exists():
        raise ConfigError(f"{directory} holds a cluster already; use another --state-dir, or remove it yourself")
    config = Config(ClusterId(random_id()), name, listen, addresses)
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        ca = CertificateAuthority.create(config.cluster, wall_s)
        ca.save(directory)
        state.blobs.mkdir(mode=0o700, exist_ok=True)
        ca.new_credentials(Role.ADMIN, "admin", dial_address(config), wall_s).save(state.admin)
        SqliteStore(state.database, create=True).close()
        state.database.chmod(0o600)
        write_file(directory / "config.json", msgspec.json.format(msgspec.json.encode(config)) + b"\n", 0o644)
        made_owner = not (owner_directory / "identity.json").exists()
        if made_owner:
            ca.new_credentials(Role.OWNER, "owner", dial_address(config), wall_s).save(owner_directory)
    except OSError as error:
        raise ConfigError(f"{error.filename or directory}: {error.strerror}; choose another --state-dir") from None
    return config, made_owner


def dial_address(config: Config) -> str:
    """Return where this machine's own commands reach the coordinator."""
    if config.advertise:
        return config.advertise[0]
    host, port = split_address("listen", config.listen)
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)  # noqa: S104  # it is compared


class OwnCertificate:
    """The coordinator's certificate, made again when two thirds of its life are over or its hosts have changed."""

    def __init__(self, state: StateDir, ca: CertificateAuthority, hosts: Sequence[str], clock: Clock) -> None:
        self._state, self._ca, self._hosts, self._clock = state, ca, tuple(hosts), clock
        self.credentials = self._load()
        self.renew_if_due()

    def _load(self) -> Credentials:
        if (self._state.own / "identity.json").exists():
            return Credentials.load(self._state.own)
        made = self._ca.new_credentials(Role.COORDINATOR, "coordinator", "", self._clock.wall_s(), hosts=self._hosts)
        made.save(self._state.own)
        return made

    def renew_if_due(self) -> bool:
        """Renew with the same key if it is time; new connections get the new certificate."""
        certificate = x509.load_pem_x509_certificate(self.credentials.certificate_pem)
        begin_s, end_s = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        wall_s = self._clock.wall_s()
        if begin_s <= wall_s < begin_s + RENEW_AT * (end_s - begin_s) and self._names_hosts(certificate):
            return False
        key = load_key(self.credentials.key_pem).public_key()
        fresh = self._ca.issue(key, Role.COORDINATOR, wall_s, hosts=self._hosts)
        self.credentials = replace(self.credentials, certificate_pem=fresh)
        self.credentials.save(self._state.own)
        return True

    def _names_hosts(self, certificate: x509.Certificate) -> bool:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        known = {str(name.value) for name in names}
        return set(self._hosts) <= known
