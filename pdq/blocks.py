"""The KV value: a fixed header before raw bytes, and the only way to look inside one.

    0  magic "PDQK"    4  version u16    6  dtype u16     8  first token u32   12  end token u32
    16 payload bytes u64   24 xxh3-64 of the payload u64  32 fingerprint 32    64  block hash 32
    96 layout digest 16    112 zeros to 128, then the payload `[layer][k|v][kv_head][token][dim]`

Values in Redis are not trusted: `open` compares every field with what the reader expects and raises `KVMiss` with a
reason for anything else. A miss costs a recomputation; it is never an error and never wrong text. No torch here.
"""

from __future__ import annotations

import hashlib
import struct

import xxhash

MAGIC = b"PDQK"
VERSION = 1
HEADER_BYTES = 128
_HEADER = struct.Struct("<4sHHIIQQ32s32s16s16x")
_DTYPES = {"bfloat16": 1, "float16": 2, "float32": 3, "int8": 4}


class KVMiss(Exception):
    """A KV value is absent or is not what it should be; `reason` is one word for counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BlockCodec:
    """Writes and checks headers for one model (see engine.base.EngineSpec for the arguments).

    dtype and token_bytes are those of the values in Redis (kv_form.py); fixed_bytes: of a payload of any length.
    """

    def __init__(self, fingerprint: bytes, dtype: str, layout: str, token_bytes: int, fixed_bytes: int = 0) -> None:
        self.fingerprint = fingerprint
        self._token_bytes = token_bytes
        self._fixed_bytes = fixed_bytes
        self._dtype = _DTYPES[dtype]
        self._layout = hashlib.sha256(layout.encode()).digest()[:16]

    def payload_bytes(self, tokens: int) -> int:
        return self._fixed_bytes + tokens * self._token_bytes

    def seal(self, value: memoryview, block_hash: bytes, start: int, stop: int) -> None:
        """Write the header of tokens [start, stop) into the first HEADER_BYTES of `value`, before its payload."""
        payload = value[HEADER_BYTES:]
        if len(payload) != self.payload_bytes(stop - start):
            raise ValueError(f"{len(payload)} bytes are not {stop - start} tokens of {self._token_bytes} bytes")
        checksum = xxhash.xxh3_64_intdigest(payload)
        value[:HEADER_BYTES] = self._header(block_hash, start, stop, len(payload), checksum)

    def open(self, value: bytes | memoryview | None, block_hash: bytes, start: int, stop: int) -> memoryview:
        """The checked payload of tokens [start, stop). Raises KVMiss."""
        if value is None:
            raise KVMiss("absent")
        if len(value) < HEADER_BYTES:
            raise KVMiss("truncated")
        magic, version, dtype, first, end, length, checksum, fingerprint, found, layout = _HEADER.unpack_from(value)
        payload = memoryview(value)[HEADER_BYTES:]
        wanted = {
            "magic": magic == MAGIC,
            "version": version == VERSION,
            "fingerprint": fingerprint == self.fingerprint,
            "layout": layout == self._layout,
            "dtype": dtype == self._dtype,
            "hash": found == block_hash,
            "range": (first, end) == (start, stop),
            "length": length == len(payload) == self.payload_bytes(stop - start),
        }
        for reason, good in wanted.items():
            if not good:
                raise KVMiss(reason)
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            raise KVMiss("checksum")
        return payload

    def _header(self, block_hash: bytes, start: int, stop: int, length: int, checksum: int) -> bytes:
        return _HEADER.pack(
            *(MAGIC, VERSION, self._dtype, start, stop, length, checksum, self.fingerprint, block_hash, self._layout)
        )
