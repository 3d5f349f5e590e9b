"""Small tokenizers of the kinds that the families have on the Hub: tokenizer.json and a tokenizer_config.json with its class."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

_TEXT = ["The quick brown fox don't jump over 12345 lazy dogs in 2024, naïve café.", "stan plark\n\n  of HELLO we're 99 bottles"]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(regex: str):
    return [
        pre_tokenizers.Split(Regex(regex), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ]


def _trained(tokenizer: Tokenizer, special: list[str], alphabet: list[str]) -> Tokenizer:
    size = len(special) + len(alphabet) + 90
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    return tokenizer


def _byte_level(before: list, special: list[str], **how) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**how))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, special, sorted(pre_tokenizers.ByteLevel.alphabet()))


def _begins_with(tokenizer: Tokenizer, first: str) -> Tokenizer:
    tokens = [(first, tokenizer.token_to_id(first))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A", f"{first} $A {first}:1 $B:1", tokens)
    return tokenizer


def llama2() -> tuple[Tokenizer, dict]:
    """Llama 2, TinyLlama, Mistral 0.1: SentencePiece's, with a space before every text and bytes for what it does not know."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(strip)
    values = json.loads(_trained(tokenizer, special, []).to_str())
    values["added_tokens"] = values["added_tokens"][:3]  # a byte is no added token
    config = {"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"pad_token": None, "legacy": False, "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer"}
    return _begins_with(Tokenizer.from_str(json.dumps(values)), "<s>"), config


def llama3() -> tuple[Tokenizer, dict]:
    """Llama 3: bytes, numbers by threes, reserved tokens."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    tokenizer = _byte_level(_split(_WORDS), special, ignore_merges=True)
    config = {"bos_token": special[0], "eos_token": special[1], "tokenizer_class": "PreTrainedTokenizerFast"}
    return _begins_with(tokenizer, special[0]), config | {"clean_up_tokenization_spaces": True}


def qwen(*more: str) -> tuple[Tokenizer, dict]:
    """Qwen2 and Qwen3: bytes after NFC, digit by digit, special tokens (`more`) after the vocabulary, no beginning of a text."""
    tokenizer = _byte_level(_split(_WORDS.replace("{1,3}", "")), [])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>", *more)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    config = {"add_bos_token": False, "add_prefix_space": False, "bos_token": None, "eos_token": special[0], "unk_token": None}
    return tokenizer, config | {"pad_token": special[0], "errors": "replace", "tokenizer_class": "Qwen2Tokenizer"}


def smollm() -> tuple[Tokenizer, dict]:
    """SmolLM: bytes, digit by digit, under GPT-2's class."""
    before = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    config = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>") | {"add_prefix_space": False}
    return _byte_level(before, ["<|endoftext|>", "<|im_start|>"]), config | {"tokenizer_class": "GPT2Tokenizer"}


def modernbert() -> tuple[Tokenizer, dict]:
    """ModernBERT and Ettin: bytes, [CLS] and [SEP] around a text, and no end of a text."""
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    tokenizer = _byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)], special)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True, normalized=False, special=True)])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    roles = {f"{token[1:-1].lower()}_token": token for token in (*special, "[MASK]")}
    return tokenizer, roles | {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}


def bert() -> tuple[Tokenizer, dict]:
    """BERT and NeoBERT: pieces of words in lower case, [CLS] and [SEP] around a text, no end of a text."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece("##")
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    roles = {f"{token[1:-1].lower()}_token": token for token in special}
    return tokenizer, roles | {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "tokenize_chinese_chars": True}


# By name: the tokenizer, the model of hf_models.MODELS that has it, and the flags of from-hf that give it a mask token.
KINDS = {
    "llama 2": (llama2, "llama with stretched positions", ["--add-mask-token"]),
    "mistral": (llama2, "mistral", ["--add-mask-token"]),
    "llama 3": (llama3, "llama with stretched positions", []),
    "smollm": (smollm, "llama with stretched positions", ["--add-mask-token"]),
    "qwen2": (qwen, "qwen2", ["--add-mask-token"]),
    "qwen3": (qwen, "qwen3", ["--add-mask-token"]),
    "modernbert": (modernbert, "modernbert", []),
    "bert": (bert, "neobert", []),
}


def save(made: tuple[Tokenizer, dict], folder: Path, **changes) -> Path:
    """Write both files; `changes`: to tokenizer_config.json."""
    tokenizer, config = made
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return folder
