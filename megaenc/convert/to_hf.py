"""Export of a run's checkpoint to a verified Hugging Face directory.

The checkpoint may be saved in any layout; the directory needs no custom code.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megaenc import __version__
from megaenc.atomic_io import atomic_dir
from megaenc.console import print_rank_0
from megaenc.convert.architectures import (
    FAMILIES,
    ModelFamily,
    able_families,
    build_export_config,
    describe_changed_fields,
)
from megaenc.convert.hub_upload import CERTIFICATE, MAIN, HubRepository
from megaenc.convert.model_card import (
    ExportProvenance,
    build_model_card,
    check_license,
    read_last_metrics,
)
from megaenc.convert.naming import export_name
from megaenc.convert.param_mapping import iter_hf_tensors
from megaenc.convert.run_checkpoint import RunCheckpoint, open_run_checkpoint
from megaenc.convert.safetensors_writer import (
    compute_digests,
    parse_dtype,
    parse_size,
    write_shards,
)
from megaenc.convert.sentence_transformers import write_json, write_sentence_layout
from megaenc.convert.tokenizer_io import (
    drop_incompatible_mask_role,
    verify_tokenizer,
    write_tokenizer,
)
from megaenc.convert.verify_export import ProbeBatch, compute_core_outputs, verify_export
from megaenc.data.tokenizer.special_tokens import set_special_tokens
from megaenc.data.tokenizer.tokenizer import load_tokenizer, read_vocabulary
from megaenc.errors import InputError, format_error
from megaenc.hf.checkpoint import GENERATION
from megaenc.hf.model import find_base_class, find_lowest_version, save_hf_config
from megaenc.json_files import read_json_or_empty
from megaenc.objectives import Attention
from megaenc.output_paths import create_parent_dir, refuse_existing
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.run_dir import TOKENIZER_DIR
from megaenc.training.run_init import identity_digest

_BASE_PREFIX = "model."
"""Prefix of the base model's weights in a model with an output layer, of all families."""
_WRITTEN = [name for name, family in FAMILIES.items() if not family.export_as]


def to_hf(
    load: Path, output: Path, *, step: int | None = None, push: str = "", **options: Any
) -> int:
    """Export a checkpoint of a run to a new directory, verify it, and return its step.

    One process calls it, without a process group. It writes config.json, safetensors, tokenizer,
    README.md and the certificate, conversion.json. Output i predicts token i + `prediction_shift`
    of config.json. After an InputError no directory is left, unless only the upload failed.

    Args:
        load: Run directory.
        output: Directory to create, with parents. With `push` it may hold the same export already.
        step: Step of the checkpoint; None: the newest.
        push: Hub repository, ORG/NAME, whose main revision becomes the export; empty: no upload.
        options: Those of `Exporter`, such as `architecture="llama"`.
    """
    if not push:
        refuse_existing(output, "--output")
    run = open_run_checkpoint(load)
    if step is None:
        step = run.newest_step(CheckpointDir(load / "checkpoints"))
    exporter = Exporter(run.at_step(step), **options)
    _write_exports(output, {"": (exporter, step)}, push, {MAIN: output})
    return step


def to_hf_all(load: Path, output: Path, *, push: str = "", **options: Any) -> list[str]:
    """Export all checkpoints of run `load` to directories in `output`.

    Step 0 is exported too if its weights follow from the seed. All directories are written or none.
    Arguments and errors are those of `to_hf`. In the repository `push`, the exports are the
    revisions step0, step1000 and so on; the last one is main, too.

    Returns:
        The directory names (see `export_name`) in the order of steps.
    """
    if not push:
        refuse_existing(output, "--output")
    run = open_run_checkpoint(load)
    steps = run.exportable_steps()
    exporters = {
        step: Exporter(run.at_step(step), **options)
        for step in (steps if run.settings.phases else steps[:1])
    }
    names = [export_name(run, exporters[steps[0]].schedule, step) for step in steps]
    exports = {}
    revisions = {}
    for name, step in zip(names, steps, strict=True):
        exports[name] = (exporters.get(step, exporters[steps[0]]), step)
        revisions[f"step{step}"] = output / name
    _write_exports(output, exports, push, revisions | {MAIN: output / names[-1]})
    return names


