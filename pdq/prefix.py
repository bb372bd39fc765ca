"""Token ids to chained block hashes: the names under which KV blocks are shared. Pure; no Redis, no torch.

    root    = SHA-256("pdq-kv", wire version, fingerprint, block size, tenant salt, adapter)
    block i = SHA-256(block i-1 or root, its token ids as little-endian u32)

Every field of the root is length-prefixed, so that no two roots have the same bytes. Only full blocks are shared; the
tail's hash names its content in the same way but with its own tag, so it can never be taken for a block.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache

WIRE_VERSION = 1


def salt(tenant: str, own: str = "") -> str:
    """The salt of a tenant's chains, narrowed by one of the request's `own`; 64 hex digits that show neither.

    "" for neither: prefixes that anybody may share who names no tenant.
    """
    if not tenant and not own:
        return ""
    return _digest(b"pdq-tenant", tenant.encode(), own.encode()).hex()


@lru_cache(maxsize=1024)  # each request of a tenant begins with the same
def root(fingerprint: bytes, block_size: int, salt: str = "", adapter: str = "") -> bytes:
    """The start of a chain (32 bytes). salt: of the tenant; adapter: id of its weights' content."""
    sizes = struct.pack("<II", WIRE_VERSION, block_size)
    return _digest(b"pdq-kv", sizes, fingerprint, salt.encode(), adapter.encode())


def _digest(tag: bytes, *parts: bytes) -> bytes:
    digest = hashlib.sha256(tag)
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def chain(start: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes (32 bytes each) of the full blocks of `token_ids`; tokens after the last full block are left out."""
    data = memoryview(token_bytes(token_ids))
    step = 4 * block_size
    hashes, parent = [], start
    for at in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(parent + data[at : at + step]).digest()
        hashes.append(parent)
    return hashes


def tail_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a partial block after `parent` (the last full block's hash, or the root)."""
    return hashlib.sha256(b"pdq-tail" + parent + token_bytes(token_ids)).digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError for ids outside [0, 2**32)."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
