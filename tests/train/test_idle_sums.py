"""What a run asks of its replicas in vain is said."""

import pytest

from bireme.plan.plan import Plan
from bireme.train.choices import idle_keys
from bireme.train.run_file import load_run_file


@pytest.mark.parametrize(
    ("codec", "steps", "width", "words"),
    [
        ("lowrank:4", 10, 2, "the first 10 steps send whole gradients, and the run has 10"),
        ("threshold:0.1:5:20", 8, 2, "write threshold:0.1:5 to begin at once"),
        ("int4", 100, 1, "the plan has one replica"),
        ("lowrank:4", 11, 2, None),
        ("lowrank:4:0", 1, 2, None),
        ("int8", 1, 2, None),
        ("none", 1, 1, None),
    ],
)
def test_a_codec_of_sums_that_never_begins_is_told(
    codec: str, steps: int, width: int, words: str | None
) -> None:
    run = load_run_file(None, [f"sync.codec={codec}", f"training.steps={steps}"])
    found = idle_keys(run, Plan((), 4, "1f1b", width=width))
    assert len(found) == (words is not None)
    assert all(str(words) in sentence for sentence in found)
