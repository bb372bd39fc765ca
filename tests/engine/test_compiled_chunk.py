"""The compiled prefill kernel: exact at every edge of its tiles and blocks, the same bits on any threads."""

from __future__ import annotations

from itertools import cycle, product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdq.engine import compiled_chunk, cpu, flash_chunk, kernels
from pdq.engine.attention import Step
from pdq.engine.base import Segment
from pdq.engine.code import Code
from pdq.engine.compiled_chunk import chunk
from pdq.engine.flash import Shape
from pdq.engine.flash_chunk import TILE
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.kv import LayerShape
from tests.engine.gates import use_cpu, use_kernels
from tests.engine.pd import GREEDY, engine
from tests.engine.test_compiled import SHAPES, slot_of
from tests.engine.tiny import tiny_model

NEW = (1, 2, 15, 16, 17, TILE - 1, TILE, TILE + 1, 200)
BEFORE = (0, 1, 31, 32, 33, 700)
WINDOWS = (None, 20, None, 100, None)  # five, which goes with all of the six above
DTYPES = (torch.bfloat16, torch.float32)
HALF = torch.bfloat16
NAN = float("nan")
pytestmark = pytest.mark.usefixtures("threads")


def random_kv(kv_heads: int, dims: tuple[int, int], visible: int, dtype: torch.dtype) -> list[Tensor]:
    """Views of planes of which all other memory is not a number."""
    planes = [torch.full((1, kv_heads, visible + 12, dim), NAN, dtype=dtype) for dim in dims]
    return [plane[:, :, 5 : 5 + visible].normal_() for plane in planes]


def torchs(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float | None, dtype: torch.dtype
) -> Tensor:
    """By torch's fused kernel in `dtype`, as float64. It wants K and V of one dim: the shorter ones get zeros."""
    n, dim, visible, value_dim = query.shape[2], query.shape[3], value.shape[2], value.shape[3]
    scaling = dim**-0.5 if scaling is None else scaling
    query, key, value = (
        functional.pad(x, (0, max(dim, value_dim) - x.shape[3])).to(dtype) for x in (query, key, value)
    )
    seen = torch.ones((n, visible), dtype=torch.bool).tril(visible - n)
    if window is not None:
        seen = seen.triu(visible - n - window + 1)
    mask = torch.zeros((n, visible), dtype=dtype).masked_fill(~seen, float("-inf"))
    return kernels.prefill(query, key, value, mask, kernels.Scores(scaling)).double()[..., :value_dim]


