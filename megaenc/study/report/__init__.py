"""`megaenc study report`: the page, tables and figures."""
