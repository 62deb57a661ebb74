"""Where data comes from, in one notation for the run file and the command line.

`stdlib` are the sources of Python's standard library; a path is a text file, a folder of them, a folder that
the `datasets` package saved, or an array of token ids (.npy, .bin); `file.py:function` is a function of the
user's. What a source names must be there when it is opened; its text is read later.
"""

from pathlib import Path

from bireme.errors import BiremeError
from bireme.train.data.own import OwnSamples, is_own, own_samples
from bireme.train.data.saved_rows import SavedRows, is_saved_folder, saved_rows
from bireme.train.data.text_files import TextFiles, one_file, python_sources, text_folder
from bireme.train.data.tokens import Tokens, load_tokens

__all__ = ["NOTATIONS", "Source", "open_source"]

NOTATIONS = (
    "stdlib",
    "book.txt",
    "FOLDER",
    "tokens.npy",
    "tokens.bin",
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

    `pattern` chooses the files in a folder, `text_column` is where a saved dataset has its text, `dtype` the
    type of the numbers in a .bin file.
    """
    path = Path(text).expanduser()
    if text == "stdlib":
        return python_sources()
    if is_own(text):
        return own_samples(text)
    if path.is_dir():
        return saved_rows(path, text_column) if is_saved_folder(path) else text_folder(path, pattern)
    if not path.exists() and text.startswith("hf:"):
        raise BiremeError(
            f"{text!r} is written like a model, and data has no hf: before it. Save the dataset with "
            "save_to_disk of the datasets package, and name that folder alone."
        )
    if not path.exists():
        raise BiremeError(
            f"There is no file or folder {text!r} to take data from. A source is one of: "
            f"{', '.join(NOTATIONS)}."
        )
    return load_tokens(path, dtype) if path.suffix in ARRAYS else one_file(path)
