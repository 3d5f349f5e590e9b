"""Fine-tuning of Hugging Face models on classification, tagging, question answering and retrieval; no megatron-core."""
