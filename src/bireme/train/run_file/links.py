"""`[links]` of a run file: how what crosses the borders between stages becomes fewer bytes."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from bireme.codec.border import BorderCodecs
from bireme.codec.description import parse_codec
from bireme.train.run_file.table import Share, Table, parsed

__all__ = ["AUTO", "BorderLinks", "LinkSchedule", "LinksTable"]

AUTO = "auto"


def _codec(value: str) -> str:
    return str(parsed(value, parse_codec, "a codec"))


def _codec_or_auto(value: str) -> str:
    return AUTO if value.strip().lower() == AUTO else _codec(value)


def _border(value: str) -> str:
    first, dash, second = value.strip().partition("-")
    if not dash or not first.isdecimal() or not second.isdecimal() or int(second) != int(first) + 1:
        raise ValueError('two neighbouring stages, such as "0-1"')
    return f"{int(first)}-{int(second)}"


def _borders(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError('one table or more, such as [{border = "0-1", forward = "int8"}]')
    return tuple(value)


Codec = Annotated[str, AfterValidator(_codec)]
CodecOrAuto = Annotated[str, AfterValidator(_codec_or_auto)]


class BorderLinks(Table):
    """One entry of `links.borders`."""

    border: Annotated[str, AfterValidator(_border)]
    forward: Codec
    backward: Codec | None = None

    @property
    def number(self) -> int:
        """The stage before the border."""
        return int(self.border.partition("-")[0])

    @property
    def codecs(self) -> BorderCodecs:
        """Both directions; the gradient goes as the activation does unless it is said."""
        return BorderCodecs(self.forward, self.backward or self.forward)


class LinkSchedule(Table):
    """`[links.schedule]`."""

    first_fraction: Share = Field(
        default=0.0, description="Share of the steps, at the beginning of the run, with first_codec"
    )
    first_codec: Codec = Field(
        default="int8",
        description="Codec of all borders in the first part of the run, in the notation of links.codec",
    )
    last_fraction: Share = Field(
        default=0.0,
        description="Share of the steps, at the end of the run, with last_codec: a model that was trained "
        "with keep has adapted to missing entries, and needs some steps without it",
    )
    last_codec: Codec = Field(
        default="int8",
        description="Codec of all borders in the last part of the run, in the notation of links.codec",
    )


class LinksTable(Table):
    """`[links]`."""

    codec: CodecOrAuto | None = Field(
        default=None,
        description="How activations and their gradients are sent between stages: none sends them as they "
        "are, bfloat16, int8, int7 to int1 (bits a value), keep:SHARE:BITS (the largest entries of each "
        "token), keep:SHARE:BITS:BATCHES (those of the whole tensor, by a threshold that holds for so "
        "many batches), MODULE:ATTRIBUTE (a codec of your own), or auto, which lets the planner choose by "
        "the speed of the links. By default the plan decides: none, unless the plan comes from a file",
        examples=["int8"],
    )
    borders: Annotated[tuple[BorderLinks, ...], Field(max_length=4096), BeforeValidator(_borders)] | None = (
        Field(
            default=None,
            description="Codecs of single borders, each named by the stages on both sides; the gradient has "
            "the codec of the activation unless backward names another",
            examples=[({"border": "0-1", "forward": "int8", "backward": "int4"},)],
        )
    )
    schedule: LinkSchedule = Field(
        default_factory=LinkSchedule, description="Other codecs at the beginning and at the end of a run."
    )
