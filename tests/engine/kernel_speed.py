"""The figures by which `pdq.engine.kernel_selection` chooses: run it on a CPU of a kind that has none there.

    python -m tests.engine.kernel_speed [--threads N]

Each kernel in the shapes of a 135M Llama, the fastest of ROUNDS runs in turns, in microseconds, and how many times as
long the others take as the compiled one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from pdq.engine import compiled_chunk, cpu, kernels, products
from pdq.engine.compiled import Batch
from pdq.engine.compiled_product import CompiledProduct
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from pdq.engine.packed import Bfloat16Product, can_pack

ROUNDS = 20
HEADS, LAYER = 9, LayerShape(3, 64, 64)
Runs = dict[str, Callable[[], object]]


def decode(dtype: torch.dtype, tokens: int) -> Runs:
    slot = TorchSlot(Layout((LAYER,), dtype), tokens, torch.device("cpu"))
    key, value = slot.planes(0, tokens)
    for plane in (key, value):
        plane.normal_()
    slot.length = tokens - 1
    query, batch, plain = torch.randn((1, HEADS, 1, 64)).to(dtype), Batch([slot]), kernels.Scores()
    return {
        "compiled": lambda: batch.attend(0, LAYER, query, None),
        "sdpa": lambda: kernels.decode(query, [key], [value], [None], plain, [None]),
        "bmm": lambda: kernels.decode(query, [key], [value], [tokens], plain, [None]),
    }


def prefill(dtype: torch.dtype, new: int, visible: int) -> Runs:
    query = torch.randn((1, HEADS, new, 64)).to(dtype)
    key, value = (torch.randn((1, LAYER.heads, visible, 64)).to(dtype) for _ in range(2))
    mask, scratch, plain = torch.zeros((new, visible), dtype=dtype), products.Scratch(), kernels.Scores()
    return {
        "compiled": lambda: compiled_chunk.chunk(query, key, value, window=None, scaling=None),
        "sdpa": lambda: kernels.prefill(query, key, value, mask, plain),
        "bmm": lambda: products.chunk(query, key, value, mask, windowed=False, scaling=None, scratch=scratch),
    }


def linear(dtype: torch.dtype, rows: int) -> Runs:
    layer = nn.Linear(576, 1536, bias=False, dtype=dtype)
    x, compiled = torch.randn((rows, 576)).to(dtype), CompiledProduct(layer.weight.detach(), None)
    runs: Runs = {"compiled": lambda: compiled(x), "torch": lambda: layer(x)}
    if dtype is torch.bfloat16 and can_pack():
        packed = Bfloat16Product(layer.weight.detach(), None)
        runs["onednn"] = lambda: packed(x)
    return runs


@torch.inference_mode()
def fastest(runs: Runs) -> dict[str, float]:
    """Seconds."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    print(f"{cpu.host().level} ({cpu.host().name}), {torch.get_num_threads()} threads, torch {torch.__version__}")
    for dtype in (torch.bfloat16, torch.float32):
        cases = {
            "decode over 1,024": decode(dtype, 1024),
            "decode over 4,096": decode(dtype, 4096),
            "prefill of 128 over 1,024": prefill(dtype, 128, 1024),
            "prefill of 512 over 2,048": prefill(dtype, 512, 2048),
            "linear, 1 row": linear(dtype, 1),
            "linear, 16 rows": linear(dtype, 16),
            "linear, 256 rows": linear(dtype, 256),
        }
        for name, runs in cases.items():
            found = fastest(runs)
            shown = ", ".join(f"{k} {s * 1e6:,.0f} ({s / found['compiled']:.2f})" for k, s in found.items())
            print(f"{str(dtype).removeprefix('torch.'):8} {name:26} {shown}", flush=True)


if __name__ == "__main__":
    main()
