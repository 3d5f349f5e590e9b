"""Pretrain, export, fine-tune and compare encoders, on megatron-core.

Objectives are CLM, MLM, or any schedule of them.
"""

__version__ = "0.1.0"
