"""What `make gpu` runs on: whether there is a GPU, and a Python whose torch can use it.

No file here but those that run inside that Python may import torch or Bireme: neither need be installed yet.

A Python that has both already is used as it is. One whose torch sees the GPU lends it to a virtual
environment, which is told to keep it: the pinned torch may be one for CPUs where the packages come from.
Otherwise the environment gets a torch of its own, from the index in TORCH_INDEX if that is set.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "NotReady", "Python", "environment", "gpus", "python_for"]

ROOT = Path(__file__).resolve().parent.parent.parent
VENV = ROOT / ".venv-gpu"
LEAST_TORCH = (2, 11)
FOR_CPUS = "+cpu"
"""How versions of torch end that know no GPU."""
NEEDED = ("numpy", "pydantic", "rich", "safetensors", "typer", "hypothesis", "pytest", "pytest-timeout")
"""What Bireme and its tests cannot do without."""

LOOK_S = 120.0
LOOK = """
import json, importlib.metadata as installed
found = {"torch": None, "num_gpus": 0, "missing": []}
try:
    import torch
    found["torch"] = torch.__version__
    found["num_gpus"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
except ImportError:
    pass
for name in %r:
    try:
        installed.version(name)
    except installed.PackageNotFoundError:
        found["missing"].append(name)
print(json.dumps(found))
"""


class NotReady(RuntimeError):  # noqa: N818 (named for what happened)
    """No Python could be made ready; says why."""


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter, the version of its torch, how many GPUs that sees, and which packages it lacks."""

    path: str
    torch: str | None
    num_gpus: int
    missing: tuple[str, ...]

    @property
    def torch_is_usable(self) -> bool:
        """Whether its torch sees a GPU and is new enough."""
        numbers = tuple(int(part) for part in re.findall(r"\d+", self.torch or "")[:2])
        return self.num_gpus > 0 and numbers >= LEAST_TORCH


def gpus() -> list[str]:
    """The GPUs here, as their driver names them; without a driver's tool, as this Python's torch does."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        told = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=LOOK_S)
        found = [line.split(" (UUID")[0] for line in told.stdout.splitlines() if line.startswith("GPU ")]
        if found:
            return found
    try:
        own = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return []
    if own.endswith(FOR_CPUS):  # to import it takes seconds
        return []
    return [f"GPU {number}" for number in range(look(sys.executable).num_gpus)]


def look(path: str) -> Python:
    """What an interpreter has."""
    told = subprocess.run(
        [path, "-c", LOOK % (NEEDED,)], capture_output=True, text=True, check=False, timeout=LOOK_S
    )
    if told.returncode:
        return Python(path, None, 0, NEEDED)
    found = json.loads(told.stdout.strip().splitlines()[-1])
    return Python(path, found["torch"], found["num_gpus"], tuple(found["missing"]))


def python_for(limit_s: float) -> Python:
    """An interpreter that has all it takes; a virtual environment is made if there is none."""
    own = look(sys.executable)
    if own.torch_is_usable and not own.missing:
        return own
    lends = own.torch_is_usable
    extra = ["--system-site-packages"] if lends else []
    _run([sys.executable, "-m", "venv", "--clear", *extra, str(VENV)], limit_s)
    path = str(VENV / "bin" / "python")
    limits = VENV / "constraints.txt"
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if lends or "TORCH_INDEX" in os.environ:
        pins = re.sub(r"(?m)^torch==.*$", f"torch=={own.torch}" if lends else "", pins)
    limits.write_text(pins, encoding="utf-8")
    install = [path, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not lends and "TORCH_INDEX" in os.environ:
        least = f"torch>={LEAST_TORCH[0]}.{LEAST_TORCH[1]}"
        _run([*install, "--index-url", os.environ["TORCH_INDEX"], least], limit_s)
    _run([*install, "--constraint", str(limits), "--editable", f"{ROOT}[dev]"], limit_s)
    made = look(path)
    if not made.torch_is_usable:
        raise NotReady(
            f"torch {made.torch} was installed and sees no GPU: it is one for CPUs, or newer than the "
            "driver. Name an index with one that fits: make gpu TORCH_INDEX=URL."
        )
    return made


def environment() -> dict[str, str]:
    """The variables for what runs in that interpreter: this working tree is what it imports."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _run(command: list[str], limit_s: float) -> None:
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, cwd=ROOT)
    except subprocess.TimeoutExpired as error:
        raise NotReady(f"{' '.join(command[1:5])} … took more than {limit_s:.0f} s.") from error
    if told.returncode:
        lines = (told.stderr or told.stdout).strip().splitlines()
        raise NotReady(f"{' '.join(command[1:5])} … failed: {' '.join(lines[-3:])}")
