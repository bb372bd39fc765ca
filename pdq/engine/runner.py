"""The torch implementation of `engine.base.Engine`: one forward for prefill chunks, decode steps and mixes of both.

Owns the order of rows, the KV budget and the slots' lengths. The stock modelling code computes (`forward`), or for
usual models on a CPU compiled code that was compared with it (`fused`); `choice.choose` picks the tokens. Knows nothing
of requests, Redis or blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pdq.engine import drafted
from pdq.engine.base import EngineSpec, NoRoom, Segment, Slot
from pdq.engine.choice import choose
from pdq.engine.forwards import select_forward
from pdq.engine.fused import FusedForward
from pdq.engine.kv import TorchSlot
from pdq.engine.probe import layout_of
from pdq.errors import ModelUnsupported
from pdq.messages import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CAPACITY_STEP = 64  # tokens; slots of few different sizes let the allocator reuse memory


class TorchEngine:
    """See `engine.base.Engine`.

    model: as `model.load_model` makes it; its attention implementation is switched to ours, so it cannot be used for
    anything else. fingerprint: 32 bytes. dtype: of the model, by name. kv_memory_bytes: for all slots at full capacity.
    threads: compute threads, applied to whichever thread calls `forward`; None leaves torch's setting alone. compiled:
    may code be made for this CPU?
    Raises ModelUnsupported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fingerprint: bytes,
        dtype: str,
        max_model_len: int,
        eos_ids: frozenset[int],
        kv_memory_bytes: int,
        threads: int | None = None,
        compiled: bool = True,
    ) -> None:
        if model.dtype != getattr(torch, dtype):
            raise ValueError(f"the model computes in {model.dtype}, not {dtype}")
        probed = layout_of(model)
        if probed.max_positions is not None and max_model_len > probed.max_positions:
            raise ModelUnsupported(
                f"{type(model).__name__}: its rotary embedding changes for all positions once a text is longer than "
                f"{probed.max_positions} tokens, which breaks stored KV; set max_model_len to at most that"
            )
        self._layout = probed.layout
        self._device = model.device
        self._threads = threads
        self.more_threads = 0
        self._set_threads()
        selected = select_forward(model, probed, compiled)
        self._forward = selected.forward
        self._free = kv_memory_bytes
        self._lock = threading.Lock()
        self.spec = EngineSpec(
            fingerprint=fingerprint,
            dtype=dtype,
            layout=self._layout.text,
            token_bytes=self._layout.token_bytes,
            vocab_size=model.config.get_text_config().vocab_size,
            eos_ids=eos_ids,
            max_model_len=max_model_len,
            numerics=selected.numerics,
        )
        self._warm()

    def open(self, capacity: int) -> Slot:
        size = self._rounded(capacity)
        if not 1 <= capacity <= self.spec.max_model_len:
            raise ValueError(f"a slot for {capacity} tokens, of a model for 1 to {self.spec.max_model_len}")
        with self._lock:
            if size * self.spec.token_bytes > self._free:
                raise NoRoom(f"{size} tokens of {self.spec.token_bytes} bytes do not fit in {self._free} bytes")
            self._free -= size * self.spec.token_bytes
        try:
            return TorchSlot(self._layout, size, self._device)
        except RuntimeError as e:  # torch's way to say that there is no memory, host or device
            self._give_back(size)
            raise NoRoom(str(e)) from e

    def close(self, slot: Slot) -> None:
        mine = _own(slot)
        with self._lock:
            was_open = mine.release()
        if was_open:
            self._give_back(mine.capacity)

    def can_open(self, capacity: int) -> bool:
        with self._lock:
            return (
                1 <= capacity <= self.spec.max_model_len
                and self._rounded(capacity) * self.spec.token_bytes <= self._free
            )

    @torch.inference_mode()
    def export(self, slot: Slot, start: int, stop: int, size: int, headroom: int) -> list[memoryview]:
        return _own(slot).export(start, stop, size, headroom)

    @torch.inference_mode()
    def load(self, slot: Slot, start: int, runs: Sequence[tuple[int, memoryview]]) -> None:
        _own(slot).load(start, runs)

    def forward(self, segments: Sequence[Segment]) -> list[int | None]:
        """See `engine.base.Engine.forward`.

        None where a token was wanted means that the logits of this segment were not numbers: the caller must fail
        that sequence; its neighbours' tokens are right.
        """
        out: list[int | None] = [None] * len(segments)
        wanted = [i for i, s in enumerate(segments) if s.sample is not None]
        with torch.inference_mode():
            logits = self._compute(segments)
            tokens = choose(logits, [segments[i] for i in wanted], self.spec.eos_ids) if wanted else []
        for i, token in zip(wanted, tokens, strict=True):
            out[i] = token
            if segments[i].drafts:
                _own(segments[i].slot).forget(drafted.dropped(segments[i], token))
        return out

    @torch.inference_mode()
    def logits(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Like `forward`, but float32 logits `[n, vocab]` of the segments that want a sample, in order.

        n: one a segment and one for each of its drafts, all of which are taken to be right.
        """
        return self._compute(segments).float()

    def _compute(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Run the model over all segments, advance their slots; logits `[n, vocab]` where a sample is wanted."""
        slots = self._checked(segments)
        self._set_threads()
        pieces = [self._pieces(slot, segment) for slot, segment in zip(slots, segments, strict=True)]
        # Single tokens first: forwards take them as one group.
        order = sorted(range(len(segments)), key=lambda i: pieces[i][0][1] > 1)
        ids: list[int] = []
        positions: list[int] = []
        last_row = [0] * len(segments)
        for i in order:
            tokens = segments[i].token_ids
            ids += tokens
            positions += range(slots[i].length, slots[i].length + len(tokens))
            last_row[i] = len(ids) - 1
        keep = [
            row
            for i, s in enumerate(segments)
            if s.sample is not None
            for row in range(last_row[i] - s.drafts, last_row[i] + 1)
        ]
        ordered = [piece for i in order for piece in pieces[i]]
        logits = self._forward(ordered, self._indices(ids), self._indices(positions), self._indices(keep))
        for slot, segment in zip(slots, segments, strict=True):
            slot.length += len(segment.token_ids)
        return logits

    def _pieces(self, slot: TorchSlot, segment: Segment) -> list[tuple[TorchSlot, int]]:
        """What the forward takes as pieces: drafts as single tokens, where those are computed as they would be alone.

        The compiled forward gives the same bits then with drafts as without, in any dtype, and reads a slot no longer
        than a chunk's attention does. Each layer writes the KV of all pieces before any of them attends.
        """
        count = len(segment.token_ids)
        if 0 < segment.drafts == count - 1 and isinstance(self._forward, FusedForward):
            return [(slot.ahead(i), 1) for i in range(count)]
        return [(slot, count)]

    def _warm(self) -> None:
        """What is compiled for the shapes of this model is so now, not while a first request waits."""
        with torch.inference_mode():
            for tokens in ([0], [0, 0]):
                self._compute([Segment(TorchSlot(self._layout, len(tokens), self._device), tokens, SamplingParams())])

    def _set_threads(self) -> None:
        """The number of threads is a setting of the calling thread."""
        if self._threads is not None and torch.get_num_threads() != self._threads + self.more_threads:
            torch.set_num_threads(self._threads + self.more_threads)

    def _indices(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self._device, non_blocking=True)

    def _give_back(self, capacity: int) -> None:
        with self._lock:
            self._free += capacity * self.spec.token_bytes

    def _rounded(self, capacity: int) -> int:
        return min(-(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP, self.spec.max_model_len)

    def _checked(self, segments: Sequence[Segment]) -> list[TorchSlot]:
        """The segments' slots. Raises ValueError, with nothing changed, for segments that cannot be computed."""
        slots = [_own(s.slot) for s in segments]
        if not segments or len({id(slot) for slot in slots}) != len(slots):
            raise ValueError("a forward takes at least one segment, and each slot once")
        for slot, segment in zip(slots, segments, strict=True):
            drafted.check(segment)
            tokens = segment.token_ids
            if not tokens or slot.length + len(tokens) > slot.capacity:
                raise ValueError(f"{len(tokens)} tokens for a slot that holds {slot.length} of {slot.capacity}")
            if min(tokens) < 0 or max(tokens) >= self.spec.vocab_size:
                raise ValueError(f"token ids must be in [0, {self.spec.vocab_size})")
        return slots


def _own(slot: Slot) -> TorchSlot:
    if not isinstance(slot, TorchSlot):
        raise TypeError(f"{type(slot).__name__} is not a slot of this engine")
    return slot
