"""What a decode step costs beside the memory it must read: `python -m tests.engine.speed [--threads N]`.

Of the built-in model, at 1,024 tokens of context, with the compiled attention kernel and without it. The variants and a
plain read of memory take turns in one process, and the fastest of each counts, since other programs may run beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pdq.engine.attention import Attending
from pdq.engine.base import Segment, Slot
from pdq.engine.model import load_config, load_model
from pdq.engine.runner import TorchEngine
from pdq.messages import SamplingParams
from pdq.models import BUILT_IN, find_model

CONTEXT, BATCHES, ROUNDS = 1024, (1, 4, 16), 15
STREAM_BYTES = 1 << 29  # far more than any cache
GREEDY = SamplingParams(temperature=0.0)


class Timed:
    """The engine's forward of the model; `seconds` is how long the last one took."""

    def __init__(self, engine: TorchEngine) -> None:
        self._forward = engine._forward
        self.seconds = 0.0

    def __call__(self, cache: Attending, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        began = time.perf_counter()
        logits = self._forward(cache, ids, positions, keep)
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


def measure(engine: TorchEngine, slots: list[Slot], memory: Tensor) -> dict[str, float]:
    """Seconds, least of all rounds: of a step without and with the kernel, of its part outside the model, of a read."""
    timed = Timed(engine)
    engine._forward = timed  # type: ignore[assignment]
    least: dict[str, float] = {}

    def step() -> None:
        for slot in slots:
            slot.length = CONTEXT
        engine.forward([Segment(slot, [5], GREEDY) for slot in slots])

    for round_ in range(ROUNDS + 2):
        found = {}
        for name, compiled in (("without", False), ("step", True)):
            engine._compiled = compiled
            found[name] = seconds(step)
        found["outside"] = found["step"] - timed.seconds
        found["read"] = seconds(memory.sum)
        if round_ >= 2:
            least = {name: min(took, least.get(name, took)) for name, took in found.items()}
    engine._forward = timed._forward
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default=BUILT_IN)
    options = parser.parse_args()
    engine = TorchEngine(
        load_model(find_model(options.model).folder, dtype="bfloat16", device="cpu"),
        fingerprint=bytes(32),
        dtype="bfloat16",
        max_model_len=2 * CONTEXT,
        eos_ids=frozenset(),
        kv_memory_bytes=1 << 34,
        threads=options.threads,
    )
    memory, weights = torch.ones(STREAM_BYTES // 4), weight_bytes(options.model)
    slots = filled(engine, max(BATCHES))
    print(f"{options.model}, {options.threads} threads, {CONTEXT} tokens of context, compiled: {engine._compiled}")
    for batch in BATCHES:
        least = measure(engine, slots[:batch], memory)
        speed = STREAM_BYTES / least["read"]
        read = weights + batch * CONTEXT * engine.spec.token_bytes
        print(
            f"B={batch:2}: {least['step'] * 1e3:.1f} ms a step ({least['without'] * 1e3:.1f} without the kernel), "
            f"of which outside the model {least['outside'] / least['step']:.1%}; reads {read / 1e6:.0f} MB, "
            f"{read / speed / least['step']:.0%} of the {speed / 1e9:.0f} GB/s of a plain read"
        )


if __name__ == "__main__":
    main()
