"""Settings of a run, from the command line over a YAML profile over the defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from runtime.decode.governor import make_governor
from runtime.errors import InputError
from runtime.kernels.fused_config import FusedConfig
from runtime.kernels.tuning import DispatchTable
from runtime.memory.eviction import make_policy
from runtime.memory.predict import make_predictor
from runtime.memory.sizes import parse_size

MAX_WINDOW = 512
CHECKS = ("auto", "all", "first-use")
DEVICES = ("auto", "cpu", "cuda")
PROFILE_FOLDERS = (Path(__file__).parent / "_profiles", Path(__file__).parent.parent / "profiles")  # wheel, checkout


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a run drafts, verifies and moves experts.

    Attributes:
        prefetch_window: drafted tokens that prefetch and eviction see; 0 drafts nothing.
        verify_window: drafted tokens that one verification takes at most.
        governor: `fixed`, `threshold` or `roofline`.
        prefetch: `draft`, `history` or `none`.
        eviction: `lookahead`, `lru`, `lfu` or `priority`.
        warm: begin by reading the experts that the pack's profile used most, into slots that are empty still.
        alpha, beta, gamma: weights of heat, size and transfer time of `priority`.
        expert_cache_size: such as "12GB" or "25%" of all expert bytes; None takes what memory allows.
        max_parallel_transfers: reads in flight.
        fetch_rows: rows of the window that are fetched ahead, no more than have slots side by side and one; None
            means all of these.
        speculate: whether the draft is loaded at all.
        dtype: `auto` (as stored), `bfloat16`, `float16` or `float32`.
        threads: of the arithmetic; 0 chooses.
        device: `auto` (a GPU where there is one that will do), `cpu` or `cuda`.
        host_cache_size: of a run on a GPU, what the host keeps of the exact experts, such as "24GB" or "50%"; None
            takes all of them, or what memory allows.
        context: tokens of prompt and answer that the KV cache is planned for; the model's own limit bounds it.
        check: when records are compared with their checksums: `all` before the first token, `first-use` when each is
            first read, `auto` all of them where they are at most 4 GB.
        direct_io: read past the page cache where the filesystem allows it.
        fused_kernel: shape of the fused CUDA kernel.
        kernel_dispatch: which backend computes a layer at which number of tokens, as `moespeq bench kernels --tune`
            measured it; a layer that is not in it is computed by what the kernels' own rule chooses.
    """

    prefetch_window: int = 16
    verify_window: int = 2
    governor: str = "roofline"
    prefetch: str = "draft"
    eviction: str = "lookahead"
    warm: bool = True
    alpha: float = 0.6
    beta: float = 0.3
    gamma: float = 0.1
    expert_cache_size: str | None = None
    max_parallel_transfers: int = 4
    fetch_rows: int | None = 2
    speculate: bool = True
    dtype: str = "auto"
    threads: int = 0
    device: str = "auto"
    host_cache_size: str | None = None
    context: int = 4096
    check: str = "auto"
    direct_io: bool = True
    fused_kernel: FusedConfig = field(default_factory=FusedConfig)
    kernel_dispatch: DispatchTable = field(default_factory=DispatchTable)

    def __post_init__(self) -> None:
        make_governor(self.governor, self.verify_window)
        make_policy(self.eviction)
        make_predictor(self.prefetch)
        if self.host_cache_size is not None:
            parse_size(self.host_cache_size, whole=1)  # on a CPU, which has no such cache, nothing else would
        weights = (self.alpha, self.beta, self.gamma)
        checks = (
            (0 <= self.prefetch_window <= MAX_WINDOW, f"a prefetch window of 0 to {MAX_WINDOW}", self.prefetch_window),
            (1 <= self.max_parallel_transfers <= 64, "1 to 64 parallel transfers", self.max_parallel_transfers),
            (self.fetch_rows is None or self.fetch_rows >= 0, "fetch_rows of 0 or more", self.fetch_rows),
            (
                self.dtype in ("auto", "bfloat16", "float16", "float32"),
                "a dtype of auto, bfloat16, float16, float32",
                self.dtype,
            ),
            (self.device in DEVICES, f"a device of {', '.join(DEVICES)}", self.device),
            (self.check in CHECKS, f"a check of {', '.join(CHECKS)}", self.check),
            (all(0 <= w < float("inf") for w in weights), "alpha, beta and gamma of 0 or more", weights),
            (self.context >= 1, "a context of 1 token or more", self.context),
            (0 <= self.threads <= 1024, "0 (automatic) to 1024 threads", self.threads),
        )
        for good, expected, found in checks:
            if not good:
                raise InputError(expected=expected, found=repr(found), mend="correct the option or the profile")


def load_profile(name: str) -> dict[str, Any]:
    """Read a YAML deployment profile.

    Args:
        name: a path, or the name of a profile that comes with moespeq, with or without `.yaml`.

    Returns:
        Its settings, checked to be known ones.

    Raises:
        InputError: no such profile, not YAML, an unknown setting or a value of another type.
    """
    path = find_profile(name)
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(expected=f"YAML in {path}", found=str(error), mend="correct the profile") from None
    if not isinstance(body, Mapping):
        raise InputError(
            expected=f"settings (name: value) in {path}", found=type(body).__name__, mend="correct the profile"
        )
    return _typed(RunSettings, dict(body), str(path))


def known_profile(name: str) -> Path | None:
    """The file of a profile that comes with moespeq, its name with or without `.yaml`; None for another name."""
    files = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in PROFILE_FOLDERS)
    return next((file for file in files if file.is_file()), None)


def find_profile(name: str) -> Path:
    """The file of a profile, as in `load_profile`."""
    found = Path(name) if Path(name).is_file() else known_profile(Path(name).name)
    if found is not None:
        return found
    known = sorted({path.stem for folder in PROFILE_FOLDERS if folder.is_dir() for path in folder.glob("*.yaml")})
    raise InputError(
        expected=f"a profile {name}", found="no such file", mend=f"pass a path, or one of {', '.join(known)}"
    )


_WORDS = {"int": int, "float": float, "bool": bool, "str": str}


def _typed(cls: type, body: dict[str, Any], where: str) -> dict[str, Any]:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    done: dict[str, Any] = {}
    for name, value in body.items():
        if name not in fields:
            raise InputError(
                expected=f"settings of {', '.join(fields)} in {where}", found=repr(name), mend="remove or correct it"
            )
        kinds = str(fields[name].type).replace(" ", "").split("|")
        if kinds == ["FusedConfig"]:
            if not isinstance(value, dict):
                raise InputError(expected=f"{name} to hold settings in {where}", found=repr(value), mend="correct it")
            done[name] = FusedConfig(**_typed(FusedConfig, value, f"{name} of {where}"))
            continue
        if kinds == ["DispatchTable"]:
            done[name] = DispatchTable.from_list(value, where)
            continue
        if "float" in kinds and type(value) is int:
            value = float(value)
        if "str" in kinds and type(value) is int and name in ("expert_cache_size", "host_cache_size"):
            value = str(value)
        if not (value is None and "None" in kinds) and type(value) not in [_WORDS[k] for k in kinds if k in _WORDS]:
            raise InputError(
                expected=f"{name} as {' or '.join(kinds)} in {where}", found=repr(value), mend="correct the value"
            )
        done[name] = value
    return done


def make_settings(profile: str | None, overrides: Mapping[str, Any]) -> RunSettings:
    """Defaults, then the profile, then what the command line says (None means not said)."""
    body = load_profile(profile) if profile is not None else {}
    body |= {name: value for name, value in overrides.items() if value is not None}
    return RunSettings(**body)
