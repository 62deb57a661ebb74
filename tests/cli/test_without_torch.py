"""What needs no torch loads none: it is there at once, and works where there is no torch.

One process that has not imported it yet does it all, one after the other.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bireme.profile.profile import save_profile
from tests.support.command import with_sets
from tests.support.hand_plans import tiny_profile
from tests.support.patience import patience_s
from tests.support.run_folders import make_run

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"

MODULES = [
    "bireme",
    "bireme.cluster.inference",
    "bireme.profile.profile",
    "bireme.profile.stages",
    "bireme.report.picture",
    "bireme.report.profile_table",
    "bireme.report.terminal",
    "bireme.train.attendance",  # so that `bireme join` calls at once
    "bireme.train.run_file.tables",
    "bireme.train.run_file",
    "tests.conftest",  # of the process that gives the workers of the suite their tests
]

COMMANDS = [
    "--help",
    "--version",
    "bench engine --help",
    "cluster --help",
    "cluster show laptop",
    "cluster discover",
    "cluster probe --help",
    "cluster devices",
    "fit --help",
    "fit gpt2 --machines rtx3090 --within 0",
    "init --help",
    "init {folder}/run.toml",
    "memory --help",
    "place --help",
    "place {examples}/placement/branches.json --method greedy",
    "plan --help",
    "plan {plan} --explain --export torch-csv",
    "plan {plan} --json",
    "simulate {plan} --json",
    "simulate --set plan.schedule=2bw --forward-s 1",
    "profile --help",
    "report --help",
    "report {folder}/run --json",
    "schedule --help",
    "schedule 1f1b --check",
    "simulate --help",
]

PROCESS = """
import importlib, io, json, sys
from contextlib import redirect_stderr, redirect_stdout

def loads_torch(what, work):
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            work()
    except SystemExit as end:
        if end.code:
            found.append(f"{what} fails: {output.getvalue()}")
    if "torch" in sys.modules:
        found.append(f"{what} loads torch")

def run(words):
    from bireme.cli.main import main
    sys.argv = ["bireme", *words.split()]
    main()

found = []
modules, commands = json.load(sys.stdin)
for module in modules:
    loads_torch(module, lambda: importlib.import_module(module))
for words in commands:
    loads_torch(words, lambda: run(words))
print(json.dumps(found))
"""


@pytest.fixture
def commands(tmp_path: Path) -> list[str]:
    """These, with files that there are."""
    make_run(tmp_path / "run", steps=20)
    save_profile(tiny_profile(), tmp_path / "profile.json")
    keys = ("cluster.source=laptop", "training.batch_size=4", "plan.depth=1")
    plan = " ".join(with_sets(["--profile", f"{tmp_path}/profile.json", *keys]))
    return [words.format(folder=tmp_path, examples=EXAMPLES, plan=plan) for words in COMMANDS]


def test_modules_and_commands_that_need_no_torch_load_none(commands: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROCESS],
        input=json.dumps([MODULES, commands]),
        capture_output=True,
        text=True,
        check=True,
        timeout=patience_s(),
    )
    assert json.loads(done.stdout)[:1] == []
