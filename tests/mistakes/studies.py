"""Mistakes with studies: plan, run, status and report."""

# Command line: part of the one line that it must end in.
ROWS = {
    "megaenc study draw study.yaml": "megaenc study draw: no such command",
    "megaenc study plan nowhere.yaml": "nowhere.yaml",
    "megaenc study plan fifo": "fifo",
    "megaenc study plan empty.yaml": "empty.yaml",
    "megaenc study plan word.yaml": "word.yaml",
    "megaenc study plan list.yaml": "list.yaml",
    "megaenc study plan tab.yaml": "tab.yaml",
    "megaenc study plan latin.yaml": "latin.yaml",
    "megaenc study plan python.yaml": "python.yaml",
    "megaenc study plan bomb.yaml": (
        "bomb.yaml: not YAML: its aliases expand to more than 100,000 values"
    ),
    "megaenc study plan twice.yaml": "key `corpus` is given twice",
    "megaenc study plan study-key.yaml": "modles",
    "megaenc study plan study-nomodels.yaml": "models",
    "megaenc study plan study-mask.yaml": "mask",
    "megaenc study plan study-share.yaml": "clm_share",
    "megaenc study plan study-seeds.yaml": "seeds",
    "megaenc study plan study-rates.yaml": (
        "finetune: field `learning_rates`: found -0.0001, expected more than 0"
    ),
    "megaenc study plan study-pretrain.yaml": "leraning_rate",
    "megaenc study plan study-corpus.yaml": "corpus: found `demo` together with `text`",
    "megaenc study plan study-vocab.yaml": "vocab_size",
    "megaenc study plan nowhere.yaml --picture nothing/deep/plan.png": "nowhere.yaml",
    "megaenc study plan study.yaml --picture new.bmp": "new.bmp",
    "megaenc study plan study.yaml --picture file/new.png": "file/new.png",
    "megaenc study run nowhere.yaml --output new": "nowhere.yaml",
    "megaenc study run study-nocorpus.yaml --output new": "--data-path: missing",
    "megaenc study run text-study.yaml --output new": "nowhere.jsonl",
    "megaenc study plan study-retrieval.yaml": (
        "embed: unknown field `sedes`; did you mean `seeds`?"
    ),
    "megaenc study run study-embed.yaml --output new": (
        "nowhere: no such directory; expected BEIR's layout"
    ),
    "megaenc study run study-pairs.yaml --output new": (
        "nowhere.jsonl: no such file or directory; expected pairs"
    ),
    "megaenc study run study.yaml --output file": "--output file",
    "megaenc study run study.yaml --output /proc/x": "/proc/x",
    "{study} --jobs -1": "--jobs",
    "megaenc study run study.yaml --output nothing/deep --processes 3 --jobs 1": (
        "--jobs: found 1, expected at least 3"
    ),
    "megaenc study run study.yaml --output nothing/deep --slurm": "--slurm: squeue failed",
    "{study} --processes -1": "--processes",
    "{study} --processes 100000": "--processes: found 100,000, expected at most ",
    "{study} --slurm --jobs 2": "--jobs: found together with --slurm",
    "{study} --slurm-gpus 2": "--slurm-gpus: found without --slurm",
    "{study} --data-path c_text_document": "--data-path",
    "{study} --tokenizer tok": "--tokenizer",
    "{study} --slurm-minutes 0": "--slurm-minutes",
    "{study} --slurm-extra account": "--slurm-extra",
    "megaenc study run study-nocorpus.yaml --output new --data-path nowhere --tokenizer tok": (
        "nowhere"
    ),
    "megaenc study run study-nocorpus.yaml --output new --data-path c_text_document": "--tokenizer",
    "megaenc study run study-nocorpus.yaml --output new --data-path c_text_document "
    "--tokenizer nowhere": "nowhere",
    "megaenc study status study.yaml": "--output",
    "megaenc study status study-key.yaml --output new": "modles",
    "megaenc study status study.yaml --output file": "--output file",
    "megaenc study status study.yaml --output mine --only nobody": (
        "--only: found nobody, expected a name in `megaenc study"
    ),
    "megaenc study status study.yaml --output mine --live": "--live",
    "megaenc study status study-steps.yaml --output mine": "field `steps`: found 0",
    "megaenc study report --results nowhere --output nothing/deep": "nowhere",
    "megaenc study report --results file --output new": "file",
    "megaenc study report --results badresults --output new": "results.json",
    "megaenc study report study-key.yaml --results results --output new": "modles",
    "megaenc study report --results results --runs nowhere --output new": "nowhere",
    "megaenc study report --results results --output file": "file",
    "megaenc study report --results results --output mine": "mine",
    "megaenc study report --results results --output new --about hardware": "--about",
    "megaenc study report --published --results results --output new": "--published",
}
