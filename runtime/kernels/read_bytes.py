"""Reading memory and nothing else, to know how fast this GPU can."""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.errors import ShapeError
from runtime.kernels.compile import Source, load
from runtime.kernels.launch import Kernel

SOURCE = Source("read_bytes.cu")
THREADS, BLOCKS_PER_SM = 512, 4


class ReadBytes:
    """A kernel that reads a tensor once."""

    def __init__(self) -> None:
        self._kernel = Kernel(load(SOURCE), "read_bytes", THREADS)
        self._never = torch.zeros(1, dtype=torch.int32, device="cuda")

    def __call__(self, data: Tensor) -> None:
        """Queue the reading of `data`, uint8, contiguous, a multiple of 16 bytes at a multiple of 16.

        Raises:
            ShapeError: it is not.
        """
        if data.dtype != torch.uint8 or not data.is_contiguous() or (data.numel() | data.data_ptr()) % 16:
            raise ShapeError(
                expected="contiguous uint8 of a multiple of 16 bytes",
                found=f"{data.dtype} {list(data.shape)}",
                mend="read a whole buffer",
            )
        self._kernel.launch(BLOCKS_PER_SM * self._kernel.gpu.num_sms, (data, data.numel() // 16, self._never))
