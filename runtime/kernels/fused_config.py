"""What a profile may fix of the fused kernel's shape; needs no torch, as reading a profile is part of every start."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import InputError

MAX_STAGES = 16  # half of the claims that a team of warps remembers: its warps are up to `stages` tiles apart
_POWERS = tuple(2**n for n in range(11))


@dataclass(frozen=True, slots=True)
class FusedConfig:
    """Shape of the fused kernel; 0 is what measures fastest for each layer. A CPU run leaves it alone.

    From compute capability 9.0 up kernels whose warps have roles compute INT4, INT8 and, where the layer fits, up to 8
    tokens of BF16; of their shape only `experts_per_block` can be fixed, and `k_split` of BF16. A `block_dim` chooses
    the kernel whose warps are alike instead, which serves all else in any case, and which the other values are of; in
    BF16 a `team` other than 8 does so, too, and a `k_split` that the other kernel cannot follow. No value changes what
    is computed, but all of them except `experts_per_block` may change the order of sums, and with it bits; `stages`
    only where so many leave room for fewer warps.

    Attributes:
        block_dim: threads of a block, a power of two from 64 to 1024.
        experts_per_block: experts whose tiles alternate in memory (INT4 and INT8); 1 keeps each expert contiguous, as
            the kernels for many tokens need it.
        stages: pieces of weights that each warp has in flight, 2 to 16.
        k_split: parts of the down projection's columns, summed by different warps, then in a fixed order; a power of
            two up to 32. Fewer where there are fewer columns or warps.
        team: warps that share a tile of gate and up rows, a power of two up to 32. Fewer where there are fewer columns
            or warps.

    Raises:
        InputError: a value that the kernel cannot be compiled for.
    """

    block_dim: int = 0
    experts_per_block: int = 0
    stages: int = 0
    k_split: int = 0
    team: int = 0

    def __post_init__(self) -> None:
        checks = (
            (
                self.block_dim in (0, *_POWERS[6:]),
                "a block_dim of 0 (automatic) or a power of two from 64 to 1024",
                self.block_dim,
            ),
            (0 <= self.experts_per_block <= 1024, "0 (automatic) to 1024 experts_per_block", self.experts_per_block),
            (
                self.stages == 0 or 2 <= self.stages <= MAX_STAGES,
                f"stages of 0 (automatic) or 2 to {MAX_STAGES}",
                self.stages,
            ),
            (self.k_split in (0, *_POWERS[:6]), "a k_split of 0 (automatic) or a power of two up to 32", self.k_split),
            (self.team in (0, *_POWERS[:6]), "a team of 0 (automatic) or a power of two up to 32", self.team),
        )
        for good, expected, found in checks:
            if not good:
                raise InputError(
                    expected=f"{expected} in fused_kernel", found=repr(found), mend="correct it or leave it out"
                )
