"""Mistakes before there is a model: demo, tokenizer, preprocess, objective, data."""

# Command line: part of the one line that it must end in.
ROWS = {
    "megaenc pretarin": "did you mean `megaenc pretrain`?",
    "megaenc --verbose pretrain": "--verbose",
    "megaenc ''": "no such command",
    "megaenc demo --outptu x": "--outptu",
    "megaenc demo x": "x",
    "megaenc demo --output": "--output",
    "megaenc demo --output file": "--output file",
    "megaenc demo --output own": "own/heldout.jsonl: found a file that is not of `megaenc demo`",
    "megaenc demo --output record": "record/demo.json",
    "megaenc tokenizer --input text.jsonl": "--output",
    "{learn} nowhere.jsonl": "nowhere.jsonl",
    "{learn} empty.jsonl": "empty.jsonl",
    "{learn} nothing": "nothing",
    "{learn} fifo": "fifo",
    "{learn} text.jsonl --vocab-size 100": "--vocab-size",
    "{learn} text.jsonl --vocab-size 99999999999999999999": "--vocab-size",
    "{learn} text.jsonl --json-key body": "body",
    "{learn} text.jsonl --sample-by line": "--sample-by line",
    "{learn} text.jsonl --dataset-config big": "--dataset-config big",
    "megaenc tokenizer --input text.jsonl --output mine": "--output mine",
    "megaenc tokenizer --input text.jsonl --output .": "--output .",
    "megaenc preprocess --input text.jsonl --output-prefix new": "--tokenizer",
    "megaenc preprocess --input text.jsonl --output-prefix new --tokenizer nowhere": (
        "--tokenizer nowhere"
    ),
    "megaenc preprocess --input text.jsonl --output-prefix new --tokenizer badtok": (
        "--tokenizer badtok"
    ),
    "megaenc preprocess --input text.jsonl --output-prefix c --tokenizer tok --append-eod": (
        "c_text_document"
    ),
    "megaenc preprocess --input text.jsonl --output-prefix file/new --tokenizer tok": "file/new",
    "megaenc preprocess --input text.jsonl --output-prefix {long} --tokenizer tok": "xxx",
    "{read} --input nowhere.jsonl": "nowhere.jsonl",
    "{read} --input empty.jsonl": "empty.jsonl",
    "{read} --input latin.jsonl": "latin.jsonl",
    "{read} --input list.jsonl": "list.jsonl",
    "{read} --input number.jsonl": "number.jsonl",
    "{read} --input nokey.jsonl": "nokey.jsonl",
    "{read} --input notjson.jsonl": "notjson.jsonl",
    "{read} --input deep.jsonl": "deep.jsonl",
    "{read} --input bad.jsonl.gz": "bad.jsonl.gz",
    "{read} --input bad.parquet": "bad.parquet",
    "{read} --input nothing": "nothing",
    "{read} --input text.jsonl --input-tokens ids": (
        "text.jsonl: not a directory, expected one of MDS shards with --input-tokens"
    ),
    "{read} --input nothing --input-tokens ids:half": "--input-tokens ids:half: unknown dtype",
    "{read} --input text.jsonl --json-keys text text": "--json-keys",
    "{read} --input text.jsonl --json-keys ../text": "--json-keys",
    "{read} --input text.jsonl --workers 0": "--workers",
    "{read} --input text.jsonl --workers 100000": "--workers",
    "{read} --input text.jsonl --partitions 100000000": "--partitions",
    "{read} --input text.jsonl --minhash-buckets 20": (
        "--minhash-buckets 20: expected --deduplicate minhash"
    ),
    "{read} --input text.jsonl --append-eod maybe": "maybe",
    "{read} --input text.jsonl --punkt-language german": "--punkt-language",
    "tools/preprocess_data.py --input nowhere.jsonl --output-prefix new --tokenizer tok": (
        "nowhere.jsonl"
    ),
    "megaenc objective chek mlm": "megaenc objective check",
    "megaenc objective check": "OBJECTIVE",
    "megaenc objective check mlmm": "unknown objective `mlmm`",
    "megaenc objective check 'mlm(mask=2)'": "option `mask`: found 2.0",
    "megaenc objective check distill": "option `teacher`: missing, expected the directory",
    "megaenc objective check 'distill(teacher=hf)'": (
        "teacher hf: a vocabulary of 400 ids, expected at least the 1000"
    ),
    "megaenc objective check 'mlm(mask=0.2'": "--objective: at character",
    "megaenc objective check mlm --options mask=0.3": (
        "--options mask=0.3: found with mlm, expected them in it: mlm(mask=0.3)"
    ),
    "megaenc objective check nowhere:Made": "nowhere:Made: ModuleNotFoundError",
    "megaenc objective check json:Made": "json:Made: AttributeError",
    "megaenc objective check json:JSONDecoder": (
        "json:JSONDecoder: is no subclass of megaenc.objectives.Objective"
    ),
    "megaenc objective check megaenc.objectives:MaskedDiffusion --options depth=3": (
        "option `depth`: unknown"
    ),
    "megaenc objective check megaenc.objectives:MaskedDiffusion --options low=x": (
        "option `low`: found `x`, expected a number"
    ),
    "megaenc objective check 'mlm(unit=wrd)'": (
        "option `unit`: found wrd, expected token, word or a file; did you mean `word`?"
    ),
    "megaenc objective check 'mlm(unit=word,span=3)'": (
        "option `unit`: found word with span=3, expected token, or no span"
    ),
    "megaenc objective check 'mlm(unit=text.jsonl)'": "text.jsonl: no collocations, or damaged",
    "megaenc objective check 'mlm(unit=nowhere)'": "nowhere: no such file",
    "{find}": "--output",
    "megaenc objective collocations --data-path nowhere --tokenizer tok --output new": "nowhere",
    "{find}300 --output new": "another tokenizer",
    "{find} --output file/new": "--output file/new",
    "{find} --output new --count 0": "--count: found 0, expected 8 or more",
    "{find} --output new --min-count 100000000": "no n-gram occurs --min-count 100000000 times",
    "{find} --output new/pmi.npz --min-count 100000000": "no n-gram occurs",
    "megaenc data inspect nowhere": "nowhere",
    "megaenc data inspect cut_text_document": "cut_text_document.bin",
    "megaenc data inspect bare_text_document": "bare_text_document.idx",
    "megaenc data inspect sidecar_text_document": "sidecar_text_document.json",
    "{inspect}300": "made with another tokenizer: found `tok`",
    "megaenc data inspect c_text_document --tokenizer nowhere": "--tokenizer nowhere",
    "{inspect} --objective foo": "foo",
    "{inspect} --objective clm:0.5,mlm:0.5": "--objective",
    "{inspect} --pack -1": "--pack",
    "{inspect} --seq-length 100000000": "--seq-length",
    "{inspect} --split 1,2": "--split",
    "{inspect} --split a,b,c": "--split",
    "{inspect} --split 0,0,0": "--split",
    "{inspect} --split -1,1,1": "--split",
    "{inspect} --seed -1": "--seed",
    "megaenc data verify": "PREFIX",
    "megaenc data verify nowhere": "nowhere",
    "megaenc data verify cut_text_document": "cut_text_document.bin",
    "megaenc data verify sidecar_text_document": "sidecar_text_document.json",
    "megaenc data verify changed_text_document": "changed_text_document.bin",
    "megaenc data verify c_text_document --tokenizer tok300": "tok",
}
