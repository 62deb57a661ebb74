"""Which data a run learns from, kept in its folder and its checkpoints, and whether they are there again.

A checkpoint says which samples come next by their numbers alone. So other data, of the same name and the
same size too, would be trained on without a word.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from bireme.documents import read_json_object
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.train.data.identity import is_repeatable, samples_digest
from bireme.train.data.prepare import RunData
from bireme.train.run_file import RunFile

__all__ = ["DataIdentity", "check_same_data", "data_identity", "load_identity", "write_identity"]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class DataIdentity:
    """What tells data from others: how much there is, and a digest of what the samples hold.

    `source` is where they were, for people. `evaluation_sha256` is None where the samples to evaluate with
    are a part of the same source, whose digest covers them.
    """

    source: str
    num_samples: int
    num_tokens: int | None
    sha256: str
    evaluation_sha256: str | None
    format: Literal[1] = Field(default=1)

    def plain(self) -> dict[str, JsonValue]:
        """As JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        tokens = "" if self.num_tokens is None else f" of {self.num_tokens} tokens in all"
        return f"{self.num_samples} samples{tokens}, whose SHA-256 begins with {self.sha256[:12]}"


READER = TypeAdapter(DataIdentity)


def data_identity(run: RunFile, data: RunData) -> DataIdentity:
    """The identity of a run's data."""
    apart = None if run.data.evaluation_source is None else data.evaluation
    return DataIdentity(
        source=run.data.named,
        num_samples=len(data.training),
        num_tokens=data.num_tokens,
        sha256=samples_digest(data.training),
        evaluation_sha256=None if apart is None else samples_digest(apart),
    )


def write_identity(path: Path, identity: DataIdentity) -> None:
    """Keep it in a run's folder."""
    write_text_atomically(path, READER.dump_json(identity, indent=1).decode() + "\n")


def load_identity(path: Path) -> DataIdentity | None:
    """What a run's folder keeps; None where an older version of Bireme began the run."""
    return identity_from(read_json_object(path), str(path)) if path.is_file() else None


def identity_from(kept: object, origin: str) -> DataIdentity:
    """What was kept as JSON; `origin` is where, for an error."""
    try:
        return READER.validate_python(kept)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BiremeError(
            f"{origin} does not say which data the run was trained on: {place}: {first['msg']}."
        ) from None


def check_same_data(before: DataIdentity, now: DataIdentity, data: RunData, where: str) -> str:
    """Refuse other data than those `before`; a sentence for people where something else is to be said.

    `where` is what was made from the data before. Samples that draw numbers of their own each time cannot be
    compared, and are taken for the same.
    """
    if now.sha256 != before.sha256 and is_repeatable(data.training, now.sha256):
        raise BiremeError(
            f"{where} was trained on other data than {now.source} holds now: it had {before} (then in "
            f"{before.source}), and now there are {now}. Put the data back, or set data.source to where they "
            "are; to train on other data, begin a new run."
        )
    if now.evaluation_sha256 != before.evaluation_sha256 and now.sha256 == before.sha256:
        return "The samples to evaluate with are not what they were: evaluations before and after differ."
    return ""
