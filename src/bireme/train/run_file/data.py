"""`[data]` of a run file: what a model learns from."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from bireme.train.run_file.table import Seed, Table, Text, giving_way

__all__ = ["Data", "Mixed"]


def _list(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError('one table or more, such as [{source = "texts/", weight = 3.0}]')
    return tuple(value)


def _by_server(value: Any) -> Any:
    if not isinstance(value, dict) or not value:
        raise ValueError('a source for each server, such as {server0 = "texts/"}')
    return value


class Mixed(Table):
    """One entry of `data.mixture`."""

    source: Text
    weight: Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)] = 1.0


class Data(Table):
    """`[data]`."""

    source: Text | None = Field(
        default="stdlib",
        description="Training data: a text file or a folder of them, hf:NAME or hf:FOLDER for a dataset of "
        "the datasets library, a .npy or .bin file of tokens, module:function or file.py:function of your "
        "own, or stdlib, the sources of Python's standard library. Not used if mixture is set",
    )
    mixture: Annotated[tuple[Mixed, ...], Field(max_length=1000), BeforeValidator(_list)] | None = Field(
        default=None,
        description="Several sources to learn from, each with a weight: its share of the samples, relative "
        "to the other weights",
        examples=[
            (
                {"source": "texts/", "weight": 3.0},
                {"source": "hf:owner/name,split=train", "weight": 1.0},
            )
        ],
    )
    private: Annotated[dict[Text, Text], BeforeValidator(_by_server)] | None = Field(
        default=None,
        description="Samples that only one server may read, in addition to those of source: the server's "
        "name, as in the cluster, and a source on that server",
        examples=[{"server0": "/data/own"}],
    )
    tokenizer: Text = Field(
        default="auto",
        description="How text becomes tokens: auto is the tokenizer in the model's folder if there is one, "
        "else bytes; or bytes, or the folder of another transformers tokenizer",
    )
    length: Annotated[int, Field(ge=2, le=2**24)] = Field(
        default=128,
        description="Tokens of a sample. By default the context of a gpt: model, and for an hf: model its "
        "context, at most 1,024",
    )
    packing: Literal["stream", "documents", "none"] | None = Field(
        default=None,
        description="How documents become samples: stream puts one after the other and cuts anywhere, "
        "documents puts several into a sample so that none attends to another, none gives each "
        "a sample of its own. By default none for conversations, else stream",
        examples=["documents"],
    )
    evaluation_fraction: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = Field(
        default=0.05,
        description="Share of the data, at its end, held out for evaluation; 0 turns evaluation off. Not "
        "used if evaluation_source is set",
    )
    evaluation_source: Text | None = Field(
        default=None,
        description="Separate data for evaluation, in the notation of source",
        examples=["evaluation.txt"],
    )
    text_column: Text | None = Field(
        default=None,
        description="Column of a dataset with the text, the tokens or the messages of conversations. By "
        "default input_ids, else text, else messages, else the only column with text",
        examples=["text"],
    )
    pattern: Text = Field(
        default="*", description="Pattern of the names of the files to read in a folder and its subfolders"
    )
    dtype: Literal["uint16", "uint32"] = Field(default="uint16", description="Number format of a .bin file")
    num_workers: Annotated[int, Field(ge=0, le=256)] = Field(
        default=0, description="Processes that load samples, for a slow dataset of your own; 0 uses a thread"
    )
    prefetch: Annotated[int, Field(ge=0, le=1024)] = Field(
        default=2, description="Number of batches to load in advance"
    )
    seed: Seed = Field(default=0, description="Random seed of the order of samples")
    shuffle_buffer: Annotated[int, Field(ge=0, le=10**8)] = Field(
        default=1000, description="Rows of a stream (streaming=true) to shuffle among; 0 keeps their order"
    )

    @property
    def named(self) -> str:
        """The source, or all of a mixture, in a sentence."""
        return self.source or ", ".join(one.source for one in self.mixture or ())

    @model_validator(mode="before")
    @classmethod
    def _one_of_two(cls, data: Any) -> Any:
        return giving_way(giving_way(data, "evaluation_fraction", "evaluation_source"), "source", "mixture")
