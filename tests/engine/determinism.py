"""Where the same request gives the same bits, and where not: `python -m tests.engine.determinism [--model MODEL]`.

Each rung of the ladder changes one thing between two computations of the same texts: what lies beside them in a batch,
how the prompt is cut, where its KV comes from, how many threads compute. The logits at every position of the answers
are compared bit by bit, and the tokens that they give. All computations are fed the answer of the first one, so that
one changed token does not change everything behind it: an answer of its own would change where its first token does.

"max D, N of M tokens differ (T of S texts)": the largest difference of a logit, changed tokens, answers with any.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdq import prefix
from pdq.blocks import HEADER_BYTES, BlockCodec
from pdq.engine import cpu
from pdq.engine.base import EngineSpec, Segment, Slot
from pdq.engine.choice import choose
from pdq.engine.model import load_model
from pdq.engine.runner import TorchEngine
from pdq.errors import ConfigError
from pdq.kv_form import form
from pdq.kv_transfer import Prefix
from pdq.messages import SamplingParams
from pdq.models import BUILT_IN, find_model, load_tokenizer
from pdq.sequence import REPLAY_CHUNK
from tests.engine.prose import PROSE

COUNT = 80  # tokens of an answer: more than REPLAY_CHUNK, so that a resumption may take two forwards
BLOCK, CHUNK = 32, 512  # as `--block-size` and `--chunk-tokens`
LENGTHS = (37, 37, 250, 250, 513, 1100)  # of prompts: multiples of neither a block, a chunk nor a tile
CHUNKS = (48, 100, 2048)  # tokens of a forward, in place of CHUNK
KILLED = (21, 70)  # tokens that were visible before the kill
FORMS = {"bfloat16": ("bfloat16", "none"), "float32": ("float32", "none"), "int8": ("bfloat16", "int8")}
WAYS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=7))
Rows = list[Tensor]  # of each text, float32 `[COUNT, vocab]`


@dataclass(frozen=True, slots=True)
class Setup:
    """How a worker loads a model. compile: auto; off; or always, with a matrix unit too."""

    folder: Path
    dtype: str
    quantization: str = "none"
    compile: str = "auto"

    def engine(self) -> TorchEngine:
        with ExitStack() as patches:
            if self.compile == "always":
                host = cpu.host().without("amx")
                patches.enter_context(patch.object(cpu, "host", lambda: host))
            may = self.compile != "off"
            return TorchEngine(
                load_model(
                    self.folder, dtype=self.dtype, device="cpu", quantization=self.quantization, compiled=may
                ),
                fingerprint=bytes(32), dtype=self.dtype, max_model_len=max(LENGTHS) + COUNT, eos_ids=frozenset(),
                kv_memory_bytes=1 << 32, threads=1, compiled=may,
            )  # fmt: skip


@dataclass(slots=True)
class Text:
    """tokens: of the answer, as the first computation gives them."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)

    def segment(self, slot: Slot, made: int, most: int) -> Segment:
        """At most `most` of the tokens that a slot lacks before the answer's token `made`."""
        feed = [*self.prompt, *self.tokens[:made]][slot.length :]
        return Segment(slot, feed, self.params, made) if len(feed) <= most else Segment(slot, feed[:most])


class Wire:
    """KV of prompts as it lies in Redis: sealed blocks, then the tail."""

    def __init__(self, spec: EngineSpec) -> None:
        self._form = form("raw", spec.dtype, spec.layout, spec.token_bytes)
        self._codec = BlockCodec(spec.fingerprint, self._form.dtype, spec.layout, self._form.token_bytes)
        self._root = prefix.root(spec.fingerprint, BLOCK, prefix.salt(""))

    def store(self, engine: TorchEngine, slot: Slot, prompt: Sequence[int]) -> list[bytes]:
        runs = engine.export(slot, 0, len(prompt), BLOCK, HEADER_BYTES)
        return [self._sealed(run, *place) for run, place in zip(runs, self._places(prompt), strict=True)]

    def load(self, engine: TorchEngine, slot: Slot, prompt: Sequence[int], values: Sequence[bytes]) -> None:
        """values: of the prompt's first blocks, or of all."""
        for value, (name, start, stop) in zip(values, self._places(prompt), strict=False):
            payload = self._form.unpack(self._codec.open(value, name, start, stop))
            engine.load(slot, start, [(stop - start, payload)])

    def _places(self, prompt: Sequence[int]) -> Iterator[tuple[bytes, int, int]]:
        chain = Prefix(self._root, prompt, BLOCK)
        for i, name in enumerate(chain.hashes):
            yield name, i * BLOCK, (i + 1) * BLOCK
        if chain.full < chain.length:
            yield chain.tail_hash, chain.full, chain.length

    def _sealed(self, run: memoryview, name: bytes, start: int, stop: int) -> bytes:
        packed = self._form.pack(run, HEADER_BYTES)
        self._codec.seal(packed, name, start, stop)
        return bytes(packed)


