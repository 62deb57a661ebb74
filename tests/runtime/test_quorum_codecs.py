"""Replicas that may die sum through codecs: one process with the same codec gets the same numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bireme.codec.sum_description import parse_sum_codec
from bireme.plan.plan import Plan
from bireme.schedule.instruction import Instruction
from bireme.sync.coded import GradientSummation
from bireme.sync.coordinator.messages import RankId
from bireme.sync.exchange import BatchGradients, SentBytes
from bireme.sync.feedback import RESIDUAL
from bireme.sync.group import SingleRankGroup
from bireme.sync.rounds.round_group import Stamp
from tests.runtime.test_coded_sums import WIDTH, layers, tolerance_of
from tests.runtime.test_member_sums import Mesh
from tests.runtime.test_quorum import assert_as_one_process
from tests.support.engine_parity import Setting
from tests.support.mortal_replicas import Killed, Replicas
from tests.support.small_models import real_batches
from tests.support.together import run_threads

BATCH = 16


@pytest.fixture(autouse=True)
def _each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle knows no bundles."""
    monkeypatch.setattr("bireme.sync.coded_messages.MOST_BUNDLED", 0)


def replicas_of(num_batches: int, setting: Setting, num: int = 2, **more: object) -> Replicas:
    data = real_batches(BATCH * num_batches, 1, WIDTH)[0]
    return Replicas(layers(), setting, num, data, num_batches, BATCH, **more)  # type: ignore[arg-type]


def setting_of(schedule: str, codec: str, optimizer: str = "sgd", **more: object) -> Setting:
    plan = Plan((1,), 4, schedule, updates_early=False)
    return Setting(plan, optimizer=optimizer, sum_codec=codec, **more)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("schedule", "codec"),
    [
        ("1f1b", "int8"),
        ("2bw", "int4"),
        ("1f1b", "threshold:0.05:3"),
        ("2bw", "threshold:0.05:3"),
        ("1f1b", "lowrank:2:1"),
        ("2bw", "lowrank:2:1"),
    ],
)
def test_two_replicas_sum_through_a_codec_what_one_process_does(schedule: str, codec: str) -> None:
    replicas = replicas_of(6, setting_of(schedule, codec))
    replicas.run()

    assert_as_one_process(replicas, tolerance=tolerance_of(codec))
    assert [line.members for line in replicas.hub.rounds] == [(0, 1)] * 6


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int2", "threshold:0.05:3", "lowrank:2:1"])
def test_a_replica_that_heals_has_the_bits_of_its_peers_and_what_its_donor_had_not_sent(codec: str) -> None:
    """Residuals of the survivor outlive the other one's death; bases of low rank are the same on all."""
    healed: dict[RankId, dict[str, dict[str, Tensor]]] = {}

    def kill(rank: RankId, step: Instruction) -> None:
        pipeline = replicas.pipelines.get(rank)
        if rank.life and rank not in healed and pipeline is not None:
            feedback = pipeline._reducer.feedback
            assert feedback is not None
            healed[rank] = {name: dict(kept) for name, kept in feedback.after(feedback.num_batches).items()}
        if rank == RankId(1, 0, 0) and step.batch == 3:
            raise Killed

    replicas: Replicas = replicas_of(
        24,
        setting_of("1f1b", codec),
        3,
        on_instruction=kill,
        revives=True,
        pace=lambda _rank, batch: replicas.wait_until_present() if batch > 6 else None,
    )
    replicas.run()

    done = {rank: seen for rank, seen in replicas.seen.items() if seen.is_done}
    assert {rank.replica for rank in done} == {0, 1, 2}
    last = [seen.weights[23] for rank, seen in done.items() if rank.stage == 0]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
    assert replicas.hub.epochs[:3] == [(0, 1, 2), (0, 2), (0, 1, 2)]
    kept = [kept for of_rank in healed.values() for kept in of_rank.values()]
    assert kept
    assert any(bool(one[RESIDUAL].count_nonzero()) for one in kept)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "num"), [("1f1b", 2), ("2bw", 2), ("1f1b", 3)])
