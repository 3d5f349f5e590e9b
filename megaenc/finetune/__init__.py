"""Fine-tuning and evaluation of Hugging Face models, without megatron-core.

The tasks are classification, tagging, question answering and retrieval.
"""
