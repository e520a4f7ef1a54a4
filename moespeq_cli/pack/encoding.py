"""Which encoding a pack gets where none is asked for: the one that this machine's runs are fastest with."""

from __future__ import annotations

from collections.abc import Mapping

from runtime.artifacts.encodings import ENCODINGS, RAW, TargetEncoding
from runtime.artifacts.record import DraftFormat
from runtime.errors import InputError, KernelError
from runtime.gpu.bank import bank_form
from runtime.kernels.residual_plan import CAPABILITY
from runtime.model.families import MoeSpec
from runtime.opening import usable_gpu

AUTO = "auto"
CHOICES = (AUTO, *ENCODINGS)


def require_known(name: str) -> None:
    """Refuse another name.

    Raises:
        InputError: naming those that there are.
    """
    if name not in CHOICES:
        raise InputError(
            expected=f"an encoding among {', '.join(CHOICES)}", found=repr(name), mend="pass another --encoding"
        )


def choose(name: str, spec: MoeSpec, drafts: Mapping[int, DraftFormat]) -> TargetEncoding:
    """An encoding by its name; `auto` is `residual` where this machine's GPU computes from such records, else `raw`.

    Args:
        name: one of `CHOICES`.
        spec: what the model is.
        drafts: by layer; a GPU reads residual records beside INT4 codes alone.
    """
    if name != AUTO:
        return ENCODINGS[name]
    suits = spec.dtype == "BF16" and all(bank_form(fmt, spec).kind == "int4" for fmt in drafts.values())
    return ENCODINGS["residual"] if suits and _gpu_reads_residual() else RAW


def _gpu_reads_residual() -> bool:
    try:
        return usable_gpu().capability >= CAPABILITY
    except KernelError:
        return False
