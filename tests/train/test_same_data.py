"""Which data count as the same: what samples hold, and not where they lie or how they are kept."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bireme.errors import BiremeError
from bireme.train.data.documents import Cut, DocumentSamples
from bireme.train.data.prepare import RunData, samples_digest
from bireme.train.data.samples import Tokens, split_samples
from bireme.train.data.source import OwnSamples
from bireme.train.resume_checks import check_same_data, data_identity, load_identity, write_identity
from bireme.train.run_file import RunFile

IDS = np.random.default_rng(0).integers(0, 200, 5000)
ENDS = np.array([2000, 5000])


def tokens(ids: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", dtype: str = "uint16") -> DocumentSamples:
    return Cut(8, "stream", 0).samples(Tokens("anywhere", ids.astype(dtype), ENDS))


def test_every_token_counts_and_the_type_that_they_are_kept_in_does_not() -> None:
    own = samples_digest(tokens(IDS))
    assert samples_digest(tokens(IDS, "uint32")) == own
    for place in (0, 2345, 4999):
        changed = IDS.copy()
        changed[place] += 1
        assert samples_digest(tokens(changed)) != own
    assert samples_digest(Cut(10, "stream", 0).samples(tokens(IDS).tokens)) != own
    split = Cut(8, "stream", 0).split(tokens(IDS).tokens, 0.1)
    assert samples_digest(split.training) != own


class Drawing:
    """Samples that draw numbers: with a generator of their own where they cannot be had again."""

    def __init__(self, *, is_repeatable: bool, scale: float = 1.0) -> None:
        self.draws = None if is_repeatable else random.Random()
        self.scale = scale

    def __len__(self) -> int:
        return 100

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        noise = torch.rand(3) if self.draws is None else torch.tensor([self.draws.random()])
        return {"x": noise * self.scale + number}


def data(samples: OwnSamples) -> RunData:
    return RunData(split_samples(samples, 0.2).training, None, None, None, None, 0, is_text=False)


def test_samples_that_are_made_are_compared_where_they_can_be_had_again(tmp_path: Path) -> None:
    run, before = RunFile(), torch.random.get_rng_state()
    own, other = (data(OwnSamples("own", Drawing(is_repeatable=True, scale=one))) for one in (1.0, 2.0))
    known = data_identity(run, own)
    assert torch.equal(torch.random.get_rng_state(), before)
    write_identity(tmp_path / "data.json", known)
    assert load_identity(tmp_path / "data.json") == known
    assert load_identity(tmp_path / "none.json") is None
    assert not check_same_data(known, data_identity(run, own), own, "step-8")
    with pytest.raises(BiremeError, match="step-8 was trained on other data than stdlib holds now"):
        check_same_data(known, data_identity(run, other), other, "step-8")
    drawn = data(OwnSamples("own", Drawing(is_repeatable=False)))
    assert not check_same_data(data_identity(run, drawn), data_identity(run, drawn), drawn, "step-8")


def test_other_samples_to_evaluate_with_are_told_of() -> None:
    own = data(OwnSamples("own", Drawing(is_repeatable=True)))
    known = data_identity(RunFile(), own)
    now = replace(known, evaluation_sha256="0" * 64)
    assert "evaluations before and after differ" in check_same_data(known, now, own, "step-8")


def test_a_record_of_the_data_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('{"format": 1, "source": "texts"}')
    with pytest.raises(BiremeError, match=r"data\.json lacks num_samples"):
        load_identity(path)
