"""Pretrain encoders with CLM, MLM or any schedule of them on megatron-core; export, fine-tune and compare them."""

__version__ = "0.1.0"
