"""Model cards of fine-tuned models."""

from megaenc.finetune.model_card import build_finetuned_card


def test_a_card_has_the_threshold_and_pairs_keep_their_words():
    card = build_finetuned_card(
        "x",
        {
            "family": "multi_label",
            "model": "m",
            "dataset": "d",
            "train_on": "d",
            "learning_rate": 1e-4,
            "seed": 0,
            "steps": 5,
            "threshold": 0.25,
            "pair_template": "WORDS and THRESHOLD: {text} {text_pair}",
            "protocol": {"head": "linear", "attention": "causal", "precision": "fp32"},
            "fingerprints": {},
            "scores": {"test": {"score": 0.5, "micro_f1": 0.5}},
        },
        "ModernBertForSequenceClassification",
    )
    assert "| test | micro_f1 | 50.00 |" in card
    assert 'label["score"] >= 0.25]' in card
    assert "classify(['WORDS and THRESHOLD: a text another'], truncation=True)" in card
