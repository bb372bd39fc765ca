"""Looks into machine code as LLVM hands it over (ELF, 64 bits): which functions does it call that it does not have?

LLVM turns an operation for which a CPU has no instruction into the call of a function of the compiler's own library.
Where that is not loaded, MCJIT resolves the call to address 0.
"""

from __future__ import annotations

import struct

import llvmlite.binding as llvm

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_SYMBOLS = 2  # a section's type
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size


def missing_symbols(code: bytes) -> list[str]:
    """Names that `code` wants from elsewhere and that this process does not have; [] for other kinds of files."""
    if not code.startswith(_MAGIC):
        return []
    return [name for name in _undefined(code) if llvm.address_of_symbol(name) is None]


def _undefined(code: bytes) -> list[str]:
    (start,), (width, count) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HH", code, 0x3A)
    sections = [_SECTION.unpack_from(code, start + i * width) for i in range(count)]
    found = []
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != _SYMBOLS:
            continue
        names = sections[link][4]
        for at in range(offset + _SYMBOL.size, offset + size, _SYMBOL.size):  # the first one stands for none
            name, _, _, section, _, _ = _SYMBOL.unpack_from(code, at)
            if section == 0:
                found.append(code[names + name : code.index(b"\0", names + name)].decode())
    return found
