"""Mistakes in pretraining and its estimate."""

# Command line: part of the one line that it must end in.
ROWS = {
    "{train} --learning-rate 1e-3": "--learning-rate",
    "{train} --gpu h100": "--gpu: found without --dry-run",
    "megaenc pretrain {data} --dry-run --gpu h101": (
        "--gpu: found h101, expected a device type such as h100"
    ),
    "{train} --lr nan": "--lr",
    "{train} --lr 0": "--lr",
    "{train} --lr fast": "--lr: found 'fast', expected a number",
    "{train} --train-iters 0": "--train-iters",
    "{train} --train-tokens 1000": "--train-tokens",
    "{train} --seq-length 99999999999": "--seq-length",
    "{train} --micro-batch-size 99999999999999": "--micro-batch-size",
    "{train} --global-batch-size 99999999999999": "--global-batch-size",
    "{train} --rampup-batch-size 2": "--rampup-batch-size",
    "{train} --rampup-batch-size 8 2 100": "--rampup-batch-size",
    "{train} --seed -1": "--seed",
    "{train} --model 70b": "--model: unknown preset '70b'",
    "{train} --hidden-size 65": "--hidden-size",
    "{train} --vocab-size 10": "--vocab-size",
    "{train} --window-size 200": "--window-size: found 200, expected less than --seq-length 64",
    "{phases} mlm:10": "phase 1: found 'mlm:10', expected fields such as",
    "{phases} '{objective: mlmm, train_iters: 4}'": "mlmm",
    "{phases} '{objective: mlm, train_iters: 4, num_layers: 2}'": (
        "field `num_layers` cannot change by phase"
    ),
    "{phases} '{objective: mlm, train_iters: 4, micro_batch_size: 0}'": (
        "phase 1: field `micro_batch_size`: found 0"
    ),
    "{phases} '{objective: mlm, train_iters: 4, blend_temperature: 0.3}' "
    "'{objective: mlm, train_iters: 4, data_path: [c_*]}'": (
        "phase 1: field `blend_temperature`: found 0.3 without a group of corpora"
    ),
    "{phases} '{objective: mlm, train_iters: 4, data_path: gone}'": "gone",
    "{phases} '{objective: mlm, train_iters: 4}' --train-iters 9": (
        "--train-iters: found 9 together with phases"
    ),
    "{train} --weight-decay -0.1": "--weight-decay",
    "{train} --freeze body": "--freeze body: not a part of this model, expected embedding",
    "{train} --freeze layers.0-99": "--freeze layers.0-99: not a part of this model",
    "{train} --freeze layers.1-0": "--freeze layers.1-0: not a part of this model",
    "{train} --freeze head --no-untie-embeddings-and-output-weights": (
        "--freeze head: not a part of this model"
    ),
    "{train} --num-layers 2 --freeze embedding layers.0-1 head": (
        "--freeze embedding layers.0-1 head: found all parts of the model"
    ),
    "{phases} '{objective: mlm, train_iters: 4, freeze: layers.0-99}'": (
        "phase 1: --freeze layers.0-99: not a part of this model"
    ),
    "{train} --adam-beta1 1": "--adam-beta1",
    "{train} --optimizer lion": (
        "--optimizer: found 'lion', expected one of adamw, stable_adamw, muon"
    ),
    "{train} --muon-momentum 0.9": (
        "--muon-momentum: found 0.9 with --optimizer adamw, expected --optimizer muon"
    ),
    "{train} --optimizer muon --muon-num-ns-steps 0": (
        "--muon-num-ns-steps: found 0, expected 1 or more"
    ),
    "{train} --lr-warmup-fraction 2": "--lr-warmup-fraction",
    "{train} --lr-warmup-iters 1 --lr-warmup-fraction 0.5": "--lr-warmup-iters",
    "{train} --lr-decay-style WSDS": "--lr-decay-style",
    "{train} --lr-decay-style cosine --lr-wsd-decay-iters 1": (
        "--lr-wsd-decay-iters: found 1 with --lr-decay-style cosine"
    ),
    "{train} --lr-decay-style constant --min-lr 1e-4": (
        "--min-lr: found 0.0001 with --lr-decay-style constant"
    ),
    "{train} --min-lr 1": "--min-lr: found 1, expected at most --lr 0.002",
    "{train} --objective-schedule clm:0.5,mlm:0.6": "--objective-schedule",
    "{train} --objective-schedule foo:1": "foo",
    "{train} --train-iters 1000000000 --objective-schedule 500000000x(clm:1,mlm:1)": (
        "expected at most 100,000"
    ),
    "{train} --objective-schedule ''": "--objective-schedule",
    "{train} --objective-schedule mlm(mask=1.5):1": "mask",
    "{train} --objective-schedule mlm(msak=0.3):1.0": "did you mean `mask`?",
    "{train} --objective-schedule 'distill(mask=0.3):1.0'": (
        "option `teacher`: missing, expected the directory"
    ),
    "{train} --objective-schedule 'distill(teacher=gone):1.0'": (
        "teacher gone: no such directory, expected one with config.json"
    ),
    "{train} --objective-schedule 'distill(teacher=hf-badconfig):1.0'": (
        "hf-badconfig/config.json: not JSON"
    ),
    "{train} --objective-schedule 'distill(teacher=hf-noweights):1.0'": "no model.safetensors",
    "{train} --objective-schedule 'distill(teacher=hf-pickled):1.0'": (
        "a pickle, which could run any code"
    ),
    "{train} --objective-schedule 'distill(teacher=hf-cut):1.0'": "not a complete safetensors file",
    "{train} --objective-schedule 'distill(teacher=hf-nomask):1.0'": (
        "teacher hf-nomask: tokenizer.json cannot be loaded"
    ),
    "{train} --objective-schedule 'distill(teacher=hf-family):1.0'": "hf-family",
    "{train} --objective-schedule 'distill(teacher=hf->hf):1.0'": (
        "is not a number and cannot change"
    ),
    "{train} --objective-schedule 'distill(teacher=hf,top_k=0):1.0'": (
        "option `top_k`: found 0, expected a whole number, 1 or"
    ),
    "{train} --objective-schedule clm:5,mlm:5": (
        "steps add up to 10, expected 2, the steps of the run"
    ),
    "{train} --objective-schedule 0x(clm:1)": "0x",
    "{train} --tensor-model-parallel-size 2": "tensor parallel 2",
    "{train} --pipeline-model-parallel-layout Et*9L": "--pipeline-model-parallel-layout",
    "{train} --overlap-grad-reduce": "--overlap-grad-reduce",
    "{train} --recompute-modules mlp": "--recompute-modules",
    "{train} --recompute-granularity selective --recompute-modules everything": "everything",
    "{train} --attention-backend flash": "--attention-backend",
    "{train} --transformer-impl transformer_engine": "--transformer-impl",
    "{train} --recompute-granularity selective --recompute-modules activation --fp8-format e4m3": (
        "--recompute-modules"
    ),
    "{train} --max-skipped-updates -1": "--max-skipped-updates",
    "{train} --loss-spike-sigmas nan": "--loss-spike-sigmas",
    "{train} --save-interval 0": "--save-interval",
    "{train} --exit-duration-in-mins -1": "--exit-duration-in-mins",
    "{train} --distributed-timeout-minutes 0": "--distributed-timeout-minutes",
    "{train} --valid-data-path c_text_document": (
        "--valid-data-path: found 'c_text_document', expected NAME=PREFIX"
    ),
    "{train} --valid-data-path a=c_text_document a=d": (
        "--valid-data-path: found the name a twice, expected another name"
    ),
    "{train} --valid-data-path web=missing": (
        "missing.idx: no such file; expected the prefix of a .bin and an .idx file"
    ),
    "{train} --valid-data-path web=c_text_document --split 1,0,0": (
        "web=c_text_document: the run trains on it, and --split 1,0,0"
    ),
    "{train} --valid-objective mlmm": "--valid-objective: at character 1 of 'mlmm'",
    "{train} --valid-objective mlm:0.5,clm:0.5": (
        "--valid-objective mlm:0.5,clm:0.5: found phases or a share"
    ),
    "{train} --valid-objective 'mlm(mask=0.1->0.2)'": (
        "--valid-objective mlm(mask=0.1->0.2): found an option that changes"
    ),
    "{train} --eval-pseudo-perplexity-passes 65": (
        "--eval-pseudo-perplexity-passes 65: expected at most --seq-length 64"
    ),
    "{train} --eval-pseudo-perplexity-passes 8 --eval-interval 0": (
        "--eval-pseudo-perplexity-passes 8: found with --eval-"
    ),
    "{train} --objective-schedule pseudo_perplexity(passes=8):1.0": (
        "unknown objective `pseudo_perplexity`"
    ),
    "{train} --profile --profile-step-start 9 --profile-step-end 3": "--profile-step",
    "{train} --wandb-entity me": "--wandb-entity",
    "{train} --split 0,100,0": "--split",
    "{train} --skip-packs 7-3": "--skip-packs",
    "{train} --tokenizer tok300": "made with another tokenizer: found `tok`",
    "{train} --tokenizer nowhere": "--tokenizer nowhere",
    "{train} --data-path nowhere": "nowhere",
    "{train} --data-path text.jsonl": (
        "text.jsonl: found a file, expected the prefix of a .bin and an .idx file; run `"
    ),
    "{train} --data-path cut_text_document": "cut_text_document.bin",
    "{train} --data-path sidecar_text_document": "sidecar_text_document.json",
    "{train} --data-path 0.3 c_text_document 0.7": "--data-path",
    "{train} --data-path '*_nothing_document'": (
        "--data-path *_nothing_document: no .idx file matches this pattern, expected the"
    ),
    "{train} --data-path 0.5 'c_*' 0.5 c_text_document": (
        "c_text_document and c_* both name c_text_document, expected each"
    ),
    "{train} --blend-temperature 0.7": (
        "--blend-temperature 0.7: found no group of corpora in --data-path, expected a pattern"
    ),
    "{train} --data-path 'c_*' --blend-temperature 1.5": (
        "--blend-temperature: found 1.5, expected 0 to 1"
    ),
    "{train} --blend-max-epochs 1 --train-iters 9999": (
        "--blend-max-epochs 1: all corpora end after"
    ),
    "{train} --branch-from run": "--branch-at",
    "{train} --branch-from nowhere --branch-at 1": "--branch-from nowhere",
    "{train} --branch-from run --branch-at 1": "--branch-at",
    "{train} --branch-at 1": "--branch-from",
    "{train} --branch-from run --branch-at 2 --init-from run": "--init-from",
    "{train} --init-from mine": "--init-from mine",
    "{train} --init-from run --init-at 7": "--init-at",
    "{train} --init-from run --num-layers 3": "--init-from run: num_layers is 2 there, 3 here",
    "{train} --init-from run-base": (
        "rotary_base is 500.0 there, 10000.0 here; expected --rotary-base 500.0, or the new value"
    ),
    "{train} --init-from run-nocheckpoint": "run-nocheckpoint",
    "{train} --init-from run-cut": "run-cut",
    "{train} --init-at 2": "--init-from",
    "{train} --skip-samples parent": "--skip-samples",
    "megaenc pretrain {data} --save run --lr 1e-3": "run",
    "megaenc pretrain {data} --save mine": "mine",
    "megaenc pretrain {data} --save file/new": "--save file/new",
    "megaenc pretrain {data} --save {long}": "--save xxx",
    "megaenc pretrain {data} --save run-badrun": "run-badrun",
    "megaenc pretrain {data} --save run-norun": "run-norun",
    "megaenc pretrain {data} --save part --attention-backend flash": "--attention-backend flash",
    "megaenc pretrain {data} --profile": "--save",
    "megaenc pretrain {data} --max-rewinds 2": "--max-rewinds 2: expected --save",
    "{train} --save-steps 0": "--save-steps",
    "{train} --config nowhere.yaml": "--config nowhere.yaml",
    "{train} --config unknown.yaml": (
        "unknown.yaml: unknown field `sequence_length`; did you mean `seq_length`?"
    ),
    "{train} --config typed.yaml": "typed.yaml: field `seq_length`: found 'many'",
    "{train} --config python.yaml": "python.yaml",
    "megaenc pretrain --data-path c_text_document": "--tokenizer",
    "megaenc pretrain --data-path text.jsonl": "run `megaenc preprocess` first",
    "megaenc pretrain --dry-run": "--dry-run",
    "examples/pretrain_encoder.py --data-path nowhere --tokenizer tok": "nowhere",
    "{cost} --data-path cut_text_document --document-tokens -1": "--document-tokens",
    "megaenc estimate --gpu voodoo": "--gpu",
    "{cost} --gpus 0": "--gpus",
    "{cost} --gpus 3 --tensor-model-parallel-size 2": (
        "3 processes cannot be laid out as tensor parallel 2"
    ),
    "{cost} --mfu 2": "--mfu",
    "{cost} --price-per-hour -3": "--price-per-hour",
    "{cost} --memory-gib nan": "--memory-gib",
    "{cost} --output mine": "--output mine",
    "{cost} --objective-schedule foo:1": "foo",
    "megaenc bench pretrain": "use `python benchmarks/pretrain.py`",
    "megaenc bench data": "use `python benchmarks/preprocess.py`",
    "megaenc bench loader": "use `python benchmarks/loader.py`",
    "megaenc pretrain {data} --timing-log-level 1": "--timing-log-level: was removed; --profile",
    "{cost} --calibrate": "--calibrate: was removed; train 20 steps",
}
