"""Tables as text: escapes and alignments of Markdown, quotes of CSV."""

from megaenc import tables


def test_markdown_escapes_names_and_aligns_numbers():
    table = tables.format_markdown(["model"], ["score"], [("a|b", "67.72 [62.9, 72.5]")])
    assert table == "| model | score |\n|---|---:|\n| a\\|b | 67.72 [62.9, 72.5] |\n"


def test_csv_has_empty_cells_and_quotes():
    assert (
        tables.format_csv([["model", "half"], ['"a", b', None], ["c", 1.5]])
        == 'model,half\n"""a"", b",\nc,1.5\n'
    )


def test_facts_are_code_under_an_empty_heading():
    assert (
        tables.format_facts({"seed": 0, "data set": "a|b"})
        == "| | |\n|---|---|\n| seed | `0` |\n| data set | `a\\|b` |"
    )
