"""Where runs of the suite keep what one of them has captured for the next."""

import shutil
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["KEPT_GRAPHS", "kept_graphs"]

KEPT_GRAPHS = "BIREME_TESTS_GRAPHS"
"""Names the variable with the folder of graphs."""

ROOT = Path(__file__).parents[2]
CODE = "src/bireme/model/**/*.py", "src/bireme/*.py", "tests/support/*.py"
PACKAGES = "torch", "transformers", "peft"
"""What is captured depends on these and on nothing else."""

NUM_KEPT = 3


def kept_graphs(folder: Path) -> Path:
    """The folder within that one for graphs that are as they would be captured now. Older ones go, but for
    a few.
    """
    digest = sha256(repr([(name, _version(name)) for name in PACKAGES]).encode())
    for path in sorted(path for pattern in CODE for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    own = folder / digest.hexdigest()[:24]
    own.mkdir(exist_ok=True)
    own.touch()
    for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return own


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
