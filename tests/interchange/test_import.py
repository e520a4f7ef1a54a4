"""GPTQ checkpoints that other programs made: taken as drafts, or refused saying why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moespeq_cli.pack.build import build_pack
from moespeq_cli.pack.verify import find_sources, verify_pack
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.gptq_format import pack_linear
from runtime.artifacts.gptq_import import open_quantized
from runtime.artifacts.pack import Pack
from runtime.artifacts.quantized import PARTS, Quantized, linear_name
from runtime.errors import ArtifactError, InputError, MoespeqError
from runtime.model.families import describe
from tests.cli.conftest import Command, moespeq
from tests.decode.packs import assert_same, decode, prompt_of
from tests.interchange.fixtures import save_foreign
from tests.pack.fixtures import plan_for
from tests.tiny import save_tiny

__all__ = ["moespeq"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("qwen2_moe", tmp_path_factory.mktemp("import") / "model", dtype=torch.bfloat16)


def open_for(model: Path, folder: Path) -> Quantized:
    checkpoint = Checkpoint.open(model)
    return open_quantized(folder, checkpoint, describe(checkpoint))


@pytest.mark.parametrize("kind", ["qwen2_moe", "mixtral", "gpt_oss"])
def test_a_foreign_checkpoint_makes_the_same_draft_and_the_exact_text(kind: str, tmp_path: Path) -> None:
    """Attention quantised there does not matter: what is not a routed expert comes from the model itself."""
    model = save_tiny(kind, tmp_path / "model", dtype=torch.bfloat16)
    foreign = save_foreign(model, tmp_path / "foreign")
    build_pack(plan_for(model, foreign, tmp_path / "pack"))
    pack, ours = Pack.open(tmp_path / "pack"), tmp_path / "foreign-ours"
    build_pack(plan_for(model, ours, tmp_path / "pack-ours"))
    for shard in ("draft-0000.safetensors", "target-0000.safetensors", "dense.safetensors"):
        assert (pack.folder / shard).read_bytes() == (tmp_path / "pack-ours" / shard).read_bytes()
    alone = decode(pack, prompt_of(9), 10, speculate=False)
    assert_same(decode(pack, prompt_of(9), 10, prefetch_window=4, verify_window=3), alone)
    checkpoint, source = find_sources(pack, str(model), True, foreign)
    assert source is not None
    assert verify_pack(pack, checkpoint, source).drafts_equal_to_quantized == pack.spec.num_records


def eight_bits(tensors: dict[str, Tensor]) -> None:
    """Layer 1 at 8 bits and one scale a row, as a rule for the layer would have it."""
    for expert in range(8):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            name = linear_name(1, expert, projection)
            bits = pack_linear(*_codes(tensors, name), bits=8, group_size=-1)
            tensors.update({f"{name}.{part}": tensor for part, tensor in bits.items()})


def _codes(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    from runtime.artifacts.gptq_format import dequantize, unpack_linear

    codes, scales, zeros = unpack_linear({part: tensors[f"{name}.{part}"] for part in PARTS}, 4, 32)
    weight = dequantize(codes, scales, zeros, 32, torch.float32)
    wide = (weight.abs().amax(1, keepdim=True) / 127).to(torch.float16)
    return ((weight / wide.float()).round() + 128).to(torch.uint8), wide, torch.full_like(wide, 128, dtype=torch.int64)


def test_widths_by_layer_are_read_off_the_tensors(model: Path, tmp_path: Path) -> None:
    rule = {r"+:.*layers\.1\.mlp\.experts\..*": {"bits": 8, "group_size": -1}}
    quantized = open_for(model, save_foreign(model, tmp_path / "foreign", eight_bits, dynamic=rule))
    forms = quantized.manifest.layers
    assert (forms["0"].bits, forms["0"].group_size, forms["1"].bits, forms["1"].group_size) == (4, 32, 8, 64)


def activation_order(tensors: dict[str, Tensor]) -> None:
    tensors[f"{linear_name(1, 3, 'up_proj')}.g_idx"] = torch.arange(64, dtype=torch.int32) % 2


def asymmetric(tensors: dict[str, Tensor]) -> None:
    tensors[f"{linear_name(0, 7, 'down_proj')}.qzeros"].fill_(0x66666666)


def another_width(tensors: dict[str, Tensor]) -> None:
    name = linear_name(1, 0, "down_proj")
    tensors.update({f"{name}.{k}": v for k, v in pack_linear(*_codes(tensors, name), bits=8, group_size=-1).items()})


def later_width(tensors: dict[str, Tensor]) -> None:
    name = linear_name(1, 5, "down_proj")
    tensors.update({f"{name}.{k}": v for k, v in pack_linear(*_codes(tensors, name), bits=8, group_size=-1).items()})


def without(part: str) -> object:
    def remove(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{linear_name(1, 4, 'gate_proj')}.{part}"]

    return remove


def not_quantised(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]
    for layer in range(2):
        for expert in range(8):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                tensors[f"{linear_name(layer, expert, projection)}.weight"] = torch.zeros(64, 64)


def fused(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        del tensors[name]
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(8, 128, 64)


def other_weights(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layers.1.mlp.experts" in name and name.endswith("qweight")]:
        tensors[name] = torch.randint(-(2**31), 2**31 - 1, tensors[name].shape, dtype=torch.int32)


REFUSED: list[tuple[object, dict[str, object], str]] = [
    (activation_order, {"desc_act": True}, r"layers\.1\.mlp\.experts\.3\.up_proj\.g_idx in channel order"),
    (asymmetric, {"sym": False}, r"symmetric codes in model\.layers\.0\.mlp\.experts\.7\.down_proj"),
    (another_width, {}, "one width and group size for all experts of layer 1"),
    (later_width, {}, r"layers\.1\.mlp\.experts\.5\.down_proj"),
    (without("scales"), {}, r"1 missing: model\.layers\.1\.mlp\.experts\.4\.gate_proj\.scales"),
    (without("g_idx"), {}, r"experts\.4\.gate_proj\.g_idx"),
    (not_quantised, {}, "quantised experts in layer 0"),
    (fused, {}, r"experts\.0\.gate_proj\.qweight"),
    (other_weights, {}, r"layers\.1\.mlp\.experts\.0\.gate_proj of .* near that of the model"),
    (None, {"checkpoint_format": "gptq_v2"}, "checkpoint_format 'gptq'.*found 'gptq_v2'"),
    (None, {"quant_method": "awq"}, "quant_method 'gptq'.*found 'awq'"),
    (None, {"pack_dtype": "int8"}, "pack_dtype 'int32'"),
]


@pytest.mark.parametrize(("change", "settings", "named"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    change: object, settings: dict[str, object], named: str, model: Path, tmp_path: Path
) -> None:
    folder = save_foreign(model, tmp_path / "foreign", change, **settings)  # type: ignore[arg-type]
    with pytest.raises(MoespeqError, match=named):
        open_for(model, folder)


def test_a_model_of_another_shape_or_no_quantised_model_at_all(model: Path, tmp_path: Path) -> None:
    foreign = save_foreign(model, tmp_path / "foreign")
    other = save_tiny("qwen2_moe", tmp_path / "other", dtype=torch.bfloat16, hidden_size=96)
    with pytest.raises(MoespeqError, match="gate_proj"):
        open_for(other, foreign)
    more = save_tiny("qwen2_moe", tmp_path / "more", dtype=torch.bfloat16, num_experts=9)
    with pytest.raises(ArtifactError, match="missing"):
        open_for(more, foreign)
    with pytest.raises(ArtifactError, match=r"quant_method 'gptq'.*found None"):
        open_for(model, model)
    with pytest.raises((ArtifactError, InputError), match="no such folder"):
        open_for(model, tmp_path / "nowhere")


def test_the_command_takes_it_and_says_so(moespeq: Command, model: Path, tmp_path: Path) -> None:
    foreign = save_foreign(model, tmp_path / "foreign")
    done = moespeq("pack", "--model", model, "--quantized", foreign, "--out", tmp_path / "pack")
    assert done.status == 0 and "made by another program" in done.stderr, done
