"""Compare contrastive training steps of megaenc and sentence-transformers.

    python benchmarks/embed_train.py --model hf/a --pairs pairs.jsonl --output embed_train.json

The loss of sentence-transformers is CachedMultipleNegativesRankingLoss. Both start from the same
weights in one process and take the same steps on the same pairs: forward, backward and AdamW in
float32, texts tokenized before. sentence-transformers pads each column of a batch to its longest
text, as its collator does, and uses the fastest of --mini-batch-sizes. The losses of the first
batch must agree to 1e-4; then both take turns, first one, then the other. Pairs that repeat a text
are left out, as only megaenc masks false negatives and embeds equal texts once.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import common

from megaenc import flags
from megaenc.console import print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.flags import Bounds, NonNegativeInt, PositiveInt
from megaenc.output_paths import check_output_file

TOLERANCE = 1e-4
"""Maximum relative difference of the losses of the first batch."""


@dataclass(frozen=True)
class EmbedTrainBenchConfig:
    """Flags of the benchmark of contrastive training."""

    model: str = ""
    """Hugging Face or sentence-transformers directory"""
    pairs: tuple[str, ...] = ()
    """training pairs, as `megaenc embed train --data` reads them"""
    output: str = "embed_train.json"
    """JSON file for the results"""
    batch_size: Annotated[int, Bounds(low=2)] = 256
    """pairs of a step"""
    negatives: NonNegativeInt = 0
    """hard negatives of each pair; pairs with fewer are left out"""
    rounds: PositiveInt = 5
    """rounds, in each of which both contenders take a step on the same batch"""
    mini_batch_sizes: tuple[PositiveInt, ...] = (16, 32, 64)
    """texts of a forward pass of sentence-transformers, of which the fastest is used"""
    tokens_per_forward: PositiveInt = 16384
    """maximum tokens of a forward pass of megaenc"""
    max_length: NonNegativeInt = 0
    """maximum tokens of a text; 0: as `megaenc embed train`"""
    threads: PositiveInt = 1
    """CPU threads"""


class OwnContender:
    """megaenc's training step."""

    def __init__(self, config: EmbedTrainBenchConfig, embedder: Any, pairs: list[Any]) -> None:
        from megaenc.embed.config import ContrastiveConfig
        from megaenc.embed.contrastive import ContrastiveData
        from megaenc.embed.train import ContrastiveTrainer

        prefixes = (embedder.config.query_prefix, embedder.config.document_prefix)
        self.data = ContrastiveData.build(
            pairs, embedder.tokenize, prefixes=prefixes, negatives=config.negatives
        )
        same = {
            "batch_size": config.batch_size,
            "tokens_per_forward": config.tokens_per_forward,
            "precision": "fp32",
        }
        self.trainer = ContrastiveTrainer(
            embedder, self.data, ContrastiveConfig(**same, epochs=100.0, negatives=config.negatives)
        )
        self.config = config
        self.number = 0

    def prepare(self, batch: int) -> Callable[[], float]:
        """Return the step on a batch: a function that returns the loss."""
        import numpy as np

        first = batch * self.config.batch_size
        self.batch = self.data.build_batch(np.arange(first, first + self.config.batch_size))
        assert not len(self.batch.masked_rows)
        self.number += 1
        return lambda: self.trainer.step(self.number, self.batch)[0]


class PaddedContender:
    """The training step of sentence-transformers."""

    def __init__(self, config: EmbedTrainBenchConfig, embedder: Any, pairs: list[Any]) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        self.config = config
        self.pairs = pairs
        self.rules = embedder.config
        self.model = (
            SentenceTransformer(config.model, device=str(embedder.backbone.device)).float().train()
        )
        self.model.max_seq_length = embedder.max_length
        if self.model.tokenizer.pad_token is None:
            self.model.tokenizer.pad_token = self.model.tokenizer.eos_token
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-7, fused=True)
        self.mini_batch_size = config.mini_batch_sizes[0]

    def prepare(self, batch: int) -> Callable[[], float]:
        """Return the step on a batch as a function that returns the loss.

        Texts are tokenized and padded before the step.
        """
        import torch
        from sentence_transformers import losses
        from sentence_transformers.util import batch_to_device

        some = self.pairs[batch * self.config.batch_size : (batch + 1) * self.config.batch_size]
        before = self.rules.query_prefix
        prefix = self.rules.document_prefix
        columns = [
            [before + pair.query for pair in some],
            [prefix + pair.document for pair in some],
        ]
        columns += [
            [prefix + pair.negatives[at] for pair in some] for at in range(self.config.negatives)
        ]
        features = [
            batch_to_device(self.model.preprocess(column), self.model.device) for column in columns
        ]
        self.padded = sum(each["attention_mask"].numel() for each in features)
        function = losses.CachedMultipleNegativesRankingLoss(
            self.model, scale=20.0, mini_batch_size=self.mini_batch_size
        )

        def step() -> float:
            loss = function(features, None)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss.item()

        return step


