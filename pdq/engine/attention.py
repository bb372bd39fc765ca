"""What replaces the cache and the attention of a stock model: one `Step` per forward over ragged pieces of slots.

The modelling code gets a `Step` as its cache. For every layer it calls `update`, which writes the new KV into the
slots, and then the registered attention function, which reads them in place: no copies, no padding, no repeated heads.
The function finds its step through a thread-local, since not every architecture passes extra arguments down; engines
in different threads do not meet. The modelling code makes no masks for an implementation whose name it does not know,
so causality and windows follow from positions and the layout alone, here.

Owns what each token may see. The arithmetic is in `kernels` and `products`, and for most models on CPUs in `compiled`
and, of several tokens of a sequence, in `compiled_chunk`; nothing here knows which model runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from pdq.engine import compiled_chunk, kernels, products
from pdq.engine.compiled import Batch
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.kv import LayerShape, TorchSlot

IMPLEMENTATION = "pdq"
_STOCK = KernelSet()
_running = threading.local()


class Attending(Protocol):
    """Whatever can stand behind the registered function during a forward: a `Step`, or the probe."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, module: nn.Module, **options: Any
    ) -> Tensor:
        """query `[1, heads, tokens, key_dim]` -> `[1, tokens, heads, value_dim]`."""
        ...


@contextmanager
def running(step: Attending) -> Iterator[None]:
    """Within the block attention calls of this thread go to `step`."""
    _running.step = step
    try:
        yield
    finally:
        del _running.step


def current() -> Attending:
    """Whose forward this thread is in. Raises RuntimeError outside `running`."""
    step: Attending | None = getattr(_running, "step", None)
    if step is None:
        raise RuntimeError("attention was called outside an engine's forward")
    return step


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The function registered with transformers under IMPLEMENTATION."""
    return current().attend(query, key, value, attention_mask, module=module, **options), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


@dataclass(frozen=True, slots=True)
class _Sight:
    """What layers of one shape see.

    planes: for each plane of a slot, one view per piece. seen: for each single-token piece None, or, where the view is
    padded for the kernel in `products`, how many of its tokens are there. spans: first and end position per piece.
    """

    planes: list[tuple[Tensor, ...]]
    seen: list[int | None]
    spans: list[tuple[int, int]]


class Lengthless:
    """What transformers asks of any cache, answered by one whose positions are always passed explicitly."""

    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """There is no length that all pieces share."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Asked for masks that the adapted architectures make and that nobody looks at."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """As `get_query_offset`."""
        return query_length, 0


