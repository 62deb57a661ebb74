"""Decoder-only transformers as sizes: built-in ones by name, others by the `config.json` of their folder.

Sizes are enough to count parameters, operations and bytes, without torch and without weights. The model
itself is built by `sources.py`.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bireme.documents import read_json_object
from bireme.errors import BiremeError, closest

METADATA = ".metadata"
"""A checkpoint of torch.distributed.checkpoint has this file."""
LARGEST = 2**24
"""The bound of each size."""


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The sizes of a decoder-only transformer.

    `width` is the length of a token's vector, `inner_width` that between the maps of a feed-forward half.
    Queries have `heads` of `head_width`, keys and values `shared_heads`. If `is_gated`, the feed-forward half
    has two maps up and a product of both. `num_norms` are the norms of each half. `learns_positions` if
    positions have a table. `tied` if the head multiplies by the table of tokens.

    In a mixture each feed-forward half has several `experts` of `inner_width`, and a router sends each token
    through `active_experts` of them. If `has_sinks`, each head of queries has a weight of its own in its
    attention, and all maps and the router have biases.
    """

    name: str
    family: str
    layers: int
    width: int
    inner_width: int
    heads: int
    shared_heads: int
    head_width: int
    vocab: int
    context: int
    tied: bool
    is_gated: bool = True
    num_norms: int = 1
    norm_values: int = 1
    norms_heads: bool = False
    has_query_bias: bool = False
    has_biases: bool = False
    learns_positions: bool = False
    experts: int = 1
    active_experts: int = 1
    has_sinks: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "width", "inner_width", "heads", "shared_heads", "head_width", "vocab"):
            if not 1 <= (size := getattr(self, name)) <= LARGEST:
                raise BiremeError(f"The {name} of {self.name} is {size}; it must be 1 to {LARGEST:,}.")
        if self.heads % self.shared_heads:
            raise BiremeError(
                f"{self.name} has {self.heads} heads of queries and {self.shared_heads} of keys; the first "
                "must be a multiple of the second."
            )
        if not 1 <= self.active_experts <= self.experts <= LARGEST:
            raise BiremeError(
                f"{self.name} sends a token through {self.active_experts} of {self.experts} experts; it must "
                "be 1 to all."
            )

    @property
    def is_mixture(self) -> bool:
        """Whether its feed-forward halves have several experts."""
        return self.experts > 1

    @property
    def query_width(self) -> int:
        """Of all queries of a token."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """Of all keys of a token, or of all values."""
        return self.shared_heads * self.head_width

    @property
    def attention_maps(self) -> tuple[tuple[int, int], ...]:
        """The linear maps of an attention half, as lengths of their input and output."""
        query, key = self.query_width, self.key_width
        if self.has_biases:
            return ((self.width, query + 2 * key), (query, self.width))
        return ((self.width, query), (self.width, key), (self.width, key), (query, self.width))

    @property
    def feed_forward_maps(self) -> tuple[tuple[int, int], ...]:
        """The linear maps of a feed-forward half, or of one of its experts."""
        up = ((self.width, self.inner_width),) * (2 if self.is_gated else 1)
        return (*up, (self.inner_width, self.width))

    @property
    def attention_parameters(self) -> int:
        """Of an attention half."""
        bias = self.query_width + 2 * self.key_width if self.has_query_bias or self.has_sinks else 0
        bias += self.width + self.heads if self.has_sinks else 0
        bias += 2 * self.head_width if self.norms_heads else 0
        return _of_maps(self.attention_maps, self.has_biases) + bias + self._of_norms

    @property
    def feed_forward_parameters(self) -> int:
        """Of a feed-forward half, with all experts and the router."""
        router = (self.width + self.has_sinks) * self.experts if self.is_mixture else 0
        return self.experts * self.expert_parameters + router + self._of_norms

    @property
    def expert_parameters(self) -> int:
        """Of one expert; of the maps of a feed-forward half that has no experts."""
        return _of_maps(self.feed_forward_maps, self.has_biases or self.has_sinks)

    @property
    def embedding_parameters(self) -> int:
        """Of the table of tokens, and of positions if there is one."""
        return self.vocab * self.width + (self.context * self.width if self.learns_positions else 0)

    @property
    def num_parameters(self) -> int:
        """Of the whole model; tied weights count once."""
        halves = self.attention_parameters + self.feed_forward_parameters
        head = self.norm_values * self.width + (0 if self.tied else self.vocab * self.width)
        return self.layers * halves + self.embedding_parameters + head

    @property
    def num_active(self) -> int:
        """The parameters that a token passes: all but those of the experts that it is not sent to."""
        idle = (self.experts - self.active_experts) * self.expert_parameters
        return self.num_parameters - self.layers * idle

    @property
    def _of_norms(self) -> int:
        return self.num_norms * self.norm_values * self.width


def _of_maps(maps: tuple[tuple[int, int], ...], has_biases: bool) -> int:
    return sum(rows * columns + (columns if has_biases else 0) for rows, columns in maps)


# Families of transformers: in which way each differs from Llama.

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "phi3": {},
    "qwen2": {"has_query_bias": True},
    "qwen3": {"norms_heads": True},
    "gemma2": {"num_norms": 2, "tied": True},
    "gpt2": {
        "is_gated": False,
        "norm_values": 2,
        "has_biases": True,
        "learns_positions": True,
        "tied": True,
    },
    "mixtral": {},
    "qwen3_moe": {"norms_heads": True},
    "gpt_oss": {"has_sinks": True},
}

_HEAD_WIDTHS = {"gemma2": 256, "qwen3": 128, "qwen3_moe": 128, "gpt_oss": 64}
"""Of a family whose heads do not divide the width, unless a configuration gives another."""


@cache
def _built_in() -> dict[str, TransformerShape]:
    """The built-in shapes by name."""
    families = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = {}
    for family, shapes in families.items():
        for name, given in shapes.items():
            usual = {"head_width": _HEAD_WIDTHS.get(family, given["width"] // given["heads"])}
            found[name] = _shape(name, family, usual | given)
    return found


def built_in_shapes() -> tuple[str, ...]:
    """The names of the built-in shapes."""
    return tuple(_built_in())


def shape_of(text: str) -> TransformerShape:
    """The built-in shape of that name, or the shape of the model in a folder with a `config.json`."""
    if text.lower() in _built_in():
        return _built_in()[text.lower()]
    folder = Path(text.removeprefix("hf:"))
    if folder.is_dir():
        return _of_folder(folder)
    raise BiremeError(
        f"There is no model {text!r}: neither a folder nor a built-in shape. "
        f"{closest(text, built_in_shapes())}"
    )


def _shape(name: str, family: str, given: dict[str, Any]) -> TransformerShape:
    return TransformerShape(name, family, **({"tied": False} | _FAMILIES[family] | given))


_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "inner_width": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "shared_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions"),
    "tied": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts"),
    "active_experts": ("num_experts_per_tok",),
}
"""The names that configurations of transformers have for the sizes."""


def _of_folder(folder: Path) -> TransformerShape:
    path = folder / "config.json"
    if not path.is_file():
        raise BiremeError(f"{folder} has no config.json. Name a folder of a transformers model.")
    config = read_json_object(path)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise BiremeError(
            f"{path} has model_type {family!r}, whose sizes are not known here. Known are: "
            f"{', '.join(_FAMILIES)}. `bireme plan` captures any model."
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise BiremeError(
            f"{path} has experts in some layers only, which is not counted here. `bireme plan` captures any "
            "model."
        )
    given = {
        name: config[key]
        for name, keys in _KEYS.items()
        for key in reversed(keys)
        if config.get(key) is not None
    }
    for name in ("layers", "width", "heads", "vocab"):
        if name not in given:
            raise BiremeError(f"{path} lacks {_KEYS[name][0]}. Add it, or name a built-in shape.")
    for name, value in given.items():
        if type(value) is not (bool if name == "tied" else int):
            raise BiremeError(f"{path} has {name} = {value!r}; it must be {_KIND[name == 'tied']}.")
    width, heads = given["width"], given["heads"]
    usual = {
        "inner_width": 4 * width,
        "shared_heads": heads,
        "head_width": _HEAD_WIDTHS.get(family, width // max(heads, 1)),
        "context": LARGEST,
    }
    return _shape(folder.resolve().name, family, usual | given)


_KIND = {False: "a whole number", True: "true or false"}


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights of transformers or of torch.distributed.checkpoint beside its sizes."""
    patterns = "*.safetensors", "pytorch_model*.bin", METADATA
    return any(any(folder.glob(pattern)) for pattern in patterns)
