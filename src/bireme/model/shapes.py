"""Decoder-only transformers as sizes: built-in ones by name, others by the `config.json` of their folder.

Sizes are enough to count parameters, operations and bytes, without torch and without weights. The model
itself is built by `sources.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme.documents import read_json_object
from bireme.errors import BiremeError, closest

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

_SIZES = ("layers", "width", "inner_width", "heads", "shared_heads", "vocab", "context")
"""What the numbers of a built-in shape are."""

_BUILT_IN: dict[str, dict[str, tuple[int, int, int, int, int, int, int]]] = {
    "llama": {
        "llama-2-7b": (32, 4096, 11008, 32, 32, 32000, 4096),
        "llama-2-13b": (40, 5120, 13824, 40, 40, 32000, 4096),
        "llama-2-70b": (80, 8192, 28672, 64, 8, 32000, 4096),
        "llama-3-8b": (32, 4096, 14336, 32, 8, 128256, 8192),
        "llama-3-70b": (80, 8192, 28672, 64, 8, 128256, 8192),
        "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256, 131072),
        "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128256, 131072),
        "llama-3.2-1b": (16, 2048, 8192, 32, 8, 128256, 131072),
        "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128256, 131072),
        "tinyllama-1.1b": (22, 2048, 5632, 32, 4, 32000, 2048),
        "smollm2-135m": (30, 576, 1536, 9, 3, 49152, 8192),
        "smollm2-360m": (32, 960, 2560, 15, 5, 49152, 8192),
        "smollm2-1.7b": (24, 2048, 8192, 32, 32, 49152, 8192),
    },
    "mistral": {"mistral-7b": (32, 4096, 14336, 32, 8, 32000, 32768)},
    "qwen2": {
        "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 151936, 32768),
        "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 151936, 32768),
        "qwen2.5-3b": (36, 2048, 11008, 16, 2, 151936, 32768),
        "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064, 32768),
        "qwen2.5-14b": (48, 5120, 13824, 40, 8, 152064, 32768),
        "qwen2.5-32b": (64, 5120, 27648, 40, 8, 152064, 32768),
        "qwen2.5-72b": (80, 8192, 29568, 64, 8, 152064, 32768),
    },
    "qwen3": {
        "qwen3-0.6b": (28, 1024, 3072, 16, 8, 151936, 40960),
        "qwen3-1.7b": (28, 2048, 6144, 16, 8, 151936, 40960),
        "qwen3-4b": (36, 2560, 9728, 32, 8, 151936, 40960),
        "qwen3-8b": (36, 4096, 12288, 32, 8, 151936, 40960),
        "qwen3-14b": (40, 5120, 17408, 40, 8, 151936, 40960),
        "qwen3-32b": (64, 5120, 25600, 64, 8, 151936, 40960),
    },
    "gemma2": {
        "gemma-2-2b": (26, 2304, 9216, 8, 4, 256000, 8192),
        "gemma-2-9b": (42, 3584, 14336, 16, 8, 256000, 8192),
        "gemma-2-27b": (46, 4608, 36864, 32, 16, 256000, 8192),
    },
    "phi3": {
        "phi-3-mini": (32, 3072, 8192, 32, 32, 32064, 4096),
        "phi-4": (40, 5120, 17920, 40, 10, 100352, 16384),
    },
    "gpt2": {
        "gpt2": (12, 768, 3072, 12, 12, 50257, 1024),
        "gpt2-medium": (24, 1024, 4096, 16, 16, 50257, 1024),
        "gpt2-large": (36, 1280, 5120, 20, 20, 50257, 1024),
        "gpt2-xl": (48, 1600, 6400, 25, 25, 50257, 1024),
    },
    "mixtral": {
        "mixtral-8x7b": (32, 4096, 14336, 32, 8, 32000, 32768),
        "mixtral-8x22b": (56, 6144, 16384, 48, 8, 32768, 65536),
    },
    "qwen3_moe": {
        "qwen3-30b-a3b": (48, 2048, 768, 32, 4, 151936, 40960),
        "qwen3-235b-a22b": (94, 4096, 1536, 64, 4, 151936, 40960),
    },
    "gpt_oss": {
        "gpt-oss-20b": (24, 2880, 2880, 64, 8, 201088, 131072),
        "gpt-oss-120b": (36, 2880, 2880, 64, 8, 201088, 131072),
    },
}

_UNUSUAL: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"experts": 8, "active_experts": 2},
    "mixtral-8x22b": {"experts": 8, "active_experts": 2},
    "qwen3-30b-a3b": {"experts": 128, "active_experts": 8},
    "qwen3-235b-a22b": {"experts": 128, "active_experts": 8},
    "gpt-oss-20b": {"experts": 32, "active_experts": 4},
    "gpt-oss-120b": {"experts": 128, "active_experts": 4},
    "gemma-2-27b": {"head_width": 128},
    **{
        name: {"tied": True}
        for name in (
            *("llama-3.2-1b", "llama-3.2-3b", "smollm2-135m", "smollm2-360m", "smollm2-1.7b"),
            *("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"),
        )
    },
}


def built_in_shapes() -> tuple[str, ...]:
    """The names of the built-in shapes."""
    return tuple(name for shapes in _BUILT_IN.values() for name in shapes)


def shape_of(text: str) -> TransformerShape:
    """The built-in shape of that name, or the shape of the model in a folder with a `config.json`."""
    for family, shapes in _BUILT_IN.items():
        if text.lower() in shapes:
            given: dict[str, Any] = dict(zip(_SIZES, shapes[text.lower()], strict=True))
            given["head_width"] = _HEAD_WIDTHS.get(family, given["width"] // given["heads"])
            return _shape(text.lower(), family, given | _UNUSUAL.get(text.lower(), {}))
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
