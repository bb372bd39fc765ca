"""What a decode step costs beside the memory it must read: `python -m tests.engine.speed [--threads N]`.

Of the built-in model, at 1,024 tokens of context, by compiled code as a whole and by the stock modelling code with our
attention and products; and the same of a prefill forward of 1,024 tokens. The variants and a plain read of memory take
turns in one process, and the fastest of each counts, since other programs may run beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pdq.engine import kernel_selection
from pdq.engine.base import Segment, Slot
from pdq.engine.forward import OverSlots, Pieces, StockForward
from pdq.engine.model import load_config, load_model
from pdq.engine.probe import layout_of
from pdq.engine.runner import TorchEngine
from pdq.messages import SamplingParams
from pdq.models import BUILT_IN, find_model

CONTEXT, BATCHES, ROUNDS = 1024, (1, 4, 16), 15
STREAM_BYTES = 1 << 29  # far more than any cache
GREEDY = SamplingParams(temperature=0.0)


class Timed:
    """A forward of the model; `seconds` is how long the last one took."""

    def __init__(self, forward: OverSlots) -> None:
        self._forward = forward
        self.seconds = 0.0

    def __call__(self, pieces: Pieces, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        began = time.perf_counter()
        logits = self._forward(pieces, ids, positions, keep)
        self.seconds = time.perf_counter() - began
        return logits


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def weight_bytes(name: str) -> int:
    """Of all weights that a step reads, in bfloat16: the table of embeddings only where it is the output head too."""
    config = load_config(find_model(name).folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    read = sum(p.numel() for p in model.parameters())
    return 2 * (read if config.tie_word_embeddings else read - model.get_input_embeddings().weight.numel())


def filled(engine: TorchEngine, count: int) -> list[Slot]:
    """Slots with CONTEXT tokens each."""
    ids = [100 + i * 37 % 40_000 for i in range(CONTEXT)]
    slots = [engine.open(CONTEXT + 64)]
    engine.forward([Segment(slots[0], ids)])
    (run,) = engine.export(slots[0], 0, CONTEXT, CONTEXT, 0)
    for _ in range(count - 1):
        slots.append(engine.open(CONTEXT + 64))
        engine.load(slots[-1], 0, [(CONTEXT, run)])
    return slots


def measure(engine: TorchEngine, forwards: dict[str, Timed], run: Callable[[], object]) -> dict[str, float]:
    """Seconds, least of all rounds, of `run` with each of the forwards, and of the part of the first one outside it."""
    least: dict[str, float] = {}
    for round_ in range(ROUNDS + 2):
        found = {}
        for name, timed in forwards.items():
            engine._forward = timed
            found[name] = seconds(run)
            found.setdefault("outside", found[name] - timed.seconds)
        if round_ >= 2:
            least = {name: min(took, least.get(name, took)) for name, took in found.items()}
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default=BUILT_IN)
    options = parser.parse_args()
    model = load_model(find_model(options.model).folder, dtype="bfloat16", device="cpu")
    engine = TorchEngine(
        model,
        fingerprint=bytes(32),
        dtype="bfloat16",
        max_model_len=2 * CONTEXT,
        eos_ids=frozenset(),
        kv_memory_bytes=1 << 34,
        threads=options.threads,
    )
    stock = StockForward(
        model, layout_of(model).layout.layers, layout_of(model).reads, kernel_selection.select(model.dtype)
    )
    forwards = {type(engine._forward).__name__: Timed(engine._forward), "its own code": Timed(stock)}
    memory, weights = torch.ones(STREAM_BYTES // 4), weight_bytes(options.model)
    slots = filled(engine, max(BATCHES))
    print(f"{options.model}, {options.threads} threads, {CONTEXT} tokens of context")
    for batch in BATCHES:
        least = measure(engine, forwards, partial(step, engine, slots[:batch]))
        speed = STREAM_BYTES / min(seconds(memory.sum) for _ in range(ROUNDS))
        read = weights + batch * CONTEXT * engine.spec.token_bytes
        ours = least[next(iter(forwards))]
        print(
            f"B={batch:2}: {_listed(least, forwards)} a step, {least['outside'] / ours:.1%} of it outside the model, "
            f"reading {read / 1e6:.0f} MB, {read / speed / ours:.0%} of the {speed / 1e9:.0f} GB/s of a plain read"
        )
    print(f"prefill: {_listed(measure(engine, forwards, partial(prefill, engine, slots[0])), forwards)}")


def step(engine: TorchEngine, slots: list[Slot]) -> None:
    for slot in slots:
        slot.length = CONTEXT
    engine.forward([Segment(slot, [5], GREEDY) for slot in slots])


def prefill(engine: TorchEngine, slot: Slot) -> None:
    slot.length = 0
    engine.forward([Segment(slot, [100 + i * 37 % 40_000 for i in range(CONTEXT)], GREEDY)])


def _listed(least: dict[str, float], forwards: dict[str, Timed]) -> str:
    return ", ".join(f"{least[name] * 1e3:.1f} ms ({name})" for name in forwards)


if __name__ == "__main__":
    main()
