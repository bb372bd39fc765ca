"""Models and engines that the engine tests share: made once per architecture and session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from transformers import PreTrainedModel

from pdq.engine import cpu
from pdq.engine.adapters import reference
from pdq.engine.fused import FusedForward
from pdq.engine.runner import TorchEngine
from tests.engine.pd import engine, generated
from tests.engine.tiny import COMPILED, VOCAB, compiled_model, tiny_model


@dataclass
class Arch:
    """One architecture: a stock model, and two engines (prefill and decode) over other instances of its weights.

    A name of COMPILED: the engines' models are as they are after loading, and computed by compiled code as a whole.
    """

    stock: PreTrainedModel
    prefill: TorchEngine
    decode: TorchEngine
    half: Half
    _expected: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def prompt(self, length: int) -> list[int]:
        return [(i * i * 7 + i * 3 + length * 11) % VOCAB for i in range(length)]

    def expected(self, length: int, count: int) -> list[int]:
        """What `generate` says after `prompt(length)`."""
        if (length, count) not in self._expected:
            self._expected[length, count] = generated(self.stock, self.prompt(length), count)
        return self._expected[length, count]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The stock model's, `[tokens, vocab]`."""
        return stock_logits(self.stock, ids)


@dataclass
class Half:
    """The same model in bfloat16."""

    stock: PreTrainedModel
    engine: TorchEngine

    def logits(self, ids: list[int]) -> torch.Tensor:
        """The stock model's, `[tokens, vocab]`."""
        return stock_logits(self.stock, ids)


def stock_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def stock(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Eager, unless that is wrong in transformers itself: it knows soft-capping and sinks in every version."""
    model = tiny_model(COMPILED.get(name, name)).to(dtype)
    model.config._attn_implementation = reference(type(model))
    return model


@pytest.fixture(scope="session", autouse=True)
def _no_matrix_unit() -> Iterator[None]:
    """With one the compiled products and chunks are not used. What is chosen then is in `test_kernel_selection`."""
    host = cpu.host().without("amx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "host", lambda: host)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads() -> Iterator[None]:
    """The same random numbers for each test, which may set the number of threads."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def arch() -> Callable[[str], Arch]:
    @cache
    def made(name: str) -> Arch:
        def model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
            return compiled_model(name, dtype) if name in COMPILED else tiny_model(name).to(dtype)

        half = Half(stock(name, torch.bfloat16), engine(model(torch.bfloat16), dtype="bfloat16"))
        it = Arch(stock(name), engine(model()), engine(model()), half)
        assert all(isinstance(e._forward, FusedForward) == (name in COMPILED) for e in (it.prefill, half.engine))
        return it

    return made
