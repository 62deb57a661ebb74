"""Where data comes from, in one notation for the run file and the command line.

`stdlib` are the sources of Python's standard library; a path is a text file, a folder of them, a folder that
the `datasets` library saved, or an array of token ids (.npy, .bin); `hf:NAME,split=…` and `hf:FOLDER` are
whatever that library loads; `file.py:function` is a function of the user's. What a source names must be there
when it is opened; its text is read later.
"""

from pathlib import Path

from bireme.errors import BiremeError
from bireme.train.data.hub import is_hub, is_saved_folder, library_rows
from bireme.train.data.own import OwnSamples, is_own, own_samples
from bireme.train.data.saved_rows import SavedRows
from bireme.train.data.text_files import TextFiles, one_file, python_sources, text_folder
from bireme.train.data.tokens import Tokens, load_tokens

__all__ = ["NOTATIONS", "Source", "open_source"]

NOTATIONS = (
    "stdlib",
    "book.txt",
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

ARRAYS = (".npy", ".bin")


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
    if is_own(text):
        return own_samples(text)
    if path.is_dir():
        return library_rows(text, text_column) if is_saved_folder(path) else text_folder(path, pattern)
    if not path.exists():
        raise BiremeError(
            f"There is no file or folder {text!r} to take data from. A source is one of: "
            f"{', '.join(NOTATIONS)}."
        )
    return load_tokens(path, dtype) if path.suffix in ARRAYS else one_file(path)