def time_step(step: Callable[[], float]) -> dict[str, float]:
    """Run a step; return its loss, seconds, and CPU seconds of this process."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    cpu_began = time.process_time()
    loss = step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {
        "loss": loss,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
    }


def select_pairs(pairs: list[Any], negatives: int) -> list[Any]:
    """Return the pairs with enough negatives of which no text occurs before."""
    seen: set[str] = set()
    selected = []
    for pair in pairs:
        texts = [pair.query, pair.document, *pair.negatives[:negatives]]
        if len({*texts}) == 2 + negatives and not seen.intersection(texts):
            seen.update(texts)
            selected.append(pair)
    return selected


def measure(config: EmbedTrainBenchConfig) -> dict[str, Any]:
    """Return times of both contenders by round, speeds and ratios.

    Raises:
        InputError: There are too few pairs, or the losses differ.
    """
    import torch
    from torch import nn

    from megaenc.backend.device import detect_backend
    from megaenc.backend.initialize import retain_freed_memory
    from megaenc.embed.embedder import Embedder, read_embedding_config
    from megaenc.embed.pairs import load_pairs

    torch.set_num_threads(config.threads)
    retain_freed_memory()
    backend = detect_backend()
    pairs = select_pairs(load_pairs(config.pairs).pairs, config.negatives)
    batches = len(pairs) // config.batch_size
    if not batches:
        raise InputError(
            f"--pairs: found {len(pairs)} pairs without repeated texts, expected at least "
            f"{config.batch_size}"
        )
    # The model's own attention, as sentence-transformers uses no other.
    rules = dataclasses.replace(read_embedding_config(config.model), attention=None)
    rules = dataclasses.replace(rules, max_length=config.max_length or rules.max_length)
    embedder = Embedder(config.model, rules, device=backend.device, dtype=torch.float32)
    padded = PaddedContender(config, embedder, pairs)
    own = OwnContender(config, embedder, pairs)
    losses = {"megaenc": own.prepare(0)(), "sentence-transformers": padded.prepare(0)()}
    if abs(losses["megaenc"] - losses["sentence-transformers"]) > TOLERANCE * abs(
        losses["megaenc"]
    ):
        raise InputError(
            "the losses of the first batch differ, so that the contenders do not do the same work: "
            f"{losses}"
        )
    trials = {}
    for padded.mini_batch_size in config.mini_batch_sizes:
        trials[padded.mini_batch_size] = time_step(padded.prepare(0))[
            "cpu_seconds" if backend.is_cpu else "seconds"
        ]
    padded.mini_batch_size = min(trials, key=trials.__getitem__)
    print_rank_0(
        "sentence-transformers: "
        + ", ".join(f"{seconds:.2f} s with {size} texts a pass" for size, seconds in trials.items())
    )
    sides = {"megaenc": own, "sentence-transformers": padded}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    tokens = []
    padded_tokens = []
    for round_ in range(config.rounds):
        for name in list(sides)[:: 1 if round_ % 2 == 0 else -1]:
            turns[name].append(time_step(sides[name].prepare(round_ % batches)))
        tokens.append(int(own.data.lengths[own.batch.texts].sum()))
        padded_tokens.append(padded.padded)
        print_rank_0(
            f"round {round_ + 1}: "
            + ", ".join(f"{name} {turns[name][-1]['seconds']:.2f} s" for name in sides)
        )
    matrices = [
        module.weight.numel()
        for module in embedder.backbone.modules()
        if isinstance(module, nn.Linear)
    ]
    peak = backend.peak_flops(torch.float32)
    result: dict[str, Any] = {
        "settings": asdict(config),
        "machine": common.describe_machine(),
        "losses": losses,
        "mini_batch_size": padded.mini_batch_size,
        "tokens": tokens,
        "padded_tokens": padded_tokens,
        "peak_flops": peak,
        "turns": turns,
    }
    for name, rounds in turns.items():
        rate = median(count / each["seconds"] for count, each in zip(tokens, rounds, strict=True))
        result[name] = {
            "seconds": median(each["seconds"] for each in rounds),
            "pairs_per_second": median(config.batch_size / each["seconds"] for each in rounds),
            "tokens_per_second": rate,
            # 6 per weight and token: neither attention nor the repeated forward pass counts.
            "share_of_peak": 6 * sum(matrices) * rate / peak if peak else None,
        }
    for quantity in ("seconds", "cpu_seconds"):
        both = zip(turns["sentence-transformers"], turns["megaenc"], strict=True)
        result[f"{quantity}_ratio"] = median(
            theirs[quantity] / ours[quantity] for theirs, ours in both
        )
    return result


@handle_command_errors
def main(argv: list[str] | None = None) -> None:
    """Parse flags, run the benchmark, write and print its results."""
    silence_libraries()
    config = flags.parse(
        EmbedTrainBenchConfig,
        argv,
        prog="embed_train.py",
        description=__doc__,
        default=EmbedTrainBenchConfig(),
    )
    for name in ("model", "pairs"):
        if not getattr(config, name):
            raise InputError(f"--{name}: missing")
    check_output_file(Path(config.output), "--output")
    result = measure(config)
    common.write_report(config.output, result)
    for name in ("megaenc", "sentence-transformers"):
        side = result[name]
        share = (
            f", {100 * side['share_of_peak']:.0f} % of the GEMM rate"
            if side["share_of_peak"]
            else ""
        )
        print_rank_0(
            f"{name}: {side['seconds']:.2f} s a step, {side['pairs_per_second']:.1f} pairs/s, "
            f"{side['tokens_per_second']:,.0f} tokens/s without padding{share}"
        )
    padding = 100 * (1 - sum(result["tokens"]) / sum(result["padded_tokens"]))
    ratio = result["seconds_ratio"]
    by_cpu_time = result["cpu_seconds_ratio"]
    print_rank_0(f"{padding:.0f} % of sentence-transformers' tokens are padding")
    print_rank_0(f"megaenc is {ratio:.2f} times as fast, {by_cpu_time:.2f} times by CPU time")


if __name__ == "__main__":
    main()
