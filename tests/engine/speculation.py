"""What guessing ahead brings and costs: `python -m tests.engine.speculation [--draft-tokens N] [--threads N]`.

One sequence of the built-in model, decoded with and without drafts in turns, the fastest round of each: a text whose
beginning comes again, a text that a user asks to repeat, a sampled story, and a text with every guess made wrong, which
is the most that guessing can cost. Then what a step takes with each number of drafts. The two answers must be equal;
where the forward is not compiled as a whole, up to the rounding of the dtype.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdq.drafts import Drafter
from pdq.engine.base import Segment, Slot
from pdq.engine.model import load_model
from pdq.engine.runner import TorchEngine
from pdq.messages import Message, SamplingParams
from pdq.models import BUILT_IN, find_model, load_tokenizer
from tests.engine.agreement import TEXT, equal

COUNT, CONTEXT, ROUNDS = 160, 2048, 5
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=1)
Guess = Callable[[int], list[int]]


@dataclass(frozen=True, slots=True)
class Round:
    """tokens: of one answer. seconds: for all but the first."""

    tokens: list[int]
    seconds: float
    steps: int
    drafted: int
    accepted: int

    @property
    def speed(self) -> float:
        return (len(self.tokens) - 1) / self.seconds


def answer(engine: TorchEngine, prompt: Sequence[int], params: SamplingParams, drafts: int, wrong: bool) -> Round:
    slot = engine.open(CONTEXT)
    text = [*prompt]
    text += known(engine.forward([Segment(slot, prompt, params)]))
    drafter, steps, drafted, accepted = Drafter(text, max(drafts, 1)), 0, 0, 0
    began = time.perf_counter()
    while len(text) < len(prompt) + COUNT:
        made = len(text) - len(prompt)
        guesses = drafter.propose(min(drafts, COUNT - made - 1))
        if wrong:
            guesses = [(g + 1) % engine.spec.vocab_size for g in guesses]
        further: list[int] = []
        segment = Segment(slot, [text[-1], *guesses], params, made, drafts=len(guesses), further=further)
        text += known(engine.forward([segment])) + further
        steps, drafted, accepted = steps + 1, drafted + len(guesses), accepted + len(further)
        if guesses:
            drafter.learn(len(further))
    seconds = time.perf_counter() - began
    engine.close(slot)
    return Round(text[len(prompt) :], seconds, steps, drafted, accepted)


def known(tokens: list[int | None]) -> list[int]:
    if None in tokens:
        raise RuntimeError("the model's logits are not numbers")
    return [token for token in tokens if token is not None]


def compared(engine: TorchEngine, prompt: Sequence[int], params: SamplingParams, drafts: int, wrong: bool) -> str:
    plain, guessed = [], []
    for _ in range(ROUNDS):
        plain.append(answer(engine, prompt, params, 0, wrong))
        guessed.append(answer(engine, prompt, params, drafts, wrong))
    before, after = (min(rounds, key=lambda r: r.seconds) for rounds in (plain, guessed))
    return (
        f"{before.speed:5.1f} tokens/s, with drafts {after.speed:5.1f} ({after.speed / before.speed:.2f} times), "
        f"{after.accepted} of {after.drafted} drafts right, {after.steps} steps for {COUNT - 1} tokens, "
        f"equal for {equal(before.tokens, after.tokens)} of {COUNT}"
    )


def step_seconds(engine: TorchEngine, slot: Slot, drafts: int) -> float:
    """Of the fastest step with that many drafts, all of them wrong."""
    found, length = [], slot.length
    for _ in range(4 * ROUNDS):
        segment = Segment(slot, range(100, 101 + drafts), GREEDY, drafts=drafts, further=[])
        began = time.perf_counter()
        engine.forward([segment])
        found.append(time.perf_counter() - began)
        slot.length = length
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILT_IN)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft-tokens", type=int, default=4)
    options = parser.parse_args()
    folder = find_model(options.model).folder
    tokenizer = load_tokenizer("torch", folder)
    engine = TorchEngine(
        load_model(folder, dtype=options.dtype, device="cpu"), fingerprint=bytes(32), dtype=options.dtype,
        max_model_len=CONTEXT, eos_ids=frozenset(), kv_memory_bytes=1 << 32, threads=options.threads,
    )  # fmt: skip

    def chat(text: str) -> list[int]:
        return tokenizer.encode_chat([Message("user", text)])

    again = tokenizer.encode(f"{TEXT}\n\n{TEXT[:150]}")
    copy = chat(f"Repeat this text exactly, word for word:\n\n{TEXT}")
    story = chat("Write a story about a lighthouse keeper who finds a letter.")
    for name, prompt, params, wrong in (
        ("a text again", again, GREEDY, False),
        ("asked to repeat", copy, GREEDY, False),
        ("a sampled story", story, SAMPLED, False),
        ("every guess wrong", again, GREEDY, True),
    ):
        print(f"{name:17}: {compared(engine, prompt, params, options.draft_tokens, wrong)}", flush=True)
    slot = engine.open(CONTEXT)
    engine.forward([Segment(slot, copy)])
    took = {n: step_seconds(engine, slot, n) * 1e3 for n in (0, 1, 2, 4, 8)}
    print(f"a step behind {slot.length} tokens: " + ", ".join(f"{ms:.1f} ms with {n}" for n, ms in took.items()))


if __name__ == "__main__":
    main()
