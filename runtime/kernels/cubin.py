"""Read from a cubin what its kernels need: registers, memory, and the size of each parameter."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.errors import KernelError

# Numbers of attributes in .nv.info: EIATTR_REGCOUNT, EIATTR_FRAME_SIZE and EIATTR_KPARAM_INFO.
_REGISTERS, _FRAME, _PARAMETER = 0x2F, 0x11, 0x17
_SIZED, _HALF = 4, 3  # formats of an attribute: a length and so many bytes, or two bytes (1 and 2: less, padded to two)
_RESERVED_SMEM_BYTES = (
    1024  # from sm_90 on the driver keeps so much of each block's shared memory, and ptxas counts it in
)
_SPILL = re.compile(r"Function properties for (\S+)\s*\n[^\n]*?(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread or one block of a kernel needs.

    Attributes:
        registers: 32-bit registers a thread.
        spill_bytes: bytes of registers that go to memory, stores and loads together, each instruction counted once;
            those of functions that were not inlined are counted in every kernel.
        stack_bytes: local memory a thread, spills included.
        static_smem_bytes: shared memory a block that the source declares with a size.
        parameter_bytes: the size of each parameter, in order.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    parameter_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code for one architecture, and what its kernels need by their names."""

    data: bytes
    resources: dict[str, Resources]


def read_cubin(data: bytes, log: str) -> Cubin:
    """Describe the kernels of a cubin.

    Args:
        data: the ELF file that NVRTC or nvcc made.
        log: what ptxas printed with `-v`; the bytes of spills stand nowhere else.

    Raises:
        KernelError: not a 64-bit ELF of a CUDA program, or the log lacks one of its kernels.
    """
    sections = dict(_sections(data))
    if ".nv.info" not in sections:
        raise _damaged("no section .nv.info")
    names = _symbols(sections)
    facts: dict[int, dict[int, int]] = {}
    for number, value in _attributes(sections[".nv.info"]):
        if number in (_REGISTERS, _FRAME):
            symbol, amount = struct.unpack("<II", value)
            facts.setdefault(symbol, {})[number] = amount
    spills = {name: int(stores) + int(loads) for name, stores, loads in _SPILL.findall(log)}
    kernels = {names[symbol]: fact for symbol, fact in facts.items() if f".nv.info.{names[symbol]}" in sections}
    called = sum(count for name, count in spills.items() if name not in kernels)  # by functions that were not inlined
    resources = {}
    for name, fact in kernels.items():
        if name not in spills:
            raise _damaged(f"no line of ptxas about {name}")
        shared = len(sections.get(f".nv.shared.{name}", b""))
        reserved = _RESERVED_SMEM_BYTES if shared and ".nv.shared.reserved.0" in sections else 0
        resources[name] = Resources(
            registers=fact[_REGISTERS],
            spill_bytes=spills[name] + called,
            stack_bytes=fact[_FRAME],
            static_smem_bytes=shared - reserved,
            parameter_bytes=_parameters(sections[f".nv.info.{name}"]),
        )
    return Cubin(data, resources)


def with_its_end(data: bytes) -> bytes:
    """A cubin as NVRTC made it, from what CuPy returns of it.

    CuPy takes its last byte for the end of a string. It is a zero, of the table of program headers; drivers do not miss
    it, but tools that read ELF files (nvdisasm, cuobjdump) refuse what lacks it.
    """
    (programs,) = struct.unpack_from("<Q", data, 32)
    entry, count = struct.unpack_from("<HH", data, 54)
    return data.ljust(programs + entry * count, b"\0")


def _parameters(info: bytes) -> tuple[int, ...]:
    sizes: dict[int, int] = {}
    for number, value in _attributes(info):
        if number == _PARAMETER:
            _, ordinal, _, flags = struct.unpack("<IHHI", value)
            sizes[ordinal] = flags >> 18
    return tuple(sizes[ordinal] for ordinal in range(len(sizes)))


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and value of each attribute of a .nv.info section."""
    at = 0
    while at < len(info):
        form, number, half = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            yield number, info[at : at + half]
            at += half
        elif form <= _HALF:
            yield number, struct.pack("<H", half)
        else:
            raise _damaged(f"an attribute of format {form}")


def _sections(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each section; one without content in the file comes as zeros."""
    if data[:5] != b"\x7fELF\x02":
        raise _damaged(f"a file that starts with {data[:5]!r}")
    try:
        (table,) = struct.unpack_from("<Q", data, 40)
        entry, count, names_at = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + entry * i) for i in range(count)]
        names_offset = headers[names_at][4]
        for name, kind, _, _, offset, size, *_ in headers:
            start = names_offset + name
            title = data[start : data.index(b"\0", start)].decode("ascii", "replace")
            yield title, bytes(size) if kind == 8 else data[offset : offset + size]
    except (struct.error, ValueError, IndexError) as error:
        raise _damaged(f"a torn file: {error}") from error


def _symbols(sections: dict[str, bytes]) -> list[str]:
    """Names by the number of the symbol."""
    strings = sections[".strtab"]
    starts = (entry[0] for entry in struct.iter_unpack("<IBBHQQ", sections[".symtab"]))
    return [strings[start : strings.index(b"\0", start)].decode("ascii", "replace") for start in starts]


def _damaged(found: str) -> KernelError:
    return KernelError(
        expected="a cubin, the ELF file of a CUDA program",
        found=found,
        mend="compile it again: empty the kernel cache (MOESPEQ_CACHE_DIR, by default ~/.cache/moespeq)",
    )
