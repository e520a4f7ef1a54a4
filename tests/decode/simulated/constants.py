"""Sizes of the model, and what everything takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

ENCODINGS = ("residual", "raw")


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model whose layers are alike.

    Attributes:
        layers: with experts.
        experts: of a layer.
        top_k: experts of a row.
        expert_bytes: of all experts, BF16.
        draft_bytes: of all experts, INT4.
        record_bytes: of a residual record.
        directory_bytes: beside each slot for residual records.
    """

    layers: int
    experts: int
    top_k: int
    expert_bytes: int
    draft_bytes: int
    record_bytes: int
    directory_bytes: int

    def record(self, encoding: str) -> int:
        """Bytes of a record, "raw" or "residual"."""
        return self.expert_bytes // (self.layers * self.experts) if encoding == "raw" else self.record_bytes

    def slots(self, memory: float, encoding: str) -> int:
        """Slots beside the draft, in a share of the BF16 experts' bytes."""
        slot_bytes = self.record(encoding) + (self.directory_bytes if encoding == "residual" else 0)
        return min(int((memory * self.expert_bytes - self.draft_bytes) // slot_bytes), self.layers * self.experts)


QWEN1_5_MOE = Model(
    layers=24,
    experts=60,
    top_k=4,
    expert_bytes=24_914_165_760,
    draft_bytes=6_423_183_360,
    record_bytes=9_416_704,
    directory_bytes=337_920,
)
"""Qwen1.5-MoE as `moespeq bench decode` builds it; docs/benchmarks/offload_windows.json has the bytes."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What link, GPU and host take, in seconds but for the link's rate and `spread`.

    For Qwen1.5-MoE on one H200. *Measured* says where. *Fitted*: chosen, near what was measured of its kind, so that
    fixed numbers of proposals in 51 % of the memory take what they took in docs/benchmarks/offload_windows.json, window
    16. Per-layer and per-step times are of this model's layers.

    Attributes:
        link_bytes_per_s: of copies one behind the other. Measured: `link_bytes_per_s` there.
        copy_gap_s: from a copy's end to the next one's begin. Measured: docs/benchmarks/link_log.json, `gaps`.
        dense_s: attention and router of a layer of a pass. From the 2.4 ms of a pass that asks for one row, with all
            experts there (docs/benchmarks/gates_log.json), less what its experts take.
        experts_s: a layer's experts, whatever their number: 5 us of the kernel, the rest fitted, for gates.
        expert_s: each of them. Measured: the kernel for residual records takes 24.5 us a layer at one row, about 100
            at six, 190 at sixteen.
        late_s: from the last late expert of a layer on the board to its product, but for `expert_s`: the second gate,
            admission, the second launch. Fitted.
        head_s: after the last layer. Fitted.
        step_s: of the draft. Measured: docs/gpu.md, 1.9 ms a step of 24 layers.
        start_s: before a pass begins on the GPU. Fitted, as are all times of the host below; what such parts took with
            an older version is in docs/benchmarks/link_log.json, `host_ms`: 0.03 to 0.13 ms to ask for a layer's
            experts, missing ones or not, 0.2 to queue steps, 0.1 for a pass's routing, 0.07 to decide, 0.7 to
            1.3 to announce.
        finish_s: from a pass's end to what it decided.
        queue_s: before draft steps are queued.
        announce_s: to plan what is announced.
        hold_s: to ask for a layer's experts.
        hold_missing_s: more, where any is missing.
        poll_s: to note a copy that has arrived, and start others.
        read_s: to read what a draft step logged.
        look_s: at what a row lacks.
        spread: how far `start_s`, `finish_s`, `queue_s` and `announce_s` vary, to both sides, as a share of them.
    """

    link_bytes_per_s: float = 54.6e9
    copy_gap_s: float = 2e-6
    dense_s: float = 70e-6
    experts_s: float = 20e-6
    expert_s: float = 4.8e-6
    late_s: float = 250e-6
    head_s: float = 100e-6
    step_s: float = 1.9e-3
    start_s: float = 200e-6
    finish_s: float = 150e-6
    queue_s: float = 75e-6
    announce_s: float = 450e-6
    hold_s: float = 20e-6
    hold_missing_s: float = 100e-6
    poll_s: float = 40e-6
    read_s: float = 40e-6
    look_s: float = 30e-6
    spread: float = 0.4


H200 = Costs()
SLOW_HOST = replace(
    H200,
    late_s=350e-6,
    start_s=400e-6,
    finish_s=300e-6,
    queue_s=150e-6,
    announce_s=900e-6,
    hold_s=40e-6,
    hold_missing_s=200e-6,
    poll_s=80e-6,
    read_s=80e-6,
    look_s=50e-6,
)
"""The host's times 1.4 to 2 times as long, admission among them, which waits for it."""
