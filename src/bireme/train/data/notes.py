"""What people should know of the data before they are trained on: sentences for the log of a run."""

from collections.abc import Iterator

from bireme.train.data.documents import DocumentSamples
from bireme.train.data.mixture import sources_of
from bireme.train.data.prepare import RunData
from bireme.train.data.samples import PackedSamples

__all__ = ["data_notes"]


def data_notes(data: RunData) -> tuple[str, ...]:
    """A sentence for each thing that loses data: documents cut off, samples without anything that counts."""
    return tuple(note for samples in sources_of(data.training).values() for note in _notes(samples))


def _notes(samples: object) -> Iterator[str]:
    if isinstance(samples, DocumentSamples):
        num_cut = samples.num_cut_off
        if num_cut:
            yield (
                f"{num_cut} of {len(samples)} documents of {samples.tokens.origin} are longer than "
                f"data.length = {samples.length} and lose their ends."
            )
    if isinstance(samples, DocumentSamples | PackedSamples) and samples.tokens.has_uncounted:
        num_idle = samples.num_without_targets()
        if num_idle:
            yield (
                f"{num_idle} of {len(samples)} samples of {samples.tokens.origin} hold no answer, or no "
                "other token that counts in the loss, and have weight zero. A larger data.length may leave "
                "fewer."
            )
