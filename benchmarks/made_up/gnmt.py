"""GNMT by arithmetic: the translation models of PipeDream's paper, with 8 and with 16 LSTM layers.

Wu et al., "Google's Neural Machine Translation System" (2016), as in the models of msr-fiddle/pipedream on
GitHub (`runtime/translation`, commit 11c40c01): 1,024 wide, 32,320 words. The encoder's first layer runs in
both directions and its second reads both. The decoder's first layer has attention, and the others read its
context beside their own input. Of each micro-batch of 64 sentences 50 tokens are counted, as in the
profile that is published with that code.

A multiply and an add are two operations, and a backward has twice those of a forward. In the published
profile of a V100 an LSTM layer of 1,024 takes 6.9 ms forward and 13.5 ms backward for these tokens, which is
half of the device's 15.7 · 10¹² operations of float32 a second. All units here attain that half.
"""

from benchmarks.made_up.models import profile_of
from bireme.profile.profile import Profile

MICRO_BATCH, _TOKENS = 64, 50
_WIDTH, _WORDS = 1_024, 32_320
_FLOAT_BYTES = 4
_OPERATIONS_PER_S = 15.7e12 / 2


def gnmt(layers: int) -> Profile:
    """The profile of a model with half of these layers in the encoder and half in the decoder."""
    table, attention = _WORDS * _WIDTH, 2 * _WIDTH**2
    each = layers // 2
    encoder = [2 * _lstm(_WIDTH), _lstm(2 * _WIDTH), *[_lstm(_WIDTH)] * (each - 2)]
    decoder = [_lstm(_WIDTH) + attention, *[_lstm(2 * _WIDTH)] * (each - 1)]
    multiplied = [0, *encoder, *decoder, table]
    parameters = [table, *encoder, decoder[0] + table, *decoder[1:], table]
    # Of a token: its vector, both directions of the first layer, and in the decoder the context as well.
    crossing = [1, 2, *[1] * (each - 1), *[2] * each]
    token_bytes = _FLOAT_BYTES * _WIDTH * _TOKENS
    forward_s = [2.0 * one * _TOKENS / _OPERATIONS_PER_S for one in multiplied]
    return profile_of(
        forward_s,
        [2 * one for one in forward_s],
        sizes=(MICRO_BATCH,),
        parameter_bytes=[_FLOAT_BYTES * one for one in parameters],
        kept_bytes=[token_bytes, *[8 * token_bytes] * layers, _FLOAT_BYTES * _WORDS * _TOKENS],
        boundary_bytes=[*(one * token_bytes for one in crossing), 0],
    )


def _lstm(inputs: int) -> int:
    """The weights of a layer: four gates read the input and the state."""
    return 4 * _WIDTH * (inputs + _WIDTH)
