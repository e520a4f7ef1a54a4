"""The stage itself: layer after layer into a folder, resumable after any stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moespeq_cli.device import device_memory, pick_device
from moespeq_cli.quantize import folder as files
from moespeq_cli.quantize.calibrate import Sequences, choose_seq_len, make_sequences, read_texts
from moespeq_cli.quantize.comparison import Comparison, dequantized_layer
from moespeq_cli.quantize.hessian import TokenLog
from moespeq_cli.quantize.layer import LayerQuantizer, LayerResult
from moespeq_cli.quantize.plan import Plan, QuantizeOptions, make_plan, plain_format, plan_lines
from moespeq_cli.quantize.report import LinearReport, build_report, mean_output_error, sensitive_report
from moespeq_cli.quantize.sensitive import SensitiveChoice, choose_layers
from moespeq_cli.quantize.solver import make_solver
from runtime.artifacts.checkpoint import Checkpoint
from runtime.artifacts.folder import check_free_space, claim_output, refuse_other_kind, write_guard
from runtime.artifacts.manifest import (
    PROGRESS,
    FileEntry,
    Journal,
    check_files,
    is_finished,
    load_manifest,
    save_manifest,
    write_json,
)
from runtime.artifacts.quantized import Calibration, LayerFormat, QuantizedManifest
from runtime.errors import ArtifactError, InputError
from runtime.model.families import LayerExperts, MoeSpec, describe, memory_name
from runtime.model.loader import require_supported
from runtime.model.stream import LayerStream, StreamedLayer
from runtime.model.tokenizer import load_tokenizer

REPORT = "report.json"
COMPARED = "compared"  # the step that says what the sensitive layers bought


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that is settled before the first byte is written."""

    options: QuantizeOptions
    checkpoint: Checkpoint
    spec: MoeSpec
    plan: Plan
    sequences: Sequences
    device: torch.device
    choice: SensitiveChoice | None = None  # of a profile; its layers are the options' sensitive ones

    @property
    def out(self) -> Path:
        """The folder to fill."""
        return self.options.out

    @property
    def settings(self) -> dict[str, str]:
        """What the result depends on; work begun with other settings is not gone on with."""
        options, spec = self.options, self.spec
        return {
            "model": self.checkpoint.digest,
            "calibration text": self.sequences.digest,
            "--bits": str(options.bits),
            "--group-size": str(options.group_size),
            "--damp-percent": str(options.damp_percent),
            "--method": options.method,
            "--solver": options.solver,
            "--scale-search": str(options.searches_scales).lower(),
            "--token-damping": str(options.damps_by_tokens).lower(),
            "--min-tokens": str(options.min_tokens),
            "--skip-modules": ",".join(options.skip_modules),
            "--sensitive-layers": ",".join(map(str, sorted(options.sensitive_layers))),
            "--sensitive-bits": str(options.sensitive_bits) if options.sensitive_layers else "",
            "--device": self.device.type,
            "experts": f"{len(spec.moe_layers)} layers x {spec.num_experts}",
        }


def prepare(options: QuantizeOptions) -> Work:
    """Open the model, read the text and settle the plan; nothing is written.

    Raises:
        InputError, ShapeError: whatever would make the work fail later.
    """
    options.check()
    checkpoint = Checkpoint.open(options.model)
    if checkpoint.config.get("quantization_config"):
        raise InputError(
            expected=f"an unquantised model in {checkpoint.folder}",
            found="a quantization_config in its config.json",
            mend="pass the model that it was made from",
        )
    if options.out.resolve() == checkpoint.folder.resolve():
        raise InputError(expected="--out apart from the model", found=str(options.out), mend="choose another --out")
    spec = describe(checkpoint)
    require_supported(checkpoint, spec)
    choice = None
    if options.profile is not None:
        choice = choose_layers(options.profile, options.share, checkpoint.digest)
        options = replace(options, sensitive_layers=choice.layers)
    device = pick_device(options.device)
    if options.method == "gptq":
        make_solver(options.solver)
    tokenizer = load_tokenizer(checkpoint.folder)
    config = checkpoint.config
    seq_len = choose_seq_len(options.seq_len, config.get("max_position_embeddings"))
    source, texts = read_texts(options.data, tokenizer, options.samples)
    sequences = make_sequences(
        source, texts, tokenizer, options.samples, seq_len, options.seed, int(config.get("vocab_size", 1 << 31))
    )
    return Work(options, checkpoint, spec, make_plan(checkpoint, spec, options, sequences), sequences, device, choice)