class Run:
    """One computation of texts. The first one of a text also makes its tokens."""

    def __init__(self, engine: TorchEngine, texts: Sequence[Text]) -> None:
        self._engine, self._texts = engine, texts
        self._slots = [engine.open(len(text.prompt) + COUNT) for text in texts]
        self._rows: list[list[Tensor]] = [[] for _ in texts]

    def load(self, wire: Wire, stored: Sequence[Sequence[bytes]], known: Sequence[Tensor] = ()) -> None:
        """Begin with the prompts' stored KV. known: the first rows of each text, for the tokens that are visible."""
        for text, slot, values in zip(self._texts, self._slots, stored, strict=True):
            wire.load(self._engine, slot, text.prompt, values)
        self._rows = [list(rows) for rows in known] or self._rows

    def forward(self, members: Sequence[int], most: int = CHUNK) -> None:
        """The next tokens of some texts, of each at most `most`."""
        segments = [self._texts[i].segment(self._slots[i], len(self._rows[i]), most) for i in members]
        found = iter(self._engine.logits(segments))
        for i, segment in zip(members, segments, strict=True):
            if segment.sample is not None:
                self._add(i, next(found), segment)

    def _add(self, i: int, row: Tensor, segment: Segment) -> None:
        self._rows[i].append(row)
        if len(self._texts[i].tokens) < len(self._rows[i]):
            (token,) = choose(row[None], [segment], ())
            if token is None:
                raise RuntimeError("the model's logits are not numbers")
            self._texts[i].tokens.append(token)

    def prefill(self, most: int = CHUNK) -> None:
        """One prompt after the other."""
        for i, rows in enumerate(self._rows):
            while not rows:
                self.forward([i], most)

    def finish(self, most: int = CHUNK) -> Rows:
        """All answers in one batch, to their ends."""
        while live := [i for i, rows in enumerate(self._rows) if len(rows) < COUNT]:
            self.forward(live, most)
        return self.close()

    def join(self, order: Iterable[int]) -> Rows:
        """A prompt a forward joins the batch, beside the answers of those before it."""
        running: list[int] = []
        for i in order:
            while not self._rows[i]:
                self.forward([*running, i])
            running.append(i)
            running = [j for j in running if len(self._rows[j]) < COUNT]
        return self.finish()

    def close(self) -> Rows:
        for slot in self._slots:
            self._engine.close(slot)
        return [torch.stack(rows) for rows in self._rows]

    def store(self, wire: Wire) -> list[list[bytes]]:
        """The prompts' KV."""
        pairs = zip(self._texts, self._slots, strict=True)
        return [wire.store(self._engine, slot, text.prompt) for text, slot in pairs]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two computations: largest difference of logits, changed tokens of all, texts with one of all."""

    largest: float = 0.0
    changed: int = 0
    tokens: int = 0
    changed_texts: int = 0
    texts: int = 0

    @property
    def equal(self) -> bool:
        return self.largest == 0

    def __str__(self) -> str:
        if self.equal:
            return "bit-equal"
        return (
            f"max {self.largest:.2g}, {self.changed} of {self.tokens} tokens differ "
            f"({self.changed_texts} of {self.texts} texts)"
        )

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            max(self.largest, other.largest), self.changed + other.changed, self.tokens + other.tokens,
            self.changed_texts + other.changed_texts, self.texts + other.texts,
        )  # fmt: skip


def compared(texts: Sequence[Text], ours: Rows, theirs: Rows, first: int = 0) -> Difference:
    """first: of the answers' tokens whose rows count."""
    found = Difference()
    for text, a, b in zip(texts, ours, theirs, strict=True):
        a, b = a[first:], b[first:]
        same = torch.equal(a, b)
        largest = 0.0 if same else float((a - b).abs().max())
        changed = (
            0 if same else sum(x != y for x, y in zip(chosen(text, a, first), chosen(text, b, first), strict=True))
        )
        found += Difference(largest, changed, len(a), int(changed > 0), 1)
    return found


def chosen(text: Text, rows: Tensor, first: int) -> list[int | None]:
    """The tokens that an answer's rows from token `first` on give."""
    nowhere: Any = None  # nothing is computed
    return choose(rows, [Segment(nowhere, [0], text.params, first + i) for i in range(len(rows))], ())


