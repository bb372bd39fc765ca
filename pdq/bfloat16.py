"""bfloat16 in numpy, which has no such type: the upper half of a float32. For files and KV; no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def rounded(floats: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """Contiguous float32 to nearest, ties to even, as uint16. What is not a number stays none."""
    bits = floats.view(np.uint32)
    halves = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    halves[np.isnan(floats)] = 0x7FC0
    return halves


def widened(halves: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """To float32, exactly."""
    return (halves.astype(np.uint32) << 16).view(np.float32)
