"""The setup of all tests of models."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)
