"""Every Redis key pdq uses, and who ends its life. No key is spelled anywhere else.

    {pdq:P}:prefill:<lane>    stream  request ids waiting for or in prefill   entry deleted with its ack
    {pdq:P}:decode            stream  request ids waiting for or in decode    entry deleted with its ack
    {pdq:P}:req:<id>          hash    one request                             TTL from the terminal event on
    {pdq:P}:out:<id>          stream  its reply events                        TTL from the terminal event on
    {pdq:P}:load              hash    sums over all requests (see lua/common)  one per pool
    {pdq:P}:dead              stream  dead letters                            trimmed to DEAD_LETTERS
    {pdq:P}:cancels           stream  ids of cancelled requests (lua/cancel)  trimmed to CANCELS
    {pdq:P}:workers           zset    worker name -> last heartbeat, ms       stale members removed by heartbeats
    {pdq:P}:worker:<name>     string  WorkerInfo                              TTL, renewed by heartbeats
    {pdq:P}:took:<name>       string  what a worker has read last (lua/claim)  TTL
    {pdq:P}:wake:<reader>     stream  wakes one reply reader                  one entry, TTL
    pdq:kv:<fp>:<hash>        string  one KV block                            TTL, renewed by use
    pdq:kv:<fp>:index         zset    block hash -> last use, ms              TTL, renewed by use
    pdq:kv:<fp>:epoch         string  rises when the blocks are cleared         TTL of 30 days
    pdq:tail:<id>:<attempt>   string  partial last block of a handoff         TTL, deleted after the terminal event

Control keys share one hash tag, so that scripts may touch several of them on a cluster; blocks carry no tag, so that a
cluster spreads them. While a request lives none of its control keys has a TTL, so no `volatile-*` policy evicts them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GROUP = "pdq"
DEAD_LETTERS = 1000
CANCELS = 1000


@dataclass(frozen=True, slots=True)
class Keys:
    """The control keys of one pool."""

    pool: str

    @property
    def _tag(self) -> str:
        return "{pdq:" + self.pool + "}"

    @property
    def home(self) -> str:
        """A key, never written, in the slot of all the others."""
        return self._tag

    def prefill(self, lane: str) -> str:
        return f"{self._tag}:prefill:{lane}"

    @property
    def decode(self) -> str:
        return f"{self._tag}:decode"

    def request(self, request_id: str) -> str:
        return f"{self._tag}:req:{request_id}"

    def out(self, request_id: str) -> str:
        return f"{self._tag}:out:{request_id}"

    @property
    def load(self) -> str:
        return f"{self._tag}:load"

    @property
    def dead(self) -> str:
        return f"{self._tag}:dead"

    @property
    def cancels(self) -> str:
        return f"{self._tag}:cancels"

    @property
    def workers(self) -> str:
        return f"{self._tag}:workers"

    def worker(self, name: str) -> str:
        return f"{self._tag}:worker:{name}"

    def took(self, name: str) -> str:
        return f"{self._tag}:took:{name}"

    def wake(self, reader: str) -> str:
        return f"{self._tag}:wake:{reader}"


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The KV keys of one model fingerprint."""

    fingerprint: bytes

    def block(self, block_hash: bytes) -> str:
        return f"pdq:kv:{self.fingerprint[:8].hex()}:{block_hash.hex()}"

    @property
    def index(self) -> str:
        return f"pdq:kv:{self.fingerprint[:8].hex()}:index"

    @property
    def epoch(self) -> str:
        return f"pdq:kv:{self.fingerprint[:8].hex()}:epoch"


def kv_pattern(model: str) -> str:
    """For SCAN: the KV keys of a fingerprint's first 16 hex digits, "*" for all."""
    return f"pdq:kv:{model}:*"


def model_of(key: bytes) -> str | None:
    """The first 16 hex digits of the fingerprint to which a KV block belongs; None for any other key."""
    found = re.fullmatch(rb"pdq:kv:([0-9a-f]{16}):[0-9a-f]{64}", key)
    return found[1].decode() if found else None


def tail_pattern() -> str:
    """For SCAN: the tails of all handoffs."""
    return "pdq:tail:*"


def tail(request_id: str, attempt: int) -> str:
    return f"pdq:tail:{request_id}:{attempt}"