def quantize(
    options: QuantizeOptions,
    say: Callable[[str], None] = lambda text: None,
    advance: Callable[[], None] = lambda: None,
    work: Work | None = None,
) -> QuantizedManifest:
    """Make the quantized folder, or go on with one that was begun with the same settings.

    Args:
        options: the user's choices.
        say: is told the plan and what happens.
        advance: called as each decoder layer is done.
        work: what `prepare` gave, where that was called already.

    Raises:
        MoespeqError: input that cannot be used, another result in the folder, a full disk.
    """
    work = work or prepare(options)
    options = work.options
    for line in plan_lines(work.plan, options, work.sequences):
        say(line)
    out = work.out
    _refuse_strangers(out)
    if not options.force and is_finished(out):
        return _already_there(work, say)
    done_bytes = sum(path.stat().st_size for path in out.glob("model-*.safetensors"))
    check_free_space(out, work.plan.disk_bytes - done_bytes, "the quantized model")
    with claim_output(out, force=options.force), write_guard("the quantized model", out), device_memory():
        journal = Journal(out, work.settings)
        _check_done(out, journal)
        shards = files.Shards.plan(work.checkpoint, work.spec)
        _copy_dense(work, shards, journal)
        _quantize_layers(work, shards, journal, say, advance)
        return _finish(work, shards, journal)


def _refuse_strangers(out: Path) -> None:
    """Keep away from a folder that holds something else, --force or not."""
    if out.is_dir() and not is_finished(out) and not (out / PROGRESS).is_file():
        others = sorted(path.name for path in out.iterdir() if path.name not in (".lock", f"{PROGRESS}.part"))
        if others:
            raise ArtifactError(
                expected=f"a new or empty folder, or an earlier quantized one, at {out}",
                found=f"other files ({', '.join(others[:3])})",
                mend="choose another --out",
            )
    refuse_other_kind(out, QuantizedManifest.KIND)


def _already_there(work: Work, say: Callable[[str], None]) -> QuantizedManifest:
    out = work.out
    manifest = load_manifest(out, QuantizedManifest)
    for name in sorted({*manifest.settings, *work.settings}, key=lambda name: (name != "model", name)):
        if manifest.settings.get(name) != work.settings.get(name):
            raise ArtifactError(
                expected=f"{name} = {manifest.settings.get(name)!r:.80}, with which {out} was made",
                found=f"{work.settings.get(name)!r:.80}",
                mend="choose another --out, or replace the result with --force",
            )
    check_files(out, manifest.files, "quantized")
    (out / PROGRESS).unlink(missing_ok=True)
    say("already there, made with the same settings; nothing to do")
    return manifest


def _check_done(out: Path, journal: Journal) -> None:
    done = {record["file"]: FileEntry(**record["entry"]) for record in journal.done.values() if "entry" in record}
    check_files(out, done, "quantized", contents=True)


def _copy_dense(work: Work, shards: files.Shards, journal: Journal) -> None:
    for place, names in enumerate(shards.dense):
        step = f"copied {place}"
        if step not in journal.done:
            tensors = {memory_name(work.spec, name): work.checkpoint.read(name) for name in names}
            _save_shard(work.out, shards.dense_file(place), tensors, journal, step)


