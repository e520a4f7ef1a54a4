"""What a layer of experts computes, and the form in which its weights are held."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from runtime.errors import ShapeError

MAX_EXPERTS = 1024  # the device lists are built by one block, a thread an expert
UNIT_ROWS, UNIT_COLUMNS = 16, 128  # a unit: the A operand of eight m16n8k16 steps
SCALE_BYTES = 2
CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702  # gpt-oss

Kind = Literal["int4", "int8", "bf16"]
BITS: dict[Kind, int] = {"int4": 4, "int8": 8, "bf16": 16}


class Activation(StrEnum):
    """How an expert joins its gate and up rows, in float32; `code` is what the kernels are compiled with.

    silu:      gate * sigmoid(gate) * up
    gelu:      gate * (1 + erf(gate / sqrt 2)) / 2 * up
    gelu_tanh: the tanh approximation of gelu
    clamped:   gpt-oss; gate = min(gate, 7), up = clamp(up, -7, 7), gate * sigmoid(1.702 gate) * (up + 1)
    """

    silu = "silu"
    gelu = "gelu"
    gelu_tanh = "gelu_tanh"
    clamped = "clamped"

    @property
    def code(self) -> int:
        return list(Activation).index(self)


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The geometry of one layer of routed experts.

    Raises:
        ShapeError: the kernels cannot compute such a layer.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    activation: Activation = Activation.silu
    has_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ShapeError(
                expected=f"1 to {MAX_EXPERTS} experts",
                found=f"num_experts {self.num_experts}",
                mend="split the layer's experts over several calls",
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ShapeError(
                expected=f"top_k from 1 to num_experts {self.num_experts}",
                found=f"top_k {self.top_k}",
                mend="take both from the model's configuration",
            )
        for name in ("hidden_size", "moe_intermediate_size"):
            size = getattr(self, name)
            if size < 8 or size % 8:
                raise ShapeError(
                    expected=f"{name} a positive multiple of 8, so that rows begin at multiples of 16 bytes",
                    found=f"{size}",
                    mend="pad the weights with zero rows and columns",
                )

    @property
    def weights_per_expert(self) -> int:
        """Weights of one expert, biases not counted."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def flops_per_pair(self) -> int:
        """Multiplications and additions for one token at one expert."""
        return 2 * self.weights_per_expert


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a layer's weights are held: codes with symmetric grouped scales, or BF16 as they are.

    Attributes:
        kind: int4 (code + 8 in a nibble), int8 (code + 128 in a byte) or bf16.
        group_size: input columns that share one scale, a multiple of 32; the last group of a row may be shorter.
            -1 is one scale for a whole row. bf16 has no groups and takes any value.

    Raises:
        ShapeError: no such form.
    """

    kind: Kind
    group_size: int = 128

    def __post_init__(self) -> None:
        if self.kind not in BITS:
            raise ShapeError(expected=f"a weight form of {list(BITS)}", found=repr(self.kind), mend="name one of these")
        if self.is_coded and self.group_size != -1 and (self.group_size < 32 or self.group_size % 32):
            raise ShapeError(
                expected="a group_size that is a positive multiple of 32, or -1 for whole rows",
                found=f"{self.group_size}",
                mend="quantize again with --group-size 32, 64 or 128",
            )

    @property
    def bits(self) -> int:
        """Bits of one stored weight."""
        return BITS[self.kind]

    @property
    def is_coded(self) -> bool:
        """Whether weights are codes with scales."""
        return self.kind != "bf16"

    @property
    def zero(self) -> int:
        """The stored code of the value zero: 8 or 128."""
        return 1 << (self.bits - 1)

    @property
    def scale_sets(self) -> int:
        """Sets of 16 row scales in a unit of 128 columns (`spu`): 1, 2 or 4; 0 for bf16."""
        if not self.is_coded:
            return 0
        if self.group_size == -1 or self.group_size % 128 == 0:
            return 1
        return 2 if self.group_size % 64 == 0 else 4

    @property
    def code_bytes(self) -> int:
        """The codes of a unit of 16 rows and 128 columns; 0 for bf16."""
        return UNIT_ROWS * UNIT_COLUMNS * self.bits // 8 if self.is_coded else 0

    @property
    def unit_bytes(self) -> int:
        """A unit with its scales; 0 for bf16."""
        return self.code_bytes + self.scale_sets * UNIT_ROWS * SCALE_BYTES

    def groups(self, columns: int) -> int:
        """Scales of one row of this many columns."""
        return 1 if self.group_size == -1 else -(-columns // self.group_size)

    def group_columns(self, columns: int) -> int:
        """Columns of a whole group."""
        return columns if self.group_size == -1 else self.group_size
