"""What must hold between data and model before training starts; each check refuses with one sentence.

A mistake found here costs seconds. The same one found by a device costs the run, and says much less.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.graph import Value
from bireme.model.length import evaluate
from bireme.train.data.samples import Samples
from bireme.train.data.tokenizer import Tokenizer
from bireme.train.data.tokens import Tokens

__all__ = [
    "check_batch",
    "check_inputs",
    "check_sizes",
    "check_token_ids",
    "check_tokenizer",
    "vocabulary_of",
]


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens a model knows, as its configuration says; None where it does not."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        for name in ("vocab", "vocab_size"):
            size = getattr(part, name, None)
            if isinstance(size, int):
                return size
    return None


def check_tokenizer(tokenizer: Tokenizer, vocabulary: int | None) -> None:
    """All that a tokenizer can give must be tokens of the model."""
    if vocabulary is not None and tokenizer.num_tokens > vocabulary:
        raise BiremeError(
            f"The tokenizer has {tokenizer.num_tokens} tokens but the model {vocabulary}, so some ids "
            "are outside the model's vocabulary. Use the model's own tokenizer, or a "
            f"model with {tokenizer.num_tokens} tokens or more."
        )


def check_token_ids(tokens: Tokens, vocabulary: int | None) -> None:
    """The ids that somebody made must be tokens of the model."""
    if vocabulary is None:
        return
    largest = tokens.largest_id()
    if largest >= vocabulary:
        raise BiremeError(
            f"{tokens.origin} holds the token id {largest}, but the model has {vocabulary} tokens, "
            f"0 to {vocabulary - 1}. Use data made with the model's tokenizer, and set the "
            "right data.dtype for a .bin file."
        )


def check_batch(samples: Samples, batch_size: int, what: str) -> None:
    """There must be a batch of samples; `what` is what to call them."""
    if len(samples) < batch_size:
        raise BiremeError(
            f"The data for {what} has {len(samples)} samples, but a batch needs {batch_size}. Give "
            "more data, shorter samples or a smaller batch."
        )


def check_inputs(samples: Samples, inputs: Mapping[str, Tensor], what: str) -> None:
    """A sample must hold what the model is called with: all names, with tensors of their kind.

    `inputs` are the model's example inputs. Sizes may differ from theirs; types and numbers of axes may not.
    """
    sample = samples.take([0])
    missing = [name for name in inputs if name not in sample]
    if missing:
        raise BiremeError(
            f"The samples for {what} lack {', '.join(missing)}: they hold {', '.join(sample)}, but the "
            f"model takes {', '.join(inputs)}. Name the tensors of a sample like the arguments of the "
            "model's forward."
        )
    for name, wanted in inputs.items():
        found = sample[name]
        if found.dtype != wanted.dtype:
            raise BiremeError(
                f"In the samples for {what}, {name} is {_short(found)}, but the model takes "
                f"{_short(wanted)}. Convert it: {name}.to({wanted.dtype})."
            )
        if found.ndim != wanted.ndim:
            raise BiremeError(
                f"In the samples for {what}, {name} is of shape {list(found.shape[1:])}, and the model "
                f"takes {list(wanted.shape[1:])}, or other sizes with the same number of axes."
            )


def check_sizes(samples: Samples, inputs: Sequence[Value], what: str, *, is_text: bool) -> None:
    """A sample must be as large as what the model was captured for; `inputs` are those of its graph.

    `is_text` says that the samples are cut from tokens, so that data.length is what makes them as they are.
    """
    sample = samples.take([0])
    for value in inputs:
        found = list(sample[value.name].shape[1:])
        wanted = [evaluate(length, 1) for length in value.shape[1:]]
        if found == wanted:
            continue
        remedy = "Cut or pad the samples, or give the model example inputs of that shape."
        if is_text and len(wanted) == 1:
            remedy = f"Set data.length to {wanted[0]}, or use a model for {found[0]}."
        raise BiremeError(
            f"In the samples for {what}, {value.name} is of shape {found}, and the model takes {wanted}. "
            f"{remedy}"
        )


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