def _save_shard(
    out: Path,
    file: str,
    tensors: dict[str, torch.Tensor],
    journal: Journal,
    step: str,
    before_mark: Callable[[], None] = lambda: None,
    **record: Any,
) -> None:
    files.save_tensors(out / file, tensors)
    before_mark()
    entry = asdict(FileEntry.of(out / file))
    journal.mark(step, {"file": file, "entry": entry, "sizes": files.sizes(tensors), **record})


def _quantize_layers(
    work: Work, shards: files.Shards, journal: Journal, say: Callable[[str], None], advance: Callable[[], None]
) -> None:
    """Run the calibration tokens through the layers, quantising those with experts.

    The states handed on are those of the unquantised model, so a layer's result depends on no other layer's.
    """
    options, spec = work.options, work.spec
    last = spec.moe_layers[-1]
    first = 0
    while _step(first) in journal.done:
        first += 1
        advance()
    if first > last and (not options.sensitive_layers or COMPARED in journal.done):
        return
    if first:
        say(f"going on at layer {min(first, last)} of {last}")
    quantizer = LayerQuantizer(make_solver(options.solver) if options.method == "gptq" else None, work.device)
    stream = LayerStream(work.checkpoint, spec, torch.float32, work.device)
    hidden = stream.embed(work.sequences.ids)
    comparison = Comparison.begin(hidden) if options.sensitive_layers else None
    if first:
        kept = files.load_hidden(work.out, first)
        hidden = kept.pop("")
        if comparison is not None:
            comparison.states = kept
    for layer in stream.layers(range(first, last + 1)):
        layer_id = layer.layer_id
        log = TokenLog(spec.num_experts)
        hidden = layer.forward(hidden, log)
        layer.forget_copies()
        linears = None
        if layer.experts is not None:
            result, plain = _quantize_layer(work, quantizer, layer, log)
            if comparison is not None:
                form = work.plan.formats[layer_id]
                chosen = _dequantizer(work, layer_id, form, result)
                other = None if plain is None else _dequantizer(work, layer_id, plain_format(form, options), plain)
                comparison.forward(layer, chosen, other)
            linears = result.linears
        elif comparison is not None:
            comparison.forward(layer)

        def keep_states(after: int = layer_id + 1, states: list[torch.Tensor] = hidden) -> None:
            if after <= last or comparison is not None:
                others = None if comparison is None else comparison.states
                files.save_hidden(work.out, after, states, others)

        if linears is not None:
            rows: dict[str, Any] = {"linears": [asdict(linear) for linear in linears]}
            if plain is not None:
                rows["plain"] = [asdict(linear) for linear in plain.linears]
            _save_shard(
                work.out, shards.layer_file(layer_id), result.tensors, journal, _step(layer_id), keep_states, **rows
            )
            say(_layer_line(layer_id, linears))
            del result, plain  # a layer's packed tensors, before the next layer comes
        else:
            keep_states()
            journal.mark(_step(layer_id), {})
        files.hidden_file(work.out, layer_id).unlink(missing_ok=True)
        advance()
    if comparison is not None:
        hidden = hidden[: comparison.num_sequences]
        for layer in stream.layers(range(last + 1, spec.num_layers)):  # dense layers behind the last one with experts
            hidden = layer.forward(hidden)
            comparison.forward(layer)
        journal.mark(COMPARED, comparison.acceptance(stream, hidden))


def _quantize_layer(
    work: Work, quantizer: LayerQuantizer, layer: StreamedLayer, log: TokenLog
) -> tuple[LayerResult, LayerResult | None]:
    """The layer as it is to be and, if it is a sensitive one, as it would be otherwise."""
    assert layer.experts is not None and layer.math is not None
    options, form = work.options, work.plan.formats[layer.layer_id]

    def solved(form: LayerFormat) -> LayerResult:
        settings = options.solver_settings(form.bits, form.group_size)
        assert layer.experts is not None and layer.math is not None
        return quantizer.quantize(layer.layer_id, layer.experts, layer.math, log, form, settings)

    sensitive = layer.layer_id in options.sensitive_layers
    return solved(form), solved(plain_format(form, options)) if sensitive else None


