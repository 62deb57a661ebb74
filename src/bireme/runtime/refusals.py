"""What a pipeline cannot do together."""

from bireme.codec.gradient_words import GradientForm
from bireme.codec.sum_words import DENSE, SumCodec
from bireme.errors import BiremeError
from bireme.runtime.averaging.averaging import Averaging
from bireme.runtime.paging.rank_paging import RankPaging
from bireme.runtime.quorum.agreement import QuorumAgreement

__all__ = ["check_together"]


def check_together(
    shard: str,
    form: GradientForm | None,
    codec: SumCodec,
    paging: RankPaging | None,
    agreement: QuorumAgreement | None,
    averaging: Averaging | None,
) -> None:
    """Refuse what does not go together, before anything is open."""
    if agreement is not None and (paging is not None or form is not None):
        raise BiremeError(
            "Replicas that may die send whole gradients, which lie on their devices. Leave out paging "
            "and principal components, or the agreement."
        )
    if form is not None and paging is not None:
        raise BiremeError(
            f'The plan pages, which keeps gradients whole, and gradients are kept as "{form}". Leave '
            "out one of the two."
        )
    if shard == "none":
        return
    also = {
        "replicas that may die": agreement is not None,
        "replicas that average weights": averaging is not None,
        "paging": paging is not None,
        "gradients as principal components": form is not None,
        f'sums through "{codec}"': codec != DENSE,
    }
    for what, is_asked in also.items():
        if is_asked:
            raise BiremeError(
                f'Replicas share the {shard} (shard = "{shard}"), which does not go with {what}. Leave '
                "out one of the two."
            )
