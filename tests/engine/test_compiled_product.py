"""The compiled product: exact for every size, the same bits beside any rows and on any threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pdq.engine import cpu
from pdq.engine.compiled_product import CompiledProduct, Cut, compiled
from pdq.engine.gemm import BLOCK, MOST_ROWS

ROWS = (1, 2, 5, MOST_ROWS - 1, MOST_ROWS, MOST_ROWS + 1, 2 * MOST_ROWS + 1, 100)
OUTPUTS = (1, 15, 16, 17, BLOCK, BLOCK + 1, 3 * BLOCK - 1)
INPUTS = (2, 6, 64, 70)
DTYPES = (torch.bfloat16, torch.float32)
pytestmark = [
    pytest.mark.usefixtures("threads"),
    pytest.mark.skipif(not cpu.host().avx2, reason="products are compiled for CPUs with AVX2"),
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def error(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("outputs", OUTPUTS)
@each_dtype
def test_it_is_exact_but_for_the_last_rounding(dtype: torch.dtype, outputs: int, inputs: int, biased: bool) -> None:
    weight = torch.randn((outputs, inputs)).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    product = CompiledProduct(weight, bias)
    for rows in ROWS:
        x = torch.randn((rows, inputs)).to(dtype)
        found = product(x)
        assert found.shape == (rows, outputs)
        assert found.dtype is dtype
        assert error(found, x, weight, bias) < (0.004 if dtype is torch.bfloat16 else 1e-6)


@each_dtype
def test_neither_other_rows_nor_threads_change_a_bit(dtype: torch.dtype) -> None:
    product = CompiledProduct(torch.randn((200, 64)).to(dtype), None)
    x = torch.randn((100, 64)).to(dtype)
    torch.set_num_threads(1)
    together = product(x)
    assert torch.equal(together, torch.cat([product(row[None]) for row in x]))
    torch.set_num_threads(2)
    for rows in (1, 30, 100):
        assert torch.equal(product(x[:rows]), together[:rows])


@each_dtype
def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    product = CompiledProduct(torch.randn((40, 8)).to(dtype), None)
    x = torch.randn((30, 8)).to(dtype)
    right = product(x)
    x[7, 3] = float("nan")
    x[9, 0] = float("inf")
    found = product(x)
    assert found[7].isnan().all()
    assert not found[9].isfinite().any()
    others = [i for i in range(30) if i not in (7, 9)]
    assert torch.equal(found[others], right[others])


def test_the_shape_of_the_input_is_kept() -> None:
    weight = torch.randn((5, 4))
    x = torch.randn((2, 4, 3)).transpose(1, 2)
    torch.testing.assert_close(CompiledProduct(weight, None)(x), functional.linear(x, weight), rtol=0, atol=1e-5)
    assert CompiledProduct(weight, None)(x[:, :0]).shape == (2, 0, 5)


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("blocks", [1, 3, 100])
def test_every_tile_is_in_one_item(blocks: int, threads: int) -> None:
    for rows in (1, 11, 12, 13, 25, 100, 1000):
        cut = Cut.of(rows, blocks, 8, threads)
        assert cut.height <= min(rows, MOST_ROWS)
        assert (cut.tiles - 1) * cut.height < rows <= cut.tiles * cut.height
        assert (cut.groups - 1) * cut.per_group < cut.tiles <= cut.groups * cut.per_group
        assert (cut.items // cut.groups - 1) * cut.span < blocks <= cut.items // cut.groups * cut.span
    assert Cut.of(0, blocks, 8, threads).items == 0


def test_layers_it_cannot_do_are_left_to_others() -> None:
    def layer(inputs: int, dtype: torch.dtype) -> nn.Linear:
        return nn.Linear(inputs, 4, dtype=dtype)

    assert isinstance(compiled([layer(6, torch.bfloat16)]), CompiledProduct)
    assert compiled([layer(7, torch.bfloat16)]) is None
    assert compiled([layer(6, torch.float16)]) is None