class Step(Lengthless):
    """KV writes and attention of one forward.

    reads: which layer's KV each attention call sees, in the order of the calls; several may see the same. pieces:
    (slot, new tokens) in the order of the packed rows; all pieces of one token come first. The new tokens of a slot get
    the positions from `slot.length` on; the lengths are not changed here. kernel_set: used where they can be.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        reads: Sequence[int],
        pieces: Sequence[tuple[TorchSlot, int]],
        kernel_set: KernelSet = _STOCK,
    ) -> None:
        self._layers = layers
        self._reads = iter(reads)
        self._kernels = kernel_set
        self._counts = [n for _, n in pieces]
        self._singles = self._counts.count(1)
        self._chunks = [(slot.length, n) for slot, n in pieces[self._singles :]]
        self._pieces = pieces
        self._batch = (
            Batch([slot for slot, _ in pieces[: self._singles]]) if kernel_set.decode and self._singles else None
        )
        self._in_batch = 0 if self._batch is None else self._singles
        written = [slot.planes(slot.length, slot.length + n) for slot, n in pieces[self._in_batch :]]
        self._written = _by_plane(written)
        self._sights: dict[LayerShape, _Sight] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._biases: dict[tuple[int, kernels.Alibi], Tensor] = {}
        self._scratch = products.Scratch()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new KV, `[1, kv_heads, tokens, dim]` each, into the slots.

        Of a derived layer all visible KV is returned, piece after piece, for the model to make heads of.
        """
        n = self._in_batch
        if self._batch is not None:
            self._batch.write(layer_idx, key[:, :, :n], value[:, :, :n])
        if self._written:
            counts = self._counts[n:]
            torch._foreach_copy_(self._written[2 * layer_idx], torch.split(key[:, :, n:], counts, 2))
            torch._foreach_copy_(self._written[2 * layer_idx + 1], torch.split(value[:, :, n:], counts, 2))
        layer = self._layers[layer_idx]
        if not layer.derived:
            return key, value
        planes = self._sight(layer).planes
        return torch.cat(planes[2 * layer_idx], 2), torch.cat(planes[2 * layer_idx + 1], 2)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        module: nn.Module,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        alibi: kernels.Alibi | None = None,
        **options: Any,
    ) -> Tensor:
        """The next attention call; `key` and `value` are in the slots already, unless the layer is a derived one."""
        index = next(self._reads)
        layer = self._layers[index]
        scores = kernels.Scores(scaling, softcap, s_aux, alibi)
        n = self._singles
        outs = []
        if self._batch is not None and scores.plain and not layer.derived:
            found = self._batch.attend(index, layer, query[:, :, :n], scaling)
            outs += [] if found is None else [found]
        if self._chunks or not outs:
            keys, values = self._visible(index, key, value)
            spans = self._sight(layer).spans
        if n and not outs:
            biases = [self._bias(i, span, alibi) for i, span in enumerate(spans[:n])]
            seen = self._sight(layer).seen
            outs.append(kernels.decode(query[:, :, :n], keys[:n], values[:n], seen, scores, biases))
        if self._chunks:
            for i, part in enumerate(torch.split(query, self._counts, 2)[n:]):
                bias = self._bias(n + i, spans[n + i], alibi)
                outs.append(self._chunk(i, part, keys[n + i], values[n + i], layer, scores, bias))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _visible(self, index: int, key: Tensor, value: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """K and V that each piece sees of layer `index`; of a derived layer they are in `key` and `value`."""
        sight = self._sight(self._layers[index])
        if not self._layers[index].derived:
            return sight.planes[2 * index], sight.planes[2 * index + 1]
        lengths = [end - first for first, end in sight.spans]
        return torch.split(key, lengths, 2), torch.split(value, lengths, 2)

    def _chunk(
        self,
        i: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: LayerShape,
        scores: kernels.Scores,
        bias: Tensor | None,
    ) -> Tensor:
        (start, n), window = self._chunks[i], layer.window
        if self._kernels.prefill and scores.plain and not layer.derived:
            found = compiled_chunk.chunk(query, key, value, window=window, scaling=scores.scaling)
            if found is not None:
                return found
        if scores.plain and self._kernels.bmm.chunk(n, start + n):
            return products.chunk(
                query,
                key,
                value,
                self._mask(i, window, key),
                windowed=window is not None,
                scaling=scores.scaling,
                scratch=self._scratch,
            )
        if scores.plain and start == 0 and (window is None or n <= window):
            return kernels.prefill(query, key, value, None, scores)
        mask = self._mask(i, window, key)
        if bias is not None:
            mask = mask + bias[:, None].to(mask.dtype)
        return kernels.prefill(query, key, value, mask, scores)

    def _bias(self, i: int, span: tuple[int, int], alibi: kernels.Alibi | None) -> Tensor | None:
        """`[heads, visible]` for piece `i`, the same for all layers."""
        if alibi is None:
            return None
        if (i, alibi) not in self._biases:
            self._biases[i, alibi] = alibi.bias(*span)
        return self._biases[i, alibi]

    def _mask(self, i: int, window: int | None, key: Tensor) -> Tensor:
        """Additive mask `[new tokens, visible tokens]` of chunk `i`, the same for all layers with this window."""
        if (i, window) not in self._masks:
            self._masks[i, window] = causal_mask(*self._chunks[i], window, key)
        return self._masks[i, window]

    def _sight(self, layer: LayerShape) -> _Sight:
        if layer not in self._sights:
            self._sights[layer] = self._look(layer)
        return self._sights[layer]

    def _look(self, layer: LayerShape) -> _Sight:
        planes: list[list[Tensor]] = []
        seen: list[int | None] = []
        spans = [(_first(slot.length, layer.window), slot.length + n) for slot, n in self._pieces]
        for (slot, n), (first, end) in zip(self._pieces, spans, strict=True):
            if n == 1 and not layer.derived and self._kernels.bmm.single(layer.heads, end - first, layer.key_dim):
                stop = min(slot.capacity, end + (first - end) % products.PADDING)
                slot.clear(end, stop)
                planes.append(slot.planes(first, stop))
                seen.append(end - first)
            else:
                planes.append(slot.planes(first, end))
                seen.append(None)
        return _Sight(_by_plane(planes), seen[: self._singles], spans)


def _by_plane(pieces: Sequence[list[Tensor]]) -> list[tuple[Tensor, ...]]:
    return list(zip(*pieces, strict=True))


def _first(start: int, window: int | None) -> int:
    """The oldest position that a token at `start` sees."""
    return 0 if window is None else max(0, start + 1 - window)


def causal_mask(start: int, n: int, window: int | None, like: Tensor) -> Tensor:
    """Additive mask for tokens at [start, start + n) over positions from the oldest visible one to start + n."""
    first = _first(start, window)
    seen = torch.ones((n, start + n - first), dtype=torch.bool, device=like.device).tril_(start - first)
    if window is not None:
        seen.triu_(start - first - window + 1)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
