"""How much --quantization and --kv-codec change what a model says: `python -m tests.engine.agreement --model MODEL`.

The same fixed text goes through the model in float32, as --dtype says, and quantized. At each of its positions the
most likely next token is compared, and the distance of the distributions (Kullback-Leibler, in nats); then how long
greedy continuations of the text's sentences stay the same. For --kv-codec int8 the KV of the first part of the text
goes through that form, and the rest is read after it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from pdq.engine.base import Segment
from pdq.engine.model import load_model
from pdq.engine.runner import TorchEngine
from pdq.kv_form import form
from pdq.messages import SamplingParams
from pdq.models import find_model, load_tokenizer

BLOCK = 32
GREEDY = SamplingParams(temperature=0.0)
FIRST = 8  # positions before this one have seen too little text to say much
CONTINUED = 24  # tokens
TEXT = """The bridge over the river was built in 1874, when the railway reached the town. Before that, people crossed by
ferry, and in winter, when the ice was too thin to walk on and too thick for a boat, they did not cross at all. The
engineer who drew the plans had never seen the place; he worked from a map and from the letters of a schoolteacher, who
measured the depth of the water with a stone on a rope. In her last letter she wrote that the bottom was sand on the
left bank and clay on the right, and that he should trust neither. He made the piers twice as deep as the rules of the
time asked for. In 1923 a flood took the mill, the ferry house and eleven cattle, and the bridge stood. Today it carries
about 9,000 cars a day. To compute the load of one pier, divide the weight of the deck by the number of piers and add
the weight of the pier itself: for a deck of 1,200 tons on 6 piers of 80 tons each, that is 280 tons."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute, with what it found: float32 log probabilities `[positions, vocab]`, and continuations."""

    name: str
    logprobs: torch.Tensor
    continued: list[list[int]]


def computed(folder: Path, dtype: str, quantization: str, ids: list[int]) -> Variant:
    engine = TorchEngine(
        load_model(folder, dtype=dtype, device="cpu", quantization=quantization),
        fingerprint=bytes(32),
        dtype=dtype,
        max_model_len=2 * len(ids) + CONTINUED,
        eos_ids=frozenset(),
        kv_memory_bytes=1 << 32,
        threads=torch.get_num_threads(),
    )
    slot = engine.open(len(ids))
    logits = torch.cat([engine.logits([Segment(slot, [token], GREEDY)]) for token in ids])
    engine.close(slot)
    starts = range(len(ids) // 8, len(ids), len(ids) // 8)
    name = dtype if quantization == "none" else f"{quantization} in {dtype}"
    return Variant(name, logits[FIRST:].log_softmax(-1), [continuation(engine, ids[:stop]) for stop in starts])


def continuation(engine: TorchEngine, ids: list[int]) -> list[int]:
    slot = engine.open(len(ids) + CONTINUED)
    feed, found = ids, []
    for _ in range(CONTINUED):
        (token,) = engine.forward([Segment(slot, feed, GREEDY)])
        if token is None:
            raise RuntimeError("the model's logits are not numbers")
        found.append(token)
        feed = [token]
    engine.close(slot)
    return found


def after_stored(folder: Path, dtype: str, codec: str, ids: list[int]) -> tuple[torch.Tensor, int]:
    """Float32 log probabilities after each token behind the first half, whose KV was stored; bytes of that KV."""
    engine = TorchEngine(
        load_model(folder, dtype=dtype, device="cpu"), fingerprint=bytes(32), dtype=dtype, max_model_len=2 * len(ids),
        eos_ids=frozenset(), kv_memory_bytes=1 << 32, threads=torch.get_num_threads(),
    )  # fmt: skip
    spec, stored = engine.spec, len(ids) // 2 // BLOCK * BLOCK
    wire = form(codec, dtype, spec.layout, spec.token_bytes)
    first, slot = engine.open(len(ids)), engine.open(len(ids))
    engine.forward([Segment(first, ids[:stored])])
    packed = [wire.pack(run, 0) for run in engine.export(first, 0, stored, BLOCK, 0)]
    engine.load(slot, 0, [(BLOCK, wire.unpack(run)) for run in packed])
    logits = torch.cat([engine.logits([Segment(slot, [token], GREEDY)]) for token in ids[stored:]])
    return logits.log_softmax(-1), sum(len(run) for run in packed)


def compared_kv(folder: Path, dtype: str, codec: str, ids: list[int]) -> str:
    (raw, whole), (coded, size) = (after_stored(folder, dtype, form_, ids) for form_ in ("raw", codec))
    same = float((raw.argmax(-1) == coded.argmax(-1)).float().mean())
    distance = float((raw.exp() * (raw - coded)).sum(-1).mean())
    return f"KV as {codec} against raw: {size / whole:.0%} of the bytes  same token {same:6.1%}  KL mean {distance:.4f}"


def compared(exact: Variant, other: Variant) -> str:
    same = float((exact.logprobs.argmax(-1) == other.logprobs.argmax(-1)).float().mean())
    distances = (exact.logprobs.exp() * (exact.logprobs - other.logprobs)).sum(-1)
    common = [equal(a, b) for a, b in zip(exact.continued, other.continued, strict=True)]
    return (
        f"{other.name:16} against {exact.name:8}  same token {same:6.1%}  KL mean {float(distances.mean()):.4f}, worst "
        f"{float(distances.max()):.3f}  continuations equal for {sum(common) / len(common):.1f} tokens of {CONTINUED}"
    )


def equal(ours: list[int], theirs: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = find_model(options.model).folder
    ids = load_tokenizer("torch", folder).encode(TEXT)
    print(f"{len(ids) - FIRST} positions")
    exact = computed(folder, "float32", "none", ids)
    plain = computed(folder, options.dtype, "none", ids)
    small = computed(folder, options.dtype, "int8", ids)
    for first, second in ((exact, plain), (exact, small), (plain, small)):
        print(compared(first, second))
    print(compared_kv(folder, options.dtype, "int8", ids))


if __name__ == "__main__":
    main()