def _write_exports(
    output: Path,
    exports: dict[str, tuple["Exporter", int]],
    push: str,
    revisions: dict[str, Path],
) -> None:
    """Write all exports or none, and upload them.

    Args:
        output: Directory to create.
        exports: Exporter and step by directory name in `output`; empty name: `output` itself.
        push: Repository of the Hub; empty: none. Exports that exist are then not written again.
        revisions: Directory in `output` by revision in the repository.
    """
    first_name = next(iter(exports))
    first_exporter = exports[first_name][0]
    # os.path.isfile is False for a path that cannot be accessed, which refuse_existing reports.
    exists = push and os.path.isfile(output / first_name / CERTIFICATE)
    if exists:
        for name, (exporter, step) in exports.items():
            exporter.check_written(output / name, step)
    else:
        refuse_existing(output, "--output")
    if push:
        identity = identity_digest(first_exporter.run.identity)
        repository = HubRepository(push, list(revisions), identity)
    if not exists:
        create_parent_dir(output, "--output")
        with atomic_dir(output) as directory:
            for name, (exporter, step) in exports.items():
                (directory / name).mkdir(exist_ok=True)
                exporter.write(directory / name, name or output.resolve().name, step)
        first_exporter.report_changed_fields()
    if push:
        repository.upload(revisions)


def select_export_family(
    architecture: str | None, run: RunCheckpoint
) -> tuple[ModelFamily, Attention]:
    """Return the family and the attention of an export.

    Decoder families that are given as a `model_type` are causal, all others bidirectional. Whether
    a family that is given supports the model is not checked.

    Args:
        architecture: `model_type` of a family, such as llama; "source" for the family that the
            model was converted from (EuroBERT if it was not); None for EuroBERT unless only another
            family, preferably the source's, supports the model.

    Raises:
        InputError: The family is unknown.
    """
    if architecture in _WRITTEN:
        family = FAMILIES[architecture]
        return family, Attention.BIDIRECTIONAL if family.is_encoder else Attention.CAUSAL
    if architecture not in (None, "source"):
        raise InputError(
            f"--as {architecture}: unknown family, expected source or one of {', '.join(_WRITTEN)}"
        )
    source = FAMILIES[run.origin.family if run.origin else "eurobert"].export_family
    order = (FAMILIES["eurobert"], source, *(FAMILIES[name] for name in _WRITTEN))
    able = (
        family
        for family in order
        if not family.unsupported_feature(run.model, Attention.BIDIRECTIONAL)
    )
    return source if architecture else next(able, FAMILIES["eurobert"]), Attention.BIDIRECTIONAL


