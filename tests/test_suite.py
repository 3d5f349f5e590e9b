"""About the tests themselves."""

from collections import Counter
from pathlib import Path


def test_no_two_files_are_one_module():
    """pytest runs the first of them and refuses the others, which running a folder alone does not show."""
    files = Path(__file__).parent.rglob("test_*.py")
    names = Counter(file.name for file in files if not (file.parent / "__init__.py").exists())
    assert [name for name, count in names.items() if count > 1] == []
