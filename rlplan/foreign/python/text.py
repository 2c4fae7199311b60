"""The Python code of a file: a script, or the joined code cells of a notebook.

In: a path. Out: a syntax tree. Left out: IPython's own lines, such as `!pip install` and `%%time`.
"""

import ast
import json
import re
from pathlib import Path

from rlplan.errors import SpecError
from rlplan.reading import read_text

_IPYTHON = re.compile(r"^([ \t]*)[!%].*$", re.MULTILINE)


def parse_file(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises: SpecError for a file that is not Python."""
    try:
        text = read_text(path, "the script")
        if path.suffix == ".ipynb":
            text = _join_cells(text)
        try:
            return ast.parse(text)
        except SyntaxError:
            if not _IPYTHON.search(text):
                raise
        return ast.parse(_IPYTHON.sub(r"\1pass", text))
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise SpecError(
            f"the script is not Python: {error}",
            where=str(path),
            rule="Python 3 or a notebook of it, read and not run",
            way_out="correct that line, or give the shell script or YAML file that starts the training",
        ) from None


def _join_cells(notebook: str) -> str:
    """The code cells of a notebook. Raises: ValueError, TypeError, KeyError for another file."""
    cells = [cell["source"] for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(cell if isinstance(cell, str) else "".join(cell) for cell in cells) + "\n"
