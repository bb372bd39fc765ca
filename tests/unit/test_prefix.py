"""The hash chain: golden vectors, and what must change a hash."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest

from pdq import prefix

FINGERPRINT = bytes(range(32))
BLOCKS = [
    "63365b9944cac69cdacb3854febb6dc840a9e53ae88e9e9f38b273a01b7e5639",
    "86f1eced0ae8178c3758cc17d276d1b9c1ceaa3bb37758ad202995811118a30c",
]
TAIL = "8f1b4545a96c7973670a76de36532d674f16c59749e52a04f27c1aaaf15ce1aa"


def test_the_chain_has_its_golden_values_in_every_process() -> None:
    code = (
        "from pdq import prefix; r = prefix.root(bytes(range(32)), 4, 'tenant', 'adapter');"
        "print([h.hex() for h in prefix.chain(r, range(9), 4)], prefix.tail_hash(r, [1, 2]).hex())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert found == {f"{BLOCKS} {TAIL}"}


def test_a_block_hash_is_what_the_docstring_says() -> None:
    start = prefix.root(FINGERPRINT, 2)
    first = hashlib.sha256(start + b"\x05\x00\x00\x00\xff\xff\xff\xff").digest()
    assert prefix.chain(start, [5, 2**32 - 1, 7], 2) == [first]
    assert prefix.chain(start, [5], 2) == []


def test_a_salt_is_of_the_tenant_first_and_shows_nothing() -> None:
    assert prefix.salt("") == prefix.salt("", "") == ""
    pairs = [("acme", ""), ("", "acme"), ("acme", "a"), ("a", "acme"), ("acmea", ""), ("bolt", "a"), ("acm", "ea")]
    salts = [prefix.salt(*pair) for pair in pairs]
    assert len(set(salts)) == len(pairs)
    assert all(len(s) == 64 and set(s) <= set("0123456789abcdef") for s in salts)
    length = struct.Struct("<Q").pack
    assert prefix.salt("t", "own") == hashlib.sha256(b"pdq-tenant" + length(1) + b"t" + length(3) + b"own").hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        prefix.root(bytes(32), 4, "t", "a"),
        prefix.root(FINGERPRINT, 8, "t", "a"),
        prefix.root(FINGERPRINT, 4, "u", "a"),
        prefix.root(FINGERPRINT, 4, "t", "b"),
        prefix.root(FINGERPRINT, 4, "ta", ""),
        prefix.root(FINGERPRINT, 4, "", "ta"),
    ],
)
def test_every_part_of_the_root_counts(other: bytes) -> None:
    assert other != prefix.root(FINGERPRINT, 4, "t", "a")


def test_a_tail_is_never_a_block() -> None:
    start = prefix.root(FINGERPRINT, 2)
    assert prefix.tail_hash(start, [1, 2]) != prefix.chain(start, [1, 2], 2)[0]


def test_ids_that_are_no_u32_are_refused() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            prefix.chain(bytes(32), [bad], 1)
