"""Text of names and titles in the languages of reports."""


def in_markdown(text: str) -> str:
    """Return `text` so that Markdown shows it as it is, within a cell of a table too."""
    escapes = {"\\": "\\\\", "|": "\\|", "<": "&lt;", "`": "\\`"}
    return "".join(escapes.get(letter, letter) for letter in " ".join(text.splitlines())).replace("](", "]\\(")
