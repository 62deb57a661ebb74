"""Where data comes from, in one notation for the run file and the command line.

`stdlib` are the sources of Python's standard library; a path is a text file, a file of rows (.jsonl, .json,
.parquet, .csv), a folder of either, a folder that the `datasets` library saved, or an array of token ids
(.npy, .bin); `hf:NAME,split=…` and `hf:FOLDER` are whatever that library loads; `file.py:function` is a
function of the user's. What a source names must be there when it is opened; its text is read later.
"""

from pathlib import Path

from bireme.bounds import counted
from bireme.errors import BiremeError
from bireme.train.data.hub import SavedRows, is_hub, is_saved_folder, library_rows, rows_of_json_lines
from bireme.train.data.own import OwnSamples, own_samples
from bireme.train.data.samples import Tokens, load_tokens
from bireme.train.data.text_files import TextFiles, one_file, python_sources, text_folder
from bireme.user_code import names_function

_NOTATIONS = (
    "stdlib",
    "book.txt",
    "rows.jsonl",
    "FOLDER",
    "tokens.npy",
    "tokens.bin",
    "hf:owner/name,split=train",
    "hf:FOLDER",
    "package.module:function",
    "file.py:function",
)
"""How a source can be named, by example."""

Source = TextFiles | SavedRows | Tokens | OwnSamples

_ARRAYS = (".npy", ".bin")

_LINES = ".jsonl"
_ROWS = (_LINES, ".json", ".parquet", ".csv")
_NEVER_TEXT = (_LINES, ".parquet")
"""Files of rows that nobody means as text; the others may lie among texts."""


def open_source(
    text: str, *, pattern: str = "*", text_column: str | None = None, dtype: str = "uint16"
) -> Source:
    """What `text` names.

    `pattern` chooses the files in a folder, `text_column` is where a dataset has its text unless its source
    says so itself, `dtype` the type of the numbers in a .bin file.
    """
    path = Path(text).expanduser()
    if text == "stdlib":
        return python_sources()
    if is_hub(text):
        return library_rows(text, text_column)
    if names_function(text):
        return own_samples(text)
    if path.is_dir():
        return (
            library_rows(text, text_column) if is_saved_folder(path) else _folder(path, pattern, text_column)
        )
    if not path.exists():
        raise BiremeError(
            f"There is no file or folder {text!r} to take data from. A source is one of: "
            f"{', '.join(_NOTATIONS)}."
        )
    if path.suffix == _LINES:
        return rows_of_json_lines(path, text_column)
    if path.suffix in _ROWS:
        return library_rows(text, text_column)
    return load_tokens(path, dtype) if path.suffix in _ARRAYS else one_file(path)


def _folder(folder: Path, pattern: str, text_column: str | None) -> Source:
    """The files of a folder that match the pattern: texts, or files of rows of one kind."""
    found = text_folder(folder, pattern)
    paths = [file.path for file in found.files]
    rows = [path for path in paths if path.suffix in _ROWS]
    if len(rows) < len(paths):
        wrong = [path for path in rows if path.suffix in _NEVER_TEXT]
        if not wrong:
            return found
        raise BiremeError(
            f"The folder {folder} holds rows in {counted(len(wrong), 'file')}, such as {wrong[0].name}, "
            f"among {counted(len(paths) - len(wrong), 'other file')}. Say which to read with data.pattern, "
            f'such as "*{wrong[0].suffix}" or "*.txt".'
        )
    kinds = sorted({path.suffix for path in rows})
    if len(kinds) > 1:
        raise BiremeError(
            f"The folder {folder} holds files of rows of several kinds: {', '.join(kinds)}. Say which to "
            f'read with data.pattern, such as "*{kinds[0]}".'
        )
    if len(rows) == 1 and kinds[0] == _LINES:
        return rows_of_json_lines(rows[0], text_column)
    # The library knows the splits of a whole folder by the names of its files.
    return library_rows(str(folder), text_column, () if pattern == "*" else paths)
