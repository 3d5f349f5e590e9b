"""A study in miniature: its results and runs, read once."""

import pytest
from study_directories import settings, write_results, write_runs

from megaenc.finetune.results.files import read_result_tree
from megaenc.study.results.evidence import build_evidence
from megaenc.study.results.pretrain_runs import read_runs


@pytest.fixture(scope="session")
def ours(tmp_path_factory):
    """The evidence of its results."""
    root = write_results(tmp_path_factory.mktemp("results"), settings())
    return build_evidence(read_result_tree(root), settings().get)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Its runs by name."""
    return read_runs(write_runs(tmp_path_factory.mktemp("runs"), settings()))
