"""Train the demo model and write it as a transformers checkpoint.

    python -m moespeq_cli.demo.train --check                     # the training model against transformers, on the CPU
    python -m moespeq_cli.demo.train --tokens tokens --out run --budget-s 478

`--tokens` is a folder made by `python -m moespeq_cli.demo.corpus`. Training stops by the wall clock or, with
`--steps`, after so many steps; the learning rate follows a cosine over either. Every batch holds rows of all domains,
and the load-balancing loss is taken over the whole batch: experts are kept alive over the mixture, but are free to
specialise by domain. The result is in `OUT/checkpoint` (copy the tokenizer's files beside it), the log in
`OUT/train_log.jsonl`. docs/demo_model.md has the whole recipe.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from moespeq_cli.demo.export import check_agreement, save_checkpoint
from moespeq_cli.demo.network import EXPERT_MODES, DemoModel, Losses, Shape
from moespeq_cli.demo.rows import TokenStream, read_tokens

DOMAINS = ("maths", "code", "prose")
SHARES = {"maths": 0.20, "code": 0.30, "snippets": 0.13, "prose": 0.37}  # of the rows of a batch
ALIGNED = ("maths", "snippets")  # short documents: their rows begin with a whole one


@dataclass(frozen=True, slots=True)
class Settings:
    """The recipe; the defaults made the embedded checkpoint."""

    budget_s: float = 478.0
    steps: int = 0  # train for so many steps instead of budget_s seconds
    experts: str = "grouped"
    compile: bool = True
    learning_rate: float = 5e-3
    final_rate: float = 0.01  # end of the cosine, as a share of learning_rate
    warmup_steps: int = 300
    weight_decay: float = 0.1
    balance_loss: float = 0.003  # weight of each layer's load-balancing loss
    z_loss: float = 1e-4  # weight of each layer's router z-loss
    batch_tokens: int = 131_072
    row_tokens: int = 1024
    long_row_tokens: int = 2048
    long_share: float = 0.15  # last share of the training, on rows of long_row_tokens
    log_every: int = 100
    seed: int = 1


class Log:
    """JSON lines, in a file and on stdout, each with the seconds since the start."""

    def __init__(self, file: IO[str]) -> None:
        self.file, self.start = file, time.monotonic()

    def __call__(self, **facts: object) -> None:
        """Write one line."""
        line = json.dumps({**facts, "elapsed_s": round(time.monotonic() - self.start, 1)})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


class Trainer:
    """Model, optimizer and data of one run."""

    def __init__(self, settings: Settings, tokens: Path, device: str, shape: Shape) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.device = settings, device
        self.streams = {
            name: TokenStream(read_tokens(tokens, f"{name}.train"), device, name in ALIGNED, seed)
            for seed, name in enumerate(SHARES)
        }
        self.held_out = {
            name: TokenStream(read_tokens(tokens, f"{name}.heldout"), device, name == "maths", 9) for name in DOMAINS
        }
        self.model = DemoModel(shape, settings.experts).to(device)
        if settings.compile:
            self.model.compile_layers()
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-9, fused=device == "cuda")

    def step(self, row_tokens: int, rate: float | None) -> tuple[Tensor, Tensor]:
        """One step at a learning rate; None only warms up the compiler.

        Returns the losses of the three domains with the mean balance loss and the gradient's norm, float32 [5], and
        every expert's load, [layers, num_experts], the domains weighted alike.
        """
        counts = split_rows(max(len(SHARES), self.settings.batch_tokens // row_tokens))
        rows = torch.cat([self.streams[name].rows(count, row_tokens) for name, count in counts.items()])
        losses: Losses = self.model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), torch.bfloat16)
        total = losses.rows.mean() + self.settings.balance_loss * losses.balance + self.settings.z_loss * losses.z
        total.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        parts = domain_slices(counts)
        by_domain = [losses.rows[part].mean().detach() for part in parts.values()]
        load = torch.stack([losses.loads[:, part].mean(1) for part in parts.values()]).mean(0)
        return torch.stack([*by_domain, losses.balance.detach() / len(self.model.layers), norm]), load

    @torch.no_grad()
    def held_out_losses(self, rows: int = 16, batches: int = 4) -> dict[str, float]:
        """Mean loss on held-out rows of every domain, not compiled, as these sizes occur only here."""
        losses = {}
        with torch.compiler.set_stance("force_eager"):
            for name, stream in self.held_out.items():
                parts = [stream.rows(rows, self.settings.row_tokens) for _ in range(batches)]
                values = [self.model(part[:, :-1], part[:, 1:], torch.bfloat16).rows.mean() for part in parts]
                losses[name] = torch.stack(values).mean().item()
        return losses

    def wait(self) -> None:
        """Let the device finish, so that the clock tells the truth."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def train(settings: Settings, tokens: Path, out: Path, device: str, shape: Shape | None = None) -> DemoModel:
    """Train, log to `OUT/train_log.jsonl` and write `OUT/checkpoint`; returns the trained model."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    with open(out / "train_log.jsonl", "w", encoding="utf-8") as file:
        log = Log(file)
        trainer = Trainer(settings, tokens, device, shape or Shape())
        parameters = sum(p.numel() for p in trainer.model.parameters())
        stream_tokens = {name: len(stream.ids) for name, stream in trainer.streams.items()}
        log(event="start", parameters=parameters, tokens=stream_tokens, **asdict(settings))
        steps = _train_steps(trainer, log)
        epochs = {name: round(stream.epochs, 2) for name, stream in trainer.streams.items()}
        log(event="end", step=steps, epochs=epochs, held_out=trainer.held_out_losses())
    save_checkpoint(trainer.model, out / "checkpoint")
    return trainer.model


def _train_steps(trainer: Trainer, log: Log) -> int:
    """Step until the budget is spent; returns the number of steps."""
    settings = trainer.settings
    for row_tokens in {settings.row_tokens, settings.long_row_tokens} if settings.compile else ():
        for _ in range(2):  # compile before the clock starts
            trainer.step(row_tokens, None)
    trainer.wait()
    start = window_start = time.monotonic()
    window: list[Tensor] = []
    step, done = 0, 0.0
    while done < 1:
        row_tokens = settings.long_row_tokens if done >= 1 - settings.long_share else settings.row_tokens
        rate = learning_rate(settings, step, done)
        losses, load = trainer.step(row_tokens, rate)
        window.append(losses)
        step += 1
        if step % settings.log_every == 0:
            *by_domain, balance, norm = torch.stack(window).mean(0).tolist()  # also waits for the device
            speed = len(window) * settings.batch_tokens / (time.monotonic() - window_start)
            log(
                step=step,
                done=round(done, 4),
                rate=round(rate, 6),
                row_tokens=row_tokens,
                tokens_per_s=int(speed),
                loss={name: round(loss, 4) for name, loss in zip(DOMAINS, by_domain, strict=True)},
                balance=round(balance, 4),
                gradient_norm=round(norm, 3),
                load=[round(load.min().item(), 3), round(load.max().item(), 3)],
            )
            window, window_start = [], time.monotonic()
        elif step % 10 == 0:
            trainer.wait()
        done = step / settings.steps if settings.steps else (time.monotonic() - start) / settings.budget_s
    return step


def learning_rate(settings: Settings, step: int, done: float) -> float:
    """Linear warm-up by steps times a cosine over the share of the training that is done."""
    warm = min(1.0, (step + 1) / settings.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return settings.learning_rate * warm * (settings.final_rate + (1 - settings.final_rate) * cosine)


def split_rows(rows: int) -> dict[str, int]:
    """How many rows of a batch come from each stream; prose takes what rounding leaves, none is left out."""
    counts = {name: max(1, int(rows * share)) for name, share in SHARES.items()}
    counts["prose"] = max(1, rows - sum(counts.values()) + counts["prose"])
    return counts


def domain_slices(counts: dict[str, int]) -> dict[str, slice]:
    """The rows of each domain in a batch; functions belong to code."""
    maths = counts["maths"]
    code = maths + counts["code"] + counts["snippets"]
    return {"maths": slice(0, maths), "code": slice(maths, code), "prose": slice(code, code + counts["prose"])}


def parser() -> argparse.ArgumentParser:
    """The command line: an option for every setting."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--check", action="store_true", help="compare with transformers and stop")
    command.add_argument("--tokens", type=Path, default=Path("tokens"), help="folder made by the corpus commands")
    command.add_argument("--out", type=Path, default=Path("run"))
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in asdict(Settings()).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            command.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
        else:
            choices = EXPERT_MODES if name == "experts" else None
            command.add_argument(option, type=type(value), default=value, choices=choices)
    return command


def main(argv: list[str] | None = None) -> None:
    """Train, or check and exit 1 where the two models differ by more than rounding."""
    args = vars(parser().parse_args(argv))
    if args["check"]:
        agreement = check_agreement()
        print(json.dumps({**asdict(agreement), "close": agreement.close}, indent=2))
        sys.exit(0 if agreement.close else 1)
    settings = Settings(**{name: args[name] for name in asdict(Settings())})
    train(settings, args["tokens"], args["out"], args["device"])


if __name__ == "__main__":
    main()