def test_components_of_the_full_rank_train_as_whole_gradients_do(schedule: str, num: int) -> None:
    names = tuple(f"layers.{at}.weight" for at in (0, 2, 4))
    whole = setting_of(schedule, "none", clip_norm=0.5)
    setting = replace(whole, gradient=f"principal:{WIDTH}", gradient_of=names)
    replicas = replicas_of(5, setting, num)
    replicas.run()
    replicas.setting = whole

    assert_as_one_process(replicas, tolerance=1e-6)


@pytest.mark.slow
def test_components_go_on_when_a_replica_dies_and_comes_back() -> None:
    def kill(rank: RankId, step: Instruction) -> None:
        if rank == RankId(1, 0, 1) and step.batch == 3:
            raise Killed

    replicas: Replicas = replicas_of(
        20,
        setting_of("2bw", "none", "adamw", gradient="principal:3"),
        on_instruction=kill,
        revives=True,
        pace=lambda _rank, batch: replicas.wait_until_present() if batch > 6 else None,
    )
    replicas.run()

    done = {rank: seen for rank, seen in replicas.seen.items() if seen.is_done}
    assert {rank.replica for rank in done} == {0, 1}
    for stage in range(2):
        one, other = (seen.weights[19] for rank, seen in done.items() if rank.stage == stage)
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("codec", ["int2", "threshold:0.05:3", "lowrank:2:1"])
def test_an_attempt_that_is_repeated_over_other_members_sends_the_same(codec: str) -> None:
    """So what was not sent is the same as if there had been one attempt."""
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(30, 30, dtype=torch.float64, generator=generator) for _ in range(4)]
    parsed = parse_sum_codec(codec)

    def summed(
        me: int, coded: GradientSummation, mesh: Mesh, members: tuple[int, ...], attempt: int
    ) -> Tensor:
        found = gradients[me].clone()
        coded.sum(
            mesh.group(me, members, Stamp(0, 4, attempt)),
            ["w"],
            BatchGradients({"w": found}, {"w"}),
            1 << 20,
            SentBytes(),
            batch=4,
            factors=[1.5 / len(members)] * len(members),
            sender=me,
        )
        return found

    def residual_of(me: int, mesh: Mesh, *, is_repeated: bool) -> tuple[Tensor, Tensor]:
        coded = GradientSummation(replace(parsed, whole_steps=0))
        assert coded.feedback is not None
        if is_repeated:
            summed(me, coded, mesh, (0, 1, 2, 3), 0)
        found = summed(me, coded, mesh, (0, 1, 2), 1) if me < 3 else gradients[me]
        coded.settle(counts=True)
        return found, coded.feedback.after(coded.feedback.num_batches)["w"][RESIDUAL]

    twice, once = Mesh(4), Mesh(3)
    repeated = run_threads(4, lambda me: residual_of(me, twice, is_repeated=True))[:3]
    plain = run_threads(3, lambda me: residual_of(me, once, is_repeated=False))
    for (one, kept), (other, also) in zip(repeated, plain, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(kept, also)
    assert torch.equal(repeated[0][0], repeated[1][0])


def test_the_last_member_sends_itself_all_that_it_had_not_sent() -> None:
    coded, gradient = (
        GradientSummation(parse_sum_codec("threshold:0.05:3")),
        torch.ones(300, dtype=torch.float64),
    )
    assert coded.feedback is not None
    coded.feedback.load({"w": {RESIDUAL: torch.full((300,), 0.5, dtype=torch.float64)}}, num_batches=3)
    found = gradient.clone()
    gradients = BatchGradients({"w": found}, {"w"})
    coded.sum(SingleRankGroup(), ["w"], gradients, 1 << 20, SentBytes(), batch=3, factors=[2.0], sender=1)
    coded.settle(counts=True)

    assert torch.equal(found, torch.full((300,), 3.0, dtype=torch.float64))
    assert not coded.feedback.after(coded.feedback.num_batches)["w"][RESIDUAL].count_nonzero()
