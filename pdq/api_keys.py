"""API keys and whose they are: read from the settings, found again by what a client sends.

Owns the format of the keys file, reading it again when it changes, and the comparison. A key itself is not kept: only
its digest. Knows nothing of HTTP; the gateway asks before it looks at a body, and gives the tenant to the SDK.

    # comment
    sk-4f0c...            a key without a name: a tenant of its own
    acme sk-91b2...       a key of the tenant "acme", which may have several; also as acme:sk-91b2...
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdq.errors import ConfigError

log = logging.getLogger(__name__)

_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True, slots=True)
class _Owner:
    digest: bytes
    tenant: str


class ApiKeys:
    """The keys of one gateway. Raises ConfigError if `file` cannot be read or is not a list of keys.

    key: one key, or None. file: path of a file of keys, or None. With neither the server is open.
    """

    def __init__(self, key: str | None = None, file: str | None = None) -> None:
        self._key = key
        self._file = None if file is None else Path(file)
        self._blind = secrets.token_bytes(32)
        self._seen: tuple[int, ...] | None = None  # of the file as it was read last, whole or broken
        self._owners: dict[bytes, _Owner] = {}
        self._load()

    @property
    def required(self) -> bool:
        return self._key is not None or self._file is not None

    @property
    def from_file(self) -> bool:
        """Is there a file that may change?"""
        return self._file is not None

    def tenant(self, given: str) -> str | None:
        """Whose key `given` is; None if it is nobody's.

        The time taken says nothing about the keys: what is looked up and compared is a digest under a secret of this
        process, so nobody can choose one that comes close to another.
        """
        digest = self._digest(given)
        owner = self._owners.get(digest, _NOBODY)
        return owner.tenant if hmac.compare_digest(owner.digest, digest) else None

    def forget(self) -> None:
        """Let the next `refresh` read the file whether or not it looks changed."""
        self._seen = None

    def refresh(self) -> None:
        """Read the file again if it has changed. A broken or missing one is logged, and the keys stay. Blocks."""
        if self._file is None or _signature(self._file) == self._seen:
            return
        try:
            self._load()
        except ConfigError as e:
            log.error("%s; the keys read before stay valid", e.message)
        else:
            log.info("api_keys_file: read again, %d keys", len(self._owners))

    def _load(self) -> None:
        named = dict(self._read())
        if self._key is not None:
            named.setdefault(self._key, _own_tenant(self._key))
        digests = {self._digest(key): tenant for key, tenant in named.items()}
        self._owners = {digest: _Owner(digest, tenant) for digest, tenant in digests.items()}

    def _read(self) -> dict[str, str]:
        if self._file is None:
            return {}
        self._seen = _signature(self._file)  # before it is read: what changes meanwhile is read the next time
        return read(self._file)

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._blind, key.encode("utf-8", "surrogatepass"), "sha256")


_NOBODY = _Owner(bytes(32), "")


def read(file: Path) -> dict[str, str]:
    """Keys and their tenants. Raises ConfigError, which may name a line but quotes nothing of it."""
    try:
        return _parse(file.read_bytes())
    except OSError as e:
        raise ConfigError(f"api_keys_file: {file}: {e.strerror}") from e
    except ConfigError as e:
        raise ConfigError(f"api_keys_file: {file}: {e.message}") from None


def any_key(key: str | None, file: str | None) -> str | None:
    """One key that an `ApiKeys` of the same arguments takes, None if it is open. Raises ConfigError."""
    return key if key is not None or file is None else next(iter(read(Path(file))))


def is_key(text: str) -> bool:
    """Can `text` be sent in a header as it is?"""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _signature(file: Path) -> tuple[int, ...]:
    """Differs between two states of a file; () while it cannot be looked at."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)  # ctime: who may read it counts too


def _parse(data: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, tenant, key in _entries(data):
        if found.setdefault(key, tenant) != tenant:
            raise ConfigError(f"line {number}: a key of two tenants")
    if not found:
        raise ConfigError("holds no keys")
    return found


def _entries(data: bytes) -> Iterator[tuple[int, str, str]]:
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise ConfigError("is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        if len(words) == 1 and ":" in words[0]:
            words = words[0].split(":", 1)
        key = words[-1]
        if len(words) > 2 or not words[0] or not is_key(key):
            raise ConfigError(f"line {number}: a key, or a tenant and a key, is wanted")
        yield number, words[0] if len(words) == 2 else _own_tenant(key), key


def _own_tenant(key: str) -> str:
    """A name for the tenant of a key without one: the same for every gateway that has the key."""
    return "key:" + hashlib.sha256(b"pdq-api-key" + key.encode()).hexdigest()