def _dequantizer(work: Work, layer_id: int, form: LayerFormat, result: LayerResult) -> Callable[[], LayerExperts]:
    return lambda: dequantized_layer(result.tensors, layer_id, form, work.spec.num_experts, torch.float32)


def _step(layer_id: int) -> str:
    return f"layer {layer_id}"


def _layer_line(layer_id: int, linears: list[LinearReport]) -> str:
    rounded = sum(linear.method == "rtn" for linear in linears)
    fewest = min(linear.tokens for linear in linears)
    text = f"layer {layer_id}: output error {mean_output_error(linears):.4f}, {fewest} tokens or more an expert"
    return text + (f", {rounded} of {len(linears)} linears rounded to nearest" if rounded else "")


def _finish(work: Work, shards: files.Shards, journal: Journal) -> QuantizedManifest:
    out, options, spec = work.out, work.options, work.spec
    records = [journal.done[f"copied {place}"] for place in range(len(shards.dense))]
    records += [journal.done[_step(layer_id)] for layer_id in spec.moe_layers]
    linears = [LinearReport(**row) for record in records for row in record.get("linears", ())]
    if len(linears) != work.plan.linears:
        raise ArtifactError(
            expected=f"{work.plan.linears} linears ({work.settings['experts']} experts x 3 projections)",
            found=f"{len(linears)} in {out / PROGRESS}",
            mend="start over with --force",
        )
    names = files.copy_companions(work.checkpoint.folder, out)
    names += files.write_configuration(out, work.checkpoint, files.quantization_config(work.plan, options))
    names.append(files.write_index(out, {record["file"]: record["sizes"] for record in records}))
    with write_guard("the report", out):
        body = build_report(linears, options.min_tokens, work.settings)
        if options.sensitive_layers:
            plain = [LinearReport(**row) for record in records for row in record.get("plain", ())]
            acceptance = journal.done[COMPARED]
            body["sensitive"] = sensitive_report(
                spec, options, work.plan.formats, linears, plain, acceptance, work.choice
            )
        write_json(out / REPORT, body)
    names.append(REPORT)
    manifest = QuantizedManifest(
        model_digest=work.checkpoint.digest,
        model_type=spec.model_type,
        num_experts=spec.num_experts,
        hidden_size=spec.hidden_size,
        moe_intermediate_size=spec.moe_intermediate_size,
        dtype=spec.dtype,
        has_bias=spec.has_bias,
        method=options.method,
        solver=options.solver,
        bits=options.bits,
        group_size=options.group_size,
        damp_percent=options.damp_percent,
        scale_search=options.searches_scales,
        layers={str(layer_id): form for layer_id, form in work.plan.formats.items()},
        calibration=_calibration(work.sequences),
        quantized_linears=sum(linear.method != "kept" for linear in linears),
        kept_linears=sum(linear.method == "kept" for linear in linears),
        rounded_linears=sum(linear.method == "rtn" for linear in linears),
        mean_output_error=mean_output_error(linears),
        settings=work.settings,
        files={record["file"]: FileEntry(**record["entry"]) for record in records} | files.entries(out, names),
    )
    for leftover in (*out.glob("hidden-*"), *out.glob("*.part")):
        leftover.unlink()
    with write_guard("the manifest", out):
        save_manifest(out, manifest)
    journal.finish()
    return manifest


def _calibration(sequences: Sequences) -> Calibration:
    return Calibration(
        source=sequences.source,
        sequences=len(sequences.ids),
        tokens=sequences.tokens,
        seq_len=sequences.seq_len,
        seed=sequences.seed,
        digest=sequences.digest,
    )
