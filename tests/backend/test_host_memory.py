"""Freed host memory, which stays with the process and costs no new pages."""

import runs

# Makes and frees tensors of 12 to 64 MiB; prints whether malloc was told, and the pages that came
# anew for each that was written.
PROGRAM = """
import resource
import torch
from megaenc.backend.initialize import retain_freed_memory

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept, before, written = retain_freed_memory(), pages(), 0
for turn in range(40):
    made = [torch.ones(2**20 * size) for size in (3, 4, 8, 16)[: 1 + turn % 4]]
    written += sum(tensor.nbytes for tensor in made) / 4096
    del made
print(kept, (pages() - before) / written)
"""


def looked(directory, **environment) -> tuple[bool, float]:
    (directory / "program.py").write_text(PROGRAM)
    kept, pages = runs.script(
        directory / "program.py", [], fresh=True, environment=environment
    ).stdout.split()
    return kept == "True", float(pages)


def test_freed_memory_is_taken_again(tmp_path):
    kept, pages = looked(tmp_path)
    assert kept and pages < 0.2


def test_a_malloc_with_settings_of_its_own_is_left_alone(tmp_path):
    kept, pages = looked(tmp_path, MALLOC_ARENA_MAX="2")
    assert not kept and pages > 0.5