def attend(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, scaling: float | None = None, threads: int = 1
) -> Tensor:
    torch.set_num_threads(threads)
    found = chunk(query, key, value, window=window, scaling=scaling)
    assert found is not None
    return found


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (71, 1, 64, 64)], ids=str)
def test_it_is_as_near_to_exact_as_torchs_kernel(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    group, kv_heads, *dims = shape
    ours, theirs = [], []
    for (n, before), window in zip(product(NEW, BEFORE), cycle(WINDOWS)):
        key, value = random_kv(kv_heads, (dims[0], dims[1]), n + before, dtype)
        query = torch.randn((1, group * kv_heads, n, dims[0])).to(dtype)
        right = torchs(query, key, value, window, None, torch.float64)
        ours.append(error(attend(query, key, value, window), right))
        if dtype is HALF:
            theirs.append(error(torchs(query, key, value, window, None, dtype), right))
    assert max(ours) < (0.005 if dtype is HALF else 1e-6)
    assert dtype is not HALF or sum(ours) <= 1.05 * sum(theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_threads_nor_other_rows_change_a_bit(dtype: torch.dtype) -> None:
    key, value = random_kv(3, (64, 64), 300, dtype)
    query = torch.randn((1, 9, 200, 64)).to(dtype)
    alone = attend(query, key, value)
    for _ in range(20):
        assert torch.equal(attend(query, key, value, threads=2), alone)
    for n in (1, 5, 17, 64):
        assert torch.equal(attend(query[:, :, -n:], key, value), alone[:, -n:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_strides_are_read_and_written_in_their_places_alone(dtype: torch.dtype) -> None:
    key, value = random_kv(2, (48, 40), 90, dtype)
    query = torch.randn((1, 70, 8, 48)).to(dtype).transpose(1, 2)[:, :, ::2][:, 1:7]
    room = torch.full((1, 40, 10, 50), 7.0, dtype=dtype)
    place = room[:, 2:37, 3:9, 4:44]
    expected = attend(query.contiguous(), key.contiguous(), value.contiguous())
    assert chunk(query, key, value, window=None, scaling=None, out=place) is place
    assert torch.equal(place, expected)
    place.fill_(7.0)
    assert torch.equal(room, torch.full_like(room, 7.0))
    odd = query.transpose(2, 3).contiguous().transpose(2, 3)  # its rows are not contiguous
    planes = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value)]  # nor do tokens follow each other
    assert torch.equal(attend(odd, *planes), expected)


def test_scores_of_any_size_become_weights() -> None:
    key, value = random_kv(1, (32, 32), 300, torch.float32)
    key[0, 0] = torch.linspace(-1, 1, 300)[:, None]
    query = torch.ones((1, 1, 40, 32))
    ends = range(261, 301)
    means = torch.stack([value[0, 0, :end].mean(0) for end in ends])
    for scaling, expected in ((1e6, value[0, 0, 260:]), (-1e6, value[0, 0, [0] * 40]), (0.0, means)):
        torch.testing.assert_close(attend(query, key, value, None, scaling)[0, :, 0], expected, rtol=0, atol=1e-6)
    half = [x.bfloat16() for x in (query, key, value)]
    for scaling in (-0.3, 0.0, 0.7):
        right = torchs(*half, None, scaling, torch.float64)
        assert error(attend(*half, None, scaling), right) < 0.005


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("window", [None, 20])
def test_what_is_not_a_number_stays_so_and_stays_in_the_rows_that_see_it(
    dtype: torch.dtype, bad: float, plane: int, window: int | None
) -> None:
    n, visible, (heads, kv_heads, dim) = 80, 100, (4, 2, 16)
    for at in (0, 5, 30, TILE, visible - 1):
        planes = random_kv(kv_heads, (dim, dim), visible, dtype)
        query = torch.randn((1, heads, n, dim)).to(dtype).abs()  # or -inf would be a score, and a fine one
        clean = attend(query, *planes, window)
        planes[plane][0, 1, at] = bad
        found = attend(query, *planes, window)[0]
        position = torch.arange(visible - n, visible)
        sees = (position >= at) & (position < at + (window or visible))
        finite = torch.isfinite(found).all(-1)
        assert torch.equal(finite, ~torch.stack([sees & False, sees & False, sees, sees], 1))
        close = {"rtol": 0, "atol": 0.02 if dtype is HALF else 1e-5}
        torch.testing.assert_close(found[finite], clean[0][finite], **close)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_row_that_is_not_a_number_spoils_no_other(dtype: torch.dtype) -> None:
    key, value = random_kv(1, (64, 64), 100, dtype)
    query = torch.randn((1, 3, 30, 64)).to(dtype)
    clean = attend(query, key, value)
    query[0, 1, 7, 3] = NAN
    found = attend(query, key, value)
    assert torch.isnan(found[0, 7, 1]).all()
    found[0, 7, 1] = clean[0, 7, 1]
    assert torch.equal(found, clean)


def test_without_an_instruction_for_pairs_the_products_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    key, value = random_kv(2, (48, 40), 90, HALF)
    query = torch.randn((1, 6, 70, 48)).to(HALF)
    right = torchs(query, key, value, None, None, torch.float64)
    expected = attend(query, key, value)
    use_cpu(monkeypatch, cpu.host().without("avx512bf16"))
    made = Code([flash_chunk.chunk(Shape(HALF, 3, 2, 48, 40))])
    monkeypatch.setattr(compiled_chunk, "attention", lambda shape: made.address("chunk"))
    found = attend(query, key, value)
    assert error(found, right) < 0.005
    assert error(found, expected.double()) < 0.003


def test_other_shapes_and_types_are_left_to_the_other_kernels() -> None:
    for dtype, dim in ((torch.float16, 64), (torch.bfloat16, 7), (torch.bfloat16, 2048)):
        x = torch.randn((1, 1, 5, dim)).to(dtype)
        assert chunk(x, x, x, window=None, scaling=None) is None
    x = torch.randn((1, 1, 5, 8))
    assert chunk(x, x.bfloat16(), x.bfloat16(), window=None, scaling=None) is None


def test_chunks_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    use_kernels(monkeypatch, KernelSet(decode=True, prefill=True))
    it, ids, stock = engine(tiny_model("llama")), [5, 6, 7, 8, 9], compiled_chunk.chunk
    monkeypatch.setattr(kernels, "prefill", lambda *a: pytest.fail("a chunk in the fused kernel"))
    monkeypatch.setattr(compiled_chunk, "chunk", lambda q, *a, **k: used.append(q.shape[2]) or stock(q, *a, **k))
    slot = it.open(10)
    it.forward([Segment(slot, ids[:3])])
    found = it.logits([Segment(slot, ids[3:], GREEDY)])
    assert used == [3, 3, 2, 2]  # two layers
    torch.testing.assert_close(found, tiny_model("llama")(torch.tensor([ids])).logits[:, -1], rtol=0, atol=1e-4)


def test_windows_of_a_slot_are_seen_from_their_first_token_on() -> None:
    layer = LayerShape(2, 16, 16, window=20)
    slot = slot_of(100, layer, torch.float32)
    slot.length = 60
    key, value = (plane[:, :, 60:] for plane in slot.planes(0, 100))
    query = torch.randn((1, 4, 40, 16))
    outs = []
    for use in (False, True):
        step = Step([layer], [0], [(slot, 40)], KernelSet(prefill=use))
        step.update(key, value, 0)
        outs.append(step.attend(query, key, value, None, module=torch.nn.Identity()))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)