class Exporter:
    """Exporter of a run's checkpoints to Hugging Face directories.

    All exports share family, tokenizer, config and schedule. The constructor takes `run`, a run at
    a step (`RunCheckpoint.at_step`), and options of `megaenc convert to-hf`: `architecture` (family
    to write; None to choose it), `dtype` ("run", "bf16" or "fp32"), `max_shard_size` (text such as
    5GB), `sentence_transformers` and `encoder_only` (add files, or leave out the output layer), and
    `license` for the model card. It checks them (InputError), and reads no weights. `write` exports
    a step, `check_written` checks an export that exists.
    """

    def __init__(
        self,
        run: RunCheckpoint,
        architecture: str | None = None,
        dtype: str = "run",
        max_shard_size: str = "5GB",
        sentence_transformers: bool = False,
        encoder_only: bool = False,
        license: str = "unknown",
    ) -> None:
        """Check the options and build tokenizer and config, before any weight is read.

        Args:
            run: Run, at the step to export (`RunCheckpoint.at_step`).
            architecture: See `select_export_family`.
            dtype: Dtype of the weights: run, bf16 or fp32.
            max_shard_size: Maximum size of a weight file, such as 5GB (see `parse_size`).
            sentence_transformers: Also write its files, with mean pooling in float32.
            encoder_only: Leave out the output layer.
            license: Identifier of the Hub for the model card.

        Raises:
            InputError: An option is wrong.
        """
        self.run = run
        self.license = license
        self.sentences = sentence_transformers
        self.encoder_only = encoder_only
        self.max_shard_bytes = parse_size(max_shard_size, "--max-shard-size")
        check_license(license)
        self.dtype = parse_dtype(dtype, "run", run.dtype)
        self.family, self.attention = select_export_family(architecture, run)
        self.tokenizer = load_tokenizer(run.directory / TOKENIZER_DIR, "--load")
        vocabulary = read_vocabulary(self.tokenizer)
        run.check_vocabulary(vocabulary)
        self.tokenizer.model_max_length = run.seq_length
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.sep_token
        self.schedule = run.schedule(vocabulary)
        self.config = build_export_config(
            self.family,
            self.attention,
            run.model,
            vocab_size=run.vocab_size,
            context=run.context,
            source=run.config_fields,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
        )
        if encoder_only:
            self.config.architectures = [find_base_class(self.config).__name__]
        drop_incompatible_mask_role(self.config.model_type, self.tokenizer)
        self.special_tokens = run.special_tokens
        if self.special_tokens is not None:
            # An export with causal attention continues texts, so that it does not end them.
            if self.attention == Attention.CAUSAL:
                self.special_tokens = dataclasses.replace(self.special_tokens, after=())
            self.tokenizer = set_special_tokens(self.tokenizer, self.special_tokens)

    def write(self, directory: Path, name: str, step: int) -> None:
        """Write and verify the export of one step in `directory`.

        One process calls it, without a process group.

        Args:
            directory: Existing empty directory.
            name: Name of the model in its card.
            step: Step of the checkpoint.

        Raises:
            InputError: The checkpoint is unusable, its output layer does not fit, or the export
                differs from the run's model; `directory` then has files of it.
        """
        run = self.run
        probe = ProbeBatch.build(run.vocab_size, run.context, run.model.window_size)
        tokens = self._write_tokenizer(directory)
        with run.load_encoder(step, len(probe.documents[0])) as (_, encoder):
            provenance = self._provenance(step)
            objective = provenance.select_objective(self.attention)
            if objective.classes and not self.encoder_only:
                raise InputError(
                    f"step {provenance.step} of {self.run.directory}: "
                    f"trained last on {objective.describe()}, whose output layer "
                    f"predicts {objective.classes} classes and no tokens; expected --encoder-only, "
                    "which leaves it out"
                )
            self.config.prediction_shift = objective.shift
            save_hf_config(self.config, directory)
            if self.attention == Attention.CAUSAL and run.generation:
                write_json(directory / GENERATION, run.generation)
            for parameter in encoder.parameters():  # one by one, so that memory holds them once
                parameter.data = parameter.data.to(self.dtype)
            parameters = dict(encoder.named_parameters())
            self._check_output_bias(parameters.get("output_layer.bias"), step)
            empty = {
                name: torch.empty_like(parameter, device="meta")
                for name, parameter in parameters.items()
            }
            shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors(empty)}
            digests = write_shards(
                directory, shapes, self.dtype, self._tensors(parameters), self.max_shard_bytes
            )
            expected = compute_core_outputs(encoder, probe, self.attention, self.encoder_only)
            del encoder, parameters  # before verification loads another model
        (directory / "README.md").write_text(
            build_model_card(name, provenance, self.attention), encoding="utf-8"
        )
        if self.sentences:
            write_sentence_layout(directory, run.model.hidden_size, run.seq_length)
        try:
            proof = verify_export(
                directory, probe, expected, self.attention, digests, run.model.layer_windows
            )
        except InputError as error:
            raise InputError(
                f"step {step} of {run.directory}: the export is not the model: {error}; "
                "nothing is written"
            ) from None
        certificate = self._origin(step) | proof | {"tokenizer": tokens}
        write_json(directory / CERTIFICATE, certificate, indent=1)

    def check_written(self, directory: Path, step: int) -> None:
        """Raise InputError if `directory` does not hold this export of `step`.

        Its certificate must have the same run and options, and the digests of its weights.
        """
        if not os.path.isfile(directory / CERTIFICATE):
            raise InputError(
                f"--output {directory}: missing, expected the export of step {step} next to the "
                "others; choose another name, or remove them to export all steps again"
            )
        certificate = read_json_or_empty(directory / CERTIFICATE)
        for name, expected in self._origin(step).items():
            if certificate.get(name) != expected:
                raise InputError(
                    f"--output {directory}: exists already, found an export with {name} "
                    f"{certificate.get(name)}, expected {expected}; remove it or choose another "
                    "name"
                )
        try:
            digests = compute_digests(directory)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"--output {directory}: damaged weights ({format_error(error)}); remove it or "
                "choose another name"
            ) from None
        if digests != certificate.get("sha256"):
            raise InputError(
                f"--output {directory}: exists already, found other weights than {CERTIFICATE} "
                "names; remove it or choose another name"
            )

    def _origin(self, step: int) -> dict[str, Any]:
        """Return the entries of conversion.json that this export has before it is written."""
        return {
            "megaenc": __version__,
            "run": self.run.directory.resolve().name,
            "step": step,
            "family": self.family.model_type,
            "identity": identity_digest(self.run.identity),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": str(self.attention),
            "license": self.license,
            "max_shard_bytes": self.max_shard_bytes,
            "encoder_only": self.encoder_only,
            "sentence_transformers": self.sentences,
        }

    def report_changed_fields(self) -> None:
        """Print each field of the original model's config.json that the export changes.

        Only the fields for classifier pooling and special token ids are compared, and only if the
        run comes from a Hugging Face model.
        """
        for line in describe_changed_fields(self.config, self.run.config_fields, self.tokenizer):
            print_rank_0(line)

    def _check_output_bias(self, bias: Tensor | None, step: int) -> None:
        """Raise InputError if the output layer has a nonzero bias and the family has none."""
        if (
            bias is None
            or self.encoder_only
            or self.family.without_output_bias(self.run.model).output_layer_bias
            or not bias.any()
        ):
            return
        able = able_families(self.run.model, self.attention)
        raise InputError(
            f"--as {self.family.model_type}: has no bias of the output layer, "
            f"and step {step} has one of up to {float(bias.abs().max()):.2g}; "
            + (f"expected --as {' or '.join(able)}" if able else "expected zeros")
        )

    def _write_tokenizer(self, directory: Path) -> dict[str, Any]:
        """Write the tokenizer, verify it, and return its entry of conversion.json."""
        # The config influences the class with which transformers loads the tokenizer.
        save_hf_config(self.config, directory)
        write_tokenizer(self.tokenizer, directory)
        try:
            proof = verify_tokenizer(
                directory, self.tokenizer, self.config.model_type, self.special_tokens
            )
        except InputError as error:
            family = self.config.model_type
            able = [
                name
                for name in _WRITTEN
                if name != family
                and not FAMILIES[name].unsupported_feature(self.run.model, self.attention)
            ]
            alternatives = f"; expected --as {' or '.join(able)}" if able else ""
            raise InputError(f"--as {family}: {error}{alternatives}; nothing is written") from None
        return proof | {"fingerprint": self.run.identity["tokenizer"]}

    def _provenance(self, step: int) -> ExportProvenance:
        run = self.run
        settings = run.settings
        special = run.special_tokens
        return ExportProvenance(
            settings.schedule_text,
            self.schedule,
            step,
            settings.total_iters,
            settings.tokens_after(step),
            run.start,
            parameters=run.model.parameter_count(run.vocab_size),
            data=str(run.identity.get("data", "")),
            tokenizer=str(run.identity.get("tokenizer", "")),
            metrics=read_last_metrics(run.directory, step),
            license=self.license,
            sentences=self.sentences,
            architecture=self.config.architectures[0],
            encoder_only=self.encoder_only,
            transformers=find_lowest_version(self.config),
            dtype=str(self.dtype).removeprefix("torch."),
            converted=run.converted and not run.merge,
            added_token=run.added_token,
            merge=run.merge,
            document=special.describe(self.tokenizer)
            if special is not None and special.count
            else "",
        )

    def _tensors(self, parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of each weight of the export.

        Without an output layer the names are those in the base model.
        """
        run = self.run
        like = next(iter(parameters.values()))
        biases = (
            (name, like.new_zeros(run.model.hidden_size))
            for name in self.family.zero_bias_names(run.model)
        )
        model = self.family.without_output_bias(run.model)
        tensors = iter_hf_tensors(parameters, model, run.vocab_size, self.family.model_type)
        for name, tensor in itertools.chain(tensors, biases):
            if not self.encoder_only:
                yield name, tensor
            elif name.startswith(_BASE_PREFIX):
                yield name.removeprefix(_BASE_PREFIX), tensor