class Ladder:
    """The rungs, on one engine. reference: prompts computed one by one, answers in one batch, one thread."""

    def __init__(self, setup: Setup, texts: Sequence[Text]) -> None:
        self._setup, self._texts = setup, texts
        self.engine = setup.engine()
        self._wire = Wire(self.engine.spec)
        run = Run(self.engine, texts)
        run.prefill()
        self._stored = run.store(self._wire)
        self._reference = run.finish()

    def same_request_again(self) -> Difference:
        return self._against(self._whole(CHUNK))

    def neighbours_shuffled(self) -> Difference:
        order = range(len(self._texts))
        ways = [Run(self.engine, self._texts).join(way) for way in (order, [*order[1::2], *order[::2][::-1]])]
        return self._compared(*ways)

    def batch_1_against_16(self) -> Difference:
        others = [Text(t.prompt[i + 1 :], t.params) for i, t in enumerate([*self._texts, *self._texts])]
        run = Run(self.engine, [*self._texts, *others][:16])
        run.prefill()
        together, alone = run.finish()[: len(self._texts)], []
        for text in self._texts:
            run = Run(self.engine, [text])
            run.prefill()
            alone += run.finish()
        return self._compared(together, alone)

    def cached_prefix_against_cold(self) -> Difference:
        run = Run(self.engine, self._texts)
        pairs = zip(self._texts, self._stored, strict=True)
        run.load(self._wire, [values[: (len(text.prompt) - 1) // BLOCK] for text, values in pairs])
        run.prefill()
        return self._against(run.finish())

    def chunk_sizes(self) -> Difference:
        return sum((self._against(self._whole(size)) for size in CHUNKS), Difference())

    def decode_against_prefill_rescoring(self) -> Difference:
        found = []
        for text in self._texts:
            slot = self.engine.open(len(text.prompt) + COUNT)
            ids = [*text.prompt, *text.tokens[: COUNT - 1]]
            found.append(self.engine.logits([Segment(slot, ids, text.params, drafts=COUNT - 1, further=[])]))
            self.engine.close(slot)
        return self._against(found)

    def prefill_and_decode_in_different_workers(self) -> Difference:
        """Decode in another process, which has loaded the model itself."""
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as pool:
            place = Path(folder) / "rows"
            first = [rows[:1] for rows in self._reference]
            pool.submit(_decode, self._setup, list(self._texts), self._stored, first, place).result()
            found = load_file(place)
            return self._against([found[str(i)] for i in range(len(found))])

    def resumed_after_a_kill(self) -> Difference:
        found = Difference()
        for visible in KILLED:
            run = Run(self.engine, self._texts)
            run.load(self._wire, self._stored, [rows[:visible] for rows in self._reference])
            found += compared(self._texts, run.finish(REPLAY_CHUNK), self._reference, visible)
        return found

    def other_thread_count(self) -> Difference:
        self.engine.more_threads = 1
        try:
            return self._against(self._whole(CHUNK))
        finally:
            self.engine.more_threads = 0

    def _whole(self, most: int) -> Rows:
        run = Run(self.engine, self._texts)
        run.prefill(most)
        return run.finish()

    def _against(self, rows: Rows) -> Difference:
        return self._compared(rows, self._reference)

    def _compared(self, ours: Rows, theirs: Rows) -> Difference:
        return compared(self._texts, ours, theirs)


RUNGS = (
    Ladder.same_request_again, Ladder.neighbours_shuffled, Ladder.batch_1_against_16, Ladder.cached_prefix_against_cold,
    Ladder.chunk_sizes, Ladder.decode_against_prefill_rescoring, Ladder.prefill_and_decode_in_different_workers,
    Ladder.resumed_after_a_kill, Ladder.other_thread_count,
)  # fmt: skip


def _decode(
    setup: Setup, texts: Sequence[Text], stored: Sequence[Sequence[bytes]], first: Sequence[Tensor], place: Path
) -> None:
    """The decode worker: answers from their second token on. Writes the rows, by the text's number, to `place`."""
    engine = setup.engine()
    run = Run(engine, texts)
    run.load(Wire(engine.spec), stored, first)
    save_file({str(i): rows.contiguous() for i, rows in enumerate(run.finish())}, place)


def prose_texts(folder: Path) -> list[Text]:
    """Of each length one; every other one sampled, with a seed, and from another place in the text on."""
    ids = load_tokenizer("torch", folder).encode(PROSE)
    starts = [40 * (i % 2) for i in range(len(LENGTHS))]
    return [Text(ids[at : at + n], WAYS[i % 2]) for i, (at, n) in enumerate(zip(starts, LENGTHS, strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=BUILT_IN)
    parser.add_argument("--dtype", action="append", choices=FORMS, help="of all by default; int8: weights, in bfloat16")
    parser.add_argument("--compile", choices=("auto", "off", "always"), default="auto", help="always: slower or not")
    parser.add_argument("--rung", action="append", choices=[r.__name__ for r in RUNGS], help="of all by default")
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()
    folder = find_model(options.model).folder
    report: dict[str, dict[str, object]] = {}
    for name in options.dtype or FORMS:
        dtype, quantization = FORMS[name]
        try:
            ladder = Ladder(Setup(folder, dtype, quantization, options.compile), prose_texts(folder))
        except ConfigError as e:
            report[name] = {"refused": str(e)}
            print_unless(options.json, f"{name}: {e}")
            continue
        report[name] = {"forward": type(ladder.engine._forward).__name__}
        print_unless(options.json, f"{name}, {report[name]['forward']}")
        for rung in (r for r in RUNGS if r.__name__ in (options.rung or [r.__name__])):
            found, words = rung(ladder), rung.__name__.replace("_", " ")
            report[name][words] = asdict(found) | {"equal": found.equal}
            print_unless(options.json, f"  {words:40} {found}")
    if options.json:
        print(json.dumps(report, indent=2))


def print_unless(quiet: bool, line: str) -> None:
    if not quiet:
        print(line, flush=True)


if __name__ == "__main__":
    main()
