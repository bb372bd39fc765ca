"""The KV value: only exactly the right bytes open; anything else is a typed miss."""

from __future__ import annotations

import pickle
import random

import pytest

from pdq.blocks import HEADER_BYTES, BlockCodec, KVMiss

HASH, OTHER = bytes([1] * 32), bytes([2] * 32)
CODEC = BlockCodec(bytes([9] * 32), "bfloat16", "2x1x4+4", 32)


def sealed(codec: BlockCodec = CODEC, start: int = 4, stop: int = 8) -> bytes:
    value = memoryview(bytearray(HEADER_BYTES) + random.Random(1).randbytes(codec.payload_bytes(stop - start)))
    codec.seal(value, HASH, start, stop)
    return bytes(value)


def reason(
    value: bytes | None, codec: BlockCodec = CODEC, block_hash: bytes = HASH, start: int = 4, stop: int = 8
) -> str:
    with pytest.raises(KVMiss) as miss:
        codec.open(value, block_hash, start, stop)
    return miss.value.reason


def test_what_was_sealed_opens_to_the_same_bytes() -> None:
    value = sealed()
    assert CODEC.open(value, HASH, 4, 8) == value[HEADER_BYTES:]


def test_the_format_has_not_changed() -> None:
    codec = BlockCodec(bytes(range(32)), "float16", "layout", 2)
    value = memoryview(bytearray(HEADER_BYTES) + b"abcd")
    codec.seal(value, HASH, 2, 4)
    assert bytes(value[:32]).hex() == "5044514b01000200020000000400000004000000000000009098a8536fa99764"
    assert bytes(value[32:96]) == bytes(range(32)) + HASH
    assert bytes(value[112:128]) == bytes(16)


def test_each_mismatch_is_a_miss_with_its_reason() -> None:
    value = sealed()
    assert reason(None) == "absent"
    assert reason(b"") == "truncated"
    assert reason(value[:100]) == "truncated"
    assert reason(value[:-1]) == "length"
    assert reason(value + b"x") == "length"
    assert reason(value, block_hash=OTHER) == "hash"
    assert reason(value, start=8, stop=12) == "range"
    assert reason(b"NOPE" + value[4:]) == "magic"
    assert reason(value[:4] + b"\x02\x00" + value[6:]) == "version"
    assert reason(sealed(BlockCodec(bytes(32), "bfloat16", "2x1x4+4", 32))) == "fingerprint"
    assert reason(sealed(BlockCodec(bytes([9] * 32), "bfloat16", "1x2x4+4", 32))) == "layout"
    assert reason(sealed(BlockCodec(bytes([9] * 32), "float16", "2x1x4+4", 32))) == "dtype"
    assert reason(value[:-1] + bytes([value[-1] ^ 1])) == "checksum"


def test_a_claimed_huge_payload_allocates_nothing() -> None:
    value = bytearray(sealed())
    value[16:24] = (2**63).to_bytes(8, "little")
    assert reason(bytes(value)) == "length"


def test_a_pickle_is_a_miss() -> None:
    assert reason(pickle.dumps(list(range(1000)))) == "magic"


def test_no_flipped_bit_goes_unnoticed() -> None:
    value = sealed()
    padding = range(112 * 8, 128 * 8)
    for bit in range(len(value) * 8):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        if bit not in padding:
            assert reason(bytes(flipped))


def test_sealing_a_payload_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="are not 4 tokens"):
        CODEC.seal(memoryview(bytearray(HEADER_BYTES + 5)), HASH, 4, 8)
